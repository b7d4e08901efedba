"""What the coordinator thinks of hosts: whose connections have all ended, who is silent, who comes back."""

from __future__ import annotations

import pytest
from coordinator_harness import MS, S, World, drop, running

from everstep.base.cause import Cause, Why
from everstep.base.pool_wish import PoolWish
from everstep.protocol import messages as m
from everstep.protocol.coordinator.environment import Alarm
from everstep.protocol.coordinator.liveness import agent_due
from everstep.protocol.coordinator.types import HostRules, Tick


def two_hosts(**config: object) -> World:
    """Workers 0, 1 and 2, 3; all connected, and known for so long that the detector has learned."""
    world = running(4, elsewhere=(2, 3), quorum_wait_ns=60 * S, **config)
    world.wait(20 * S)
    world.clear()
    return world


def test_a_host_whose_connections_have_all_ended_is_dead_after_a_second() -> None:
    world = two_hosts()
    for name in ("w2.0", "a2", "w3.0"):
        drop(world, name)
    world.wait(900 * MS)
    assert world.plan.generation == 1
    world.wait(100 * MS)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 1)
    assert world.plan.cause is Cause.HOST_LOST and "without a connection for 1.00 s" in world.plan.reason
    known = {h["name"]: (h["state"], h["workers"]) for h in world.command("hosts").result["hosts"]}
    assert known == {"a1": ("live", [0, 1]), "a2": ("gone", [])}


def test_how_long_is_in_the_config() -> None:
    world = two_hosts(hosts=HostRules(reconnect_ns=3 * S))
    for name in ("a2", "w2.0", "w3.0"):
        drop(world, name)
    world.wait(2900 * MS)
    assert world.plan.generation == 1
    world.wait(100 * MS)
    assert world.plan.worker_ids == (0, 1)


def test_the_last_connection_of_a_host_may_end_long_after_its_agent_s() -> None:
    world = two_hosts()
    drop(world, "a2")
    drop(world, "w2.0")
    world.wait(3 * S)
    assert 3 in world.plan.worker_ids, "one of its workers can be reached"
    drop(world, "w3.0")
    world.wait(MS)
    assert world.plan.worker_ids == (0, 1)


def test_where_all_hosts_are_cut_off_it_is_the_coordinator() -> None:
    world = two_hosts()
    for name in ("a1", "a2", *(f"w{i}.0" for i in range(4))):
        drop(world, name)
    world.wait(9 * S)
    assert world.plan.generation == 1 and "worker_evicted" not in world.kinds()


def test_a_host_that_is_back_in_time_keeps_its_workers() -> None:
    world = two_hosts()
    for name in ("a2", "w2.0", "w3.0"):
        drop(world, name)
    world.wait(800 * MS)
    world.agent(2, 3, name="a2", host="a2")
    world.hello(2, host="a2", plan=world.plan)
    world.hello(3, host="a2", plan=world.plan)
    world.wait(10 * S)
    assert world.plan.generation == 1 and "worker_evicted" not in world.kinds()


def test_a_worker_out_of_touch_is_waited_for_no_longer_than_its_agent_where_another_of_its_host_is_in_touch() -> None:
    world = two_hosts()
    drop(world, "a2")
    drop(world, "w2.0")
    world.exited(1)
    world.wait(900 * MS, beating=False)
    assert world.plan.generation == 1
    world.wait(100 * MS, beating=False)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 2, 3), "the host lives"


def test_no_generation_is_made_with_members_that_are_dead_in_all_likelihood() -> None:
    """The others say first that they have lost them; that is not taken for a fault of links between living ones."""
    world = two_hosts()
    for name in ("a2", "w2.0", "w3.0"):
        drop(world, name)
    world.fault(0, 1, 2)
    world.fault(1, 1, 3)
    world.wait(950 * MS)
    assert world.plan.generation == 1
    world.wait(50 * MS)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 1)
    assert "live workers" not in world.plan.reason
    world.wait(10 * S)
    assert world.plan.generation == 2


def test_another_death_meanwhile_waits_for_that_verdict_too() -> None:
    world = two_hosts()
    for name in ("a2", "w2.0", "w3.0"):
        drop(world, name)
    world.exited(1)
    assert world.plan.generation == 1
    world.wait(S)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0,)


def test_if_it_comes_back_the_others_go_on_with_it() -> None:
    world = two_hosts()
    for name in ("a2", "w2.0", "w3.0"):
        drop(world, name)
    world.exited(1)
    world.wait(500 * MS)
    world.agent(2, 3, name="a2", host="a2")
    world.hello(2, host="a2", plan=world.plan)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 2, 3)


