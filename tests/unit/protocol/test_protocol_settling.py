"""Where a generation begins: the top if every stage is held there, else the newest step that all stages have."""

from __future__ import annotations

from dataclasses import replace

from everstep.base.extents import WHOLE, BlockRun, Extents
from everstep.base.plan import Member, Plan, Seat, Shard
from everstep.protocol.settling import from_shares, settle, sound_limit, unaware
from everstep.protocol.step_types import Doubt, Holding, Key, Pieces, Record

RECORDS = {9: Record(0, b"")}


def plan(*pools: tuple[int, ...], lanes: int = 2) -> Plan:
    """The first of each pool has all lanes, the others stand by."""
    ids = sorted({i for pool in pools for i in pool})
    seats = tuple(
        Seat(i, stage, "standby" if n else "active", () if n else tuple(range(lanes)))
        for stage, pool in enumerate(pools)
        for n, i in enumerate(pool)
    )
    return Plan(3, "because", tuple(Member(i, 0, "host") for i in ids), seats, lanes, stages=len(pools))


def at(step: int, *stages: int, seq: int = 0, gradient: int = 0, lacking=(), snapshots=(), disk=()) -> Holding:
    live, kept = dict.fromkeys(stages, WHOLE), dict.fromkeys(snapshots, WHOLE)
    return Holding(Key(step, seq), RECORDS, gradient, "", live, lacking, kept, disk, live)


def test_one_settlement_serves_every_stage():
    settled = settle(plan((0, 1), (2, 3)), {0: at(5, 0), 1: at(4, 0), 2: at(4, 1, gradient=5), 3: at(4)})
    assert (settled.target, settled.back, settled.rolls) == (Key(5, 0), False, {2})
    assert settled.wants == {1: {0: (0,)}, 3: {1: (2,)}}
    assert settled.serves == {0: (1,), 2: (3,)}


def test_who_takes_over_a_seat_fetches_that_stage_alone():
    settled = settle(plan((0,), (0, 1)), {0: at(5, 0), 1: at(5, 1)})
    assert settled.wants == {0: {1: (1,)}} and settled.serves == {1: (0,)}


def test_who_has_lost_its_seat_still_serves():
    settled = settle(plan((0,), (1,)), {0: at(5, 1), 1: at(5, 0)})
    assert settled.wants == {0: {0: (1,)}, 1: {1: (0,)}}


def test_a_stage_rolls_forward_only_with_its_own_gradient():
    half = Holding(Key(4, 0), RECORDS, 5, stages={0: WHOLE, 1: WHOLE}, gradients={0: WHOLE}, snapshots={(0, 4): WHOLE})
    settled = settle(plan((0,), (1,)), {0: at(5, 0, snapshots=((0, 4),)), 1: half})
    assert (settled.target, settled.back) == (Key(4, 0), True)


def test_who_rolls_forward_counts_where_another_stage_comes_from_a_snapshot():
    """Stage 0 died with its pool; its copy is of the top, which worker 2 is one decision short of."""
    holdings = {0: at(0), 1: at(3, 1, snapshots=((0, 3),)), 2: at(2, 2, gradient=3, disk=(2,))}
    settled = settle(plan((0,), (1,), (2,)), holdings)
    assert (settled.target, settled.back, settled.rolls) == (Key(3, 0), True, {2})
    assert settled.records == RECORDS and settled.wants == {0: {0: (1,)}}
    assert settled.rerun == {0, 1}
    without = {**holdings, 1: replace(holdings[1], records={})}
    assert settle(plan((0,), (1,), (2,)), without).target == Key(0, 0)


def test_without_a_stage_at_the_top_all_go_to_the_newest_step_of_all():
    kept = at(9, 0, snapshots=((0, 6), (1, 6), (0, 8), (1, 4), (0, 4)))
    settled = settle(plan((0,), (1,)), {0: kept, 1: at(0)})
    assert (settled.target, settled.back) == (Key(6, 0), True)
    assert settled.wants == {0: {0: (0,)}, 1: {1: (0,)}} and settled.serves == {0: (1,)}
    assert settled.rerun == {0, 1}


def test_stages_may_come_from_memory_and_disk_alike():
    settled = settle(plan((0,), (1, 2)), {0: at(9, 0, snapshots=((0, 6),)), 1: at(0, disk=(6,)), 2: at(0, disk=(3, 6))})
    assert settled.target == Key(6, 0)
    assert settled.wants == {0: {0: (0,)}, 1: {1: ()}, 2: {1: ()}}


