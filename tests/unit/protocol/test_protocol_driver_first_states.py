"""Initial states: what is built anew must be what the job began with, or it is refused by name."""

from __future__ import annotations

import pytest
from driver_harness import Worker, at, joiner, plan

from everstep.base.plan import Plan
from everstep.protocol.driver import operations as do
from everstep.protocol.step_types import Holding, Key


def begins(given: Plan, opened: do.Opened, **others: Holding) -> Worker:
    """Worker 0 after its first settle."""
    w = joiner(rewindable=True)
    w.hear(given)
    w.settle(opened, **others)
    return w


def refused(w: Worker) -> str:
    """Why it is; "" if it is not."""
    return next((effect.reason for effect in w.out if isinstance(effect, do.Refused)), "")


@pytest.mark.parametrize(
    ("mine", "theirs", "ok"),
    [
        ("aa", {"w1": "aa", "w2": "aa"}, True),
        ("aa", {"w1": "bb", "w2": "bb"}, False),  # outvoted
        ("aa", {"w1": "aa", "w2": "bb"}, True),
        ("aa", {"w1": "bb"}, True),  # of as many, that of the lowest id
        ("aa", {}, True),
    ],
)
def test_what_most_have_built_is_what_the_job_begins_with(mine: str, theirs: dict[str, str], ok: bool) -> None:
    peers = {name: at(0, built={0: digest}) for name, digest in theirs.items()}
    w = begins(plan(1, tuple(range(1 + len(theirs)))), do.Opened(built={0: mine}), **peers)
    if ok:
        assert w.out[-1] == do.Arrived(0)
    else:
        assert "stage 0" in refused(w) and "(aa)" in refused(w) and "(bb, says workers 1, 2)" in refused(w)
        assert w.op is None, "nothing is copied, or computed"


def split_worker() -> Worker:
    """Worker 0 of two, one for each stage, whose application has asked for step 1."""
    w = begins(plan(1, (0,), (1,)), do.Opened(built={0: "aa"}), w1=at(0, stages=(1,), built={1: "bb"}))
    w.ask(do.StepAsked(1))
    return w


@pytest.mark.parametrize(("digest", "ok"), [("bb", True), ("cc", False)])
def test_a_stage_that_is_built_anew_is_what_it_was(digest: str, ok: bool) -> None:
    """Its pool is gone, and the job is at its beginning still."""
    w = split_worker()
    w.enter(plan(2, (0,), (0,)), do.Opened(built={0: "aa", 1: digest}))
    assert bool(refused(w)) != ok and ("stage 1" in refused(w)) != ok
    assert isinstance(w.op, do.Compute) == ok


@pytest.mark.parametrize(("digest", "ok"), [("bb", True), ("cc", False)])
def test_so_is_one_for_which_all_go_back_to_the_beginning(digest: str, ok: bool) -> None:
    w = split_worker()
    w.lanes()
    w.reduce()
    w.agree()
    w.done(1000)
    w.ask(do.StepAsked(2))
    w.enter(plan(2, (0,), (0,)))
    assert isinstance(w.op, do.Restore) and not any(w.op.sources.values())
    w.done(do.Copied(built={0: "aa", 1: digest}))
    assert bool(refused(w)) != ok and ("stage 1" in refused(w)) != ok
    assert (w.out[-1] == do.WentBack(0)) == ok


def test_what_members_began_with_counts_before_what_is_built_now() -> None:
    w = begins(plan(3, (0, 1, 2)), do.Opened(built={0: "aa"}), w1=at(0, first={0: "bb"}), w2=at(0, built={0: "aa"}))
    assert "(bb, says worker 1)" in refused(w)


def test_what_is_built_counts_for_nothing_beyond_step_0() -> None:
    w = begins(plan(3, (0, 1)), do.Opened(built={0: "aa"}), w1=at(4, first={0: "bb"}))
    assert w.op == do.Fetch(op=w.op.op, generation=3, plan=w.plan, position=Key(4, 0), sources={0: (1,)}, pieces={})
    w.done(do.Copied(records={}, gathers={}))
    assert w.out[-1] == do.Arrived(4)
    w.ask(do.StepAsked(5))
    w.hear(plan(4, (0, 2)))
    w.abort()
    w.done(do.Opened())
    assert w.stated().first == {0: "bb"}, "it has been told"
