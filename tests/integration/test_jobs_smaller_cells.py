"""Jobs for whose cells neither a spare nor a restart is left: they go on with smaller cells, to the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.cli.status import read_status
from job_harness import Job, Jobs, healed
from sampling import mostly_longer

FOUR = {"cell.shards": 4}


def _shapes(job: Job) -> list[tuple[int, int, int]]:
    return [(event["worker_id"], event["fsdp"], event["tp"]) for event in job.of_kind("cell_shrunk")]


def test_the_only_cell_goes_on_at_half_the_degree_and_then_as_one_process(jobs: Jobs) -> None:
    chaos = "kill:target=worker:0/3,at=4,phase=backward; kill:target=worker:0/1,at=7,phase=update"
    settings = {"cell.tp": 4, "on_failure": "shrink", "checkpoint.disk.every_steps": 2}
    job = jobs.run("Sharded", workers=1, numerics=FOUR, settings=settings, chaos=chaos)
    assert _shapes(job) == [(0, 1, 2), (0, 1, 1)], job.account()
    sizes = [len(event.get("pids", [0])) for event in job.of_kind("worker_joined")]
    assert sizes == [4, 2, 1], job.account()
    assert "cell.tp=2 in place of cell.tp=4" in job.of_kind("cell_shrunk")[0]["reason"]


@pytest.mark.longer
@pytest.mark.parametrize(
    ("task", "numerics", "settings", "shapes"),
    mostly_longer(
        [
            ("Sharded", FOUR, {"cell.tp": 4, "max_restarts": 0}, [(1, 1, 2)]),
            ("Sharded", FOUR, {"cell.tp": 2, "cell.fsdp": 2, "max_restarts": 0}, [(1, 2, 1)]),
            ("Pictures", {}, {"cell.fsdp": 3, "on_failure": "shrink"}, [(1, 2, 1)]),
        ],
        lambda case: case[2].get("cell.tp") == 4,
    ),
)
def test_cells_of_unlike_sizes_train_together(
    jobs: Jobs, task: str, numerics: dict[str, Any], settings: dict[str, Any], shapes: list[tuple[int, int, int]]
) -> None:
    chaos = "kill:target=worker:1/1,at=4,phase=forward"
    job = jobs.run(task, workers=2, numerics=numerics, settings=settings, chaos=chaos, pace=[healed(1)])
    assert _shapes(job) == shapes, job.account()
    cells = {row["worker_id"]: len(row["cell"]) for row in read_status(job.run_dir)["workers"]}
    before = settings.get("cell.tp", 1) * settings.get("cell.fsdp", 1)
    assert cells == {0: before, 1: shapes[0][1] * shapes[0][2]}, job.account()


@pytest.mark.longer
def test_a_spare_comes_before_a_smaller_cell(jobs: Jobs) -> None:
    settings = {"cell.tp": 2, "max_restarts": 0, "spares": 1}
    chaos = "kill:target=worker:0/1,at=4,phase=forward"
    job = jobs.run("Sharded", workers=1, numerics=FOUR, settings=settings, chaos=chaos)
    assert not job.of_kind("cell_shrunk") and len(job.of_kind("worker_evicted")) == 1, job.account()


@pytest.mark.longer
@pytest.mark.parametrize(
    ("task", "numerics", "settings", "shape"),
    [
        ("Text", {}, {"cell.fsdp": 2, "cell.wrap": 300}, (1, 1, 1)),
        ("Text", {}, {"cell.fsdp": 3}, (1, 2, 1)),
        ("Sharded", FOUR, {"cell.tp": 4}, (1, 1, 2)),
    ],
)
@pytest.mark.parametrize("phase", ["forward", "update"])
def test_a_stage_goes_on_with_cells_of_unlike_sizes(
    jobs: Jobs, task: str, numerics: dict[str, Any], settings: dict[str, Any], shape: tuple[int, int, int], phase: str
) -> None:
    chaos = f"kill:target=worker:1/1,at=4,phase={phase}"
    settings = {"stages": 2, "max_restarts": 0, **settings}
    job = jobs.run(task, workers=4, numerics=numerics, settings=settings, chaos=chaos, pace=[healed(1)])
    assert _shapes(job) == [shape], job.account()
