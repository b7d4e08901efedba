"""What follows from lanes that several members have computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest
from driver_harness import Worker, at, member_worker, payload
from driver_harness import plan as pools
from msgspec import structs

from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.placement.probes import ProbeRule, Trial
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.probing import LanesGiven, ProbeVerdict, Probing
from everstep.protocol.driver.records import AgreePayload, StepOutcome, encode
from everstep.protocol.step_types import Doubt, Holding, Key, LaneSaid, Record

NEW = Holding(Key(0, 0), {}, 0)
OLD = replace(NEW, proven=True)


def plan(members: int, stages: int = 1) -> Plan:
    seats = (
        Seat(i, stage, "active", tuple(range(4 * i, 4 * i + 4))) for stage in range(stages) for i in range(members)
    )
    return Plan(1, "", tuple(Member(i, 0, "a") for i in range(members)), tuple(seats), 4 * members, stages)


STATES = {0: {0: "alike", 1: "alike"}}


def said(text: str) -> LaneSaid:
    """Samples and gradient."""
    return LaneSaid(data=text[0], gave=text[2])


def outcome(step: int, found: dict[int, dict[int, str]], *, compared: bool = True) -> StepOutcome:
    probes = {(lane, 0): {worker: said(text) for worker, text in of.items()} for lane, of in found.items()}
    return StepOutcome(step, (), {}, 0.0, 1.0, 0.0, {}, STATES if compared else {}, probes=probes)


def probing(*holdings: Holding, at: int = 0, **more: Any) -> Probing:
    found = Probing(ProbeRule(every=10, joins=True), **more)
    found.entered(plan(len(holdings)), dict(enumerate(holdings)), at)
    return found


def judged_twice(kept: Probing, said: StepOutcome) -> ProbeVerdict:
    """All get the same once more."""
    found = kept.judge(said, 0)
    assert found is not None and (found.odd, found.ends, found.changed) == (frozenset(), False, False)
    assert "compute it again" in found.reason
    found = kept.judge(said, 0)
    assert found is not None
    return found


@pytest.mark.parametrize("compared", [True, False])
def test_a_new_member_that_differs_twice_is_the_odd_one_whatever_the_others_are(compared: bool) -> None:
    found = judged_twice(probing(OLD, NEW), outcome(7, {3: {0: "s a", 1: "s b"}}, compared=compared))
    assert (found.odd, found.lane, found.workers) == ({1}, 3, (0, 1))
    assert found.reason.startswith("worker 1 computed a different gradient from the same samples for lane 3 of step 7")
    assert "worker 0: a; worker 1: b" in found.reason


def test_several_are_named_in_one_sentence() -> None:
    found = judged_twice(probing(OLD, NEW, NEW), outcome(7, {3: {0: "s a", 1: "s b", 2: "s b"}}))
    assert found.odd == {1, 2} and found.reason.startswith("workers 1 and 2 computed a different gradient from")


def test_other_samples_are_called_that() -> None:
    found = judged_twice(probing(OLD, NEW), outcome(7, {3: {0: "s a", 1: "t b"}}))
    assert "worker 1 got different samples" in found.reason and "worker 1: t" in found.reason


def test_who_copied_a_state_that_changed_is_not_the_odd_one() -> None:
    """Worker 0 had computed the lane, a bit of its state flipped, and worker 1 copied that."""
    kept = probing(OLD, NEW)
    first = kept.judge(outcome(7, {3: {0: "s a", 1: "s b"}}), 0)
    assert first is not None and not first.odd
    assert kept.doubt == Doubt(7, 3, 0, {0: said("s a")}), "what a new member has said is of no use if it goes"
    found = kept.judge(outcome(7, {3: {0: "s b", 1: "s b"}}), 0)
    assert found is not None and (found.changed, found.odd, found.ends) == (True, frozenset(), False)
    assert found.reason == (
        "worker 0 got different results for lane 3 of step 7 before and after others copied the state"
    )
    assert kept.doubt == Doubt()


def test_samples_that_are_others_when_they_are_read_again_end_the_job() -> None:
    """A dataset that reads the model, in loader processes that are forked anew as workers come and go."""
    kept = probing(OLD, NEW)
    assert kept.judge(outcome(7, {3: {0: "s a", 1: "t b"}}), 0) is not None
    found = kept.judge(outcome(7, {3: {0: "t b", 1: "t b"}}), 0)
    assert found is not None and (found.changed, found.odd, found.ends) == (False, frozenset(), True)
    assert found.reason.startswith("worker 0 got different samples for lane 3 of step 7 the second time")
    kept = probing(OLD, NEW)
    assert kept.judge(outcome(7, {3: {0: "s a", 1: "t b"}}), 0) is not None
    assert kept.judge(outcome(7, {3: {0: "s a", 1: "s a"}}), 0) is None, "the new member read them wrongly once"


@pytest.mark.parametrize(
    ("second", "odd"),
    [
        ({0: "s a", 1: "s a"}, None),  # it was the new member that computed it once otherwise
        ({0: "s a"}, None),  # which has gone
        ({0: "s c", 1: "s b"}, {0}),  # who stays with its answer is right
        ({1: "s b"}, {1}),  # what those said who have gone counts
    ],
)
def test_the_second_look_at_a_new_member(second: dict[int, str], odd: set[int] | None) -> None:
    kept = probing(OLD, NEW, NEW)
    assert kept.judge(outcome(7, {3: {0: "s a", 1: "s b"}}), 0) is not None
    found = kept.judge(outcome(7, {3: second}), 0)
    assert (None if found is None else found.odd) == odd


def test_where_all_are_new_most_are_right_and_one_against_one_is_nobody() -> None:
    assert judged_twice(probing(NEW, NEW, NEW), outcome(1, {0: {0: "s b", 1: "s a", 2: "s a"}})).odd == {0}
    kept, odd = probing(NEW, NEW), outcome(1, {0: {0: "s b", 1: "s a"}})
    found, again = kept.judge(odd, 0), kept.judge(odd, 0)
    assert found is not None and (found.odd, found.ends) == (frozenset(), False) and "compute it again" in found.reason
    assert again is not None and again.ends and "unknown which" in again.reason


@pytest.mark.parametrize(
    ("second", "odd", "ends"),
    [
        ({0: "s b", 1: "s a", 2: "s a"}, {0}, False),
        ({0: "s b", 1: "s c"}, {1}, False),
        ({0: "s c", 1: "s d"}, set(), True),
        ({0: "s b", 1: "s a"}, set(), True),
        ({0: "s a", 1: "s a"}, None, False),
    ],
)
def test_the_second_look_knows_more(second: dict[int, str], odd: set[int] | None, ends: bool) -> None:
    kept, step = probing(OLD, OLD, OLD), plan(3)
    assert kept.judge(outcome(10, {2: {0: "s b", 1: "s a"}}), 0) is not None
    assert kept.trials(10, step) == (Trial(2, (1,)), Trial(2, (2,))) and kept.trials(11, step) == ()
    found = kept.judge(outcome(10, {2: second}), 0)
    assert (found is None) == (odd is None)
    assert found is None or (found.odd, found.ends) == (odd, ends)
    assert len(kept.trials(10, step)) == 1


def test_one_against_one_of_those_that_were_alike_goes_back_behind_the_last_probe() -> None:
    kept = probing(OLD, OLD, begins_after=5)
    assert kept.judge(outcome(10, {0: {0: "s a", 1: "s a"}}), 0) is None
    assert kept.judge(outcome(14, {}), 0) is None
    found = kept.judge(outcome(20, {1: {0: "s c", 1: "s d"}}), 0)
    assert found is not None and (found.odd, found.sound) == (frozenset(), 10)
    assert kept.judge(outcome(20, {1: {0: "s c", 1: "s d"}}), 0) == replace(found, ends=True, reason=ANY)


def test_who_was_seen_to_be_alike_is_new_no_more() -> None:
    kept = probing(OLD, NEW, NEW)
    assert kept.judge(outcome(7, {3: {0: "s a", 1: "s a"}}), 1) is None and kept.seen
    found = kept.judge(outcome(8, {3: {0: "s a", 1: "s b"}}), 1)
    assert found is not None and not found.odd


def test_a_member_alone_is_what_others_are_compared_with() -> None:
    kept = probing(NEW)
    assert not kept.seen
    assert kept.judge(outcome(3, {}), 0) is None and kept.seen


def test_who_comes_to_a_doubt_learns_of_it_and_what_those_said_who_have_gone_counts() -> None:
    kept = probing(OLD, OLD)
    assert kept.judge(outcome(10, {2: {0: "s b", 1: "s a"}}), 0) is not None
    stated = {0: replace(OLD, doubt=kept.doubt), 2: NEW}
    new = Probing(ProbeRule())
    for one in (kept, new):
        one.entered(plan(3), stated, 9)
        assert one.trials(10, plan(3)) == (Trial(2, (1,)), Trial(2, (2,)))
    found = new.judge(outcome(10, {2: {0: "s b"}}), 2)
    assert found is not None and found.ends and "worker 1: a" in found.reason
    found = kept.judge(outcome(10, {2: {0: "s b", 2: "s a"}}), 0)
    assert found is not None and found.odd == {0}, "two against one"


def test_who_catches_up_with_a_step_knows_no_more_of_others_than_they_have_stated() -> None:
    kept = probing(OLD, NEW, at=7)
    kept.doubt = Doubt(8, 1, 0, {})
    assert kept.judge(outcome(7, {3: {0: "s a", 1: "s a"}}), 1) is None
    assert kept.seen and kept.doubt.step == 8
    assert judged_twice(kept, outcome(9, {3: {0: "s a", 1: "s b"}})).odd == {1}


def test_states_that_differ_explain_what_is_computed_from_them() -> None:
    kept = probing(OLD, OLD)
    assert kept.judge(outcome(10, {2: {0: "s b", 1: "s a"}}), 0) is not None
    kept.forget()
    assert kept.doubt == Doubt()


@pytest.mark.parametrize(
    ("differ", "part", "says"),
    [
        ([(0, "gave"), (1, "made"), (1, "gave")], 1, "computed a different output from the same input"),
        ([(0, "made"), (1, "took"), (0, "gave")], 0, "computed a different output from the same input"),
        ([(0, "back"), (0, "gave"), (1, "gave")], 1, "computed a different gradient from the same samples"),
        ([(1, "data"), (1, "made")], 1, "got different samples"),
        ([(1, "took"), (1, "made")], 1, "received a different input from the stage before"),
        ([(0, "back"), (0, "gave")], 0, "received a different gradient from the next stage"),
    ],
)
def test_of_a_split_model_the_first_part_that_differs_is_named(
    differ: list[tuple[int, str]], part: int, says: str
) -> None:
    kept = Probing(ProbeRule())
    kept.entered(plan(4, 2), {0: OLD, 1: NEW, 2: OLD, 3: NEW}, 0)
    right = LaneSaid(**dict.fromkeys(LaneSaid.__struct_fields__, "r"))
    wrong = {at: replace_all(right, [what for one, what in differ if one == at]) for at in (0, 1)}
    records = {(5, 0): {0: right, 1: wrong[0]}, (5, 1): {2: right, 3: wrong[1]}}
    found = judged_twice(kept, StepOutcome(3, (), {}, 0.0, 1.0, 0.0, {}, STATES, probes=records))
    assert found.odd == {2 * part + 1}
    assert says in found.reason and f"lane 5 of step 3, part {part} of the model" in found.reason


def replace_all(one: LaneSaid, names: list[str]) -> LaneSaid:
    return structs.replace(one, **dict.fromkeys(names, "w"))


def test_up_to_where_lanes_were_compared_checkpoints_are_kept() -> None:
    kept = probing(OLD, OLD, begins_after=5, at=9)
    assert kept.proven(12) == 5
    assert kept.judge(outcome(10, {0: {0: "s a", 1: "s a"}}), 0) is None
    assert kept.proven(12) == 10
    kept.entered(plan(2), {0: OLD, 1: OLD}, 8)
    assert kept.proven(9) == 8, "it has gone back behind that"
    assert probing(OLD).proven(12) == 12, "nobody to be compared with"


def test_what_was_computed_from_one_who_has_gone_uncompared_does_not_count() -> None:
    kept = Probing(ProbeRule(joins=True))
    kept.entered(plan(4, 2), {0: OLD, 1: NEW, 2: OLD, 3: OLD}, 7)
    assert not kept.void(plan(4, 2), 8) and not kept.void(plan(3, 2), 8), "3 was compared before"
    other = replace(plan(4, 2), members=(Member(0, 0, "a"), Member(1, 1, "a"), Member(2, 0, "a"), Member(3, 0, "a")))
    assert kept.void(other, 8), "another life of 1"
    assert not probing(OLD, NEW).void(plan(1), 1), "its lanes are done again"


def test_while_a_difference_is_open_its_step_is_done_again_in_each_generation() -> None:
    """The verdict may have been reached by others alone, and the plan that follows from it comes before the records."""
    kept = Probing(ProbeRule(joins=True))
    kept.entered(plan(3, 2), {0: OLD, 1: OLD, 2: OLD}, 9)
    said = outcome(10, {3: {0: "s a", 1: "s a", 2: "s b"}})
    found = kept.judge(said, 0)
    assert found is not None and not found.odd
    assert kept.void(plan(3, 2), 10) and kept.void(plan(2, 2), 10) and not kept.void(plan(3, 2), 9)
    found = kept.judge(said, 0)
    assert found is not None and found.odd == {2} and not kept.void(plan(2, 2), 10)


FIRST = LaneSaid("data", "took", "made", "back", "gave")


@pytest.mark.parametrize(
    ("now", "differs"),
    [
        ({}, ""),
        ({"data": "x", "made": "x"}, ""),
        ({"took": "x", "made": "x"}, ""),
        ({"made": "x"}, "outputs"),
        ({"made": "x", "back": "x", "gave": "x"}, "outputs"),
        ({"gave": "x"}, "gradients"),
        ({"back": "x", "gave": "x"}, ""),
    ],
)
def test_a_lane_gives_something_else_here_only_if_it_is_computed_from_the_same(
    now: dict[str, str], differs: str
) -> None:
    given = LanesGiven()
    assert given.note(3, 1, 0, FIRST) == ""
    assert given.note(3, 1, 0, structs.replace(FIRST, **now)) == differs
    assert given.note(4, 1, 0, structs.replace(FIRST, **now)) == "", "of another step"


def lane_1(given: Plan, worker_id: int, text: str) -> AgreePayload:
    """An agree payload with what this worker got in lane 1."""
    first = payload(given, worker_id)
    return structs.replace(first, sections=[structs.replace(first.sections[0], probes={1: {0: said(text)}})])


def decide(w: Worker, *texts: str) -> None:
    """Reduce and decide a step in which each member has got something in lane 1."""
    mine, *others = (lane_1(w.plan, worker, text) for worker, text in enumerate(texts))
    w.done(mine)
    w.exchange({worker: Record(0, encode(one)) for worker, one in enumerate(others, 1)})


@pytest.mark.parametrize("sound", [0, 2])
def test_where_an_old_member_gives_something_else_than_before_what_was_last_compared_counts(sound: int) -> None:
    """The comparison of the state that follows the step has not been made. sound: a checkpoint that counts."""
    w = member_worker(0, 1, verify_every=4)
    w.step(1)
    w.step(2)
    w.driver._parts.comparing.saved(sound)
    w.driver._parts.probing.doubt = Doubt(3, 1, 0, {0: said("s a")})
    w.to_reduce(3)
    assert w.op.compare, "of what the lane is computed from"
    decide(w, "s b", "s b")
    assert w.count(do.Update) == 2
    assert w.last(do.Invalidate) == do.Invalidate(sound, first=True)
    (again,) = w.told(wire.SettleAgain)
    assert (again.tainted, again.sound, again.decided_in, again.drift) == (3, sound, 1, False)
    assert "worker 0 got different results for lane 1 of step 3" in again.reason
    assert again.reason.endswith("all steps are tainted") == (not sound)


def test_what_is_computed_otherwise_is_computed_once_more_and_then_ends_the_job_with_what_is_left() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.step(2)
    w.to_reduce(3)
    decide(w, "s a", "s b")
    (again,) = w.told(wire.SettleAgain)
    assert (again.tainted, again.sound, again.lane, again.workers, again.ends) == (3, 0, 1, [0, 1], False)
    assert w.count(do.Invalidate) == 0 and w.driver.machine.undone == 3, "nobody doubts the states"
    w.hear(pools(2, (0, 1)))
    w.settle()
    w.lanes()
    decide(w, "s a", "s b")
    assert w.last(do.Invalidate) == do.Invalidate(0, first=True) and w.driver.machine.sound == 0
    again = w.told(wire.SettleAgain)[-1]
    assert (again.tainted, again.ends, again.decided_in, again.drift) == (3, True, 2, False)


def test_who_computes_otherwise_than_most_leaves() -> None:
    w = member_worker(0, 1, 2)
    w.driver._parts.probing.doubt = Doubt(1, 1, 0, {0: said("s b"), 1: said("s a"), 2: said("s a")})
    w.to_reduce(1)
    decide(w, "s b", "s a", "s a")
    assert w.kinds == ["Exit"] and w.told(wire.SettleAgain) == [] and w.count(do.Invalidate) == 0


def test_of_those_that_compute_otherwise_the_lowest_alone_sees_to_what_is_shared() -> None:
    w = Worker(pools(1, (0, 1)), me=WorkerKey(1, 0))
    w.to_reduce(1)
    w.driver._parts.probing.doubt = Doubt(1, 1, 0, {0: said("s a"), 1: said("s b")})
    w.done(lane_1(w.plan, 1, "s b"))
    w.exchange({0: Record(0, encode(lane_1(w.plan, 0, "s a")))})
    assert w.last(do.Invalidate) == do.Invalidate(0, first=False)


def test_a_doubt_is_over_where_the_states_before_the_step_are_found_to_differ() -> None:
    w = member_worker(0, 1, 2)
    w.driver._parts.probing.doubt = Doubt(1, 1, 0, {0: said("s a")})
    w.to_agree(1, digest="aa")
    w.agree({1: "aa", 2: "bb"})
    assert w.driver._parts.probing.doubt == Doubt()


# ---- trials of lanes that are computed already

EACH_STEP = ProbeRule(every=1)


def tried() -> Worker:
    """Worker 0 in generation 2, which has computed its lanes of step 1, and is to compute trials."""
    w = member_worker(0, 1, probes=EACH_STEP)
    w.to_reduce(1)
    assert isinstance(w.op, do.Reduce) and not w.op.compare
    w.enter(pools(2, (0, 1)))
    return w


def test_trials_come_before_the_reduction_in_each_generation() -> None:
    w = tried()
    assert isinstance(w.op, do.Compute)
    assert (w.op.generation, w.op.step, w.op.lanes, len(w.op.trials)) == (2, 1, (), 1)
    w.done()
    assert isinstance(w.op, do.Reduce) and (w.op.generation, w.op.step) == (2, 1)


def test_a_reduction_that_waited_for_trials_of_an_older_generation_is_over() -> None:
    w = tried()
    w.enter(pools(3, (0,)))
    assert isinstance(w.op, do.Compute) and (w.op.lanes, w.op.trials) == ((1, 3), ())
    w.lanes()
    assert isinstance(w.op, do.Reduce) and w.op.generation == 3 and w.count(do.Reduce) == 2


def test_who_takes_no_part_in_a_trial_goes_on_to_reduce() -> None:
    w = member_worker(0, 1, 2, probes=EACH_STEP)
    w.to_reduce(1)
    w.enter(pools(2, (0, 1, 2)))
    given = w.driver._parts.probing.trials(1, w.plan)
    assert given and 0 not in {given[0].holders[0], w.plan.holder(0, given[0].lane)}
    assert isinstance(w.op, do.Reduce) and w.op.generation == 2


@pytest.mark.parametrize("lacking", [(), (0,)])
def test_of_a_split_model_lanes_of_trials_go_through_the_stages_again(lacking: tuple[int, ...]) -> None:
    """With all other lanes, where these are computed by all, else alone."""
    split = (0, 1), (2, 3)
    w = Worker(pools(1, *split), probes=EACH_STEP)
    w.ask(do.StepAsked(1))
    assert w.op.lanes == (0, 1, 2, 3) and len(w.op.trials) == 1
    w.lanes()
    w.enter(pools(2, *split), w2=at(0, stages=(1,), lacking=lacking))
    if lacking:
        assert (w.op.lanes, w.op.trials) == (lacking, ())
        w.lanes()
    assert isinstance(w.op, do.Compute) and len(w.op.trials) == 1
    assert (w.op.generation, w.op.step, w.op.lanes) == (2, 1, (w.op.trials[0].lane,))
    w.done()
    assert isinstance(w.op, do.Reduce) and w.op.generation == 2
