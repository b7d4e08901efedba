"""When a step stands still, and when slow steps are the speed."""

from __future__ import annotations

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
