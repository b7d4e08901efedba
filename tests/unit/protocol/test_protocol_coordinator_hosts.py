"""What the coordinator thinks of hosts: whose connections have all ended, who is silent, who comes back."""

from __future__ import annotations

from coordinator_harness import MS, S, World, drop, running

from everstep.base.cause import Cause
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
    world.agent(2, 3, name="a2", host="h2")
    world.hello(2, host="h2", plan=world.plan)
    world.hello(3, host="h2", plan=world.plan)
    world.wait(10 * S)
    assert world.plan.generation == 1 and "worker_evicted" not in world.kinds()


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
    world.agent(2, 3, name="a2", host="h2")
    world.hello(2, host="h2", plan=world.plan)
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


def test_a_silent_host_is_dead_at_the_floor_even_if_it_is_new() -> None:
    world = running(4, elsewhere=(2, 3), heartbeat_interval_ns=200 * MS)
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


def test_the_coordinator_s_own_absence_is_not_held_against_a_host_that_has_lost_its_connections() -> None:
    world = two_hosts()
    for name in ("a2", "w2.0", "w3.0"):
        drop(world, name)
    world.now += 30 * S
    world.handle(Tick())
    assert world.plan.generation == 1
    world.wait(1100 * MS)
    assert world.plan.worker_ids == (0, 1)
