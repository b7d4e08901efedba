"""The account of wall time beside one that looks at each second by itself; curves beside all of their points; tallies
of times beside the times."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from everstep.base.cause import Cause
from everstep.report import wall_time
from everstep.report.facts import facts_of
from everstep.report.series import Series
from everstep.report.svg import ticks
from everstep.report.tally import NO_CHECKPOINT, TIERS, Histogram, Tally
from everstep.report.wall_time import PHASES, USES, Stretch, TimeAccount, goodput, recovery_phases
from told_events import T0, S, commit, event, trained

PAINTED = [use for use in USES if use != "training"]
STEP = st.tuples(st.integers(1, 2), st.integers(0, 3), st.sampled_from([*PAINTED, "clock"]), st.floats(0, 1))


@given(st.lists(STEP, max_size=40), st.sampled_from([4, 12, 1000]), st.integers(0, 3))
def test_each_second_is_spent_on_the_most_specific_use(
    steps: list[tuple[int, int, str, float]], most: int, ahead: int
) -> None:
    """Whether old intervals are added up soon or never, and where a clock was set back before."""
    account, at, stretches = TimeAccount(), 100, list[Stretch]()
    account.reach(90 * S)
    if ahead:
        account.reach((at + ahead) * S)
        account.clock_set_back(at * S)  # from here on, each second has a smaller number than it ought to
    shares = {0: 1.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wall_time, "_MOST_INTERVALS", most)
        for on, length, use, share in steps:
            at += on
            account.reach((at + length) * S)
            account.paint(at * S, (at + length) * S, use)
            account.capacity(at * S, share)
            stretches.append(Stretch(at + ahead, at + ahead + length, use))
            shares[at + ahead] = share
        more = Stretch((at + 1) * S, (at + 3) * S, "evaluation")
        end = max([100 if ahead else 90, *(one.end_ns - ahead for one in stretches)]) + ahead
        found, capacity_s = account.seconds([more]), account.by_capacity_s([more])
    stretches.append(Stretch(at + 1 + ahead, at + 3 + ahead, "evaluation"))
    spent: dict[str, int] = {}
    trained = 0.0
    for second in range(90, end):
        here = [one for one in stretches if one.begin_ns <= second < one.end_ns]
        use = max(here, key=lambda one: (one.priority, one.use)).use if here else "training"
        spent[use] = spent.get(use, 0) + 1
        if use == "training":
            trained += shares[max(time for time in shares if time <= second)]
    assert found == {use: float(spent[use]) for use in USES if use in spent}
    assert capacity_s == pytest.approx(trained, abs=1e-6)
    running = sum(s for use, s in found.items() if use != "not running")
    assert goodput(found) == (found.get("training", 0.0) / running if running else None)


@given(st.integers(0, 9), st.none() | st.integers(0, 12), st.booleans(), st.sampled_from(["completed", "failed", ""]))
def test_after_its_last_step_a_job_trains_no_more(steps: int, stop: int | None, evaluates: bool, end: str) -> None:
    """Each quarter of a second from then on: until the command to stop, or if it failed, it computed another step."""
    last_s = 5.7 + 0.25 * steps
    events = [*trained(), *(commit(11 + n, 5.95 + 0.25 * n) for n in range(steps))]
    end_s = max(last_s, 5.7 + 0.25 * (stop or 0)) + 1.0
    if stop is not None:
        events.append(event("commanded", 5.7 + 0.25 * stop, command="stop", cause="commanded", reason="stop"))
    if evaluates:
        events.append(event("evaluated", last_s + 0.25, step=10 + steps, metrics={"accuracy": 0.5}))
    last = event(f"job_{end}" if end else "warning", end_s, step=10 + steps, state=end, cause="clock")
    facts = facts_of([*sorted(events, key=lambda one: one["time_unix_ns"]), last])
    seconds = facts.account.seconds()
    assert sum(seconds.values()) == pytest.approx(end_s)
    quarters = [n * 0.25 for n in range(round(4 * (end_s - last_s)))]
    since_s = 0.0 if stop is None and end == "completed" else 0.25 * ((stop or 0) - steps)
    uses = ["evaluation" if evaluates and at_s < 0.25 else "finishing" if at_s >= since_s else "" for at_s in quarters]
    assert seconds.get("evaluation", 0.0) == pytest.approx(0.25 * uses.count("evaluation"))
    over = end == "completed" or (end == "failed" and stop is not None)
    assert seconds.get("finishing", 0.0) == pytest.approx(0.25 * uses.count("finishing") if over else 0.0)


@given(st.lists(st.integers(1, 3), max_size=12), st.integers(0, 100))
def test_a_step_that_takes_no_longer_than_steps_may_is_no_lost_time(lengths: list[int], share: int) -> None:
    """At no moment; and one that takes much longer has been lost from the moment on at which it was due."""
    events, at_s = trained(), 5.7
    for n, length in enumerate(lengths):  # steps of 0.3 to 0.9 s, where they have taken 0.3 s
        at_s += 0.3 * length
        events.append(commit(11 + n, at_s))
    facts = facts_of(events)
    assert facts.under_way(T0 + round((at_s + 0.9 * share / 100) * S)) == []
    usual_s = facts.course.pace.usual_s or 0.0
    late_ns = T0 + round((at_s + facts.course.pace.limit_s() + 0.01) * S)
    assert facts.under_way(late_ns, goes_on=True) == []
    [stretch] = facts.under_way(late_ns)
    assert (stretch.end_ns, stretch.use) == (late_ns, "stalled")
    assert (stretch.begin_ns - T0) / S == pytest.approx(at_s + usual_s, abs=1e-6)


@given(st.dictionaries(st.sampled_from(PHASES), st.floats(-1, 20)), st.integers(0, 30))
def test_phases_of_a_recovery_fill_it_and_no_more(phases: dict[str, float], seconds: int) -> None:
    found = recovery_phases(100 * S, float(seconds), phases)
    assert all(one.end_ns == other.begin_ns for one, other in pairwise(found))
    spent = {one.use.removeprefix("recovery: "): (one.end_ns - one.begin_ns) / S for one in found}
    told = {phase: phases[phase] for phase in PHASES if phases.get(phase, 0.0) > 0}
    total = sum(told.values())
    scale = min(1.0, seconds / total) if total else 0.0
    expected = {phase: share * scale for phase, share in told.items()} | {"other": max(0.0, seconds - total)}
    for phase in {*spent, *expected}:
        assert spent.get(phase, 0.0) == pytest.approx(expected.get(phase, 0.0), abs=2e-6)
    assert not found or (found[0].begin_ns >= (100 - seconds) * S and found[-1].end_ns <= 100 * S)
    assert [use for use in (*PHASES, "other") if use in spent] == list(spent)


VALUE = st.integers(-9, 9).map(float) | st.none()


@given(st.lists(st.lists(VALUE, min_size=5, max_size=5), max_size=60), st.integers(1, 9))
def test_a_curve_of_few_points_says_of_all_what_its_rules_say(rows: list[list[float | None]], points: int) -> None:
    rules = ("last", "sum", "mean", "min", "max")
    series = Series(rules, points)
    for x, row in enumerate(rows):
        before, length, known = series.version, len(series), series.since(series.version, len(series))
        series.add(x, row)
        news = series.since(before, length)
        assert news is not None and news["x"][-1] == x and news["version"] == series.version
        start = news["start"]
        assert start == (max(0, length - 1) if series.version == before else 0)
        if known is not None and series.version == before:  # all but the newest point are as they were
            assert series.x[: length - 1] == [*series.x[: known["start"]]]
    assert len(series) <= max(4, points) and series.x == sorted(set(series.x))
    assert not rows or series.x[-1] == len(rows) - 1
    ends = [0, *(int(x) + 1 for x in series.x)]
    for first, stop, *merged in zip(ends, ends[1:], *series.columns, strict=False):
        for value, rule, column in zip(merged, rules, zip(*rows[first:stop], strict=True), strict=True):
            there = [one for one in column if one is not None]
            if not there:
                assert math.isnan(value)
            elif rule == "last":
                assert value == there[-1]
            elif rule == "mean":
                assert min(there) <= value <= max(there)  # gaps count as what was there
                assert len(there) < len(column) or value == pytest.approx(sum(there) / len(there))
            else:
                assert value == {"sum": sum, "min": min, "max": max}[rule](there)
    assert series.at(len(rows)) is None and (not rows or series.at(0) == 0)


@given(st.lists(st.integers(0, 20)), st.integers(4, 8))
def test_what_is_repeated_replaces_what_came_after(steps: list[int], points: int) -> None:
    series, plain = Series(("last",), points), dict[int, float]()
    for n, x in enumerate(steps):
        series.add(x, [float(n)])
        plain = {k: v for k, v in plain.items() if k < x} | {x: float(n)}
        assert series.x[-1] == x and series.columns[0][-1] == n
        assert all(a < b for a, b in pairwise(series.x)) and len(series) <= points
        assert all(
            plain[int(at)] == value for at, value in zip(series.x, series.columns[0], strict=True) if at in plain
        )


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 3))))
def test_a_tally_of_times_counts_each_below_all_bounds_that_it_does_not_exceed(values: list[tuple[float, int]]) -> None:
    bounds, tally = (0.5, 1.0, 50.0), Histogram((0.5, 1.0, 50.0))
    for value, times in values:
        tally.add(value, times)
    all_of_them = [value for value, times in values for _ in range(times)]
    expected = [(bound, sum(value <= bound for value in all_of_them)) for bound in (*bounds, math.inf)]
    assert list(tally.cumulative()) == expected
    assert tally.sum == pytest.approx(sum(all_of_them), abs=1e-6)


@given(st.floats(), st.floats(), st.integers(0, 12))
@example(0.0, 5e-324, 2)
@example(-1.7e308, 1.7e308, 2)
def test_ticks_are_round_few_and_inside(low: float, high: float, about: int) -> None:
    found = ticks(low, high, about)
    if not math.isfinite(low):
        assert found == []
    elif not math.isfinite(high) or high <= low:
        assert found == [low]
    elif 1e-300 < high - low < 1e300 and max(abs(low), abs(high)) < 1e9 * (high - low):
        width = (high - low) * 1e-5
        assert all(low - width <= one <= high + width for one in found) and found == sorted(set(found))
        assert about // 3 <= len(found) <= max(1, about) + 1
        apart = [other - one for one, other in pairwise(found)]
        assert all(one == pytest.approx(apart[0], rel=1e-3) for one in apart)


def test_a_series_that_begins_at_zero_is_one_that_some_event_counts() -> None:
    """Of each cause and tier; and each event counts once, among the failures or among what was skipped."""
    begun, counted = Tally(), set[tuple[str, Cause]]()
    for why in Cause:
        for tier in TIERS:
            tally = Tally()
            tally.take(event("checkpoint_failed", 1, tier=tier, cause=why, step=3))
            failed, skipped = (
                {key for key, count in counts.items() if count == 1}
                for counts in (tally.checkpoint_failures, tally.checkpoints_skipped)
            )
            assert failed | skipped == {(tier, why)} and not failed & skipped
            counted |= skipped
            tally.take(event("checkpoint_skipped", 1, tier=tier, cause=why, step=3))
            assert sum(tally.checkpoints_skipped.values()) == 1 + bool(skipped)
    assert set(begun.checkpoints_skipped) == counted
    assert set(begun.checkpoint_failures) == {(tier, why) for tier in TIERS for why in NO_CHECKPOINT}
    assert set(begun.recoveries) == {why for why in Cause if why.is_fault}
