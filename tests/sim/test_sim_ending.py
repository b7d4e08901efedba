"""A job that ends without its coordinator, and one whose journal makes no sense: what must hold at every timing."""

from __future__ import annotations

import pytest

from everstep.sim.faults import SimFault
from everstep.sim.model import SimJob
from everstep.sim.scenario import Setup, Simulation, simulate

SEEDS = range(12)
JOB = SimJob(30, 6, 3)


def alone(at_ms: int, *others: SimFault, stages: int = 1) -> Setup:
    job = SimJob(30, 6, 3, stages=stages)
    return Setup(4, 0, 2, 1, "replace", job, (*others, SimFault("end_alone", at_ms)))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("at_ms", [120, 250])
def test_all_leave_at_one_step_which_is_saved(at_ms: int, stages: int) -> None:
    """Also those of the host that was not told."""
    for seed in SEEDS:
        simulation = Simulation(seed, alone(at_ms, stages=stages), tracing=False)
        assert simulation.run() == "", seed
        lives = simulation.control.workers.values()
        steps = {worker.driver.position.step for worker in lives if worker.driver.plan is not None}
        assert len(steps) <= 1, (seed, steps)
        for step in steps - {0}:
            assert step < JOB.steps and len(simulation.control.site.disk.parts[step]) == stages, seed


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