def test_stages_that_state_no_checkpoint_in_common_have_step_0_alone():
    apart = {0: at(0, disk=(2, 3)), 1: at(0, disk=(4, 5))}
    assert settle(plan((0,), (1,)), apart).target == Key(0, 0)
    assert settle(plan((0,), (1,)), {**apart, 1: at(0, disk=(2, 3, 4, 5))}).target == Key(3, 0)


def test_disk_counts_only_if_all_of_the_pool_can_read_it():
    settled = settle(plan((0,), (1, 2)), {0: at(9, 0, snapshots=((0, 6),)), 1: at(0, disk=(6,)), 2: at(0)})
    assert settled.target == Key(0, 0)


def test_a_job_that_starts_goes_to_its_checkpoint():
    settled = settle(plan((0,), (1,)), {0: at(0, 0, disk=(4, 8)), 1: at(0, 1, disk=(8,))})
    assert (settled.target, settled.back) == (Key(8, 0), True)


def test_a_newcomer_with_an_old_checkpoint_does_not_pull_the_others_back():
    settled = settle(plan((0,), (1, 2)), {0: at(9, 0), 1: at(9, 1), 2: at(0, disk=(8,))})
    assert (settled.target, settled.back) == (Key(9, 0), False)


def test_some_have_gone_back_already():
    """An interrupted way back: the live state of who has arrived counts, though its snapshot's keeper is gone."""
    settled = settle(plan((0,), (1,)), {0: at(9, 0, snapshots=((0, 6),)), 1: at(6, 1)})
    assert (settled.target, settled.back) == (Key(6, 0), True)
    assert settled.wants == {0: {0: (0,)}}


def test_gathers_after_the_step_are_undone_by_going_back_to_it():
    settled = settle(plan((0,), (1, 2)), {0: at(6, 0, seq=2), 1: at(6, seq=2), 2: at(6, 1)})
    assert (settled.target, settled.back) == (Key(6, 0), True)
    assert settled.wants == {0: {0: (0,)}, 1: {1: (2,)}}


def test_nobody_rolls_forward_without_records():
    bare = Holding(Key(5, 0), {}, 0)
    settled = settle(plan((0, 1)), {0: bare, 1: at(4, 0, gradient=5)})
    assert settled.rolls == set() and settled.wants == {1: {0: (0,)}}


def test_all_members_rerun_what_any_of_them_lacks():
    holdings = {0: at(5, 0, lacking=()), 1: at(5, 1, lacking=(2,)), 2: at(5, 1)}
    assert settle(plan((0,), (1, 2), lanes=3), holdings).rerun == {2}
    holdings[2] = at(3, 1)  # a standby that copies lacks nothing
    assert settle(plan((0,), (1, 2), lanes=3), holdings).rerun == {2}
    holdings[1] = at(3, 1)
    assert settle(plan((0,), (2, 1), lanes=3), holdings).rerun == {0, 1, 2}


def doubting(holding: Holding, sound: int) -> Holding:
    return replace(holding, sound=sound)


def test_what_is_later_than_the_last_sound_step_counts_for_nothing():
    held = at(29, 0, snapshots=((0, 10), (0, 20)), disk=(5, 15))
    settled = settle(plan((0, 1)), {0: doubting(held, 19), 1: doubting(at(29, 0, disk=(5, 15)), 19)})
    assert (settled.target, settled.back) == (Key(15, 0), True), "the newest of disk and memory"
    assert settled.wants == {0: {0: ()}, 1: {0: ()}}
    settled = settle(plan((0, 1)), {0: doubting(held, 12), 1: doubting(at(29, 0, disk=(5,)), 12)})
    assert settled.target == Key(10, 0) and settled.wants == {0: {0: (0,)}, 1: {0: (0,)}}
    settled = settle(plan((0, 1)), {0: doubting(at(29, 0), 19), 1: doubting(at(29, 0), 19)})
    assert settled.target == Key(0, 0)


def test_one_that_has_gone_back_already_is_a_source_though_it_still_doubts():
    back, not_yet = doubting(at(10, 0), 19), doubting(at(29, 0), 19)
    settled = settle(plan((0, 1)), {0: back, 1: not_yet})
    assert settled.target == Key(10, 0) and settled.wants == {1: {0: (0,)}}


