"""Faults of hosts and links that a job's own agents strike, and hosts that leave: the same bits as if nothing had been.

Partitions of every shape: a host alone, the head alone, two that do not reach each other, one way each direction, few
packets, a narrow link. Most of them run in `make extended`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hosts_harness import EVERSTEP, STEPS, HostJobs

from job_harness import LIMIT_S, Event, Job

needs_tc = pytest.mark.skipif(shutil.which("tc") is None, reason="links are harmed with tc (iproute2)")
HEAD = "10.77.0.1"
INJECTED: list[Event] = [{"kind": "fault_injected", "count": 1}]
EVICTED: list[Event] = [*INJECTED, {"kind": "worker_evicted", "count": 2}]
QUICK = {"heartbeat.floor_s": 1, "heartbeat.ceiling_s": 3, "heartbeat.interval_s": 0.2}


def everstep(on_hosts: HostJobs, *argv: str) -> subprocess.CompletedProcess[str]:
    return on_hosts.net.hosts[0].run(*EVERSTEP, *argv)


def started(on_hosts: HostJobs, until: list[Event], *options: str, steps: int = STEPS) -> Job:
    """A job of six workers on three hosts."""
    job = on_hosts.head("--set", "hosts.min=3", *options, until=until, steps=steps, settings=QUICK)
    on_hosts.agent(2)
    on_hosts.agent(3)
    return job


def struck(on_hosts: HostJobs, fault: str, until: list[Event]) -> Job:
    """It is struck when all of them compute."""
    job = started(on_hosts, until)
    full = job.wait_for("generation_started", lambda e: len(e["workers"]) == 6)
    job.wait_for("step_committed", lambda e: e["generation"] >= full["generation"])
    done = everstep(on_hosts, "chaos", "inject", str(job.run_dir), fault)
    assert done.returncode == 0, done.stderr
    return job


def lost(job: Job) -> dict[str, set[str]]:
    """Causes of evictions by host."""
    where = {(e["worker_id"], e["incarnation"]): e["host"] for e in job.of_kind("worker_joined")}
    found: dict[str, set[str]] = {}
    for event in job.of_kind("worker_evicted"):
        found.setdefault(where[event["worker_id"], event["incarnation"]], set()).add(event["cause"])
    return found


def check(on_hosts: HostJobs, job: Job, target: str) -> dict[str, set[str]]:
    on_hosts.check(job)
    [injected] = job.of_kind("fault_injected")
    assert injected["target"] == target
    assert not [e for e in job.of_kind("warning") if "did not strike" in e["reason"]], job.account()
    return lost(job)


@needs_tc
@pytest.mark.longer
def test_a_scripted_fault_of_a_host_strikes_when_its_step_comes(on_hosts: HostJobs) -> None:
    fault = "cut:target=host:host3,at=6,for=5"
    job = started(on_hosts, INJECTED, "--chaos", fault)
    check(on_hosts, job, "host:host3")
    [injected] = job.of_kind("fault_injected")
    assert injected["step"] >= 6 and injected["phase"] in injected["reason"]
    waited = job.of_kind("waiting")
    assert waited and "of 3 hosts have joined" in waited[0]["reason"]


@needs_tc
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("cut:target=host:host3,for=8", marks=pytest.mark.longer),
        pytest.param("kill:target=host:host3", marks=pytest.mark.longer),
        pytest.param("oneway:target=host:host2,for=8", marks=pytest.mark.longer),
        pytest.param("cut:target=link:host2-host3,for=15", marks=pytest.mark.longer),
        pytest.param("oneway:target=link:host2-host3,for=15", marks=pytest.mark.longer),
        pytest.param("oneway:target=link:host3-host2,for=15", marks=pytest.mark.longer),
        pytest.param(f"cut:target=link:{HEAD}-host3,for=8", marks=pytest.mark.longer),
        pytest.param(f"oneway:target=link:{HEAD}-host3,for=8", marks=pytest.mark.longer),
        pytest.param(f"oneway:target=link:host3-{HEAD},for=8", marks=pytest.mark.longer),
    ],
)
def test_a_host_that_is_lost_or_cut_off_costs_no_bit(on_hosts: HostJobs, fault: str) -> None:
    job = struck(on_hosts, fault, EVICTED)
    gone = check(on_hosts, job, fault.partition("target=")[2].partition(",")[0])
    assert gone and set(gone) <= {"host2", "host3"}, gone
    assert all(causes & {"host_lost", "link", "silent"} for causes in gone.values()), gone


@needs_tc
@pytest.mark.longer
@pytest.mark.parametrize("kind", ["cut", "oneway"])
def test_the_head_alone_goes_on_with_its_own_or_waits_for_the_others(on_hosts: HostJobs, kind: str) -> None:
    """The majority is without the head: nothing is decided there, and what it had is done again, to the same bits."""
    fault = f"{kind}:target=host:{HEAD},for=6"
    check(on_hosts, struck(on_hosts, fault, INJECTED), f"host:{HEAD}")


@needs_tc
@pytest.mark.longer
@pytest.mark.parametrize(
    "fault", ["drop:target=link:host2-host3,for=4,p=0.05", "narrow:target=host:host2,for=4,mbit=5"]
)
def test_a_bad_link_is_only_slow(on_hosts: HostJobs, fault: str) -> None:
    job = struck(on_hosts, fault, INJECTED)
    check(on_hosts, job, fault.partition("target=")[2].partition(",")[0])


@needs_tc
@pytest.mark.longer
@pytest.mark.parametrize(
    ("target", "between"),
    [
        ("link:host2-host3", {"10.77.0.2 and 10.77.0.3", "10.77.0.3 and 10.77.0.2"}),
        ("host:host2", {"10.77.0.2 and all others"}),
        (f"host:{HEAD}", {f"{HEAD} and all others"}),
    ],
)
def test_a_wire_to_another_city_costs_time_and_no_bit(on_hosts: HostJobs, target: str, between: set[str]) -> None:
    """It is struck at its step, and when it is over nothing is left of it."""
    over: Event = {"kind": "fault_over", "count": len(between)}
    job = started(on_hosts, [over], "--chaos", f"slow:target={target},at=6,for=3,by=0.04")
    for one in between:
        job.wait_for("fault_over", reason=f"chaos: slow between {one} is over", cause="injected")
    for host in on_hosts.net.hosts:
        shown = host.run("sh", "-c", "tc filter show dev eth0 egress; ip -br link show type tun")
        assert not shown.stdout + shown.stderr
    assert check(on_hosts, job, target) == {}, job.account()
    [injected] = job.of_kind("fault_injected")
    assert injected["step"] >= 6 and target.replace(":", " ") in injected["reason"]


_HIDDEN = 'mount --bind /dev/null /dev/net/tun; exec "$@"'


@needs_tc
def test_what_cannot_be_struck_is_refused_before_the_job_begins(on_hosts: HostJobs, tmp_path: Path) -> None:
    """Where there is no /dev/net/tun, as in most containers."""
    script = tmp_path / "script.py"
    script.touch()
    fault = f"slow:target=host:{HEAD},at=6,for=1,by=0.1"
    argv = ["run", str(script), "--listen", f"{HEAD}:0", "--chaos", fault, "--run-dir", str(tmp_path / "r")]
    done = on_hosts.net.hosts[0].run("unshare", "--mount", "sh", "-c", _HIDDEN, "sh", *EVERSTEP, *argv)
    words = f"chaos fault {fault!r} cannot strike here: this host cannot inject this fault into links: /dev/net/tun: "
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert done.stderr.strip().count("\n") == 0 and not (tmp_path / "r").exists()


# ---- hosts that leave


@pytest.mark.longer
def test_a_host_is_drained_leaves_and_joins_again(on_hosts: HostJobs) -> None:
    """And its workers listen where a firewall lets them."""
    again: Event = {"kind": "generation_started", "workers": [0, 1, 2, 3], "count": 2}
    job = on_hosts.head(
        "--set", "hosts.min=2", "--set", "network.ports=29500-29515", workers=4, until=[again], steps=400
    )
    agent = on_hosts.agent(2)
    job.wait_for("generation_started", lambda e: e["workers"] == [0, 1, 2, 3])
    job.wait_for("step_committed", lambda e: e["step"] >= 3)
    done = everstep(on_hosts, "drain", str(job.run_dir), "--host", "host2", "--grace", "60")
    assert done.returncode == 0 and "host host2 has left" in done.stdout, done.stderr
    assert agent.wait(60) == 0
    assert "host host2 was drained" in on_hosts.log(on_hosts.net.hosts[1]).read_text()
    assert job.of_kind("generation_started")[-1]["cause"] == "drained", job.account()
    assert not job.of_kind("worker_evicted"), job.account()
    ports = {int(m["address"].rpartition(":")[2]) for m in members(job)}
    assert ports and all(29500 <= port <= 29515 for port in ports)
    agent = on_hosts.agent(2)
    assert joined(on_hosts, job, "host2"), on_hosts.log(on_hosts.net.hosts[1]).read_text()
    scaled = everstep(on_hosts, "scale", str(job.run_dir), "--workers", "4")
    assert scaled.returncode == 0, scaled.stderr
    on_hosts.check(job)
    assert agent.wait(60) == 0


def joined(on_hosts: HostJobs, job: Job, name: str) -> bool:
    """Whether a host is one of the job's, within a time that is enough for a busy machine."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        listed = json.loads(everstep(on_hosts, "hosts", str(job.run_dir), "--json").stdout)
        if name in {one["name"] for one in listed if one["state"] != "gone"}:
            return True
    return False


