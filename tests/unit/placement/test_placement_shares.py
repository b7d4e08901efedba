"""Which planes of a state are dealt out in segments, and what of them a seat holds."""

from __future__ import annotations

import pytest

from everstep.base.extents import NONE, WHOLE, BlockRun, Extents, Sizes
from everstep.base.plan import SEGMENTS, Member, Plan, Seat, Shard
from everstep.placement.shards import (
    Gift,
    SegmentBlocks,
    divided_planes,
    fed_blocks,
    gifts,
    lost_stages,
    runs_of_numbers,
    segment_holders,
    segment_shards,
    share,
)

WIDE = (("optimizer/exp_avg", 512), ("optimizer/exp_avg_sq", 512))
OTHERS = (("model", 600), ("optimizer/step", 1), ("optimizer/exp_avg:bfloat16", 512), ("buffers", 2))


def test_only_the_widest_planes_of_the_optimizer_in_float32_are_dealt_out() -> None:
    assert divided_planes(OTHERS + WIDE) == ("optimizer/exp_avg", "optimizer/exp_avg_sq")
    narrow: Sizes = (("optimizer/row", 3), ("optimizer/column", 4))
    assert divided_planes(narrow) == ("optimizer/column",)
    assert divided_planes(OTHERS[:1]) == () and divided_planes(()) == ()


def test_a_seat_holds_its_segments_and_all_of_the_other_planes() -> None:
    of = OTHERS + WIDE
    held = share(Shard(1, 0, segments=((0, 1), (100, 102))), of)
    whole = [BlockRun(plane, 0, count) for plane, count in OTHERS]
    mine = [BlockRun(plane, lo, hi) for plane, _ in WIDE for lo, hi in ((0, 2), (200, 204))]
    assert held == Extents.part(of, [*whole, *mine])
    assert share(Shard(1, 0, segments=((0, SEGMENTS),)), of) == WHOLE


def test_of_several_donors_each_gives_what_it_feeds_and_one_of_them_the_rest() -> None:
    of = OTHERS + WIDE
    wanted = share(Shard(1, 0, segments=((0, 3), (100, 101))), of)
    first, second = fed_blocks(((0, 2),), True, of), fed_blocks(((2, 3), (100, 101)), False, of)
    assert first | second == wanted and not first & second
    assert {run.plane for run in second.runs} == {plane for plane, _ in WIDE}
    assert fed_blocks(None, False, of) == WHOLE, "a donor that is asked for whole stages"
    assert (fed_blocks(((0, 1),), True, OTHERS[:1]), fed_blocks(((0, 1),), False, OTHERS[:1])) == (WHOLE, NONE)


@pytest.mark.parametrize("state", [WHOLE, NONE])
def test_a_seat_holds_what_its_shard_says_where_nothing_is_dealt_out_yet(state: Extents) -> None:
    of: Sizes = (("model", 4),)
    assert share(Shard(1, 0, state=state, segments=((0, 1),)), of) == state
    assert share(Shard(1, 0, state=state), of + WIDE) == state


@pytest.mark.parametrize("n_blocks", [1, 5, SEGMENTS - 1, SEGMENTS, SEGMENTS + 1, 3 * SEGMENTS, 1000])
def test_each_block_lies_in_one_segment(n_blocks: int) -> None:
    of = SegmentBlocks(n_blocks)
    sizes = []
    for n in range(SEGMENTS):
        (blocks,) = of.blocks(((n, n + 1),)) or ((0, 0),)
        assert all(of.segment(block) == n for block in range(*blocks))
        sizes.append(blocks[1] - blocks[0])
    assert sum(sizes) == n_blocks and max(sizes) - min(sizes) <= 1
    assert of.blocks(((0, SEGMENTS),)) == ((0, n_blocks),)
    assert n_blocks >= SEGMENTS or sizes == sorted(sizes, reverse=True), "the first segments have one each"


@pytest.mark.parametrize(
    ("numbers", "runs"), [((), ()), ((4,), ((4, 5),)), ((0, 1, 2), ((0, 3),)), ((0, 2, 3, 7), ((0, 1), (2, 4), (7, 8)))]
)
def test_numbers_are_told_in_runs(numbers: tuple[int, ...], runs: tuple[tuple[int, int], ...]) -> None:
    assert runs_of_numbers(numbers) == runs


def dealt(holders: tuple[tuple[int, ...], ...], ids: tuple[int, ...], stage: int = 0) -> Plan:
    members = tuple(Member(i, 0, "host") for i in ids)
    seats = tuple(Seat(i, stage, "active", ()) for i in ids)
    return Plan(1, "", members, seats, 8, stages=stage + 1, shards=segment_shards(stage, holders, ids))


def test_a_plan_names_the_shards_of_those_alone_that_lack_something() -> None:
    half = SEGMENTS // 2
    holders = ((1, 3),) * half + ((2, 3),) * half
    shards = segment_shards(4, holders, (3, 2, 1))
    assert shards == (Shard(1, 4, segments=((0, half),)), Shard(2, 4, segments=((half, SEGMENTS),)))
    assert segment_shards(0, ((1, 2),) * SEGMENTS, (1, 2)) == ()
    plan = dealt(holders, (1, 2, 3))
    assert segment_holders(plan, 0) == holders and segment_holders(plan, 0, 2) == holders[:2]


def test_holders_of_a_segment_share_its_blocks_and_give_them_to_all_others_in_order() -> None:
    holders = ((1, 3), (1, 2), *(((1, 2, 3),) * (SEGMENTS - 2)))
    plan = dealt(holders, (1, 2, 3))
    many = gifts(plan, 0, SegmentBlocks(SEGMENTS * 5))
    assert list(many) == [Gift(1, (2,), 0, 2), Gift(3, (2,), 2, 5), Gift(1, (3,), 5, 7), Gift(2, (3,), 7, 10)]
    assert [gift for gift in gifts(plan, 0, SegmentBlocks(1)) if gift.first < gift.stop] == [Gift(3, (2,), 0, 1)]
    assert not list(gifts(plan, 0, SegmentBlocks(0)))


def test_a_stage_is_lost_with_any_segment_that_nobody_of_these_has() -> None:
    holders = ((1,),) + ((1, 2),) * (SEGMENTS - 2) + ((2,),)
    plan = dealt(holders, (1, 2), stage=1)
    assert lost_stages(plan, [1, 2]) == [0] and lost_stages(plan, [1]) == lost_stages(plan, [2]) == [0, 1]
