"""Hundreds of seeds: safety under faults, then liveness once they stop. A failing seed is replayed by its number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from ordinary_seeds import meets_flips, ordinary

from everstep.cli.main import run_command
from everstep.protocol.driver.driver import Driver
from everstep.protocol.driver.driver_parts import DriverConfig
from everstep.protocol.step_machine import StepMachine
from everstep.sim.faults import KNOWN as FAULTS
from everstep.sim.faults import PHASES, SimFault
from everstep.sim.model import SimJob
from everstep.sim.scenario import simulate
from everstep.sim.setups import Setup, set_up, set_up_split
from sampling import seeds


def test_the_seeds_meet_what_they_are_meant_to_meet():
    """Not a few quiet runs: generations change, workers heal, coordinators restart, and training goes on."""
    seen: dict[str, int] = {}
    kinds: set[str] = set()
    phases: set[str] = set()
    generations = 0
    for seed in range(80):
        outcome = ordinary(seed)
        generations += outcome.generations
        for kind, count in outcome.reports.items():
            seen[kind] = seen.get(kind, 0) + count
        kinds |= {f.kind for f in outcome.setup.faults}
        phases |= {f.phase for f in outcome.setup.faults}
    assert generations > 120
    for kind in ("worker_evicted", "worker_healed", "recovery_completed", "leader_changed", "job_completed", "waiting"):
        assert seen.get(kind, 0) > 0, seen
    assert len(kinds) >= 12 and phases >= set(PHASES)


def test_most_flips_are_found():
    setups = {seed: set_up(seed) for seed in seeds(300)}
    meets_flips("", {n: s.differs is None and any(f.kind == "flip" for f in s.faults) for n, s in setups.items()})


def _differs(kind: str, setup: Setup) -> bool:
    return kind == "differs" and setup.differs is not None


def test_each_fault_strikes_in_ordinary_seeds():
    """Whatever may befall a job is met within the 300 seeds of either kind, and is counted."""
    setups = {(seed, split): set_up_split(seed) if split else set_up(seed) for split in (0, 1) for seed in range(300)}
    seen: Counter[str] = Counter()
    for _, kind in FAULTS:
        drawn = (at for at, s in setups.items() if kind in {f.kind for f in s.faults} or _differs(kind, s))
        while not seen[kind]:
            seed, split = next(drawn, (None, 0))
            assert seed is not None, f"no seed meets {kind}"
            met = ordinary(seed, "split" if split else "").seen
            seen.update({name: n for (group, name), n in met.items() if group == "faults"})


def test_a_resumed_job_goes_on_from_its_checkpoints_with_another_number_of_workers():
    dies = SimFault("launcher", 300, pick=1, for_ms=50)
    fall = Setup(3, 0, 2, 1, "replace", SimJob(12, 6, 4, write_every=2), (dies,))
    outcomes = [simulate(seed, setup=fall) for seed in range(8)]
    assert all(outcome.ok for outcome in outcomes), [str(outcome) for outcome in outcomes if not outcome.ok]
    assert sum(any(outcome.targets) for outcome in outcomes) > 4, "they begin with what is on the disk"


def test_a_job_is_resumed_in_another_number_of_stages():
    dies = SimFault("launcher", 400, pick=3, for_ms=50, stages=2), SimFault("launcher", 800, pick=2, stages=1)
    job = SimJob(8, 4, 4, stages=3, write_every=1, units=4)
    outcomes = [simulate(seed, setup=Setup(4, 0, 2, 1, "replace", job, dies)) for seed in range(8)]
    assert all(outcome.ok for outcome in outcomes), [str(outcome) for outcome in outcomes if not outcome.ok]
    assert sum(any(outcome.targets) for outcome in outcomes) > 4, "they begin with what is on the disk"
    assert {f.stages for seed in range(300) for f in set_up_split(seed).faults} >= {1, 2, 3}


def test_nobody_begins_with_another_initial_state():
    job = Setup(3, 0, 2, 1, "replace", SimJob(6, 6, 4), (), differs=2)
    again = Setup(4, 0, 2, 1, "shrink", SimJob(6, 4, 3, stages=2), (SimFault("pool", 60, pick=0),), differs=3)
    setups = (job, again)
    for seed in range(8):
        assert all(simulate(seed, setup=one).ok for one in setups)

    class BelievesItself(Driver):
        """Goes on with what it has built."""

        def __init__(self, config: DriverConfig, machine: StepMachine) -> None:
            super().__init__(config, machine)
            self._ends._unless_refused = lambda events: events

    for one in setups:
        assert any("another state" in simulate(seed, setup=one, driver=BelievesItself).problem for seed in range(8)), (
            one
        )


def test_a_stage_that_was_lost_is_built_anew_as_it_was():
    """It was by a worker whose initial state differed, and was compared with nothing."""
    drawn = [seed for seed in range(400) if set_up_split(seed).differs is not None][:12]
    outcomes = [ordinary(seed, "split") for seed in drawn]
    assert drawn and all(outcome.ok for outcome in outcomes), [str(o) for o in outcomes if not o.ok]


def test_a_full_disk_costs_the_checkpoint_alone():
    full = SimFault("disk_full", 80, for_ms=4000), SimFault("save", 120), SimFault("save", 200)
    outcomes = [simulate(seed, setup=Setup(3, 0, 1, 1, "replace", SimJob(10, 6, 4), full)) for seed in range(4)]
    assert all(outcome.ok for outcome in outcomes), [str(outcome) for outcome in outcomes if not outcome.ok]


def test_a_seed_replays_exactly():
    first, second = simulate(11, tracing=True), simulate(11, tracing=True)
    assert first == second and first.trace


@pytest.mark.parametrize("seed", [3, 8])
def test_a_seed_replays_exactly_in_another_process(seed):
    """Nothing depends on the hashes of strings or on addresses."""
    runs = []
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "everstep", "sim", "--seed", str(seed), "--trace"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        runs.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert runs[0] == runs[1]


def test_the_command_says_what_failed_and_how_to_replay_it(capsys, monkeypatch):
    assert run_command(["sim", "--seeds", "3", "--start", "5"]) == 0
    assert "3 seeds, 0 failed" in capsys.readouterr().out
    broken = simulate(5)
    object.__setattr__(broken, "problem", "P1: planted")
    monkeypatch.setattr("everstep.sim.scenario.simulate", lambda seed, **_: broken)
    assert run_command(["sim", "--seeds", "3", "--start", "5"]) == 1
    said = capsys.readouterr().out
    assert "seed 5: FAILED: P1: planted" in said and "--seed 5 --trace" in said


def test_the_command_sums_up_a_range_for_programs(capsys, monkeypatch):
    assert run_command(["sim", "--seeds", "3:33", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seeds"] == 30 and found["violations"] == [] and found["seeds_per_cpu_s"] > 0
    coverage = found["coverage"]
    assert coverage["operations"]["Compute done"] > coverage["operations"]["Compute aborted"] > 0
    assert coverage["effects"]["Shelve"] > 0 and coverage["messages"]["PlanNow"] > 0
    assert coverage["faults"]["pool"] == 0, "that is for models in stages"
    assert coverage["reports"]["job_completed"] > 0
    broken = simulate(5)
    object.__setattr__(broken, "problem", "P1: planted")
    monkeypatch.setattr("everstep.sim.scenario.simulate", lambda seed, **_: broken)
    assert run_command(["sim", "--seeds", "5:7", "--split", "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)["violations"]
    assert first == second and first["seed"] == 5 and first["promise"] == "P1"
    assert first["schedule"] == [str(fault) for fault in broken.setup.faults]
    assert first["replay"] == "everstep sim --seed 5 --split --trace"


@pytest.mark.parametrize(("seeds", "code"), [(["--forever"], 0), (["--seeds", "5:9"], 130)])
def test_seeds_that_were_interrupted_did_not_pass(seeds, code, monkeypatch):
    def interrupted(seed, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr("everstep.sim.scenario.simulate", interrupted)
    assert run_command(["sim", *seeds]) == code


@pytest.mark.parametrize(
    "wrong",
    [
        ["--seeds", "0"],
        ["--seeds", "5:5"],
        ["--seeds", "many"],
        ["--seeds", "1:"],
        ["--seeds", "1:3", "--start", "2"],
        ["--start", "-1"],
        ["--seed", "4", "--json"],
    ],
)
def test_seeds_that_make_no_sense_are_one_line(wrong, capsys):
    assert run_command(["sim", *wrong]) == 2
    said = capsys.readouterr()
    assert wrong[0] in said.err and said.err.count("\n") == 1 and not said.out


def test_setups_are_small_and_varied():
    setups = [set_up(seed) for seed in range(200)]
    assert {s.workers for s in setups} == {2, 3, 4, 5}
    assert {s.hosts for s in setups} == {1, 2, 3}
    assert all(4 <= s.job.lanes <= 8 and s.job.steps <= 12 for s in setups)


@pytest.mark.parametrize(
    ("seed", "split", "leased"),
    [
        pytest.param(902018152, False, False, id="its own copy is lost before the only other one flips"),
        pytest.param(902001183, False, True, id="the last state is compared again in a later generation"),
        pytest.param(902016782, True, False, id="a joiner knew that the job ends, and went back behind it"),
        pytest.param(902010437, True, False, id="a member is one decision behind the newest step that all can have"),
        pytest.param(902009251, True, False, id="who left as asked holds the newest step"),
        pytest.param(902009720, True, False, id="nobody has the records of a decision any more"),
        pytest.param(902019759, False, True, id="a joiner of a plan that never came into force holds state"),
        pytest.param(902002962, False, True, id="a request of the job's life before arrives late"),
        pytest.param(903007234, False, True, id="a joiner has carried out the step with which the job ends"),
        pytest.param(903019209, True, False, id="the result is copied over blocks of a stage that was left"),
        pytest.param(903005541, False, False, id="a member does not know that all compute a step once more"),
        pytest.param(903004074, True, False, id="one loop is left twice, after different steps"),
        pytest.param(7026, True, False, id="a joiner has not heard that all went back behind what it has"),
    ],
)
def test_what_fresh_seeds_have_found_stays_mended(seed: int, split: bool, leased: bool) -> None:
    outcome = simulate(seed, split=split, leased=leased)
    assert outcome.ok, outcome
