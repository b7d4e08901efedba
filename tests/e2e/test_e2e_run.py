"""A job from the command line: run, status, verify, ledger, eval; and running again in its directory."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import socket
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e_cli import COMMAND, TASK_FILE, Running, digest_of, events_of, everstep, one_error, together

from everstep.base.cause import Cause
from everstep.base.errors import ProtocolError
from everstep.observe.events import KINDS
from everstep.runtime.lead.journal import Journal, begin_term, term_in_file
from everstep.runtime.link import wire
from everstep.runtime.link.address import JOURNAL_FILE
from everstep.runtime.targets import TARGETS_FILE

CHAOS = (
    "kill:target=worker:2,at=3,phase=backward; kill:target=leader:0,at=5,phase=agree; kill:target=coordinator,at=7; "
    "raise:target=worker:1,at=9"
)


OTHER = "mlp-digits"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, small_task: str) -> tuple[Path, Path, list[dict[str, Any]]]:
    """An undisturbed run, one with faults and a spare, and what the latter printed."""
    base = tmp_path_factory.mktemp("jobs")
    calm, harsh = base / "undisturbed", base / "disturbed"
    options = (
        "--workers",
        "3",
        "--spares",
        "1",
        "--chaos",
        CHAOS,
        "--json",
        "--set",
        "sinks=[tensorboard]",
        "--set",
        "metrics.interval_s=0.1",
    )
    variables = {"E2E_LANE_S": "0.5", "E2E_EVENTS": str(harsh / "events.jsonl")}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(everstep, "run", small_task, "--run-dir", calm)
        second = everstep("run", small_task, "--run-dir", harsh, *options, **variables)
        assert first.result().returncode == 0, first.result().stderr
    assert second.returncode == 0, second.stderr
    return calm, harsh, [json.loads(line) for line in second.stdout.splitlines()]


@pytest.fixture(scope="module")
def undisturbed(both: tuple[Path, Path, list[dict[str, Any]]]) -> Path:
    return both[0]


@pytest.fixture(scope="module")
def disturbed(both: tuple[Path, Path, list[dict[str, Any]]]) -> tuple[Path, list[dict[str, Any]]]:
    return both[1], both[2]


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
    logs = [path.read_text() for path in (run_dir / "logs").glob("worker-*.jsonl")]
    assert any("leaving: the job is over" in log for log in logs), "the spare left in order"


def test_events_have_the_fields_of_the_interface(disturbed: Disturbed) -> None:
    events = events_of(disturbed[0])
    common = {"time_unix_ns", "kind", "generation", "step", "worker_id", "incarnation", "pid", "cause", "reason"}
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
    assert set(kinds) <= KINDS
    for event in events:
        if event["kind"] == "recovery_completed":
            phases = event["phases_s"]
            assert [*phases] == ["notice", "decide", "unblock", "regroup", "settle", "redo", "heal"]
            assert phases["redo"] > 0 and all(duration >= 0 for duration in phases.values())
            assert max(phases.values()) <= event["duration_s"]
    killed = [e for e in events if e["kind"] == "recovery_completed" and e["died_unix_ns"]]
    assert killed and all(e["phases_s"]["notice"] > 0 for e in killed), "from the death, not from hearing of it"


def test_every_reason_has_its_cause(disturbed: Disturbed) -> None:
    events = events_of(disturbed[0])
    assert not [e for e in events if e["reason"] and e["cause"] not in set(Cause) - {Cause.UNKNOWN}]
    causes = {kind: {e["cause"] for e in events if e["kind"] == kind} for kind in KINDS}
    assert causes["worker_evicted"] == {"killed", "exception"}
    assert causes["recovery_completed"] <= {"killed", "exception"}
    assert causes["generation_started"] <= {"started", "killed", "exception", "joined"}
    assert (causes["coordinator_restarted"], causes["fault_injected"]) == ({"killed"}, {"injected"})
    assert (causes["job_started"], causes["job_completed"]) == ({"started"}, {"completed"})


def test_tensorboard_was_told_everything(disturbed: Disturbed) -> None:
    """By the process beside the job, which has ended with it."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = disturbed[0] / "tensorboard"
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    events = events_of(disturbed[0])
    committed = {e["step"]: e for e in events if e["kind"] == "step_committed"}
    points = found.Scalars("train/loss")
    assert [p.step for p in points] == list(range(1, 13))
    assert all(p.value == pytest.approx(committed[p.step]["loss"], rel=1e-6) for p in points)
    kinds = {e["kind"] for e in events} - {"step_committed", "evaluated"}
    assert {tag for tag in found.Tags()["tensors"] if tag.startswith("events/")} == {f"events/{kind}" for kind in kinds}
    assert any(tag.startswith("time/") for tag in found.Tags()["scalars"])
    assert "nothing new" in everstep("publish", disturbed[0], "--to", "tensorboard").stdout


