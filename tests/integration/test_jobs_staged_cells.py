"""Jobs of stages whose workers are cells: the bits of one worker of one process, in any shape, through kills of any
rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from job_harness import Jobs, healed
from sampling import mostly_longer

RAISES = """
import inspect
from job_tasks import Text

class Raises(Text):
    def lane_loss(self, model, batch):
        stack = inspect.stack()
        if self.config.stages > 1 and any(frame.filename.endswith("limb_passes.py") for frame in stack):
            raise ValueError("a limb cannot read this")
        return super().lane_loss(model, batch)
"""


def cells(ranks: int, **more: Any) -> dict[str, Any]:
    """Settings of a job of two stages with so many processes in each worker."""
    return {"stages": 2, "cell.fsdp": ranks, **more}


@pytest.mark.longer
@pytest.mark.parametrize(
    ("task", "ranks", "workers", "settings"),
    [
        ("Text", 2, 4, {}),
        ("Pictures", 3, 1, {"recompute": True}),
        ("Pictures", 2, 3, {"schedule": "gpipe", "verify_every": 2}),
        ("Layers", 2, 5, {"stages": 4, "verify_every": 3}),
        ("SparseStages", 3, 4, {"cell.wrap": 30, "verify_every": 4}),
        ("PicturesEpochs", 2, 4, {"eval_every": 5}),
        ("Text", 2, 4, {"redundancy": 1, "transport": "sockets"}),
    ],
)
def test_any_number_of_ranks(jobs: Jobs, task: str, ranks: int, workers: int, settings: dict[str, Any]) -> None:
    numerics = {} if task == "PicturesEpochs" else {"steps": 8}
    job = jobs.run(task, workers=workers, settings=cells(ranks, **settings), numerics=numerics)
    assert all(len(event["pids"]) == ranks for event in job.of_kind("worker_joined")), job.account()


@pytest.mark.longer
@pytest.mark.parametrize(
    ("settings", "workers"),
    mostly_longer(
        [
            ({"cell.tp": 2, "cell.fsdp": 1}, 4),
            ({"cell.tp": 2, "verify_every": 2}, 4),
            ({"cell.tp": 4, "cell.fsdp": 1, "recompute": True}, 1),
            ({"cell.tp": 1, "cell.fsdp": 1}, 3),
        ],
        lambda case: "verify_every" in case[0],
    ),
)
def test_virtual_shards_at_any_degree(jobs: Jobs, settings: dict[str, Any], workers: int) -> None:
    jobs.run("Sharded", workers=workers, numerics={"cell.shards": 4}, settings=cells(2, **settings))


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.longer)])
def test_parts_of_the_sequence_are_whole_between_stages(jobs: Jobs, stages: int) -> None:
    """Three stages: each border lies where the sequence is cut, or the whole of it in one stage."""
    settings = {"cell.tp": 2, "stages": stages, "verify_every": 4, "eval_every": 6}
    jobs.run("Sharded", workers=stages, numerics={"cell.shards": 4, "cell.sp": True}, settings=settings)


@pytest.mark.parametrize(
    "phase", mostly_longer(["forward", "backward", "reduce", "agree", "update"], lambda phase: phase == "backward")
)
def test_any_rank_of_any_stage_is_killed_and_its_cell_comes_back(jobs: Jobs, phase: str) -> None:
    """A limb of the first stage, a head of the second one, a limb of another cell."""
    victims = "worker:0/1", "worker:2", "worker:3/1"
    chaos = "; ".join(f"kill:target={who},at={4 * k + 3},phase={phase}" for k, who in enumerate(victims))
    pace = [healed(0), healed(2), healed(3)]
    job = jobs.run("Text", workers=4, settings=cells(2, **{"cell.wrap": 300}), chaos=chaos, pace=pace)
    assert len(job.of_kind("fault_injected")) == 3, job.account()
    reasons = [event["reason"] for event in job.of_kind("worker_evicted")]
    assert sum("its rank 1 was killed by SIGKILL" in reason for reason in reasons) == 2, job.account()


@pytest.mark.longer
@pytest.mark.parametrize(
    ("task", "numerics", "whole"),
    [("Text", {}, {"cell.fsdp": 2}), ("Sharded", {"cell.shards": 4}, {"cell.tp": 2})],
)
def test_it_is_resumed_in_other_shapes(jobs: Jobs, task: str, numerics: dict[str, Any], whole: dict[str, Any]) -> None:
    plain = {"stages": 1, "cell.fsdp": 1, "cell.tp": 1}
    run_dir = None
    for step, settings, workers in (
        (2, {**plain, "stages": 2, **whole}, 4),
        (4, plain, 1),
        (6, {**plain, "stages": 2}, 2),
        (8, {**plain, **whole}, 1),
        (0, {**plain, "stages": 2, **whole}, 4),
    ):
        pace = [{"kind": "step_committed", "step": step}] if step else []
        shape = {**numerics, "steps": 10}
        job = jobs.start(task, workers=workers, numerics=shape, settings=settings, run_dir=run_dir, pace=pace)
        if step:
            job.wait_for("step_committed", step=step)
            os.kill(job.launcher_pid(), signal.SIGTERM)
            assert job.end() == 143, job.account()
        run_dir = job.run_dir
    jobs.check(job, task, {**numerics, "steps": 10})


@pytest.mark.longer
def test_a_stage_that_is_lost_goes_back_to_a_snapshot(jobs: Jobs) -> None:
    chaos = "kill:target=worker:1/1,at=6,phase=backward; kill:target=worker:0,at=9,phase=update"
    settings = cells(2, **{"checkpoint.disk.every_steps": 2})
    job = jobs.run("Layers", workers=2, numerics={"steps": 12}, settings=settings, chaos=chaos)
    assert len(job.of_kind("worker_evicted")) >= 2, job.account()


@pytest.mark.longer
def test_what_a_limb_raises_ends_the_job_by_its_words(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(RAISES)
    job = jobs.start(f"{tmp_path / 'task.py'}:Raises", workers=4, settings=cells(2))
    assert job.end() == 1, job.account()
    errors = job.run_dir.with_suffix(".err").read_text()
    assert "a limb cannot read this" in errors and "Traceback" not in errors, errors
