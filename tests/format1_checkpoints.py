"""Checkpoints of format 1 that are kept in `tests/format1`: written by jobs of the version that wrote this format.

`unsplit`: Adam, by two workers. `stages`: SGD with momentum, by two stages. `deltas`: the same unsplit, three steps
that continue each other. `digests.json`: what that version said of them, what it exported, and how the jobs ended.
"""

from __future__ import annotations

import importlib.util
import json
import tarfile
from pathlib import Path
from typing import Any

from everstep import Task

FOLDER = Path(__file__).parent / "format1"
TASKS = FOLDER / "format1_task.py"
KEPT: dict[str, Any] = json.loads((FOLDER / "digests.json").read_text())


def unpack(name: str, folder: Path) -> Path:
    """Lays the checkpoints into a folder; returns it."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def task_of(name: str) -> Task:
    """What they are of."""
    spec = importlib.util.spec_from_file_location("format1_task", TASKS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    task: Task = getattr(module, KEPT[name]["task"])()
    return task
