"""Workers of several processes on several hosts, in the coordinator: which cell takes a lost one's place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator_harness import CONFIG, World, drop, member

from everstep.base.cause import Cause
from everstep.base.plan import Rank
from everstep.placement.cell_shapes import CellShape
from everstep.protocol import messages as m

S = 1_000_000_000
HOSTS = replace(CONFIG.hosts, cells=(CellShape(2), CellShape()))


def spread(*, spares: int = 0, **config: Any) -> World:
    """Two workers of two processes and spares, each on a host of its own that has room for one."""
    world = World(**{"workers": 2, "slots": 2 + spares, "hosts": HOSTS, **config})
    for i in range(2 + spares):
        world.connect(f"a{i}", "agent")
        world.say(f"a{i}", m.AgentHello(agent_id=f"a{i}", host=f"a{i}", workers=[], slots=0, room=1))
    for i in range(2 + spares):
        assert world.last(m.SetSlots, f"a{i}").worker_ids == [i]
        cell = (Rank(1005 + 10 * i, f"a{i}:9000", ""),)
        world.say(
            f"a{i}",
            m.WorkerStarted(
                agent_id=f"a{i}",
                worker=m.WorkerLife(worker_id=i, incarnation=0, pid=1000 + 10 * i, limbs=(cell[0].pid,)),
            ),
        )
        world.connect(f"w{i}.0", "worker")
        world.say(f"w{i}.0", m.WorkerHello(member=replace(member(i, host=f"a{i}"), limbs=cell), step=0))
    for i in range(2):
        world.entered(i, 1, 1)
    world.clear()
    return world


def dies(world: World, host: int) -> None:
    """With all that it runs; nobody hears of it any more."""
    world.sees = True
    for name in (f"a{host}", f"w{host}.0"):
        drop(world, name)
    world.wait(60 * S)
    assert f"a{host}" not in world.coordinator.job.agents.known


def gives_up(world: World, worker_id: int, ranks: int = 2) -> None:
    """Its rank was killed, and its agent does not start it again."""
    world.exited(worker_id, agent=f"a{worker_id}")
    agent, why = f"a{worker_id}", "no more restarts"
    world.say(agent, m.SlotLost(agent_id=agent, worker_id=worker_id, ranks=ranks, cause=Cause.KILLED, reason=why))


def test_a_spare_whose_host_is_lost_is_no_spare() -> None:
    world = spread(spares=1)
    dies(world, 2)
    gives_up(world, 1)
    assert world.report("cell_shrunk")["worker_id"] == 1
    assert world.last(m.SetSlots, "a1") == m.SetSlots(worker_ids=[1], first=[1], ranks=[1])


def test_a_spare_on_another_host_comes_before_a_smaller_cell() -> None:
    world = spread(spares=1)
    gives_up(world, 1)
    assert not [r for r in world.reports if r.kind == "cell_shrunk"]
    assert set(world.coordinator.job.slots.lost) == {1}


def test_a_job_that_shrinks_goes_on_with_fewer_workers_where_a_host_is_lost() -> None:
    """Nobody is there who could start a smaller cell in its place."""
    world = spread(on_failure="shrink")
    dies(world, 1)
    assert world.coordinator.status()["target"] == 1
    assert world.plan is not None and world.plan.worker_ids == (0,)


def test_a_job_that_shrinks_goes_on_with_a_smaller_cell_where_the_host_is_there() -> None:
    world = spread(on_failure="shrink")
    gives_up(world, 1)
    assert world.coordinator.status()["target"] == 2
    assert world.report("cell_shrunk")["worker_id"] == 1


def test_the_slot_of_a_spare_on_a_lost_host_gets_the_room_of_the_one_that_it_replaced() -> None:
    world = spread(spares=1)
    gives_up(world, 1)
    dies(world, 2)
    assert world.last(m.SetSlots, "a1") == m.SetSlots(worker_ids=[2], first=[1])
    world.started(2, 1, agent="a1")
    world.exited(2, 1, agent="a1")
    world.say("a1", m.SlotLost(agent_id="a1", worker_id=2, ranks=2, cause=Cause.KILLED, reason="no more restarts"))
    assert world.report("cell_shrunk")["worker_id"] == 2
    assert world.last(m.SetSlots, "a1").ranks == [1]


def test_slots_are_shared_out_where_a_plan_is_adopted_while_hosts_are_awaited() -> None:
    """The journal is lost, and a member comes back before the hosts have."""
    world = spread(hosts=replace(HOSTS, least=2))
    again = world.restart(journal=[])
    again.sees = True
    again.hello(0, plan=world.plan, host="a0")
    assert again.plan == world.plan and again.report("waiting")["reason"].startswith("hosts.min: 0 of 2")
    lives = {0: [m.WorkerLife(worker_id=0, incarnation=0, pid=1000, limbs=(1005,))], 1: []}
    for i in (0, 1):
        again.connect(f"a{i}", "agent")
        again.say(f"a{i}", m.AgentHello(agent_id=f"a{i}", host=f"a{i}", workers=lives[i], slots=0, room=1))
    again.wait(60 * S)
    assert again.last(m.SetSlots, "a1").worker_ids == [1]
