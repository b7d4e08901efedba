"""Which slots the coordinator gives to which agent, and with which incarnations their lives begin."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from coordinator_harness import MS, S, World, drop, member, running

from everstep.base.cause import Cause, Why
from everstep.base.plan import WorkerKey
from everstep.protocol import messages as m
from everstep.protocol.coordinator.grants import Grant


def newcomer(world: World, name: str, *, process: str = "p1", room: int = 0, connection: str = "") -> None:
    """An agent that keeps no slots yet."""
    at = connection or name
    world.connect(at, "agent")
    world.say(at, m.AgentHello(agent_id=name, host=name, workers=[], slots=0, room=room, process=process))


def test_the_first_agent_is_given_the_slots_that_the_job_begins_with() -> None:
    world = World(workers=2, slots=3)
    newcomer(world, "a1")
    newcomer(world, "a2")
    assert world.last(m.SetSlots, "a1") == m.SetSlots(worker_ids=[0, 1, 2], first=[0, 0, 0])
    assert world.last(m.SetSlots, "a2").worker_ids == []


def test_agents_take_as_many_as_they_have_room_for() -> None:
    world = World(workers=3, slots=4)
    newcomer(world, "a1", room=2)
    assert world.last(m.SetSlots, "a1").worker_ids == [0, 1]
    newcomer(world, "a2", room=1)
    assert world.last(m.SetSlots, "a2").worker_ids == [2]
    newcomer(world, "a3")
    assert world.last(m.SetSlots, "a3").worker_ids == [3]


def test_agents_that_begin_with_slots_of_their_own_are_told_nothing() -> None:
    world = running()
    assert world.last(m.SetSlots) is None


def lives_of_one_agent() -> World:
    """Two workers that compute, of an agent that was told its slots."""
    world = World(workers=2, slots=2, heartbeat_ceiling_ns=5 * S)
    newcomer(world, "a1")
    for i in range(2):
        world.started(i, 0)
        world.hello(i, host="a1")
    for i in range(2):
        world.entered(i, 1, 1)
    world.clear()
    return world


def test_an_agent_that_died_has_taken_its_workers_along_and_their_slots_go_on_behind_them() -> None:
    world = lives_of_one_agent()
    world.exited(1)
    world.started(1, 1)
    drop(world, "a1")
    newcomer(world, "a1", process="p2", connection="a1-again")
    evicted = [(r.fields["worker_id"], r.fields["cause"]) for r in world.reports if r.kind == "worker_evicted"]
    assert evicted == [(1, Cause.KILLED), (0, Cause.HOST_LOST)]
    assert "agent" in world.report("worker_evicted")["reason"]
    assert world.last(m.SetSlots, "a1-again") == m.SetSlots(worker_ids=[0, 1], first=[1, 2])


def test_an_agent_that_was_only_away_keeps_its_workers() -> None:
    world = lives_of_one_agent()
    drop(world, "a1")
    world.connect("a1-again", "agent")
    lives = [m.WorkerLife(worker_id=i, incarnation=0, pid=i + 1) for i in range(2)]
    world.say("a1-again", m.AgentHello(agent_id="a1", host="a1", workers=lives, slots=2, process="p1"))
    assert "worker_evicted" not in world.kinds()


def test_a_slot_that_moves_begins_with_a_life_that_is_not_fenced() -> None:
    world = lives_of_one_agent()
    newcomer(world, "a2")
    assert world.last(m.SetSlots, "a2").worker_ids == []
    world.exited(0)
    world.started(0, 1)
    world.hello(0, 1, host="a1")
    world.clear()
    drop(world, "a1")
    membership = world.coordinator.job.membership
    world.wait(700 * S)
    moved = world.last(m.SetSlots, "a2")
    assert moved.worker_ids == [0, 1]
    for worker_id, first in zip(moved.worker_ids, moved.first, strict=True):
        assert first == membership.next_incarnation(worker_id) and membership.is_fenced(WorkerKey(worker_id, first - 1))
    assert moved.first[0] == 2


def test_before_the_end_nothing_is_started_any_more() -> None:
    world = World(workers=2, slots=2, save_ns=10 * S)
    newcomer(world, "a1")
    for i in range(2):
        world.started(i, 0)
        world.hello(i, host="a1")
    for i in range(2):
        world.entered(i, 1, 1)
    assert world.command("stop", grace_s=5.0, exit_code=130).ok
    assert world.last(m.SetSlots, "a1").worker_ids == [] and world.last(m.JobEnded) is None


def test_a_host_that_cannot_go_on_ends_the_job() -> None:
    world = lives_of_one_agent()
    world.say("a1", m.HostFailed(agent_id="a1", cause=Cause.CRASH_LOOP, reason="the fork server cannot start"))
    ended = world.last(m.JobEnded, "w0.0")
    assert (ended.state, ended.exit_code, ended.cause) == ("failed", 1, Cause.CRASH_LOOP)


def test_the_jobs_process_hears_how_it_ended_also_when_it_comes_later() -> None:
    world = lives_of_one_agent()
    world.connect("j1", "job")
    world.say("j1", m.JobHello())
    world.command("stop", exit_code=143)
    assert world.last(m.JobEnded, "j1").exit_code == 143
    world.connect("j2", "job")
    world.say("j2", m.JobHello())
    assert world.last(m.JobEnded, "j2").exit_code == 143


# ---- lives that no agent speaks for


def before_one_agent() -> World:
    """Slots are shared out, and the agent of a2, which runs worker 0, has not been heard yet."""
    world = World(workers=3, on_failure="shrink")
    world.agent(1, 2)
    for i in range(3):
        world.hello(i, host="a1" if i else "a2")
    for i in range(3):
        world.entered(i, 1, 1)
    world.exited(2)
    assert world.plan.worker_ids == (0, 1)
    return world


def test_a_slot_is_not_given_away_while_a_life_of_it_is_there_that_no_agent_speaks_for_yet() -> None:
    world = before_one_agent()
    assert world.last(m.SetSlots, "a1").worker_ids == [1]
    world.agent(0, name="a2", host="a2")
    assert world.last(m.SetSlots, "a2").worker_ids == [0] and world.last(m.KillWorker) is None


def test_it_goes_to_who_speaks_for_the_host_whichever_agent_has_the_fewest() -> None:
    """Its own agent has been heard before, but not of this life."""
    world = World(workers=2, on_failure="shrink", min_workers=1)
    world.agent(1, 2)
    world.agent(3, 4, 5, name="a2", host="a2")
    for i in range(2):
        world.hello(i, host="a1" if i else "a2")
    assert world.command("scale", workers=1).ok and 0 in world.last(m.SetSlots, "a2").worker_ids


def test_it_is_free_when_that_life_is_over() -> None:
    world = World(workers=2)
    world.agent(1)
    world.hello(0, host="a2")
    world.hello(1)
    assert world.command("scale", workers=3).ok and world.last(m.SetSlots, "a1").worker_ids == [1, 2]
    drop(world, "w0.0")
    world.wait(2 * S)
    assert world.report("worker_evicted")["worker_id"] == 0
    assert world.last(m.SetSlots, "a1") == m.SetSlots(worker_ids=[0, 1, 2], first=[1, 1, 0])
    assert world.last(m.Dismissed, world.hello(0, 1)) is None


def test_a_life_that_nobody_speaks_for_has_a_second_from_its_last_connection_on() -> None:
    world = World(workers=2)
    world.agent(1)
    world.hello(1)
    for _ in range(2):
        world.hello(0, host="a2")
        drop(world, "w0.0")
        world.wait(600 * MS)
        assert "worker_evicted" not in world.kinds()
    world.wait(600 * MS)
    assert world.report("worker_evicted")["reason"].startswith("its connection ended 1.0 s ago")


def only_elsewhere() -> World:
    """An agent is there, and the job's one worker on a host whose own agent has not been heard."""
    world = World(workers=1)
    world.agent(1)
    world.hello(0, host="a2")
    return world


