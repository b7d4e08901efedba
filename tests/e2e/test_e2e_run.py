"""A job from the command line: run, status, verify, ledger, eval; and running again in its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e_cli import Running, digest_of, events_of, everstep, one_error

CHAOS = (
    "kill:target=worker:2,at=3,phase=backward; kill:target=leader:0,at=5,phase=agree; kill:target=coordinator,at=7; "
    "raise:target=worker:1,at=9"
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, small_task: str) -> Path:
    run_dir = tmp_path_factory.mktemp("jobs") / "undisturbed"
    done = everstep("run", small_task, "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory, small_task: str) -> tuple[Path, list[dict[str, Any]]]:
    """Three workers are lost: of four one is left, even if nobody has healed by then."""
    run_dir = tmp_path_factory.mktemp("jobs") / "disturbed"
    done = everstep("run", small_task, "--workers", "4", "--run-dir", run_dir, "--chaos", CHAOS, "--json")
    assert done.returncode == 0, done.stderr
    return run_dir, [json.loads(line) for line in done.stdout.splitlines()]


Disturbed = tuple[Path, list[dict[str, Any]]]


def test_faults_do_not_change_a_bit(undisturbed: Path, disturbed: Disturbed) -> None:
    done = everstep("verify", undisturbed, disturbed[0])
    assert (done.returncode, "bitwise equal" in done.stdout) == (0, True), done.stdout + done.stderr
    assert digest_of(undisturbed) == digest_of(disturbed[0])


def test_json_is_the_events_and_last_a_summary(disturbed: Disturbed) -> None:
    run_dir, printed = disturbed
    events = events_of(run_dir)
    assert printed[:-1] == events
    last = printed[-1]
    assert (last["kind"], last["state"], last["exit_code"], last["steps"]) == ("summary", "completed", 0, 12)
    assert (last["faults_survived"], last["steps_lost"]) == (4, 0)
    assert last["digest"] == digest_of(run_dir)
    assert last["recoveries"] >= 3
    assert 0 < last["recovery_s"]["median"] <= last["recovery_s"]["max"]


def test_events_have_the_fields_of_the_interface(disturbed: Disturbed) -> None:
    events = events_of(disturbed[0])
    common = {"time_unix_ns", "kind", "generation", "step", "worker_id", "incarnation", "pid", "reason"}
    assert all(common <= event.keys() for event in events)
    kinds = [event["kind"] for event in events]
    assert (kinds[0], kinds[-1]) == ("job_started", "job_completed")
    committed = [event["step"] for event in events if event["kind"] == "step_committed"]
    assert committed == list(range(1, 13)), "each step is committed once, in order"
    injected = [(e["fault"], e["target"], e["step"], e["phase"]) for e in events if e["kind"] == "fault_injected"]
    assert injected[:2] == [("kill", "worker:2", 3, "backward"), ("kill", "leader:0", 5, "agree")]
    assert sorted(fault for fault, *_ in injected) == ["kill", "kill", "kill", "raise"]
    assert {"worker_evicted", "generation_started", "recovery_completed", "leader_changed"} <= set(kinds)
    assert "coordinator_restarted" in kinds


def test_every_sample_counted_once(undisturbed: Path, disturbed: Disturbed) -> None:
    for run_dir in (undisturbed, disturbed[0]):
        done = everstep("ledger", run_dir, "--json")
        assert done.returncode == 0, done.stdout
        report = json.loads(done.stdout)
        assert (report["clean"], report["steps"], report["problems"]) == (True, 12, [])


def test_status_of_a_finished_job(disturbed: Disturbed) -> None:
    done = everstep("status", disturbed[0], "--json")
    status = json.loads(done.stdout)
    assert (done.returncode, status["state"], status["step"], status["workers"]) == (0, "completed", 12, [])


def test_a_finished_job_says_so(undisturbed: Path, small_task: str) -> None:
    before = events_of(undisturbed)
    done = everstep("run", small_task, "--run-dir", undisturbed)
    assert done.returncode == 0
    assert "has finished" in done.stdout
    done = everstep("run", small_task, "--run-dir", undisturbed, "--json")
    assert json.loads(done.stdout)["state"] == "completed"
    assert events_of(undisturbed) == before


def test_the_directory_of_another_job(undisturbed: Path, small_task: str) -> None:
    done = everstep("run", small_task, "--run-dir", undisturbed, "--set", "seed=5")
    assert done.returncode == 2
    assert "seed is 0 there, 5 here" in one_error(done)
    done = everstep("run", "mlp-digits", "--run-dir", undisturbed)
    assert done.returncode == 2
    assert "task is" in one_error(done)


def test_fresh_runs_anew_and_keeps_the_old(tmp_path: Path, small_task: str) -> None:
    run_dir = tmp_path / "run"
    for _ in range(2):
        done = everstep("run", small_task, "--run-dir", run_dir, "--steps", "2", "--fresh")
        assert done.returncode == 0, done.stderr
    assert everstep("verify", run_dir, run_dir / "previous-1").returncode == 0


def test_eval_reports_the_metrics_of_the_weights(undisturbed: Path, small_task: str) -> None:
    outputs = []
    for source in (undisturbed, undisturbed / "final" / "model.safetensors"):
        done = everstep("eval", small_task, "--from", source, "--json")
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout))
    assert outputs[0]["samples"] == 50
    assert outputs[0]["metrics"] == outputs[1]["metrics"]
    assert outputs[0]["metrics"]["loss"] > 0
    assert "loss" in everstep("eval", small_task, "--from", undisturbed).stdout


def test_dry_run_shows_the_placement_and_starts_nothing(run_dir: Path, small_task: str) -> None:
    done = everstep("run", small_task, "--workers", "2", "--run-dir", run_dir, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "0:0-1  1:2-3" in done.stdout
    assert not run_dir.exists()


def test_simulate_failure_kills_one_worker_once(run_dir: Path, small_task: str, undisturbed: Path) -> None:
    done = everstep("run", small_task, "--workers", "2", "--run-dir", run_dir, "--simulate-failure")
    assert done.returncode == 0, done.stderr
    assert [e["fault"] for e in events_of(run_dir) if e["kind"] == "fault_injected"] == ["kill"]
    assert everstep("verify", undisturbed, run_dir).returncode == 0
    assert "\x1b" not in done.stdout
    assert "step 12/12" in done.stdout


def test_scale_and_drain_while_it_runs(run_dir: Path, small_task: str, undisturbed: Path) -> None:
    slow = ("--set", "task.lane_s=0.25")
    with Running(small_task, "--workers", "2", "--run-dir", run_dir, *slow) as job:
        job.wait_for_step(1)
        live = json.loads(everstep("status", run_dir, "--json").stdout)
        assert live["state"] in ("running", "recovering")
        assert [w["worker_id"] for w in live["workers"]] == [0, 1]
        assert [w["role"] for w in live["workers"]] == ["leader", "active"]
        assert sorted(lane for w in live["workers"] for lane in w["lanes"]) == [0, 1, 2, 3]
        assert live["coordinator"]["pid"] > 1
        again = everstep("run", small_task, "--run-dir", run_dir, *slow)
        assert (again.returncode, "still running" in one_error(again)) == (2, True)
        assert everstep("scale", run_dir, "--workers", "3").returncode == 0
        job.wait_for(lambda e: e["kind"] == "generation_started" and len(e["workers"]) == 3)
        assert everstep("drain", run_dir, "1").returncode == 0
        job.wait_for(lambda e: e["kind"] == "generation_started" and e["workers"] == [0, 2])
        code, _, errors = job.end()
    assert code == 0, errors
    # the option only slows the lanes down, but it is the task's own, so the weights are what can be compared
    assert digest_of(run_dir)["model"] == digest_of(undisturbed)["model"]
