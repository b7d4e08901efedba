"""The step machine of a worker with seats in several stages: lanes, stages gained and lost, the way back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.base.errors import InvariantViolation
from everstep.base.extents import WHOLE, Extents
from everstep.base.plan import Member, Plan, Seat, Shard, WorkerKey
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_phases import Phase
from everstep.protocol.step_types import (
    Discard,
    Entered,
    FetchState,
    Followed,
    GoBack,
    GradientReduced,
    Holding,
    HoldingArrived,
    Holds,
    Key,
    LaneDone,
    LanesNeeded,
    Pieces,
    PlanArrived,
    Record,
    RecordArrived,
    ReductionDue,
    Release,
    SendHolding,
    SendRecord,
    ServeState,
    SnapshotsKept,
    StateCopied,
    StepDecided,
    StepWanted,
    Takes,
    Updated,
    UpdateRefused,
)

RECORDS = {9: Record(0, b"")}


def plan(generation: int, *seats: tuple[int, int, tuple[int, ...]], stages: int = 2, lanes: int = 2) -> Plan:
    ids = sorted({i for i, _, _ in seats})
    made = tuple(Seat(i, k, "active" if own else "standby", own) for i, k, own in seats)
    return Plan(generation, "because", tuple(Member(i, 0, "host") for i in ids), made, lanes, stages=stages)


def held(step: int, *stages: int, seq: int = 0, **more) -> Holding:
    return Holding(
        Key(step, seq),
        RECORDS if step else {},
        0,
        **{"stages": dict.fromkeys(stages, WHOLE), "gradients": dict.fromkeys(stages, WHOLE), **more},
    )


class Worker:
    """Worker 0 and an imagined worker 1."""

    def __init__(self) -> None:
        self.machine = StepMachine(WorkerKey(0, 0))
        self.seen: list = []

    def on(self, event):
        effects = self.machine.handle(event)
        self.seen += effects
        return effects

    def enter(self, generation: int, given: Plan, other: Holding):
        """Settle with the other's holding; returns what the last holding brought, and what this worker stated."""
        sent = next(e for e in self.on(PlanArrived(given)) if isinstance(e, SendHolding)).holding
        self.on(HoldingArrived(generation, 1, other))
        return self.on(HoldingArrived(generation, 0, sent)), sent

    def step(self) -> None:
        step = self.machine.step + 1
        for effect in self.on(StepWanted()):
            if isinstance(effect, LanesNeeded):
                for stage in self.machine.plan.stages_of(0):
                    for lane in set(effect.lanes) & set(self.machine.plan.lanes_of(0, stage)):
                        self.on(LaneDone(step, stage, lane))
        self.on(GradientReduced(self.machine.generation, step, b""))
        for i in (0, 1):
            self.on(RecordArrived(self.machine.generation, Key(step, 0), i, Record(0, b"")))
        self.on(Updated(step))


BOTH = plan(1, (0, 0, (0, 1)), (0, 1, (0,)), (1, 1, (1,)))
APART = plan(2, (0, 0, (0, 1)), (1, 1, (0, 1)))


def test_every_seat_needs_each_of_its_lanes():
    w = Worker()
    w.enter(1, BOTH, held(0, 1, lacking=(1,)))
    assert w.on(StepWanted()) == [LanesNeeded(1, (0, 1))]
    assert w.on(LaneDone(1, 0, 0)) == w.on(LaneDone(1, 0, 1)) == []
    assert w.on(LaneDone(1, 1, 0)) == [ReductionDue(1, 1)]


def test_after_a_settle_what_anybody_lacks_runs_again_everywhere():
    w = Worker()
    w.enter(1, plan(1, (0, 0, (0, 1)), (1, 1, (0, 1))), held(0, 1))
    w.on(StepWanted())
    w.on(LaneDone(1, 0, 0))
    w.on(LaneDone(1, 0, 1))
    effects, sent = w.enter(2, APART, held(0, 1, lacking=(1,)))
    assert sent.lacking == ()
    assert effects == [Entered(2, 0), LanesNeeded(1, (1,))]
    assert w.on(LaneDone(1, 0, 0)) == []  # not asked for
    assert w.on(LaneDone(1, 0, 1)) == [ReductionDue(2, 1)]
    w.on(GradientReduced(2, 1, b""))
    for i in (0, 1):
        w.on(RecordArrived(2, Key(1, 0), i, Record(0, b"")))
    w.on(Updated(1))
    assert w.on(StepWanted()) == [LanesNeeded(2, (0, 1))], "of the next step nobody has any"


