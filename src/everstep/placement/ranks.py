"""How the processes of one worker divide its work: lanes by rounds, updates and sums by ranges. Pure.

None of it changes a bit: any process makes the sums of the lane tree, and one process updates each element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from everstep.base.ports import Node
from everstep.placement.tree import children, cover, path_to

ALIGN_ELEMENTS = 1024
"""Ranges begin at multiples of this: a page of float32 is touched by one process."""


def rounds(lanes: Sequence[int], ranks: int) -> list[Sequence[int]]:
    """The lanes in rounds of at most one for each rank, by rank; the last may leave ranks without a lane."""
    return [lanes[first : first + ranks] for first in range(0, len(lanes), ranks)]


def part_of(start: int, stop: int, parts: int, part: int) -> tuple[int, int]:
    """One of so many parts of the range [start, stop), of about equal size; it may be empty."""
    size = -(-(stop - start) // (parts * ALIGN_ELEMENTS)) * ALIGN_ELEMENTS
    first = min(start + part * size, stop)
    return first, min(first + size, stop)


def update_ranges(parameters: Sequence[Sequence[tuple[int, int]]], ranks: int) -> list[list[list[tuple[int, int]]]]:
    """Ranges of elements by rank, by parameter: all of these in order, cut into one part for each rank. parameters:
    ranges of each, which ascend. Cuts lie at multiples of `ALIGN_ELEMENTS` inside a parameter."""
    total = sum(stop - first for ranges in parameters for first, stop in ranges)
    found = [[list[tuple[int, int]]() for _ in parameters] for _ in range(ranks)]
    before = 0
    for number, (begin, end) in ((n, one) for n, ranges in enumerate(parameters) for one in ranges):
        shares = (begin - before + total * (rank + 1) / ranks for rank in range(ranks - 1))
        first = begin
        for rank, cut in enumerate((*(round(one / ALIGN_ELEMENTS) * ALIGN_ELEMENTS for one in shares), end)):
            stop = min(max(cut, first), end)
            if first < stop:
                found[rank][number].append((first, stop))
            first = stop
        before += end - begin
    return found


class SumPlace(NamedTuple):
    """Where a sum is: in the box of a seat (its lane of the round), or in a slot that outlives the round."""

    kind: str
    number: int


class Add(NamedTuple):
    """into = left + right; right None: a copy."""

    into: SumPlace
    left: SumPlace
    right: SumPlace | None = None


class Folding:
    """Which sums of a worker's lanes are added to which, round by round, the same at each of its processes."""

    def __init__(self, tops: Iterable[Node]) -> None:
        """tops: disjoint nodes of the lane tree, all of whose lanes are to come."""
        self._top = {lane: top for top in tops for lane in range(*top)}
        self.slots: dict[Node, int] = {}
        """Complete subtrees, and the slots that hold their sums."""
        self.seats: dict[int, int] = {}
        """How many seats had a place in the round that has made what is in a slot."""

    def round(self, lanes: Sequence[int | None]) -> list[Add]:
        """The additions of a round, in order. lanes: by seat, None for one that does not count. Afterwards the boxes
        hold nothing that counts."""
        places = {node: SumPlace("slot", slot) for node, slot in self.slots.items()}
        adds: list[Add] = []
        for rank, lane in enumerate(lanes):
            if lane is None:
                continue
            node, at = Node(lane, lane + 1), SumPlace("box", rank)
            for parent in reversed(path_to(self._top[lane], lane)[:-1]):
                left, right = children(parent)
                other = places.pop(right if node == left else left, None)
                if other is None:
                    break
                pair = (at, other) if node == left else (other, at)
                at = next((one for one in pair if one.kind == "slot"), at)
                adds.append(Add(at, *pair))
                node = parent
            places[node] = at
        self.slots = {node: at.number for node, at in places.items() if at.kind == "slot"}
        for node, at in places.items():
            if at.kind == "box":
                self.slots[node] = slot = self._free()
                _end_in(adds, at, SumPlace("slot", slot))
        self.seats = self.seats | {add.into.number: len(lanes) for add in adds if add.into.kind == "slot"}
        return adds

    def _free(self) -> int:
        taken = set(self.slots.values())
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)


def most_slots(lanes: Sequence[int], n_lanes: int, ranks: int) -> int:
    """Sums that a worker's processes keep at a time, at the most."""
    folding, most = Folding(cover(lanes, n_lanes)), 0
    for turn in rounds(lanes, ranks):
        adds = folding.round(turn)
        most = max([most, *(1 + add.into.number for add in adds if add.into.kind == "slot")])
    return most


def _end_in(adds: list[Add], at: SumPlace, slot: SumPlace) -> None:
    """Put into a slot what would otherwise lie in a box: at once, unless a later addition takes what is in the slot."""
    for k in range(len(adds) - 1, -1, -1):
        if slot in adds[k][1:]:
            break
        if adds[k].into == at:
            adds[k] = adds[k]._replace(into=slot)
            return
    adds.append(Add(slot, at))
