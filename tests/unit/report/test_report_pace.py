"""When a step stands still, and when slow steps are the speed."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from everstep.report.pace import Pace


def late(seconds: list[float]) -> list[bool]:
    """Whether each of these steps, one after another, stood still."""
    pace, now_s, found = Pace(), 0.0, []
    pace.begin(0)
    for step, passed_s in enumerate(seconds, 1):
        found.append(pace.was_late(passed_s))
        now_s += passed_s
        pace.commit(round(1e9 * now_s), step, 8, clean=True)
    return found


def test_slow_steps_in_a_row_are_the_speed_and_single_ones_are_not() -> None:
    usual = [0.3] * 40
    assert not any(late(usual))
    lasting = late([*usual, *[3.0] * 20, 13.0])[40:]
    assert lasting == [True] * 3 + [False] * 17 + [True], "the median alone would know after 16 of them"
    assert sum(late([*usual, *([3.0, 0.3] * 8)])) == 8
    assert late([*usual, 3.0, 3.0, 3.0, 0.3, 3.0])[-1], "it is fast again"


@given(st.lists(st.integers(0, 5), max_size=8), st.none() | st.integers(0, 5))
def test_whatever_times_are_told_rates_are_positive_or_unknown(times: list[int], overdue: int | None) -> None:
    """Hosts have clocks of their own, and some are told late."""
    pace = Pace()
    for step, time_ns in enumerate(times, 1):
        pace.commit(time_ns, step, 8, clean=True)
    rates = [pace.samples_per_s(overdue), pace.samples_per_s(), pace.eta_s(len(times), 100), pace.usual_s]
    assert all(rate is None or rate > 0 for rate in rates)
