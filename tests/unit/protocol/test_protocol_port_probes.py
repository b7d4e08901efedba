"""Hosts whose own kernels say that nobody listens any more where their workers did: given up without waiting."""

from __future__ import annotations

import pytest
from coordinator_harness import MS, S, World, drop, running

from everstep.base.cause import Cause
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.types import HostRules, PortProbed, ProbePort, Tick


class Doors:
    """Answers whenever the coordinator knocks; who is in neither set says nothing."""

    def __init__(self, world: World, dead: set[int], living: set[int]) -> None:
        self.port_probed: list[int] = []
        self._world, self._handle, self._dead, self._living = world, world.handle, dead, living
        world.handle = self.handle  # type: ignore[method-assign]

    def handle(self, event: object) -> list[object]:
        effects = self._handle(event)
        for effect in effects:
            if isinstance(effect, ProbePort):
                assert effect.address == f"a1:{7000 + effect.key.worker_id}"
                self.port_probed.append(effect.key.worker_id)
                if effect.key.worker_id in self._dead | self._living:
                    self._world.handle(PortProbed(effect.key, effect.key.worker_id in self._living))
        return effects


def two_hosts(*, dead: set[int], living: set[int] = frozenset()) -> tuple[World, Doors]:  # type: ignore[assignment]
    world = running(4, elsewhere=(2, 3), quorum_wait_ns=60 * S)
    world.wait(20 * S)
    world.clear()
    return world, Doors(world, dead, set(living))


def test_a_host_that_says_itself_that_it_is_dead_is_not_waited_for() -> None:
    world, doors = two_hosts(dead={2, 3})
    for name in ("w2.0", "a2", "w3.0"):
        drop(world, name)
    assert world.plan.generation == 1
    world.wait(100 * MS)
    assert world.plan.worker_ids == (0, 1) and world.plan.cause is Cause.HOST_LOST
    assert "the ports of its workers are closed" in world.plan.reason
    world.wait(5 * S)
    assert doors.port_probed == [2, 3], "and nobody knocks at the doors of those that are given up"


@pytest.mark.parametrize(("dead", "living"), [({2}, {3}), ({2}, set()), (set(), {2, 3}), (set(), set())])
def test_one_that_may_live_has_its_time(dead: set[int], living: set[int]) -> None:
    world, doors = two_hosts(dead=dead, living=living)
    for name in ("w2.0", "a2", "w3.0"):
        drop(world, name)
    world.wait(900 * MS)
    assert world.plan.generation == 1 and set(doors.port_probed) == {2, 3}
    world.wait(100 * MS)
    assert world.plan.worker_ids == (0, 1) and "without a connection for 1.00 s" in world.plan.reason


@pytest.mark.parametrize("connected", ["a2", "w3.0"])
def test_a_host_that_has_any_connection_is_none_of_those(connected: str) -> None:
    world, doors = two_hosts(dead={2, 3})
    for name in {"w2.0", "a2", "w3.0"} - {connected}:
        drop(world, name)
    world.wait(900 * MS)
    assert world.plan.generation == 1 and not doors.port_probed


def test_where_nobody_is_heard_it_is_the_coordinator_that_is_cut_off() -> None:
    world, doors = two_hosts(dead={0, 1, 2, 3})
    for name in ("a1", "a2", *(f"w{i}.0" for i in range(4))):
        drop(world, name)
    world.wait(9 * S)
    assert world.plan.generation == 1 and not doors.port_probed


def test_who_alone_holds_the_state_is_waited_for() -> None:
    """A kernel that refuses may be another's: on the way something may say that nobody is there."""
    world = running(4, elsewhere=(0, 1, 2, 3), quorum_wait_ns=60 * S)
    world.agent(name="a1", host="a1")
    world.wait(20 * S)
    Doors(world, {0, 1, 2, 3}, set())
    for name in ("a2", *(f"w{i}.0" for i in range(4))):
        drop(world, name)
    world.wait(9 * S)
    assert world.plan.generation == 1 and "worker_evicted" not in world.kinds()


def test_after_a_takeover_the_dead_are_given_up_before_the_time_to_come_back_is_over() -> None:
    before, _ = two_hosts(dead=set())
    world = World(journal=before.journal, now=before.now, hosts=HostRules(grace_ns=5 * S, term=7))
    doors = Doors(world, {2, 3}, set())
    world.wait(40 * MS)
    world.agent(0, 1)
    for worker_id in (0, 1):
        world.hello(worker_id, plan=before.plan)
    assert world.plan.generation == 1
    world.wait(250 * MS)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 1) and world.plan.term == 7
    assert set(doors.port_probed) == {2, 3}


def test_after_a_takeover_the_others_have_all_of_their_time() -> None:
    before, _ = two_hosts(dead=set())
    world = World(journal=before.journal, now=before.now, hosts=HostRules(grace_ns=5 * S, term=7))
    Doors(world, set(), {2, 3})
    world.agent(0, 1)
    for worker_id in (0, 1):
        world.hello(worker_id, plan=before.plan)
    world.wait(4900 * MS)
    assert world.plan.generation == 1
    world.wait(200 * MS)
    assert world.plan.worker_ids == (0, 1)


def test_what_is_said_of_a_life_that_is_over_or_unknown_has_no_effect() -> None:
    world, _ = two_hosts(dead=set())
    for name in ("w2.0", "a2", "w3.0"):
        drop(world, name)
    for key in (WorkerKey(2, 1), WorkerKey(9, 0), WorkerKey(0, 0)):
        world.handle(PortProbed(key, listens=False))
    world.wait(100 * MS)
    assert world.plan.generation == 1


def test_who_loses_the_last_connection_after_its_agent_is_knocked_at() -> None:
    world, doors = two_hosts(dead={2, 3})
    drop(world, "a2")
    drop(world, "w2.0")
    world.wait(300 * MS)
    assert not doors.port_probed
    drop(world, "w3.0")
    world.wait(100 * MS)
    assert world.plan.worker_ids == (0, 1) and "the ports of its workers are closed" in world.plan.reason


def test_after_a_takeover_hosts_are_looked_at_until_the_time_to_come_back_is_over() -> None:
    before, _ = two_hosts(dead=set())
    world = World(journal=before.journal, now=before.now, hosts=HostRules(grace_ns=5 * S, term=7))
    doors = Doors(world, {2, 3}, set())
    world.handle(Tick())
    world.wait(150 * MS)
    assert not doors.port_probed, "nobody is heard yet"
    world.agent(0, 1)
    for worker_id in (0, 1):
        world.hello(worker_id, plan=before.plan)
    world.wait(250 * MS)
    assert set(doors.port_probed) == {2, 3} and world.plan.worker_ids == (0, 1)
