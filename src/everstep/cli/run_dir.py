"""The run directory as `everstep run` finds it: new, stopped, finished, of another job; and how it is made ready."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.cli.job import JobFile, differences, read_job
from everstep.cli.task_loading import TaskSpec
from everstep.observe.events import last_committed_step
from everstep.runtime.address import EVENTS_FILE, JOB_FILE, LOCK_FILE
from everstep.runtime.private import close_folder, close_run_dir, close_store

RUNS = Path("runs")
_PREVIOUS = "previous-"
_TIME = "%Y%m%d-%H%M%S"


@dataclass(frozen=True)
class Found:
    """What is in a run directory. `step`: the last one committed there; `digest`: of a finished job; `job`: as it was
    started before."""

    state: Literal["new", "stopped", "finished"]
    step: int = 0
    digest: dict[str, Any] | None = None
    job: JobFile | None = None


def in_runs(prefix: str) -> Path:
    """runs/<prefix>-<time>, for what makes several runs; `RUNS`, where it is there, is closed to others."""
    with contextlib.suppress(OSError):
        close_folder(RUNS)
    return RUNS / f"{prefix}-{time.strftime(_TIME)}"


def default_run_dir(spec: TaskSpec) -> Path:
    """runs/<task>-<time>, one that does not exist yet."""
    base = RUNS / f"{spec.short}-{time.strftime(_TIME)}"
    path, count = base, 1
    while path.exists():
        count += 1
        path = base.with_name(f"{base.name}-{count}")
    return path


def close_to_others(run_dir: Path, config: Config) -> str:
    """Make private what jobs left in a (locked) directory and in their checkpoints elsewhere, and `RUNS` where the
    directory is in that. Returns a warning for the user if it cannot be done, else ""."""
    path = config.checkpoint.disk.path
    try:
        if run_dir.parent == RUNS:
            close_folder(RUNS)
        close_run_dir(run_dir)
        if path is not None and Path(path).is_dir():
            close_store(Path(path))
    except OSError as error:
        return f"warning: others can read {error.filename}: {error.strerror or error}"
    return ""


def read_digest(run_dir: Path) -> dict[str, Any] | None:
    """final/digest.json, None if the job has not finished.

    Raises: ConfigError if it is there but cannot be read.
    """
    path = run_dir / "final" / "digest.json"
    try:
        data = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(data, dict) or "model" not in data:
        raise ConfigError(f"cannot read {path}: expected step, model and state")
    return data


def inspect(run_dir: Path, job: JobFile) -> Found:
    """What a (locked) directory holds, for this job.

    Raises: ConfigError if it belongs to another job, saying what differs.
    """
    if not (run_dir / JOB_FILE).exists():
        return Found("new")
    before = read_job(run_dir, joined=False)
    different = differences(before, job)
    if different:
        raise ConfigError(
            f"{run_dir} belongs to another job: {'; '.join(different)}; choose another --run-dir, or --fresh to set "
            "the old one aside"
        )
    digest = read_digest(run_dir)
    if digest is not None:
        return Found("finished", int(digest.get("step", 0)), digest)
    return Found("stopped", last_committed_step(run_dir / EVENTS_FILE), job=before)


def set_aside(run_dir: Path) -> Path | None:
    """Move what a (locked) directory holds into previous-N/; returns where to, None if there was nothing."""
    content = [p for p in run_dir.iterdir() if p.name != LOCK_FILE and not p.name.startswith(_PREVIOUS)]
    if not content:
        return None
    number = 1
    while (target := run_dir / f"{_PREVIOUS}{number}").exists():
        number += 1
    try:
        target.mkdir()
        for path in content:
            os.rename(path, target / path.name)
    except OSError as error:
        raise ConfigError(f"cannot move the old contents of {run_dir} to {target}: {error.strerror or error}") from None
    return target
