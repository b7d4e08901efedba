"""Lanes, sums and updates divided among the ranks of a worker: nothing is lost, and sums are those of the lane tree."""

from __future__ import annotations

from itertools import pairwise

import pytest

from everstep.placement.ranks import ALIGN_ELEMENTS, Folding, SumPlace, part_of, rounds, update_ranges
from everstep.placement.tree import children, cover


def text(lo: int, hi: int) -> str:
    """The sum of lanes as the tree adds them up."""
    if hi - lo == 1:
        return str(lo)
    left, right = children((lo, hi))  # type: ignore[arg-type]
    return f"({text(*left)}+{text(*right)})"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize(
    "lanes",
    [range(8), range(3, 11), (0, 2, 3, 4, 5, 9, 12), (5,), range(13), (5, 4, 7, 1, 0, 11, 3, 8, 9, 12, 2, 6)],
)
def test_sums_are_those_of_the_tree(ranks: int, lanes: range | tuple[int, ...]) -> None:
    folding, held = Folding(cover(lanes, 13)), dict[SumPlace, str]()
    for turn in rounds(lanes, ranks):
        held |= {SumPlace("box", rank): str(lane) for rank, lane in enumerate(turn)}
        for add in folding.round(turn):
            left, right = held[add.left], held[add.right] if add.right is not None else ""
            held[add.into] = f"({left}+{right})" if right else left
        assert len(set(folding.slots.values())) == len(folding.slots) <= len(lanes)
    assert sorted(folding.slots) == sorted(cover(lanes, 13))
    for node, slot in folding.slots.items():
        assert held[SumPlace("slot", slot)] == text(*node)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 32])
@pytest.mark.parametrize("sizes", [[10, 5000, 1, 123456, 2048], [3], [], [1024, 1024], [7000] * 9])
def test_each_element_is_updated_once(ranks: int, sizes: list[int]) -> None:
    found = update_ranges([[(0, size)] for size in sizes], ranks)
    for number, size in enumerate(sizes):
        runs = sorted(run for of in found for run in of[number])
        assert [0, *(stop for _, stop in runs)] == [*(first for first, _ in runs), size]
        assert all(first % ALIGN_ELEMENTS == 0 for first, _ in runs)
    loads = [sum(stop - first for runs in of for first, stop in runs) for of in found]
    assert max(loads) - sum(sizes) / ranks <= ALIGN_ELEMENTS * (1 + len(sizes))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranges_of_parameters_are_cut_too(ranks: int) -> None:
    parameters = [[(0, 5000), (65536, 131072)], [], [(7000, 9000)], [(0, 3), (40_000, 300_000)]]
    found = update_ranges(parameters, ranks)
    for number, ranges in enumerate(parameters):
        elements = sorted(run for of in found for run in of[number])
        assert sum(b - a for a, b in elements) == sum(b - a for a, b in ranges)
        assert all(any(first <= a < b <= stop for first, stop in ranges) for a, b in elements)
        assert all(one[1] <= two[0] for one, two in pairwise(elements))
    loads = [sum(stop - first for runs in of for first, stop in runs) for of in found]
    assert max(loads) - sum(loads) / ranks <= ALIGN_ELEMENTS * (1 + 5)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_a_unit_is_divided_without_gaps(parts: int) -> None:
    for start, stop in ((0, 0), (65536, 65536 + 10), (0, 9999), (131072, 400000)):
        cuts = [part_of(start, stop, parts, part) for part in range(parts)]
        assert [start, *(b for _, b in cuts)] == [*(a for a, _ in cuts), stop]
