"""Run-length coded sets of blocks against plain sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.base.errors import InvariantViolation
from everstep.base.extents import NONE, WHOLE, BlockRun, Extents, Sizes, union

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(
    lambda counts: tuple((f"plane{k}", n) for k, n in enumerate(counts))
)
Blocks = frozenset[tuple[str, int]]


def everything(of: Sizes) -> Blocks:
    return frozenset((plane, k) for plane, n in of for k in range(n))


def plain(extents: Extents, of: Sizes) -> Blocks:
    if extents.whole:
        return everything(of)
    return frozenset((plane, k) for plane, lo, hi in extents.runs for k in range(lo, hi))


def made(of: Sizes, blocks: Blocks) -> Extents:
    return Extents.part(of, [BlockRun(plane, k, k + 1) for plane, k in sorted(blocks, reverse=True)])


@st.composite
def several(draw, count: int = 2):
    of = draw(SIZES)
    subsets = st.frozensets(st.sampled_from(sorted(everything(of))))
    return of, [draw(subsets) for _ in range(count)]


@given(several())
def test_sets_of_blocks_behave_as_sets(case):
    of, (a, b) = case
    x, y = made(of, a), made(of, b)
    assert plain(x, of) == a and x.size(of) == len(a) and bool(x) == bool(a)
    assert x | y == made(of, a | b) and x - y == made(of, a - b) and x & y == made(of, a & b)
    assert x.covers(y) == (a >= b)
    assert WHOLE - x == made(of, everything(of) - a) and WHOLE & x == x == x & WHOLE and x - WHOLE == NONE
    assert union([x, y, NONE]) == x | y and x | WHOLE == WHOLE == WHOLE | x
    assert x.fits(y) and x.whole == (a == everything(of))


@given(several(1), st.integers(1, 5), st.integers(0, 20))
def test_shares_are_disjoint_and_nearly_equal(case, shares, count):
    of, (a,) = case
    x = made(of, a)
    found = x.split(shares, of)
    sizes = [share.size(of) for share in found]
    assert len(found) == shares and max(sizes) - min(sizes) <= 1
    assert union(found) == x and sum(sizes) == len(a)
    first = x.first(count, of)
    assert first.size(of) == min(count, len(a)) and x.covers(first)


@given(several(1))
def test_parts_travel(case):
    of, (a,) = case
    x = made(of, a)
    if not x.whole:
        assert Extents.decoded(x.encoded()) == x
    numbers = [k for k, block in enumerate((plane, i) for plane, n in of for i in range(n)) if block in a]
    assert Extents.numbered(of, numbers) == x
    assert [k for lo, hi in x.spans(of) for k in range(lo, hi)] == numbers


def test_what_is_no_part_is_refused():
    of = (("model", 2),)
    for runs in (
        [BlockRun("model", 1, 3)],
        [BlockRun("other", 0, 1)],
        [BlockRun("model", 2, 1)],
        [BlockRun("model", -1, 1)],
    ):
        with pytest.raises(InvariantViolation):
            Extents.part(of, runs)
    with pytest.raises(InvariantViolation):
        Extents.decoded((of, ((1, 0, 1),)))
    assert Extents.decoded(WHOLE.encoded()) == WHOLE
    other = Extents.part((("model", 3),), [BlockRun("model", 0, 1)])
    mine = Extents.part(of, [BlockRun("model", 0, 1)])
    assert not mine.fits(other) and mine.fits(WHOLE) and str(mine) == "model 0-0"
    with pytest.raises(InvariantViolation):
        _ = mine | other
