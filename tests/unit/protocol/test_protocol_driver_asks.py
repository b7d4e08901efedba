"""The driver's discipline: one operation, one ask, what waits, what is left, and what is told again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_type_hints

import pytest
from driver_harness import (
    Worker,
    joiner,
    member,
    member_worker,
    plan,
    ticket,
)

from everstep.base.cause import Cause
from everstep.base.errors import InvariantViolation
from everstep.base.extents import WHOLE
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.hearing import FOREVER, interrupts
from everstep.protocol.driver.outbox import Situation
from everstep.protocol.step_types import Discard, Key, LaneDone

# ---- discipline


def test_operations_are_numbered_and_answered_once() -> None:
    w = member_worker(0, 1)
    w.ask(do.StepAsked(1))
    number = w.op.op
    with pytest.raises(InvariantViolation, match=f"operation {number + 1} was answered, outstanding is Compute"):
        w.on(do.Done(number + 1))
    w = member_worker(0, 1)
    w.ask(do.StepAsked(1))
    w.lanes()
    for event in (do.Done(number), do.Aborted(number), do.Tainted(op=number, why=do.LEFT)):
        with pytest.raises(InvariantViolation, match=f"operation {number} was answered"):
            w.on(event)


def test_nothing_is_answered_while_nothing_is_outstanding() -> None:
    w = member_worker(0, 1)
    with pytest.raises(InvariantViolation, match="outstanding is None"):
        w.on(do.Done(2))


def test_operations_bear_ascending_numbers_and_their_generation() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.ask(do.StepAsked(2))
    w.enter(plan(2, (0, 1)))
    made = [e for e in w.seen if isinstance(e, do.Operation)]
    assert [o.op for o in made] == list(range(1, len(made) + 1))
    assert [o.generation for o in made] == [1] * (len(made) - 3) + [2, 2, 2]


def test_one_ask_at_a_time() -> None:
    w = member_worker(0, 1)
    w.ask(do.StepAsked(1))
    with pytest.raises(InvariantViolation, match="before StepAsked"):
        w.ask(do.GatherAsked(b""))


def test_messages_wait_while_an_operation_is_outstanding() -> None:
    w = member_worker(0, 1)
    w.ask(do.StepAsked(1))
    w.hear(plan(2, (0, 1)))
    w.on(LaneDone(1, 0, 0))
    assert w.driver.machine.generation == 1 and w.seen[-1] == do.Compute(
        op=3, generation=1, plan=plan(1, (0, 1)), step=1, lanes=(0, 2)
    )
    w.done()
    assert w.driver.machine.generation == 2 and [type(e) for e in w.out] == [do.Cut, do.Open]


def test_messages_wait_while_the_application_has_the_turn() -> None:
    w = member_worker(0, 1)
    w.hear(plan(2, (0, 1)))
    w.on(do.TimePassed())
    assert w.out == [] and w.driver.machine.generation == 1
    w.ask(do.StepAsked(1))
    assert w.out[0] == do.Cut(1) and isinstance(w.op, do.Open)


def test_messages_go_before_what_is_queued() -> None:
    """A plan that came during an exchange is taken before the update that was decided, which is done all the same."""
    w = member_worker(0, 1)
    w.to_agree(1)
    w.hear(plan(2, (0, 1)))
    w.agree()
    assert w.out == [do.Decided(key=Key(1, 0), generation=1, first=True), w.op] and isinstance(w.op, do.Update)
    assert w.driver.machine.generation == 2
    w.done(1)
    assert w.out == [do.Cut(1), w.op] and isinstance(w.op, do.Open)
    w.settle()
    assert Discard(1) in w.seen and w.out[-1] == do.Stepped(1)


def test_lanes_and_snapshots_are_noted_at_any_time() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.gather()
    w.to_reduce(2)
    w.keeps(((0, 1), (0, 2)))
    assert w.out == []
    w.abort()
    w.hear(plan(2, (0, 1)))
    w.done(do.Opened())
    assert w.stated().snapshots == {(0, 1): WHOLE}, "what has not been released is not stated"


def test_a_tick_is_nothing_by_itself() -> None:
    w = member_worker(0, 1)
    assert w.on(do.TimePassed()) == []


def test_a_message_for_somebody_else_is_nothing() -> None:
    w = joiner()
    assert w.hear(wire.ProfileNow(name="p", first_step=1, steps=2)) == []


INTERRUPTING = {"PlanNow", "Heal", "JobEnded", "Dismissed"}


def some(kind: type) -> Any:
    """A message of this kind, with values that mean nothing."""
    given = plan(7, (0, 1))
    known: dict[str, Any] = {
        "plan": given,
        "member": member(0),
        "worker": wire.WorkerLife(worker_id=0, incarnation=0, pid=1),
    }
    plain = {"str": "", "int": 0, "bool": False, "float": 0.0, "bytes": b""}
    values = {
        name: known.get(name, plain.get(getattr(of, "__name__", ""), []))
        for name, of in get_type_hints(kind).items()
        if not name.startswith("_")
    }
    return kind(**values)


@pytest.mark.parametrize("kind", wire.KINDS)
def test_what_ends_the_operations_of_a_generation(kind: type) -> None:
    expected = {"PlanNow": 6, "Heal": 6, "JobEnded": FOREVER, "Dismissed": FOREVER}.get(kind.__name__)
    assert interrupts(some(kind)) == expected
    assert (expected is not None) == (kind.__name__ in INTERRUPTING)


def test_a_stale_plan_cuts_nothing_of_the_present_generation_and_is_not_taken() -> None:
    w = Worker(plan(5, (0, 1)))
    w.ask(do.StepAsked(1))
    stale = plan(4, (0, 1))
    cut = interrupts(wire.PlanNow(plan=stale))
    assert cut is not None and cut < w.op.generation
    w.hear(stale)
    w.lanes()
    assert isinstance(w.op, do.Reduce) and w.driver.machine.generation == 5
    w.hear(plan(5, (0, 1)))
    w.reduce()
    assert isinstance(w.op, do.Exchange) and w.op.tag.kind == "decide"


def test_a_plan_without_this_life_is_not_taken() -> None:
    w = member_worker(0, 1)
    w.ask(do.StepAsked(1))
    w.hear(plan(2, (1, 2)))
    another_life = plan(3, (0, 1))
    w.hear(replace(another_life, members=(member(0, 1), member(1))))
    w.lanes()
    assert w.driver.machine.generation == 1 and isinstance(w.op, do.Reduce)


# ---- aborted


def test_an_aborted_operation_accuses_whom_it_waited_for_and_nothing_more_is_done_before_the_next_plan() -> None:
    w = member_worker(0, 1, 2)
    w.to_agree(1)
    w.abort(2, 1, reason="no answer")
    assert w.out == [
        do.Tell(
            wire.PeerFault(
                worker_id=0, incarnation=0, generation=1, accused=[1, 2], cause=Cause.SILENT, reason="no answer"
            )
        )
    ]
    w.on(do.TimePassed())
    assert w.out == [] and w.op is None
    w.hear(plan(2, (0, 1)))
    assert isinstance(w.op, do.Open)


def test_nobody_is_accused_when_an_operation_was_only_left() -> None:
    w = member_worker(0, 1)
    w.to_agree(1)
    assert w.abort() == []


def test_what_was_queued_for_the_old_generation_is_dropped() -> None:
    w = member_worker(0, 1)
    w.ask(do.StepAsked(1))
    for lane in (0, 2):
        w.on(LaneDone(1, 0, lane))
    w.abort(1)
    assert w.op is None, "the reduction would need the one who is gone"
    w.hear(plan(2, (0,)))
    assert isinstance(w.op, do.Open)


# ---- what a reconnect repeats


def test_the_situation_is_position_stages_plan_and_what_was_told_since_the_generation_was_entered() -> None:
    w = member_worker(0, 1, 2)
    entered = w.told(wire.GenerationEntered)[-1]
    assert w.driver.situation == Situation(0, (0,), w.plan, 0, True, (entered,))
    w.step(1)
    assert w.driver.situation == Situation(1, (0,), w.plan, 0, True, (entered,))
    w.to_agree(2)
    w.abort(1)
    fault = w.told(wire.PeerFault)[-1]
    assert w.driver.situation == Situation(1, (0,), w.plan, 0, True, (entered, fault))
    w.hear(plan(2, (0, 1)))
    w.abort(1)
    again = w.told(wire.PeerFault)[-1]
    assert again.generation == 2 and w.driver.situation.messages == (entered, again), "the newest of a kind"
    w.hear(plan(3, (0, 1)))
    w.settle()
    assert w.driver.situation == Situation(1, (0,), w.plan, 0, True, (w.told(wire.GenerationEntered)[-1],))


def test_before_the_first_plan_the_situation_is_empty() -> None:
    assert Worker().driver.situation == Situation() and joiner().driver.situation == Situation(stages=(0,))


def test_a_ticket_forgets_what_was_told_of_the_one_before() -> None:
    w = joiner()
    w.hear(ticket(1, plan(1, (1, 2))))
    w.abort(reason="no donor")
    assert [type(m) for m in w.driver.situation.messages] == [wire.HealFailed]
    w.hear(ticket(2, plan(1, (1, 2))))
    assert w.driver.situation.messages == ()


def test_progress_is_that_of_the_present_generation() -> None:
    w = member_worker(0, 1)
    message = w.driver.progress(3, 2.5)
    assert message == wire.Progress(worker_id=0, incarnation=0, generation=1, step=3, step_ms=2.5)
