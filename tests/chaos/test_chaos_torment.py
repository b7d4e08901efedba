"""Seeds of `make torment` that have all kinds of ends in them: launcher killed, signals, once and twice, at the begin
too, workers and agents stopped, commands. EVERSTEP_TORMENT_SEEDS says which."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from job_harness import Jobs
from sampling import mostly_longer
from torment import torment
from torment_plan import draw

KEPT = 15
SEEDS = [int(seed) for seed in os.environ.get("EVERSTEP_TORMENT_SEEDS", "1,15,31,69,72,88").split(",")]


@pytest.mark.longer
@pytest.mark.parametrize(
    "seed", mostly_longer(SEEDS, lambda seed: seed == KEPT or "EVERSTEP_TORMENT_SEEDS" in os.environ)
)
def test_harm_from_outside(jobs: Jobs, seed: int, tmp_path: Path) -> None:
    line = torment(jobs, seed, draw(seed), tmp_path, lambda plan: jobs.reference(plan.task, plan.numerics))
    account = tmp_path / f"seed-{seed}" / "account.txt"
    assert line["ok"], f"{json.dumps(line)}\n{account.read_text() if account.exists() else ''}"
