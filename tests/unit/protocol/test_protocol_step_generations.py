"""The step machine where generations meet: what is superseded counts for nothing, what was served is served again."""

from __future__ import annotations

from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import (
    Discard,
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
