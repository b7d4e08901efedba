"""A machine on which everybody waits for a processor is slow, and nobody on it is dead: no verdict, and the same bits.

With `EVERSTEP_TEST_BUSY_S` only, the seconds for which this goes on: nothing else could be tested beside it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from job_harness import Jobs

BUSY_S = float(os.environ.get("EVERSTEP_TEST_BUSY_S", "0"))
LOAD = 25 * (os.cpu_count() or 1)
VERDICTS = ("worker_evicted", "coordinator_killed", "coordinator_restarted", "job_failed")

pytestmark = pytest.mark.skipif(not BUSY_S, reason="runs in make extended")


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """So many processes that do nothing but compute."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    burners = [subprocess.Popen(command) for _ in range(LOAD)]
    try:
        yield
    finally:
        for one in burners:
            one.kill()
            one.wait()


def test_nobody_is_taken_for_dead_on_a_machine_that_is_busy(jobs: Jobs) -> None:
    """Jobs begin, train and end under the load, one after the other."""
    numerics, done = {"steps": 40}, []
    jobs.reference("Pictures", numerics)
    with busy():
        end_s = time.monotonic() + BUSY_S
        while time.monotonic() < end_s:
            job = jobs.start("Pictures", workers=2, numerics=numerics)
            while not job.over(1.0):
                assert time.monotonic() < end_s + BUSY_S, f"a job does not end\n{job.account()}"
            assert not [event for event in job.events if event["kind"] in VERDICTS], job.account()
            done.append(job)
    print(f"{len(done)} jobs under a load of {LOAD} and more, of {len(done[0].of_kind('step_committed'))} steps each")
    for job in done:
        jobs.check(job, "Pictures", numerics)