def test_a_life_without_a_connection_is_over_if_the_agent_of_its_host_does_not_run_it() -> None:
    """Nobody had spoken for it when it died, and no other holds the state: no agent says that it still lives."""
    world = only_elsewhere()
    world.entered(0, 1, 1)
    drop(world, "w0.0")
    newcomer(world, "a2")
    assert "worker_evicted" not in world.kinds(), "it may be about to connect again"
    world.wait(2 * S)
    assert world.report("worker_evicted")["worker_id"] == 0
    assert "does not run it" in world.report("worker_evicted")["reason"]


def test_a_life_that_the_agent_of_its_host_runs_may_be_without_a_connection() -> None:
    world = only_elsewhere()
    world.entered(0, 1, 1)
    drop(world, "w0.0")
    world.agent(0, name="a2", host="a2")
    world.wait(60 * S)
    assert "worker_evicted" not in world.kinds()


def test_what_the_agent_of_its_host_runs_counts_as_it_says_it_afterwards() -> None:
    world = only_elsewhere()
    newcomer(world, "a2")
    world.wait(100 * MS)
    drop(world, "w0.0")
    world.next_beat = world.now + 3 * S
    world.wait(1500 * MS)
    assert "worker_evicted" not in world.kinds(), "what it says of it may be under way"
    world.wait(3 * S)
    assert world.report("worker_evicted")["worker_id"] == 0


