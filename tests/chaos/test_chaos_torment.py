"""A few seeds of `make torment`, whose harm Everstep has to survive on every machine; EVERSTEP_TORMENT_SEEDS: which."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from job_harness import Jobs
from torment import torment
from torment_plan import draw

SEEDS = [int(seed) for seed in os.environ.get("EVERSTEP_TORMENT_SEEDS", "0,1,2,3,4,5").split(",")]


@pytest.mark.parametrize("seed", SEEDS)
def test_harm_from_outside(jobs: Jobs, seed: int, tmp_path: Path) -> None:
    line = torment(jobs, seed, draw(seed), tmp_path, lambda plan: jobs.reference(plan.task, plan.numerics))
    account = tmp_path / f"seed-{seed}" / "account.txt"
    assert line["ok"], f"{json.dumps(line)}\n{account.read_text() if account.exists() else ''}"