def test_every_sample_counted_once(undisturbed: Path, disturbed: Disturbed) -> None:
    for run_dir in (undisturbed, disturbed[0]):
        done = everstep("ledger", run_dir, "--json")
        assert done.returncode == 0, done.stdout
        report = json.loads(done.stdout)
        assert (report["clean"], report["steps"], report["problems"]) == (True, 12, [])


def test_status_of_a_finished_job(disturbed: Disturbed) -> None:
    done = everstep("status", disturbed[0], "--json")
    status = json.loads(done.stdout)
    assert (done.returncode, status["state"], status["step"]) == (0, "completed", 12)
    assert status["steps_total"] == 12
    assert [w["role"] for w in status["workers"] if w["stage"] == 0].count("leader") == 1


@pytest.mark.longer
def test_a_finished_job_says_so_and_belongs_to_its_job(undisturbed: Path, tmp_path: Path, small_task: str) -> None:
    task = ["run", small_task]
    cases = (task, [*task, "--json"], [*task, "--set", "seed=5"], [*task, "--steps", "99"], ["run", OTHER])
    dirs = [shutil.copytree(undisturbed, tmp_path / str(i)) for i in range(len(cases))]
    runs = [[*argv, "--run-dir", str(where)] for argv, where in zip(cases, dirs, strict=True)]
    plain, as_json, seed, more, other = together(*runs)
    assert plain.returncode == 0 and "has finished" in plain.stdout
    assert as_json.returncode == 0 and json.loads(as_json.stdout)["state"] == "completed"
    assert (seed.returncode, "seed is 0 there, 5 here" in one_error(seed)) == (2, True)
    assert (more.returncode, "finished with steps=12" in one_error(more)) == (2, True)
    assert (other.returncode, "task is" in one_error(other)) == (2, True)
    assert all(events_of(where) == events_of(undisturbed) for where in dirs)