def test_of_an_agent_that_is_away_nobody_knows_what_it_runs() -> None:
    world = only_elsewhere()
    world.entered(0, 1, 1)
    newcomer(world, "a2")
    drop(world, "a2")
    drop(world, "w0.0")
    world.wait(900 * MS)
    world.agent(0, name="a2", host="a2")
    world.wait(60 * S)
    assert "worker_evicted" not in world.kinds()


def test_after_a_restart_nobody_waits_for_lives_that_the_agents_of_their_hosts_do_not_run() -> None:
    """They held all of the state: for their connections alone they would be waited for, as after a long silence."""
    world = only_elsewhere()
    world.entered(0, 1, 1)
    again = world.restart()
    again.agent(1)
    again.wait(5 * S)
    assert "worker_evicted" not in again.kinds(), "its host is silent"
    newcomer(again, "a2")
    again.wait(60 * S)
    assert (
        again.report("worker_evicted")["worker_id"] == 0
        and "does not run it" in again.report("worker_evicted")["reason"]
    )


def test_a_slot_that_the_journal_gave_to_a_lost_host_goes_on_behind_a_life_that_nobody_has_heard_of() -> None:
    world = lives_of_one_agent()
    for n in range(1, 4):
        world.exited(1, n - 1)
        world.started(1, n)
        world.hello(1, n, host="a1")
    again = world.restart()
    newcomer(again, "a2")
    again.wait(700 * S)
    told = again.last(m.SetSlots, "a2")
    assert dict(zip(told.worker_ids, told.first, strict=True))[1] == 4, "a1 runs life 3"


def test_a_life_that_a_host_without_the_slot_counts_for_itself_is_foreign() -> None:
    world = lives_of_one_agent()
    job = world.coordinator.job
    job.slots.grants.replay(1, Grant("a2", "a2", "p1", first=3))
    assert [job.foreign(WorkerKey(1, n), "a1") for n in (0, 1, 3)] == [False, True, True], "life 0 is a member"
    assert not job.foreign(WorkerKey(1, 3), "a2")
    job.membership.remove(WorkerKey(1, 0), Why(Cause.HOST_LOST, "host a1 is silent"))
    job.membership.add(WorkerKey(1, 3), "a2")
    assert [job.foreign(WorkerKey(1, 3), name) for name in ("a1", "a2")] == [True, False], "it lives on a2"


