"""What was asked of a coordinator that is gone counts at the next one, and what is asked twice counts once."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
from coordinator_harness import S, World, drop, running

from everstep.base.plan import Plan
from everstep.protocol import messages as m
from everstep.protocol.coordinator.types import HostRules

STOP = m.Command(request=3, name="stop", args={"reason": "interrupted by SIGTERM", "exit_code": 143, "grace_s": 9})
SAVE = m.Command(request=4, name="checkpoint", args={})


def said_hello(world: World, *asked: m.Command, name: str = "j1") -> None:
    world.connect(name, "job")
    world.say(name, m.JobHello(asked=list(asked)))


def trains(workers: int) -> World:
    """A job that takes checkpoints."""
    return running(workers, save_ns=30 * S)


def saving(world: World) -> bool:
    return world.plan is not None and bool(world.plan.save)


def settled(world: World, step: int) -> None:
    for worker_id in world.plan.worker_ids if world.plan else ():
        world.entered(worker_id, world.coordinator.job.agreement.plan.generation, step)


def test_a_stop_is_taken_by_the_coordinator_that_follows() -> None:
    before = trains(2)
    said_hello(before)
    before.say("j1", STOP)
    assert saving(before)
    world = before.restart([e for e in before.journal if not e.get("plan", {}).get("save")])
    said_hello(world, STOP)
    world.agent(0, 1)
    for i in range(2):
        world.hello(i, plan=before.plan, step=4)
        world.entered(i, 2, 5)
    world.wait(3 * S)
    assert saving(world)
    settled(world, 5)
    leader = f"w{world.plan.leader(0) if world.plan else 0}.0"
    world.say(leader, m.Saved(worker_id=0, incarnation=0, step=4, ok=True, where="there"))
    assert world.report("job_failed")["exit_code"] == 143 and "step 4 in there" in world.report("job_failed")["reason"]


def test_workers_that_had_ended_the_job_by_themselves_have_told_of_their_checkpoint() -> None:
    world = trains(2)
    world.progress(0, 1, 4)
    world.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=5, ok=True, where="there"))
    said_hello(world, STOP)
    for i in range(2):
        world.exited(i)
    assert world.report("job_failed")["reason"] == "interrupted by SIGTERM; checkpoint of step 5 in there"


def test_a_checkpoint_of_long_ago_is_not_that_of_the_end() -> None:
    world = trains(2)
    world.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=3, ok=True, where="there"))
    world.progress(0, 1, 4)
    said_hello(world, STOP)
    for i in range(2):
        world.exited(i)
    assert world.report("job_failed")["reason"].endswith("; no checkpoint is known, and no worker is left")


@pytest.mark.parametrize("ok", [True, False])
def test_a_checkpoint_that_was_asked_for_before_is_not_that_of_the_end(ok: bool) -> None:
    """It is completed, or given up, while the members regroup to take the last one."""
    world = trains(2)
    said_hello(world, SAVE)
    world.progress(0, 1, 10)
    world.say("j1", STOP)
    assert saving(world)
    earlier = m.Saved(worker_id=0, incarnation=0, step=7, ok=ok, where="earlier" if ok else "", reason="regrouped")
    world.say("w0.0", earlier)
    assert world.coordinator.job.progress.ended is None
    settled(world, 11)
    world.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=10, ok=True, where="there"))
    assert world.report("job_failed")["reason"] == "interrupted by SIGTERM; checkpoint of step 10 in there"


@pytest.mark.parametrize("ok", [True, False])
def test_nor_does_it_let_go_who_alone_holds_the_state(ok: bool) -> None:
    world = running(1, save_ns=5 * S)
    said_hello(world, SAVE)
    words = {"step": 7, "reason": "ValueError: boom", "signature": "x", "fatal": False, "holds": True}
    world.say("w0.0", m.WorkerFailed(worker_id=0, incarnation=0, generation=1, **words))
    assert saving(world)
    world.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=5, ok=ok, where="earlier", reason="regrouped"))
    assert world.last(m.Dismissed, "w0.0") is None
    settled(world, 8)
    world.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=7, ok=True, where="there"))
    assert world.last(m.Dismissed, "w0.0") is not None


def test_a_stop_before_anybody_has_settled_still_has_its_checkpoint() -> None:
    """A worker was lost a moment ago: the others hold the state, and the plan without it is out."""
    world = trains(3)
    world.progress(0, 1, 4)
    world.exited(2)
    assert world.plan is not None and not saving(world) and not world.coordinator.job.agreement.entered
    said_hello(world, STOP)
    assert saving(world) and world.coordinator.job.progress.ended is None


def test_a_stop_before_anything_was_trained_waits_for_nothing() -> None:
    world = World(workers=2)
    world.agent(0, 1)
    for i in range(2):
        world.hello(i)
    assert world.plan is not None
    said_hello(world, STOP)
    assert world.coordinator.job.progress.ended is not None


def test_a_stop_that_is_said_twice_still_has_its_checkpoint() -> None:
    world = trains(2)
    said_hello(world, STOP)
    assert saving(world)
    generation = world.plan.generation if world.plan else 0
    said_hello(world, STOP, name="j2")
    assert world.coordinator.job.progress.ended is None
    assert world.plan is not None and world.plan.generation == generation


def test_a_checkpoint_is_asked_for_again_of_a_leader_that_was_away() -> None:
    world = running(2)
    said_hello(world, SAVE)
    assert [m.SaveNow] == [type(x) for name, x in world.sent if name == "w0.0"]
    drop(world, "w0.0")
    world.clear()
    world.hello(0, plan=world.plan, step=4)
    assert len(world.messages(m.SaveNow, "w0.0")) == 1
    world.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=5, ok=True, where="there"))
    assert world.last(m.CommandReply, "j1").result == {"step": 5, "path": "there"}


def test_after_the_end_it_is_told_that() -> None:
    world = running(1)
    world.command("stop")
    world.clear()
    said_hello(world, STOP, SAVE)
    assert [type(x) for name, x in world.sent if name == "j1"] == [m.JobEnded]


def test_after_a_restart_all_workers_of_an_agent_are_treated_alike() -> None:
    """Those of a host that does not come back are given up together, when the others had the time to come back."""
    before = World(workers=4)
    before.agent(0, 1, name="a1", host="a1")
    before.agent(2, 3, name="a2", host="a2")
    for i in range(4):
        before.hello(i, host="a1" if i < 2 else "a2")
    for i in range(4):
        before.entered(i, 1, 1)
    world = before.restart()
    world.agent(0, 1, name="a1", host="a1")
    for i in range(2):
        world.hello(i, plan=before.plan, step=4)
    world.wait(3 * S)
    gone = [r.fields["worker_id"] for r in world.reports if r.kind == "worker_evicted"]
    assert gone == [2, 3]


# ---- a coordinator that was itself away: what was said meanwhile waits in its connections


def test_who_comes_back_while_the_coordinator_stands_still_is_not_too_late() -> None:
    before = running(4, elsewhere=(1, 2, 3))
    world = before.restart()
    world.agent(0)
    world.hello(0, plan=before.plan, step=4)
    world.now += 20 * S
    world.beat()
    for worker in (1, 2, 3):
        world.hello(worker, plan=before.plan, step=4, host="a2")
    world.agent(1, 2, 3, name="a2", host="a2")
    world.wait(5 * S)
    assert "worker_evicted" not in world.kinds() and world.plan == before.plan


def test_a_checkpoint_that_was_complete_in_time_counts() -> None:
    world = running(2, save_ns=5 * S)
    world.command("stop", grace_s=5.0)
    settled(world, 5)
    world.now += 20 * S
    world.beat()
    world.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=4, ok=True, where="there"))
    assert world.report("job_failed")["reason"].endswith("; checkpoint of step 4 in there")


def test_nor_is_the_limit_forgotten() -> None:
    world = running(2, save_ns=5 * S)
    world.command("stop", grace_s=5.0)
    world.now += 20 * S
    world.wait(6 * S)
    assert world.report("job_failed")["reason"].endswith("; no checkpoint was completed in time")


def test_who_alone_holds_the_state_has_saved_it_in_time() -> None:
    world = running(1, save_ns=5 * S)
    words = {"step": 7, "reason": "ValueError: boom", "signature": "x", "fatal": False, "holds": True}
    world.say("w0.0", m.WorkerFailed(worker_id=0, incarnation=0, generation=1, **words))
    world.now += 20 * S
    settled(world, 8)
    assert world.last(m.Dismissed, "w0.0") is None
    world.wait(6 * S)
    assert world.last(m.Dismissed, "w0.0") is not None


def test_workers_and_hosts_that_come_meanwhile_are_in_time() -> None:
    world = World(workers=2, min_workers=2, quorum_wait_ns=15 * S)
    world.agent(0, 1)
    world.hello(0)
    world.now += 20 * S
    world.hello(1)
    assert world.plan is not None and world.plan.worker_ids == (0, 1)
    world = World(workers=2, hosts=HostRules(least=2, wait_ns=15 * S))
    world.agent(0)
    world.now += 20 * S
    world.agent(1, name="a2", host="a2")
    assert world.coordinator.job.progress.ended is None and not world.coordinator.job.quorum.lacks_hosts


# ---- what a stop may say


def test_without_checkpoints_a_stop_waits_for_none() -> None:
    world = running(2, save_ns=0)
    assert world.command("stop", grace_s=24.0).ok
    assert world.report("job_failed")["reason"] == "stopped by request"


@pytest.mark.parametrize("grace_s", [nan, inf, -inf, -1, 1e6, 1 << 2000, "9", None, [9]])
def test_a_time_that_makes_no_sense_is_refused(grace_s: Any) -> None:
    world = trains(2)
    reply = world.command("stop", grace_s=grace_s)
    assert not reply.ok and reply.error.startswith("grace_s: expected seconds from 0 to 1000000, got '")
    assert world.coordinator.job.progress.ended is None and not saving(world)


# ---- a stop by somebody who does not stay


def asked_by_the_page() -> World:
    world = trains(2)
    assert world.command("stop", grace_s=24.0).ok and saving(world)
    return world


def everybody_is_back(world: World, plan: Plan) -> None:
    world.agent(0, 1)
    for i in range(2):
        world.hello(i, plan=plan, step=4)


def test_is_done_by_the_coordinator_that_follows() -> None:
    before = asked_by_the_page()
    world = before.restart()
    everybody_is_back(world, before.follows["w0.0"])
    assert saving(world) and world.coordinator.job.progress.ended is None
    settled(world, 5)
    world.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=4, ok=True, where="there"))
    failed = world.report("job_failed")
    assert failed["state"] == "interrupted" and failed["exit_code"] == 130
    assert failed["reason"] == "stopped by request; checkpoint of step 4 in there"


def test_has_its_limit_there_too() -> None:
    world = asked_by_the_page().restart()
    world.wait(25 * S)
    assert world.report("job_failed")["reason"].startswith("stopped by request; no checkpoint")


def test_that_of_the_job_itself_is_repeated_by_that_and_not_written_down() -> None:
    world = trains(2)
    said_hello(world, STOP)
    assert saving(world) and "stop" not in [entry["kind"] for entry in world.journal]


def test_who_takes_a_job_over_wants_it_to_go_on() -> None:
    before = asked_by_the_page()
    world = before.restart([*before.journal, {"kind": "term", "term": 1}])
    everybody_is_back(world, before.follows["w0.0"])
    world.wait(30 * S)
    assert world.coordinator.job.progress.ended is None and world.coordinator.job.saving.ending is None


def test_nothing_of_it_is_left_once_the_job_has_ended() -> None:
    before = asked_by_the_page()
    settled(before, 5)
    before.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=4, ok=True, where="there"))
    world = before.restart()
    world.wait(S)
    assert world.coordinator.job.saving.ending is None and "job_failed" not in world.kinds()


def stopping() -> World:
    world = running(2, save_ns=5 * S)
    world.command("stop", grace_s=5.0)
    return world


def lacking_workers() -> World:
    world = World(workers=2, min_workers=2, quorum_wait_ns=15 * S)
    world.agent(0)
    world.hello(0)
    return world


def restarted() -> World:
    before = running(2, elsewhere=(1,))
    world = before.restart()
    world.agent(0)
    world.hello(0, plan=before.plan, step=4)
    return world


@pytest.mark.parametrize(
    ("make", "end"), [(stopping, "job_failed"), (lacking_workers, "job_failed"), (restarted, "worker_evicted")]
)
def test_a_coordinator_that_is_late_at_each_event_comes_to_the_end_of_what_it_waits_for(
    make: Callable[[], World], end: str
) -> None:
    world = make()
    for _ in range(2000):
        world.now = (world.coordinator.job.env.alarms.next_ns or world.now) + 6 * S // 10
        world.beat()
        if end in world.kinds():
            return
    raise AssertionError(world.kinds())
