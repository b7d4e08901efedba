"""Jobs that go on from checkpoints of format 1, in two topologies, to the same bits.

Those with which the jobs that wrote them ended are of another machine's kernels: bfloat16 gives others where the
processor has instructions for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from format1_checkpoints import KEPT, TASKS, unpack
from job_harness import Jobs


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        pytest.param("unsplit", (1, 1), (2, 2), marks=pytest.mark.longer),
        ("stages", (2, 2), (1, 1)),
        pytest.param("deltas", (1, 1), (3, 1), marks=pytest.mark.longer),
    ],
)
def test_they_go_on_to_the_same_end(
    jobs: Jobs, tmp_path: Path, name: str, one: tuple[int, int], other: tuple[int, int]
) -> None:
    """one, other: workers and stages."""
    source = unpack(name, tmp_path / "kept")
    assert ended(jobs, name, source, tmp_path / "one", *one) == ended(jobs, name, source, tmp_path / "other", *other)


def ended(jobs: Jobs, name: str, source: Path, run_dir: Path, workers: int, stages: int) -> Any:
    """The digests of the end."""
    settings = [f"stages={stages}", "checkpoint.allow_mismatch=true", "checkpoint.disk.every_steps=1"]
    argv = ["run", f"{TASKS}:{KEPT[name]['task']}", "--run-dir", str(run_dir), "--workers", str(workers), "--json"]
    argv += ["--resume-from", str(source), *(word for text in settings for word in ("--set", text))]
    job = jobs.command(argv, run_dir)
    assert job.end() == 0, job.account()
    told = [event["step"] for event in job.of_kind("step_committed")]
    assert told == [3, 4, 5, 6], "a checkpoint's own step is told with its records"
    found = json.loads((run_dir / "final" / "digest.json").read_text())
    return {key: found[key] for key in KEPT[name]["final"]}
