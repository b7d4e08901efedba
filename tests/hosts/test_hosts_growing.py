"""A job that grows from one host to three and shrinks again, and what then crosses from host to host."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hosts_harness import EVERSTEP, HostJobs
from net import Net

from job_harness import Event

ALONE, ALL = [0, 1], list(range(6))
SHRUNK: list[Event] = [{"kind": "generation_started", "workers": ALONE, "count": 2}]
REDUCING = Path(__file__).parent / "reducing.py"
LIMIT_S, MANY = 120, 250


def left(plan: Event, generation: int, where: Mapping[int, str], host: str) -> bool:
    """Whether this plan is newer than that generation, and without the host."""
    return plan["generation"] > generation and all(where[i] != host for i in plan["workers"])


@pytest.mark.timeout(900)
@pytest.mark.longer
@pytest.mark.parametrize("stages", [1, 2])
def test_a_job_grows_from_one_host_to_three_and_shrinks_again(on_hosts: HostJobs, stages: int) -> None:
    """Hosts join and are drained while it trains; shared memory, then both, then shared memory again."""
    job = on_hosts.head("--domain", "rack=r1", until=SHRUNK, steps=MANY, settings={"stages": stages})
    first = job.wait_for("generation_started")
    assert first["workers"] == ALONE, "it does not wait for the others"
    agents = [on_hosts.agent(number, "--domain", f"rack=r{number}") for number in (2, 3)]
    job.wait_for("generation_started", lambda e: e["workers"] == ALL)
    job.wait_for("step_committed", lambda e: e["generation"] > first["generation"])
    head = on_hosts.net.hosts[0]
    said = json.loads(head.run(*EVERSTEP, "hosts", str(job.run_dir), "--json").stdout)
    assert {h["name"]: h["domains"] for h in said} == {
        "host1": {"rack": "r1", "host": head.address},
        **{name: {"rack": rack, "host": name} for name, rack in (("host2", "r2"), ("host3", "r3"))},
    }
    where = {e["worker_id"]: e["host"] for e in job.of_kind("worker_joined")}
    plan = job.of_kind("generation_started")[-1]
    for stage in range(stages):
        pool = [worker_id for worker_id, at, _, _ in plan["seats"] if at == stage]
        assert {where[i] for i in pool} == {head.address, "host2", "host3"}, "each pool is on all hosts"
    for name in ("host3", "host2"):
        drained = head.run(*EVERSTEP, "drain", str(job.run_dir), "--host", name)
        assert drained.returncode == 0, drained.stderr
        plan = job.wait_for("generation_started", lambda e, n=name, g=plan["generation"]: left(e, g, where, n))
    on_hosts.check(job)
    assert job.of_kind("worker_evicted") == [] and job.of_kind("recovery_completed") == []
    assert [agent.wait(60) for agent in agents] == [0, 0]


@pytest.mark.longer
def test_each_byte_crosses_once_per_host(net: Net, tmp_path: Path) -> None:
    """Three hosts of two workers; in units of the gradient, by the kernel's counters of each host's interface. Most
    blocks leave before the reduction."""
    measured = {}
    for kind in ("sockets", "auto"):
        logs = [tmp_path / f"{kind}{host.number}.log" for host in net.hosts]
        running = []
        for host, log in zip(net.hosts, logs, strict=True):
            command = [sys.executable, str(REDUCING), str(host.number), "3", host.address, kind, "2", "18"]
            running.append(host.start(command, log))
        assert [process.wait(LIMIT_S) for process in running] == [0, 0, 0], [log.read_text() for log in logs]
        said = [json.loads(line) for log in logs for line in log.read_text().splitlines() if line.startswith("{")]
        assert len(said) == 6 and all(one["equal"] for one in said), said
        by_host = [said[k]["out"] for k in (0, 2, 4)]
        assert all(abs(one["out"] - by_host[k // 2]) < 0.05 for k, one in enumerate(said)), said
        measured[kind] = by_host
    # Runs of 1, 1, 2, 1, 1, 2 lanes: of its lanes a host has 1, 2 and 2 sums, of which two thirds go elsewhere, and a
    # third of the result goes to two others. With sockets alone each worker sends its own sums, and its result to all;
    # but for the padding.
    for sent, most in zip(measured["auto"], [4 / 3, 2, 2], strict=True):
        assert 0.9 * most < sent < 1.05 * most, measured
    assert all(0.9 * 8 / 3 < sent < 1.05 * 8 / 3 for sent in measured["sockets"]), measured
