"""The driver where the members of a pool have divided the optimizer's state: between an update and the next step they
give each other the parameters, and who has less than its share settles."""

from __future__ import annotations

import math
from typing import Any

import pytest
from driver_harness import Worker, at, joiner, payload, plan, records_of
from msgspec.structs import replace

from everstep.base.config_keys import CheckpointConfig, DiskTierConfig, MemoryTierConfig
from everstep.base.extents import NONE, WHOLE, Extents
from everstep.base.plan import Plan, Shard
from everstep.placement.shards import share
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.nonfinite import NonfiniteRule
from everstep.protocol.driver.records import encode
from everstep.protocol.driver.saver import SavingRules
from everstep.protocol.step_types import Holds, Key, Record, Takes

OF = (("model", 2), ("optimizer/exp_avg", 4), ("optimizer/exp_avg_sq", 4))
SHARDS = (Shard(0, 0, segments=((0, 128),)), Shard(1, 0, segments=((128, 256),)))
MINE = share(SHARDS[0], OF)
PART = Extents.numbered(OF, (0, 2, 3, 6, 7))
"""After an update: half of the parameters, and the optimizer's state for them."""
EACH_ON_DISK = SavingRules(CheckpointConfig(disk=DiskTierConfig(every_steps=1)), True)
EVERY_STEP = SavingRules(CheckpointConfig(memory=MemoryTierConfig(every_steps=1)), True, 1)


def divided(generation: int, *pool: int, **more: Any) -> Plan:
    shards = tuple(shard for shard in SHARDS if shard.worker_id in pool)
    return plan(generation, pool, shards=shards if len(pool) > 1 else (), **more)


def holder(given: Plan | None = None, **config: Any) -> Worker:
    return Worker(given or divided(1, 0, 1), **config)


def updated(w: Worker, number: int, prepared: int = 0) -> None:
    """As far as the update, of a part."""
    w.to_reduce(number)
    w.on(Takes(number, {0: PART if number > 1 else NONE}))
    w.reduce()
    w.agree(prepared=prepared)
    assert isinstance(w.op, do.Update)
    w.on(Holds(number, {0: PART}))


def answered(w: Worker) -> bool:
    return any(isinstance(effect, do.Stepped) for effect in w.out)


def test_a_step_is_done_when_the_parameters_of_others_have_come() -> None:
    w = holder(saving=EVERY_STEP)
    for number in (1, 2):
        updated(w, number)
        w.done(1001)
        assert w.op == do.Spread(w.op.op, 1, w.plan, number)
        assert not answered(w) and "Keep" not in w.kinds
        w.done(Holds(number, {0: MINE}))
        assert answered(w) and "Keep" in w.kinds
        assert w.driver.machine.held == {0: MINE} and not w.told(wire.SettleAgain)


def test_where_all_have_all_nothing_is_given() -> None:
    w = Worker(plan(1, (0, 1)), saving=EVERY_STEP)
    w.step(1)
    assert answered(w) and "Keep" in w.kinds and not w.count(do.Spread)


@pytest.mark.parametrize("held", [PART, MINE], ids=["some is lacking", "all is here"])
def test_a_step_that_moves_segments_is_saved_nowhere_whoever_has_all(held: Extents) -> None:
    """Others may lack something: of a part of each there would be no whole. What was due follows the next step."""
    w = holder(saving=EACH_ON_DISK)
    updated(w, 1)
    w.done(1001)
    w.done(Holds(1, {0: held}, moved=True))
    assert not w.count(do.Save) and not w.count(do.Keep) and answered(w) == (held == MINE)
    assert bool(w.told(wire.SettleAgain)) == (held == PART)
    if held == MINE:
        updated(w, 2)
        w.done(1002)
        w.done(Holds(2, {0: MINE}))
        assert w.last(do.Save).step == 2 and w.last(do.Save).due.reason == "every 1 steps"


def test_one_that_lacks_something_begins_no_checkpoint() -> None:
    w = holder(saving=EACH_ON_DISK)
    updated(w, 1)
    w.done(1001)
    w.done(Holds(1, {0: PART}))
    assert not w.count(do.Save) and w.told(wire.SettleAgain)


@pytest.mark.parametrize("stage", [0, 1])
def test_only_members_of_a_pool_that_is_divided_give_anything(stage: int) -> None:
    shards = tuple(Shard(i, stage, segments=runs) for i, runs in enumerate([((0, 128),), ((128, 256),)], 2 * stage))
    w = Worker(plan(1, (0, 1), (2, 3), shards=shards))
    w.to_reduce(1)
    w.reduce()
    w.agree()
    w.done(1001)
    assert isinstance(w.op, do.Spread) == (stage == 0)
    assert answered(w) == (stage == 1)