def test_nobody_is_prepared_for_while_a_host_may_be_dead() -> None:
    world = two_hosts()
    world.exited(1)
    for i in (0, 2, 3):
        world.entered(i, 2, 5)
    world.started(1, 1)
    world.hello(1, 1)
    for name in ("a2", "w2.0", "w3.0"):
        drop(world, name)
    world.healed(1, 1)
    world.wait(900 * MS)
    assert world.prepared is None and world.plan.generation == 2
    world.wait(100 * MS)
    assert world.plan.generation == 3 and set(world.plan.worker_ids) <= {0, 1}


@pytest.mark.parametrize("interval_ns", [200 * MS, None])
def test_a_silent_host_is_dead_at_the_floor_even_if_it_is_new(interval_ns: int | None) -> None:
    """None: ten round trips of a millisecond would be less than the 0.2 s that are the least."""
    world = running(4, elsewhere=(2, 3), heartbeat_interval_ns=interval_ns)
    for _ in range(20):
        for agent in ("a1", "a2"):
            world.beat(agent=agent)
        world.wait(200 * MS, beating=False)
    silent_at = world.now - 200 * MS
    for _ in range(20):
        world.beat(agent="a1")
        world.wait(200 * MS, beating=False)
        if world.plan.generation == 2:
            break
    assert world.plan.worker_ids == (0, 1) and world.now - silent_at <= 2200 * MS


def test_a_host_that_seems_dead_gets_the_time_in_which_its_last_words_are_read() -> None:
    world = two_hosts()
    world._beat_all = lambda: world.beat(agent="a1")  # type: ignore[method-assign]
    detector = world.coordinator.job.agents.known["a2"].detector
    world.wait(detector._last_ns + detector._limits()[1] - world.now)
    assert detector.suspicion(world.now).dead
    world.wait(20 * MS - 1)
    assert world.plan.generation == 1
    world.wait(1)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 1)


