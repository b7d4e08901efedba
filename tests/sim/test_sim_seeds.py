"""Hundreds of seeds: safety under faults, then liveness once they stop. A failing seed is replayed by its number."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from everstep.cli.main import run_command
from everstep.sim.faults import PHASES
from everstep.sim.scenario import set_up, simulate

CHUNK = 30


@pytest.mark.parametrize("start", range(0, 300, CHUNK))
def test_every_promise_holds(start):
    failed = [str(outcome) for outcome in map(simulate, range(start, start + CHUNK)) if not outcome.ok]
    assert not failed, "\n".join(failed) + "\nreplay: everstep sim --seed N --trace"


def test_the_seeds_meet_what_they_are_meant_to_meet():
    """Not a few quiet runs: generations change, workers heal, coordinators restart, and training goes on."""
    seen: dict[str, int] = {}
    kinds: set[str] = set()
    phases: set[str] = set()
    generations = 0
    for seed in range(80):
        outcome = simulate(seed)
        generations += outcome.generations
        for kind, count in outcome.reports.items():
            seen[kind] = seen.get(kind, 0) + count
        kinds |= {f.kind for f in outcome.setup.faults}
        phases |= {f.phase for f in outcome.setup.faults}
    assert generations > 120
    for kind in ("worker_evicted", "worker_healed", "recovery_completed", "leader_changed", "job_completed", "waiting"):
        assert seen.get(kind, 0) > 0, seen
    assert len(kinds) >= 12 and phases >= set(PHASES)


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