def test_who_has_built_nothing_yet_states_the_stages_of_its_seats_alone():
    w = Worker()
    _, sent = w.enter(1, plan(1, (0, 1, (0, 1)), (1, 0, (0, 1))), held(0, 0))
    assert sent.stages == {1: WHOLE} and w.machine.stages == (1,)


def test_a_standby_reduces_and_agrees_without_computing():
    w = Worker()
    w.enter(1, plan(1, (0, 0, ()), (1, 0, (0, 1)), (1, 1, (0, 1))), held(0, 0, 1))
    assert w.on(StepWanted()) == [ReductionDue(1, 1)]
    assert w.on(GradientReduced(1, 1, b"x")) == [SendRecord(1, Key(1, 0), Record(0, b"x"))]


def test_a_seat_in_another_stage_is_fetched_alone_and_lanes_are_kept():
    w = Worker()
    w.enter(1, plan(1, (0, 0, (0, 1)), (1, 1, (0, 1))), held(0, 1))
    w.step()
    w.on(StepWanted())
    w.on(LaneDone(2, 0, 0))
    effects, sent = w.enter(2, plan(2, (0, 0, (0, 1)), (0, 1, (0,)), (1, 1, (1,))), held(1, 1, lacking=(1,)))
    assert sent.stages == {0: WHOLE} and sent.lacking == (0, 1)
    assert effects == [FetchState(2, Key(1, 0), {1: (1,)})]
    assert w.on(StateCopied(2, Key(1, 0), RECORDS)) == [Entered(2, 1), LanesNeeded(2, (0, 1))]
    assert w.machine._known.next.lanes == {(0, 0)} and w.machine.stages == (0, 1)


def test_a_lost_seat_is_served_from_until_the_next_decision():
    w = Worker()
    w.enter(1, BOTH, held(0, 1))
    w.step()
    effects, sent = w.enter(2, APART, held(1))
    assert sent.stages == dict.fromkeys((0, 1), WHOLE)
    assert effects[0] == ServeState(2, Key(1, 0), (1,)) and w.machine.stages == (0, 1)
    w.step()
    assert w.machine.stages == (0,)


def test_what_was_held_before_the_first_step_is_not_forgotten_either():
    """Another member has decided step 1; whoever has the gradient of a stage that it gives away takes it there."""
    w = Worker()
    w.enter(1, plan(1, (0, 0, (0, 1)), (0, 1, (0, 1)), (1, 1, ())), held(0, 1))
    w.on(StepWanted())
    for stage in (0, 1):
        for lane in (0, 1):
            w.on(LaneDone(1, stage, lane))
    w.on(GradientReduced(1, 1, b""))
    beyond = plan(2, (0, 0, (0, 1)), (1, 1, (0, 1)))
    effects, sent = w.enter(2, beyond, Holding(Key(1, 0), RECORDS, 0, stages={}))
    assert sent.stages == w.machine.held == dict.fromkeys((0, 1), WHOLE) == dict(sent.gradients)
    assert StepDecided(1, RECORDS) in effects
    assert ServeState(2, Key(1, 0), (1,)) in w.on(Updated(1))


def gone_back(steps: int = 3) -> tuple[Worker, list]:
    """Worker 1 was the pool of stage 1; its next life has nothing."""
    w = Worker()
    w.enter(1, plan(1, (0, 0, (0, 1)), (1, 1, (0, 1))), held(0, 1))
    for _ in range(steps):
        w.step()
    w.on(SnapshotsKept({(0, 2): WHOLE, (1, 2): WHOLE}, (1,)))
    w.on(StepWanted())
    w.on(LaneDone(steps + 1, 0, 0))
    effects, _ = w.enter(2, APART, held(0, 1, disk=(1,)))
    return w, effects


def test_all_go_back_to_what_is_in_memory():
    w, effects = gone_back()
    assert effects == [ServeState(2, Key(2, 0), (1,)), GoBack(2, 2, {0: (0,)})]
    assert w.machine.phase is Phase.FETCHING and w.machine.position == Key(3, 0)
    assert w.on(StateCopied(2, Key(2, 0), RECORDS)) == [Discard(4), Entered(2, 2)]
    assert (w.machine.position, w.machine._known.next.lanes, w.machine.phase) == (Key(2, 0), frozenset(), Phase.IDLE)


def test_what_was_released_is_not_released_again():
    w, _ = gone_back()
    w.on(StateCopied(2, Key(2, 0), RECORDS))
    w.seen.clear()
    for _ in range(3):
        w.step()
    assert [e for e in w.seen if isinstance(e, Release)] == [Release(3), Release(4)]


