from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator_harness import S, World, running

from everstep.base.plan import Plan, Seat
from everstep.base.pool_wish import make_wish
from everstep.cost.advice import step_ms
from everstep.protocol import messages as m
from everstep.protocol.coordinator.speeds import by_speed


def beat(world: World, *ms_per_lane: float) -> None:
    world.seq += 1
    pulses = [
        m.WorkerPulse(
            worker_id=i, incarnation=0, step=4, phase="forward", still_ms=1, samples_per_s=1.0, compute_ms_per_lane=ms
        )
        for i, ms in enumerate(ms_per_lane)
    ]
    world.say("a1", m.Heartbeat(agent_id="a1", seq=world.seq, rtt_ms=1.0, workers=pulses))


def let(world: World, seconds: int, *ms_per_lane: float) -> None:
    for _ in range(seconds):
        beat(world, *ms_per_lane)
        world.wait(S, beating=False)


def test_the_busiest_worker_makes_the_step():
    seats = [Seat(0, 0, "active", (0, 1)), Seat(1, 0, "active", (2,)), Seat(1, 1, "active", (0, 1, 2))]
    assert step_ms(seats, {0: 10.0, 1: 5.0}) == 20.0
    assert by_speed({0: 100.0, 1: 105.0}) == {}
    assert by_speed({0: 100.0, 1: 200.0}) == {0: 10.0, 1: 5.0}


def test_a_lasting_straggler_gets_fewer_lanes():
    world = running(2)
    let(world, 30, 100.0, 300.0)
    assert world.prepared is None, "not before it has lasted"
    let(world, 12, 100.0, 300.0)
    assert world.prepared is not None and len(world.prepared.lanes_of(1)) == 2
    assert world.prepared.reason == (
        "lanes by speed: worker 1 takes 300 ms per lane, the median is 200; the busiest worker will compute 600 ms "
        "per step instead of 1200 ms, by the cost model"
    )
    assert dict(world.prepared.speeds) == {0: 10.0, 1: 1000 / 300}
    generation = world.prepared.generation
    for i in range(2):
        world.entered(i, generation, 9)
    let(world, 60, 100.0, 300.0)
    assert world.prepared is None and world.plan.generation == generation, "it stays so"
    let(world, 60, 100.0, 100.0)
    assert [len(s.lanes) for s in world.prepared.seats] == [4, 4] and world.prepared.speeds == ()


def test_a_short_slowness_moves_nothing():
    world = running(2)
    for _ in range(4):
        let(world, 15, 100.0, 300.0)
        let(world, 25, 100.0, 100.0)
    assert world.prepared is None and world.plan.generation == 1


def test_a_gain_of_less_than_a_fifth_moves_nothing():
    world = running(2)
    let(world, 120, 100.0, 125.0)
    assert world.prepared is None


def test_a_repair_keeps_the_speeds_of_who_is_left():
    world = running(3)
    let(world, 45, 100.0, 100.0, 400.0)
    generation = world.prepared.generation
    for i in range(3):
        world.entered(i, generation, 9)
    world.exited(1)
    assert dict(world.plan.speeds) == {0: 10.0, 2: 2.5}
    assert len(world.plan.lanes_of(0)) > len(world.plan.lanes_of(2))
    again = world.restart()
    assert again.coordinator.job.speeds.in_force == {0: 10.0, 2: 2.5}


def test_nothing_is_looked_at_while_nobody_says_how_fast_it_is():
    world = running(2)
    let(world, 60, 0.0, 0.0)
    assert not world.coordinator.job.speeds.watching


def weakened(on_failure: str, copies: int = 0) -> World:
    """Two pools of three, of which the second has lost two members."""
    world = running(6, stages=2, wish=replace(make_wish(6, 2), copies=copies), on_failure=on_failure)
    for worker_id, generation in ((5, 2), (4, 3)):
        world.exited(worker_id)
        for i in range(worker_id):
            world.entered(i, generation, 1)
    return world


def test_a_pool_that_lost_members_for_good_gets_one_of_another():
    world = weakened("shrink")
    let(world, 45, *[100.0] * 4)
    prepared = world.prepared
    assert [[s.worker_id for s in prepared.pool(k)] for k in range(2)] == [[0, 1], [2, 3]]
    assert [len(s.lanes) for s in prepared.seats] == [4, 4, 4, 4] and prepared.joining == (2,)
    assert prepared.reason == (
        "worker 2 goes from stage 0 to stage 1, which has lost members and makes all others wait: the busiest worker "
        "will compute 400 ms per step instead of 800 ms, by the cost model"
    )
    for i in range(4):
        world.entered(i, prepared.generation, 9)
    assert world.report("worker_healed")["worker_id"] == 2
    let(world, 90, *[100.0] * 4)
    assert world.prepared is None and world.plan.generation == prepared.generation, "it stays so"


@pytest.mark.parametrize(("copies", "goes"), [(1, False), (2, True)])
def test_nobody_goes_who_alone_holds_a_part_of_its_stage(copies: int, goes: bool) -> None:
    world = weakened("shrink", copies)
    let(world, 45, *[100.0] * 4)
    assert (world.prepared is not None and world.prepared.joining == (2,)) == goes


def test_nobody_goes_to_a_pool_whose_dead_will_be_back():
    world = weakened("replace")
    let(world, 90, *[100.0] * 4)
    assert world.prepared is None


def test_a_quick_stage_needs_no_help():
    world = weakened("shrink")
    let(world, 90, 100.0, 100.0, 100.0, 34.0)
    assert world.prepared is None or world.prepared.joining == ()


def test_who_computes_in_any_stage_must_be_known_before_anything_is_made_of_the_speeds():
    world = running(3)
    speeds, members = world.coordinator.job.speeds, world.plan.members
    seats = (
        *(Seat(0, 0, "active", (0,)), Seat(1, 0, "standby", ())),
        *(Seat(1, 1, "active", (0,)), Seat(2, 1, "standby", ())),
    )
    plan = Plan(1, "", members, seats, 1, stages=2)
    speeds.say(members[0].key, 100.0)
    assert speeds.measured(plan) is None, "worker 1 stands by in one stage and computes in the other"
    speeds.say(members[1].key, 200.0)
    assert speeds.measured(plan) == {0: 100.0, 1: 200.0, 2: 150.0}
