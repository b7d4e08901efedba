"""Workers on several hosts that divide the optimizer's state, and their gradients, among them."""

from __future__ import annotations

from typing import Any

import pytest
from hosts_harness import HostJobs

from job_harness import Event

STEPS = 14
FULL: Event = {"kind": "generation_started", "workers": list(range(4)), "lane_s": 0.5}
BACK: Event = {"kind": "worker_joined", "count": 6}


@pytest.mark.longer
@pytest.mark.parametrize("settings", [{"zero.stage": 1}, {"zero.stage": 2}, {"zero.stage": 2, "zero.copies": 1}])
def test_a_host_that_is_lost_comes_back(on_hosts: HostJobs, settings: dict[str, Any]) -> None:
    """The second copy of each part is on the other host, so nothing is lost; with one, all go back."""
    more = {**settings, "hosts.min": 2, "checkpoint.disk.every_steps": 3}
    job = on_hosts.head(workers=4, steps=STEPS, until=[FULL, BACK], settings=more, task="Wide")
    agent = on_hosts.agent(2)
    job.wait_for("step_committed", step=5)
    on_hosts.net.hosts[1].kill()
    agent.wait()
    job.wait_for("worker_evicted")
    on_hosts.agent(2)
    on_hosts.check(job)
    assert bool(job.of_kind("fallback")) == ("zero.copies" in settings), job.account()