def test_records_of_members_that_are_back_already_are_kept():
    w, _ = gone_back()
    assert w.on(RecordArrived(2, Key(3, 0), 1, Record(0, b"early"))) == []
    w.on(StateCopied(2, Key(2, 0), RECORDS))
    for effect in w.on(StepWanted()):
        for lane in effect.lanes:
            w.on(LaneDone(3, 0, lane))
    w.on(GradientReduced(2, 3, b""))
    effects = w.on(RecordArrived(2, Key(3, 0), 0, Record(0, b"")))
    assert any(isinstance(e, StepDecided) for e in effects)


def test_a_fault_on_the_way_back_starts_afresh():
    w, _ = gone_back()
    effects, sent = w.enter(3, plan(3, (0, 0, (0, 1)), (1, 1, (0, 1))), held(2, 1))
    assert sent.position == Key(3, 0)
    assert effects == [GoBack(3, 2, {0: (0,)})]  # worker 1 has arrived, and wants nothing


def test_another_step_than_the_target_is_a_bug():
    w, _ = gone_back()
    with pytest.raises(InvariantViolation, match="expected the state"):
        w.on(StateCopied(2, Key(1, 0), {}))


def test_a_joiner_says_which_stages_it_follows_and_may_start_anew_at_an_older_step():
    w = Worker()
    w.on(Followed(Key(6, 0), RECORDS, (1,)))
    w.on(Followed(Key(4, 0), RECORDS, (1,)))
    assert w.machine.position == Key(4, 0)
    effects, sent = w.enter(2, plan(2, (0, 1, (0, 1)), (1, 0, (0, 1))), held(4, 0))
    assert sent.stages == {1: WHOLE} and effects == [Entered(2, 4)]


def test_a_superseded_reduction_says_nothing_of_the_stages_of_another_plan():
    w = Worker()
    w.enter(1, BOTH, held(0, 1))
    w.on(PlanArrived(APART))
    w.on(GradientReduced(1, 1, b""))
    assert w.machine.holding().gradient_step == 0


# ---- seats that hold parts of a stage

OF = (("model", 2), ("exp_avg", 2))


def blocks(*numbers: int) -> Extents:
    return Extents.numbered(OF, numbers)


MINE, OTHERS = blocks(0, 1, 2), blocks(0, 1, 3)


def shared(generation: int, mine: Extents = MINE, others: Extents = OTHERS) -> Plan:
    shards = (Shard(0, 0, mine), Shard(1, 0, others))
    return replace(plan(generation, (0, 0, (0, 1)), (1, 0, ()), stages=1), shards=shards)


def share_of(other: Extents, step: int, **more) -> Holding:
    return replace(held(step), stages={0: other}, gradients={0: other}, **more)


def sharing() -> Worker:
    """At step 1, from where on neither has what only the other is to have."""
    w = Worker()
    w.enter(1, shared(1), held(0, 0))
    w.step()
    assert w.machine.stages == (0,) and w.machine.held == {0: MINE}
    return w


def reduce_second(w: Worker) -> None:
    """It holds the gradient of step 2."""
    w.on(StepWanted())
    for lane in (0, 1):
        w.on(LaneDone(2, 0, lane))
    w.on(GradientReduced(1, 2, b""))


def test_after_a_step_there_is_the_share_and_with_it_all_goes_on():
    w = sharing()
    effects, sent = w.enter(2, shared(2), share_of(OTHERS, 1))
    assert sent.stages == sent.gradients == {0: MINE}
    assert effects == [Entered(2, 1)]
    w.step()
    assert w.machine.position == Key(2, 0)


def test_what_was_computed_with_a_share_counts_in_the_next_generation():
    w = sharing()
    w.on(StepWanted())
    w.on(LaneDone(2, 0, 1))
    effects, sent = w.enter(2, shared(2), share_of(OTHERS, 1))
    assert sent.lacking == (0,) and effects == [Entered(2, 1), LanesNeeded(2, (0,))]


def test_less_than_the_share_is_lacking_and_comes_of_who_has_it():
    """A step moved the shares, and the others' part of it did not come."""
    w = sharing()
    reduce_second(w)
    for i in (0, 1):
        w.on(RecordArrived(1, Key(2, 0), i, Record(0, b"")))
    w.on(Holds(2, {0: blocks(0, 2)}, moved=True))
    w.on(Updated(2))
    assert w.machine.phase is Phase.LACKING and w.machine.held == {0: blocks(0, 2)}
    assert w.on(StepWanted()) == [], "nothing is computed from what is there instead"
    effects, sent = w.enter(2, shared(2), share_of(OTHERS, 2))
    assert sent.stages == {0: blocks(0, 2)}
    assert FetchState(2, Key(2, 0), {0: (1,)}, {0: Pieces(blocks(1), {1: blocks(1)})}) in effects
    effects = w.on(StateCopied(2, Key(2, 0), RECORDS))
    assert Discard(3) in effects and Entered(2, 2) in effects and w.machine.held == {0: MINE}
    assert effects[-1] == LanesNeeded(3, (0, 1))


