"""A step that is not finite, at the driver: its outcome says what follows, members count, and the job ends with it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from driver_harness import Worker, at, joiner, member_worker, payload, plan, records_of, ticket

from everstep.base.plan import Plan
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.nonfinite import NonfiniteRule
from everstep.protocol.driver.records import AgreePayload, encode
from everstep.protocol.step_types import Key, Record

STOP, TWO = NonfiniteRule("stop"), NonfiniteRule("skip", 2)


def strange(given: Plan, worker_id: int, **more: Any) -> AgreePayload:
    """The worker's payload; the losses of its lanes are not finite."""
    said = payload(given, worker_id, **more)
    lanes = [msgspec.structs.replace(lane, loss=math.nan) for lane in said.sections[-1].lanes]
    return msgspec.structs.replace(said, sections=[msgspec.structs.replace(said.sections[-1], lanes=lanes)])


def records(given: Plan, **more: Any) -> dict[int, Record]:
    """Of a step in which worker 1 has found what is not finite."""
    return {**records_of(given), 1: Record(0, encode(strange(given, 1, **more)))}


def step(w: Worker, number: int, **more: Any) -> list[Any]:
    """A whole step that is not finite, up to the answer."""
    w.to_agree(number)
    w.exchange(records(w.plan, **more))
    return w.done(1000 + number)


def says(w: Worker) -> int:
    """How many steps in a row before this one were not finite, as this worker contributes."""
    return msgspec.msgpack.decode(w.sent().payload, type=AgreePayload).nonfinite


def test_the_outcome_says_what_becomes_of_the_update() -> None:
    w = member_worker(0, 1, nonfinite=TWO)
    w.to_agree(1)
    w.exchange(records(w.plan))
    found = w.op.outcome.nonfinite
    assert found.left_out and found.lanes == (1, 3) and found.in_a_row == 1 and not found.ends
    w.done(1001)
    assert w.out[-1] == do.Stepped(1)


def test_each_says_how_many_there_were_in_a_row() -> None:
    w = member_worker(0, 1, nonfinite=TWO)
    step(w, 1)
    w.to_agree(2)
    assert says(w) == 1
    w.agree()
    w.done(1002)
    w.to_agree(3)
    assert says(w) == 0


@pytest.mark.parametrize(("rule", "first"), [(STOP, 0), (TWO, 1)])
def test_the_step_that_ends_the_job_is_answered_with_the_reason(rule: NonfiniteRule, first: int) -> None:
    w = member_worker(0, 1, nonfinite=rule)
    step(w, 1, nonfinite=first)
    assert isinstance(w.out[-1], do.EndsJob) and "lanes 1, 3 is not finite" in w.out[-1].reason
    w.ask(do.HoldAsked("last words", 1 << 60))
    assert "Tell" in w.kinds, "it stays, for others may need what it holds"


def test_who_has_replayed_the_step_begins_no_other() -> None:
    """The members may all be gone before anybody hears of it."""
    members = plan(1, (1, 2))
    w = joiner(nonfinite=STOP)
    w.hear(ticket(7, members))
    w.done((Key(4, 0),))
    w.done(do.Copied(records=records_of(members), gathers={Key(4, 0): records_of(members)}))
    w.done([do.Seen(0, 5, records(members))])
    assert isinstance(w.op, do.Replay) and w.op.outcome.nonfinite.ends
    w.done()
    w.hear(plan(2, (0, 1, 2)))
    w.abort()
    w.settle(w1=at(5), w2=at(5))
    assert isinstance(w.out[-1], do.EndsJob) and w.op is None
    w.ask(do.StepAsked(6))
    assert isinstance(w.out[-1], do.EndsJob) and w.op is None, "whoever asks for the next hears the same"


def test_who_has_the_state_from_a_checkpoint_goes_on_and_counts() -> None:
    """An earlier run of the job had ended with it."""
    w = joiner(nonfinite=TWO)
    w.hear(plan(1, (0, 1)))
    w.settle(do.Opened(disk=(5,)), w1=at(0, disk=(5,), lacking=(1, 3)))
    assert isinstance(w.op, do.Restore) and w.op.step == 5
    w.done(do.Copied(records=records(w.plan, nonfinite=1)))
    assert w.out[-1] == do.Arrived(5)
    w.to_agree(6)
    assert says(w) == 2


def test_what_is_not_finite_reaches_the_optimizer_where_it_is_only_warned_of_and_not_scaled() -> None:
    rules = (NonfiniteRule(), STOP, TWO, NonfiniteRule("warn", 10), NonfiniteRule("warn", 10, scaled=True))
    assert [rule.applies for rule in rules] == [True, False, False, True, False]