def test_lanes_of_an_initial_state_that_is_replaced_run_again() -> None:
    holdings = {0: Holding(Key(0, 0), {}, 0, "this"), 1: Holding(Key(0, 0), {}, 0, "that")}
    settled = settle(plan((1, 0)), holdings)
    assert settled.wants == {1: {0: (0,)}} and settled.rerun == {0, 1}
    assert settle(plan((0, 1)), holdings).rerun == frozenset()


# ---- parts of stages

OF = (("model", 4), ("exp_avg", 4))


def part(*runs: tuple[str, int, int]) -> Extents:
    return Extents.part(OF, [BlockRun(*run) for run in runs])


MODEL, OPTIMIZER = part(("model", 0, 4)), part(("exp_avg", 0, 4))
ONE = part(("model", 2, 3))


def test_who_has_lost_a_block_gets_that_block_alone():
    hurt = replace(at(5), stages={0: WHOLE - ONE})
    settled = settle(plan((0, 1, 2)), {0: at(5, 0), 1: hurt, 2: at(5, 0)})
    assert (settled.target, settled.back) == (Key(5, 0), False)
    assert settled.wants == {1: {0: (0, 2)}} and settled.pieces == {1: {0: Pieces(ONE)}}
    assert settled.serves == {0: (1,), 2: (1,)} and settled.rerun == frozenset(), "a standby has no lanes"


def test_halves_that_are_together_whole_are_held():
    """Planes of a stage at different members: each gets the other's, and a newcomer both."""
    halves = {0: replace(at(5), stages={0: MODEL}), 1: replace(at(5), stages={0: OPTIMIZER}), 2: at(3, 0)}
    settled = settle(plan((0, 1, 2)), halves)
    assert (settled.target, settled.back) == (Key(5, 0), False)
    assert settled.wants == {0: {0: (1,)}, 1: {0: (0,)}, 2: {0: (0, 1)}}
    assert settled.pieces == {
        0: {0: Pieces(OPTIMIZER, {1: OPTIMIZER})},
        1: {0: Pieces(MODEL, {0: MODEL})},
        2: {0: Pieces(WHOLE, {0: MODEL, 1: OPTIMIZER})},
    }
    assert settled.rerun == {0, 1}


def test_without_one_block_all_go_to_the_newest_step_that_is_whole():
    holdings = {
        0: replace(at(9), stages={0: MODEL}, snapshots={(0, 4): WHOLE, (0, 6): MODEL}),
        1: replace(at(9), stages={0: OPTIMIZER - part(("exp_avg", 0, 1))}, snapshots={(0, 6): OPTIMIZER}),
    }
    settled = settle(plan((0, 1)), holdings)
    assert (settled.target, settled.back) == (Key(6, 0), True)
    assert settled.pieces == {
        0: {0: Pieces(OPTIMIZER, {1: OPTIMIZER})},
        1: {0: Pieces(MODEL, {0: MODEL})},
    }
    bad = {**holdings, 1: replace(holdings[1], snapshots={})}
    settled = settle(plan((0, 1)), bad)
    assert settled.target == Key(4, 0) and settled.pieces == {}


def test_a_live_part_and_a_kept_one_of_a_member_count_together():
    both = replace(at(6), stages={0: MODEL}, snapshots={(0, 6): OPTIMIZER})
    settled = settle(plan((0, 1)), {0: both, 1: at(0)})
    assert (settled.target, settled.back) == (Key(6, 0), True)
    assert settled.wants == {0: {0: (0,)}, 1: {0: (0,)}} and settled.pieces == {}


def test_nobody_takes_a_step_with_a_part():
    """The gradient is there, but the blocks that it makes anew may depend on one that is lost."""
    behind = replace(at(4), gradient_step=5, stages={0: WHOLE - ONE})
    settled = settle(plan((0, 1)), {0: at(5, 0), 1: replace(behind, gradient_step=0)})
    assert settled.wants == {1: {0: (0,)}} and settled.pieces == {}, "it gets all of the newer state"
    assert settle(plan((0, 1)), {0: at(5), 1: behind}).target == Key(0, 0)


# ---- seats that hold parts of their stage: here the model at all, and the optimizer's segments at two of three


