"""When a dead worker is started again: at once, then later and later; and when that is no use any more."""

from __future__ import annotations

import pytest

from everstep.base.cause import Cause, Why
from everstep.base.config import Config, load_config
from everstep.runtime.host.host_workers import Slot, StepCrashes


def policy(max_restarts: int, initial_s: float, max_s: float, on_failure: str = "replace") -> Config:
    backoff = {"initial_s": initial_s, "max_s": max_s}
    return load_config([("test", {"max_restarts": max_restarts, "backoff": backoff, "on_failure": on_failure})])


POLICY = policy(20, 0.5, 30.0)


KILLED = Why(Cause.KILLED, "killed by SIGKILL")


def _die(slot: Slot, now_s: float, config: Config = POLICY, **how: object) -> Why | None:
    """Why the slot is lost by it; None: it is not."""
    facts = {"in_order": False, "ready": True, "killed": True, "why": KILLED, "random": 0.5}
    facts.update(how)  # type: ignore[arg-type]
    lost = slot.exited(now_s, config, **facts)  # type: ignore[arg-type]
    assert (slot.state == "lost") == (lost is not None)
    return lost


def _rests(slot: Slot, *args: object, **how: object) -> bool:
    return _die(slot, *args, **how) is None and slot.state == "resting"  # type: ignore[arg-type]


def _live(slot: Slot, now_s: float) -> None:
    slot.begin(now_s)
    slot.started(100 + slot.incarnation)


def test_each_life_has_its_incarnation() -> None:
    slot = Slot(2)
    _live(slot, 0.0)
    assert (slot.incarnation, slot.pid, slot.live) == (0, 100, True)
    _die(slot, 1.0)
    assert not slot.live and slot.pid == 0
    _live(slot, 1.0)
    assert slot.incarnation == 1


def test_a_life_may_be_several_processes_and_restarts_are_all_of_theirs() -> None:
    slot = Slot(2)
    slot.begin(0.0)
    slot.started(100, 101, 102)
    assert (slot.pid, slot.pids, slot.live) == (100, (100, 101, 102), True)
    assert _rests(slot, 1.0) and slot.restart_at_s == 1.0
    assert (slot.pid, slot.pids, slot.state) == (0, (), "resting")


def test_a_slot_that_was_given_up_begins_again_with_fewer_processes() -> None:
    slot, config = Slot(2, ranks=4), policy(0, 0.5, 30.0)
    _live(slot, 0.0)
    slot.resize(2, 0.5)
    assert slot.ranks == 4, "a life keeps its processes"
    assert _die(slot, 1.0, config) is not None
    slot.resize(4, 2.0)
    assert slot.state == "lost", "as many are no help"
    slot.resize(2, 3.0)
    assert (slot.state, slot.restart_at_s, slot.ranks) == ("resting", 3.0, 2)


def test_the_first_restart_is_at_once_and_later_ones_back_off() -> None:
    slot = Slot(0)
    delays = []
    for now in range(10):
        _live(slot, float(now))
        assert _rests(slot, float(now))
        delays.append(slot.restart_at_s - now)
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_jitter_spreads_restarts() -> None:
    waits = []
    for random in (0.0, 0.999):
        slot = Slot(0)
        for _ in range(3):
            _live(slot, 0.0)
            assert _rests(slot, 0.0, random=random)
        waits.append(slot.restart_at_s)
    assert waits[0] == 0.5 and 1.4 < waits[1] < 1.5


def test_a_minute_of_health_resets_the_backoff() -> None:
    slot = Slot(0)
    for now in (0.0, 1.0, 2.0):
        _live(slot, now)
        _die(slot, now)
    _live(slot, 10.0)
    assert _rests(slot, 71.0) and slot.restart_at_s == 71.0


def test_three_early_errors_in_a_row_are_a_crash_loop() -> None:
    slot = Slot(0)
    for _ in range(2):
        _live(slot, 0.0)
        assert _rests(slot, 0.0, ready=False, killed=False)
    _live(slot, 0.0)
    verdict = _die(
        slot, 0.0, ready=False, killed=False, why=Why(Cause.EXITED, "exit code 1: ImportError: no such thing")
    )
    assert verdict is not None and verdict.cause is Cause.CRASH_LOOP
    assert "crash loop" in verdict.reason and "no such thing" in verdict.reason
    assert slot.state == "lost"


def test_a_life_that_got_ready_ends_the_row() -> None:
    slot = Slot(0)
    for ready in (False, False, True, False, False):
        _live(slot, 0.0)
        assert _rests(slot, 0.0, ready=ready, killed=False)


def test_kills_from_outside_are_forgiven_for_longer() -> None:
    slot = Slot(0)
    verdicts = []
    for _ in range(10):
        _live(slot, 0.0)
        verdicts.append(_die(slot, 0.0, ready=False, killed=True) is None)
    assert verdicts == [True] * 9 + [False]


