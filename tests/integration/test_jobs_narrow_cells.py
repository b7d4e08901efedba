"""Jobs with `cell.precision`: the bits of one process in any shape, through kills of any rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from job_harness import Jobs, healed
from sampling import mostly_longer

ALL = "parameters=bf16,reduction=bf16,buffers=bf16"
WRITES = """
import torch
from job_tasks import Text

class Writes(Text):
    def lane_loss(self, model, batch):
        loss = super().lane_loss(model, batch)
        with torch.no_grad():
            next(model.parameters()).clamp_(-1, 1)
        return loss
"""


@pytest.mark.parametrize(
    ("task", "precision", "workers", "settings", "more"),
    mostly_longer(
        [
            ("Pictures", ALL, 2, {"cell.fsdp": 2}, {}),
            ("Text", "bf16", 1, {"cell.fsdp": 4, "cell.wrap": 300}, {}),
            ("Text", ALL, 4, {"cell.fsdp": 2, "stages": 2}, {}),
            ("Layers", "fp16", 2, {"cell.fsdp": 2, "stages": 2, "recompute": True}, {}),
            ("Sparse", "reduction=fp16", 3, {"cell.fsdp": 2, "verify_every": 4}, {}),
            ("Sharded", "bf16", 2, {"cell.tp": 4}, {"cell.shards": 4, "cell.sp": True}),
            ("Sharded", ALL, 4, {"cell.tp": 2, "cell.fsdp": 2, "stages": 2}, {"cell.shards": 4}),
            ("Text", ALL, 3, {"transport": "sockets"}, {}),
            ("Text", "buffers=bf16", 2, {"zero.stage": 2}, {}),
        ],
        lambda case: case[0] == "Pictures",
    ),
)
def test_the_bits_are_those_of_one_process(
    jobs: Jobs, task: str, precision: str, workers: int, settings: dict[str, Any], more: dict[str, Any]
) -> None:
    """A head and a limb are killed on the way, where there are limbs."""
    numerics, last = {"cell.precision": precision, "steps": 12, **more}, workers - 1
    ranks = settings.get("cell.fsdp", 1) * settings.get("cell.tp", 1)
    limb = f"worker:{last}/{ranks - 1}" if ranks > 1 else f"worker:{last}"
    chaos = f"kill:target=worker:0,at=3,phase=backward; kill:target={limb},at=8,phase=reduce"
    pace = [healed(0), {"kind": "worker_healed", "count": 2}] if workers > 1 else []
    job = jobs.run(task, workers=workers, numerics=numerics, settings=settings, chaos=chaos, pace=pace)
    assert len(job.of_kind("fault_injected")) == 2, job.account()


@pytest.mark.longer
def test_it_is_resumed_in_other_shapes(jobs: Jobs) -> None:
    numerics, run_dir = {"cell.precision": ALL, "steps": 12}, None
    for step, workers, settings in (
        (3, 2, {"cell.fsdp": 2}),
        (6, 1, {"cell.fsdp": 1}),
        (9, 4, {"stages": 2}),
        (0, 1, {"stages": 1, "cell.fsdp": 4}),
    ):
        pace = [{"kind": "step_committed", "step": step}] if step else []
        job = jobs.start("Text", workers=workers, numerics=numerics, settings=settings, run_dir=run_dir, pace=pace)
        if step:
            job.wait_for("step_committed", step=step)
            os.kill(job.launcher_pid(), signal.SIGTERM)
            assert job.end() == 143, job.account()
        run_dir = job.run_dir
    jobs.check(job, "Text", numerics)


@pytest.mark.longer
def test_a_write_to_a_copy_is_refused_by_name(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text(WRITES)
    job = jobs.start(f"{tmp_path / 'writes.py'}:Writes", workers=1, settings={"cell.precision": "bf16"})
    assert job.end() == 2, job.account()
    errors = job.run_dir.with_suffix(".err").read_text()
    assert "was changed while a batch was computed" in errors and "Traceback" not in errors, errors