def shared(*, lives=(0, 1, 2)) -> Plan:
    """Worker i has the optimizer's blocks i and i + 1, and the last one worker 0's first, too."""
    whole = plan(tuple(lives))
    shards = tuple(Shard(i, 0, SHARES[i]) for i in lives)
    return replace(whole, shards=shards)


SHARES = {i: MODEL | part(("exp_avg", i, i + 2)) for i in range(3)} | {3: MODEL | part(("exp_avg", 0, 1))}


def sharing(step: int, worker_id: int, **more) -> Holding:
    blocks = {0: SHARES[worker_id]}
    return replace(at(step), stages=blocks, gradients=blocks, **more)


def test_shares_are_no_damage():
    """No member has all, together they do: everybody goes on, and nobody gets anything."""
    settled = settle(shared(), {i: sharing(5, i) for i in range(3)})
    assert (settled.target, settled.back, settled.wants, settled.rerun) == (Key(5, 0), False, {}, frozenset())


def test_who_gets_all_of_a_stage_asks_whoever_has_all_or_each_for_its_share():
    assert from_shares(plan((0,), (1, 2)), (1,), 0) == ({1: (1, 2)}, {})
    sources, pieces = from_shares(shared(), (0,), 9)
    assert sources == {0: (0, 1, 2)} and pieces == {0: Pieces(WHOLE, {i: SHARES[i] for i in range(3)})}
    sources, pieces = from_shares(shared(), (0,), 0)
    rest = WHOLE - SHARES[0]
    assert sources == {0: (1, 2)} and pieces == {0: Pieces(rest, {i: SHARES[i] & rest for i in (1, 2)})}


def test_a_step_is_taken_with_a_share_of_which_nothing_is_lost():
    holdings = {0: sharing(5, 0), 1: sharing(4, 1, gradient_step=5), 2: sharing(4, 2, gradient_step=5)}
    settled = settle(shared(), holdings)
    assert (settled.target, settled.back, settled.wants, settled.rolls) == (Key(5, 0), False, {}, {1, 2})
    hurt = replace(holdings[1], stages={0: SHARES[1] - part(("exp_avg", 2, 3))})
    settled = settle(shared(), {**holdings, 1: hurt})
    assert settled.target == Key(5, 0) and settled.wants == {1: {0: (0, 2)}}, "what is left of it is of the step before"
    assert settled.pieces == {1: {0: Pieces(SHARES[1], {0: SHARES[0] & SHARES[1], 2: SHARES[2] & SHARES[1]})}}


def test_what_is_less_than_a_share_comes_of_another_holder():
    lost = part(("exp_avg", 1, 2))
    holdings = {i: sharing(5, i) for i in range(3)}
    settled = settle(shared(), {**holdings, 1: replace(holdings[1], stages={0: SHARES[1] - lost})})
    assert settled.wants == {1: {0: (0,)}} and settled.pieces == {1: {0: Pieces(lost, {0: lost})}}


def test_the_last_holder_of_a_block_takes_its_step_with_it():
    """Worker 0 alone had the first of the optimizer: all go back to where it is kept, in parts again."""
    kept = {i: {(0, 3): SHARES[i]} for i in range(4)}
    holdings = {i: sharing(5, i, snapshots=kept[i]) for i in (1, 2)} | {3: replace(at(3), snapshots=kept[3])}
    settled = settle(shared(lives=(1, 2, 3)), holdings)
    assert (settled.target, settled.back) == (Key(3, 0), True)
    assert settled.wants == {1: {0: (1,)}, 2: {0: (2,)}, 3: {0: (3,)}} and settled.pieces == {}
    gone = {**holdings, 3: at(3)}
    assert settle(shared(lives=(1, 2, 3)), gone).target == Key(0, 0)


def test_one_that_comes_gets_its_share_of_all_who_have_some_of_it():
    holdings = {i: sharing(5, i) for i in range(3)} | {3: at(0)}
    settled = settle(shared(lives=(0, 1, 2, 3)), holdings)
    given = {i: SHARES[i] & SHARES[3] for i in range(3)}
    assert settled.wants == {3: {0: (0, 1, 2)}} and settled.pieces == {3: {0: Pieces(SHARES[3], given)}}
    whole = settle(shared(lives=(0, 1, 3)), {0: sharing(5, 0), 1: at(5, 0), 3: at(0)})
    assert whole.wants == {3: {0: (1,)}} and whole.pieces == {3: {0: Pieces(SHARES[3])}}, "rather of who has all"


