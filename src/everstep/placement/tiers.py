"""Who moves what from host to host in a reduction, so that the tree's sums cross as seldom as it allows. Pure.

Members of one host share memory. Each block has its owner, who finishes the tree in it. Of every other host one member,
the owner's *courier* there, sends it that host's sums of its blocks, which nobody else sends, and takes the result,
which the others of its host read in its memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from everstep.base.ports import Node
from everstep.placement.tree import cover


@dataclass(frozen=True)
class Tiers:
    """hosts: the members of each host by worker id, ascending; hosts in the order of their first members."""

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, host_of: Mapping[int, str]) -> Tiers:
        """host_of: where each member is, by worker id."""
        by_host: dict[str, list[int]] = {}
        for worker_id in sorted(host_of):
            by_host.setdefault(host_of[worker_id], []).append(worker_id)
        return cls(tuple(map(tuple, by_host.values())))

    @cached_property
    def _couriers(self) -> dict[tuple[int, int], int]:
        """By host (its position) and owner. Owners are dealt out in turn, so that all members carry about as much."""
        found: dict[tuple[int, int], int] = {}
        for position, there in enumerate(self.hosts):
            elsewhere = sorted(w for k, others in enumerate(self.hosts) if k != position for w in others)
            for turn, owner in enumerate(elsewhere):
                found[position, owner] = there[turn % len(there)]
        return found

    def inside(self, worker_id: int) -> tuple[int, ...]:
        """All members of its host, itself included."""
        return self.hosts[self._position(worker_id)]

    def outside(self, worker_id: int) -> list[tuple[int, tuple[int, ...]]]:
        """Of the other hosts, beginning with the next one: who of it carries for this owner, and all its members."""
        at, size = self._position(worker_id), len(self.hosts)
        turns = [(at + k) % size for k in range(1, size)]
        return [(self._couriers[k, worker_id], self.hosts[k]) for k in turns]

    def charges(self, worker_id: int) -> list[int]:
        """The owners on other hosts that this member carries for, ascending."""
        at = self._position(worker_id)
        return sorted(owner for (k, owner), courier in self._couriers.items() if k == at and courier == worker_id)

    def holder(self, worker_id: int, owner: int) -> int:
        """In whose memory a member reads the result of an owner's blocks."""
        return owner if owner in self.inside(worker_id) else self._couriers[self._position(worker_id), owner]

    def _position(self, worker_id: int) -> int:
        return self._positions[worker_id]

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {worker_id: k for k, there in enumerate(self.hosts) for worker_id in there}


def folded(nodes: Iterable[Node], n_lanes: int) -> dict[Node, tuple[Node, ...]]:
    """The fewest nodes that disjoint ones can be added up to, ascending, and of which of them each is the sum."""
    given = sorted(nodes)
    tops = cover((lane for node in given for lane in range(*node)), n_lanes)
    found: dict[Node, list[Node]] = {top: [] for top in tops}
    for node in given:
        found[tops[bisect_right(tops, node.lo, key=lambda top: top.lo) - 1]].append(node)
    return {top: tuple(parts) for top, parts in found.items()}
