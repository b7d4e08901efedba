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

import torch

from everstep import Task
from everstep.base.config import load_config
from everstep.train.replica import StageReplica
from everstep.train.stage import Parts, cut_out
from everstep.train.trainer import EarlyStop

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


def replicas(name: str, cut: tuple[tuple[int, int], ...]) -> dict[int, StageReplica]:
    """All stages of the job as it begins, cut like this."""
    task = task_of(name)
    config = load_config([("task", dict(task.defaults))])
    task.config = config

    def make() -> Parts:
        torch.manual_seed(5)
        model = task.build_model()
        optimizer = task.build_optimizer(list(model.parameters()))
        extras = {"everstep.early_stop": EarlyStop(config.early_stop)}
        return Parts(model, optimizer, task.build_scheduler(optimizer), task.units(model), extras)

    stages = len(cut)

    def replica(stage: int) -> StageReplica:
        parts, spec = (make(), None) if stages == 1 else cut_out(make(), cut, stages, stage)
        return StageReplica(parts, config, torch.device("cpu"), spec, task.loss)

    return {stage: replica(stage) for stage in range(stages)}
