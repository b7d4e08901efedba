"""The worker's step machine, alone and among peers: what it decides, what it waits for, how it catches up."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest

from everstep.base.errors import InvariantViolation
from everstep.base.extents import WHOLE
from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.protocol.settling import settle
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_phases import TRANSITIONS, Phase
from everstep.protocol.step_types import (
    Discard,
    Entered,
    FetchState,
    Followed,
    Gathered,
    GatherWanted,
    GoBack,
    GradientReduced,
    Holding,
    HoldingArrived,
    Key,
    LaneDone,
    LanesLost,
    LanesNeeded,
    Leave,
    LeftPlan,
    PlanArrived,
    PreparedArrived,
    Record,
    RecordArrived,
    ReductionDue,
    Regroup,
    Release,
    SendHolding,
    SendRecord,
    ServeState,
    SettleAnew,
    SnapshotsKept,
    StateCopied,
    StepDecided,
    StepEffect,
    StepEvent,
    StepLeft,
    StepWanted,
    Updated,
    UpdateRefused,
)

LANES = 4
START = Key(0, 0)
RECORDS = {9: Record(0, b"")}


def plan(generation: int, ids: list[int], *, prepared: bool = False, lanes: dict[int, tuple[int, ...]] | None = None):
    given = lanes or {i: tuple(lane for lane in range(LANES) if lane % len(ids) == n) for n, i in enumerate(ids)}
    return Plan(
        generation,
        "because",
        tuple(Member(i, 0, "host") for i in ids),
        tuple(Seat(i, 0, "active" if given[i] else "standby", given[i]) for i in ids),
        LANES,
        prepared=prepared,
    )


def record(prepared: int = 0, payload: bytes = b"") -> Record:
    return Record(prepared, payload)


class Peers:
    """One machine under test (worker 0) and imagined peers that say what the test wants."""

    def __init__(self, ids: list[int], *, digest: str = "same", enter: bool = True) -> None:
        self.machine = StepMachine(WorkerKey(0, 0), digest)
        self.ids = ids
        self.effects: list[StepEffect] = []
        if enter:
            self.on(PlanArrived(plan(1, ids)))
            self.hold_all(1)

    def on(self, event: StepEvent) -> list[StepEffect]:
        self.effects = self.machine.handle(event)
        return self.effects

    def holding(self, position: Key = START, *, gradient: int = 0, digest: str = "same", records=None) -> Holding:
        return Holding(position, records or {}, gradient, digest if position.step == 0 else "")

    def hold_all(self, generation: int, *others: Holding, mine: Holding | None = None) -> list[StepEffect]:
        """All members state what they hold; this worker what it sent."""
        said = [e.holding for e in self.effects if isinstance(e, SendHolding)]
        mine = mine or said[-1]
        peers = [i for i in self.machine.plan.worker_ids if i != 0]
        default = self.holding(mine.position, records=mine.records)
        for n, i in enumerate(peers):
            self.on(HoldingArrived(generation, i, others[n] if n < len(others) else default))
        return self.on(HoldingArrived(generation, 0, mine))

    def compute(self) -> list[StepEffect]:
        """Ask for a step and do the lanes; ends with `ReductionDue`."""
        effects = self.on(StepWanted())
        for effect in effects:
            if isinstance(effect, LanesNeeded):
                for lane in effect.lanes:
                    self.on(LaneDone(effect.step, 0, lane))
        return self.effects

    def reduce(self) -> list[StepEffect]:
        return self.on(GradientReduced(self.machine.generation, self.machine.step + 1, b"sums"))

    def agree(self, prepared: int = 0) -> list[StepEffect]:
        key = Key(self.machine.step + 1, 0)
        for i in self.machine.plan.worker_ids:
            self.on(RecordArrived(self.machine.generation, key, i, record(prepared)))
        return self.effects

    def step(self, prepared: int = 0) -> list[StepEffect]:
        self.compute()
        self.reduce()
        self.agree(prepared)
        return self.on(Updated(self.machine.step))


# ---- an ordinary step


def test_a_step_goes_through_lanes_reduce_agree_and_update():
    w = Peers([0, 1])
    assert w.effects == [Entered(1, 0)]
    assert w.on(StepWanted()) == [LanesNeeded(1, (0, 2))]
    assert w.on(LaneDone(1, 0, 2)) == []
    assert w.on(LaneDone(1, 0, 0)) == [ReductionDue(1, 1)]
    assert w.on(GradientReduced(1, 1, b"sums")) == [SendRecord(1, Key(1, 0), Record(0, b"sums"))]
    assert w.on(RecordArrived(1, Key(1, 0), 0, record())) == []
    assert w.machine.position == Key(0, 0)
    assert w.on(RecordArrived(1, Key(1, 0), 1, record())) == [StepDecided(1, {0: record(), 1: record()})]
    assert (w.machine.position, w.machine.phase) == (Key(1, 0), Phase.UPDATING)
    assert w.on(Updated(1)) == [Discard(1)]
    assert w.machine.phase is Phase.IDLE


def test_effects_of_a_step_leave_with_the_next_decision():
    w = Peers([0, 1])
    w.step()
    w.compute()
    w.reduce()
    assert w.agree() == [Release(1), StepDecided(2, {0: record(), 1: record()})]
    w.on(Updated(2))
    w.on(GatherWanted(b"x"))
    w.on(RecordArrived(1, Key(2, 1), 0, record()))
    effects = w.on(RecordArrived(1, Key(2, 1), 1, record()))
    assert effects == [Release(2), Gathered(Key(2, 1), {0: record(), 1: record()})]
    w.compute()
    w.reduce()
    assert Release(2) not in w.agree()


def test_a_worker_without_lanes_reduces_at_once():
    w = Peers([0, 1], enter=False)
    w.on(PlanArrived(plan(1, [0, 1], lanes={0: (), 1: (0, 1, 2, 3)})))
    w.hold_all(1)
    assert w.on(StepWanted()) == [ReductionDue(1, 1)]


def test_records_of_a_faster_peer_wait_and_duplicates_do_no_harm():
    w = Peers([0, 1])
    w.on(RecordArrived(1, Key(1, 0), 1, record(0, b"first")))
    w.on(RecordArrived(1, Key(1, 0), 1, record(0, b"again")))
    w.on(RecordArrived(1, Key(1, 1), 1, record(0, b"later")))
    w.compute()
    w.reduce()
    assert w.on(RecordArrived(1, Key(1, 0), 0, record())) == [StepDecided(1, {1: record(0, b"first"), 0: record()})]
    w.on(Updated(1))
    assert w.on(GatherWanted(b"g")) == [SendRecord(1, Key(1, 1), record(0, b"g"))]
    effects = w.on(RecordArrived(1, Key(1, 1), 0, record(0, b"g")))
    assert Gathered(Key(1, 1), {1: record(0, b"later"), 0: record(0, b"g")}) in effects


def test_records_of_strangers_and_of_other_generations_count_for_nothing():
    w = Peers([0, 1])
    w.compute()
    w.reduce()
    w.on(RecordArrived(1, Key(1, 0), 0, record()))
    assert w.on(RecordArrived(1, Key(1, 0), 7, record())) == []
    assert w.on(RecordArrived(0, Key(1, 0), 1, record())) == []
    assert w.on(RecordArrived(2, Key(1, 0), 1, record())) == []
    assert w.machine.position == Key(0, 0)


def test_the_application_may_ask_one_thing_at_a_time():
    w = Peers([0, 1])
    w.on(StepWanted())
    with pytest.raises(InvariantViolation, match="asked"):
        w.on(StepWanted())


# ---- plans


def test_older_plans_and_plans_without_this_worker_are_ignored():
    w = Peers([0, 1])
    assert w.on(PlanArrived(plan(1, [0]))) == []
    assert w.on(PlanArrived(plan(2, [1]))) == []
    assert w.machine.generation == 1


def test_a_plan_in_the_middle_of_a_step_keeps_lanes_and_computes_only_what_is_missing():
    w = Peers([0, 1, 2, 3])
    w.on(StepWanted())
    w.on(LaneDone(1, 0, 0))
    effects = w.on(PlanArrived(plan(2, [0, 1], lanes={0: (0, 2), 1: (1, 3)})))
    assert [type(e) for e in effects] == [Leave, Regroup, SendHolding]
    assert w.hold_all(2) == [Entered(2, 0), LanesNeeded(1, (2,))]
    assert w.on(LaneDone(1, 0, 2)) == [ReductionDue(2, 1)]


def test_a_lane_that_was_under_way_counts_when_it_is_done_while_settling():
    w = Peers([0, 1])
    w.on(StepWanted())
    w.on(LaneDone(1, 0, 0))
    w.on(PlanArrived(plan(2, [0, 1])))
    sent = w.effects
    w.on(LaneDone(1, 0, 2))
    w.effects = sent
    assert w.hold_all(2) == [Entered(2, 0), ReductionDue(2, 1)]


def test_the_gradient_is_held_across_generations_and_the_step_is_done_again():
    w = Peers([0, 1, 2])
    w.compute()
    w.reduce()
    effects = w.on(PlanArrived(plan(2, [0, 1])))
    assert effects[-1] == SendHolding(2, Holding(Key(0, 0), {}, 1, "same", lacking=(2,)))
    effects = w.hold_all(2)
    assert effects[0] == Entered(2, 0) and isinstance(effects[1], LanesNeeded | ReductionDue)
    assert w.machine._known.next.gradient_step == 1


def test_what_is_told_of_another_step_changes_nothing():
    """It is late, and what it speaks of is over, or it is ahead of everything that is known here."""
    w = Peers([0, 1])
    w.step()
    w.on(StepWanted())
    for step in (1, 3):
        before = w.machine._known.next.gradient_step
        for event in (LaneDone(step, 0, 0), LanesLost(step, ((0, 0),)), GradientReduced(1, step, b"other")):
            assert w.on(event) == []
        assert w.machine._known.next.gradient_step == before and w.machine.phase is Phase.COMPUTING
    w.on(LaneDone(2, 0, 0))
    assert w.on(LaneDone(2, 0, 2)) == [ReductionDue(1, 2)], "its own lanes are as they were"


def test_a_step_that_nobody_has_asked_for_cannot_be_left():
    w = Peers([0, 1])
    assert w.on(StepLeft()) == [] and w.machine.phase is Phase.IDLE
    w.on(StepWanted())
    assert w.on(StepLeft()) == [] and w.machine.phase is Phase.IDLE
    assert w.on(StepWanted()) == [LanesNeeded(1, (0, 2))], "and all its lanes are to be computed"


def test_a_gradient_that_completes_too_late_is_held_but_not_voted_with():
    w = Peers([0, 1, 2])
    w.compute()
    w.on(PlanArrived(plan(2, [0, 1])))
    assert w.on(GradientReduced(1, 1, b"old")) == []
    assert w.machine._known.next.gradient_step == 1
    w.on(PlanArrived(plan(3, [0, 1])))
    assert w.effects[-1] == SendHolding(3, Holding(Key(0, 0), {}, 1, "same", lacking=(2,)))


def test_a_plan_during_the_update_states_the_new_position_and_settles_after_it():
    w = Peers([0, 1])
    w.compute()
    w.reduce()
    w.agree()
    effects = w.on(PlanArrived(plan(2, [0, 1])))
    sent = effects[-1]
    assert isinstance(sent, SendHolding) and sent.holding.position == Key(1, 0)
    assert w.machine.phase is Phase.UPDATING
    w.on(HoldingArrived(2, 1, sent.holding))
    w.on(HoldingArrived(2, 0, sent.holding))
    assert w.on(Updated(1)) == [Discard(1), Entered(2, 1)]


def test_a_gather_that_was_not_decided_is_sent_again_in_the_next_generation():
    w = Peers([0, 1])
    w.on(GatherWanted(b"mine"))
    w.on(PlanArrived(plan(2, [0, 1])))
    assert w.hold_all(2) == [Entered(2, 0), SendRecord(2, Key(0, 1), record(0, b"mine"))]


def test_what_is_asked_while_settling_is_done_afterwards():
    w = Peers([0, 1], enter=False)
    w.on(PlanArrived(plan(1, [0, 1])))
    sent = w.effects
    assert w.on(StepWanted()) == []
    w.effects = sent
    assert w.hold_all(1) == [Entered(1, 0), LanesNeeded(1, (0, 2))]


# ---- settle


def test_whoever_holds_the_gradient_rolls_forward_with_the_records_of_the_others():
    w = Peers([0, 1])
    w.compute()
    w.reduce()
    w.on(PlanArrived(plan(2, [0, 1])))
    handed = {0: record(0, b"a"), 1: record(0, b"b")}
    assert w.hold_all(2, w.holding(Key(1, 0), records=handed)) == [StepDecided(1, handed)]
    assert w.machine.position == Key(1, 0)
    assert w.on(Updated(1)) == [Discard(1), Entered(2, 1)]
    assert w.on(StepWanted()) == [LanesNeeded(2, (0, 2))]


def test_a_plan_in_the_middle_of_rolling_forward_starts_afresh():
    w = Peers([0, 1])
    w.compute()
    w.reduce()
    w.on(PlanArrived(plan(2, [0, 1])))
    w.hold_all(2, w.holding(Key(1, 0), records={0: record(), 1: record()}))
    effects = w.on(PlanArrived(plan(3, [0, 1])))
    assert effects[-1] == SendHolding(3, Holding(Key(1, 0), {0: record(), 1: record()}, 0, "", lacking=(0, 2)))
    w.on(HoldingArrived(3, 0, effects[-1].holding))
    w.on(HoldingArrived(3, 1, effects[-1].holding))
    assert w.on(Updated(1)) == [Discard(1), Entered(3, 1)]


def test_whoever_has_neither_state_nor_gradient_copies_and_asks_anew():
    w = Peers([0, 1, 2])
    w.on(StepWanted())
    w.on(PlanArrived(plan(2, [0, 1, 2])))
    ahead = w.holding(Key(1, 0), records={1: record()})
    assert w.hold_all(2, ahead, ahead) == [FetchState(2, Key(1, 0), {0: (1, 2)})]
    assert w.machine.phase is Phase.FETCHING
    assert w.on(StateCopied(2, Key(1, 0), {1: record()})) == [Discard(1), Entered(2, 1)]
    assert w.machine.phase is Phase.IDLE
    assert w.on(StepWanted()) == [LanesNeeded(2, (0, 3))]


def test_those_at_the_top_serve_those_who_must_copy():
    w = Peers([0, 1, 2])
    w.step()
    w.on(PlanArrived(plan(2, [0, 1, 2])))
    behind, close = w.holding(Key(0, 0)), w.holding(Key(0, 0), gradient=1)
    assert w.hold_all(2, behind, close) == [ServeState(2, Key(1, 0), (1,)), Entered(2, 1)]


def test_a_copy_that_is_not_expected_is_a_bug():
    w = Peers([0, 1])
    with pytest.raises(InvariantViolation, match="state_copied"):
        w.on(StateCopied(1, Key(3, 0), {}))


def test_a_plan_ends_a_copy_in_progress():
    w = Peers([0, 1])
    w.on(PlanArrived(plan(2, [0, 1])))
    w.hold_all(2, w.holding(Key(5, 0)))
    w.on(PlanArrived(plan(3, [0, 2])))
    assert w.machine.phase is Phase.SETTLING
    with pytest.raises(InvariantViolation):
        w.on(StateCopied(2, Key(5, 0), {}))


def test_one_gather_behind_is_made_up_with_the_records_that_are_handed_over():
    w = Peers([0, 1])
    w.on(GatherWanted(b"mine"))
    w.on(PlanArrived(plan(2, [0, 1])))
    handed = {0: record(0, b"mine"), 1: record(0, b"theirs")}
    effects = w.hold_all(2, w.holding(Key(0, 1), records=handed))
    assert effects == [Gathered(Key(0, 1), handed, here=False), Entered(2, 0)]
    assert w.machine.position == Key(0, 1)


def test_a_gather_decided_before_this_application_asked_is_its_answer():
    w = Peers([0, 1], enter=False)
    w.on(PlanArrived(plan(2, [0, 1])))
    handed = {1: record(0, b"theirs")}
    assert w.hold_all(2, w.holding(Key(0, 1), records=handed)) == [Entered(2, 0)]
    assert w.machine._known.decisions.next_gather == Key(0, 1)
    assert w.on(GatherWanted(b"mine")) == [Gathered(Key(0, 1), handed, here=False)]
    assert w.machine._known.decisions.next_gather == Key(0, 2)


def test_other_initial_states_are_replaced_by_that_of_the_lowest_id():
    w = Peers([0, 1], enter=False)
    w.on(PlanArrived(plan(1, [0, 1])))
    assert w.hold_all(1, w.holding(digest="other")) == [ServeState(1, Key(0, 0), (1,)), Entered(1, 0)]
    late = StepMachine(WorkerKey(3, 0), "other")
    late.handle(PlanArrived(plan(1, [2, 3])))
    late.handle(HoldingArrived(1, 2, w.holding()))
    late.handle(LaneDone(1, 0, 0))
    assert late.handle(HoldingArrived(1, 3, w.holding(digest="other"))) == [FetchState(1, Key(0, 0), {0: (2,)})]
    assert late.handle(StateCopied(1, Key(0, 0), {})) == [Discard(1), Entered(1, 0)]
    assert late._known.next.lanes == frozenset()
    again = late.handle(PlanArrived(plan(2, [2, 3])))
    assert again[-1] == SendHolding(2, Holding(Key(0, 0), {}, 0, "same", lacking=(1, 3)))


@pytest.mark.parametrize(
    ("holdings", "donors", "fetchers"),
    [
        ({0: Holding(Key(4, 0), RECORDS, 0), 1: Holding(Key(4, 0), RECORDS, 0)}, (0, 1), ()),
        ({0: Holding(Key(4, 0), RECORDS, 0), 1: Holding(Key(3, 2), RECORDS, 4)}, (0,), ()),
        ({0: Holding(Key(4, 0), RECORDS, 0), 1: Holding(Key(3, 2), RECORDS, 0)}, (0,), (1,)),
        ({0: Holding(Key(4, 1), RECORDS, 0), 1: Holding(Key(3, 0), RECORDS, 4)}, (0,), (1,)),
        ({0: Holding(Key(4, 1), RECORDS, 0), 1: Holding(Key(4, 0), RECORDS, 5)}, (0,), ()),
        ({0: Holding(Key(4, 2), RECORDS, 0), 1: Holding(Key(4, 0), RECORDS, 0)}, (0,), (1,)),
        (
            {0: Holding(Key(2, 0), RECORDS, 3), 1: Holding(Key(4, 0), RECORDS, 0), 2: Holding(Key(3, 0), RECORDS, 4)},
            (1,),
            (0,),
        ),
        ({1: Holding(Key(0, 0), RECORDS, 0, "a"), 2: Holding(Key(0, 0), RECORDS, 0, "b")}, (1,), (2,)),
        ({1: Holding(Key(0, 1), RECORDS, 0, "a"), 2: Holding(Key(0, 0), RECORDS, 0, "a")}, (1,), ()),
    ],
)
def test_who_must_copy_from_whom(holdings, donors, fetchers):
    settled = settle(plan(1, sorted(holdings)), holdings)
    assert not settled.back
    assert settled.wants == {i: {0: donors} for i in fetchers}
    assert settled.serves == (dict.fromkeys(donors, fetchers) if fetchers else {})


def test_holdings_of_a_later_generation_wait_for_its_plan():
    w = Peers([0, 1])
    w.on(HoldingArrived(2, 1, w.holding()))
    w.on(PlanArrived(plan(2, [0, 1])))
    assert w.on(HoldingArrived(2, 0, w.holding())) == [Entered(2, 0)]


# ---- prepared plans


def test_the_switch_follows_the_first_agree_in_which_all_hold_the_plan():
    w = Peers([0, 1])
    w.on(PreparedArrived(plan(2, [0, 1, 2], prepared=True)))
    w.compute()
    assert w.reduce()[-1] == SendRecord(1, Key(1, 0), Record(2, b"sums"))
    w.on(RecordArrived(1, Key(1, 0), 0, record(2)))
    w.on(RecordArrived(1, Key(1, 0), 1, record(0)))
    assert w.on(Updated(1)) == [Discard(1)]
    w.compute()
    w.reduce()
    w.agree(prepared=2)
    effects = w.on(Updated(2))
    assert [type(e) for e in effects] == [Discard, Leave, Regroup, SendHolding]
    assert w.machine.generation == 2 and w.machine.prepared == 0


def test_the_plan_that_was_voted_for_is_switched_to_even_if_a_newer_one_has_come():
    w = Peers([0, 1])
    w.on(PreparedArrived(plan(2, [0, 1, 2], prepared=True)))
    w.compute()
    w.reduce()
    w.on(PreparedArrived(plan(3, [0, 1, 3], prepared=True)))
    assert w.machine.prepared == 3
    w.agree(prepared=2)
    w.on(Updated(1))
    assert w.machine.generation == 2 and w.machine.prepared == 3


def test_a_plan_at_once_drops_older_prepared_ones():
    w = Peers([0, 1])
    w.on(PreparedArrived(plan(2, [0, 1, 2], prepared=True)))
    w.compute()
    w.reduce()
    w.agree(prepared=2)
    w.on(PlanArrived(plan(3, [0, 1])))
    assert w.machine.prepared == 0
    sent = next(e for e in w.effects if isinstance(e, SendHolding)).holding
    w.on(HoldingArrived(3, 1, sent))
    w.on(HoldingArrived(3, 0, sent))
    assert w.on(Updated(1)) == [Discard(1), Entered(3, 1)]


@pytest.mark.parametrize("switch", [2, 3])
def test_a_plan_at_once_leaves_the_switch_to_a_newer_one_as_it_was_decided(switch: int):
    w = Peers([0, 1])
    w.on(PreparedArrived(plan(switch, [0, 1], prepared=True)))
    w.compute()
    w.reduce()
    w.agree(prepared=switch)
    w.on(PlanArrived(plan(2, [0, 1])))
    w.hold_all(2)
    effects = w.on(Updated(1))
    if switch == 2:  # it has been made
        assert effects == [Discard(1), Entered(2, 1)]
    else:
        assert [type(e) for e in effects] == [Discard, Leave, Regroup, SendHolding] and w.machine.generation == 3


def test_a_prepared_plan_that_was_switched_to_is_prepared_no_more():
    w = Peers([0, 1])
    coming = plan(2, [0, 1], prepared=True)
    w.on(PreparedArrived(coming))
    w.step(prepared=2)
    w.on(PreparedArrived(coming))
    assert w.machine.generation == 2 and w.machine.prepared == 0


def test_nobody_leaves_by_records_that_are_refused():
    w = Peers([0, 1])
    w.on(PreparedArrived(plan(2, [1], prepared=True)))
    w.compute()
    w.reduce()
    w.agree(prepared=2)
    assert w.machine.switch is not None and not w.machine.switch.has(w.machine.me)
    w.on(UpdateRefused(0))
    assert w.machine.switch is None


def test_a_gather_does_not_switch():
    w = Peers([0, 1])
    w.on(PreparedArrived(plan(2, [0, 1, 2], prepared=True)))
    w.on(GatherWanted(b""))
    w.on(RecordArrived(1, Key(0, 1), 0, record(2)))
    assert w.on(RecordArrived(1, Key(0, 1), 1, record(2))) == [Gathered(Key(0, 1), {0: record(2), 1: record(2)})]
    assert w.machine.generation == 1


def test_whoever_is_not_in_the_plan_leaves_at_the_switch():
    w = Peers([0, 1])
    w.on(PreparedArrived(plan(2, [1], prepared=True)))
    assert w.step(prepared=2) == [Discard(1), Leave(1, "because"), LeftPlan(2)]
    assert w.machine.phase is Phase.LEFT and w.machine.plan is None
    for generation in (1, 2):  # echoes
        assert w.on(GradientReduced(generation, 2, b"sums")) == []
        assert w.on(RecordArrived(generation, Key(2, 0), 1, record())) == []
    assert w.on(PlanArrived(plan(2, [0, 1]))) == []
    assert [type(e) for e in w.on(PlanArrived(plan(3, [0, 1])))] == [Regroup, SendHolding]


def test_a_joiner_follows_and_switches_at_the_same_step_as_the_members():
    w = Peers([0, 1, 2], enter=False)
    w.on(Followed(Key(4, 2)))
    assert w.machine.position == Key(4, 2)
    w.on(PreparedArrived(plan(2, [0, 1, 2], prepared=True)))
    assert w.on(Followed(Key(5, 0), {1: record(0), 2: record(2)})) == []
    effects = w.on(Followed(Key(6, 0), {1: record(2), 2: record(2)}))
    assert effects[0] == Release(5) and [type(e) for e in effects[1:]] == [Regroup, SendHolding]
    peers = w.holding(Key(6, 0), records={1: record(2), 2: record(2)})
    assert w.hold_all(2, peers, peers) == [Entered(2, 6)]


def test_a_joiner_that_gets_the_plan_after_the_records_switches_then():
    w = Peers([0, 1], enter=False)
    w.on(Followed(Key(6, 0), {1: record(2)}))
    effects = w.on(PreparedArrived(plan(2, [0, 1], prepared=True)))
    assert [type(e) for e in effects] == [Regroup, SendHolding]


def test_a_joiner_may_be_taken_in_at_once_from_where_it_is():
    w = Peers([0, 1], enter=False)
    w.on(Followed(Key(5, 0), {1: record(0)}))
    w.on(PlanArrived(plan(2, [0, 1])))
    assert w.hold_all(2, w.holding(Key(6, 0))) == [FetchState(2, Key(6, 0), {0: (1,)})]


def test_a_joiner_does_not_switch_to_a_plan_without_it():
    w = Peers([0, 1], enter=False)
    w.on(PreparedArrived(plan(2, [1], prepared=True)))
    assert w.on(Followed(Key(6, 0), {1: record(2)})) == [Release(5)] and w.machine.plan is None


def test_what_a_joiner_was_asked_before_it_followed_is_asked_anew():
    w = Peers([0, 1], enter=False)
    assert w.on(StepWanted()) == w.on(Followed(Key(0, 0))) == w.on(StepWanted()) == []


def test_a_member_does_not_follow():
    w = Peers([0, 1])
    with pytest.raises(InvariantViolation, match="followed"):
        w.on(Followed(Key(1, 0)))


# ---- the table


def test_every_event_has_its_row_and_every_phase_is_reached():
    assert len({row[0] for row in TRANSITIONS}) == len(TRANSITIONS)
    reached = {phase for row in TRANSITIONS for phase in row[3]}
    assert reached == set(Phase) - {Phase.WAITING}
    machine = StepMachine(WorkerKey(0, 0))
    for _, _, handler, _ in TRANSITIONS:
        assert callable(attrgetter(handler)(machine))


# ---- states that differ


def tainted(peers: Peers, sound: int) -> None:
    """The records of the present step show that states differ."""
    peers.compute()
    peers.reduce()
    assert isinstance(peers.agree()[-1], StepDecided)
    assert peers.on(UpdateRefused(sound)) == []
    assert peers.machine.phase is Phase.SETTLING and not peers.machine.settled


def test_all_go_back_when_states_differ():
    peers = Peers([0, 1, 2])
    for _ in range(3):
        peers.compute(), peers.reduce(), peers.agree(), peers.on(Updated(peers.machine.step))
    peers.on(SnapshotsKept(dict.fromkeys(((0, 1), (0, 2)), WHOLE)))
    tainted(peers, 1)
    sent = next(e for e in peers.on(PlanArrived(plan(2, [0, 2]))) if isinstance(e, SendHolding))
    assert sent.holding.sound == 1 and sent.holding.position == Key(3, 0)
    other = Holding(Key(3, 0), {}, 0, snapshots=dict.fromkeys(((0, 1), (0, 2)), WHOLE), sound=1)
    effects = peers.hold_all(2, other)
    assert effects[-1] == GoBack(2, 1, {0: (0, 2)})
    peers.on(StateCopied(2, Key(1, 0), RECORDS))
    assert peers.machine.settled and peers.machine.position == Key(1, 0)
    again = next(e for e in peers.on(PlanArrived(plan(3, [0, 2]))) if isinstance(e, SendHolding))
    assert again.holding.sound == 1, "until a decision proves that all have gone back"
    peers.hold_all(3, Holding(Key(1, 0), {}, 0, sound=1))
    peers.compute(), peers.reduce(), peers.agree(), peers.on(Updated(2))
    last = next(e for e in peers.on(PlanArrived(plan(4, [0, 2]))) if isinstance(e, SendHolding))
    assert last.holding.sound == -1


def test_one_that_did_not_know_of_it_states_anew_what_it_has():
    peers = Peers([0, 1])
    peers.compute(), peers.reduce(), peers.agree(), peers.on(Updated(1))
    peers.on(PlanArrived(plan(2, [0, 1])))
    effects = peers.hold_all(2, Holding(Key(1, 0), {}, 0, sound=0))
    assert [type(e) for e in effects] == [SettleAnew]
    assert peers.on(HoldingArrived(4, 1, peers.holding())) == [], "it is said once"
    sent = next(e for e in peers.on(PlanArrived(plan(3, [0, 1]))) if isinstance(e, SendHolding))
    assert sent.holding.sound == 0
    effects = peers.hold_all(3, Holding(Key(1, 0), {}, 0, sound=0))
    assert effects == [GoBack(3, 0, {0: ()})]


def test_a_plan_tells_of_taint_to_those_who_have_not_found_it():
    peers = Peers([0, 1])
    peers.compute(), peers.reduce(), peers.agree(), peers.on(Updated(1))
    effects = peers.on(PlanArrived(replace(plan(2, [0, 1]), sound=0)))
    sent = next(e for e in effects if isinstance(e, SendHolding))
    assert sent.holding.sound == 0
    assert peers.hold_all(2, Holding(Key(1, 0), {}, 0, sound=0)) == [GoBack(2, 0, {0: ()})]


def test_a_worker_that_was_in_no_plan_before_trusts_what_it_has_built():
    peers = Peers([0, 1], enter=False)
    peers.on(PlanArrived(replace(plan(1, [0, 1]), sound=0)))
    peers.hold_all(1, replace(peers.holding(), sound=0))
    assert peers.machine.settled and peers.machine.stages == (0,)


def test_a_worker_that_has_copied_a_first_state_does_not_take_it_for_its_own():
    peers = Peers([0, 1], enter=False)
    peers.on(Followed(Key(0, 0)))
    effects = peers.on(PlanArrived(replace(plan(1, [0, 1]), sound=0)))
    assert [e.holding.stages for e in effects if isinstance(e, SendHolding)] == [{}]


def test_the_live_state_that_was_found_to_differ_is_not_gone_back_to():
    peers = Peers([0, 1])
    peers.compute(), peers.reduce(), peers.agree()
    peers.on(UpdateRefused(0))
    effects = peers.on(PlanArrived(plan(2, [0, 1])))
    sent = next(e for e in effects if isinstance(e, SendHolding))
    assert sent.holding.position == Key(0, 0) and sent.holding.stages == {}
    other = Holding(Key(0, 0), {}, 0, stages={}, sound=0, lacking=(0, 1, 2, 3))
    assert peers.hold_all(2, other) == [GoBack(2, 0, {0: ()})]
    effects = peers.on(StateCopied(2, Key(0, 0), {}))
    assert Discard(1) in effects, "what was computed from the other state counts for nothing"
    assert isinstance(effects[-1], LanesNeeded), "the application still waits for the step"


def stated(effects: list[StepEffect]) -> Holding:
    return next(e for e in effects if isinstance(e, SendHolding)).holding


def test_a_state_that_is_no_later_than_what_is_sound_counts():
    peers = Peers([0, 1])
    peers.step()
    sent = stated(peers.on(PlanArrived(replace(plan(2, [0, 1]), sound=3))))
    assert sent.sound == 3 and sent.stages == {0: WHOLE}


def test_a_state_that_an_update_leads_to_is_not_the_one_that_differed():
    peers = Peers([0, 1])
    peers.compute(), peers.reduce(), peers.agree()
    assert stated(peers.on(PlanArrived(replace(plan(2, [0, 1]), sound=1)))).stages == {0: WHOLE}


def test_what_was_reduced_from_states_in_doubt_counts_for_nothing():
    peers = Peers([0, 1])
    peers.compute(), peers.reduce()
    sent = stated(peers.on(PlanArrived(replace(plan(2, [0, 1]), sound=0))))
    assert sent.stages == {} and sent.gradient_step == 0


def test_who_knows_of_an_older_step_that_is_sound_keeps_to_it():
    peers = Peers([0, 1])
    tainted(peers, 0)
    assert stated(peers.on(PlanArrived(replace(plan(2, [0, 1]), sound=3)))).sound == 0


@pytest.mark.parametrize("at", [Key(0, 0), Key(1, 2)])
@pytest.mark.parametrize(("generation", "counts"), [(5, False), (7, True)])
def test_who_followed_members_that_went_back_without_it_has_nothing_that_counts(at, generation, counts):
    """The plan that told of the taint was not heard here, and the next one tells of no new taint."""
    peers = Peers([0, 1], enter=False)
    peers.on(Followed(at, RECORDS, generation=generation))
    sent = stated(peers.on(PlanArrived(replace(plan(8, [0, 1]), voided=7))))
    assert sent.stages == ({0: WHOLE} if counts else {}) and sent.records == (RECORDS if counts else {})
    assert sent.sound == -1, "what the others have is not in doubt"
    assert peers.machine.position == at


def test_what_is_stated_in_a_generation_counts_in_the_next():
    peers = Peers([0, 1])
    peers.step()
    peers.on(PlanArrived(plan(7, [0, 1])))
    assert stated(peers.on(PlanArrived(replace(plan(8, [0, 1]), voided=7)))).stages == {0: WHOLE}


def test_who_has_built_its_state_itself_keeps_it_whatever_others_went_back_behind():
    peers = Peers([0, 1], enter=False)
    assert stated(peers.on(PlanArrived(replace(plan(8, [0, 1]), voided=7)))).stages == {0: WHOLE}
