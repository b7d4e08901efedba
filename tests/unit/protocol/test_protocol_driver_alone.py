"""The end of a job without its coordinator: one worker says so in its record, and all save that step and leave."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from driver_harness import Worker, joiner, member_worker, payload, plan, records_of

from everstep.base.cause import Cause, Why
from everstep.base.config_keys import CheckpointConfig
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.policy import END
from everstep.protocol.driver.records import AgreePayload, conclude, encode
from everstep.protocol.driver.saver import SavingRules
from everstep.protocol.step_types import Record, Release

WHY = Why(Cause.INTERRUPTED, "no coordinator")
RULES = SavingRules(CheckpointConfig(), on=True)


def said(w: Worker) -> AgreePayload:
    """What it says of the step that is being decided."""
    return msgspec.msgpack.decode(w.sent().payload, type=AgreePayload)


def ending(w: Worker, by: int) -> dict[int, Record]:
    """Everybody's records, of whom this one knows that the job is to end."""
    due = ((END, "disk"), WHY.reason)
    told = msgspec.structs.replace(payload(w.plan, by), save=due, save_cause=WHY.cause)
    return {**records_of(w.plan, but=0), by: Record(0, encode(told))}


@pytest.mark.parametrize("told", [0, 1], ids=["told itself", "told by another"])
def test_all_save_the_step_in_whose_records_it_stands(told: int) -> None:
    w = member_worker(0, 1, saving=RULES)
    w.step(1)
    if told == 0:
        w.on(do.EndOrdered(WHY))
    w.to_agree(2)
    assert (END in said(w).save[0]) == (told == 0)
    w.exchange(records_of(w.plan, but=0) if told == 0 else ending(w, 1))
    w.done(1002)
    assert isinstance(w.op, do.SaveLast) and w.op.step == 2
    assert w.op.save is not None and w.op.save.due.tiers == ("disk",) and not w.op.save.past
    w.done("checkpoints/step-2")
    assert Release(2) in w.out, "who has written its part has decided the step: it is told"
    assert w.out[-1] == do.Exit(WHY.reason, failed=True) and w.driver.ended is not None
    assert w.driver.ended.state == "interrupted"


def test_a_plan_in_the_middle_has_it_taken_again_and_then_it_leaves() -> None:
    w = member_worker(0, 1, 2, saving=RULES)
    w.on(do.EndOrdered(WHY))
    w.to_agree(1)
    w.agree()
    w.done(1001)
    w.abort(2)
    assert w.op is None, "once in a generation"
    w.hear(plan(2, (0, 1)))
    w.settle()
    assert isinstance(w.op, do.SaveLast) and w.op.generation == 2
    w.done("checkpoints/step-1")
    assert w.out[-1] == do.Exit(WHY.reason, failed=True)


def test_a_job_without_checkpoints_ends_at_one_step_too() -> None:
    w = member_worker(0, 1)
    w.on(do.EndOrdered(WHY))
    w.to_agree(1)
    w.agree()
    w.done(1001)
    assert isinstance(w.op, do.SaveLast) and w.op.save is None
    w.done("")
    assert not any(isinstance(e, Release) for e in w.out), "nothing says that the others have decided it"
    assert w.out[-1] == do.Exit(WHY.reason, failed=True)


def test_who_is_no_member_leaves_at_once() -> None:
    w = joiner()
    assert w.on(do.EndOrdered(WHY))[-1] == do.Exit(WHY.reason, failed=True)


def test_a_job_that_is_over_is_not_ended_once_more() -> None:
    w = joiner()
    w.hear(wire.JobEnded(state="completed", cause=Cause.STARTED, reason="", exit_code=0))
    w.on(do.EndOrdered(WHY))
    w.ask(do.EndAsked())
    assert w.driver.ended is not None and w.driver.ended.state == "completed"


def test_after_a_checkpoint_by_a_plan_nobody_waits_for_a_coordinator_that_is_gone() -> None:
    w = member_worker(0, 1, saving=RULES)
    w.step(1)
    w.ask(do.StepAsked(2))
    w.enter(replace(plan(2, (0, 1)), save="interrupted"))
    w.done("checkpoints/step-1")
    assert isinstance(w.op, do.Linger)
    w.on(do.EndOrdered(WHY))
    w.done()
    assert w.out[-1] == do.Exit(WHY.reason, failed=True)


def test_that_the_job_ends_goes_before_what_the_leader_has_due() -> None:
    w = member_worker(0, 1)
    w.to_agree(1)
    due = msgspec.structs.replace(
        payload(w.plan, 0), save=(("disk", "memory"), "every step"), save_cause=Cause.SCHEDULED
    )
    outcome = conclude(1, w.plan.lanes, {**ending(w, 1), 0: Record(0, encode(due))})
    assert outcome.ends and outcome.save == ((END, "disk"), WHY.reason) and outcome.save_cause is Cause.INTERRUPTED
