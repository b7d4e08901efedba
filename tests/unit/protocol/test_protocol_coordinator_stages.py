from __future__ import annotations

import pytest
from coordinator_harness import S, World, drop, running

from everstep.base.pool_wish import PoolWish, make_wish
from everstep.protocol import messages as m

LARGE = 64 << 20


def staged(workers: int = 6, stages: int = 3, redundancy: int | None = None, **config) -> World:
    return running(workers, stages=stages, wish=make_wish(workers, stages, redundancy), **config)


def pools(plan) -> list[tuple[int, ...]]:
    return [tuple(s.worker_id for s in plan.pool(stage)) for stage in range(plan.stages)]


def hello(
    world: World,
    worker: int,
    incarnation: int = 0,
    state_bytes: int = LARGE,
    step: int = 0,
    stages: tuple[int, ...] = (),
) -> None:
    from coordinator_harness import member

    name = f"w{worker}.{incarnation}"
    world.connect(name, "worker")
    who = member(worker, incarnation)
    world.say(name, m.WorkerHello(member=who, step=step, stages=stages, state_bytes=state_bytes))


def test_the_start_seats_everybody_evenly_with_a_leader_per_stage():
    world = World(workers=6, stages=3, wish=make_wish(6, 3))
    world.agent(*range(6))
    for i in range(6):
        world.hello(i)
    assert pools(world.plan) == [(0, 1), (2, 3), (4, 5)]
    started = world.report("generation_started")
    assert started["leaders"] == [0, 2, 4]
    assert started["seats"][2] == [2, 1, "active", [0, 1, 2, 3]]


def test_a_death_is_repaired_inside_its_pool():
    world = staged()
    world.exited(2)
    assert pools(world.plan) == [(0, 1), (3,), (4, 5)]
    assert world.plan.seat(3, 1).lanes == tuple(range(8)) and world.plan.seat(0, 0).lanes == (0, 1, 2, 3)
    change = world.report("leader_changed")
    assert (change["stage"], change["worker_id"]) == (1, 3) and "first member of stage 1" in change["reason"]
    assert world.kinds().count("leader_changed") == 1


def test_a_follower_that_a_plan_went_on_without_comes_first_when_its_stage_is_lost():
    """It may have switched with the others, and then holds what nobody else holds any more."""
    world = staged(workers=4, stages=2)
    world.agent(*range(4), 8, 9)
    world.exited(0)
    world.entered(1, world.plan.generation, 1)
    hello(world, 9)
    world.healed(9)
    assert pools(world.prepared) == [(1, 9), (2, 3)]
    hello(world, 8)
    world.exited(3)
    assert pools(world.plan) == [(1,), (2,)] and world.prepared is None
    world.exited(1)
    assert pools(world.plan) == [(9,), (2,)]


def test_a_follower_says_what_it_holds_to_a_coordinator_that_has_not_seen_it_follow():
    """What a coordinator knows of joiners dies with it."""
    before = staged(workers=4, stages=2)
    before.exited(0)
    before.entered(1, before.plan.generation, 1)
    plan = before.plan
    world = before.restart()
    world.agent(1, 2, 3, 8, 9)
    for worker in (1, 2, 3):
        world.hello(worker, plan=plan, step=1)
    hello(world, 8)
    hello(world, 9, step=1, stages=(0,))
    world.exited(1)
    assert pools(world.plan) == [(9,), (2, 3)]


def test_a_standby_is_promoted_and_the_reason_names_it():
    world = staged(redundancy=1)
    assert [s.role for s in world.plan.seats] == ["active", "standby"] * 3
    world.exited(2)
    assert "worker 3, standby of stage 1, takes the lanes of worker 2" in world.plan.reason
    assert [s.role for s in world.plan.pool(1)] == ["active"]
    world.entered(0, 2, 1)
    assert world.prepared is None, "the other standbys are wanted as such"
    two = staged(workers=4, stages=2, redundancy=1)
    two.exited(2)
    assert "worker 3, standby of stage 1, takes the lanes of worker 2" in two.plan.reason


def test_a_standby_takes_the_lanes_of_those_alone_who_had_any():
    world = running(4, elsewhere=(0, 1), wish=make_wish(4, 1, 3))
    assert [s.role for s in world.plan.seats] == ["active", "standby", "standby", "standby"]
    for name in ("a2", "w0.0", "w1.0"):
        drop(world, name)
    world.wait(2 * S)
    assert world.plan.worker_ids == (2, 3)
    assert world.plan.reason.endswith("worker 2, standby, takes the lanes of worker 0")


