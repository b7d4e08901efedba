"""The step machine where generations meet: what is superseded counts for nothing, what was served is served again."""

from __future__ import annotations

import pytest

from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import (
    Discard,
    Doubt,
    Entered,
    FetchState,
    GatherWanted,
    GradientReduced,
    Holding,
    HoldingArrived,
    Key,
    LaneDone,
    LanesNeeded,
    PlanArrived,
    Record,
    RecordArrived,
    ReductionDue,
    Release,
    SendHolding,
    SendRecord,
    ServeState,
    StateCopied,
    StepDecided,
    StepEffect,
    StepEvent,
    StepWanted,
    Updated,
    UpdateRefused,
)


def plan(generation: int, *ids: int) -> Plan:
    """Worker 0 has lanes 0 and 1, whoever else there is."""
    seats = tuple(Seat(i, 0, "standby" if i else "active", () if i else (0, 1)) for i in ids)
    return Plan(generation, "because", tuple(Member(i, 0, "host") for i in ids), seats, 2)


class Machine:
    """Worker 0's, in generation 1 with worker 1."""

    def __init__(self, digest: str = "") -> None:
        self.machine = StepMachine(WorkerKey(0, 0), digest)
        self.enter(plan(1, 0, 1))

    def on(self, event: StepEvent) -> list[StepEffect]:
        return self.machine.handle(event)

    def enter(self, given: Plan, *others: Holding) -> list[StepEffect]:
        [mine] = [e.holding for e in self.on(PlanArrived(given)) if isinstance(e, SendHolding)]
        for n, i in enumerate(given.worker_ids[1:]):
            self.on(HoldingArrived(given.generation, i, others[n] if n < len(others) else mine))
        return self.on(HoldingArrived(given.generation, 0, mine))

    def records(self, key: Key, *who: int) -> list[StepEffect]:
        effects: list[StepEffect] = []
        for i in who:
            effects = self.on(RecordArrived(self.machine.generation, key, i, Record(0, b"")))
        return effects

    def to_agree(self) -> None:
        number = self.machine.step + 1
        for effect in self.on(StepWanted()):
            if isinstance(effect, LanesNeeded):
                for lane in effect.lanes:
                    self.on(LaneDone(number, 0, lane))
        self.on(GradientReduced(self.machine.generation, number, b""))

    def step(self) -> list[StepEffect]:
        self.to_agree()
        effects = self.records(Key(self.machine.step + 1, 0), 0, 1)
        return effects + self.on(Updated(self.machine.step))


def test_records_of_the_generation_before_do_not_decide_in_the_next() -> None:
    m = Machine()
    m.records(Key(1, 0), 1)
    m.enter(plan(2, 0, 1))
    m.to_agree()
    assert m.records(Key(1, 0), 0) == [], "worker 1 has not contributed to this generation"
    assert isinstance(m.records(Key(1, 0), 1)[-1], StepDecided)


def test_a_superseded_reduction_is_not_voted_with_while_the_next_one_runs() -> None:
    m = Machine()
    m.on(StepWanted())
    m.on(LaneDone(1, 0, 0))
    assert m.on(LaneDone(1, 0, 1)) == [ReductionDue(1, 1)]
    assert m.enter(plan(2, 0, 1)) == [Entered(2, 0), ReductionDue(2, 1)]
    assert m.on(GradientReduced(1, 1, b"old")) == []
    assert m.on(GradientReduced(2, 1, b"new")) == [SendRecord(2, Key(1, 0), Record(0, b"new"))]


def test_a_lane_of_a_step_that_is_over_is_none_of_the_next() -> None:
    m = Machine()
    m.step()
    assert m.on(LaneDone(1, 0, 0)) == [] and m.machine._known.next.lanes == frozenset()
    assert m.on(StepWanted()) == [LanesNeeded(2, (0, 1))]


def test_state_is_served_in_each_generation_that_somebody_lacks_it_in() -> None:
    m = Machine()
    m.step()
    behind = Holding(Key(0, 0), {}, 0)
    assert m.enter(plan(2, 0, 1), behind) == [ServeState(2, Key(1, 0), (1,)), Entered(2, 1)]
    assert m.enter(plan(3, 0, 2), behind) == [ServeState(3, Key(1, 0), (2,)), Entered(3, 1)]


def test_a_gather_releases_its_step_once() -> None:
    m = Machine()
    m.step()
    m.on(GatherWanted(b""))
    assert Release(1) in m.records(Key(1, 1), 0, 1)
    m.on(GatherWanted(b""))
    assert not any(isinstance(e, Release) for e in m.records(Key(1, 2), 0, 1))
    assert not any(isinstance(e, Release) for e in m.step())


