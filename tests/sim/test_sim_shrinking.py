"""A failing schedule is made as short as it can be, and can be kept as a scenario."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from planted_bugs import OneRecordTooFew, machine_with

from everstep.base.plan import WorkerKey
from everstep.sim import scenario
from everstep.sim.faults import SimFault
from everstep.sim.model import SimJob
from everstep.sim.rules import Rules
from everstep.sim.setups import LeasedSetup, Setup
from everstep.sim.shrinking import shrink, source_of

NEEDED = (SimFault("kill", 50, pick=1), SimFault("freeze", 90, "settling", 2, 300, 3, 40))
OTHERS = tuple(SimFault("link", at, pick=at) for at in range(10, 200, 17))
SETUP = Setup(5, 2, 3, 2, "wait", SimJob(9, 8, 4, keep_every=2), (*OTHERS[:4], *NEEDED, *OTHERS[4:]), donors=2)


def kinds(setup: Setup) -> list[str]:
    return [fault.kind for fault in setup.faults]


def test_what_the_failure_needs_is_left_and_nothing_else() -> None:
    found = shrink(SETUP, lambda setup: {"kill", "freeze"} <= set(kinds(setup)) and setup.workers >= 3)
    assert kinds(found.setup) == ["kill", "freeze"]
    kill, freeze = found.setup.faults
    assert (kill.pick, freeze.phase, freeze.count, freeze.delay_us, freeze.pick) == (0, "", 1, 0, 0)
    assert (kill.at_ms, freeze.for_ms) == (50, 40), "when it strikes, and for how long, is left alone"
    plain = found.setup
    assert (plain.workers, plain.spares, plain.hosts, plain.min_workers) == (3, 0, 1, 1)
    assert (plain.donors, plain.on_failure, plain.job.steps, plain.job.keep_every) == (1, "replace", 1, 0)


def test_a_failure_without_any_fault_has_none_left() -> None:
    for faults in (NEEDED[:1], SETUP.faults):
        assert not shrink(replace(SETUP, faults=faults), lambda setup: True).setup.faults


def test_a_setup_stays_one_that_could_be_drawn() -> None:
    """A job that dies as a whole goes on from its checkpoints; states are compared twice at least."""
    job = SimJob(8, 8, write_every=3)
    dies = replace(SETUP, job=job, verify_every=2, faults=(SimFault("launcher", 90),))
    found = shrink(dies, lambda setup: bool(setup.faults and setup.verify_every))
    assert (found.setup.job.write_every, found.setup.job.steps, found.setup.verify_every) == (3, 4, 2)


def test_a_failure_that_needs_all_faults_keeps_them() -> None:
    found = shrink(SETUP, lambda setup: len(setup.faults) == len(SETUP.faults))
    assert kinds(found.setup) == kinds(SETUP)


@pytest.mark.parametrize("most", [0, 7])
def test_the_search_ends_after_so_many_simulations_with_what_it_has(most: int) -> None:
    ran: list[Setup] = []

    def fails(setup: Setup) -> bool:
        ran.append(setup)
        return "kill" in kinds(setup)

    found = shrink(SETUP, fails, most)
    assert found.runs == len(ran) == most and "kill" in kinds(found.setup)


def test_no_setup_is_simulated_twice() -> None:
    ran: list[str] = []

    def fails(setup: Setup) -> bool:
        ran.append(repr(setup))
        return set(NEEDED) <= set(setup.faults)

    shrink(SETUP, fails)
    assert len(ran) == len(set(ran))


@pytest.mark.parametrize(
    "setup",
    [
        SETUP,
        replace(SETUP, differs=WorkerKey(1, 1), rules=Rules(lasting_ms=50), faults=NEEDED[:1]),
        LeasedSetup(2, 0, 1, 1, "replace", SimJob(4, 4, nonfinite=frozenset({(2, -1)})), ()),
    ],
)
def test_the_python_of_a_setup_makes_the_same_one(setup: Setup) -> None:
    known = {one.__name__: one for one in (Setup, LeasedSetup, SimJob, SimFault, Rules, WorkerKey)}
    made = eval(source_of(setup), known)
    assert made == setup and type(made) is type(setup)
    assert "rewindable" not in source_of(setup), "what is as usual is left out"


def test_the_command_prints_a_shorter_schedule_that_fails_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = partial(scenario.simulate, machine=machine_with(OneRecordTooFew))
    first = next(one for one in map(broken, range(30)) if len(one.setup.faults) > 2 and not one.ok)
    seed = first.seed
    monkeypatch.setattr(scenario, "simulate", broken)
    assert scenario.run_shrunk(seed, "", most_runs=60) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"seed {seed}: FAILED: {first.promise}: ")
    assert replace(first, problem=lines[0].partition("FAILED: ")[2]).failure == first.failure
    assert lines[-1].startswith(f"simulate({seed}, setup=Setup(")
    words = next(line for line in lines if "are left" in line)
    assert int(words.split()[0]) < int(words.split()[2]) == len(first.setup.faults)


def test_a_seed_that_keeps_all_promises_is_not_shrunk(capsys: pytest.CaptureFixture[str]) -> None:
    assert scenario.run_shrunk(0, "") == 0
    assert "nothing to shrink" in capsys.readouterr().out
