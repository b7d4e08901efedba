"""A job that ends without its coordinator, one whose journal makes no sense, and one whose coordinator dies between
writing something down and telling of it: what must hold at every timing."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from everstep.base.plan import WorkerKey
from everstep.protocol.lease.requests import Load, Loaded
from everstep.sim.control import Control
from everstep.sim.faults import SimFault
from everstep.sim.leases import LeasedControl
from everstep.sim.model import SimJob
from everstep.sim.scenario import Simulation, simulate
from everstep.sim.setups import LeasedSetup, Setup
from everstep.sim.world import MS, SECOND
from sampling import seeds, thinned

SEEDS = seeds(12)
JOB = SimJob(30, 6, 3)


def alone(at_ms: int, *others: SimFault, stages: int = 1) -> Setup:
    job = SimJob(30, 6, 3, stages=stages)
    return Setup(4, 0, 2, 1, "replace", job, (*others, SimFault("end_alone", at_ms)), save_ms=300)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("at_ms", [120, 250])
def test_all_leave_at_one_step_which_is_saved(at_ms: int, stages: int) -> None:
    """Also those of the host that was not told."""
    for seed in SEEDS:
        simulation = Simulation(seed, alone(at_ms, stages=stages), tracing=False)
        assert simulation.run() == "", seed
        lives = simulation.control.workers.values()
        steps = {worker.driver.machine.position.step for worker in lives if worker.driver.machine.plan is not None}
        assert len(steps) <= 1, (seed, steps)
        for step in steps - {0}:
            assert step < JOB.steps and len(simulation.control.site.disk.parts[step]) == stages, seed


def test_a_coordinator_that_is_back_while_all_leave_says_what_was_saved() -> None:
    """As far as it has been told: in the simulation nothing waits for a connection."""
    told = 0
    for seed in SEEDS:
        fault = SimFault("end_alone", 250, for_ms=5 + 5 * (seed % 3))
        setup = Setup(4, 0, 2, 1, "replace", SimJob(60, 6, 3), (fault,), save_ms=300)
        simulation = Simulation(seed, setup, tracing=False)
        assert simulation.run() == "", seed
        control, newest = simulation.control, max(simulation.control.site.disk.parts)
        assert newest == max(worker.driver.machine.position.step for worker in control.workers.values()), seed
        where, unknown = f"checkpoint of step {newest} in disk", "no checkpoint is known, and no worker is left"
        assert control.fate.why in (f"stopped by request; {where}", f"stopped by request; {unknown}"), seed
        told += where in control.fate.why
    assert told > len(SEEDS) // 2


def test_the_job_asks_a_coordinator_that_died_meanwhile_for_the_end_again() -> None:
    """And its agent starts nothing more: with too few left, the others would wait for that for ever."""
    faults = (SimFault("end_alone", 120, for_ms=40), SimFault("kill", 150), SimFault("coordinator", 170, for_ms=150))
    for seed in SEEDS:
        outcome = simulate(seed, setup=Setup(3, 0, 1, 2, "replace", JOB, faults, save_ms=300))
        assert outcome.ok, outcome


@pytest.mark.parametrize("kind", [Setup, LeasedSetup])
def test_a_stop_counts_though_the_coordinator_dies_while_the_members_save(kind: type[Setup]) -> None:
    """Who asked for it is gone, and repeats nothing."""
    faults = (SimFault("signal", 400, for_ms=80_000), SimFault("coordinator", 420, for_ms=50))
    for seed in seeds(6):
        simulation = Simulation(seed, kind(3, 0, 2, 1, "replace", SimJob(60, 6, 3), faults, save_ms=300), tracing=False)
        assert simulation.run() == "", seed
        assert simulation.control.fate.stopped, seed


@pytest.mark.parametrize("kills", [False, True])
def test_a_checkpoint_that_was_asked_for_just_before_a_stop_is_not_taken_for_that_of_the_end(kills: bool) -> None:
    """It may be complete, or given up, while the members regroup; the end names that of their last step."""
    for seed, gap_ms in thinned(product(range(30), (10, 20, 30, 40, 50, 70)), 5):
        faults = [SimFault("save", 250), SimFault("signal", 250 + gap_ms, for_ms=80_000)]
        faults += [SimFault("kill", 253 + gap_ms)] if kills else []
        setup = Setup(3, 0, 1, 1, "replace", SimJob(80, 6, 3), tuple(faults), save_ms=300)
        simulation = Simulation(seed, setup, tracing=False)
        assert simulation.run() == "", seed
        last = max(worker.driver.machine.position.step for worker in simulation.control.workers.values())
        assert simulation.control.fate.why.endswith(f"; checkpoint of step {last} in disk"), (seed, gap_ms)


@pytest.mark.parametrize("seed", [8, 22, 28, 32])
def test_a_worker_repeats_where_the_last_checkpoint_is(seed: int) -> None:
    """Its connection breaks when it has just said so; else the job would go on to its last step."""
    faults = (SimFault("signal", 250, for_ms=8000), SimFault("drop_control", 330, pick=1))
    simulation = Simulation(seed, Setup(3, 0, 1, 1, "replace", SimJob(60, 6, 3), faults, save_ms=300), tracing=False)
    assert simulation.run() == ""
    assert "; checkpoint of step " in simulation.control.fate.why


def test_while_a_member_joins() -> None:
    for seed in SEEDS:
        assert simulate(seed, setup=alone(220, SimFault("kill", 90, pick=1))).ok, seed


def test_a_slot_that_was_given_up_while_the_coordinator_was_dead_is_heard_of() -> None:
    faults = (SimFault("given_up", 150, for_ms=80, pick=1),)
    for seed in SEEDS:
        outcome = simulate(seed, setup=Setup(4, 0, 2, 1, "replace", SimJob(12, 6, 3), faults))
        assert outcome.ok and outcome.reports.get("warning") == 1, outcome


@pytest.mark.parametrize("first", ["kill", "scale"])
def test_a_plan_that_is_lacking_in_the_journal_is_learned_from_the_workers(first: str) -> None:
    for seed in SEEDS:
        for pick in range(2):
            faults = (SimFault(first, 90, pick=2), SimFault("senseless", 130, for_ms=120, pick=pick))
            outcome = simulate(seed, setup=Setup(3, 1, 2, 1, "replace", JOB, faults))
            assert outcome.ok and outcome.lost_everything == 0, outcome


# ---- written down, and not told


def journal(control: Control) -> list[dict[str, Any]]:
    """What has been written down."""
    if not isinstance(control, LeasedControl):
        return control.journal
    answer = control.store.do(Load())
    return answer.entries if isinstance(answer, Loaded) else []


def dies_untold(simulation: Simulation, kind: str) -> None:
    """The coordinator dies when its journal has an entry of this kind and those that were decided with it, before
    anything follows from them."""
    world, control = simulation.world, simulation.control
    assert world.run(world.now_ns + 20 * SECOND, lambda: any(entry["kind"] == kind for entry in journal(control)))
    coordinator = control.coordinator
    coordinator.crash_after(0)
    assert world.run(world.now_ns + 5 * SECOND, lambda: not coordinator.alive)
    world.later(20 * MS, control.start_coordinator)


@pytest.mark.parametrize("kind", [Setup, LeasedSetup])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_life_that_was_given_up_is_no_holder_though_nobody_was_told(kind: type[Setup], seed: int) -> None:
    """The only member with a stage is cut off, and given up for that; it is in reach again when the others go back."""
    simulation = Simulation(seed, kind(2, 1, 2, 1, "replace", SimJob(12, 4, 3, stages=2), ()), tracing=False)
    world = simulation.world
    assert world.run(5 * SECOND, lambda: simulation.checks.effects.floor > 1)
    others = ("host0", "control", "control1")
    for other in others:
        world.cut("host1", other)
    dies_untold(simulation, "evict")
    for other in others:
        world.mend("host1", other)
    assert "worker_evicted" not in simulation.control.fate.reports
    assert simulation.run() == ""
    assert WorkerKey(1, 0) in simulation.checks.given_up and simulation.checks.lost_everything > 0


def test_who_leaves_as_was_decided_is_no_holder() -> None:
    """Who alone was to go on dies at once, while others have yet to do the update after which they leave."""
    faults = (SimFault("scale", 60, pick=0), SimFault("kill", 60, "settling", 1, 100))
    outcomes = [simulate(seed, setup=Setup(4, 1, 2, 1, "replace", SimJob(8, 6, 3), faults)) for seed in seeds(36)]
    assert all(outcome.ok for outcome in outcomes), [str(one) for one in outcomes if not one.ok]
    assert any(outcome.lost_everything for outcome in outcomes)


@pytest.mark.parametrize("kind", [Setup, LeasedSetup])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_has_failed_though_nobody_was_told(kind: type[Setup], seed: int) -> None:
    simulation = Simulation(seed, kind(1, 0, 1, 1, "replace", SimJob(12, 4, 3), ()), tracing=False)
    control = simulation.control
    assert simulation.world.run(5 * SECOND, lambda: simulation.checks.effects.floor > 1)
    control.agents["host0"].give_up(control.workers[WorkerKey(0, 0)])
    dies_untold(simulation, "slot_lost")
    assert "job_failed" not in control.fate.reports
    assert simulation.run().startswith("P4: the job failed: ")


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", [Setup, LeasedSetup])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_with_too_few_slots_ends_though_its_coordinator_dies_while_the_members_save(
    kind: type[Setup], seed: int, stages: int
) -> None:
    """The next one knows from the journal that the slot was given up, and hears nothing new from the agent."""
    setup = kind(3, 0, 2, 3, "replace", SimJob(30, 4, 3, stages=stages), (), save_ms=300)
    simulation = Simulation(seed, setup, tracing=False)
    world, control = simulation.world, simulation.control
    assert world.run(5 * SECOND, lambda: simulation.checks.effects.floor > 1)
    control.agents["host0"].give_up(control.workers[WorkerKey(2, 0)])
    dies_untold(simulation, "slot_lost")
    assert "job_failed" not in control.fate.reports
    said = simulation.run()
    assert said.startswith("P4: the job failed: slot 2 was given up (it died again and again); 2 of the 3 workers"), (
        said
    )