def test_a_stale_plan_is_not_taken() -> None:
    m = Machine()
    m.enter(plan(3, 0, 1))
    assert m.on(PlanArrived(plan(2, 0, 1))) == [] and m.on(PlanArrived(plan(3, 0, 1))) == []
    assert m.machine.generation == 3


def test_a_gradient_of_the_step_before_is_not_stated_after_a_copy() -> None:
    m = Machine()
    m.to_agree()
    assert m.machine._known.next.gradient_step == 1
    effects = m.enter(plan(2, 0, 1), Holding(Key(2, 0), {1: Record(0, b"")}, 0))
    assert effects == [FetchState(2, Key(2, 0), {0: (1,)})]
    m.on(StateCopied(2, Key(2, 0), {1: Record(0, b"")}))
    assert m.machine._known.next.gradient_step == 0 and m.machine._known.next.lanes == frozenset()


def test_lanes_of_an_initial_state_that_was_replaced_are_none_of_the_other() -> None:
    m = Machine("mine")
    m.machine = StepMachine(WorkerKey(1, 0), "mine")
    m.on(PlanArrived(plan(1, 0, 1)))
    m.on(LaneDone(1, 0, 0))
    m.on(GradientReduced(1, 1, b""))
    m.on(HoldingArrived(1, 0, Holding(Key(0, 0), {}, 0, "theirs")))
    assert m.on(HoldingArrived(1, 1, m.machine.holding())) == [FetchState(1, Key(0, 0), {0: (0,)})]
    assert m.on(StateCopied(1, Key(0, 0), {})) == [Discard(1), Entered(1, 0)]
    assert m.machine._known.next.lanes == frozenset() and m.machine._known.next.gradient_step == 0


RECORDS = {1: Record(0, b"")}


def test_what_is_over_is_kept_no_longer() -> None:
    m = Machine()
    m.step()
    assert m.machine._known.decisions.given(Key(1, 0)) == {}
    m.enter(plan(2, 0, 1))
    assert m.machine._entering._holdings.keys() == {2}


def test_what_was_decided_before_it_was_asked_for_answers_nothing_at_another_position() -> None:
    m = Machine()
    m.step()
    assert m.enter(plan(2, 0, 1), Holding(Key(1, 1), RECORDS, 0)) == [Release(1), Entered(2, 1)]
    m.enter(plan(3, 0, 1), Holding(Key(2, 0), RECORDS, 0))
    m.on(StateCopied(3, Key(2, 0), RECORDS))
    assert m.on(GatherWanted(b"")) == [SendRecord(3, Key(2, 1), Record(0, b""))]


@pytest.mark.parametrize("intact", [False, True])
def test_a_step_that_is_refused_leads_back_to_the_decision_before_it_if_that_counts(intact: bool) -> None:
    m = Machine()
    m.on(GatherWanted(b""))
    m.records(Key(0, 1), 0, 1)
    m.to_agree()
    m.records(Key(1, 0), 0, 1)
    assert m.machine.undone == 0
    m.on(UpdateRefused(0, intact))
    assert m.machine.position == Key(0, 1 if intact else 0) and bool(m.machine.records) == intact
    assert m.machine.undone == intact


def test_after_a_refusal_nobody_goes_on_in_that_generation() -> None:
    m = Machine()
    m.to_agree()
    m.records(Key(1, 0), 0, 1)
    m.on(UpdateRefused(0, intact=True))
    assert m.on(HoldingArrived(1, 1, Holding(Key(0, 0), {}, 0))) == [] and not m.machine.settled


def test_who_does_not_know_that_all_do_the_step_again_drops_what_it_has_computed_of_it() -> None:
    m = Machine()
    m.on(StepWanted())
    m.on(LaneDone(1, 0, 0))
    aware = Holding(Key(0, 0), {}, 0, doubt=Doubt(step=1))
    assert m.enter(plan(2, 0, 1), aware) == [Discard(1, undone=True), Entered(2, 0), LanesNeeded(1, (0, 1))]


def test_a_step_in_doubt_that_others_have_done_meanwhile_is_not_done_again() -> None:
    m = Machine()
    done, aware = Holding(Key(1, 0), RECORDS, 0), Holding(Key(0, 0), {}, 0, doubt=Doubt(step=1))
    assert m.enter(plan(2, 0, 1, 2), done, aware) == [FetchState(2, Key(1, 0), {0: (1,)})]


def test_a_copy_of_a_later_position_of_the_same_step_leaves_what_was_computed_of_the_next() -> None:
    m = Machine()
    m.step()
    m.enter(plan(2, 0, 1), Holding(Key(1, 2), RECORDS, 0))
    assert m.on(StateCopied(2, Key(1, 2), RECORDS)) == [Release(1), Discard(1), Entered(2, 1)]
