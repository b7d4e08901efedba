"""`everstep logs` and `everstep top`: lines of all sources by time, filtered; a picture of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from everstep.cli.main import run_command
from everstep.observe.events import format_event
from everstep.observe.logs import WorkerLog
from everstep.report.logfiles import LogFiles
from told_events import trained, write_events

NOW_S = 1_772_600_000


def record(worker_id: int, second: float, level: str, message: str, source: str = "log", **more: str) -> bytes:
    context = WorkerLog(worker_id, 0)
    context.step, context.generation = int(second), 1
    return context.line(level, "everstep", message, source, time_ns=int((NOW_S + second) * 1e9), **more)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "worker-2.1.jsonl").write_bytes(record(2, 1, "info", "rotated"))
    os.utime(logs / "worker-2.1.jsonl", (NOW_S, NOW_S))
    broken = record(2, 3, "error", "it broke", exception="Traceback\n  \x1b[31mred")
    (logs / "worker-2.jsonl").write_bytes(record(2, 2, "info", "begun") + b"no record\n" + broken + b'{"torn": ')
    (logs / "worker-12.jsonl").write_bytes(record(12, 2.5, "info", "printed \x1b[31mby the user", "stdout"))
    (logs / "output.log").write_text("printed by the user\n")
    (logs / "coordinator.log").write_text("no time at all\n")
    os.utime(logs / "coordinator.log", (NOW_S + 9, NOW_S + 9))
    evicted = format_event(
        "worker_evicted", int((NOW_S + 4.5) * 1e9), {"worker_id": 2, "step": 4, "reason": "killed\nby"}
    )
    step = format_event("step_committed", int((NOW_S + 4) * 1e9), {"step": 4})
    (tmp_path / "events.jsonl").write_bytes(step + evicted)
    (tmp_path / "job.json").write_text(json.dumps({"config": {"workers": 3, "spares": 1}}))
    return tmp_path


def test_files_of_other_names_are_no_logs_of_workers(run_dir: Path) -> None:
    (run_dir / "logs" / "worker-x.jsonl").write_bytes(record(3, 1, "info", "not of a worker"))
    assert LogFiles(run_dir).worker_ids == {2, 12} and len(list(LogFiles(run_dir).read())) == 6


def test_all_sources_by_time(run_dir: Path) -> None:
    files = LogFiles(run_dir)
    lines = list(files.read())
    assert [line.text for line in lines] == [
        "everstep: rotated",
        "everstep: begun",
        "printed \x1b[31mby the user",
        "everstep: it broke",
        "worker 2 was evicted: killed by",
        "no time at all",
    ]
    assert {line.source for line in lines} == {"worker 2", "worker 12", "coordinator", "event"}
    assert "red" in str(lines[3]) and str(lines[3]).count("\n") == 2
    assert all("\x1b" not in str(line) for line in lines)
    with open(run_dir / "logs" / "worker-2.jsonl", "ab") as file:
        file.write(b"1}\n" + record(2, 7, "info", "more"))
    (run_dir / "logs" / "worker-0.jsonl").write_bytes(record(0, 6, "info", "later"))
    assert [line.text for line in files.read()][-2:] == ["everstep: later", "everstep: more"]
    assert list(files.read()) == []


def test_filters(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*options: str) -> str:
        assert run_command(["logs", str(run_dir), *options]) == 0
        return capsys.readouterr().out

    assert "begun" in shown("--worker", "2") and "by the user" not in shown("--worker", "2")
    assert shown("--worker", "12", "--level", "warning") == ""
    assert shown("--worker", "3") == "", "it exists, and has said nothing"
    assert "step 4\n" in shown("--steps") and "step 4\n" not in shown()
    assert len(shown("-n", "2").splitlines()) == 2
    assert len(shown("--follow").splitlines()) == len(shown().splitlines())  # no job runs: it ends by itself
    since = shown("--since-step", "4")
    assert "evicted" in since and "no time at all" in since and "broke" not in since and "step 4," not in since
    assert shown("--grep", "red").count("\n") == 3
    records = [json.loads(line) for line in shown("--json").splitlines()]
    assert [r["message"] for r in records][3:5] == ["it broke", "worker 2 was evicted: killed by"]
    assert records[3]["exception"].endswith("red") and records[4]["kind"] == "worker_evicted"


def test_bad_input(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, word in ((["--worker", "9"], "0, 1, 2, 3, 12"), (["--level", "loud"], "loud"), (["-n", "-1"], "-1")):
        assert run_command(["logs", str(run_dir), *options]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and word in error, error
    assert run_command(["logs", str(run_dir / "nowhere")]) == 2


def test_top_is_a_picture_in_a_pipe(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["top", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "interrupted" in out and "dead" in out and "worker 2 was evicted" in out
    assert run_command(["top", str(run_dir / "nowhere")]) == 2


@pytest.mark.parametrize("command", ["top", "logs", "status"])
def test_a_folder_without_a_job_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([command, str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} is not a run directory: there is no job.json\n"


def test_top_shows_no_process_of_a_job_that_nobody_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    write_events(tmp_path, trained())
    (tmp_path / "job.json").write_text(json.dumps({"config": {"workers": 3}}))
    assert run_command(["top", str(tmp_path), "--once"]) == 0
    out = capsys.readouterr().out
    assert "last fault: the launcher of the job died without a word" in out
    assert [line.split()[-2:] for line in out.splitlines() if " ended " in line] == [["-", "a"]] * 4
