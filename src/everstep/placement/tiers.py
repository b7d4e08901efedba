"""Transfers between hosts in a reduction, arranged so that the tree's sums cross as seldom as it allows. Pure.

Members of one host share memory. One of them, its *courier*, sends and receives for all. Each host has a share of the
blocks: its courier finishes the tree of the sums that the other hosts send it, and sends them the result. The other
members read from their courier's memory.

One courier per host, because several connections would share a link, and TCP shares it unevenly: all waited for the
last one while the wire had less to do. Two hosts of two workers, 45 MB over 100 Mbit/s: steps of 4.33 and 4.59 s with
two connections, 4.06 to 4.19 with one (`bench/wire.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from everstep.base.extents import WHOLE, Runs
from everstep.base.ports import Node
from everstep.placement.shards import divided
from everstep.placement.tree import cover


@dataclass(frozen=True)
class Tiers:
    """Members by host. hosts: worker ids of each host, ascending, the courier first; hosts in the order of couriers."""

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, host_of: Mapping[int, str]) -> Tiers:
        """Tiers of these members. host_of: name of each member's host, by worker id."""
        by_host: dict[str, list[int]] = {}
        for worker_id in sorted(host_of):
            by_host.setdefault(host_of[worker_id], []).append(worker_id)
        return cls(tuple(map(tuple, by_host.values())))

    def shares(self, n_blocks: int) -> dict[int, Runs]:
        """Blocks that each member finishes: a run for each courier, none for the others."""
        none: dict[int, Runs] = {worker_id: () for there in self.hosts for worker_id in there}
        return none | divided((("gradient", n_blocks),), {there[0]: WHOLE for there in self.hosts})

    def inside(self, worker_id: int) -> tuple[int, ...]:
        """All members of its host, itself included; the courier first."""
        return self.hosts[self._position[worker_id]]

    def outside(self, worker_id: int) -> list[tuple[int, ...]]:
        """Members of the other hosts, beginning with the next host, so that not all begin with the same one."""
        at = self._position[worker_id]
        return [*self.hosts[at + 1 :], *self.hosts[:at]]

    @cached_property
    def _position(self) -> dict[int, int]:
        return {worker_id: k for k, there in enumerate(self.hosts) for worker_id in there}


def folded(nodes: Iterable[Node], n_lanes: int) -> dict[Node, tuple[Node, ...]]:
    """The fewest nodes to which these disjoint nodes add up, ascending, each with its summands."""
    given = sorted(nodes)
    tops = cover((lane for node in given for lane in range(*node)), n_lanes)
    found: dict[Node, list[Node]] = {top: [] for top in tops}
    for node in given:
        found[tops[bisect_right(tops, node.lo, key=lambda top: top.lo) - 1]].append(node)
    return {top: tuple(parts) for top, parts in found.items()}
