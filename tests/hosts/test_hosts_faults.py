"""A job on three hosts of two workers each, under every fault that a host or a link between hosts can have.

Most of them only where time is (EVERSTEP_TEST_HOSTS=all).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts_harness import STEPS, HostJobs, gap_s, now_ns

from job_harness import Event, Job

EVICTED: list[Event] = [{"kind": "worker_evicted", "count": 2}]
BACK: list[Event] = [
    {"kind": "worker_joined", "count": 8},
    {"kind": "generation_started", "workers": list(range(6)), "count": 2},
]
AGAIN: list[Event] = [{"kind": "generation_started", "workers": list(range(6)), "count": 3}]
FULL: Event = {"kind": "generation_started", "workers": list(range(6)), "lane_s": 0.5}
MANY = 400


def running(on_hosts: HostJobs, until: list[Event], steps: int = STEPS) -> Job:
    """Six members on three hosts have computed some steps; the agents came in another order than their numbers. Before
    all are members a step takes seconds, so that the first cannot do them all."""
    job = on_hosts.head(until=[FULL, *until], steps=steps)
    on_hosts.agent(3)
    on_hosts.agent(2)
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 6)
    job.wait_for("step_committed", lambda e: e["step"] >= 5)
    where = [e["host"] for e in job.of_kind("worker_joined")]
    assert sorted(where) == ["10.77.0.1"] * 2 + ["host2"] * 2 + ["host3"] * 2
    return job


def evicted(job: Job) -> dict[str, set[str]]:
    """Causes of evictions by host."""
    where = {(e["worker_id"], e["incarnation"]): e["host"] for e in job.of_kind("worker_joined")}
    found: dict[str, set[str]] = {}
    for event in job.of_kind("worker_evicted"):
        found.setdefault(where[event["worker_id"], event["incarnation"]], set()).add(event["cause"])
    return found


@pytest.mark.parametrize(
    "how", ["kill", pytest.param("crash", marks=pytest.mark.longer), pytest.param("cut", marks=pytest.mark.longer)]
)
def test_a_host_is_lost(on_hosts: HostJobs, how: str) -> None:
    job = running(on_hosts, EVICTED)
    host = on_hosts.net.hosts[2]
    struck_ns = now_ns()
    getattr(host, how)()
    plan = job.wait_for("generation_started", lambda e: e["time_unix_ns"] > struck_ns)
    assert len(plan["workers"]) == 4, "the first generation after it is without the dead"
    on_hosts.check(job)
    assert evicted(job) == {host.name: {"host_lost"}}
    least_s = 0.0 if how == "kill" else 1.5  # the kernel of one that was killed says so; of others nothing is heard
    noticed_s = (plan["time_unix_ns"] - struck_ns) / 1e9
    assert least_s < noticed_s < least_s + 5.5, f"{noticed_s:.2f} s\n{job.account()}"
    assert gap_s(job, struck_ns) < least_s + 10.0


@pytest.mark.longer
@pytest.mark.parametrize("workers", [4, 5])
def test_who_dies_while_sums_of_its_host_leave_is_replaced(on_hosts: HostJobs, tmp_path: Path, workers: int) -> None:
    """Two members on a host, or one: what the dead sent for its host counts for nothing."""
    struck = tmp_path / "struck"
    healed: list[Event] = [{"kind": "worker_healed", "count": 2}]
    job = on_hosts.head(
        until=healed,
        steps=20,
        workers=workers,
        settings={"hosts.min": workers // 2 + workers % 2},
        task="PicturesStruck",
        environment={"EVERSTEP_TEST_STRIKE": f"{struck} 4 9"},
    )
    for number in range(2, workers // 2 + workers % 2 + 1):
        on_hosts.agent(number)
    on_hosts.check(job)
    assert [(tmp_path / f"struck-{step}").exists() for step in (4, 9)] == [True, True]
    assert len(job.of_kind("worker_evicted")) == 2, job.account()


@pytest.mark.longer
@pytest.mark.parametrize("both", [True, False], ids=["both ways", "one way"])
def test_two_hosts_do_not_reach_each_other(on_hosts: HostJobs, both: bool) -> None:
    """Each of them is heard by the head. One of them has to stay outside until it reaches the other again."""
    job = running(on_hosts, AGAIN, MANY)
    _, second, third = on_hosts.net.hosts
    struck_ns = now_ns()
    third.drop_to(second)
    if both:
        second.drop_to(third)
    gone = job.wait_for("worker_evicted")
    job.wait_for("step_committed", lambda e: e["time_unix_ns"] > gone["time_unix_ns"])
    third.undrop_to(second)
    if both:
        second.undrop_to(third)
    again = job.wait_for(
        "generation_started", lambda e: e["time_unix_ns"] > gone["time_unix_ns"] and len(e["workers"]) == 6
    )
    on_hosts.check(job)
    assert all("link" in causes for causes in evicted(job).values()), evicted(job)
    assert again["generation"] <= 8
    print(f"longest gap {gap_s(job, struck_ns):.2f} s")


@pytest.mark.longer
def test_what_the_head_sends_to_a_host_is_lost(on_hosts: HostJobs) -> None:
    job = running(on_hosts, EVICTED)
    head, _, third = on_hosts.net.hosts
    head.drop_to(third)
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    on_hosts.check(job)
    assert set(evicted(job)) == {"host3"}


@pytest.mark.longer
def test_a_host_that_was_cut_off_is_back(on_hosts: HostJobs) -> None:
    job = running(on_hosts, BACK, MANY)
    host = on_hosts.net.hosts[2]
    host.cut()
    gone = job.wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    host.heal()
    job.wait_for("generation_started", lambda e: e["generation"] > gone["generation"] and len(e["workers"]) == 6)
    on_hosts.check(job)
    lives = sorted((e["worker_id"], e["incarnation"]) for e in job.of_kind("worker_joined") if e["host"] == "host3")
    assert [incarnation for _, incarnation in lives] == [0, 1, 0, 1], "no life was wasted"


@pytest.mark.longer
def test_a_host_that_died_is_started_again(on_hosts: HostJobs) -> None:
    job = running(on_hosts, BACK, MANY)
    on_hosts.net.hosts[2].kill()
    gone = job.wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    on_hosts.agent(3)
    job.wait_for("generation_started", lambda e: e["generation"] > gone["generation"] and len(e["workers"]) == 6)
    on_hosts.check(job)
    lives = sorted((e["worker_id"], e["incarnation"]) for e in job.of_kind("worker_joined") if e["host"] == "host3")
    assert [incarnation for _, incarnation in lives] == [0, 1, 0, 1], "no life was wasted"
