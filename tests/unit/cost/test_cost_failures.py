"""How often jobs fail: the usual scenarios, the published counts and times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.cost.failures import (
    LLAMA3,
    OBSERVED,
    PROJECTED,
    SCENARIOS,
    TIMES_TO_FAILURE,
    forecast,
)


@pytest.mark.parametrize(
    ("scenario", "expected", "probability"),
    [
        *zip(
            SCENARIOS,
            (0.00192, 0.10752, 1.8432, 22.1184),
            (0.001918158, 0.101941, 0.841691, 1 - 2.4782e-10),
            strict=True,
        )
    ],
)
def test_the_usual_scenarios(scenario: tuple[str, int, float], expected: float, probability: float) -> None:
    found = forecast(scenario[1], scenario[2])
    assert found.expected == pytest.approx(expected) and found.probability == pytest.approx(probability, rel=1e-5)
    assert found.lecture == found.probability * scenario[1]


def test_the_scenarios_are_the_usual_ones() -> None:
    assert [(one.nodes, one.hours) for one in SCENARIOS] == [(8, 24), (64, 168), (256, 720), (1024, 2160)]


def test_the_time_between_failures_of_a_job() -> None:
    assert forecast(64, 1.0, 100_000.0).mtbf_s == 100_000 * 3600 / 64
    assert forecast(64, 1.0, 50.0).expected == 64 / 50


def test_a_small_probability_keeps_its_digits() -> None:
    assert forecast(1, 1e-9, 1e6).probability == pytest.approx(1e-15, rel=1e-12)


def test_the_counts_of_llama_3() -> None:
    assert (len(LLAMA3.counts), LLAMA3.total) == (18, 419)
    assert LLAMA3.counts["Faulty GPU"] == 148 and LLAMA3.counts["Network Switch/Cable"] == 35
    assert LLAMA3.mttf_s(16384) == pytest.approx(54 * 86400 / 419)
    assert LLAMA3.mttf_s(8192) == 2 * LLAMA3.mttf_s(16384)
    assert LLAMA3.shares == (69 / 419, 262 / 419, 88 / 419) and sum(LLAMA3.shares) == pytest.approx(1)


@pytest.mark.parametrize(("which", "within"), [(0, 0.065), (1, 0.065), (2, 0.01), (3, 0.04)])
def test_times_to_failure_by_size_go_by_two_rates(which: int, within: float) -> None:
    one = TIMES_TO_FAILURE[which]
    assert one.rate.mttf_s(one.gpus) / 3600 == pytest.approx(one.hours, rel=within)


def test_the_larger_jobs_rate_does_not_give_what_was_observed() -> None:
    assert PROJECTED.mttf_s(1024) / 3600 == pytest.approx(28.8, abs=0.1) and OBSERVED.per_day > 3 * PROJECTED.per_day


@given(st.integers(1, 10**6), st.floats(1e-3, 1e5), st.floats(1, 1e7))
def test_more_nodes_hours_and_worse_ones_fail_more(nodes: int, hours: float, mtbf_h: float) -> None:
    base = forecast(nodes, hours, mtbf_h)
    for more in (
        forecast(2 * nodes, hours, mtbf_h),
        forecast(nodes, 2 * hours, mtbf_h),
        forecast(nodes, hours, mtbf_h / 2),
    ):
        assert more.expected == pytest.approx(2 * base.expected) and base.probability <= more.probability <= 1
    assert base.probability <= base.expected
