"""Three hosts on one bridge, and jobs whose head is on the first of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_harness import HostJobs
from net import Net, why_not

from job_harness import Jobs


@pytest.fixture(scope="session")
def hosts_possible() -> None:
    """Skips with the reason where there can be no such hosts."""
    why = why_not()
    if why:
        pytest.skip(why)


@pytest.fixture
def net(hosts_possible: None) -> Iterator[Net]:
    """Hosts 1 to 3."""
    found = Net(3)
    yield found
    found.close()


@pytest.fixture
def on_hosts(net: Net, jobs: Jobs, tmp_path: Path) -> HostJobs:
    """Starts jobs on them."""
    return HostJobs(net, jobs, tmp_path)


@pytest.fixture
def apart(net: Net, jobs: Jobs, tmp_path: Path) -> HostJobs:
    """The same, where no host but the first can open anything of the job's directory."""
    return HostJobs(net, jobs, tmp_path, apart=True)