def test_after_an_update_that_is_left_out_there_is_nothing_to_give() -> None:
    w = holder(nonfinite=NonfiniteRule("skip", 2))
    w.to_agree(1)
    said = payload(w.plan, 1)
    (section,) = said.sections
    lanes = [replace(lane, loss=math.nan) for lane in section.lanes]
    w.exchange({1: Record(0, encode(replace(said, sections=[replace(section, lanes=lanes)])))})
    assert w.op.outcome.nonfinite.left_out
    w.done(1001)
    assert answered(w) and not w.count(do.Spread)


def lost(w: Worker) -> None:
    """The exchange breaks, as the other has died."""
    w.done(1001)
    assert isinstance(w.op, do.Spread)
    w.abort(1, reason="reset by peer")


def test_who_has_not_all_of_its_share_of_a_step_settles_with_what_it_has() -> None:
    w = holder(saving=EVERY_STEP)
    updated(w, 1)
    lost(w)
    assert not answered(w) and "Keep" not in w.kinds
    (fault,), (again,) = w.told(wire.PeerFault), w.told(wire.SettleAgain)
    assert fault.accused == [1] and "not all of its share of step 1" in again.reason
    w.hear(divided(2, 0, 1))
    assert isinstance(w.op, do.Open) and w.op.disk, "what is in memory may not do"
    w.done(do.Opened())
    said = w.stated()
    assert said.position == Key(1, 0) and said.stages == {0: PART}


def test_who_has_copied_its_share_from_members_that_have_all_has_no_more_than_that() -> None:
    """If the next generation begins before its first update, it lacks the rest."""
    shards = (Shard(0, 0, segments=((0, 2),)), Shard(1, 0, segments=((2, 256),)))
    w, part = joiner(), share(shards[0], OF)
    w.hear(plan(4, (0, 1), shards=shards))
    w.settle(w1=at(3))
    assert isinstance(w.op, do.Fetch) and w.op.sources == {0: (1,)} and not w.op.pieces
    w.done(do.Copied(records_of(w.plan), sizes={0: OF}))
    assert w.driver.machine.held == {0: part} and not part.whole
    w.ask(do.StepAsked(4))
    w.enter(plan(5, (0, 1)), w1=at(3))
    assert isinstance(w.op, do.Fetch) and w.op.pieces[0].missing == WHOLE - part


def test_what_is_on_disk_is_stated_where_the_state_is_divided() -> None:
    """Nobody has all of it: it may be lost with a member."""
    for given, disk in ((divided(2, 0, 1), True), (plan(2, (0, 1)), False)):
        w = Worker(plan(1, (0, 1)))
        w.step(1)
        w.ask(do.StepAsked(2))
        w.hear(given)
        w.abort()
        assert isinstance(w.op, do.Open) and w.op.disk == disk


def test_a_plan_that_comes_during_an_update_is_settled_without_an_exchange() -> None:
    """Who lacks something then copies it there, with everything else."""
    w = holder(saving=EVERY_STEP)
    w.to_reduce(1)
    w.on(Takes(1, {0: NONE}))
    w.reduce()
    w.hear(divided(2, 0, 1))
    w.agree()
    w.on(Holds(1, {0: PART}))
    w.done(1001)
    assert not w.count(do.Spread) and not answered(w) and "Keep" not in w.kinds and isinstance(w.op, do.Open)
    w.done(do.Opened())
    assert w.stated().stages == {0: PART}


def test_members_that_are_about_to_switch_do_not_exchange_either() -> None:
    w = holder(saving=EVERY_STEP)
    following = divided(2, 0, 1, prepared=True)
    w.hear(following)
    updated(w, 1, prepared=2)
    w.done(1001)
    assert not w.count(do.Spread) and "Keep" not in w.kinds and isinstance(w.op, do.Open) and w.plan == following
    w.done(do.Opened())
    assert w.stated().stages == {0: PART}


def test_what_is_said_to_be_held_of_another_step_has_no_effect() -> None:
    w = holder()
    updated(w, 1)
    w.on(Holds(2, {0: WHOLE}))
    w.on(Holds(0, {0: WHOLE}))
    assert w.driver.machine.held == {0: PART}


def test_a_gradient_takes_to_its_step_what_was_said_of_it() -> None:
    w = holder()
    updated(w, 1)
    w.done(1001)
    w.done(Holds(1, {0: MINE}))
    w.to_reduce(2)
    w.on(Takes(3, {0: NONE}))
    w.on(Takes(2, {0: PART}))
    w.reduce()
    w.hear(divided(2, 0, 1))
    w.abort()
    w.done(do.Opened())
    assert (w.stated().gradient_step, w.stated().gradients) == (2, {0: PART})
