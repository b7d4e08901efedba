"""Intervals between checkpoints: that of jobs, Young's and Daly's."""

from __future__ import annotations

import math

import pytest

from everstep.cost.save_interval import automatic_interval, daly_s, young_s


def test_young_and_daly() -> None:
    assert young_s(0.5, 3600.0) == 60
    assert daly_s(60.0, 6 * 3600.0) == pytest.approx(1570.2174, abs=1e-3)
    assert daly_s(60.0, 30.0) == 30 and daly_s(60.0, 29.0) == 29


def test_daly_is_near_the_best_of_his_own_expected_time() -> None:
    """The expected time per useful second, (M / t) exp(R / M) (exp((t + c) / M) - 1), has its minimum there."""
    cost, between = 60.0, 3600.0

    def lost(interval: float) -> float:
        return math.expm1((interval + cost) / between) / interval

    best = min(range(60, 3600), key=lost)
    assert daly_s(cost, between) == pytest.approx(best, rel=0.01)
    assert abs(daly_s(cost, between) - best) < abs(young_s(cost, between) - best)


@pytest.mark.parametrize(
    ("cost_s", "mtbf_s", "seconds"),
    [
        (0.5, 3600.0, math.sqrt(2 * 0.5 * 3600) - 0.5),
        (0.01, 3600.0, 10.0),  # not more often than that
        (20.0, 1e6, 3600.0),  # nor more seldom
        (5.0, 600.0, 250.0),  # but never above 2 % of the time
        (120.0, 60.0, 6000.0),
    ],
)
def test_the_automatic_interval(cost_s: float, mtbf_s: float, seconds: float) -> None:
    found = automatic_interval(cost_s, 0, 0.0, mtbf_s)
    assert found.seconds == pytest.approx(seconds)
    assert f"every {seconds:.0f} s" in found.reason and "as configured" in found.reason


def test_the_automatic_interval_follows_what_is_seen() -> None:
    assert "until the cost" in automatic_interval(None, 0, 0.0, None).reason
    calm = automatic_interval(1.0, 0, 3600.0, None)
    rough = automatic_interval(1.0, 20, 3600.0, None)
    assert rough.seconds < calm.seconds
    assert "20 seen in 60 min" in rough.reason


def test_before_any_failure_one_in_four_hours_is_assumed() -> None:
    found = automatic_interval(0.5, 0, 0.0, None)
    assert found.seconds == pytest.approx(math.sqrt(2 * 0.5 * 4 * 3600) - 0.5)
    assert "a failure comes every 240 min (0 seen in 0 min)" in found.reason
