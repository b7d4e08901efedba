"""Undisturbed split jobs: stages, schedules, pools, backups, transports and recomputation change no bit."""

from __future__ import annotations

from typing import Any

import pytest

from job_harness import Jobs
from sampling import mostly_longer

STEPS = {"steps": 10}

# Pairwise over: schedule, workers per stage (or fewer workers than stages), active or standby, transport, recompute.
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("Text", 3, {"schedule": "gpipe"}),
    ("Text", 6, {"schedule": "gpipe", "redundancy": 1, "transport": "sockets"}),
    ("Pictures", 3, {"schedule": "1f1b", "transport": "sockets", "recompute": True}),
    ("Pictures", 9, {"schedule": "1f1b", "redundancy": 2}),
    ("Pictures", 7, {"schedule": "gpipe", "recompute": True}),
    ("PicturesEpochs", 2, {"schedule": "1f1b", "eval_every": 5}),
    ("Text", 1, {"schedule": "gpipe", "recompute": True}),
]


@pytest.mark.longer
@pytest.mark.parametrize(("task", "workers", "settings"), mostly_longer(CASES, lambda case: case[1] == 6))
def test_three_stages(jobs: Jobs, task: str, workers: int, settings: dict[str, Any]) -> None:
    numerics = {} if task == "PicturesEpochs" else STEPS
    jobs.run(task, workers=workers, settings={"stages": 3, **settings}, numerics=numerics)


@pytest.mark.parametrize(
    ("workers", "schedule", "transport"),
    [
        pytest.param(2, "interleaved", "sockets", marks=pytest.mark.longer),
        pytest.param(4, "interleaved", "shm", marks=pytest.mark.longer),
        (3, "looped_bfs", "shm"),
    ],
)
def test_several_chunks_per_stage(jobs: Jobs, workers: int, schedule: str, transport: str) -> None:
    settings = {"stages": 2, "chunks": 2, "schedule": schedule, "transport": transport}
    jobs.run("Layers", workers=workers, settings=settings, numerics=STEPS)


@pytest.mark.longer
def test_a_parameter_in_three_stages_and_in_a_pool_of_two(jobs: Jobs) -> None:
    settings = {"stages": 4, "verify_every": 3}  # its copies are compared too
    jobs.run("Layers", workers=5, settings=settings, numerics=STEPS)


@pytest.mark.longer
def test_resnet50_in_the_five_classic_stages(jobs: Jobs) -> None:
    jobs.run("ThinResNet50", workers=5, settings={"stages": 5}, numerics={"steps": 4})


@pytest.mark.parametrize(
    ("task", "workers", "numerics"),
    [
        pytest.param("Text", 4, {"precision": "bf16"}, marks=pytest.mark.longer),
        ("Text", 4, {"precision": "fp16"}),
        pytest.param("SparseStages", 3, {"clip_norm": 0.3}, marks=pytest.mark.longer),
    ],
)
def test_a_leader_dies(jobs: Jobs, task: str, workers: int, numerics: dict[str, Any]) -> None:
    """Loss scaler and autocast in two stages; a stage in which some parameters have no gradient, ever or at times."""
    chaos = "kill:target=leader:1,at=4,phase=backward; kill:target=leader:0,at=6,phase=agree"
    job = jobs.run(
        task, workers=workers, settings={"stages": 2, "checkpoint.memory.every_steps": 2}, chaos=chaos,
        numerics={"steps": 9, **numerics},
    )  # fmt: skip
    assert len(job.of_kind("worker_evicted")) == 2