def test_the_gradient_takes_the_share_forward():
    w = sharing()
    reduce_second(w)
    effects, sent = w.enter(2, shared(2), share_of(OTHERS, 2))
    assert sent.gradient_step == 2 and StepDecided(2, RECORDS) in effects
    assert Entered(2, 2) in w.on(Updated(2)) and w.machine.held == {0: MINE}


def test_a_larger_share_is_filled_and_a_smaller_one_is_not_copied():
    w = sharing()
    effects, _ = w.enter(2, shared(2, WHOLE, OTHERS), share_of(OTHERS, 1))
    assert FetchState(2, Key(1, 0), {0: (1,)}, {0: Pieces(blocks(3), {1: blocks(3)})}) in effects
    assert Discard(2) in w.on(StateCopied(2, Key(1, 0), RECORDS))
    assert w.machine.stages == (0,) and w.machine.position == Key(1, 0)
    effects, sent = w.enter(3, shared(3, blocks(0), OTHERS), share_of(OTHERS, 1))
    assert sent.stages == {0: WHOLE} and Entered(3, 1) in effects
    w.step()
    assert w.machine.held == {0: blocks(0)}


def test_without_its_only_holder_all_go_back_to_where_a_block_is():
    w = sharing()
    w.on(SnapshotsKept({(0, 1): MINE}))
    w.step()
    effects, _ = w.enter(2, shared(2), share_of(blocks(0, 1), 2, snapshots={(0, 1): OTHERS}))
    assert GoBack(2, 1, {0: (0,)}) in effects
    w.on(StateCopied(2, Key(1, 0), RECORDS))
    assert w.machine.position == Key(1, 0) and w.machine.held == {0: MINE}


def refused(w: Worker) -> None:
    """Reduce the next step, and decide it with records that show that it is to be done again from the same states."""
    number = w.machine.step + 1
    for effect in w.on(StepWanted()):
        for lane in effect.lanes if isinstance(effect, LanesNeeded) else ():
            for stage in w.machine.plan.stages_of(0):
                w.on(LaneDone(number, stage, lane))
    w.on(GradientReduced(w.machine.generation, number, b""))
    for i in (0, 1):
        effects = w.on(RecordArrived(w.machine.generation, Key(number, 0), i, Record(0, b"")))
    assert isinstance(effects[-1], StepDecided)
    w.on(UpdateRefused(0, intact=True))


def test_what_was_held_before_a_refused_step_is_still_there_for_others():
    w = Worker()
    w.enter(1, BOTH, held(0, 1))
    w.step()
    w.enter(2, APART, held(1, 1))
    refused(w)
    effects, sent = w.enter(3, plan(3, (0, 0, (0, 1)), (1, 1, (0, 1))), held(1))
    assert sent.stages == dict.fromkeys((0, 1), WHOLE)
    assert ServeState(3, Key(1, 0), (1,)) in effects and w.machine.position == Key(1, 0)


def test_a_refused_step_that_was_handed_over_leads_back_to_the_one_before_it():
    w = Worker()
    w.enter(1, BOTH, held(0, 1))
    w.step()
    w.on(StepWanted())
    for stage, lane in ((0, 0), (0, 1), (1, 0)):
        w.on(LaneDone(2, stage, lane))
    w.on(GradientReduced(1, 2, b""))
    effects, _ = w.enter(2, replace(BOTH, generation=2), held(2, 0, 1))
    assert StepDecided(2, RECORDS) in effects
    w.on(UpdateRefused(0, intact=True))
    assert w.machine.position == Key(1, 0) and w.machine.stages == (0, 1)


def test_what_is_computed_from_a_stage_that_lacks_blocks_is_lacking():
    """Another worker would hold the same after it has copied the rest, and has not computed."""
    w = sharing()
    w.on(StepWanted())
    for lane in (0, 1):
        w.on(LaneDone(2, 0, lane))
    _, sent = w.enter(2, shared(2, WHOLE, OTHERS), share_of(OTHERS, 1))
    assert sent.lacking == (0, 1)