def test_at_most_max_restarts_within_an_hour() -> None:
    few = policy(3, 0.1, 1.0)
    slot = Slot(0)
    for now in (0.0, 100.0, 200.0):
        _live(slot, now)
        assert _rests(slot, now, few)
    _live(slot, 300.0)
    verdict = _die(slot, 300.0, few)
    assert verdict is not None and "3 restarts within an hour" in verdict.reason
    later = Slot(1)
    for now in (0.0, 100.0, 200.0, 3650.0):
        _live(later, now)
        assert _rests(later, now, few)


def test_leaving_in_order_and_unwanted_slots_are_not_restarted() -> None:
    slot = Slot(0)
    _live(slot, 0.0)
    assert _die(slot, 1.0, in_order=True) is None
    assert slot.state == "left"
    other = Slot(1, wanted=False)
    _live(other, 0.0)
    assert _die(other, 1.0) is None
    assert other.state == "left"


def test_shrink_never_restarts() -> None:
    slot = Slot(0)
    _live(slot, 0.0)
    verdict = _die(slot, 1.0, policy(20, 0.5, 30.0, "shrink"))
    assert verdict is not None and "shrink" in verdict.reason
    assert verdict.cause is Cause.KILLED


@pytest.mark.parametrize("on_failure", ["shrink", "replace"])
def test_a_worker_that_ended_to_begin_again_is_no_loss(on_failure: str) -> None:
    """As many times as are too much for ten others: it does not go on for ever."""
    slot, config = Slot(0), policy(0, 0.5, 30.0, on_failure)
    for now in range(10):
        _live(slot, now)
        assert _rests(slot, now, config, killed=False, again=True, returns=True)
    _live(slot, 10.0)
    verdict = _die(slot, 10.0, config, killed=False, again=True, returns=True)
    assert verdict is not None and "10 restarts because of others within an hour" in verdict.reason
    other, config = Slot(1), policy(1, 0.5, 30.0)
    for returns in (True, False, True):
        _live(other, 0.0)
        assert _rests(other, 0.0, config, returns=returns)
    _live(other, 0.0)
    verdict = _die(other, 0.0, config)
    assert verdict is not None and "1 restarts within an hour" in verdict.reason


@pytest.mark.parametrize(("max_restarts", "workers"), [(20, 2), (3, 2), (0, 2), (20, 16)])
@pytest.mark.parametrize("ready", [True, False])
def test_others_that_are_given_up_take_nobody_with_them(max_restarts: int, workers: int, ready: bool) -> None:
    """Each time that one of the others ends, this one ends, too, and begins again at once."""
    config = load_config([("test", {"max_restarts": max_restarts, "workers": workers, "lanes": 16})])
    innocent = Slot(0)
    for i in range(1, workers):
        other = Slot(i)
        while other.state != "lost":
            _live(other, 0.0)
            _die(other, 0.0, config)
            _live(innocent, 0.0)
            assert _rests(innocent, 0.0, config, ready=ready, returns=True) and innocent.restart_at_s == 0.0
    _live(innocent, 0.0)
    lost = _die(innocent, 0.0, config, ready=ready)
    assert (lost is not None) == (max_restarts == 0) and innocent.restart_at_s == 0.0


def test_a_life_that_is_sent_away_counts_like_one_that_dies() -> None:
    """It may be to blame itself: refused at its start, it is a crash loop; later, it has the limit of restarts."""
    refused, config = Slot(0), policy(2, 0.5, 30.0)
    for _ in range(2):
        _live(refused, 0.0)
        assert _rests(refused, 0.0, config, ready=False, killed=False, again=True)
    assert refused.restart_at_s == 0.5
    _live(refused, 0.0)
    verdict = _die(refused, 0.0, config, ready=False, killed=False, again=True)
    assert verdict is not None and "crash loop: it died 3 times in a row before it was ready" in verdict.reason
    slot = Slot(1)
    for _ in range(2):
        _live(slot, 0.0)
        assert _rests(slot, 0.0, config, killed=False, again=True)
    _live(slot, 0.0)
    verdict = _die(slot, 0.0, config, killed=False, again=True)
    assert verdict is not None and "2 restarts within an hour are the limit" in verdict.reason


def test_three_crashes_alike_at_one_step_are_a_loop_whoever_dies() -> None:
    crashes = StepCrashes()
    assert [crashes.observe(7, "exit code 7", 6, 4) for _ in range(2)] == ["", ""]
    assert "3 times in a row while they computed step 7" in crashes.observe(7, "exit code 7", 6, 4)


def test_another_way_to_die_is_not_the_same_crash() -> None:
    crashes = StepCrashes()
    ways = ["exit code 7", "killed by SIGSEGV"] * 3
    assert not any(crashes.observe(7, how, 6, 4) for how in ways)


def test_crashes_that_move_on_are_no_loop() -> None:
    crashes = StepCrashes()
    assert not any(crashes.observe(step, "exit code 7", step - 1, 2) for step in range(1, 50))


def test_crashes_at_changing_steps_that_get_nowhere_are_a_loop() -> None:
    crashes = StepCrashes()
    told = [crashes.observe(step, "exit code 7", step - 1, 2) for step in (5, 4, 3, 5, 4, 3)]
    assert told[:5] == [""] * 5
    assert "6 times without getting beyond step 4" in told[5]
