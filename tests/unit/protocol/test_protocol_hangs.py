"""Workers that stand still: which of them hang, and when another life is no help."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_harness import MS, S, World, running

from everstep.protocol import messages as m

FIRST = {"cold": True, "lifeless_ms": 0}


def hangs(still_s: float, phase: str = "forward", *, hang_limit_ns: int | None = None, **pulse: Any) -> bool:
    """Whether worker 1 is evicted for that."""
    world = running(hang_limit_ns=hang_limit_ns)
    world.progress(0, 1, 1, 100.0)
    world.beat((1, 0, phase, int(1000 * still_s)), **pulse)
    return 1 not in world.plan.worker_ids


@pytest.mark.parametrize(
    ("still_s", "pulse", "expected"),
    [
        (10.1, {}, True),
        (10.1, FIRST, False),
        (599.0, FIRST, False),
        (600.0, FIRST, True),
        (599.0, {**FIRST, "lifeless_ms": 59_000}, False),
        (61.0, {**FIRST, "lifeless_ms": 60_000}, True),
        (10.1, {**FIRST, "stopped": True}, True),
        (10.1, {"cold": True}, True),  # nobody knows whether it shows life
        (10.1, {"lifeless_ms": 0}, True),  # it has done this before
        (10.1, {"phase": "evaluate", "lifeless_ms": 0}, False),
        (50.0, {"waited_ms": 49_000}, False),
        (50.0, {"waited_ms": 39_000}, True),
    ],
)
def test_what_may_compile_has_longer_if_it_shows_life(still_s: float, pulse: dict[str, Any], expected: bool) -> None:
    assert hangs(still_s, **{"phase": "forward", **pulse}) == expected


def test_a_limit_that_is_given_holds_where_nothing_shows_life() -> None:
    assert hangs(2.0, hang_limit_ns=1 * S, cold=True, lifeless_ms=1500)
    assert not hangs(2.0, hang_limit_ns=1 * S, cold=True, lifeless_ms=200)


def test_a_worker_in_doubt_shows_where_it_is_and_the_sentence_says_that_and_the_key() -> None:
    world = running()
    world.beat((1, 0, "forward", 6_000))
    world.beat((1, 0, "forward", 6_200))
    asked = [message for _, message in world.sent if isinstance(message, m.ShowStacks)]
    assert [(message.worker_id, message.incarnation) for message in asked] == [(1, 0)]
    world.beat((1, 0, "forward", 10_000), at="/home/me/train.py:41 (loss)")
    evicted = world.report("worker_evicted")
    assert evicted["reason"].endswith("step 4, in /home/me/train.py:41 (loss) (limit 10.0 s, hang_limit_s)")


def hung_twice(*, settled: bool = True, first: dict[str, Any] | None = None, **pulse: Any) -> World:
    """Worker 1 hangs, and then worker 2, to which its lanes have gone."""
    world = running()
    world.beat((1, 0, "forward", 10_000), **(first or {}))
    assert world.plan.worker_ids == (0, 2)
    for worker in (0, 2) if settled else (0,):
        world.entered(worker, world.plan.generation, 5)
    world.beat((2, 0, "forward", 10_000), **pulse)
    if settled and "at" not in pulse and not pulse and not first:
        assert world.last(m.ShowStacks, "a1").worker_id == 2, "it is to show where it is before it goes"
        world.beat((2, 0, "forward", 10_200), **pulse)
    assert world.report("worker_evicted")["worker_id"] == 2
    return world


def test_the_same_hang_twice_at_one_step_ends_the_job() -> None:
    ended = hung_twice(at="train.py:7 (step)").last(m.JobEnded, "a1")
    assert ended is not None and (ended.state, ended.exit_code, ended.cause) == ("failed", 1, "hung")
    assert "in train.py:7 (step)" in ended.reason and "the second hang there, its stacks are in its log" in ended.reason


def test_a_second_hang_that_nobody_had_suspected_shows_where_it_is_first() -> None:
    ended = hung_twice().last(m.JobEnded, "a1")
    assert ended is not None and "second hang there" in ended.reason


@pytest.mark.parametrize(
    "how",
    [
        {"settled": False},  # both hung at once
        {"stopped": True},
        {"first": {"stopped": True}},
        {"step": 5},
        {"first": {"step": 3}},
    ],
)
def test_what_is_no_second_hang(how: dict[str, Any]) -> None:
    assert hung_twice(**how).last(m.JobEnded, "a1") is None


def test_an_agent_that_waits_for_processors_is_given_longer() -> None:
    """Its machine is busy: its heartbeats come late, and say why."""
    for waited_ms, given_up in ((0, True), (3_000, False)):
        world = World(workers=2, hang_limit_ns=None)
        for worker, agent in ((0, "a1"), (1, "a2")):
            world.agent(worker, name=agent, host=agent)
            world.hello(worker, host=agent)
        for _ in range(20):
            world.now += S
            world.beat(agent="a1")
            world.beat(agent="a2", late_ms=waited_ms)
        for _ in range(8):
            world.wait(500 * MS, beating=False)
            world.beat(agent="a1")
        assert ("worker_evicted" in world.kinds()) == given_up
        for _ in range(30):
            world.wait(500 * MS, beating=False)
            world.beat(agent="a1")
        assert world.plan.worker_ids == (0,), "the ceiling holds for all"


@pytest.mark.parametrize(
    ("limit_s", "away_s", "hung"), [(10, 1, True), (10, 20, False), (4, 1.2, False), (40, 5, True), (None, 5, False)]
)
def test_what_waited_for_a_coordinator_that_was_away_is_no_hang(limit_s: int | None, away_s: float, hung: bool) -> None:
    """The worker stood still when its agent said so, and may have gone on long ago. A short absence is one of less than
    a quarter of the limit."""
    still_ms = 1000 * (limit_s or 60) + 1000
    world = running(hang_limit_ns=None if limit_s is None else limit_s * S)
    world.beat((1, 0, "forward", 0))
    world.now = world.coordinator.next_deadline_ns + round(away_s * S)
    world.beat((1, 0, "forward", still_ms))
    assert (1 not in world.plan.worker_ids) == hung
    world.now += 200 * MS
    world.beat((1, 0, "forward", still_ms + 200))
    assert 1 not in world.plan.worker_ids, "it stands still by now"