@pytest.mark.longer
def test_fresh_with_a_simulated_failure(tmp_path: Path, small_task: str, undisturbed: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    done = everstep("run", small_task, "--run-dir", run_dir, "--fresh", "--workers", "2", "--simulate-failure")
    assert done.returncode == 0, done.stderr
    assert [e["fault"] for e in events_of(run_dir) if e["kind"] == "fault_injected"] == ["kill"]
    assert "\x1b" not in done.stdout and "step 12/12" in done.stdout
    assert everstep("verify", run_dir, run_dir / "previous-1").returncode == 0


@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_after_a_takeover_by_hand_leads_with_a_higher_term(tmp_path: Path, small_task: str, fresh: bool) -> None:
    """Agents that have heard the takeover listen to no lower one. It goes on from nothing that is in the journal."""
    journal = tmp_path / "run" / JOURNAL_FILE
    journal.parent.mkdir()
    assert [begin_term(journal) for _ in range(2)] == [1, 2]
    argv = ["run", small_task, "--workers", "1", "--run-dir", journal.parent, *["--fresh"] * fresh]
    done = everstep(*argv, "--chaos", "kill:target=coordinator,at=4")
    assert done.returncode == 0, done.stderr
    assert term_in_file(journal) == 3 and Journal(journal).entries[0] == {"kind": "term", "term": 3}
    kinds = [event["kind"] for event in events_of(journal.parent)]
    assert (
        kinds.count("coordinator_restarted") == 1
        and "coordinator_restarted" not in kinds[: kinds.index("fault_injected")]
    )


@pytest.mark.longer
def test_eval_and_dry_run(undisturbed: Path, run_dir: Path, small_task: str) -> None:
    weights = undisturbed / "final" / "model.safetensors"
    dry = ["run", small_task, "--workers", "2", "--run-dir", str(run_dir), "--dry-run"]
    done = together(["eval", small_task, "--from", undisturbed, "--json"], ["eval", small_task, "--from", weights], dry)
    assert [d.returncode for d in done] == [0, 0, 0], [d.stderr for d in done]
    told = json.loads(done[0].stdout)
    assert told["samples"] == 50 and told["metrics"]["loss"] > 0
    assert f"{told['metrics']['loss']:.4f}" in done[1].stdout
    assert "0:0-1  1:2-3" in done[2].stdout and "stage" in done[2].stdout
    assert not run_dir.exists()


def test_a_live_job_as_others_see_it(run_dir: Path, small_task: str, undisturbed: Path) -> None:
    """Status, a second run in its directory, strangers at its port, scale, drain."""
    hold = run_dir.with_name("hold")
    hold.touch()
    pace = {"E2E_LANE_S": "0.5", "E2E_HOLD": str(hold)}  # 60 steps take far longer than the commands
    with Running(small_task, "--workers", "2", "--run-dir", run_dir, "--steps", "60", "--metrics", **pace) as job:
        job.wait_for_step(1)
        assert {"everstep_running 1.0", "everstep_wanted_workers 2.0"} <= metrics_of(run_dir)
        live = json.loads(everstep("status", run_dir, "--json").stdout)
        assert live["state"] in ("running", "recovering")
        assert [w["worker_id"] for w in live["workers"]] == [0, 1]
        assert [w["role"] for w in live["workers"]] == ["leader", "active"]
        assert sorted(lane for w in live["workers"] for lane in w["lanes"]) == [0, 1, 2, 3]
        fields = {"worker_id", "incarnation", "pid", "host", "stage", "role", "step", "lanes", "samples_per_s"}
        assert all(fields <= w.keys() for w in live["workers"])
        assert live["coordinator"]["pid"] > 1
        strangers(run_dir)
        assert everstep("scale", run_dir, "--workers", "3").returncode == 0
        job.wait_for(lambda e: e["kind"] == "generation_started" and len(e["workers"]) == 3)
        nobody = everstep("drain", run_dir, "7")
        assert (nobody.returncode, "the workers are 0, 1, 2" in one_error(nobody)) == (2, True)
        assert everstep("drain", run_dir, "1").returncode == 0
        job.wait_for(lambda e: e["kind"] == "generation_started" and e["workers"] == [0, 2])
        again = everstep("run", small_task, "--run-dir", run_dir, "--steps", "60")
        assert (again.returncode, "still running" in one_error(again)) == (2, True)
        hold.unlink()
        code, events, errors = job.end()
    assert code == 0, errors
    assert not (run_dir / "metrics.json").exists() and targets(run_dir) == []
    assert digest_of(run_dir)["step"] == 60
    warnings = [str(e["reason"]) for e in events if e["kind"] == "warning"]
    assert any("refused a connection" in reason for reason in warnings)
    assert (events[-1]["faults_survived"], events[-1]["steps_lost"]) == (0, 0)


def metrics_of(run_dir: Path) -> set[str]:
    """What a scraper that finds the job by its directory is told."""
    (found,) = json.loads((run_dir / "metrics.json").read_text())
    assert found["labels"] == {"run": run_dir.name}
    token = (run_dir / "metrics-token").read_text()
    scrape = urllib.request.Request(
        f"http://{found['targets'][0]}/metrics", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(scrape, timeout=60) as answer:
        return set(answer.read().decode().splitlines())


def targets(run_dir: Path) -> list[str]:
    """The runs of the folder that Prometheus scrapes."""
    return [one["labels"]["run"] for one in json.loads((run_dir.parent / TARGETS_FILE).read_text())]


def test_a_job_that_has_failed_stays_a_target_until_it_goes_on(run_dir: Path, tmp_path: Path) -> None:
    """So that an alert tells of it."""
    file = tmp_path / "raises.py"
    raises = 'class Raises(Small):\n    def build_optimizer(self, params):\n        raise ValueError("no")\n'
    file.write_text(f"{TASK_FILE}\n\n{raises}")
    argv = ("run", f"{file}:Raises", "--workers", "1", "--run-dir", run_dir, "--steps", "1", "--set", "max_restarts=0")
    assert everstep(*argv, "--metrics").returncode == 1
    assert targets(run_dir) == [run_dir.name]
    file.write_text(f"{TASK_FILE}\n\nclass Raises(Small):\n    pass\n")
    done = everstep(*argv)
    assert (done.returncode, targets(run_dir)) == (0, []), done.stderr


def strangers(run_dir: Path) -> None:
    """Garbage bytes and a wrong token at the coordinator's port are turned away."""
    port = json.loads((run_dir / "coordinator.json").read_text())["port"]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as garbage:
        garbage.sendall(os.urandom(4096))
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        stranger.settimeout(30)
        with pytest.raises(ProtocolError, match="token"):
            wire.handshake_client(stranger, b"\x00" * 32, "read", "stranger")


def test_a_terminal_shows_it_live(run_dir: Path, small_task: str) -> None:
    """A task with evaluation and early stop, looked at on a terminal."""
    settings = ("--set", "eval_every=2", "--set", "early_stop.metric=loss", "--set", "early_stop.mode=min")
    target = ("--set", "early_stop.target=1000", "--run-dir", str(run_dir))
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*COMMAND, "run", small_task, *settings, *target], {**os.environ, "TERM": "xterm"})
    shown = b""
    with contextlib.suppress(OSError):  # how the end of a terminal is told
        while data := os.read(terminal, 1 << 16):
            shown += data
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    for words in ("step 2/12", "generation 1", "leader", "0,1,2,3", "evaluated after step 2", "test loss", "completed"):
        assert words in text
    assert digest_of(run_dir)["step"] == 2
    assert any("has reached the target" in str(e["reason"]) for e in events_of(run_dir))
