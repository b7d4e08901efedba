"""Which host a slot goes to that is nobody's. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush


def share(
    wanted: Iterable[int],
    owners: Mapping[int, str],
    known: Collection[str],
    rooms: Mapping[str, float],
    named: Mapping[int, Collection[str]],
) -> dict[int, str]:
    """The new owners of those slots that are wanted and whose owner is not known: who the map names, else whoever has
    the fewest, by name. What finds no room is left out.

    owners: agents by slot. rooms: for how many slots there is room with each agent that may get any. named: by slot,
    the agents that the map means.
    """
    slots = sorted(wanted)
    counts = Counter(owner for i in slots if (owner := owners.get(i)) is not None)
    free = [(counts[agent_id], agent_id) for agent_id, room in rooms.items() if counts[agent_id] < room]
    heapify(free)
    found: dict[int, str] = {}
    for worker_id in (i for i in slots if owners.get(i) not in known):
        while free and free[0][0] != counts[free[0][1]]:
            _, agent_id = heappop(free)  # it has got more meanwhile
            if counts[agent_id] < rooms[agent_id]:
                heappush(free, (counts[agent_id], agent_id))
        if not free:
            break
        there = (i for i in named.get(worker_id, ()) if counts[i] < rooms.get(i, 0))
        owner = found[worker_id] = next(there, free[0][1])
        counts[owner] += 1
    return found
