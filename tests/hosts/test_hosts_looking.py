"""Hosts that share no directory and look for the job by themselves: in etcd, or at several addresses."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_harness import EVERSTEP, HIDE, PORT, SLOTS
from net import Net
from test_hosts_lead import LedJobs

from etcd_members import etcd_there
from job_harness import Jobs


class LookingJobs(LedJobs):
    """Of their hosts some do not see the job's directory."""

    def looks(self, number: int, where: str, *options: str) -> subprocess.Popen[bytes]:
        """Start an agent that looks there, on a host that sees nothing of the job's directory."""
        host = self.net.hosts[number - 1]
        command = [*EVERSTEP, "agent", "--join", where, "--slots", str(SLOTS), "--run-dir", str(self.own(number))]
        hidden = {**self._environment, HIDE: str(self._base / "head")}
        return host.start([*command, *options], self.log(host), hidden)

    def kill_coordinator(self) -> None:
        """On the first host."""
        for pid in self.net.hosts[0].pids():
            if b"everstep.runtime.lead.coordinator_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def looking_jobs(net: Net, jobs: Jobs, tmp_path: Path) -> Iterator[LookingJobs]:
    found = LookingJobs(net, jobs, tmp_path, apart=True)
    yield found
    if found.etcd is not None:
        found.etcd.close()


@pytest.mark.longer
def test_who_looks_in_etcd_follows_the_next_coordinator(looking_jobs: LookingJobs) -> None:
    """The host that leads is lost; one that sees nothing of its directory goes on with the next that does."""
    etcd_there()
    job = looking_jobs.led("--no-local-workers")
    assert looking_jobs.etcd is not None
    where = looking_jobs.etcd.url()
    heir = looking_jobs.standby(2)
    looking_jobs.looks(3, where)
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    job.wait_for("step_committed", lambda e: e["step"] >= 5)
    looking_jobs.net.hosts[0].kill()
    heir.wait_for("coordinator_restarted")
    looking_jobs.check(heir)
    assert {e["host"] for e in heir.of_kind("worker_joined")} == {"host2", "host3"}
    assert not heir.of_kind("worker_evicted")


@pytest.mark.longer
def test_who_has_several_addresses_finds_the_one_that_answers(looking_jobs: LookingJobs) -> None:
    """The first of them is nobody's; the coordinator is killed meanwhile, and comes back."""
    job = looking_jobs.head("--no-local-workers", workers=4, until=[{"kind": "coordinator_restarted", "count": 1}])
    nobody, head = looking_jobs.net.hosts[2].address, looking_jobs.net.hosts[0].address
    for number in (2, 3):
        looking_jobs.looks(number, f"{nobody}:{PORT},{head}:{PORT}")
    job.wait_for("step_committed", lambda e: e["step"] >= 5)
    looking_jobs.kill_coordinator()
    looking_jobs.check(job)
    assert not job.of_kind("worker_evicted")