def test_a_lost_pool_takes_a_backup_of_the_largest_and_says_so():
    world = staged()
    for i in range(6):
        world.progress(i, 1, 9)
    world.exited(2)
    world.entered(0, 2, 10)
    world.clear()
    world.exited(3)
    assert pools(world.plan) == [(0,), (1,), (4, 5)]
    assert "stage 1 has lost its whole pool" in world.plan.reason and "fallback" not in world.kinds()
    world.entered(0, 3, 7)
    told = world.report("fallback")
    assert "stage 1 lost its whole pool: worker 1 takes stage 1" in told["reason"]
    assert "from a copy of step 6: 3 steps are repeated" in told["reason"] and told["steps_redone"] == 3
    world.progress(1, 2, 9)  # as it says how far it had been before it enters
    world.entered(1, 3, 7)
    assert world.kinds().count("fallback") == 1 and world.coordinator.status()["step"] == 6


def test_a_fallback_is_told_once_and_not_again_with_the_next_death():
    world = staged()
    for i in range(6):
        world.progress(i, 1, 9)
    world.exited(2)
    world.exited(3)
    world.entered(0, 3, 7)
    assert world.kinds().count("fallback") == 1
    world.exited(5)
    world.entered(0, 4, 7)
    assert world.plan.generation == 4 and world.kinds().count("fallback") == 1


def test_a_lost_pool_is_told_once_whatever_happens_before_it_is_restored():
    world = staged()
    for i in range(6):
        world.progress(i, 1, 9)
    world.exited(2)
    world.entered(0, 2, 10)
    world.clear()
    world.exited(3)
    world.exited(4)
    world.entered(0, 4, 1)
    assert world.kinds().count("fallback") == 1
    told = world.report("fallback")
    assert "stage 1" in told["reason"] and "step 0, as there is no copy" in told["reason"]
    assert told["steps_redone"] == 9


def test_a_neighbour_serves_a_lost_stage_in_addition_until_a_newcomer_has_healed():
    world = staged(workers=3)
    world.exited(1)
    assert pools(world.plan) == [(0,), (0,), (2,)]
    first = next(w for w in world.coordinator.status()["workers"] if w["worker_id"] == 0)
    assert (first["stage"], first["stages"], first["role"], first["lanes"]) == (0, [0, 1], "leader", list(range(8)))
    world.entered(0, 2, 1)
    world.started(1, 1)
    hello(world, 1, 1)
    heal = world.last(m.Heal, "w1.1")
    assert heal.stages == [1] and heal.holders == [[0]] and [d.worker_id for d in heal.donors] == [0]
    world.healed(1, 1)
    assert pools(world.prepared) == [(0,), (1,), (2,)]


def test_a_ready_spare_goes_to_a_lost_stage_however_large_the_state():
    world = staged(workers=3)
    hello(world, 3)
    world.exited(1)
    assert pools(world.plan) == [(0,), (3,), (2,)] and world.plan.joining == (3,)


def test_who_has_yet_to_copy_a_stage_does_not_hold_it():
    world = staged(workers=3)
    hello(world, 3)
    world.exited(1)
    assert world.plan.joining == (3,)
    world.entered(0, 2, 1)
    world.exited(2)
    assert "stage 1, 2 has lost its whole pool" in world.plan.reason


def test_the_donors_of_a_joiner_are_those_of_its_stage_backups_first():
    world = staged()
    world.exited(5)
    world.entered(0, 2, 1)
    world.started(5, 1)
    hello(world, 5, 1)
    heal = world.last(m.Heal, "w5.1")
    assert heal.stages == [2] and heal.holders == [[4]]
    assert next(w for w in world.coordinator.status()["workers"] if w["worker_id"] == 5)["role"] == "joining"


def test_two_joiners_at_once_heal_for_different_stages():
    world = staged()
    world.exited(1)
    world.exited(4)
    world.entered(0, 3, 1)
    hello(world, 8)
    hello(world, 9)
    assert [world.last(m.Heal, f"w{i}.0").stages for i in (8, 9)] == [[0], [2]]
    world.healed(8)
    world.healed(9)
    assert pools(world.prepared) == [(0, 8), (2, 3), (5, 9)]


