"""Every way of dying, leaving and planning bears its cause: in events, in plans, in the journal."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from coordinator_harness import MS, S, World, drop, running

from everstep.base.cause import Cause
from everstep.protocol import messages as m
from everstep.protocol.coordinator.spare_advice import SpareAdvice
from everstep.protocol.following import PlanShown


def _exits(cause: Cause) -> Callable[[World], None]:
    def exits(world: World) -> None:
        world.exited(2, cause=cause)

    return exits


def _fails(cause: Cause) -> Callable[[World], None]:
    words = {"step": 7, "reason": "it went wrong", "signature": "x", "fatal": False}

    def fails(world: World) -> None:
        world.say("w2.0", m.WorkerFailed(worker_id=2, incarnation=0, cause=cause, **words))

    return fails


def _hangs(world: World) -> None:
    world.beat((2, 0, "forward", 12_000))


def _is_seen_no_more(world: World) -> None:
    for seen in (3, 2):
        for _ in range(55):
            world.now += 200 * MS
            world.beat(*[(i, 0, "forward", 0) for i in range(seen)])


def _loses_its_host(world: World) -> World:
    world = running(elsewhere=(2,))
    for _ in range(30):
        world.now += 500 * MS
        world.beat(agent="a1")
    return world


def _loses_its_connection(world: World) -> None:
    drop(world, "w2.0")
    world.exited(1, cause=Cause.SILENT)  # others wait for it to hear of the plan that follows
    world.clear()
    world.wait(12 * S)


def _is_replaced(world: World) -> None:
    world.hello(2, 1)


def _is_listed_no_more(world: World) -> None:
    world.agent(0, 1)


def _accuses_twice(world: World) -> None:
    world.fault(1, 1, 2)
    world.no_death()
    for i in range(3):
        world.entered(i, 2, 3)
    world.clear()
    world.fault(1, 2, 2)
    world.fault(0, 2, 2)
    world.no_death()


def _does_not_come_back(world: World) -> World:
    later = world.restart()
    later.hello(0, plan=world.plan)
    later.hello(1, plan=world.plan)
    later.wait(3 * S)
    return later


def _heals_in_vain(world: World) -> None:
    world.exited(2)
    world.reports.clear()
    world.hello(2, 1)
    for i in (0, 1):
        world.entered(i, 2, 5)
    while "worker_evicted" not in world.kinds():
        ticket = world.last(m.Heal, "w2.1").ticket
        lost = m.HealFailed(worker_id=2, incarnation=1, ticket=ticket, cause=Cause.LINK, reason="its donor is gone")
        world.say("w2.1", lost)
        world.wait(6 * S)


DEATHS: list[tuple[Callable[[World], World | None], Cause]] = [
    (_exits(Cause.KILLED), Cause.KILLED),
    (_exits(Cause.CRASHED), Cause.CRASHED),
    (_exits(Cause.EXITED), Cause.EXITED),
    (_exits(Cause.OOM), Cause.OOM),
    (_fails(Cause.EXCEPTION), Cause.EXCEPTION),
    (_fails(Cause.OOM), Cause.OOM),
    (_fails(Cause.CORRUPT), Cause.CORRUPT),
    (_hangs, Cause.HUNG),
    (_is_seen_no_more, Cause.SILENT),
    (_loses_its_host, Cause.HOST_LOST),
    (_loses_its_connection, Cause.SILENT),
    (_is_replaced, Cause.REPLACED),
    (_is_listed_no_more, Cause.EXITED),
    (_accuses_twice, Cause.LINK),
    (_does_not_come_back, Cause.SILENT),
    (_heals_in_vain, Cause.LINK),
]


@pytest.mark.parametrize(("die", "cause"), DEATHS, ids=lambda case: getattr(case, "__name__", str(case)))
def test_each_death_bears_its_cause(die: Callable[[World], World | None], cause: Cause) -> None:
    world = running()
    world = die(world) or world
    evicted = world.report("worker_evicted")
    assert (evicted["worker_id"], evicted["cause"]) == (2, cause)
    entry = next(e for e in reversed(world.journal) if e["kind"] == "evict")
    assert (entry["worker_id"], entry["cause"]) == (2, cause)
    if die is _heals_in_vain:
        return  # the others are not disturbed
    plan = world.plan
    assert plan is not None and 2 not in plan.worker_ids and plan.cause is cause
    assert world.report("generation_started")["cause"] is cause
    assert [e for e in world.journal if e["kind"] == "plan"][-1]["plan"]["cause"] == cause
    for i in plan.worker_ids:
        world.entered(i, plan.generation, 9)
    world.progress(plan.worker_ids[0], plan.generation, 9, step_ms=0)
    first = Cause.SILENT if die is _loses_its_connection else cause
    assert world.report("recovery_completed")["cause"] is (Cause.LINK if die is _accuses_twice else first)


def test_a_suspicion_bears_the_cause_of_what_is_feared() -> None:
    world = running()
    world.beat((2, 0, "forward", 6_000))
    assert world.report("worker_suspected")["cause"] is Cause.HUNG
    world = running()
    world.wait(9 * S, beating=False)
    assert world.report("worker_suspected")["cause"] is Cause.HOST_LOST


def test_a_recovery_has_the_cause_that_began_it() -> None:
    world = running()
    world.exited(2, cause=Cause.OOM)
    world.beat((1, 0, "forward", 12_000))
    assert world.plan is not None and world.plan.cause is Cause.HUNG
    world.entered(0, 3, 9)
    world.progress(0, 3, 9)
    assert world.report("recovery_completed")["cause"] is Cause.OOM


def test_a_death_that_is_told_late_names_the_recovery_that_a_failed_link_began() -> None:
    world = running()
    world.fault(0, 1, 2)
    world.no_death()
    assert world.plan is not None and world.plan.cause is Cause.LINK
    world.wait(50 * MS)
    world.exited(2)
    world.entered(0, 3, 9)
    world.progress(0, 3, 9)
    completed = world.report("recovery_completed")
    assert completed["cause"] is Cause.KILLED and completed["worker_id"] == 2
    assert completed["phases_s"]["decide"] == 0.05  # since the link failed


def test_the_start_and_a_leader_of_it() -> None:
    world = World()
    world.agent(0, 1, 2)
    for i in range(3):
        world.hello(i)
    assert world.report("worker_joined")["cause"] is Cause.JOINED
    assert world.plan is not None and world.plan.cause is Cause.STARTED
    world.exited(0, cause=Cause.CRASHED)
    assert world.report("leader_changed")["cause"] is Cause.CRASHED


def test_a_worker_that_heals_joins() -> None:
    world = running()
    world.exited(2)
    for i in (0, 1):
        world.entered(i, 2, 3)
    world.hello(2, 1)
    world.healed(2, 1)
    assert world.prepared is not None and world.prepared.cause is Cause.JOINED
    world.entered(2, 3, 4, incarnation=1)
    assert world.report("worker_healed")["cause"] is Cause.JOINED


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(
    ("command", "args", "cause"),
    [("drain", {"worker_id": 2}, Cause.DRAINED), ("scale", {"workers": 2}, Cause.SCALED)],
)
def test_who_leaves_as_asked(command: str, args: dict[str, Any], cause: Cause, restarted: bool) -> None:
    world = running()
    if restarted:  # the wish is in the journal, the plan is not
        world.command(command, **args)
        world = world.restart([e for e in world.journal if e["kind"] != "plan" or e["plan"]["generation"] == 1])
        world.agent(0, 1, 2)
        for i in range(3):
            world.hello(i, plan=running().plan)
            world.entered(i, 1, 3)
        world.wait(3 * S)
    else:
        world.command(command, **args)
    target = next(e for e in world.journal if e["kind"] == "target")
    assert target["cause"] == cause
    assert world.prepared is not None and world.prepared.cause is cause and 2 not in world.prepared.worker_ids
    world.entered(0, world.prepared.generation, 4)
    assert world.report("generation_started")["cause"] is cause
    dismissed = world.last(m.Dismissed, "w2.0")
    assert (dismissed.drained, dismissed.cause) == (True, cause)


def test_a_slot_is_shrunk_away_for_what_it_was_lost_for() -> None:
    world = running(on_failure="shrink")
    world.exited(2, cause=Cause.OOM)
    assert [e["cause"] for e in world.journal if e["kind"] == "target"] == [Cause.OOM]


def test_slow_workers_move_lanes() -> None:
    world = running(2)

    def let(seconds: int, *ms_per_lane: float) -> None:
        for _ in range(seconds):
            world.seq += 1
            pulses = [
                m.WorkerPulse(
                    worker_id=i,
                    incarnation=0,
                    step=4,
                    phase="forward",
                    still_ms=1,
                    samples_per_s=1.0,
                    compute_ms_per_lane=ms,
                )
                for i, ms in enumerate(ms_per_lane)
            ]
            world.say("a1", m.Heartbeat(agent_id="a1", seq=world.seq, rtt_ms=1.0, workers=pulses))
            world.wait(S, beating=False)

    let(42, 100.0, 300.0)
    assert world.prepared is not None and world.prepared.cause is Cause.SLOW
    for i in range(2):
        world.entered(i, world.prepared.generation if world.prepared else world.plan.generation, 9)  # type: ignore[union-attr]
    let(60, 100.0, 100.0)
    assert world.prepared is not None and world.prepared.cause is Cause.REBALANCED, "all are alike again"


def test_waiting_and_giving_up() -> None:
    world = running(2, min_workers=2, quorum_wait_ns=60 * S)
    world.exited(1, cause=Cause.CRASHED)
    assert world.report("waiting")["cause"] is Cause.CRASHED
    assert world.coordinator.status()["cause"] is Cause.CRASHED
    world.wait(61 * S)
    ended = world.last(m.JobEnded, "w0.0")
    assert (ended.exit_code, ended.cause) == (3, Cause.QUORUM)
    assert world.report("job_failed")["cause"] is Cause.QUORUM
    assert world.restart().last(m.JobEnded) is None
    assert world.restart().coordinator.status()["cause"] is Cause.QUORUM


def test_a_slot_that_is_given_up() -> None:
    world = running()
    lost = m.SlotLost(agent_id="a1", worker_id=2, cause=Cause.CRASH_LOOP, reason="it died again and again")
    world.say("a1", lost)
    assert world.report("warning")["cause"] is Cause.CRASH_LOOP
    world = running(min_workers=3)
    world.say("a1", lost)
    assert world.report("job_failed")["cause"] is Cause.QUORUM


def test_all_state_is_lost() -> None:
    world = running(1)
    world.progress(0, 1, 9)
    world.exited(0, cause=Cause.OOM)
    world.hello(0, 1)
    assert world.plan is not None and world.plan.generation == 2 and world.plan.cause is Cause.OOM
    world.entered(0, 2, 1, incarnation=1)
    fallback = world.report("fallback")
    assert (fallback["cause"], fallback["source"]) == (Cause.OOM, "start")


def test_states_that_differ() -> None:
    world = running()
    world.progress(0, 1, 18)
    differ = {"incarnation": 0, "tainted": 19, "decided_in": 1, "cause": Cause.CORRUPT, "reason": "they differ"}
    world.say("w0.0", m.SettleAgain(worker_id=0, generation=1, **differ))
    assert world.plan is not None and world.plan.cause is Cause.CORRUPT
    for i in range(3):
        world.entered(i, 2, 9)
    assert (world.report("fallback")["cause"], world.report("fallback")["source"]) == (Cause.CORRUPT, "copy")
    world.progress(0, 2, 9)
    assert world.report("recovery_completed")["cause"] is Cause.CORRUPT
    again = {**differ, "decided_in": 2}
    world.say("w0.0", m.SettleAgain(worker_id=0, generation=2, **again))
    assert world.report("job_failed")["cause"] is Cause.NONDETERMINISTIC


@pytest.mark.parametrize(
    ("said", "cause"), [({}, Cause.REQUESTED), ({"cause": "interrupted", "grace_s": 30.0}, Cause.INTERRUPTED)]
)
def test_a_job_that_is_stopped(said: dict[str, Any], cause: Cause) -> None:
    world = running(save_ns=30 * S)
    world.command("stop", **said)
    if said:
        assert world.plan is not None and world.plan.save and world.plan.cause is cause
        world.wait(31 * S)
    assert world.report("job_failed")["cause"] is cause
    assert world.journal[-1]["cause"] == cause


def test_errors_that_end_the_job() -> None:
    world = running()
    words = {"incarnation": 0, "step": 0, "reason": "lanes: expected ...", "signature": "x", "fatal": True}
    world.say("w1.0", m.WorkerFailed(worker_id=1, cause=Cause.CONFIG, exit_code=2, **words))
    assert world.report("job_failed")["cause"] is Cause.CONFIG


def test_the_end() -> None:
    world = running()
    done = m.WorkerDone(worker_id=0, incarnation=0, generation=1, step=50, final_written=True)
    world.say("w0.0", done)
    assert world.report("job_completed")["cause"] is Cause.COMPLETED


@pytest.mark.parametrize(("said", "cause"), [({}, Cause.REQUESTED), ({"cause": "preempted"}, Cause.PREEMPTED)])
def test_a_checkpoint_is_asked_for(said: dict[str, str], cause: Cause) -> None:
    world = running()
    world.connect("c1", "operate")
    world.say("c1", m.Command(request=1, name="checkpoint", args=said))
    assert world.last(m.SaveNow, "w0.0").cause is cause


def _without_causes(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {k: _without_causes(v) for k, v in entry.items() if k != "cause"}
    return [_without_causes(v) for v in entry] if isinstance(entry, list) else entry


def test_journals_of_older_versions_are_read() -> None:
    world = running()
    world.exited(2)
    world.command("drain", worker_id=1)
    old = _without_causes(world.journal)
    assert "cause" not in json.dumps(old)
    later = world.restart(old)
    assert later.plan is not None and later.plan.cause is Cause.UNKNOWN and later.plan.worker_ids == (0, 1)
    later.agent(0, 1)
    later.hello(0, plan=later.plan)
    later.hello(1, plan=later.plan)
    later.wait(3 * S)
    world.command("stop")
    ended = world.restart(_without_causes(world.journal))
    assert ended.coordinator.status()["cause"] is Cause.UNKNOWN
    evicted = world.restart([e for e in old if e["kind"] != "plan" or e["plan"]["generation"] == 1])
    evicted.hello(0, plan=evicted.plan)
    evicted.hello(1, plan=evicted.plan)
    assert evicted.report("generation_started")["cause"] is Cause.UNKNOWN


def test_a_cause_of_a_later_version_is_unknown() -> None:
    shown = PlanShown(worker_id=0, incarnation=0, plan=running().plan)
    told = m.encode(shown).replace(b"\xa7started", b"\xa7someday")
    decoded = m.decode(told)
    assert isinstance(decoded, PlanShown) and decoded.plan is not None and decoded.plan.cause is Cause.UNKNOWN


@pytest.mark.parametrize(("cause", "counted"), [(Cause.KILLED, 1), (Cause.CRASHED, 1), (Cause.EXCEPTION, 0)])
def test_an_exception_is_no_failure_that_a_spare_would_help_with(
    cause: Cause, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, lost = running(), []
    monkeypatch.setattr(SpareAdvice, "lost", lambda _, worker_id: lost.append(worker_id))
    (_exits(cause) if counted else _fails(cause))(world)
    assert lost == [2] * counted
