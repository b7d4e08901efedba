"""Jobs that go on from checkpoints of format 1, in another topology, to the bits that they would have ended with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from format1_checkpoints import KEPT, TASKS, unpack
from job_harness import Jobs


@pytest.mark.parametrize(("name", "workers", "stages"), [("unsplit", 2, 2), ("stages", 1, 1), ("deltas", 3, 1)])
def test_they_go_on_to_the_same_end(jobs: Jobs, tmp_path: Path, name: str, workers: int, stages: int) -> None:
    kept, source, run_dir = KEPT[name], unpack(name, tmp_path / "kept"), tmp_path / "run"
    settings = [f"stages={stages}", "checkpoint.allow_mismatch=true", "checkpoint.disk.every_steps=1"]
    argv = ["run", f"{TASKS}:{kept['task']}", "--run-dir", str(run_dir), "--workers", str(workers), "--json"]
    argv += ["--resume-from", str(source), *(word for text in settings for word in ("--set", text))]
    job = jobs.command(argv, run_dir)
    assert job.end() == 0, job.account()
    told = [event["step"] for event in job.of_kind("step_committed")]
    assert told == [3, 4, 5, 6], "a checkpoint's own step is told with its records"
    found = json.loads((run_dir / "final" / "digest.json").read_text())
    assert {key: found[key] for key in kept["final"]} == kept["final"], job.account()