def members(job: Job) -> list[dict[str, str]]:
    """Of all plans of the journal."""
    lines = (job.run_dir / "coordinator.journal").read_text().splitlines()
    entries = [json.loads(line.partition(" ")[2]) for line in lines]  # behind its checksum
    return [member for entry in entries if entry.get("kind") == "plan" for member in entry["plan"]["members"]]


LEFT: list[Event] = [{"kind": "generation_started", "cause": "preempted"}]


@pytest.mark.longer
@pytest.mark.parametrize(("task", "settings"), [("Text", {}), ("Wide", {"zero.stage": 2, "zero.copies": 1})])
def test_sigusr1_has_a_host_leave_in_order(on_hosts: HostJobs, task: str, settings: dict[str, Any]) -> None:
    """What it alone holds of the state is copied before."""
    job = on_hosts.head(workers=4, until=LEFT, steps=100, task=task, settings={"hosts.min": 2, **settings})
    agent = on_hosts.agent(2)
    full = job.wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    job.wait_for("step_committed", lambda e: e["generation"] >= full["generation"])
    inside = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    os.kill(int(inside[0]), signal.SIGUSR1)
    assert agent.wait(60) == 0
    on_hosts.check(job)
    assert not job.of_kind("worker_evicted") and job.of_kind("generation_started")[-1]["cause"] == "preempted"
    assert not job.of_kind("fallback"), job.account()