@pytest.mark.parametrize(("before_ns", "after_ns"), [(S, 0), (5 * MS, 0), (MS // 2, MS // 2)])
def test_a_host_is_looked_at_when_it_could_be_suspected_or_a_millisecond_later(before_ns: int, after_ns: int) -> None:
    job = two_hosts().coordinator.job
    at = job.agents.known["a2"].detector.next_change_ns(job.env.now)
    job.env.advance(at - before_ns)
    job.env.alarms._at.clear()
    agent_due(job, "a2")
    assert job.env.alarms._at == {(Alarm.AGENT, "a2"): at + after_ns}


def test_the_coordinator_s_own_absence_is_not_held_against_a_host_that_has_lost_its_connections() -> None:
    world = two_hosts()
    for name in ("a2", "w2.0", "w3.0"):
        drop(world, name)
    world.now += 30 * S
    world.handle(Tick())
    assert world.plan.generation == 1
    world.wait(1100 * MS)
    assert world.plan.worker_ids == (0, 1)


# ---- hosts that do not reach each other


def shared_out(
    *rooms: int,
    workers: int = 4,
    return_ns: int | None = 30 * S,
    stages: int = 1,
    named: bool = False,
) -> World:
    """A job whose slots have been shared out among hosts with so much room; those without any come later. named: the
    config says who is in which pool."""
    wish = PoolWish(homes=tuple(tuple(range(k, workers, stages)) for k in range(stages)), named=named)
    rules = HostRules(return_ns=return_ns)
    world = World(workers=workers, slots=workers, stages=stages, save_ns=30 * S, hosts=rules, wish=wish)
    for k, room in enumerate(rooms):
        arrive(world, f"h{k + 1}", room)
    for name in [f"h{k + 1}" for k in range(len(rooms))]:
        for i in world.last(m.SetSlots, name).worker_ids:
            world.started(i, 0, agent=name)
            world.hello(i, host=name)
    for i in range(workers):
        world.entered(i, 1, 1)
    return world


def arrive(world: World, name: str, room: int = 0, process: str = "p") -> None:
    world.connect(name, "agent")
    world.say(name, m.AgentHello(agent_id=name, host=name, workers=[], slots=0, room=room, process=process))


def begin(world: World, name: str) -> list[int]:
    """The agent starts what it was told and does not run; they say hello."""
    told = world.last(m.SetSlots, name)
    fresh = [i for i in told.worker_ids if i not in world.coordinator.job.membership.workers]
    for i in fresh:
        world.started(i, told.first[told.worker_ids.index(i)], agent=name)
        world.hello(i, told.first[told.worker_ids.index(i)], host=name)
    return fresh


def test_slots_move_to_a_host_that_comes_and_nobody_stops_for_it() -> None:
    world = shared_out(0)
    arrive(world, "h2")
    world.wait(29 * S)
    assert world.last(m.SetSlots, "h2").worker_ids == []
    world.wait(2 * S)
    assert begin(world, "h2") == [4, 5]
    assert world.plan.generation == 1 and world.prepared is None, "those that are to leave wait for their successors"
    world.wait(10 * S)
    assert world.plan.generation == 1 and world.prepared is None
    for i in (4, 5):
        world.healed(i)
    world.wait(S)
    assert world.prepared.worker_ids == (0, 1, 4, 5) and world.plan.generation == 1
    for i in (0, 1, 4, 5):
        world.entered(i, 2, 5)
    for i in (2, 3):
        world.exited(i, agent="h1", in_order=True)
    world.wait(60 * S)
    assert world.last(m.SetSlots, "h1").worker_ids == [0, 1] and world.last(m.SetSlots, "h2").worker_ids == [4, 5]
    assert world.plan.generation == 2


def test_a_slot_that_is_wanted_again_is_nobody_s_before() -> None:
    world = shared_out(0)
    assert world.command("drain", worker_id=3).ok
    for i in range(3):
        world.entered(i, 2, 5)
    world.exited(3, agent="h1", in_order=True)
    arrive(world, "h2")
    assert world.command("scale", workers=4).ok
    assert world.last(m.SetSlots, "h2").worker_ids == [3]


def test_the_leader_stays_where_it_is_though_it_has_the_highest_number() -> None:
    wish = PoolWish(homes=((0, 1, 2, 3),), active=(4,), leaders=(3,))
    world = World(workers=4, slots=4, hosts=HostRules(return_ns=30 * S), wish=wish)
    arrive(world, "h1")
    begin(world, "h1")
    for i in range(4):
        world.entered(i, 1, 1)
    assert world.plan.leader(0) == 3
    arrive(world, "h2")
    world.wait(31 * S)
    assert world.last(m.SetSlots, "h2").worker_ids == [4, 5] and world.coordinator.job.slots.ids() == {0, 3, 4, 5}


def test_slots_do_not_move_to_a_host_that_is_drained() -> None:
    world = shared_out(0)
    arrive(world, "h2")
    assert world.command("drain", host="h2").ok
    world.wait(60 * S)
    assert world.coordinator.job.slots.ids() == {0, 1, 2, 3} and world.last(m.SetSlots, "h2").worker_ids == []


def test_slots_do_not_move_while_others_begin_or_a_change_is_prepared() -> None:
    healing = shared_out(0)
    arrive(healing, "h2")
    healing.wait(31 * S)
    assert begin(healing, "h2") == [4, 5]
    arrive(healing, "h3")
    changing = shared_out(0)
    arrive(changing, "h2")
    assert changing.command("scale", workers=3).ok and changing.prepared is not None
    for world, ids in ((healing, {0, 1, 4, 5}), (changing, {0, 1, 2})):
        world.wait(35 * S)
        assert world.coordinator.job.slots.ids() == ids


@pytest.mark.parametrize("grace_s", [0, 100])
def test_slots_do_not_move_when_the_job_has_ended_or_is_about_to(grace_s: int) -> None:
    world = shared_out(0)
    arrive(world, "h2")
    world.coordinator.job.saving.end_after_saving("failed", Why(Cause.NONDETERMINISTIC, "it drifts"), 1, grace_s * S)
    world.handle(Tick())
    for i in range(4):
        world.entered(i, 2, 1)
    assert (world.coordinator.job.progress.ended is None) == bool(grace_s)
    world.wait(31 * S)
    assert world.coordinator.job.slots.ids() == {0, 1, 2, 3}


def test_slots_do_not_move_between_agents_that_have_their_own() -> None:
    world = running(4, hosts=HostRules(return_ns=30 * S))
    arrive(world, "h2")
    world.wait(31 * S)
    assert not world.coordinator.job.slots.shared_out and not world.messages(m.SetSlots)


@pytest.mark.parametrize(("stages", "moves"), [(1, True), (2, False)])
def test_slots_move_though_they_are_named_unless_their_stages_go_by_that(stages: int, moves: bool) -> None:
    world = shared_out(0, stages=stages, named=True)
    arrive(world, "h2")
    world.wait(31 * S)
    assert (world.coordinator.job.slots.ids() != {0, 1, 2, 3}) == moves


def test_slots_stay_where_hosts_have_as_many_or_no_room_or_are_not_to_get_any() -> None:
    for world in (shared_out(3, 1), shared_out(0, return_ns=None)):
        arrive(world, "h9", 0 if world.config.hosts.return_ns is None else 1)
        told = len(world.messages(m.SetSlots))
        world.wait(60 * S)
        later = world.messages(m.SetSlots)[told:]
        assert all(set(x.worker_ids) <= {0, 1, 2, 3, 4} for x in later)
        assert world.plan.generation == 1 or world.config.hosts.return_ns is not None


def test_a_host_is_drained_and_its_workers_begin_elsewhere() -> None:
    world = shared_out(2, 2, 4)
    world = shared_out(2, 2)
    arrive(world, "h3", 1)
    assert world.command("drain", host="h9").error.startswith("no host 'h9': the hosts are h1, h2, h3")
    reply = world.command("drain", host="h2")
    assert reply.ok and reply.result == {"workers": 3, "moved": 1, "left": [2, 3]}
    assert world.prepared.worker_ids == (0, 1), "at a step boundary, by a plan that all hold before"
    for i in (0, 1):
        world.entered(i, 2, 5)
    for i in (2, 3):
        world.exited(i, agent="h2", in_order=True)
    assert begin(world, "h3") == [4]
    world.healed(4)
    world.wait(S)
    assert world.prepared.worker_ids == (0, 1, 4)
    world.wait(60 * S)
    assert world.last(m.SetSlots, "h2").worker_ids == []
    states = {h["name"]: h["state"] for h in world.command("hosts").result["hosts"]}
    assert states["h2"] == "gone" and states["h1"] == "live"


def test_a_host_that_is_needed_is_not_drained() -> None:
    world = shared_out(0)
    reply = world.command("drain", host="h1")
    assert not reply.ok and "0 workers would be left of 1 that the job needs at least" in reply.error


def test_slots_that_no_host_has_room_for_do_not_count_as_left_by_a_drain() -> None:
    world = shared_out(4)
    assert world.command("scale", workers=7).ok
    assert "0 workers would be left of 1" in world.command("drain", host="h1").error
    arrive(world, "h2", 1)
    assert world.last(m.SetSlots, "h2").worker_ids == [4] and world.command("drain", host="h1").ok


# ---- hosts that leave


def leave(world: World, name: str, *worker_ids: int) -> None:
    """The others switch to a plan without these, who leave."""
    assert world.prepared is not None and not set(worker_ids) & set(world.prepared.worker_ids)
    for i in world.prepared.worker_ids:
        world.entered(i, world.prepared.generation if world.prepared else world.plan.generation, 5)
    for i in worker_ids:
        world.exited(i, agent=name, in_order=True)
    empty(world, name)


def empty(world: World, name: str) -> None:
    """The agent answers that nothing runs there, as it was asked."""
    assert world.last(m.SetSlots, name).drained
    world.say(name, m.HostEmptied(agent_id=name))


def test_a_drained_agent_leaves_when_the_last_of_its_workers_has() -> None:
    world = shared_out(2, 2)
    assert world.command("drain", host="h2").ok
    assert not world.messages(m.HostDismissed)
    world.entered(0, 2, 5)
    world.exited(2, agent="h2", in_order=True)
    assert not world.messages(m.HostDismissed), "worker 3 still runs"
    world.exited(3, agent="h2", in_order=True)
    assert not world.messages(m.HostDismissed), "it may have started another life before it heard that it is drained"
    empty(world, "h2")
    assert "h2 was drained" in world.last(m.HostDismissed, "h2").reason
    world.say("h2", m.HostEmptied(agent_id="h2"))
    world.wait(60 * S)
    assert len(world.messages(m.HostDismissed)) == 1 and world.plan.worker_ids == (0, 1)


@pytest.mark.parametrize("lives", [True, False])
def test_a_drained_host_that_is_not_heard_is_gone_unless_a_worker_runs_there(*, lives: bool) -> None:
    world = shared_out(2, 2)
    assert world.command("drain", host="h2").ok
    world.entered(0, 2, 5)
    for i in (2,) if lives else (2, 3):
        world.exited(i, agent="h2", in_order=True)
    drop(world, "h2")
    states = {h["name"]: h["state"] for h in world.command("hosts").result["hosts"]}
    assert states["h2"] == ("silent" if lives else "gone")


def test_one_that_runs_nothing_leaves_at_once() -> None:
    world = shared_out(2, 2)
    arrive(world, "h3")
    assert world.command("drain", host="h3").ok
    empty(world, "h3")
    assert world.last(m.HostDismissed, "h3") is not None and world.plan.generation == 1


def test_a_life_that_began_before_its_agent_heard_of_the_drain_leaves_before_the_agent() -> None:
    world = shared_out(2, 2)
    world.exited(3, agent="h2")  # the agent has begun the next life when it hears
    assert world.command("drain", host="h2").ok
    world.exited(2, agent="h2", in_order=True)
    world.started(3, 1, agent="h2")
    assert not world.messages(m.HostDismissed)
    world.hello(3, 1, host="h2")
    assert world.last(m.Dismissed, "w3.1").drained
    world.exited(3, 1, agent="h2", in_order=True)
    empty(world, "h2")
    assert world.last(m.HostDismissed, "h2") is not None


def test_a_drained_host_is_not_asked_for_the_slot_of_a_life_that_is_about_to_leave() -> None:
    world = shared_out(2, 2)
    arrive(world, "h3", 2)
    assert world.command("scale", workers=3).ok
    world.entered(0, 2, 5)
    world.entered(1, 2, 5)
    world.entered(2, 2, 5)
    world.exited(3, agent="h2", in_order=True)
    world.started(3, 1, agent="h2")  # the agent had not heard that 3 is not wanted any more
    world.hello(3, 1, host="h2")
    assert world.last(m.Dismissed, "w3.1").drained
    assert world.command("drain", host="h2").ok
    assert world.last(m.SetSlots, "h2").worker_ids == [2] and world.last(m.SetSlots, "h3").worker_ids == [4]


def test_an_agent_that_was_not_drained_is_not_let_go() -> None:
    world = shared_out(2, 2)
    assert not any(message.drained for message in world.messages(m.SetSlots))
    world.say("h2", m.HostEmptied(agent_id="h2"))
    assert not world.messages(m.HostDismissed)


def test_a_restart_of_the_coordinator_does_not_forget_who_is_drained() -> None:
    before = shared_out(2, 2)
    assert before.command("drain", host="h2").ok
    leave(before, "h2", 2, 3)
    world = before.restart()
    arrive(world, "h2", 2)  # the same process, which had not heard that it may leave
    for name, ids in (("h1", (0, 1)),):
        world.connect(name, "agent")
        lives = [m.WorkerLife(worker_id=i, incarnation=0, pid=1000 + 10 * i) for i in ids]
        hello = m.AgentHello(agent_id=name, host=name, workers=lives, slots=2, room=2, process="p")
        world.say(name, hello)
    for i in (0, 1):
        world.hello(i, host="h1", plan=before.plan, step=5)
    world.wait(5 * S)
    assert world.last(m.SetSlots, "h2").worker_ids == []
    empty(world, "h2")
    assert world.last(m.HostDismissed, "h2") is not None
    assert world.command("scale", workers=4).ok
    assert world.last(m.SetSlots, "h2").worker_ids == [], "room there is none, as long as it does not come anew"


def test_a_job_that_grows_takes_no_slot_back_that_still_runs_on_a_drained_host() -> None:
    world = shared_out(2, 2)
    assert world.command("drain", host="h2").ok
    for i in (0, 1):
        world.entered(i, 2, 5)  # the others go on without 2 and 3, whose processes are still there
    assert world.command("scale", workers=4).ok
    for i in (2, 3):
        world.exited(i, agent="h2", in_order=True)
    assert world.last(m.SetSlots, "h2").worker_ids == []
    empty(world, "h2")
    assert world.last(m.HostDismissed, "h2") is not None
    arrive(world, "h3", 2)
    assert world.last(m.SetSlots, "h3").worker_ids == [4, 5]


def test_a_host_that_is_drained_is_not_wanted_for_slots_whose_processes_are_still_leaving_it() -> None:
    world = shared_out(4)
    assert world.command("scale", workers=2).ok
    for i in (0, 1):
        world.entered(i, 2, 5)  # the others go on without 2 and 3, whose processes are still there
    arrive(world, "h2", 2)
    assert world.command("drain", host="h1").result["moved"] == 2
    for i in (2, 3):
        world.exited(i, agent="h1", in_order=True)
    assert world.last(m.SetSlots, "h1").worker_ids == [0, 1], "until the others have healed"
    assert world.last(m.SetSlots, "h2").worker_ids == [4, 5]


@pytest.mark.parametrize("written", [1, 2])
def test_a_coordinator_that_dies_while_a_host_is_drained_leaves_no_host_half_drained(written: int) -> None:
    before = shared_out(2, 2)
    arrive(before, "h3", 2)
    known = len(before.journal)
    before.say("h2", m.HostLeaving(agent_id="h2"))
    world = before.restart(before.journal[: known + written])
    for name, ids in (("h1", (0, 1)), ("h2", (2, 3)), ("h3", ())):
        world.connect(name, "agent")
        lives = [m.WorkerLife(worker_id=i, incarnation=0, pid=1000 + 10 * i) for i in ids]
        leaving = name == "h2"
        hello = {"agent_id": name, "host": name, "workers": lives, "slots": 0, "room": 2, "leaving": leaving}
        world.say(name, m.AgentHello(process="p", **hello))
        for i in ids:
            world.hello(i, host=name, plan=before.plan, step=5)
    world.wait(5 * S)
    assert world.coordinator.job.slots.ids() == {0, 1, 4, 5}
    assert begin(world, "h3") == [4, 5] and world.coordinator.job.agents.known["h2"].draining


def test_a_drained_host_may_join_again() -> None:
    world = shared_out(2, 2)
    assert world.command("drain", host="h2").ok
    leave(world, "h2", 2, 3)
    drop(world, "h2")
    world.wait(2 * S)
    arrive(world, "h2", 2, process="q")
    assert len(world.messages(m.HostDismissed)) == 1
    assert world.command("scale", workers=4).ok
    assert world.last(m.SetSlots, "h2").worker_ids == [2, 3]


def test_a_host_may_ask_to_leave_and_says_so_again_to_who_has_not_heard_it() -> None:
    world = shared_out(2, 2)
    world.say("h2", m.HostLeaving(agent_id="h2"))
    assert world.prepared.worker_ids == (0, 1) and world.prepared.cause is Cause.PREEMPTED
    world.say("h2", m.HostLeaving(agent_id="h2"))
    leave(world, "h2", 2, 3)
    assert len(world.messages(m.HostDismissed)) == 1
    world = shared_out(2, 2)
    lives = [m.WorkerLife(worker_id=i, incarnation=0, pid=1000 + 10 * i) for i in (2, 3)]
    hello = m.AgentHello(agent_id="h2", host="h2", workers=lives, slots=2, room=2, process="p", leaving=True)
    world.say("h2", hello)
    assert world.prepared.worker_ids == (0, 1)


def test_a_host_that_is_needed_stays_though_it_asks_to_leave() -> None:
    world = shared_out(0)
    world.say("h1", m.HostLeaving(agent_id="h1"))
    assert "0 workers would be left" in world.last(m.HostKept, "h1").reason and world.prepared is None
    assert "asks to leave" in world.report("warning")["reason"]


def test_a_host_that_alone_holds_a_stage_hands_it_over_before_it_leaves() -> None:
    homes = ((0, 1), (2, 3))
    world = World(workers=4, slots=4, stages=2, wish=PoolWish(homes=homes))
    for name in ("h1", "h2", "h3"):
        arrive(world, name, 2)
    for name in ("h1", "h2", "h3"):
        for i in world.last(m.SetSlots, name).worker_ids:
            world.started(i, 0, agent=name)
            world.hello(i, host=name)
    for i in range(4):
        world.entered(i, 1, 1)
    alone = next(a for a in ("h1", "h2", "h3") if len(world.last(m.SetSlots, a).worker_ids) == 2)
    left = world.last(m.SetSlots, alone).worker_ids
    assert world.command("drain", host=alone).ok
    world.wait(S)
    if world.prepared is not None:
        assert all(world.prepared.pool(k) for k in range(2))
    fresh = [i for name in ("h1", "h2", "h3") if name != alone for i in begin(world, name)]
    assert fresh
    for _ in range(4):
        for i in fresh:
            if world.last(m.Heal, f"w{i}.0") is not None and i in world.coordinator.job.healing.joins:
                world.healed(i)
        world.wait(S)
        if world.prepared is not None:
            assert all(world.prepared.pool(k) for k in range(2)), "no stage is ever without anybody"
            for i in world.prepared.worker_ids:
                world.entered(i, world.prepared.generation if world.prepared else world.plan.generation, 5)
    assert not set(left) & set(world.plan.worker_ids)
    for i in left:
        world.exited(i, agent=alone, in_order=True)
    empty(world, alone)
    assert world.last(m.HostDismissed, alone) is not None


# ---- hosts that have to be there before the job begins


def waiting_for(workers: int = 4, stages: int = 1, **rules: object) -> World:
    wish = PoolWish(homes=tuple(tuple(range(k, workers, stages)) for k in range(stages)))
    return World(workers=workers, slots=workers, stages=stages, hosts=HostRules(**rules), wish=wish)


def start(world: World, *names: str) -> None:
    for name in names:
        for i in world.last(m.SetSlots, name).worker_ids:
            world.started(i, 0, agent=name)
            world.hello(i, host=name)


def test_nothing_begins_before_enough_hosts_are_there_and_it_says_who_is() -> None:
    world = waiting_for(least=3)
    arrive(world, "h1")
    arrive(world, "h2")
    world.wait(100 * S)
    assert not world.messages(m.SetSlots) and world.plan is None
    assert world.report("waiting")["reason"].startswith("hosts.min: 2 of 3 hosts have joined (h1, h2): 1 missing")
    assert world.command("status").result["state"] == "waiting"
    arrive(world, "h3")
    told = [len(world.last(m.SetSlots, name).worker_ids) for name in ("h1", "h2", "h3")]
    assert sorted(told) == [1, 1, 2], "and then all of them get their share"
    start(world, "h1", "h2", "h3")
    assert world.plan.generation == 1 and len(world.plan.members) == 4


def test_hosts_are_not_waited_for_for_ever() -> None:
    world = waiting_for(least=2, wait_ns=50 * S)
    arrive(world, "h1")
    world.wait(49 * S)
    assert world.coordinator.job.progress.ended is None
    world.wait(2 * S)
    ended = world.coordinator.job.progress.ended
    assert ended.exit_code == 3 and ended.cause is Cause.QUORUM
    assert "50 s (hosts.wait_s)" in ended.reason and "1 of 2 hosts have joined (h1)" in ended.reason


def test_the_time_for_workers_begins_when_all_hosts_are_there() -> None:
    world = waiting_for(least=2, wait_ns=500 * S)
    world = World(workers=2, slots=2, hosts=world.config.hosts, quorum_wait_ns=60 * S)
    arrive(world, "h1")
    world.wait(200 * S)
    arrive(world, "h2")
    world.wait(50 * S)
    assert world.coordinator.job.progress.ended is None
    world.wait(20 * S)
    assert world.coordinator.job.progress.ended.exit_code == 3


def test_where_the_map_says_so_workers_run_on_that_host() -> None:
    world = waiting_for(named={0: "h2", 3: "h2", 1: "h1"}, wait_ns=50 * S)
    arrive(world, "h1")
    assert "map: worker 0 is to run on host 'h2', which has not joined, and 1 more" in world.report("waiting")["reason"]
    arrive(world, "h2")
    assert {0, 3} <= set(world.last(m.SetSlots, "h2").worker_ids) and 1 in world.last(m.SetSlots, "h1").worker_ids
    world = waiting_for(named={0: "h2"}, wait_ns=50 * S)
    arrive(world, "h1")
    arrive(world, "h3")
    world.wait(51 * S)
    ended = world.coordinator.job.progress.ended
    assert ended.exit_code == 2 and ended.cause is Cause.CONFIG and ended.reason.endswith("the hosts are h1, h3")


def test_slots_do_not_move_while_a_member_is_missing() -> None:
    world = shared_out(0)
    world.exited(3, agent="h1")
    world.started(3, 1, agent="h1")
    for i in range(3):
        world.entered(i, 2, 1)
    arrive(world, "h2")
    world.wait(60 * S)
    assert world.last(m.SetSlots, "h2").worker_ids == []
    world.hello(3, 1, host="h1")
    world.healed(3, 1)
    for i in range(4):
        world.entered(i, 3, 5, incarnation=i // 3)
    world.wait(2 * S)
    assert world.last(m.SetSlots, "h2").worker_ids == [4, 5]


def test_a_slot_that_begins_anew_gets_no_number_of_a_worker_that_is_still_there() -> None:
    world = shared_out(0)
    arrive(world, "h2")
    world.wait(31 * S)
    assert begin(world, "h2") == [4, 5], "2 and 3 compute until these have healed"
    arrive(world, "h3")
    assert world.command("drain", host="h2").ok
    assert begin(world, "h3") == [6, 7]


def test_a_slot_that_begins_anew_gets_no_number_that_another_agent_may_just_have_begun_again() -> None:
    world = shared_out(2, 2)
    assert world.command("scale", workers=3).ok
    for i in range(3):
        world.entered(i, 2, 5)
    world.exited(3, agent="h2")
    arrive(world, "h3", 2)
    assert world.command("drain", host="h1").ok
    assert begin(world, "h3") == [4]
    world.started(3, 1, agent="h2")
    assert world.last(m.SetSlots, "h3").worker_ids == [4]


def test_a_host_is_not_drained_if_fewer_workers_than_stages_would_be_left() -> None:
    world = shared_out(1, 1, workers=2, stages=2)
    reply = world.command("drain", host="h2")
    assert not reply.ok and "1 workers would be left of 2" in reply.error


def test_who_takes_the_place_of_a_worker_of_a_drained_host_is_not_drained_meanwhile() -> None:
    world = shared_out(1, 1, workers=2, stages=2)
    arrive(world, "h3", 1)
    assert world.command("drain", host="h2").ok and begin(world, "h3") == [2]
    reply = world.command("drain", worker_id=2)
    assert reply.error == "cannot drain worker 2: 1 workers would be left of 2 for the stages"


def test_a_host_that_alone_holds_a_stage_is_not_drained_if_nobody_comes_to_take_it() -> None:
    """Its worker would stay for the stage, and the host would never be let go."""
    world = shared_out(1, 1, 1, 1, workers=4, stages=3)
    assert [tuple(s.worker_id for s in world.plan.pool(k)) for k in range(3)] == [(0, 3), (1,), (2,)]
    assert "h2: nobody else holds stage 1; let a backup join it" in world.command("drain", host="h2").error
    world.command("scale", workers=5)  # nobody has room for the fifth
    assert "h2: nobody else holds stage 1; let a backup join it" in world.command("drain", host="h2").error
    world.command("scale", workers=4)
    arrive(world, "h5", 1)
    assert world.command("drain", host="h2").result == {"workers": 4, "moved": 1, "left": [1]}
    begin(world, "h5")
    world.healed(4)
    world.wait(S)
    assert [tuple(s.worker_id for s in world.prepared.pool(k)) for k in range(3)] == [(0, 3), (4,), (2,)]


def test_a_host_of_a_job_with_fewer_workers_than_stages_is_drained_where_its_workers_have_room() -> None:
    world = shared_out(1, 1, workers=2, stages=3)
    assert not world.command("drain", host="h2").ok, "one worker would be left of two that have stages of their own"
    arrive(world, "h3", 1)
    assert world.command("drain", host="h2").result == {"workers": 2, "moved": 1, "left": [1]}
    assert begin(world, "h3") == [2]
    world.healed(2)
    world.wait(S)
    assert world.prepared is not None and world.prepared.worker_ids == (0, 2)
    assert all(world.prepared.pool(stage) for stage in range(3))


def test_before_it_begins_a_job_needs_no_worker_for_each_stage() -> None:
    world = waiting_for(workers=2, stages=2)
    for name in ("h1", "h2"):
        arrive(world, name, 1)
    assert world.command("drain", host="h2").ok and world.plan is None


def test_the_time_of_a_round_trip_is_one_that_was_measured_and_that_of_most_of_the_last_ones() -> None:
    world = running()
    for number, rtt_ms in enumerate([1.0] * 16 + [9.12345] * 16, 100):
        world.say("a1", m.Heartbeat(agent_id="a1", seq=number, rtt_ms=rtt_ms, workers=[]))
    (host,) = world.command("hosts").result["hosts"]
    assert host["rtt_ms"] == 9.123


def test_slots_of_a_host_that_has_yet_to_come_back_count_once_it_has_said_how_many_there_are() -> None:
    world = World(workers=2, min_workers=2)
    world.agent(0, 1)
    world.agent(2, 3, name="a2", host="a2")
    for worker in (0, 1):
        world.hello(worker)
    world.entered(0, 1, 1)
    world.hello(3, host="a2")
    world.exited(1)
    assert world.plan is not None and world.plan.worker_ids == (0, 3)
    again = world.restart()
    again.agent(0, 1)
    assert again.coordinator.job.slots.ids() == {0, 1, 3}
    again.agent(2, 3, name="a2", host="a2")
    assert again.coordinator.job.slots.ids() == {0, 1, 2, 3}


def named_hello(agent_id: str, address: str, node: str) -> m.AgentHello:
    about = {"address": address, "node": node}
    return m.AgentHello(agent_id=agent_id, host=agent_id, workers=[], slots=0, room=2, process=agent_id, about=about)


def test_the_job_s_own_host_is_shown_and_drained_by_its_name_unless_another_has_it() -> None:
    world = running(2)
    for agent_id, address, node in (("10.0.0.1", "10.0.0.1", "blue"), ("green", "10.0.0.2", "green")):
        world.connect(agent_id, "agent")
        world.say(agent_id, named_hello(agent_id, address, node))
    shown = {h["id"]: h["name"] for h in world.command("hosts").result["hosts"]}
    assert shown["10.0.0.1"] == "blue" and shown["green"] == "green"
    world.hello(7, host="10.0.0.1")
    assert world.coordinator.status()["workers"][-1]["host"] == "blue"
    joined = world.report("worker_joined")
    assert (joined["host"], joined["node"]) == ("10.0.0.1", "blue"), "programs know it by its address"
    for name in ("blue", "10.0.0.1", "10.0.0.2"):
        assert "no host" not in world.command("drain", host=name).error
    assert "no host 'red': the hosts are blue, a1, " in world.command("drain", host="red").error
    world.connect("blue", "agent")
    world.say("blue", named_hello("blue", "10.0.0.3", "blue"))
    shown = {h["id"]: h["name"] for h in world.command("hosts").result["hosts"]}
    assert shown["10.0.0.1"] == "10.0.0.1" and shown["blue"] == "blue"


def test_a_host_that_does_not_fit_is_refused_and_not_gone() -> None:
    world = running(2)
    world.connect("b", "agent")
    world.say("b", named_hello("b", "10.0.0.2", "b"))
    world.say("b", m.HostRefused(agent_id="b", reason="torch is 9.9, the job's host has 2.1", cause=Cause.CONFIG))
    states = {h["name"]: h["state"] for h in world.command("hosts").result["hosts"]}
    assert states["b"] == "refused"
    assert "host b stays out: torch is 9.9" in world.report("warning")["reason"]
    assert world.plan.generation == 1, "nobody else noticed"


def test_the_host_of_a_lost_head_that_comes_back_under_its_own_name_is_listed_once() -> None:
    world = World(workers=2)
    world.agent(0, name="10.0.0.1", host="10.0.0.1")
    world.agent(1, name="b", host="b")
    world.hello(0, host="10.0.0.1")
    world.hello(1, host="b")
    world.entered(0, 1, 1)
    new = world.restart()
    new.agent(1, name="b", host="b")
    new.hello(1, host="b")
    new.wait(60 * S)
    listed = {h["name"]: h["state"] for h in new.command("hosts").result["hosts"]}
    assert listed["10.0.0.1"] == "gone"
    new.connect("blue", "agent")
    new.say("blue", named_hello("blue", "10.0.0.1", "blue"))
    assert sorted(h["name"] for h in new.command("hosts").result["hosts"]) == ["b", "blue"]
