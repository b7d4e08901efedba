"""The failure detector: what it calls dead, and when."""

from __future__ import annotations

import math

import pytest

from everstep.base.errors import InvariantViolation
from everstep.protocol.detector import PhiDetector

S = 1_000_000_000


def regular(
    interval_ns: int, n: int = 50, floor_ns: int = S // 10, ceiling_ns: int = 60 * S
) -> tuple[PhiDetector, int]:
    detector = PhiDetector(floor_ns=floor_ns, ceiling_ns=ceiling_ns, interval_ns=interval_ns, now_ns=0)
    for i in range(1, n + 1):
        detector.heartbeat(i * interval_ns)
    return detector, n * interval_ns


def test_regular_heartbeats_raise_no_suspicion():
    detector, now = regular(S)
    for late in (0, S // 2, S, int(1.5 * S)):
        said = detector.suspicion(now + late)
        assert not said.suspect and not said.dead and said.reason == ""


def test_suspicion_grows_from_nothing_over_suspect_to_dead():
    detector, now = regular(S)
    seen = [detector.suspicion(now + late * S // 10) for late in range(60)]
    states = [(s.suspect, s.dead) for s in seen]
    assert states == sorted(states)
    assert {(False, False), (True, False), (True, True)} == set(states)
    assert all(s.reason for s in seen if s.suspect)


def phi_of(detector: PhiDetector, now_ns: int) -> float:
    """Minus the decimal logarithm of the probability of so long a silence, by the paper's formula."""
    mean, deviation = detector._moments()
    tail = 0.5 * math.erfc((detector.silence_ns(now_ns) - mean) / deviation / math.sqrt(2))
    return -math.log10(tail) if tail > 0 else math.inf


def test_thresholds_are_those_of_phi():
    detector, now = regular(S)
    for late_ns in range(0, 6 * S, S // 50):
        said = detector.suspicion(now + late_ns)
        phi = phi_of(detector, now + late_ns)
        assert said.suspect == (phi >= 5.0 - 1e-9)
        assert said.dead == (phi >= 10.0 - 1e-9)


def test_floor_protects_a_very_regular_peer():
    detector, now = regular(S // 100, floor_ns=2 * S)
    assert not detector.suspicion(now + 2 * S - 1).dead
    assert detector.suspicion(now + 2 * S).dead


def test_ceiling_ends_the_wait_for_an_irregular_peer():
    detector = PhiDetector(floor_ns=S, ceiling_ns=5 * S, interval_ns=S, now_ns=0)
    now = 0
    for i in range(60):
        now += (9 * S) if i % 2 else S // 10
        detector.heartbeat(now)
    assert not detector.suspicion(now + 5 * S - 1).dead
    assert detector.suspicion(now + 5 * S).dead


def test_slow_rhythm_is_learned_from_three_heartbeats():
    detector = PhiDetector(floor_ns=S, ceiling_ns=60 * S, interval_ns=S // 5, now_ns=0)
    for i in range(1, 4):
        detector.heartbeat(i * 5 * S)
    assert not detector.suspicion(15 * S + 6 * S).suspect


def test_expected_interval_is_a_lower_bound_of_the_mean():
    detector, now = regular(S // 10, floor_ns=S)
    assert detector.suspicion(now + 4 * S).dead
    detector.expect(4 * S)
    assert not detector.suspicion(now + 4 * S).suspect


def test_next_change_is_when_the_answer_changes():
    detector, now = regular(S)
    first = detector.next_change_ns(now)
    assert not detector.suspicion(first - 2).suspect and detector.suspicion(first).suspect
    second = detector.next_change_ns(first)
    assert not detector.suspicion(second - 2).dead and detector.suspicion(second).dead


def test_pardon_and_resume_take_silence_back():
    detector, now = regular(S)
    later = now + 30 * S
    assert detector.suspicion(later).dead
    detector.pardon(30 * S)
    assert not detector.suspicion(later).suspect
    other, now = regular(S)
    other.resume(later)
    assert not other.suspicion(later + S).suspect
    # The interruption does not count as an interval: the rhythm is still one second.
    assert other.suspicion(later + 4 * S).dead


def test_window_forgets_old_rhythms():
    detector, now = regular(5 * S)
    for _ in range(100):
        now += S
        detector.heartbeat(now)
    assert detector.suspicion(now + 4 * S).dead


@pytest.mark.parametrize(("floor", "ceiling", "interval"), [(0, 1, 1), (2, 1, 1), (1, 2, 0)])
def test_impossible_settings_are_refused(floor, ceiling, interval):
    with pytest.raises(InvariantViolation):
        PhiDetector(floor_ns=floor, ceiling_ns=ceiling, interval_ns=interval, now_ns=0)


def beating(*waits_ms: int) -> PhiDetector:
    """One that beats every second, and says so of its waits."""
    detector = PhiDetector(floor_ns=2 * S, ceiling_ns=20 * S, interval_ns=S, now_ns=0)
    for n in range(200):
        detector.heartbeat(n * S, (waits_ms[n % len(waits_ms)] if waits_ms else 0) * 1_000_000)
    return detector


@pytest.mark.parametrize(
    ("waits_ms", "dead_s"), [((), 2.7), ((0, 400), 2.7), ((0, 0, 800), 5.8), ((3_000,), 14.6), ((30_000,), 20.0)]
)
def test_only_who_waits_for_most_of_its_time_is_given_longer(waits_ms: tuple[int, ...], dead_s: float) -> None:
    detector, last = beating(*waits_ms), 199 * S
    times = [last + n * S // 10 for n in range(210)]
    found = next(at for at in times if detector.suspicion(at).dead)
    assert (found - last) / S == pytest.approx(dead_s, abs=0.11)


def test_a_machine_that_is_no_longer_busy_is_waited_for_no_longer() -> None:
    detector = beating(3_000)
    for n in range(200, 210):
        detector.heartbeat(n * S)
    assert detector.suspicion(209 * S + 3 * S).dead


def test_who_beats_irregularly_is_given_longer() -> None:
    regular_one, last = regular(S, 60, floor_ns=S // 10)
    uneven = PhiDetector(floor_ns=S // 10, ceiling_ns=60 * S, interval_ns=S, now_ns=0)
    for n in range(60):  # as often, in pairs
        uneven.heartbeat(n * S + (n % 2) * 8 * S // 10 - 8 * S // 10 + S)
    late = uneven._last_ns + 3 * S
    assert regular_one.suspicion(last + 3 * S).dead and not uneven.suspicion(late).dead
