"""A silent process counts as dead by what it could have done, not by the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from everstep.protocol.patience import PING_S, Figures, Patience, Vitals, waited_s

Figured = Callable[[float], Figures | None]


def asleep(t: float) -> Figures:
    """Deadlocked."""
    return Figures()


def stopped(t: float) -> Figures:
    return Figures("T")


def starved(t: float) -> Figures:
    """It is ready, and gets no processor; the kernel adds that only when it gets one."""
    return Figures("R")


def crowded(t: float) -> Figures:
    """It gets a fiftieth of a processor, and waits for it."""
    return Figures("R", ran_s=t / 50, waited_s=t * 49 / 50, spent_s=t / 50)


def spinning(t: float) -> Figures:
    return Figures("R", ran_s=t, spent_s=t)


def throttled(t: float) -> Figures:
    return Figures("S", ran_s=t / 20, throttled_s=t * 19 / 20, spent_s=t / 20)


def asleep_while_others_are_throttled(t: float) -> Figures:
    return Figures("S", throttled_s=2 * t)


def reading(t: float) -> Figures:
    """From a slow disk."""
    return Figures("S", read_bytes=int(t) * 4096)


def unknown(t: float) -> None:
    return None


def found_after(patience: Patience, figured: Figured, most_s: float, begin_s: float = 0.0) -> float | None:
    """When it is found to be dead; None: not in this time."""
    for n in range(1, int(most_s / PING_S) + 1):
        assert patience.ask(begin_s + n * PING_S, figured(begin_s + n * PING_S))
        if patience.too_long():
            return n * PING_S
    return None


@pytest.mark.parametrize(
    ("figured", "found_s"),
    [
        (asleep, 5.25),
        (stopped, 5.25),
        (spinning, 5.25),
        (asleep_while_others_are_throttled, 5.25),
        (unknown, 5.25),
        (starved, None),
        (crowded, 5 * 50 + 0.5),
        (throttled, 5 * 20 + 0.5),
    ],
)
def test_who_answered_once_and_falls_silent(figured: Figured, found_s: float | None) -> None:
    patience = Patience(5.0, spoke=True)
    found = found_after(patience, figured, 600.0)
    assert found == (None if found_s is None else pytest.approx(found_s, abs=PING_S))


@pytest.mark.parametrize(
    ("figured", "found_s"),
    [(stopped, 5.25), (asleep, 60.0), (spinning, 600.0), (reading, 600.0), (unknown, 600.0)],
)
def test_before_the_first_word_only_one_that_does_nothing_is_found_soon(figured: Figured, found_s: float) -> None:
    assert found_after(Patience(5.0), figured, 1000.0) == pytest.approx(found_s, abs=2 * PING_S)


def test_one_that_does_nothing_at_its_start_is_found_within_two_minutes() -> None:
    assert found_after(Patience(5.0), asleep, 120.0) is not None


def test_a_start_at_a_load_of_fifty_is_waited_for() -> None:
    """It needs a second of processor time, and gets that within a minute; six such lives had been killed each."""
    assert found_after(Patience(5.0), crowded, 600.0) is None


def test_its_patience_doubles_with_each_kill_until_a_life_has_answered_for_long() -> None:
    patience, found = Patience(5.0), []
    for n in range(3):
        patience.begins()
        patience.answered()
        found.append(found_after(patience, asleep, 100.0, begin_s=100.0 * n))
        patience.killed(100.0 * n + 50.0)
    assert found == [5.25, 10.25, 20.25]
    patience.begins()
    patience.answered()
    for n in range(400):
        patience.ask(1000.0 + n * PING_S)
        patience.answered()
    patience.killed(1100.0)
    assert patience.kills == 1 and patience.limit_s == 10.0


def test_a_stopped_one_is_found_as_fast_after_many_kills() -> None:
    patience = Patience(5.0, spoke=True)
    for _ in range(20):
        patience.killed(0.0)
    assert patience.limit_s == 5.0 * 2**6
    assert found_after(patience, stopped, 100.0) == 5.25


def test_an_answer_ends_the_silence() -> None:
    patience = Patience(5.0, spoke=True)
    assert found_after(patience, asleep, 4.75) is None
    patience.answered()
    assert found_after(patience, asleep, 4.75, begin_s=4.75) is None


def test_whoever_asks_late_was_stuck_itself() -> None:
    patience = Patience(5.0, spoke=True)
    patience.ask(0.0, Figures())
    assert patience.ask(100.0, Figures()) and patience.silence_s == 2 * PING_S
    assert not patience.ask(100.1, Figures()) and patience.due_in(100.1) == pytest.approx(PING_S - 0.1)


def test_that_the_asker_waits_explains_half_of_a_silence_at_most() -> None:
    patience = Patience(5.0, spoke=True)
    for n in range(1 + int(5.0 / PING_S)):
        patience.ask(n * PING_S, Figures(), own_waits_s=10.0 * n)
    assert patience.silence_s == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (Figures("S"), 0.0),
        (Figures("S", waited_s=0.4), 0.4),
        (Figures("S", waited_s=3.0, ran_s=0.1), 1.0),
        (Figures("R"), 1.0),
        (Figures("R", ran_s=0.2, waited_s=0.3), 0.3),
        (Figures("?"), 0.0),
        (Figures("D", waited_s=-1.0), 0.0),
    ],
)
def test_how_long_it_waited_in_a_second(now: Figures, expected: float) -> None:
    assert waited_s(Figures(), now, 1.0) == expected


def lifeless_after(figured: Figured, for_s: float) -> float:
    life = Vitals()
    for n in range(int(for_s) + 1):
        life.look(float(n), figured(float(n)))
    assert life.lifeless_s is not None
    return life.lifeless_s


@pytest.mark.parametrize(
    ("figured", "lifeless_s"),
    [
        (asleep, 60.0),
        (stopped, 60.0),
        (lambda t: replace(spinning(t), state="T"), 60.0),
        (lambda t: Figures(spent_s=t / 1000), 60.0),  # threads of no account
        (lambda t: Figures("D"), 0.0),
        (spinning, 0.0),
        (starved, 0.0),
        (reading, 0.0),
        (lambda t: Figures(spent_s=min(t, 20.0)), 40.0),
        (lambda t: Figures(spent_s=t / 20), 0.0),
    ],
)
def test_for_how_long_it_has_shown_no_life(figured: Figured, lifeless_s: float) -> None:
    assert lifeless_after(figured, 60.0) == pytest.approx(lifeless_s, abs=5.0)


def test_of_one_that_is_gone_nothing_is_known() -> None:
    life = Vitals()
    life.look(0.0, Figures())
    assert life.lifeless_s == 0.0 and life.look(1.0, None) == 0.0
    assert life.lifeless_s is None and not life.stopped


@pytest.mark.parametrize(("own_waits_s", "silence_s"), [(0.0, 0.4), (0.1, 0.3), (0.9, 0.2)])
def test_the_askers_own_waits_explain_half_of_a_silence_at_most(own_waits_s: float, silence_s: float) -> None:
    patience = Patience(30.0)
    patience.ask(0.0, own_waits_s=10.0)
    patience.ask(0.4, own_waits_s=10.0 + own_waits_s)
    assert patience.silence_s == pytest.approx(silence_s)
