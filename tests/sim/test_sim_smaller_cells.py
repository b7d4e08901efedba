"""Simulated jobs whose workers are cells: where a slot is given up, its worker goes on with fewer processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from everstep.protocol.coordinator.cells import Cells
from everstep.sim.faults import SimFault
from everstep.sim.model import SimJob
from everstep.sim.rules import Rules
from everstep.sim.scenario import Simulation, simulate
from everstep.sim.setups import Setup, set_up
from sampling import seeds

CELLS = Rules(shared=True, degree=4)


def _cells(seed: int) -> Setup:
    """The setup of a seed whose workers are cells of four, with slots that are given up at any time."""
    drawn, rng = set_up(seed), Random(f"cells {seed}")
    late_ms = 60 + drawn.job.steps * 40
    worn = [
        SimFault(rng.choice(("worn", "given_up")), rng.randint(40, late_ms), pick=rng.randrange(5), for_ms=50)
        for _ in range(rng.randint(1, 4))
    ]
    at_last = tuple(sorted((*drawn.faults, *worn), key=lambda fault: fault.at_ms))
    return replace(drawn, faults=at_last, rules=CELLS, spares=drawn.spares % 2, differs=None)


def _once(policy: str, *kinds: str) -> tuple[str, str]:
    """A problem, and why the job has failed; both "" if it has come to its end."""
    faults = tuple(SimFault(kind, 90 + 60 * n, for_ms=40) for n, kind in enumerate(kinds))
    setup = Setup(1, 0, 1, 1, policy, SimJob(10, 4, 3, write_every=2), faults, rules=CELLS)
    simulation = Simulation(3, setup, tracing=False)
    return simulation.run(), simulation.control.fate.failed


@pytest.mark.parametrize("policy", ["replace", "shrink", "wait"])
def test_the_only_worker_goes_on_until_it_is_one_process(policy: str) -> None:
    assert _once(policy, "worn", "given_up") == ("", "")


def test_one_process_that_is_given_up_is_the_end() -> None:
    problem, failed = _once("replace", "worn", "worn", "worn")
    assert not problem and "was given up (it died again and again)" in failed


def test_the_promises_hold_under_any_schedule() -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for seed in seeds(60):
        outcome = simulate(seed, setup=_cells(seed))
        assert outcome.ok, str(outcome)
        seen.update(outcome.seen)
    assert seen["faults", "worn"] and seen["faults", "given_up"]


def test_a_smaller_cell_that_no_agent_hears_of_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cells, "ranks", lambda cells, worker_ids: [])
    assert _once("replace", "worn")[0].startswith("P4: no end")
