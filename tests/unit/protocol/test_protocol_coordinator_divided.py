"""Plans of a job whose members divide the optimizer's state: who holds what, what moves, who joins, what is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from coordinator_harness import World, drop, running

from everstep.base.cause import Cause, Why
from everstep.base.plan import SEGMENTS, Plan, Shard
from everstep.base.pool_wish import PoolWish, even_homes
from everstep.placement.shards import lost_stages, numbers_of_runs, segment_holders
from everstep.protocol import messages as m


def divided(workers: int, copies: int, stages: int = 1, **config: Any) -> World:
    wish = PoolWish(homes=even_homes(workers, stages), copies=copies)
    return running(workers, wish=wish, stages=stages, **config)


def held(plan: Plan | None, stage: int = 0) -> dict[int, set[int]]:
    """Segments of each member of a pool."""
    assert plan is not None
    found: dict[int, set[int]] = {seat.worker_id: set() for seat in plan.pool(stage)}
    for number, holders in enumerate(segment_holders(plan, stage)):
        for worker_id in holders:
            found[worker_id].add(number)
    return found


def all_enter(world: World, step: int = 2, **lives: int) -> None:
    """lives: w2=1, the incarnation of worker 2, say."""
    assert world.plan is not None
    for i in world.plan.worker_ids:
        world.entered(i, world.plan.generation, step, incarnation=lives.get(f"w{i}", 0))


@pytest.mark.parametrize(("workers", "copies", "stages"), [(3, 1, 1), (4, 2, 1), (6, 2, 2)])
def test_each_segment_of_each_stage_has_so_many_holders_in_its_own_pool(workers: int, copies: int, stages: int) -> None:
    world = divided(workers, copies, stages)
    plan = world.plan
    assert plan is not None
    told = [w["segments"] for w in world.coordinator.status()["workers"]]
    assert sum(number for number, _ in told) == copies * stages * SEGMENTS and {of for _, of in told} == {SEGMENTS}
    for stage in range(stages):
        counts = Counter(n for segments in held(plan, stage).values() for n in segments)
        assert counts == dict.fromkeys(range(SEGMENTS), copies)
        sizes = [len(segments) for segments in held(plan, stage).values()]
        assert max(sizes) - min(sizes) <= 1
    assert {shard.stage for shard in plan.shards} == set(range(stages))


def test_where_each_holds_all_plans_say_nothing_of_it() -> None:
    world = running(3)
    assert world.plan is not None and world.plan.shards == ()
    assert world.coordinator.status()["workers"][0]["segments"] == [SEGMENTS, SEGMENTS]


@pytest.mark.parametrize(("workers", "copies"), [(3, 1), (4, 1), (5, 2)])
def test_who_stays_keeps_what_it_has(workers: int, copies: int) -> None:
    """Segments that move are copied while all wait."""
    world = divided(workers, copies)
    before = held(world.plan)
    world.exited(1)
    after = held(world.plan)
    assert 1 not in after and all(before[i] <= after[i] for i in after)


def test_a_joiner_gets_the_part_that_it_will_have_while_the_others_go_on() -> None:
    world = divided(3, 2)
    world.exited(2)
    all_enter(world)
    between = held(world.plan)
    world.hello(2, 1)
    heal = world.last(m.Heal, "w2.1")
    assert world.plan is not None and world.plan.generation == 2 and heal.plan == world.plan
    assert heal.holders == [[1, 0]] and [(s.worker_id, s.stage) for s in heal.shards] == [(2, 0)]
    world.healed(2, 1)
    world.wait(300_000_000)
    assert world.prepared is not None and world.prepared.joining == (2,) and world.prepared.cause is Cause.JOINED
    after = held(world.prepared)
    assert after[2] == numbers_of_runs(heal.shards[0].segments) and all(after[i] <= between[i] for i in (0, 1))


@pytest.mark.parametrize(("workers", "copies", "parts"), [(1, 2, []), (2, 2, [170]), (3, 1, [64])])
def test_of_so_many_segments_of_a_ticket_where_few_have_all(workers: int, copies: int, parts: list[int]) -> None:
    """Where everybody has all, one donor feeds all."""
    wish = PoolWish(homes=even_homes(workers + 1, 1), copies=copies)
    world = running(workers + 1, wish=wish)
    world.exited(workers)
    all_enter(world)
    world.hello(workers, 1)
    told = world.last(m.Heal, f"w{workers}.1").shards
    assert [sum(hi - lo for lo, hi in shard.segments) for shard in told] == parts


def test_spares_stay_out_while_nobody_is_missing_and_then_get_their_part() -> None:
    world = divided(3, 2)
    world.agent(3, name="a2", host="a2")
    world.hello(3, host="a2")
    world.wait(5_000_000_000)
    assert world.plan is not None and world.plan.generation == 1
    world.exited(1)
    assert world.plan.worker_ids == (0, 2)
    all_enter(world)
    assert world.last(m.Heal, "w3.0").shards


def test_nobody_is_taken_in_while_a_host_may_be_lost() -> None:
    world = running(4, elsewhere=(2, 3), wish=PoolWish(homes=even_homes(4, 1), copies=2))
    world.exited(1)
    assert world.plan is not None
    for name in ("a2", "w2.0", "w3.0"):
        drop(world, name)
    all_enter(world)
    generation = world.plan.generation
    world.hello(1, 1)
    assert world.plan.generation == generation


@pytest.mark.parametrize(("copies", "lost"), [(1, True), (2, False)])
def test_a_stage_is_lost_with_the_last_copy_of_any_segment(copies: int, lost: bool) -> None:
    world = divided(4, copies)
    assert world.plan is not None
    assert lost_stages(world.plan, [0, 1, 2]) == [0] * lost and lost_stages(world.plan, [0, 1, 2, 3]) == []
    world.exited(3)
    assert ("back to the newest copy" in world.plan.reason) == lost
    assert lost_stages(world.plan, []) == [0]


def test_fewer_workers_than_copies_are_told_once_when_it_comes_to_that() -> None:
    def told(world: World) -> list[str]:
        return [r.fields["reason"] for r in world.reports if r.kind == "warning"]

    world = divided(4, 3)
    world.exited(3)
    all_enter(world, 2)
    assert not told(world)
    world.exited(2)
    all_enter(world, 3)
    assert len(told(world)) == 1 and told(world)[0].startswith("2 of zero.copies=3 copies of the optimizer's state are")
    world.exited(1)
    all_enter(world, 4)
    assert len(told(world)) == 1


@pytest.mark.parametrize(("copies", "wanted"), [(1, 3), (2, 2), (1, 1)])
def test_what_those_who_leave_hold_alone_is_copied_before_they_go(copies: int, wanted: int) -> None:
    world = divided(4, copies)
    before, going = held(world.plan), [*range(wanted, 4)]
    world.command("scale", workers=wanted)
    first = world.prepared
    assert first is not None and first.worker_ids == (0, 1, 2, 3) and first.cause is Cause.SCALED
    assert first.reason.endswith(" as asked, once the others have copied what nobody else holds")
    after = held(first)
    assert all(after[i] == before[i] for i in going) and lost_stages(first, range(wanted)) == []
    assert Counter(n for i in range(wanted) for n in after[i]) == dict.fromkeys(range(SEGMENTS), min(copies, wanted))
    for i in first.worker_ids:
        world.entered(i, first.generation, 2)
    second = world.prepared
    assert second is not None and second.worker_ids == tuple(range(wanted)), "nobody holds anything alone any more"
    assert held(second) == {i: after[i] for i in range(wanted)}


def handing_over() -> World:
    """Worker 3 is about to leave, and lacks nothing; the others have yet to copy what it holds."""
    world = divided(4, 1, save_ns=5_000_000_000)
    world.command("scale", workers=3)
    assert world.prepared is not None
    world.entered(3, world.prepared.generation, 2)
    assert world.plan is not None and world.plan.generation == 2
    return world


def fails(world: World, worker_id: int, generation: int, incarnation: int = 0, **more: Any) -> None:
    words = {"step": 7, "reason": "ValueError: boom", "signature": "x", "fatal": False, "holds": True} | more
    life = {"worker_id": worker_id, "incarnation": incarnation, "generation": generation}
    world.say(f"w{worker_id}.{incarnation}", m.WorkerFailed(**life, **words))


NO_ROOM = {"step": 1, "reason": "no room", "fatal": True, "holds": False, "exit_code": 2, "cause": Cause.DISK}


@pytest.mark.parametrize(("dies", "copied", "lost"), [(3, False, (0,)), (0, False, (0,)), (3, True, ())])
def test_what_nobody_has_copied_yet_is_lost_with_who_leaves(dies: int, copied: bool, lost: tuple[int, ...]) -> None:
    world = handing_over()
    for i in range(3 if copied else 0):
        world.entered(i, 2, 2)
    world.exited(dies)
    assert world.plan is not None and dies not in world.plan.worker_ids
    assert world.coordinator.job.progress.lost_stages == lost
    assert ("back to the newest copy" in world.plan.reason) == bool(lost)


def test_who_leaves_is_needed_until_the_others_have_copied() -> None:
    world = handing_over()
    fails(world, 3, 2)
    assert world.plan is not None and world.plan.worker_ids == (0, 1, 2, 3) and world.plan.save


def test_nobody_stays_for_a_stage_that_is_lost_anyway() -> None:
    world = divided(4, 1, save_ns=5_000_000_000, min_workers=4)
    world.exited(2)
    fails(world, 3, 1)
    assert [w.key.worker_id for w in world.coordinator.job.agreement.survivors()] == [0, 1]


@pytest.mark.parametrize("heals", [True, False])
def test_a_successor_that_has_copied_what_a_worker_holds_alone_takes_its_place_at_once(heals: bool) -> None:
    world = divided(4, 1)
    before = held(world.plan)
    world.agent(4, name="a2", host="a2")
    world.coordinator.job.slots.want(4, {0, 1, 2, 4}, Why(Cause.REBALANCED, "to another host"))
    world.hello(4, host="a2")
    if not heals:  # its ticket is of a time when others were there
        join = world.coordinator.job.healing.joins[4]
        world.coordinator.job.healing.joins[4] = replace(join, parts=(Shard(4, 0, segments=((0, 1),)),))
    world.healed(4)
    world.wait(300_000_000)
    assert world.prepared is not None
    assert world.prepared.worker_ids == ((0, 1, 2, 4) if heals else (0, 1, 2, 3, 4))
    assert held(world.prepared)[4] == before[3]


@pytest.mark.parametrize(("step", "ends"), [(5, False), (0, True)])
def test_a_disk_that_a_later_life_cannot_use_does_not_end_the_others(step: int, ends: bool) -> None:
    """Before the first step it is a config that cannot be carried out."""
    world = running(3)
    for i in range(3 if step else 0):
        world.progress(i, 1, step)
    words = {"step": 0, "reason": "no room", "signature": "x", "fatal": True, "exit_code": 2, "cause": Cause.DISK}
    for life in (0, 1, 2):
        world.say("w2.0" if not life else "a1", m.WorkerFailed(worker_id=2, incarnation=life, **words))
        assert (world.last(m.JobEnded, "w0.0") is not None) == ends
        if ends:
            break
        assert world.plan is not None and world.plan.worker_ids == (0, 1)
        world.exited(2, life)
        world.started(2, life + 1)


def test_a_disk_that_no_member_can_use_ends_the_job_as_a_config_that_cannot_be_carried_out() -> None:
    world = running(3)
    world.progress(0, 1, 1)
    words = {"incarnation": 0, "step": 0, "reason": "no room", "signature": "x", "fatal": True, "exit_code": 2}
    for i, generation in ((2, 1), (1, 2)):
        assert world.last(m.JobEnded, "w0.0") is None
        failed = m.WorkerFailed(worker_id=i, generation=generation, cause=Cause.DISK, **words)
        world.say(f"w{i}.0", failed)
    ended = world.last(m.JobEnded, "w0.0")
    assert ended is not None and ended.exit_code == 2 and "failed after step 0, as worker 2" in ended.reason


def test_a_disk_that_a_slot_cannot_use_life_after_life_says_nothing_of_the_others() -> None:
    world = running(3)
    world.progress(0, 1, 1)
    fails(world, 2, 1, **NO_ROOM)
    all_enter(world)
    world.started(2, 1)
    world.hello(2, 1)
    world.healed(2, 1)
    world.wait(300_000_000)
    assert world.prepared is not None
    world.entered(2, world.prepared.generation, 2, incarnation=1)
    fails(world, 2, 3, 1, **NO_ROOM)
    assert world.last(m.JobEnded, "w0.0") is None and world.plan is not None and world.plan.worker_ids == (0, 1)


def test_a_disk_that_a_life_cannot_use_ends_the_job_where_no_member_lives() -> None:
    world = running(3)
    world.progress(0, 1, 1)
    for i in range(3):
        world.exited(i)
    world.started(2, 1)
    world.hello(2, 1)
    fails(world, 2, 0, 1, **NO_ROOM)
    ended = world.last(m.JobEnded, "a1")
    assert ended is not None and ended.exit_code == 2 and ended.reason.endswith("no room")


@pytest.mark.parametrize(("copies", "needed"), [(1, True), (2, False)])
def test_what_a_worker_holds_alone_is_saved_before_an_exception_ends_it(copies: int, needed: bool) -> None:
    world = divided(4, copies, save_ns=5_000_000_000)
    fails(world, 3, 1)
    assert world.plan is not None and world.plan.generation == 2
    assert world.plan.worker_ids == ((0, 1, 2, 3) if needed else (0, 1, 2)) and bool(world.plan.save) == needed