def test_who_has_more_than_its_share_lacks_nothing():
    settled = settle(shared(), {i: at(5, 0) for i in range(3)})
    assert settled.wants == {} and not settled.back


def test_a_share_of_other_planes_is_not_there():
    """As of the state that was built, in which the optimizer has nothing yet."""
    settled = settle(shared(lives=(0, 1)), {0: replace(at(5), stages={0: OTHER}), 1: at(5, 0)})
    assert settled.wants == {0: {0: (1,)}} and settled.pieces == {0: {0: Pieces(SHARES[0])}}


OTHER = Extents.part((("model", 4), ("exp_avg", 4), ("more", 1)), [BlockRun("model", 0, 4)])


def test_parts_of_states_with_other_planes_are_not_put_together():
    """One of them has built its optimizer anew, so not even all of their blocks are a state."""
    holdings = {0: replace(at(5, snapshots=((0, 3),)), stages={0: MODEL}), 1: replace(at(5), stages={0: OTHER})}
    settled = settle(plan((0, 1)), holdings)
    assert (settled.target, settled.back, settled.pieces) == (Key(3, 0), True, {})
    assert settled.wants == {0: {0: (0,)}, 1: {0: (0,)}}


def test_who_has_its_share_of_the_step_stays_there_whatever_planes_others_have():
    holdings = {0: replace(at(3), stages={0: OTHER}), 1: sharing(3, 1), 2: at(3, 0)}
    settled = settle(shared(), {i: doubting(one, 3) for i, one in holdings.items()})
    assert (settled.target, settled.back) == (Key(3, 0), True)
    assert settled.wants == {0: {0: (2,)}} and settled.pieces == {0: {0: Pieces(SHARES[0])}}


def test_a_gather_may_be_taken_with_a_part():
    hurt = replace(at(5), stages={0: WHOLE - ONE})
    settled = settle(plan((0, 1)), {0: at(5, 0, seq=1), 1: hurt})
    assert settled.rolls == {1} and settled.pieces == {1: {0: Pieces(ONE)}}


def test_a_part_of_another_initial_state_is_none():
    zero = Holding(Key(0, 0), {}, 0, "this")
    other = Holding(Key(0, 0), {}, 0, "that", stages={0: WHOLE - ONE})
    settled = settle(plan((0, 1)), {0: zero, 1: other})
    assert settled.wants == {1: {0: (0,)}} and settled.pieces == {}
    same = replace(other, digest="this")
    assert settle(plan((0, 1)), {0: zero, 1: same}).pieces == {1: {0: Pieces(ONE)}}


def test_lanes_of_a_repaired_stage_run_again():
    hurt = replace(at(5), stages={0: WHOLE - ONE})
    assert settle(plan((1, 0)), {0: at(5, 0), 1: hurt}).rerun == {0, 1}


def test_one_behind_rolls_forward_also_where_a_member_holds_a_later_step_alone():
    """That of an earlier run, which nobody else can come to."""
    holdings = {0: at(3, 0), 1: at(2, 1, gradient=3), 2: at(6, 1)}
    settled = settle(plan((0,), (1, 2)), holdings)
    assert (settled.target, settled.back, settled.rolls) == (Key(3, 0), True, {1})
    assert settled.wants == {2: {1: (1,)}}


def test_where_some_know_that_a_step_is_computed_once_more_all_of_its_lanes_are() -> None:
    knows = replace(at(3, 0, lacking=(0,)), doubt=Doubt(4, 0))
    holdings = {0: knows, 1: at(3, 0, gradient=4)}
    assert unaware(holdings, 4) == {1} and unaware(holdings, 5) == set()
    assert settle(plan((0, 1)), holdings).rerun == {0, 1}
    both = {i: replace(one, doubt=Doubt(4, 0)) for i, one in holdings.items()}
    assert unaware(both, 4) == set() and settle(plan((0, 1)), both).rerun == {0}


def test_the_oldest_doubt_of_any_member_counts() -> None:
    holdings = {i: Holding(Key(9, 0), {}, 0, sound=sound) for i, sound in enumerate((7, -1, 4))}
    assert sound_limit(holdings) == 4 and sound_limit({1: holdings[1]}) is None
