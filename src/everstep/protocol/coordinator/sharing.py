"""Hosts for slots that have none. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from heapq import heappop, heappush
from math import inf

from everstep.base.domains import LABELS, Domains


def share(
    wanted: Iterable[int],
    owners: Mapping[int, str],
    known: Collection[str],
    rooms: Mapping[str, float],
    named: Mapping[int, Collection[str]],
    where: Mapping[str, Domains],
) -> dict[int, str]:
    """The new owners of wanted slots without a known owner.

    The map names the owner, else it is the agent with the fewest slots; on a tie the agent in the domain with the
    fewest, the widest domain first, and then by name. Slots that find no room are left out. owners: agents by slot.
    rooms: free slots of each agent that may get any. named: agents that the map names, by slot. where: failure
    domains of the agents' hosts.
    """
    slots = sorted(wanted)
    homeless = [i for i in slots if owners.get(i) not in known]
    if not homeless:
        return {}  # a thousand agents say hello one by one, and none of them need look at the others
    owned = Counter(owner for i in slots if (owner := owners.get(i)) is not None)
    if all(owned[agent_id] >= room for agent_id, room in rooms.items()):
        return {}  # nor where all that are there are full, and others have yet to come
    hosts = _Hosts(rooms, where, owned)
    found: dict[int, str] = {}
    for worker_id in homeless:
        chosen = next((i for i in named.get(worker_id, ()) if hosts.counts[i] < rooms.get(i, 0)), None)
        owner = chosen or hosts.next()
        if owner is None:
            break
        found[worker_id] = owner
        hosts.give(owner)
    return found


class _Domain:
    """size: slots in the domain. least: smallest number of slots of an agent in it with room; agents are in the
    innermost domains only."""

    def __init__(self) -> None:
        self.size = 0
        self.least = inf
        self.parts: dict[str, _Domain] = {}
        self._agents: list[tuple[int, str]] = []

    @property
    def first(self) -> str:
        """The one of these agents with the fewest slots."""
        return self._agents[0][1]

    def grow(self, by: int = 1) -> None:
        self.size += by

    def stand(self, agent_id: str, counts: Mapping[str, int]) -> None:
        heappush(self._agents, (counts[agent_id], agent_id))

    def look(self, counts: Mapping[str, int]) -> None:
        """Correct the queue: some agents have got more slots meanwhile."""
        while self._agents and self._agents[0][0] != counts[self._agents[0][1]]:
            heappop(self._agents)
        nearest = [part.least for part in self.parts.values()]
        self.least = min([*nearest, self._agents[0][0]]) if self._agents else min(nearest, default=inf)


class _Hosts:
    """Agents in their domains, with the number of slots of each. A domain is compared only with its neighbours, so
    that a thousand hosts are shared out at once."""

    def __init__(self, rooms: Mapping[str, float], where: Mapping[str, Domains], counts: Counter[str]) -> None:
        self.counts = counts
        self._rooms = rooms
        self._where = where
        self._root = _Domain()
        self._paths: dict[Domains, list[_Domain]] = {}
        for agent_id in dict.fromkeys((*rooms, *counts)):
            path = self._path(agent_id)
            for domain in path:
                domain.grow(counts[agent_id])
            self._stand(agent_id, path)
        for path in self._paths.values():
            self._look(path)

    def give(self, agent_id: str) -> None:
        """The agent has one more slot; its next turn comes with agents that have as many."""
        path = self._path(agent_id)
        self.counts[agent_id] += 1
        for domain in path:
            domain.grow()
        self._stand(agent_id, path)
        self._look(path)

    def next(self) -> str | None:
        """The agent whose turn it is; None if there is no room."""
        domain = self._root
        if domain.least == inf:
            return None
        while domain.parts:
            fewest = [(part.size, name) for name, part in domain.parts.items() if part.least == self._root.least]
            domain = domain.parts[min(fewest)[1]]
        return domain.first

    def _path(self, agent_id: str) -> list[_Domain]:
        domains = self._where.get(agent_id, ())
        if domains not in self._paths:
            labels = dict(domains)
            path = [self._root]
            for kind in LABELS:
                path.append(path[-1].parts.setdefault(labels.get(kind, ""), _Domain()))
            self._paths[domains] = path
        return self._paths[domains]

    def _stand(self, agent_id: str, path: list[_Domain]) -> None:
        if self.counts[agent_id] < self._rooms.get(agent_id, 0):
            path[-1].stand(agent_id, self.counts)

    def _look(self, path: list[_Domain]) -> None:
        for domain in reversed(path):
            domain.look(self.counts)
