"""The host that leads a job is lost, or cut off: another one takes over, by a lease in etcd or by hand.

Each host has a member of etcd, too. Most of them only where time is (EVERSTEP_TEST_HOSTS=all).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_harness import EVERSTEP, SLOTS, HostJobs, _Head, gap_s, longer, now_ns
from net import Net

from etcd_members import EtcdMembers, etcd_on, etcd_there
from job_harness import Event, Job, Jobs

TAKEN: list[Event] = [{"kind": "coordinator_restarted", "count": 1}]
LEASE_S = 5
"""Machines that run tests are busy."""


class LedJobs(HostJobs):
    """Jobs whose lease is in an etcd with a member on each of the hosts."""

    def __init__(self, net: Net, jobs: Jobs, base: Path, *, apart: bool = False) -> None:
        super().__init__(net, jobs, base, apart=apart)
        self.etcd: EtcdMembers | None = None

    def start_etcd(self) -> EtcdMembers:
        """On all hosts."""
        self.etcd = etcd_on(self.net.hosts)
        return self.etcd

    def led(self, *options: str, workers: int = 4, until: list[Event] = TAKEN, steps: int = 40) -> Job:
        """A job with its lease there."""
        etcd = self.start_etcd()
        lease = {"control.etcd": etcd.url(), "control.lease_s": LEASE_S}
        return self.head(*options, workers=workers, until=until, steps=steps, settings=lease)

    def standby(self, number: int) -> Job:
        """An agent on this host that can take over; ends as the job does."""
        assert self.etcd is not None
        host = self.net.hosts[number - 1]
        command = [*EVERSTEP, "agent", "--join", self.etcd.url(), "--standby", "--slots", str(SLOTS)]
        process = host.start(command, self.log(host), self._environment)
        return _Head(self._base / "head" / "job", " ".join(command), process)

    def takeover(self, number: int, *options: str) -> subprocess.Popen[bytes]:
        """Go on with the job from this host."""
        host = self.net.hosts[number - 1]
        command = [*EVERSTEP, "takeover", str(self._base / "head" / "job"), "--listen", f"{host.address}:0", *options]
        return host.start(command, self.log(host), self._environment)

    def said(self, number: int) -> str:
        """What the commands on this host have said."""
        return self.log(self.net.hosts[number - 1]).read_text(errors="replace")


@pytest.fixture
def led_jobs(net: Net, jobs: Jobs, tmp_path: Path) -> Iterator[LedJobs]:
    etcd_there()
    found = LedJobs(net, jobs, tmp_path)
    yield found
    if found.etcd is not None:
        found.etcd.close()


def committed_between(job: Job, first_ns: int, last_ns: int) -> int:
    """How many steps."""
    return sum(first_ns < e["time_unix_ns"] < last_ns for e in job.of_kind("step_committed"))


@pytest.mark.parametrize(
    ("how", "local"),
    [pytest.param("kill", False, marks=longer), ("kill", True), pytest.param("crash", True, marks=longer)],
)
def test_the_host_that_leads_is_lost(led_jobs: LedJobs, how: str, local: bool) -> None:
    """local: it runs workers, too; else nothing has to be decided, and training goes on meanwhile."""
    workers = 6 if local else 4
    job = led_jobs.led(*([] if local else ["--no-local-workers"]), workers=workers)
    heirs = [led_jobs.standby(2), led_jobs.standby(3)]
    job.wait_for("generation_started", lambda e: len(e["workers"]) == workers)
    job.wait_for("step_committed", lambda e: e["step"] >= 5)
    struck_ns = now_ns()
    getattr(led_jobs.net.hosts[0], how)()
    taken = heirs[0].wait_for("coordinator_restarted", lambda e: e["time_unix_ns"] > struck_ns)
    assert taken["host"] in [host.address for host in led_jobs.net.hosts[1:]]
    after_s = (taken["time_unix_ns"] - struck_ns) / 1e9
    assert after_s < LEASE_S + 8.0, f"{after_s:.2f} s\n{heirs[0].account()}"  # on a busy machine
    for heir in heirs:
        led_jobs.check(heir)
    if local:
        assert {e["cause"] for e in heirs[0].of_kind("worker_evicted")} <= {"silent", "host_lost", "link"}
    else:
        assert not heirs[0].of_kind("worker_evicted")
        assert committed_between(heirs[0], struck_ns, taken["time_unix_ns"]), heirs[0].account()
        assert len(heirs[0].of_kind("generation_started")) == 1
    said = [led_jobs.said(2), led_jobs.said(3)]
    assert sum("leads the job" in words for words in said) == 1, said
    print(f"taken over after {after_s:.2f} s; longest gap between steps {gap_s(heirs[0], struck_ns):.2f} s")


@longer
def test_the_host_that_leads_is_cut_off_and_comes_back(led_jobs: LedJobs) -> None:
    """It decides nothing any more, and is one that stands by when it can be reached again."""
    back: list[Event] = [*TAKEN, {"kind": "generation_started", "workers": list(range(6)), "count": 2}]
    job = led_jobs.led(workers=6, until=back, steps=80)
    heirs = [led_jobs.standby(2), led_jobs.standby(3)]
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 6)
    job.wait_for("step_committed", lambda e: e["step"] >= 5)
    led_jobs.net.hosts[0].cut()
    job.wait_for("coordinator_restarted")
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    led_jobs.net.hosts[0].heal()
    for one in (job, *heirs):
        led_jobs.check(one)


@longer
def test_a_person_takes_over(led_jobs: LedJobs) -> None:
    """Without etcd; and not as long as there is somebody to take over from."""
    job = led_jobs.head("--no-local-workers", workers=4, until=TAKEN)
    agents = [led_jobs.agent(2), led_jobs.agent(3)]
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    job.wait_for("step_committed", lambda e: e["step"] >= 5)
    assert led_jobs.takeover(2).wait(120) == 2
    assert "a job is still running" in led_jobs.said(2)
    led_jobs.net.hosts[0].kill()
    process = led_jobs.takeover(3)
    led_jobs.check(_Head(job.run_dir, "takeover", process))
    assert [agent.wait(120) for agent in agents] == [0, 0]
    assert not job.of_kind("worker_evicted")
