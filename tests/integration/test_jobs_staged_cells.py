"""Jobs of stages whose workers are cells: the bits of one worker of one process, in any shape, through kills of any
rank."""

from __future__ import annotations

from typing import Any

import pytest

from job_harness import Jobs
from sampling import mostly_longer


def cells(ranks: int, **more: Any) -> dict[str, Any]:
    """Settings of a job of two stages with so many processes in each worker."""
    return {"stages": 2, "cell.fsdp": ranks, **more}


@pytest.mark.parametrize(
    ("task", "ranks", "workers", "settings"),
    mostly_longer(
        [
            ("Text", 2, 4, {}),
            ("Pictures", 3, 1, {"recompute": True}),
            ("Pictures", 2, 3, {"schedule": "gpipe", "verify_every": 2}),
            ("Layers", 2, 5, {"stages": 4, "verify_every": 3}),
            ("SparseStages", 3, 4, {"cell.wrap": 30, "verify_every": 4}),
            ("PicturesEpochs", 2, 4, {"eval_every": 5}),
            ("Text", 2, 4, {"redundancy": 1, "transport": "sockets"}),
        ],
        lambda case: case[:3] == ("Text", 2, 4) and not case[3],
    ),
)
def test_any_number_of_ranks(jobs: Jobs, task: str, ranks: int, workers: int, settings: dict[str, Any]) -> None:
    numerics = {} if task == "PicturesEpochs" else {"steps": 8}
    job = jobs.run(task, workers=workers, settings=cells(ranks, **settings), numerics=numerics)
    assert all(len(event["pids"]) == ranks for event in job.of_kind("worker_joined")), job.account()
