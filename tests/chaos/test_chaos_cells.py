"""Random kills of any rank of any cell, in pipelines of pools of cells: 2 x 2 x 2, and 2 x 2 x (2 x 2). By seed;
EVERSTEP_CHAOS_SEEDS says which, such as "1-50"."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from job_harness import Jobs

LIMITS = {"hang_limit_s": 5, "heartbeat.interval_s": 0.2, "stages": 2}
SHAPES = (("Text", {"cell.fsdp": 2}), ("Sharded", {"cell.tp": 2}), ("Sharded", {"cell.fsdp": 2, "cell.tp": 2}))


def seeds() -> range:
    first, _, last = os.environ.get("EVERSTEP_CHAOS_SEEDS", "1-3").partition("-")
    return range(int(first), int(last or first) + 1)


@pytest.mark.longer
@pytest.mark.parametrize("seed", seeds())
def test_random_kills_of_any_rank(jobs: Jobs, seed: int) -> None:
    rng = random.Random(seed)
    task, cell = SHAPES[seed % 3]
    numerics: dict[str, Any] = {"steps": 14} if task == "Text" else {"steps": 14, "cell.shards": 2}
    if seed % 4 == 3:
        numerics["cell.precision"] = "parameters=bf16,reduction=bf16,buffers=fp32"
    settings = {**LIMITS, **cell, "schedule": rng.choice(("1f1b", "gpipe")), "recompute": rng.random() < 0.3}
    ranks = cell.get("cell.fsdp", 1) * cell.get("cell.tp", 1)
    kills = []
    for step in sorted(rng.sample(range(2, 13), 4)):
        rank, phase = rng.randrange(ranks), rng.choice(("load", "forward", "backward", "reduce", "agree", "update"))
        kills.append(f"kill:target=worker:{rng.randrange(4)}{f'/{rank}' if rank else ''},at={step},phase={phase}")
    pace = [{"kind": "worker_healed", "count": 2}]
    job = jobs.run(task, workers=4, chaos="; ".join(kills), numerics=numerics, settings=settings, pace=pace)
    assert job.of_kind("fault_injected"), job.account()
