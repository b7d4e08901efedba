"""Workers that span hosts: which lives of slots, each on a host of its own, are the parts of one worker. Pure.

Each life looks for others when it begins. The first of a cell is its head, and the only one that becomes a worker. If
one ends, all end. Their next lives look for each other again, so a host with room can replace one that is lost. None of
that is journaled: a part says which cell it belongs to whenever it connects.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence

from everstep.base.cause import Why
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.environment import Environment
from everstep.protocol.messages_base import CellFormed, CellPart


class CellParts:
    """The cells that were formed, and lives that look for one."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._looking: dict[WorkerKey, tuple[str, CellPart]] = {}
        self._cells: dict[WorkerKey, list[CellPart]] = {}

    @property
    def looking(self) -> Iterable[WorkerKey]:
        """Lives that look for others."""
        return self._looking.keys()

    def look(self, connection: str, part: CellPart) -> None:
        """This life looks for others, or has not heard which it has found."""
        self._env.change()
        if part.key in self._cells:
            self._env.send(connection, CellFormed(cell=self._cells[part.key]))
        else:
            self._looking[part.key] = connection, part

    def know(self, cell: Sequence[CellPart]) -> None:
        """These lives are the parts of one worker, the head first."""
        self._cells |= {part.key: list(cell) for part in cell}

    def form(self, hosts: Mapping[WorkerKey, str], size: int) -> None:
        """Make as many cells as there can be. hosts: of lives that look for one and may have one."""
        for keys in matched(hosts, size):
            found = [self._looking.pop(key) for key in keys]
            cell = [part for _, part in found]
            self.know(cell)
            for connection, _ in found:
                self._env.send(connection, CellFormed(cell=cell))

    def cell_of(self, key: WorkerKey) -> list[WorkerKey]:
        """The parts of the worker that this life is a part of, the head first; itself, if it is of none."""
        return [part.key for part in self._cells.get(key, ())] or [key]

    def head_of(self, key: WorkerKey) -> WorkerKey:
        """The head of the worker that this life is a part of; itself, if it is of none."""
        return self.cell_of(key)[0]

    def over(self, key: WorkerKey) -> list[WorkerKey]:
        """This life is over. Returns those that have to end with it."""
        self._looking.pop(key, None)
        return [part.key for part in self._cells.pop(key, ()) if part.key != key]

    def before(self, key: WorkerKey) -> list[WorkerKey]:
        """A new life of a slot is here. Returns those that have to end because an earlier one was a part of theirs."""
        earlier = [k for k in self._cells if k.worker_id == key.worker_id and k.incarnation < key.incarnation]
        return [other for one in earlier for other in self.over(one)]


def matched(hosts: Mapping[WorkerKey, str], size: int) -> list[tuple[WorkerKey, ...]]:
    """Cells of so many lives, each on a host of its own, of those with most lives; in the order of their keys, so the
    least is the head. Lives that are left over are in none."""
    there: dict[str, list[WorkerKey]] = {}
    for key in sorted(hosts, reverse=True):
        there.setdefault(hosts[key], []).append(key)
    found = []
    while len(there) >= size:
        chosen = sorted(there, key=lambda host: (-len(there[host]), there[host][-1]))[:size]
        found.append(tuple(sorted(there[host].pop() for host in chosen)))
        there = {host: keys for host, keys in there.items() if keys}
    return found


def count_cells(slots: Collection[int], size: int, most: int) -> int:
    """How many cells of so many lives, each on a host of its own, there can be, up to `most`. slots: of each host."""
    return bisect_left(range(1, most + 1), True, key=lambda n: sum(min(n, there) for there in slots) < n * size)


def lost_with(key: WorkerKey, why: Why, host: str) -> Why:
    """Why the other parts of a worker end, of which one has ended."""
    where = f" on host {host}" if host else ""
    return Why(why.cause, f"its part{where} (slot {key.worker_id}) was lost: {why.reason}")
