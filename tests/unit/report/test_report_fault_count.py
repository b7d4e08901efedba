"""What follows from an injected fault is the same fault, for a minute, once."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.report.fault_count import FaultCount, struck_by
from told_events import KILLED, event


@pytest.mark.parametrize(
    ("target", "victim"),
    [
        ({"worker_id": 0}, "worker 0"),
        ({"target": "host:a"}, "host a"),
        ({"target": "host:fd00::1"}, "host fd00::1"),
        ({"target": "link:a~b:1"}, "link a~b:1"),
        ({"target": "coordinator"}, "coordinator"),
        ({}, "coordinator"),
    ],
)
def test_who_was_struck(target: dict[str, Any], victim: str) -> None:
    assert struck_by(event("fault_injected", 1, **target)) == victim


def number(*events: dict[str, Any]) -> int:
    count = FaultCount()
    for one in events:
        count.take(one, one["time_unix_ns"], again=False)
    return count.number


@pytest.mark.parametrize(("after_s", "faults"), [(59.9, 1), (60.0, 2)])
def test_what_follows_within_a_minute_is_no_other_fault(after_s: float, faults: int) -> None:
    lost = {"worker_id": 1, **KILLED}
    for target in ({"worker_id": 1}, {"target": "host:a"}):
        assert number(event("fault_injected", 5, **target), event("worker_evicted", 5 + after_s, **lost)) == faults
    silent = event("fault_injected", 5, target="coordinator")
    assert number(silent, event("coordinator_restarted", 5 + after_s)) == faults


def test_a_fault_is_followed_once() -> None:
    struck, lost = event("fault_injected", 5, worker_id=1), {"worker_id": 1, **KILLED}
    assert number(struck, event("worker_evicted", 6, **lost), event("worker_evicted", 7, **lost)) == 2
    killed, again = event("coordinator_killed", 5), event("coordinator_restarted", 6)
    assert number(killed, again) == 1 and number(killed, again, again) == 2
    assert number(event("worker_evicted", 5, worker_id=1, cause="drained")) == 0
