"""Jobs whose hosts share no directory: no path of the job's can be opened on any host but the first."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hosts_harness import EVERSTEP, HostJobs

from everstep.checkpoint.reader import open_checkpoint
from everstep.checkpoint.store import DirectoryStore
from everstep.observe.events import read_events
from everstep.observe.told import CAME_FROM
from job_harness import LIMIT_S, Event, Job

STEPS = 150


def test_nothing_of_the_jobs_directory_is_needed_on_other_hosts(apart: HostJobs) -> None:
    """The job's leader, and all workers, are on hosts that see nothing of it. A scripted fault strikes once, although
    its worker comes back; that of the coordinator, too, of which they see no process."""
    chaos = "kill:target=worker:0,at=12; kill:target=worker:3,at=20; kill:target=coordinator,at=26"
    job = apart.head("--no-local-workers", "--chaos", chaos, workers=4)
    apart.agent(2)
    apart.agent(3)
    apart.check(job)
    assert [e["worker_id"] for e in job.of_kind("fault_injected")] == [0, 3, None]
    assert sorted(path.name for path in (job.run_dir / "chaos").iterdir()) == ["0", "1", "2"]
    [again] = job.of_kind("coordinator_restarted")
    assert again["cause"] == "killed" and again["time_unix_ns"] > job.of_kind("fault_injected")[-1]["time_unix_ns"]
    where = {event["host"] for event in job.of_kind("worker_joined")}
    assert where == {"host2", "host3"}
    assert all(CAME_FROM in event for event in job.of_kind("step_committed"))
    assert {path.name for path in (job.run_dir / "metrics").iterdir()} == {"host2.jsonl", "host3.jsonl"}
    assert not [name for name in os.listdir(job.run_dir / "final") if name.startswith(".")], "no rest of a transfer"


@pytest.mark.longer
def test_a_coordinator_is_struck_for_hosts_that_do_not_see_it(apart: HostJobs) -> None:
    """In every way that there is; scripted, asked for, and asked for later."""
    chaos = "stop:target=coordinator,at=8,for=1; throttle:target=coordinator,at=12,for=1"
    job = apart.head(
        "--no-local-workers",
        "--chaos",
        chaos,
        workers=4,
        steps=STEPS,
        until=[{"kind": "coordinator_restarted", "count": 2}],
    )
    apart.agent(2)
    apart.agent(3)
    job.wait_for("fault_injected", lambda e: e["fault"] == "throttle")
    for count, fault in enumerate(("kill:target=coordinator", "kill:target=coordinator,at=30,phase=reduce"), 1):
        asked = apart.net.hosts[0].run(*EVERSTEP, "chaos", "inject", str(job.run_dir), fault)
        while asked.returncode:  # the coordinator has just been restarted
            assert asked.stderr.rstrip().endswith(": try again"), asked.stderr
            asked = apart.net.hosts[0].run(*EVERSTEP, "chaos", "inject", str(job.run_dir), fault)
        job.wait_for("coordinator_restarted", lambda e, n=count: len(job.of_kind("coordinator_restarted")) >= n)
    apart.check(job)
    struck = [(e["fault"], e["target"], e["phase"]) for e in job.of_kind("fault_injected")]
    assert struck[2:] == [("kill", "coordinator", ""), ("kill", "coordinator", "reduce")], struck
    assert {one[:2] for one in struck[:2]} == {("stop", "coordinator"), ("throttle", "coordinator")}
    assert [e["cause"] for e in job.of_kind("coordinator_restarted")] == ["killed", "killed"]
    assert not job.of_kind("worker_evicted")


@pytest.mark.longer
def test_hosts_are_lost_with_their_disks(apart: HostJobs) -> None:
    """One while the job runs, another while it does not: what is left of the third and the head is enough.
    The third is a rack by itself, so it has a copy of everything."""
    settings = {"checkpoint.disk.every_steps": 4, "hosts.return": "rebalance"}
    job = apart.head("--domain", "rack=r1", until=[{"kind": "job_completed"}], steps=STEPS, settings=settings)
    apart.agent(3, "--domain", "rack=r2")
    apart.agent(2, "--domain", "rack=r1")
    first = job.wait_for("generation_started", lambda e: len(e["workers"]) == 6)
    saved = saved_in(job, first["generation"])
    holders = manifest(job.run_dir, saved["step"])["hosts"]
    assert all(len(hosts) == 2 and "host3" in hosts for hosts in holders.values()), holders
    assert {"host2", "host3"} <= {host for hosts in holders.values() for host in hosts}
    apart.net.hosts[2].kill()
    shutil.rmtree(apart.own(3))
    less = job.wait_for("generation_started", lambda e: e["generation"] > first["generation"])
    apart.agent(3, "--domain", "rack=r2")
    back = job.wait_for("generation_started", lambda e: e["generation"] > less["generation"] and len(e["workers"]) == 6)
    saved_in(job, back["generation"])
    apart.interrupt(job)
    apart.net.hosts[1].kill()
    apart.net.hosts[2].kill()
    shutil.rmtree(apart.own(2))
    again = apart.head("--domain", "rack=r1", steps=STEPS, settings=settings)
    again.wait_for("waiting", lambda e: "host2" in e["reason"] or "host3" in e["reason"])
    apart.agent(2, "--domain", "rack=r1")
    apart.agent(3, "--domain", "rack=r2")
    apart.check(again)
    started = [e["step"] for e in again.of_kind("job_started")]
    assert started[0] == 0 and started[1] > saved["step"]
    assert not again.of_kind("fallback")


@pytest.mark.longer
def test_steps_of_which_nothing_had_arrived_are_told_by_who_leads_next(apart: HostJobs) -> None:
    """The host of the job's leader is lost with its disk, while nothing is heard of the job's own host for long."""
    evicted: Event = {"kind": "worker_evicted", "count": 2}
    job = apart.head("--no-local-workers", workers=4, steps=STEPS, until=[evicted])
    apart.agent(2)
    apart.agent(3)
    full = job.wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    leads = next(e["host"] for e in job.of_kind("worker_joined") if e["worker_id"] == full["workers"][0])
    head, lost = apart.net.hosts[0], int(leads.removeprefix("host"))
    job.wait_for("step_committed", lambda e: e["generation"] >= full["generation"])
    for pid in head.pids():
        os.kill(pid, signal.SIGSTOP)
    try:
        arrived, end_s = len(job.of_kind("step_committed")), time.monotonic() + LIMIT_S
        while len(steps_told(apart.own(lost))) < arrived + 30:
            assert time.monotonic() < end_s, "nothing is trained while the head is stopped"
            time.sleep(0.05)
        apart.net.hosts[lost - 1].kill()
        shutil.rmtree(apart.own(lost))
    finally:
        for pid in head.pids():
            os.kill(pid, signal.SIGCONT)
    apart.check(job)
    told = [e["step"] for e in job.of_kind("step_committed")]
    assert sorted(told) == list(range(1, STEPS + 1))
    assert [e for e in job.of_kind("checkpoint_completed") if e["generation"] > full["generation"]], job.account()


def steps_told(folder: Path) -> list[int]:
    """By the processes of a host."""
    return [e["step"] for e in read_events(folder / "events.jsonl") if e["kind"] == "step_committed"]


def saved_in(job: Job, generation: int) -> Event:
    """A checkpoint that was taken in this generation or a later one."""
    return job.wait_for("checkpoint_completed", lambda e: e["tier"] == "disk" and e["generation"] > generation - 1)


def manifest(run_dir: Path, step: int) -> dict[str, Any]:
    """The body of a checkpoint's manifest."""
    found: dict[str, Any] = vars(open_checkpoint(DirectoryStore(run_dir / "checkpoints"), step).manifest)
    return found
