"""Profiles as the coordinator sees them: when they begin, how long a standstill is forgiven, what the status says."""

from __future__ import annotations

from coordinator_harness import World

from everstep.protocol import messages as m


def trained(step_ms: float) -> World:
    """Two workers at step 40."""
    world = World(workers=2)
    world.agent(0, 1)
    for worker in (0, 1):
        world.hello(worker)
        world.entered(worker, 1, 1)
    for step in range(38, 41):
        world.progress(0, 1, step, step_ms)
    return world


def asked(world: World) -> list[tuple[str, m.ProfileNow]]:
    return [(to, message) for to, message in world.sent if isinstance(message, m.ProfileNow)]


def test_all_begin_with_the_same_step_once_all_have_heard_of_it() -> None:
    for step_ms, first in ((50.0, 43 + 10), (5000.0, 43)):
        world = trained(step_ms)
        world.command("profile", folder="p", steps=3, memory=True)
        expected = m.ProfileNow(name="p", first_step=first, steps=3, memory=True)
        assert asked(world) == [("w0.0", expected), ("w1.0", expected)]


def test_status_tells_who_has_yet_to_end() -> None:
    world = trained(50.0)
    assert "profile" not in world.coordinator.status()
    world.command("profile", folder="p", steps=1)
    world.say("w1.0", m.Profiled(worker_id=1, incarnation=0, name="p", ok=False, reason="full"))
    world.say("w0.0", m.Profiled(worker_id=0, incarnation=0, name="older", ok=True))
    assert world.coordinator.status()["profile"] == {"name": "p", "pending": [0], "failed": {"1": "full"}}
    world.exited(0)
    failed = {"1": "full", "0": "worker 0 (incarnation 0) has left"}
    assert world.coordinator.status()["profile"] == {"name": "p", "pending": [], "failed": failed}


def test_writing_a_trace_is_no_hang() -> None:
    world = trained(50.0)
    world.command("profile", folder="p", steps=1, workers=[1])
    world.beat((1, 0, "load", 60_000))
    assert world.coordinator.status()["profile"]["pending"] == [1]
    world.say("w1.0", m.Profiled(worker_id=1, incarnation=0, name="p", ok=True))
    world.beat((1, 0, "load", 60_000))
    assert any(report.kind == "worker_evicted" for report in world.reports)
