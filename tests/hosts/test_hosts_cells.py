"""Workers of several processes on several hosts, each worker inside one of them: the same bits whatever is lost."""

from __future__ import annotations

import pytest
from hosts_harness import HostJobs

from job_harness import Event

HOST3: list[Event] = [{"kind": "worker_joined", "host": "host3", "count": 1}]
SHRUNK: list[Event] = [{"kind": "cell_shrunk", "count": 2}]


def test_a_model_of_which_each_host_holds_a_stage_outlives_a_limb_and_a_host(on_hosts: HostJobs) -> None:
    """Two stages, a cell of two processes each. What the lost host held comes from a copy, and another host takes its
    place."""
    settings = {"cell.fsdp": 2, "stages": 2, "hosts.min": 2}
    chaos = "kill:target=worker:1/1,at=5,phase=backward"
    job = on_hosts.head("--slots", "1", "--chaos", chaos, workers=2, settings=settings, until=HOST3)
    on_hosts.agent(2, "--slots", "1")
    first = job.wait_for("worker_evicted")
    assert first["reason"] == "its rank 1 was killed by SIGKILL", job.account()
    again = job.wait_for("worker_joined", lambda e: e["worker_id"] == 1 and e["incarnation"] == 1)
    assert len(again["pids"]) == 2 and again["host"] == "host2"
    on_hosts.net.hosts[1].kill()
    on_hosts.agent(3, "--slots", "1")
    on_hosts.check(job)
    lost = job.of_kind("worker_evicted")[1:]
    assert {e["cause"] for e in lost} <= {"host_lost", "link", "silent"}, job.account()


@pytest.mark.longer
def test_a_cell_that_its_host_cannot_keep_goes_on_smaller_beside_a_whole_one(on_hosts: HostJobs) -> None:
    settings = {"cell.tp": 4, "cell.shards": 4, "max_restarts": 0, "hosts.min": 2}
    chaos = "kill:target=worker:1/1,at=4,phase=forward; kill:target=worker:1/1,at=9,phase=backward"
    options = ("--slots", "1", "--chaos", chaos)
    job = on_hosts.head(*options, workers=2, task="Sharded", until=SHRUNK, settings=settings)
    on_hosts.agent(2, "--slots", "1")
    on_hosts.jobs.check(job, "Sharded", {"steps": 40, "cell.shards": 4})
    assert [e["ranks"] for e in job.of_kind("cell_shrunk")] == [2, 1], job.account()
    sizes = [len(e.get("pids", [0])) for e in job.of_kind("worker_joined") if e["host"] == "host2"]
    assert sizes == [4, 2, 1], job.account()
