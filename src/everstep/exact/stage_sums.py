"""The lanes' sums of one stage: one accumulator per part of the model, which together fill the same flat vectors.

Apart from `accumulate` because a lane's gradients of several parts come at different times (interleaved schedules),
and a node of the lane tree is handed over when all parts have completed it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from everstep.base.errors import check
from everstep.base.ports import Node
from everstep.exact.accumulate import LaneAccumulator
from everstep.exact.reduce import merge_presence
from everstep.placement.tree import cover


class StageSums:
    """What is held of a step's lanes, over all parts of a stage."""

    def __init__(self, parts: Sequence[LaneAccumulator], n_lanes: int) -> None:
        """parts: in order, at least one; over the same layout, with disjoint units."""
        check(len(parts) > 0, "a stage has at least one part")
        self.parts = tuple(parts)
        self.n_lanes = n_lanes

    def begin(self, step: int, lanes: Sequence[int], buffer: Callable[[Node], Tensor]) -> None:
        """The lanes of a step that are wanted from here; what has been computed of them already counts."""
        mine = set(lanes)
        for part in self.parts:
            for node in [n for n in part.presence if 0 < len(mine.intersection(range(*n))) < n.hi - n.lo]:
                part.drop(node)  # its sum has lanes that are another worker's now
        if len(self.parts) == 1:
            kept: set[Node] = set()
            held = {lane for node in self.parts[0].presence for lane in range(*node)}
        else:  # all parts must have the same nodes, so those that some part has begun stay
            kept = {n for part in self.parts for n in part.nodes if mine.issuperset(range(*n))}
            held = {lane for node in kept for lane in range(*node)}
        nodes = (*sorted(kept), *cover([lane for lane in lanes if lane not in held], self.n_lanes))
        for part in self.parts:
            part.begin(step, nodes, buffer)

    def lacking(self, lanes: Sequence[int]) -> tuple[int, ...]:
        """Lanes that must be computed here before exactly these can be offered to the reduction."""
        mine = set(lanes)
        whole = {lane for node in self.presence if mine.issuperset(range(*node)) for lane in range(*node)}
        return tuple(sorted(mine - whole))

    @property
    def missing(self) -> tuple[int, ...]:
        """Lanes of the step's nodes that some part has not added yet, ascending."""
        if len(self.parts) == 1:
            return self.parts[0].missing
        return tuple(sorted({lane for part in self.parts for lane in part.missing}))

    @property
    def presence(self) -> dict[Node, bytes]:
        """For each node that is complete: one byte per layout entry."""
        first = self.parts[0].presence
        if len(self.parts) == 1:
            return first
        return {
            node: merge_presence(part.presence[node] for part in self.parts)
            for node in first
            if all(node in part.presence for part in self.parts)
        }

    def offered(self, lanes: Sequence[int]) -> dict[Node, bytes]:
        """The sums that cover exactly these lanes, with their presence."""
        mine = set(lanes)
        offered = {n: p for n, p in self.presence.items() if mine.issuperset(range(n.lo, n.hi))}
        covered = sorted(lane for n in offered for lane in range(n.lo, n.hi))
        check(covered == sorted(mine), f"sums of lanes {covered} are held, the plan gives {sorted(mine)}")
        return offered

    def add_empty(self, lane: int) -> None:
        """The lane has no samples: it is the identity of the sum, in every part."""
        for part in self.parts:
            if part.is_missing(lane):
                part.add_empty(lane)

    def forget(self) -> None:
        """Lets go of the step and of all shared memory."""
        for part in self.parts:
            part.forget()