def test_a_small_state_is_taken_in_at_once_up_to_the_target():
    world = running(3)
    hello(world, 3, state_bytes=1 << 20)
    hello(world, 4, state_bytes=1 << 20)
    world.exited(1)
    assert world.plan.worker_ids == (0, 2, 3) and world.plan.joining == (3,)
    assert "worker 3 takes part from here" in world.plan.reason
    assert world.plan.lanes_of(3) == (3, 4, 5), "it takes the lost lanes"
    world.entered(0, 2, 1)
    assert world.last(m.Heal) is None


@pytest.mark.parametrize("state_bytes", [-1, LARGE])
def test_a_large_or_unknown_state_heals_while_the_others_train(state_bytes):
    world = running(3)
    hello(world, 3, state_bytes=state_bytes)
    world.exited(1)
    assert world.plan.worker_ids == (0, 2)
    world.entered(0, 2, 1)
    assert world.last(m.Heal, "w3.0").stages == [0]


def test_shrinking_takes_nobody_in():
    world = running(3, on_failure="shrink")
    hello(world, 3, state_bytes=0)
    world.exited(1)
    assert world.plan.worker_ids == (0, 2)


def test_the_map_names_the_leader_until_it_is_gone():
    wish = PoolWish(homes=((0, 1), (2, 3)), active=(2, 2), leaders=(1, None))
    world = running(4, stages=2, wish=wish)
    assert [world.plan.leader(stage) for stage in (0, 1)] == [1, 2]
    restored = world.restart()
    assert restored.plan == world.plan and restored.plan.leaders == (1, None)
    world.exited(1)
    assert world.plan.leader(0) == 0 and world.plan.leaders == ()


def test_scaling_down_keeps_every_stage():
    world = staged()
    assert "from 3 (one per stage) to" in world.command("scale", workers=2).error
    assert world.command("scale", workers=3).ok
    assert pools(world.prepared) == [(0,), (2,), (4,)]


def test_scaling_up_ends_where_every_lane_of_every_stage_has_a_worker():
    world = staged()
    assert "to 24 (lanes)" in world.command("scale", workers=25).error
    assert world.command("scale", workers=24).ok


def test_the_only_one_of_a_stage_is_not_drained():
    world = staged(workers=3)
    assert "nobody else holds stage 1" in world.command("drain", worker_id=1).error
    world = staged()
    assert world.command("drain", worker_id=2).ok
    assert pools(world.prepared) == [(0, 1), (3,), (4, 5)]


def test_who_is_about_to_leave_holds_no_stage_for_those_that_stay():
    """Nobody has settled, so the plan without the others has to wait."""
    world = World(workers=6, stages=3, wish=make_wish(6, 3))
    world.agent(*range(6))
    for i in range(6):
        world.hello(i)
    assert world.command("scale", workers=4).ok and pools(world.plan) == [(0, 1), (2, 3), (4, 5)]
    assert "nobody else holds stage 1" in world.command("drain", worker_id=2).error
    assert world.command("drain", worker_id=5).ok
    assert "nobody else holds stage 2" in world.command("drain", worker_id=4).error


def test_the_journal_brings_the_stages_back():
    world = staged(redundancy=1)
    world.exited(2)
    again = world.restart()
    assert again.plan == world.plan and pools(again.plan) == [(0, 1), (3,), (4, 5)]


def test_fewer_than_asked_start_with_several_stages_each():
    world = World(workers=4, stages=4, wish=make_wish(4, 4))
    world.agent(0, 1)
    world.hello(0)
    world.hello(2)
    world.wait(11 * S)
    assert pools(world.plan) == [(0,), (0,), (2,), (2,)]


def test_a_healed_joiner_is_named_when_it_alone_is_left():
    world = running(2)
    world.exited(1)
    world.entered(0, 2, 5)
    hello(world, 4)
    world.exited(0)
    world.wait(11 * S)
    assert "starting over from the newest copy" in world.plan.reason, "it had not healed"
    world = running(2)
    world.exited(1)
    world.entered(0, 2, 5)
    hello(world, 4)
    hello(world, 5)
    world.healed(4)
    world.exited(0)
    world.wait(11 * S)
    fallback = world.report("fallback")
    assert "worker 4, which had healed, goes on from step 5" in fallback["reason"] and fallback["step"] == 5


def test_a_joiner_that_follows_a_lost_stage_takes_that_one():
    world = staged(workers=6)
    world.exited(4)
    world.entered(0, 2, 1)
    hello(world, 9)
    assert world.last(m.Heal, "w9.0").stages == [2]
    world.healed(9)
    world.exited(2)  # before anybody has switched to the plan with worker 9
    world.exited(5)
    assert pools(world.plan) == [(0, 1), (3,), (9,)]