def test_the_share_of_a_seat_is_that_of_its_stage():
    w = Worker()
    given = plan(1, (0, 1, (0, 1)), (1, 0, (0, 1)))
    w.enter(1, replace(given, shards=(Shard(0, 1, MINE),)), held(0, 0))
    w.step()
    assert w.machine.held == {1: MINE}


def test_who_holds_more_than_its_share_has_that_when_it_rolls_forward():
    w = Worker()
    w.enter(1, shared(1), held(0, 0))
    w.on(StepWanted())
    for lane in (0, 1):
        w.on(LaneDone(1, 0, lane))
    w.on(GradientReduced(1, 1, b""))
    effects, _ = w.enter(2, shared(2), share_of(OTHERS, 1))
    assert StepDecided(1, RECORDS) in effects and w.machine.held == {0: MINE}


# ---- what is left when a state was copied


ALONE = plan(2, (0, 0, (0, 1)), (0, 1, (0, 1)), (1, 1, ()))
"""Worker 0 has a seat in each stage."""


def test_what_was_computed_from_ones_own_state_counts_though_another_stage_is_copied():
    w = Worker()
    w.enter(1, replace(APART, generation=1), held(0, 1))
    w.step()
    effects, _ = w.enter(2, ALONE, held(2, snapshots=dict.fromkeys(((0, 1), (1, 1)), WHOLE)))
    assert effects[-1] == GoBack(2, 1, {0: (0, 1), 1: (1,)})
    assert Discard(2) not in w.on(StateCopied(2, Key(1, 0), RECORDS)) and w.machine.stages == (0, 1)


SHARING_BOTH = replace(BOTH, shards=tuple(Shard(0, stage, MINE) for stage in (0, 1)))


def test_what_was_computed_counts_for_nothing_if_one_of_several_stages_is_not_ones_own():
    w = Worker()
    w.enter(1, replace(BOTH, shards=(Shard(0, 1, MINE),)), held(0, 1))
    w.step()
    effects, _ = w.enter(2, ALONE, held(2, snapshots={(1, 1): WHOLE}))
    assert isinstance(effects[-1], GoBack) and effects[-1].sources == {0: (0,), 1: (1,)}
    assert Discard(2) in w.on(StateCopied(2, Key(1, 0), RECORDS))


def test_a_stage_without_a_seat_is_kept_until_the_next_decision():
    w = Worker()
    w.enter(1, SHARING_BOTH, held(0, 1))
    w.step()
    w.enter(2, APART, held(1, 0, 1))
    w.on(StateCopied(2, Key(1, 0), RECORDS))
    assert w.machine.held == {0: WHOLE, 1: MINE}


@pytest.mark.parametrize("of", [MINE, WHOLE])
def test_of_an_initial_state_a_part_is_kept_without_a_seat_and_the_whole_is_not_for_it_can_be_built(of: Extents):
    tainted = replace(SHARING_BOTH, generation=2, sound=0, shards=(Shard(0, 0, MINE), Shard(0, 1, of)))
    w = Worker()
    w.enter(1, BOTH, held(0, 1))
    w.enter(2, tainted, held(0, 0, 1, sound=0))
    w.on(StateCopied(2, Key(0, 0), {}, {0: OF, 1: OF}))
    assert w.machine.held == {0: MINE, 1: of}
    w.enter(3, replace(APART, generation=3, sound=0), held(0, 0, 1, sound=0))
    w.on(StateCopied(3, Key(0, 0), {}))
    assert w.machine.held == ({0: WHOLE} if of.whole else {0: WHOLE, 1: of})


def test_a_stage_without_a_seat_is_not_taken_to_another_step():
    w = Worker()
    w.enter(1, BOTH, held(0, 1))
    w.step()
    w.enter(2, APART, held(3, 0, 1))
    w.on(StateCopied(2, Key(3, 0), RECORDS))
    assert w.machine.held == {0: WHOLE}


def test_a_gradient_of_parts_that_came_as_a_plan_did_is_of_these_parts():
    """What was reduced in the generation before takes no more to its step than it was said to."""
    w, part = Worker(), Extents.numbered((("optimizer/m", 4),), [1, 2])
    w.enter(1, plan(1, (0, 0, (0, 1)), (1, 0, ()), stages=1), held(0))
    w.on(StepWanted())
    for lane in (0, 1):
        w.on(LaneDone(1, 0, lane))
    w.on(PlanArrived(plan(2, (0, 0, (0, 1)), (1, 0, ()), stages=1)))
    w.on(Takes(1, {0: part}))
    w.on(GradientReduced(1, 1, b""))
    holding = w.machine.holding()
    assert (holding.gradient_step, dict(holding.gradients)) == (1, {0: part})
