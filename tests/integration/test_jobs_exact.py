"""Undisturbed jobs: the number of workers, the transport and the kind of state change no bit."""

from __future__ import annotations

import pytest

from job_harness import Jobs
from sampling import mostly_longer


@pytest.mark.parametrize("workers", mostly_longer([2, 3, 4, 5], lambda workers: workers == 3))
@pytest.mark.parametrize("task", [pytest.param("Pictures", marks=pytest.mark.longer), "Text"])
def test_any_number_of_workers(jobs: Jobs, task: str, workers: int) -> None:
    jobs.run(task, workers=workers)
