"""A worker that its agent runs and sees no more: cut off, evicted at the ceiling, dismissed when it returns."""

from __future__ import annotations

from coordinator_harness import MS, S, World, drop, running

from everstep.protocol import messages as m


def _beats(world: World, seconds: float, *seen: int) -> None:
    """Heartbeats every 200 ms that tell of these workers only."""
    for _ in range(round(seconds * 5)):
        world.now += 200 * MS
        world.beat(*[(i, 0, "forward", 0) for i in seen])


def test_unseen_for_as_long_as_the_ceiling_is_evicted_not_killed() -> None:
    world = running(heartbeat_ceiling_ns=2 * S)
    _beats(world, 1, 0, 1, 2)
    _beats(world, 1.8, 0, 2)
    assert world.kinds() == ["worker_suspected"]
    _beats(world, 0.2, 0, 2)
    assert world.report("worker_evicted")["worker_id"] == 1
    assert "seen nothing of it for 2.00 s (limit 2.00 s)" in world.report("worker_evicted")["reason"]
    assert world.plan is not None and world.plan.worker_ids == (0, 2)
    assert world.messages(m.KillWorker) == []
    world.clear()
    world.hello(1)
    assert world.last(m.Dismissed, "w1.0") is not None


def test_seen_again_before_that_is_pardoned() -> None:
    world = running(heartbeat_ceiling_ns=2 * S)
    _beats(world, 1, 0, 1, 2)
    for _ in range(3):
        _beats(world, 1.8, 0, 2)
        _beats(world, 0.2, 0, 1, 2)
    assert "worker_evicted" not in world.kinds()


def test_those_who_hold_the_state_are_waited_for() -> None:
    world = running(workers=1, heartbeat_ceiling_ns=2 * S)
    _beats(world, 1, 0)
    _beats(world, 10)
    assert "worker_evicted" not in world.kinds()


def test_an_agent_that_was_away_itself_has_time_to_look() -> None:
    world = running(heartbeat_ceiling_ns=3 * S)
    _beats(world, 1, 0, 1, 2)
    world.now += 2900 * MS
    world.agent(0, 1, 2)
    _beats(world, 1, 0, 2)
    assert "worker_evicted" not in world.kinds()


def test_a_member_without_a_connection_is_given_up_only_while_others_wait_for_it_to_hear_of_a_plan() -> None:
    world = running()
    drop(world, "w1.0")
    world.wait(15 * S)
    assert "worker_evicted" not in world.kinds(), "training needs no coordinator"
    assert world.command("scale", workers=2).ok
    world.wait(15 * S)
    assert world.report("worker_evicted")["worker_id"] == 1
    assert "a plan waits for it" in world.report("worker_evicted")["reason"]
