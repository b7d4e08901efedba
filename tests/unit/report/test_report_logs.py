"""`everstep logs` and `everstep top`: lines of all sources by time, filtered; a picture of a run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from everstep.cli.main import run_command
from everstep.observe.events import format_event
from everstep.report.logfiles import LogFiles

NOW = time.mktime((2026, 3, 4, 0, 10, 0, 0, 0, -1))  # ten past midnight


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "worker-2.log").write_text(
        "23:59:58.000 worker 2.0 gen 1 step 4 INFO everstep: before midnight\n"
        "00:00:01.500 worker 2.0 gen 1 step 5 ERROR everstep: it broke\n"
        "Traceback (most recent call last):\n"
        "  \x1b[31mred\n"
        "00:00:02.000 worker 2.0 gen 1 step 5 INFO everstep: torn"
    )
    said = {"timestamp": "2026-03-04T00:00:03.000", "level": "WARNING", "message": "from JSON", "worker": "1.0"}
    (logs / "worker-1.log").write_text(json.dumps(said) + "\nprinted by the user\n")
    (logs / "coordinator.log").write_text("no time at all\n")
    for path in logs.iterdir():
        os.utime(path, (NOW, NOW))
    at_ns = int((NOW - 599) * 1e9)
    evicted = format_event("worker_evicted", at_ns + 10**9, {"worker_id": 2, "reason": "killed\nby"})
    (tmp_path / "events.jsonl").write_bytes(format_event("step_committed", at_ns, {"step": 1}) + evicted)
    return tmp_path


def test_all_sources_by_time(run_dir: Path) -> None:
    files = LogFiles(run_dir)
    lines = files.read()
    assert [line.text for line in lines[:2]] == ["everstep: before midnight", "everstep: it broke"]
    assert lines[1].time_s - lines[0].time_s == pytest.approx(3.5)
    assert {line.source for line in lines} == {"worker 1", "worker 2", "coordinator", "event"}
    assert next(line for line in lines if "red" in line.text).level == "error"
    assert all("\x1b" not in str(line) and "\n" not in str(line) for line in lines)
    assert not any("torn" in line.text for line in lines)
    with open(run_dir / "logs" / "worker-2.log", "a") as file:
        file.write(" no more\n")
    assert [line.text for line in files.read()] == ["everstep: torn no more"]


def test_filters(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*options: str) -> str:
        assert run_command(["logs", str(run_dir), *options]) == 0
        return capsys.readouterr().out

    assert "before midnight" in shown("--worker", "2") and "from JSON" not in shown("--worker", "2")
    assert shown("--worker", "1", "--level", "warning").splitlines()[0].endswith("warning from JSON")
    assert "step 1" in shown("--steps") and "step 1" not in shown()
    assert len(shown("-n", "2").splitlines()) == 2
    assert len(shown("--follow").splitlines()) == len(shown().splitlines())  # no job runs: it ends by itself
    assert run_command(["logs", str(run_dir / "nowhere")]) == 2


def test_top_is_a_picture_in_a_pipe(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["top", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "interrupted" in out and "dead" in out and "worker 2 was evicted" in out
    assert run_command(["top", str(run_dir / "nowhere")]) == 2
