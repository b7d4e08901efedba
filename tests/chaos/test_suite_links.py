"""Links that are cut and mended: who is away too long is fenced, returns as a new life, and the bits are the same."""

from __future__ import annotations

import pytest

from job_harness import Jobs, healed

STEPS = {"steps": 30}
LIMITS = {"heartbeat.interval_s": 0.1, "heartbeat.floor_s": 0.5, "heartbeat.ceiling_s": 1}


@pytest.mark.longer
@pytest.mark.parametrize("transport", ["auto", "sockets"])
def test_cut_off_from_everybody(jobs: Jobs, transport: str) -> None:
    chaos = "partition:target=leader:0,at=5,for=2,from=peers"
    settings = {**LIMITS, "transport": transport}
    job = jobs.run("Text", chaos=chaos, settings=settings, numerics=STEPS, pace=[healed(0)])
    evicted = job.of_kind("worker_evicted")
    assert [(e["worker_id"], e["incarnation"]) for e in evicted] == [(0, 0)]
    assert "seen nothing of it" in evicted[0]["reason"] and evicted[0]["cause"] == "silent"
    away = job.of_kind("fault_injected")[0]["time_unix_ns"]
    back = [e for e in job.of_kind("worker_joined") if (e["worker_id"], e["incarnation"]) == (0, 1)]
    assert back[0]["time_unix_ns"] - away >= 2e9, "it could not come back before"


@pytest.mark.longer
def test_a_short_partition_and_a_lost_connection_cost_nothing(jobs: Jobs) -> None:
    chaos = "partition:target=worker:1,at=5,for=0.3; disconnect:target=worker:2,at=8,for=0.5"
    job = jobs.run("Text", chaos=chaos, settings=LIMITS, numerics=STEPS, pace=[{"kind": "fault_injected", "count": 2}])
    assert job.of_kind("worker_evicted") == []
    assert len(job.of_kind("generation_started")) == 1


@pytest.mark.longer
def test_a_death_while_somebody_cannot_hear_of_it(jobs: Jobs) -> None:
    """The new plan waits in vain for the one who is cut off; it is given up, and comes back too."""
    chaos = "disconnect:target=worker:1,at=5,for=3; kill:target=worker:2,at=6,phase=reduce"
    job = jobs.run("Text", workers=4, chaos=chaos, settings=LIMITS, numerics=STEPS, pace=[healed(2)])
    assert 2 in {e["worker_id"] for e in job.of_kind("worker_evicted")}
