"""The log around a moment: what lies about it, wherever in a long file that is."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from everstep.observe.events import format_event
from everstep.observe.logs import WorkerLog
from everstep.report.excerpt import around, newest

T0 = 1_700_000_000 * 10**9
SECOND = 10**9


def make(run_dir: Path, steps: int, workers: int = 2) -> None:
    """A step each second, a warning every tenth, and a line of each worker with every step."""
    (run_dir / "logs").mkdir(parents=True)
    with open(run_dir / "events.jsonl", "wb") as file:
        for step in range(steps):
            file.write(format_event("step_committed", T0 + step * SECOND, {"step": step, "loss": 1.0}))
            if step % 10 == 0:
                fields = {"reason": f"at {step}", "cause": "unknown"}
                file.write(format_event("warning", T0 + step * SECOND + 1, fields))
    for i in range(workers):
        said = WorkerLog(i, 0)
        lines = [said.line("info", "mine", f"step {s} {'x' * 100}", time_ns=T0 + s * SECOND + 2) for s in range(steps)]
        (run_dir / "logs" / f"worker-{i}.jsonl").write_bytes(b"".join(lines))


@pytest.mark.parametrize("at", [0, 1, 4_999, 5_000, 9_998, 9_999])
def test_the_lines_nearest_to_a_moment_are_found(tmp_path: Path, at: int) -> None:
    make(tmp_path, 10_000)
    found = around(tmp_path, T0 + at * SECOND)
    assert [line.time_ns for line in found] == sorted(line.time_ns for line in found)
    assert {line.source for line in found} == {"event", "worker 0", "worker 1"}
    assert any(line.time_ns == T0 + at * SECOND and line.fields.get("kind") == "step_committed" for line in found)
    assert all(abs(line.time_ns - T0 - at * SECOND) < 200 * SECOND for line in found)
    assert 40 < len(found) <= 160


def test_of_one_worker_there_are_its_lines_and_the_events(tmp_path: Path) -> None:
    make(tmp_path, 300)
    found = around(tmp_path, T0 + 150 * SECOND, worker_id=1)
    assert {line.source for line in found} == {"event", "worker 1"}


def test_a_rotated_file_counts_as_one(tmp_path: Path) -> None:
    make(tmp_path, 300, workers=12)
    path = tmp_path / "logs" / "worker-1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    (tmp_path / "logs" / "worker-1.1.jsonl").write_bytes(b"".join(lines[:100]))
    path.write_bytes(b"".join(lines[100:]))
    found = [line.step is not None and line.text for line in around(tmp_path, T0 + 99 * SECOND, 1, most=100)]
    assert any("step 98 " in str(text) for text in found) and any("step 101 " in str(text) for text in found)
    last = newest(tmp_path, 1, 5)
    assert [line.text.split()[2] for line in last] == ["295", "296", "297", "298", "299"]
    assert {line.worker_id for line in last} == {1}


def test_what_makes_no_sense_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    noise = random.Random(1).randbytes(300_000)
    (tmp_path / "logs" / "worker-0.jsonl").write_bytes(noise + b'\n{"time_unix_ns": "x"}\n' + json.dumps([1]).encode())
    (tmp_path / "logs" / "worker-x.jsonl").write_bytes(noise)
    assert all(line.worker_id == 0 for line in around(tmp_path, T0))
    assert newest(tmp_path, 7) == []
    assert around(tmp_path / "none", T0) == []
