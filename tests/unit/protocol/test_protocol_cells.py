"""Workers of several processes in messages, in the journal, and in what the coordinator says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator_harness import World, member

from everstep.base.plan import Plan, Rank
from everstep.protocol import messages as m

LIMBS = {0: 1005, 1: 1015}


def running() -> World:
    """Two workers, each a head and a limb."""
    world = World(workers=2)
    lives = [m.WorkerLife(worker_id=i, incarnation=0, pid=1000 + 10 * i, limbs=(LIMBS[i],)) for i in LIMBS]
    world.connect("a1", "agent")
    world.say("a1", m.AgentHello(agent_id="a1", host="h1", workers=lives, slots=2))
    for i, pid in LIMBS.items():
        world.connect(f"w{i}.0", "worker")
        cell = replace(member(i), limbs=(Rank(pid, f"h1:{9000 + i}", f"segment-{i}"),))
        world.say(f"w{i}.0", m.WorkerHello(member=cell, step=0))
    for i in LIMBS:
        world.entered(i, 1, 1)
    return world


def listed_pids(world: World) -> list[tuple[int, list[int]]]:
    return [(w["pid"], w["pids"]) for w in world.coordinator.status()["workers"]]


def without_limbs(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {k: without_limbs(v) for k, v in entry.items() if k != "limbs"}
    return [without_limbs(v) for v in entry] if isinstance(entry, list) else entry


def test_a_plan_names_the_ranks_of_its_members() -> None:
    world = running()
    told = world.last(m.PlanNow, "w1.0")
    assert isinstance(told, m.PlanNow)
    assert told.plan.member(0).limbs == (Rank(1005, "h1:9000", "segment-0"),)
    assert m.decode(m.encode(told)) == told
    assert listed_pids(world) == [(1000, [1000, 1005]), (1010, [1010, 1015])]
    joined = [r.fields["pids"] for r in world.reports if r.kind == "worker_joined"]
    assert joined == [[1000, 1005], [1010, 1015]]


def test_a_restarted_coordinator_knows_them_from_its_journal() -> None:
    later = running().restart()
    assert later.plan is not None and later.plan.member(1).pids == (1010, 1015)
    assert listed_pids(later) == [(1000, [1000, 1005]), (1010, [1010, 1015])]


def test_journals_without_ranks_are_those_of_single_processes() -> None:
    world = running()
    old = [without_limbs(entry) for entry in world.journal]
    assert old != world.journal
    later = world.restart(old)
    assert later.plan is not None and [x.pids for x in later.plan.members] == [(1000,), (1010,)]
    assert listed_pids(later) == [(1000, [1000]), (1010, [1010])]


def test_a_worker_of_one_process_is_told_of_as_ever() -> None:
    world = World(workers=1)
    world.agent(0)
    world.hello(0)
    assert "pids" not in world.report("worker_joined")
    assert listed_pids(world) == [(1000, [1000])]
    assert isinstance(world.plan, Plan) and world.plan.members == (member(0),)


def test_a_hang_names_the_rank_that_stands_still() -> None:
    world = running()
    pulse = m.WorkerPulse(
        worker_id=1, incarnation=0, step=4, phase="update", still_ms=10_000, samples_per_s=0.0, slowest=1
    )
    world.say("a1", m.Heartbeat(agent_id="a1", seq=1, rtt_ms=1.0, workers=[pulse]))
    evicted = world.report("worker_evicted")
    assert evicted["reason"].startswith("its rank 1: no progress for 10.0 s in phase 'update'")
    assert world.last(m.KillWorker, "a1").worker_id == 1
