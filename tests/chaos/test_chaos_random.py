"""Random faults by seed; EVERSTEP_CHAOS_SEEDS says which seeds, such as "1-20" or "3,5"."""

from __future__ import annotations

import os

import pytest

from job_harness import Jobs
from sampling import mostly_longer


def seeds() -> list[int]:
    found: list[int] = []
    for part in os.environ.get("EVERSTEP_CHAOS_SEEDS", "1-4").split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@pytest.mark.parametrize("seed", mostly_longer(seeds(), lambda seed: seed == 1 or "EVERSTEP_CHAOS_SEEDS" in os.environ))
def test_random_faults(jobs: Jobs, seed: int) -> None:
    task = ("Pictures", "Text", "Sparse")[seed % 3]
    options = ("--spares", "1") if seed % 4 == 0 else ()
    chaos = f"random:p=0.1,seed={seed},after_step=3"
    limits = {"hang_limit_s": 5, "heartbeat.interval_s": 0.2}
    jobs.run(task, *options, workers=2 + seed % 4, chaos=chaos, numerics={"steps": 30}, settings=limits)
