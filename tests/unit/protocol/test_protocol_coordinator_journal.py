"""A journal with lines that make no sense though their checksums hold: they are left out, and learned from workers."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_harness import World, member, running

from everstep.base.cause import Cause, Why
from everstep.protocol import messages as m
from everstep.protocol.lease.writer import compacted

SENSELESS: tuple[dict[str, Any], ...] = (
    {"kind": "plan", "plan": None},
    {"kind": "plan"},
    {"kind": "plan", "plan": {"generation": "two"}},
    {"kind": "plan", "plan": {"generation": 9, "reason": "", "members": [], "seats": [], "lanes": 8}},
    {"kind": "plan", "plan": {"generation": 9, "reason": "", "members": [], "seats": [], "lanes": 1 << 60}},
    {"kind": "entered", "generation": "x"},
    {"kind": "entered"},
    {"kind": "evict", "worker_id": -1, "incarnation": 0},
    {"kind": "evict", "worker_id": 1, "incarnation": [1]},
    {"kind": "ticket", "ticket": None},
    {"kind": "slot_lost", "worker_id": "0", "reason": 5},
    {"kind": "target", "target": 2, "slots": 3},
    {"kind": "ended", "state": "exploded", "reason": "", "exit_code": 0},
    {"kind": "stop", "reason": "", "exit_code": 130, "grace_ns": -1},
    {"kind": ["plan"]},
)


def back(world: World, generation: int, step: int = 5) -> None:
    """All come back after a restart."""
    world.agent(0, 1, 2)
    for i in range(3):
        world.hello(i, plan=PLANS[generation], step=step)
    world.entered(0, generation, step + 1)


PLANS: dict[int, Any] = {}


@pytest.mark.parametrize("entry", SENSELESS, ids=str)
def test_a_senseless_entry_is_set_aside_and_said(entry: dict[str, Any]) -> None:
    before = running(3)
    PLANS[1] = before.plan
    world = before.restart([*before.journal, entry])
    back(world, 1)
    warnings = [r.fields for r in world.reports if r.kind == "warning"]
    assert [w["cause"] for w in warnings] == [Cause.JOURNAL] and "entry" in warnings[0]["reason"]
    assert world.plan == before.plan and world.coordinator.job.progress.ended is None
    world.exited(1)
    assert world.plan is not None and world.plan.worker_ids == (0, 2)
    assert world.plan.generation == 3, "the entry may have been a plan: no other bears its number"


def test_a_plan_that_is_lacking_is_learned_from_the_workers() -> None:
    before = running(3)
    before.exited(1)
    PLANS[2] = before.plan
    torn = [{**e, "plan": {}} if e["kind"] == "plan" and e["plan"]["generation"] == 2 else e for e in before.journal]
    world = before.restart(torn)
    world.agent(0, 2)
    for i in (0, 2):
        world.hello(i, plan=PLANS[2], step=5)
    assert world.plan == before.plan
    world.hello(1, plan=None, step=0)
    assert [type(message).__name__ for name, message in world.sent if name == "w1.0"] == ["Dismissed"], "it is fenced"


def test_many_senseless_entries_are_one_warning() -> None:
    before = running(3)
    world = before.restart([*SENSELESS, *before.journal, *SENSELESS])
    world.agent(0, 1, 2)
    warnings = [r.fields for r in world.reports if r.kind == "warning"]
    assert len(warnings) == 1 and "more" in warnings[0]["reason"]


def test_a_journal_of_nothing_but_nonsense_is_that_of_a_new_job() -> None:
    before = running(3)
    PLANS[1] = before.plan
    world = before.restart(list(SENSELESS))
    back(world, 1)
    assert world.plan == before.plan


def joins(world: World, worker: int, lanes: int, incarnation: int = 0) -> None:
    world.connect(f"w{worker}.{incarnation}", "worker")
    me = member(worker, incarnation)
    world.say(f"w{worker}.{incarnation}", m.WorkerHello(member=me, step=0, lanes=lanes))


@pytest.mark.parametrize("others", [3, 5])
@pytest.mark.parametrize("again", [False, True])
def test_a_script_that_comes_with_other_lanes_before_the_first_plan_is_refused(others: int, again: bool) -> None:
    """Those who came before would compute another number of lanes than their scripts say."""
    world = World()
    world.agent(0, 1, 2)
    joins(world, 0, 4)
    if again:
        world = world.restart(world.journal)
        world.agent(0, 1, 2)
        joins(world, 0, 4)
    joins(world, 1, others)
    (refused,) = [said for name, said in world.sent if name == "w1.0" and isinstance(said, m.Dismissed)]
    assert refused.reason == f"it joins with lanes={others}, the job has lanes=4"
    joins(world, 1, 4, incarnation=1)
    joins(world, 2, 4)
    assert world.plan is not None and world.plan.lanes == 4


def test_the_lanes_are_those_that_the_script_joins_with() -> None:
    """Told by the first hello, kept by the journal, and held against everybody who comes later with others."""
    world = World()
    world.agent(0, 1, 2)
    for i in range(3):
        joins(world, i, 4)
    assert world.plan is not None and world.plan.lanes == 4
    assert sorted(lane for seat in world.plan.seats for lane in seat.lanes) == [0, 1, 2, 3]
    PLANS[1] = world.plan
    world = world.restart(world.journal)
    back(world, 1)
    assert world.plan == PLANS[1]
    world.exited(1)
    world.started(1, 1)
    joins(world, 1, 8, incarnation=1)
    (refused,) = [said for name, said in world.sent if name == "w1.1" and isinstance(said, m.Dismissed)]
    assert refused.cause == Cause.CONFIG and refused.reason == "it joins with lanes=8, the job has lanes=4"


def starts(world: World) -> list[tuple[int, int]]:
    return [(r.fields["generation"], r.fields["step"]) for r in world.reports if r.kind == "generation_started"]


@pytest.mark.parametrize(("told", "tells"), [(1, [(2, 5)]), (2, []), (None, [])])
def test_a_plan_of_which_nobody_was_told_is_told_once_members_follow_it(
    told: int | None, tells: list[tuple[int, int]]
) -> None:
    """The coordinator died between its journal and its report; the plan has reached its members, or has not."""
    before = running(3)
    first = before.plan
    before.exited(1)
    for follows in (first, before.plan):
        world = before.restart(told=told)
        world.agent(0, 2)
        world.hello(0, plan=follows, step=5)
        world.hello(2, plan=follows, step=5)
        if follows is first:
            assert not starts(world), "nobody follows it yet"
        world.entered(0, 2, 6)
        world.entered(2, 2, 6)
        assert starts(world) == tells


def test_a_switch_of_which_nobody_was_told_is_told() -> None:
    before = running(3)
    first = before.plan
    before.agent(0, 1, 2, 3)
    before.command("scale", workers=2)
    assert before.prepared is not None
    before.progress(0, before.prepared.generation, 5)
    assert before.plan is not None and before.plan.generation == 2
    world = before.restart(told=1)
    world.agent(0, 1)
    for i in (0, 1):
        world.hello(i, plan=before.plan, step=5)
    assert starts(world) == [(2, 5)]
    assert world.coordinator.job.agreement.before == first


@pytest.mark.parametrize(("told", "changes"), [(1, [1]), (2, []), (None, []), (0, [])])
def test_a_plan_that_is_told_late_also_tells_of_its_leader(told: int | None, changes: list[int]) -> None:
    """Unless it is unknown who led before, as far as anybody was told."""
    before = running(3)
    before.exited(0)
    world = before.restart(told=told)
    world.agent(1, 2)
    for i in (1, 2):
        world.hello(i, plan=before.plan, step=5)
    assert [r.fields["worker_id"] for r in world.reports if r.kind == "leader_changed"] == changes


@pytest.mark.parametrize("anybody_left", [True, False])
@pytest.mark.parametrize("short", [False, True])
def test_a_restarted_coordinator_does_not_return_to_taint_in_which_all_have_settled(anybody_left, short):
    """The job has come far since: worker 1 dies with the coordinator, and nobody has repeated yet that all settled."""
    world = running(2)
    words = {"reason": "the state differs before step 20", "tainted": 20, "decided_in": 1, "sound": 12}
    world.say("w0.0", m.SettleAgain(worker_id=0, incarnation=0, generation=1, **words))
    assert world.plan.generation == 2 and world.plan.sound == 12
    for worker in (0, 1):
        world.entered(worker, 2, 13)
    world.progress(0, 2, 100_000)
    again = world.restart(compacted(world.journal) if short else None)
    again.agent((0, 0 if anybody_left else 1), (1, 1))
    if anybody_left:
        again.hello(0, step=100_000, plan=world.plan)
    else:
        again.hello(0, 1), again.hello(1, 1)
    assert again.plan.generation > 2 and again.plan.sound == -1 and again.plan.voided == 2


@pytest.mark.parametrize("settled", [False, True])
def test_who_has_settled_in_what_the_journal_calls_in_doubt_says_so_before_the_next_plan(settled):
    """The coordinator died before it heard that; or its disk was full."""
    world = running(2)
    words = {"reason": "the state differs before step 20", "tainted": 20, "decided_in": 1, "sound": 12}
    world.say("w0.0", m.SettleAgain(worker_id=0, incarnation=0, generation=1, **words))
    again = world.restart()
    again.agent((0, 0), (1, 1))
    again.hello(0, step=100_000 if settled else 12, plan=world.plan, settled=settled)
    assert (again.plan.sound, again.plan.voided) == ((-1, 2) if settled else (12, 0))


def test_a_doubt_that_opens_after_another_one_is_over_is_ended_by_a_later_plan_alone():
    """Who settled behind the first one repeats that after a restart, when the second one is known."""
    world = running(2)
    words = {"reason": "the state differs before step 20", "tainted": 20, "sound": 12}
    world.say("w0.0", m.SettleAgain(worker_id=0, incarnation=0, generation=1, decided_in=1, **words))
    for worker in (0, 1):
        world.entered(worker, 2, 13)
    again = world.restart()
    again.agent((0, 0), (1, 0))
    again.hello(0, step=20, plan=world.plan, settled=True)
    said = m.SettleAgain(worker_id=1, incarnation=0, generation=2, decided_in=2, **words)
    again.coordinator.job.progress.in_doubt(Why(Cause.NONDETERMINISTIC, "they differ again"), said)
    again.hello(1, step=20, plan=world.plan, settled=True)
    assert again.coordinator.job.progress.sound == 12


@pytest.mark.parametrize(("found_in", "sound", "opens"), [(1, 12, False), (1, 11, True), (2, 12, True)])
def test_what_a_member_said_before_all_settled_behind_it_opens_no_doubt_when_it_comes_late(found_in, sound, opens):
    """A coordinator that was frozen hears that from another connection than what came of it."""
    world = running(3)
    words = {"reason": "the state differs before step 20", "tainted": 20}
    world.say("w0.0", m.SettleAgain(worker_id=0, incarnation=0, generation=1, decided_in=1, sound=12, **words))
    world.entered(0, 2, 13)
    late = m.SettleAgain(worker_id=1, incarnation=0, generation=found_in, decided_in=found_in, sound=sound, **words)
    world.coordinator.job.progress.in_doubt(Why(Cause.CORRUPT, "late"), late)
    assert world.coordinator.job.progress.sound == (sound if opens else -1)
