"""What a worker spends between two samples, and where that is told."""

from __future__ import annotations

from pathlib import Path

import pytest

import recorded_run as recorded
from everstep.report.history import History
from everstep.report.spent import spent_between
from everstep.report.usage import Usage


def test_a_workers_time_and_bytes_per_step() -> None:
    old = {"step": 3, "seconds": {"forward": 1.0, "reduce": 0.5, "stall": 9.0}, "bytes": {"reduce": 100}}
    new = {"step": 7, "seconds": {"forward": 2.0, "reduce": 0.7, "agree": 0.2, "stall": 9.5}, "bytes": {"reduce": 500}}
    found = spent_between(old, new, 2.0)
    assert (found.step_s, found.communication_s) == (0.5, pytest.approx(0.1))
    assert (found.busy, found.bytes_per_s) == (0.5, {"reduce": 200.0})
    still = spent_between(new, new, 2.0)
    assert (still.step_s, still.communication_s, still.busy, still.bytes_per_s) == (None, None, 0.0, {"reduce": 0.0})
    odd = spent_between({}, {"step": "x", "seconds": [1], "bytes": {"a": "b"}}, 1.0)
    assert (odd.step_s, odd.busy, odd.bytes_per_s) == (None, 0.0, {"a": 0.0})


def test_usage_keeps_it_for_each_worker(tmp_path: Path) -> None:
    run_dir = recorded.make_run(tmp_path / "run")
    usage = History(run_dir).load().usage
    spent = usage.workers[0].spent
    assert spent is not None and spent.bytes_per_s.keys() == {"reduce"}


def test_another_life_begins_anew() -> None:
    usage = Usage()
    for at_s, incarnation in ((1, 0), (2, 0), (3, 1)):
        row = {"worker_id": 4, "incarnation": incarnation, "step": at_s, "seconds": {"forward": at_s / 2}}
        usage.take({"t": at_s * 10**9, "host": "h", "workers": [row]})
        spent = usage.workers[4].spent
        assert (spent is None) == (at_s != 2)
