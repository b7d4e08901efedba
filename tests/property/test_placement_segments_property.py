"""Segments of an optimizer's state: every block is with as many members as it is to be, and few move."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.base.errors import InvariantViolation
from everstep.base.extents import WHOLE, BlockRun, Extents, ends_in, union, with_ends
from everstep.base.plan import SEGMENTS, Member, Plan, Seat, Shard
from everstep.placement.shards import (
    SegmentBlocks,
    divided_planes,
    ends_of,
    lost_stages,
    segment_holders,
    segment_shards,
    share,
    spread,
    writers,
)

ids = st.sets(st.integers(0, 40), min_size=1, max_size=12)


def dealt(members, copies, before=(), stage=0) -> Plan:
    holders = spread(SEGMENTS, copies, members, {}, before)
    seats = tuple(Seat(i, stage, "active", ()) for i in sorted(members))
    people = tuple(Member(i, 0, "here") for i in sorted(members))
    return Plan(1, "", people, seats, 8, stages=stage + 1, shards=segment_shards(stage, holders, members))


def state(n: int, narrow: int = 0):
    planes = (("model", n + 3), ("optimizer/a", n), ("optimizer/b", n), ("optimizer/c:bfloat16", narrow), ("rest", 2))
    return tuple((plane, count) for plane, count in planes if count)


@given(st.integers(0, 1500), st.integers(0, SEGMENTS), st.integers(0, SEGMENTS))
def test_segments_cut_a_plane_without_a_gap(n, some, more):
    lo, hi = sorted((some, more))
    where = SegmentBlocks(n)
    parts = [where.blocks(((a, b),)) for a, b in ((0, lo), (lo, hi), (hi, SEGMENTS)) if a < b]
    blocks = [block for runs in parts for run in runs for block in range(*run)]
    assert blocks == list(range(n))
    for block in blocks[:: max(1, n // 40)]:
        segment = where.segment(block)
        (run,) = where.blocks(((segment, segment + 1),))
        assert run[0] <= block < run[1]
    sizes = [sum(hi - lo for lo, hi in where.blocks(((k, k + 1),))) for k in range(SEGMENTS)]
    assert max(sizes) - min(sizes) <= 1


@given(ids, st.integers(1, 4), st.integers(1, 700), st.integers(0, 1))
def test_each_block_is_with_so_many_members_and_all_else_with_all(members, copies, n, stage):
    plan, of = dealt(members, copies, stage=stage), state(n)
    assert divided_planes(of) == ("optimizer/a", "optimizer/b")
    shares = {i: share(plan.shard(i, stage), of) for i in members}
    assert union(shares.values()).whole
    for plane, count in of:
        for block in range(0, count, max(1, count // 20)):
            one = Extents.part(of, [BlockRun(plane, block, block + 1)])
            holders = [i for i, blocks in shares.items() if blocks.covers(one)]
            apart = plane in ("optimizer/a", "optimizer/b")
            assert len(holders) == (min(copies, len(members)) if apart else len(members))
    assert all(blocks.whole for blocks in shares.values()) == (copies >= len(members))
    counts = [blocks.size(of) for blocks in shares.values()]
    assert n < SEGMENTS or max(counts) - min(counts) <= 2 * (-(-n // SEGMENTS) + n % SEGMENTS + 1)
    written = writers(plan, stage, of)
    assert sorted(b for runs in written.values() for run in runs for b in range(*run)) == list(
        range(sum(dict(of).values()))
    )
    assert all(
        shares[i].covers(Extents.numbered(of, (b for run in runs for b in range(*run)))) for i, runs in written.items()
    )


@given(ids, st.integers(1, 3))
def test_who_holds_what_is_read_from_the_plan_again(members, copies):
    plan = dealt(members, copies)
    assert segment_holders(plan, 0) == spread(SEGMENTS, copies, members, {})
    assert segment_holders(plan, 0, 3) == segment_holders(plan, 0)[:3]
    for gone in members:
        left = members - {gone}
        lost = any(set(who) == {gone} for who in segment_holders(plan, 0))
        assert lost_stages(plan, left) == ([0] if lost or not left else [])


@given(ids, st.integers(1, 3), st.integers(50, 60))
def test_who_joins_takes_its_part_and_no_more_moves(members, copies, joiner):
    before, after = (
        dealt(members, copies),
        dealt(members | {joiner}, copies, segment_holders(dealt(members, copies), 0)),
    )
    moved = sum(
        len(set(b) - set(a)) for a, b in zip(segment_holders(before, 0), segment_holders(after, 0), strict=True)
    )
    assert moved <= 1.5 * copies * SEGMENTS / (len(members) + 1) + 1


def test_a_state_without_such_planes_and_a_seat_without_segments_are_whole():
    shard = Shard(1, 0, segments=((0, 7),))
    for of in ((), (("model", 4), ("rest", 1)), (("model", 4), ("optimizer/a:bfloat16", 4))):
        assert share(shard, of) == WHOLE
    assert share(Shard(1, 0), state(4)) == WHOLE
    assert str(share(shard, (("model", 9), ("optimizer/a", 9)))) == "model 0-8, optimizer/a 0-6"
    none = share(replace(shard, segments=()), (("model", 2), ("optimizer/a", 2)))
    assert none == Extents.part((("model", 2), ("optimizer/a", 2)), [BlockRun("model", 0, 2)])


@pytest.mark.parametrize(
    "segments", [((3, 3),), ((5, 2),), ((-1, 2),), ((0, SEGMENTS + 1),), ((4, 6), (2, 3)), ((0, 2), (2, 3))]
)
def test_segments_that_are_no_runs_are_refused(segments):
    with pytest.raises(InvariantViolation, match="segments"):
        Shard(0, 0, segments=segments)


spans = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 900)), min_size=1, max_size=400)


@given(spans)
def test_segments_end_where_no_span_is_cut_and_else_as_they_would(pieces):
    """Spans as parameters on a grid make them: one begins in the block where the one before ends, or later."""
    found, at, numbers = [], 0, {}
    for gap, size in pieces:
        at += max(gap - 1, -1) if found else gap
        found.append((max(at, 0), max(at, 0) + size))
        at = found[-1][1]
    for block in sorted({block for lo, hi in found for block in range(lo, hi)}):
        numbers[block] = len(numbers)
    n, ends = len(numbers), ends_of(found)
    where, even = SegmentBlocks(n, ends), SegmentBlocks(n)
    assert SegmentBlocks(n, ends_of(reversed(found))).stops == where.stops and where.stops[-1] == n
    assert all(len({where.segment(numbers[block]) for block in range(lo, hi)}) == 1 for lo, hi in found)
    cut = {numbers[lo] for lo, hi in found} - {numbers[b] for lo, hi in found for b in range(lo + 1, hi)} | {n}
    assert where.stops == [min(end for end in cut if end >= stop) for stop in even.stops]
    of = with_ends((("model", n), ("optimizer/a", n)), ends)
    assert ends_in(of) == ends and sum(count for _, count in of) == 2 * n
    plan = dealt({0, 1}, 1)
    assert union(share(plan.shard(i, 0), of) for i in (0, 1)).whole


def test_sizes_without_ends_say_so():
    assert ends_in(()) == ends_in((("model", 3), ("rest", 1))) == () and with_ends((("model", 3),), ()) == (
        ("model", 3),
    )
    assert ends_of([]) == ()