def test_a_host_that_was_away_does_not_get_its_slot_back_from_the_one_that_has_it_now() -> None:
    """Else two hosts start lives of it, and those of the second are dismissed one after another."""
    world = lives_of_one_agent()
    again = world.restart()
    again.coordinator.job.slots.grants.replay(0, Grant("a2", "a2", "p1", first=3))
    again.coordinator.job.membership.remove(WorkerKey(0, 0), Why(Cause.HOST_LOST, "host a1 is silent"))
    again.agent((0, 1), name="a1", host="a1")
    assert again.last(m.Dismissed, again.hello(0, 1, host="a1")).reason == "slot 0 was given to host a2"
    assert again.last(m.KillWorker, "a1").reason == "its slot was given to another host"


def test_a_slot_that_an_agent_is_given_beside_others_outlives_the_coordinator() -> None:
    world = World(workers=1, slots=1)
    newcomer(world, "a1", room=2)
    assert world.last(m.SetSlots, "a1").worker_ids == [0]
    assert world.command("scale", workers=2).ok
    assert world.last(m.SetSlots, "a1").worker_ids == [0, 1]
    for life in (world, world.restart()):
        job = life.coordinator.job
        assert [job.foreign(WorkerKey(i, 5), "a2") for i in (0, 1)] == [True, True]


def test_a_foreign_life_that_does_not_leave_is_killed_again_and_again() -> None:
    world = lives_of_one_agent()
    world.coordinator.job.slots.grants.replay(1, Grant("a2", "a2", "p1", first=3))
    for _ in range(12):  # the first time that it is seen it may be about to leave
        world.now += S
        world.beat((0, 0, "forward", 0), (1, 3, "forward", 0))
    killed = world.messages(m.KillWorker, "a1")
    assert [(k.worker_id, k.incarnation, k.cause) for k in killed] == [(1, 3, Cause.REPLACED)] * 2


def test_a_host_that_no_longer_lists_a_life_of_the_same_number_says_nothing_of_the_one_elsewhere() -> None:
    """Else the slot's right life would be evicted once the host that counted for itself is back without its own."""
    world = lives_of_one_agent()
    job = world.coordinator.job
    job.slots.grants.replay(1, Grant("a2", "a2", "", first=3))
    job.membership.remove(WorkerKey(1, 0), Why(Cause.HOST_LOST, "host a1 is silent"))
    world.agent((1, 3), name="a2", host="a2")
    world.agent(0, (1, 3))
    assert WorkerKey(1, 3) in job.agents.known["a1"].lives
    world.agent(0)
    (right,) = job.membership.living([WorkerKey(1, 3)])
    assert right.agent_id == "a2"


def test_a_job_that_shrinks_counts_no_slot_that_was_given_up_among_those_that_are_left() -> None:
    """Else nobody would be left in the end whom anybody starts."""
    world = World(workers=3, on_failure="shrink")
    world.agent(0, 1, 2)
    world.say("a1", m.SlotLost(agent_id="a1", worker_id=1, cause=Cause.CRASH_LOOP, reason="it died again and again"))
    for i in (0, 2):
        world.hello(i)
    for i in (0, 2):
        world.entered(i, 1, 1)
    world.exited(2)
    world.exited(0)
    assert world.coordinator.job.slots.ids() == {0, 1} and world.last(m.SetSlots, "a1").worker_ids == [0]


def test_a_job_that_is_scaled_down_keeps_no_slot_that_was_given_up() -> None:
    world = running(3)
    world.exited(0)
    world.say("a1", m.SlotLost(agent_id="a1", worker_id=0, cause=Cause.CRASH_LOOP, reason="it died again and again"))
    world.exited(1)
    world.exited(2)
    assert world.command("scale", workers=1).ok and world.coordinator.job.slots.ids() == {2}


# ---- slots that were given up, after a restart of the coordinator


