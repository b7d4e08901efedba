"""Workers of several processes in messages, in the journal, and in what the coordinator says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator_harness import CONFIG, World, drop, member

from everstep.base.cause import Cause
from everstep.base.plan import Plan, Rank
from everstep.placement.cell_shapes import CellShape, shapes_of
from everstep.protocol import messages as m

LIMBS = {0: 1005, 1: 1015}


def running(**config: Any) -> World:
    """Two workers, each a head and a limb."""
    world = World(workers=2, **config)
    lives = [m.WorkerLife(worker_id=i, incarnation=0, pid=1000 + 10 * i, limbs=(LIMBS[i],)) for i in LIMBS]
    world.connect("a1", "agent")
    world.say("a1", m.AgentHello(agent_id="a1", host="a1", workers=lives, slots=2))
    for i, pid in LIMBS.items():
        world.connect(f"w{i}.0", "worker")
        cell = replace(member(i), limbs=(Rank(pid, f"a1:{9000 + i}", f"segment-{i}"),))
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
    assert told.plan.member(0).limbs == (Rank(1005, "a1:9000", "segment-0"),)
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


# ---- a cell that cannot be had any more


TWO = {"hosts": replace(CONFIG.hosts, cells=(CellShape(1, 2), CellShape(1, 1))), "slots": 2}


def lost(worker_id: int = 1, ranks: int = 2) -> m.SlotLost:
    return m.SlotLost(agent_id="a1", worker_id=worker_id, ranks=ranks, cause=Cause.KILLED, reason="no more restarts")


def shapes(world: World) -> list[tuple[int, int]]:
    return [(r.fields["worker_id"], r.fields["ranks"]) for r in world.reports if r.kind == "cell_shrunk"]


def test_shapes_go_from_divisor_to_divisor_and_then_lose_seats() -> None:
    assert [(s.fsdp, s.tp) for s in shapes_of(CellShape(2, 4), 4)] == [(2, 4), (2, 2), (2, 1), (1, 1)]
    assert [(s.fsdp, s.tp) for s in shapes_of(CellShape(1, 6), 12)] == [(1, 6), (1, 4), (1, 3), (1, 2), (1, 1)]
    assert [s.ranks for s in shapes_of(CellShape(3, 1), 8)] == [3, 2, 1]
    assert [str(s) for s in shapes_of(CellShape(2, 2), 2)] == [
        "cell.fsdp=2 and cell.tp=2",
        "cell.fsdp=2",
        "one process",
    ]


def test_a_slot_without_a_spare_goes_on_with_fewer_processes_and_then_is_given_up() -> None:
    world = running(**TWO)
    world.exited(1)
    world.say("a1", lost())
    assert world.last(m.SetSlots, "a1") == m.SetSlots(worker_ids=[0, 1], first=[1, 1], ranks=[2, 1])
    said = world.report("cell_shrunk")
    assert (said["fsdp"], said["tp"], said["cause"]) == (1, 1, Cause.KILLED)
    assert said["reason"] == "one process in place of cell.tp=2, to the same bits: no more restarts"
    world.started(1, 1)
    world.exited(1, 1)
    world.say("a1", lost(ranks=1))
    assert shapes(world) == [(1, 1)] and set(world.coordinator.job.slots.lost) == {1}


def test_an_agent_that_says_it_once_more_is_told_once_more() -> None:
    world = running(**TWO)
    world.exited(1)
    world.say("a1", lost())
    drop(world, "a1")
    world.clear()
    lives = [m.WorkerLife(worker_id=0, incarnation=0, pid=1000, limbs=(1005,))]
    world.connect("a1", "agent")
    world.say("a1", m.AgentHello(agent_id="a1", host="a1", workers=lives, slots=2, lost=[lost()]))
    assert not shapes(world) and not world.coordinator.job.slots.lost
    assert world.last(m.SetSlots, "a1").ranks == [2, 1]


def test_a_restarted_coordinator_knows_the_shapes_from_its_journal() -> None:
    world = running(**TWO)
    world.exited(1)
    world.say("a1", lost())
    later = world.restart()
    assert later.coordinator.job.slots.cells.shape(1) == CellShape()
    assert later.coordinator.job.slots.cells.shape(0) == CellShape(1, 2)
    odd = world.restart([*world.journal, {"kind": "cell", "worker_id": 0, "ranks": 7}])
    assert odd.coordinator.job.slots.cells.shape(0) == CellShape(1, 2)


def test_a_spare_takes_the_place_and_no_cell_is_made_smaller() -> None:
    world = running(**{**TWO, "slots": 3})
    world.started(2, 0)
    world.hello(2)
    world.exited(1)
    world.say("a1", lost())
    assert not shapes(world) and set(world.coordinator.job.slots.lost) == {1}


def test_before_the_first_plan_a_slot_is_given_up() -> None:
    world = World(workers=2, **TWO)
    world.agent(0, 1)
    world.hello(0)
    world.say("a1", lost())
    assert not shapes(world) and set(world.coordinator.job.slots.lost) == {1}


def test_with_shrink_a_smaller_cell_comes_before_fewer_workers() -> None:
    world = running(**TWO, on_failure="shrink")
    world.exited(1)
    assert world.coordinator.job.slots.target == 2
    world.say("a1", lost())
    assert shapes(world) == [(1, 1)]
