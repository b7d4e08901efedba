"""A job on hosts that have IPv6 addresses alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_harness import EVERSTEP, PORT, HostJobs
from net import Net

from job_harness import Jobs


@pytest.fixture
def of_six(hosts_possible: None, jobs: Jobs, tmp_path: Path) -> Iterator[HostJobs]:
    """Starts jobs on two such hosts."""
    net = Net(2, six=True)
    yield HostJobs(net, jobs, tmp_path)
    net.close()


def test_hosts_without_ipv4_train_and_one_is_lost(of_six: HostJobs) -> None:
    """Over TLS, as between any hosts; the second host is killed, and comes again."""
    together = {"kind": "generation_started", "workers": [0, 1, 2, 3]}
    job = of_six.head(workers=4, until=[{**together, "count": 2}])
    of_six.agent(2)
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    job.wait_for("step_committed", lambda e: e["step"] >= 3)
    head, other = of_six.net.hosts
    reached = head.run(*EVERSTEP, "ports", "--check", f"[{head.address}]:{PORT}")
    assert (reached.returncode, reached.stdout.strip()) == (0, f"[{head.address}]:{PORT}  answers"), reached.stderr
    assert head.address in head.run(*EVERSTEP, "hosts", str(job.run_dir)).stdout
    other.kill()
    job.wait_for("worker_evicted")
    of_six.agent(2)
    of_six.check(job)
    assert {e["host"] for e in job.of_kind("worker_joined")} == {head.address, other.name}