def gives_up(world: World, worker_id: int, agent: str = "a1") -> m.SlotLost:
    lost = m.SlotLost(agent_id=agent, worker_id=worker_id, cause=Cause.CRASH_LOOP, reason="it died again and again")
    world.exited(worker_id, agent=agent)
    world.say(agent, lost)
    return lost


def is_back(world: World, *workers: int, agent: str = "a1", lost: Sequence[m.SlotLost] = (), slots: int = 0) -> None:
    lives = [m.WorkerLife(worker_id=i, incarnation=0, pid=1000 + 10 * i) for i in workers]
    world.connect(agent, "agent")
    world.say(agent, m.AgentHello(agent_id=agent, host=agent, workers=lives, slots=slots, lost=list(lost)))


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("slots", [0, 3])
def test_with_too_few_slots_the_job_ends_also_after_a_restart(slots: int, again: bool) -> None:
    """Whether the agent says again that it has given the slot up, or it is another one by now."""
    before = running(3, min_workers=3, save_ns=5 * S, slots=slots)
    lost, plan = gives_up(before, 2), before.plan
    world = before.restart()
    is_back(world, 0, 1, lost=[lost] if again else [], slots=3)
    for i in range(2):
        world.hello(i, plan=plan, step=5)
    world.wait(5 * S)
    assert world.plan is not None and world.plan.worker_ids == (0, 1) and world.plan.save
    world.entered(0, world.plan.generation, 6)
    world.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=5, ok=True, where="checkpoints/step-5"))
    ended = world.coordinator.job.progress.ended
    assert ended is not None and ended.exit_code == 1
    assert ended.reason.startswith("slot 2 was given up (it died again and again); 2 of the 3 workers")


def test_after_a_restart_the_slots_of_hosts_that_come_later_count() -> None:
    before = running(3, min_workers=3)
    plan = before.plan
    before.agent(3, name="a2", host="a2")
    before.hello(3, host="a2")
    world = before.restart()
    lost = m.SlotLost(agent_id="a1", worker_id=2, cause=Cause.CRASH_LOOP, reason="it died again and again")
    is_back(world, 0, 1, lost=[lost], slots=3)
    is_back(world, 3, agent="a2", slots=1)
    world.hello(3, host="a2")
    for i in range(2):
        world.hello(i, plan=plan, step=5)
    world.wait(5 * S)
    assert world.coordinator.job.progress.ended is None and world.plan.worker_ids == (0, 1, 3)


def test_after_a_restart_a_slot_that_was_given_up_and_runs_again_counts() -> None:
    """Also if its worker is here before its agent."""
    before = running(3, min_workers=2)
    gives_up(before, 2)
    before.started(2, 1)
    before.hello(2, 1)
    before.entered(0, 2, 4)
    before.healed(2, 1)
    before.entered(1, 3, 6)
    plan, world = before.plan, before.restart()
    assert plan.worker_ids == (0, 1, 2)
    for i, n in ((0, 0), (1, 0), (2, 1)):
        world.hello(i, n, plan=plan, step=6)
    world.agent(0, 1, (2, 1))
    world.wait(5 * S)
    assert world.coordinator.job.slots.lost == {}
    gives_up(world, 1)
    assert world.coordinator.job.progress.ended is None and world.plan.worker_ids == (0, 2)


def test_a_life_of_the_same_number_on_another_host_does_not_take_the_place_of_a_member_that_is_heard() -> None:
    """A host that was cut off counted alike; nobody had been given the slot."""
    world = running(2)
    world.connect("w1.elsewhere", "worker")
    world.say("w1.elsewhere", m.WorkerHello(member=member(1, 0, "a9"), step=0))
    assert world.last(m.Dismissed, "w1.elsewhere").reason == "worker 1 (incarnation 0) runs on host a1"
    assert world.closed == ["w1.elsewhere"] and world.plan.generation == 1
    drop(world, "w1.elsewhere")
    world.progress(1, 1, 5)
    assert world.coordinator.job.progress.step == 5 and world.last(m.Dismissed, "w1.0") is None
