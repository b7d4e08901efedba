"""Which checkpoints the driver has taken, given up and told: its saver alone, and in its place in the driver."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.base.cause import Cause, Why
from everstep.base.config_keys import CheckpointConfig, DiskTierConfig, MemoryTierConfig, ObjectTierConfig
from everstep.base.plan import Member, Plan, Seat, Shard, WorkerKey
from everstep.protocol import messages as wire
from everstep.protocol import step_types as step
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver
from everstep.protocol.driver.driver_parts import DriverConfig
from everstep.protocol.driver.operations import AbandonSave, PartsThere, Save, SaveAsked, SaveEnded
from everstep.protocol.driver.outbox import Gathers, Outbox
from everstep.protocol.driver.policy import Due
from everstep.protocol.driver.records import (
    AgreePayload,
    GatherPayload,
    LaneReport,
    StageSection,
    StepOutcome,
    conclude,
    decode_record,
    encode,
)
from everstep.protocol.driver.saver import GIVE_UP_S, Saver, SavingRules
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import Key, Record

EACH = CheckpointConfig(disk=DiskTierConfig(every_steps=1))
SELDOM = CheckpointConfig(disk=DiskTierConfig(every_steps=1000))
BEST = CheckpointConfig(disk=DiskTierConfig(every_steps=1, keep_best=1), best_metric="accuracy")
RECORDS = {0: Record(0, b"of the update")}
WHY = Why(Cause.INTERRUPTED, "SIGTERM")
SECOND = 10**9


def plan_of(*ids: int, generation: int = 1, leader: int | None = None, save: str = "") -> Plan:
    """The members share four lanes."""
    share = len(ids)
    seats = tuple(Seat(w, 0, "active", tuple(range(k, 4, share))) for k, w in enumerate(ids))
    leaders = () if leader is None else (leader,)
    return Plan(generation, "test", tuple(Member(i, 0, "here") for i in ids), seats, 4, leaders=leaders, save=save)


class Alone:
    """A saver, and what it is told of the machine that it looks at."""

    def __init__(self, saving: SavingRules, me: int = 0) -> None:
        self.machine = SimpleNamespace(
            me=WorkerKey(me, 0), plan=plan_of(0, 1), settled=True, position=Key(5, 0), records=RECORDS
        )
        self.machine.current_plan = lambda: self.machine.plan
        self.out, self.gathers = Outbox(WorkerKey(me, 0)), Gathers()
        self.saver = Saver(self.machine, self.out, self.gathers, saving)  # type: ignore[arg-type]

    def at(self, seconds: float) -> None:
        self.out.times.tick(int(seconds * SECOND))

    def update(self, number: int, *tiers: str) -> list[do.Effect]:
        self.machine.position = Key(number, 0)
        save = (tiers, "it is time")
        said = StepOutcome(number, (), {}, 0.0, 1.0, 0.0, {}, {}, save=save, save_cause=Cause.SCHEDULED)
        self.saver.updated(said, RECORDS)
        return self.out.drain()

    def judge(self, data: bytes, event: SaveAsked, past: bool = False) -> list[do.Effect]:
        """All gather what the job's leader says."""
        records = {0: Record(0, encode(GatherPayload(data, 0))), 1: Record(0, encode(nothing()))}
        self.saver.judged(event, records, past=past)
        return self.out.drain()


def nothing() -> GatherPayload:
    return GatherPayload(b"", 0)


def told(effects: list[do.Effect]) -> list[wire.Saved]:
    return [e.message for e in effects if isinstance(e, do.Tell) and isinstance(e.message, wire.Saved)]


# ---- what is due


def test_only_the_main_says_what_is_due() -> None:
    assert Alone(SavingRules(EACH, on=True)).saver.due(6) == Due(("disk",), "every 1 steps")
    other = Alone(SavingRules(EACH, on=True), me=1)
    assert not other.saver.due(6)
    other.machine.plan = None
    assert not other.saver.due(6)


def test_a_step_that_is_done_again_gets_the_same_answer() -> None:
    one = Alone(SavingRules(SELDOM, on=True))
    one.saver.request(WHY)
    assert one.saver.due(6) == one.saver.due(6) == Due(("disk",), "SIGTERM", Cause.INTERRUPTED)
    assert not one.saver.due(7)


@pytest.mark.parametrize(("every", "expected"), [(None, [10, 20]), (4, [4, 8, 12, 16, 20])])
def test_without_a_disk_snapshots_in_memory_are_left(every: int | None, expected: list[int]) -> None:
    rule = CheckpointConfig(memory=MemoryTierConfig(every_steps=every))
    found = {n: Alone(SavingRules(rule, memory_every=10)).saver.due(n) for n in range(1, 21)}
    assert [n for n, due in found.items() if due] == expected
    assert found[20] == Due(("memory",), f"every {every or 10} steps")
    assert not any(Alone(SavingRules(rule)).saver.due(n) for n in range(1, 21))


def test_without_a_disk_a_request_is_refused() -> None:
    one = Alone(SavingRules(SELDOM))
    one.saver.request(WHY)
    assert told(one.out.drain()) == [
        wire.Saved(
            worker_id=0,
            incarnation=0,
            step=0,
            ok=False,
            where="",
            reason="checkpoint.enabled is false: this job takes none",
        )
    ]


def test_the_end_of_an_epoch_if_that_is_affordable() -> None:
    one = Alone(SavingRules(SELDOM, on=True, epoch_ends=lambda number: number % 3 == 0))
    one.at(100)
    assert one.saver.due(6) == Due(("disk",), "the end of an epoch")
    assert not one.saver.due(7)
    one.saver.ended(SaveEnded(step=6, ok=True, reason="", cost_s=1.0))
    one.at(149)
    assert not one.saver.due(9)
    one.at(151)
    assert one.saver.due(12)


def test_none_begins_while_parts_of_one_are_lacking() -> None:
    one = Alone(SavingRules(EACH, on=True))
    one.at(10)
    assert one.saver.due(6).tiers == ("disk",)
    one.update(6, "disk")
    one.at(12)
    one.saver.request(WHY)
    assert one.saver.due(7).tiers == ()
    (skipped,) = one.out.drain()
    assert skipped == do.Skipped(
        step=7, why=Why(Cause.BUSY, "that of step 6 is still being written, since 2.0 s"), tell=True, tier="disk"
    )
    one.saver.parts_there(PartsThere(5))
    assert not one.saver.due(8)
    one.out.drain()
    one.saver.parts_there(PartsThere(6))
    assert one.saver.due(9) == Due(("disk",), "SIGTERM", Cause.INTERRUPTED)  # who asked has been waiting
    assert one.out.drain() == []


def test_one_that_takes_too_long_is_given_up() -> None:
    one = Alone(SavingRules(EACH, on=True))
    one.update(6, "disk")
    one.at(GIVE_UP_S + 1)
    assert one.saver.due(7).tiers == ("disk",)
    assert one.out.drain() == [AbandonSave(why=Why(Cause.SLOW, "it took longer than 300 s"), plan=None)]


def test_what_has_failed_is_waited_for_no_more() -> None:
    one = Alone(SavingRules(EACH, on=True))
    one.update(6, "disk")
    one.saver.ended(SaveEnded(step=6, ok=False, reason="the disk is full"))
    assert one.saver.due(7).tiers == ("disk",) and one.out.drain() == []


def test_a_checkpoint_waits_for_an_evaluation_that_judges_it() -> None:
    rule = CheckpointConfig(
        memory=MemoryTierConfig(every_steps=2), disk=DiskTierConfig(every_steps=2, keep_best=1), best_metric="accuracy"
    )
    one = Alone(SavingRules(rule, on=True, eval_every=4))
    assert one.saver.due(2).tiers == ("memory", "disk")
    assert one.saver.due(4).tiers == ("memory",)
    event = SaveAsked({"accuracy": 0.1}, stored=0.9)
    (save,) = one.judge(one.saver.verdict(event), event)
    assert isinstance(save, Save) and save.due == Due(("disk",), "every 2 steps")
    assert one.saver.verdict(event) == b""
    assert Alone(SavingRules(SELDOM, on=True, eval_every=4)).saver.due(1000).tiers == ("disk",)


def test_it_waits_for_an_evaluation_at_the_end_of_an_epoch() -> None:
    rule = CheckpointConfig(disk=DiskTierConfig(every_epochs=1, keep_best=1), best_metric="accuracy")
    ends = lambda number: number // 5 if number % 5 == 0 else 0  # noqa: E731
    one = Alone(SavingRules(rule, on=True, epoch_ends=ends, eval_every_epochs=2))
    found = {number: one.saver.due(number).tiers for number in (4, 5, 10, 15)}
    assert found == {4: (), 5: ("disk",), 10: (), 15: ("disk",)}


# ---- taking one


def test_after_the_update_whose_records_say_so() -> None:
    one = Alone(SavingRules(EACH, on=True), me=1)
    assert one.update(6) == one.update(6, "memory") == []
    due = Due(("disk", "object"), "it is time")
    assert one.update(7, "memory", "disk", "object") == [Save(plan=one.machine.plan, step=7, due=due, records=RECORDS)]
    one.machine.settled = False
    assert one.update(8, "disk") == []
    assert Alone(SavingRules(EACH)).update(6, "disk") == []


def test_at_a_boundary() -> None:
    one = Alone(SavingRules(SELDOM, on=True))
    save = one.saver.boundary(WHY, past=True, metrics={"loss": 1.0})
    due = Due(("disk",), "SIGTERM", Cause.INTERRUPTED)
    assert save == Save(
        plan=one.machine.plan, step=5, due=due, records=RECORDS, boundary=True, past=True, metrics={"loss": 1.0}
    )
    assert one.saver.boundary(WHY, past=True) is None  # it has begun
    one.machine.position = Key(6, 2)
    save = one.saver.boundary(WHY, past=False)
    assert save is not None and save.records == {} and not save.past  # nobody knows those of the update
    one.machine.position, one.gathers.known = Key(7, 2), {Key(7, 0): RECORDS}
    save = one.saver.boundary(WHY, past=False)
    assert save is not None and save.records == RECORDS


def test_not_at_a_boundary() -> None:
    for change in ({"settled": False}, {"position": Key(0, 0)}):
        one = Alone(SavingRules(SELDOM, on=True))
        vars(one.machine).update(change)
        assert one.saver.boundary(WHY, past=False) is None
    assert Alone(SavingRules(SELDOM)).saver.boundary(WHY, past=False) is None
    back = Alone(SavingRules(SELDOM, on=True))
    assert back.saver.boundary(WHY, past=False) is not None
    back.machine.position = Key(0, 0)
    assert back.saver.boundary(WHY, past=False) is None


def test_a_boundary_s_goes_to_the_object_store_too() -> None:
    rule = CheckpointConfig(object=ObjectTierConfig(url="s3://bucket/x"))
    save = Alone(SavingRules(rule, on=True)).saver.boundary(WHY, past=False)
    assert save is not None and save.due.tiers == ("disk", "object")


# ---- giving one up


def test_a_regroup_without_one_changes_nothing() -> None:
    one = Alone(SavingRules(EACH, on=True))
    one.saver.regroup(plan_of(0, generation=2))
    assert one.out.drain() == []


def test_a_plan_with_all_writers_and_the_main_leaves_it_alone() -> None:
    one = Alone(SavingRules(EACH, on=True))
    one.update(6, "disk")
    one.saver.regroup(plan_of(0, 1, 2, generation=2))
    one.saver.entered({0: Key(6, 0), 1: Key(7, 0), 2: Key(0, 0)})  # it takes no part in it
    assert one.out.drain() == [] and one.saver.due(7).tiers == ()


@pytest.mark.parametrize(("ids", "save"), [((0, 1), "SIGTERM"), ((0,), "SIGTERM"), ((0, 1), "")])
def test_a_plan_that_asks_for_the_last_one_has_the_coordinator_told_of_no_other(
    ids: tuple[int, ...], save: str
) -> None:
    """Neither that it is complete nor that it was given up."""
    one = Alone(SavingRules(SELDOM, on=True))
    one.saver.request(WHY)
    assert one.saver.due(6).tiers == ("disk",)
    one.update(6, "disk")
    one.saver.regroup(plan_of(*ids, generation=2, save=save))
    one.saver.ended(SaveEnded(step=6, ok=True, reason="", cost_s=1.0))
    assert [said.step for said in told(one.out.drain())] == ([] if save else [6])


@pytest.mark.parametrize("me", [0, 1])
def test_one_that_not_all_had_begun_is_taken_anew(me: int) -> None:
    """Who is one decision behind rolls forward when all settle, and begins nothing then: waited for its part, the
    job's leader would have none to the end, nor would a plan that asks for one."""
    ahead, behind = Alone(SavingRules(EACH, on=True), me), Alone(SavingRules(EACH, on=True), 1 - me)
    ahead.update(6, "disk")
    plan = plan_of(0, 1, generation=2, save="SIGTERM")
    for one in (ahead, behind):
        one.saver.regroup(plan)
        one.machine.plan, one.machine.settled = plan, False
    assert behind.update(6, "disk") == []
    for one in (ahead, behind):
        one.machine.settled = True
        one.saver.entered({me: Key(6, 0), 1 - me: Key(5, 3)})
        save = one.saver.boundary(WHY, past=False)
        assert save is not None and (save.step, save.plan) == (6, plan)
    assert ahead.out.drain() == [AbandonSave(why=Why(Cause.REGROUPED, "not all had begun it"), plan=None)]
    assert behind.out.drain() == []


def test_nothing_waits_for_one_that_not_all_had_begun() -> None:
    one = Alone(SavingRules(EACH, on=True))
    one.update(6, "disk")
    one.saver.regroup(plan_of(0, 1, generation=2))
    one.saver.entered({0: Key(6, 0), 1: Key(5, 0)})
    assert one.saver.due(7).tiers == ("disk",)


def test_one_at_a_boundary_that_not_all_had_come_to_is_taken_anew() -> None:
    one = Alone(SavingRules(SELDOM, on=True))
    one.machine.position = Key(6, 1)
    assert one.saver.boundary(WHY, past=False) is not None
    one.saver.regroup(plan_of(0, 1, generation=2))
    one.saver.entered({0: Key(6, 1), 1: Key(6, 0)})
    assert one.saver.boundary(WHY, past=False) is not None


@pytest.mark.parametrize(
    ("plan", "reason"),
    [(plan_of(0, generation=2), "worker 1 left"), (plan_of(0, 1, generation=2, leader=1), "the leader changed")],
)
def test_a_plan_that_takes_away_a_writer_or_the_main(plan: Plan, reason: str) -> None:
    one = Alone(SavingRules(EACH, on=True))
    one.update(6, "disk")
    one.saver.regroup(plan)
    assert one.out.drain() == [AbandonSave(why=Why(Cause.REGROUPED, reason), plan=plan)]
    assert one.saver.due(7).tiers == ("disk",)  # nothing is waited for
    assert one.saver.boundary(WHY, past=False) is not None  # it may be taken again
    one.out.drain()


@pytest.mark.parametrize(("at", "given_up"), [(Key(6, 0), True), (Key(6, 1), False), (Key(7, 0), False)], ids=str)
def test_of_a_divided_state_one_that_not_all_may_have_begun_is_given_up(at: Key, given_up: bool) -> None:
    """A member whose exchange of parameters was cut has begun none; a later decision proves that all were done."""
    one = Alone(SavingRules(EACH, on=True))
    one.machine.plan = replace(plan_of(0, 1), shards=(Shard(0, 0, segments=((0, 128),)),))
    one.update(6, "disk")
    one.machine.position = at
    plan = plan_of(0, 1, generation=2)
    one.saver.regroup(plan)
    reason = "not all may have begun it"
    assert one.out.drain() == [AbandonSave(why=Why(Cause.REGROUPED, reason), plan=plan)] * given_up


@pytest.mark.parametrize(("me", "save"), [(0, ""), (1, ""), (0, "a stop")])
def test_what_was_asked_for_and_given_up_like_that_follows_the_next_step(me: int, save: str) -> None:
    """The pool of another stage may have moved its segments, of which the job's leader knows nothing: who asked hears
    of the checkpoint that is taken. Before the end the plan itself has one taken."""
    one = Alone(SavingRules(SELDOM, on=True), me)
    one.machine.plan = replace(plan_of(0, 1), shards=(Shard(0, 0, segments=((0, 128),)),))
    one.saver.request(WHY)
    one.saver.due(6)
    one.update(6, "disk")
    one.saver.regroup(plan_of(0, 1, generation=2, save=save))
    one.saver.ended(SaveEnded(6, False, "not all may have begun it"))
    assert not told(one.out.drain())
    again = me == 0 and not save
    assert one.saver.due(7).tiers == ("disk",) * again
    one.update(7, *("disk",) * again)
    one.saver.ended(SaveEnded(7, True, "", "there"))
    assert [(said.step, said.ok) for said in told(one.out.drain())] == [(7, True)] * again


def test_a_restarted_writer_is_another_one() -> None:
    one = Alone(SavingRules(EACH, on=True))
    one.update(6, "disk")
    members = (Member(0, 0, "here"), Member(1, 1, "here"))
    one.saver.regroup(Plan(2, "test", members, plan_of(0, 1).seats, 4))
    (effect,) = one.out.drain()
    assert isinstance(effect, AbandonSave) and effect.why.reason == "worker 1 left"


def test_failures_shorten_the_interval() -> None:
    def interval(*plans: Plan) -> float:
        one = Alone(SavingRules(CheckpointConfig(), on=True))
        one.saver.ended(SaveEnded(step=4, ok=True, reason="", cost_s=1.0))
        one.update(6, "disk")
        one.saver.parts_there(PartsThere(6))
        for plan in plans:
            one.saver.regroup(plan)
        assert not one.saver.due(7)
        waited = 0.0
        for number in range(8, 200):
            waited += 5
            one.at(waited)
            if one.saver.due(number):
                break
        return waited

    killed = replace(plan_of(0, generation=2), cause=Cause.KILLED)
    again = replace(plan_of(0, generation=3), cause=Cause.HUNG)  # there is no checkpoint any more that it ends
    drained = replace(plan_of(0, generation=2), cause=Cause.DRAINED)
    assert interval(killed, again) < interval(killed) < interval(drained) == interval()


def test_invalidated_states_are_forgotten() -> None:
    one = Alone(SavingRules(BEST, on=True, eval_every=3))
    event = SaveAsked({"accuracy": 0.9})
    one.judge(one.saver.verdict(event), event)
    one.saver.parts_there(PartsThere(5))
    assert not one.saver.due(6)  # it waits for the evaluation
    one.saver.invalidated()
    assert one.saver.boundary(WHY, past=False) is not None  # begun again
    one.saver.invalidated()
    assert one.saver.due(7).tiers == ("disk",)  # nothing is waited for
    assert one.saver.verdict(SaveAsked({"accuracy": 0.1}, stored=0.5)) == b""  # nor does what waited count
    assert one.saver.verdict(SaveAsked({"accuracy": 0.2}, stored=0.1)) != b""  # nor what was the best
    one.saver.regroup(plan_of(0, generation=2))
    assert one.out.drain() == []


def test_a_checkpoint_proves_nothing_of_a_step_that_is_done_again() -> None:
    one = Alone(SavingRules(EACH, on=True))
    one.update(6, "disk")
    one.saver.ended(SaveEnded(step=6, ok=True, reason=""))
    one.saver.entered({})
    assert one.saver.newest == 6
    one.machine.position = Key(4, 0)
    one.saver.entered({})
    assert one.saver.newest == 0
    one.saver.ended(SaveEnded(step=6, ok=True, reason=""))
    assert one.saver.newest == 0, "it was being written when all went back"
    one.update(6, "disk")
    one.saver.ended(SaveEnded(step=6, ok=True, reason=""))
    assert one.saver.newest == 6


# ---- what is told


def test_a_request_is_answered_once() -> None:
    one = Alone(SavingRules(SELDOM, on=True))
    one.saver.request(WHY)
    one.saver.due(6)
    one.update(6, "disk")
    one.saver.ended(SaveEnded(step=4, ok=True, reason="", where="there"))
    assert told(one.out.drain()) == []
    for _ in range(2):
        one.saver.ended(SaveEnded(step=6, ok=True, reason="SIGTERM", where="there", cost_s=1.0))
    (saved,) = told(one.out.drain())
    assert (saved.step, saved.ok, saved.where, saved.reason) == (6, True, "there", "SIGTERM")
    assert one.out.lasting == ()


def test_a_request_hears_of_a_failure() -> None:
    one = Alone(SavingRules(SELDOM, on=True))
    one.saver.request(WHY)
    one.saver.due(6)
    one.saver.ended(SaveEnded(step=6, ok=False, reason="the disk is full"))
    (saved,) = told(one.out.drain())
    assert (saved.step, saved.ok, saved.where, saved.reason) == (6, False, "", "the disk is full")


def test_what_nobody_asked_for_is_not_told() -> None:
    one = Alone(SavingRules(EACH, on=True))
    one.saver.due(6)
    one.saver.ended(SaveEnded(step=6, ok=True, reason="", where="there"))
    assert one.out.drain() == []


def test_a_request_that_has_to_wait_is_answered_by_what_it_gets() -> None:
    one = Alone(SavingRules(SELDOM, on=True))
    one.update(6, "disk")
    one.saver.request(WHY)
    one.saver.due(7)
    one.saver.ended(SaveEnded(step=6, ok=True, reason="", where="there"))
    assert told(one.out.drain()) == []
    one.saver.due(8)
    one.saver.ended(SaveEnded(step=8, ok=True, reason="SIGTERM", where="there"))
    assert [saved.step for saved in told(one.out.drain())] == [8]


@pytest.mark.parametrize(
    ("number", "where", "expected"),
    [(5, "there", (True, "there", "")), (5, "", (False, "", "it could not be completed"))],
)
def test_the_last_one_is_told_by_the_main(number: int, where: str, expected: tuple[bool, str, str]) -> None:
    for me in (0, 1):
        one = Alone(SavingRules(SELDOM, on=True), me=me)
        operation = do.SaveLast(
            op=1, generation=1, plan=one.machine.plan, step=number, save=one.saver.boundary(WHY, past=True)
        )
        one.saver.last(operation, where)
        effects = one.out.drain()
        found = [(saved.ok, saved.where, saved.reason) for saved in told(effects)]
        assert found == ([expected] if me == 0 else [])
        assert list(one.out.lasting) == told(effects), "a connection that breaks now may have lost it"


def test_a_second_request_leaves_the_answer_to_the_first_alone() -> None:
    one = Alone(SavingRules(SELDOM, on=True))
    one.saver.request(WHY)
    one.saver.due(6)
    one.update(6, "disk")
    one.saver.request(Why(Cause.REQUESTED, "requested"))
    assert not one.saver.due(7)
    one.saver.ended(SaveEnded(step=6, ok=True, reason="SIGTERM", where="there"))
    assert [saved.step for saved in told(one.out.drain())] == [6]


def test_there_is_no_last_one_of_nothing() -> None:
    one = Alone(SavingRules(SELDOM, on=True))
    one.saver.last(do.SaveLast(op=1, generation=1, plan=one.machine.plan, step=0, save=None), "")
    (saved,) = told(one.out.drain())
    assert (saved.ok, saved.reason) == (False, "nothing was trained yet")
    one.saver.last(do.SaveLast(op=1, generation=1, plan=one.machine.plan, step=5, save=None), "of an earlier life")
    assert not told(one.out.drain())[0].ok  # it was not to be taken


# ---- evaluations


@pytest.mark.parametrize(("mode", "better", "worse"), [("max", 0.6, 0.4), ("min", 0.4, 0.6)])
def test_the_best_so_far(mode: str, better: float, worse: float) -> None:
    rule = CheckpointConfig(disk=DiskTierConfig(every_steps=1000, keep_best=1), best_metric="x", best_mode=mode)
    for stored in (None, 0.5):
        one = Alone(SavingRules(rule, on=True))
        if stored is None:
            first = SaveAsked({"x": 0.5})
            (save,) = one.judge(one.saver.verdict(first), first, past=True)
            assert isinstance(save, Save)
            assert (save.due.reason, save.due.cause, save.past) == ("the best so far", Cause.SCHEDULED, True)
            assert save.metrics == {"x": 0.5} and save.boundary
        assert one.saver.verdict(SaveAsked(metrics={"x": worse}, stored=stored)) == b""
        one.machine.position = Key(9, 0)
        event = SaveAsked(metrics={"x": better}, stored=stored)
        assert len(one.judge(one.saver.verdict(event), event)) == 1
        assert (
            one.saver.verdict(SaveAsked(metrics={"x": 0.5}, stored=worse)) == b""
        )  # what it has seen counts, not the disk


def test_only_the_main_judges() -> None:
    one = Alone(SavingRules(BEST, on=True), me=1)
    assert one.saver.verdict(SaveAsked({"accuracy": 1.0})) == b""
    assert one.judge(b"", SaveAsked({"accuracy": 1.0})) == []


# ---- in its place in the driver


class Job:
    """Worker 0's driver; what it asks for is carried out at once, as if worker 1, if there is one, did all alike."""

    def __init__(self, saving: SavingRules, plan: Plan | None = None) -> None:
        me = WorkerKey(0, 0)
        self.driver = Driver(DriverConfig(4, saving=saving), StepMachine(me))
        self.seen: list[do.Effect] = []
        self.operation: do.Operation | None = None
        self.digests = ("", "")
        self.results: dict[type, Any] = {do.SaveLast: "there", do.Finish: True}
        self.handle(do.JoinAsked())
        self.handle(do.Heard(wire.PlanNow(plan=plan or plan_of(0))))
        self.run()

    def handle(self, event: object) -> None:
        for effect in self.driver.handle(0, event):
            self.seen.append(effect)
            if isinstance(effect, do.Operation):
                self.operation = effect

    def interrupt(self, plan: Plan) -> None:
        """A plan comes in the middle of an operation, or while nothing is to be done."""
        self.handle(do.Heard(wire.PlanNow(plan=plan)))
        if self.operation is not None:
            operation, self.operation = self.operation, None
            self.handle(do.Aborted(operation.op))
        self.run()

    def run(self, *until: type) -> None:
        """Carry out one operation after the other, up to one of these kinds."""
        while self.operation is not None and not isinstance(self.operation, until or (do.Linger,)):
            operation, self.operation = self.operation, None
            if isinstance(operation, do.Compute):
                for lane in operation.lanes:
                    self.handle(step.LaneDone(operation.step, 0, lane))
            self.handle(do.Done(op=operation.op, result=self._result(operation)))

    def _result(self, operation: do.Operation) -> Any:
        match operation:
            case do.Open():
                return do.Opened()
            case do.Exchange():
                others = [w for w in self.plan.worker_ids if w]
                return {0: operation.payload, **{w: self._contributed(operation, w) for w in others}}
            case do.Reduce():
                return AgreePayload([self._section(0)])
            case do.Update():
                return 1
        return self.results.get(type(operation))

    @property
    def plan(self) -> Plan:
        assert self.driver.machine.plan is not None
        return self.driver.machine.plan

    def _section(self, worker_id: int) -> StageSection:
        lanes = [LaneReport(n, 0.0, 1.0, 1, 0) for n in self.plan.lanes_of(worker_id, 0)]
        return StageSection(0, lanes, (), b"", [], [], self.digests[worker_id])

    def _contributed(self, operation: do.Exchange, worker_id: int) -> bytes:
        if operation.tag.kind == "settle" or operation.tag.seq:
            return operation.payload
        payload = encode(AgreePayload([self._section(worker_id)]))
        return encode(Record(decode_record(operation.payload).prepared, payload))

    def step(self, number: int) -> None:
        self.handle(do.StepAsked(number))
        self.run()

    def of(self, kind: type) -> list[Any]:
        return [effect for effect in self.seen if isinstance(effect, kind)]


def test_the_driver_saves_after_the_update_before_the_application_goes_on() -> None:
    job = Job(SavingRules(EACH, on=True))
    job.step(1)
    (save,) = job.of(Save)
    assert (save.step, save.due, save.boundary, sorted(save.records)) == (
        1,
        Due(("disk",), "every 1 steps"),
        False,
        [0],
    )
    assert conclude(1, 4, save.records).save == (("disk",), "every 1 steps")
    kinds = [type(effect) for effect in job.seen]
    assert kinds.index(do.Update) < kinds.index(Save) < kinds.index(do.Stepped)


def test_the_driver_hears_requests_and_what_became_of_them() -> None:
    job = Job(SavingRules(SELDOM, on=True))
    job.handle(do.Heard(wire.SaveNow(cause=Cause.REQUESTED, reason="requested")))
    job.step(1)
    assert [save.due.reason for save in job.of(Save)] == ["requested"]
    job.handle(SaveEnded(step=1, ok=True, reason="requested", where="there"))
    assert [saved.where for saved in told(job.seen)] == ["there"]


def test_the_driver_waits_for_parts() -> None:
    job = Job(SavingRules(EACH, on=True))
    job.step(1)
    job.step(2)
    job.handle(PartsThere(1))
    job.step(3)
    assert [save.step for save in job.of(Save)] == [1, 3]
    assert [skipped.step for skipped in job.of(do.Skipped)] == [2]


def test_the_driver_gives_one_up_before_it_meets_the_others() -> None:
    job = Job(SavingRules(EACH, on=True), plan_of(0, 1))
    job.step(1)
    assert [save.step for save in job.of(Save)] == [1]
    job.handle(do.StepAsked(2))
    job.run(do.Reduce)
    job.interrupt(plan_of(0, generation=2))
    kinds = [type(effect) for effect in job.seen if isinstance(effect, AbandonSave | do.Open)]
    assert kinds == [do.Open, AbandonSave, do.Open]


def test_the_driver_leaves_one_alone_that_can_be_completed() -> None:
    job = Job(SavingRules(EACH, on=True), plan_of(0, 1))
    job.step(1)
    job.handle(do.StepAsked(2))
    job.run(do.Reduce)
    job.interrupt(plan_of(0, 1, generation=2))
    assert job.of(AbandonSave) == [] and len(job.of(do.Open)) == 2


def test_the_driver_saves_nothing_of_states_that_differ() -> None:
    job = Job(SavingRules(BEST, on=True), plan_of(0, 1))
    job.step(1)
    job.handle(PartsThere(1))
    job.digests = ("a", "b")
    job.step(2)
    assert [save.step for save in job.of(Save)] == [1] and len(job.of(do.Invalidate)) == 1
    job.interrupt(plan_of(0, generation=2))
    assert job.of(AbandonSave) == []  # what was begun is invalidated already


def test_the_driver_takes_one_at_the_end() -> None:
    job = Job(SavingRules(SELDOM, on=True))
    job.step(1)
    job.handle(do.EndAsked(metrics={"accuracy": 0.5}))
    job.run(do.Finish)
    assert isinstance(job.operation, do.Finish) and job.operation.save is not None
    save = job.operation.save
    assert save.metrics == {"accuracy": 0.5}
    assert (save.step, save.due.reason, save.due.cause, save.past) == (1, "the end of the job", Cause.COMPLETED, True)
    without = Job(SavingRules(SELDOM))
    without.step(1)
    without.handle(do.EndAsked())
    without.run(do.Finish)
    assert isinstance(without.operation, do.Finish) and without.operation.save is None


@pytest.mark.parametrize("on", [True, False])
def test_the_driver_takes_one_that_a_plan_asks_for(on: bool) -> None:
    job = Job(SavingRules(SELDOM, on=on))
    job.step(1)
    job.handle(do.Heard(wire.PlanNow(plan=plan_of(0, generation=2, save="SIGTERM"))))
    job.handle(do.StepAsked(2))
    job.run()
    assert isinstance(job.operation, do.Linger)
    assert [(saved.ok, saved.where) for saved in told(job.seen)] == ([(True, "there")] if on else [])
    saves = [last.save for last in job.of(do.SaveLast)]
    assert [(s.due.reason, s.past) for s in saves] == ([("SIGTERM", True)] if on else [])


def test_the_driver_takes_none_for_a_plan_once_the_job_has_ended() -> None:
    job = Job(SavingRules(SELDOM, on=True))
    job.step(1)
    job.handle(do.Heard(wire.PlanNow(plan=plan_of(0, generation=2, save="SIGTERM"))))
    job.handle(do.StepAsked(2))
    job.handle(do.Heard(wire.JobEnded(state="completed", reason="done", exit_code=0)))
    job.run(do.SaveLast)
    assert [last.save for last in job.of(do.SaveLast)] == [None]


def test_the_driver_takes_one_after_an_evaluation() -> None:
    rule = CheckpointConfig(disk=DiskTierConfig(every_steps=1000, keep_best=1), best_metric="accuracy")
    job = Job(SavingRules(rule, on=True))
    job.step(1)
    for accuracy, expected in ((0.5, 1), (0.4, 1)):
        job.handle(SaveAsked({"accuracy": accuracy}))
        job.run()
        assert len(job.of(Save)) == expected
        assert isinstance(job.seen[-1], do.GatherDone)
    (save,) = job.of(Save)
    assert save.boundary and not save.past and save.metrics == {"accuracy": 0.5}
    assert conclude(1, 4, save.records).step == 1


def test_the_driver_takes_none_after_an_evaluation_once_the_job_has_ended() -> None:
    rule = CheckpointConfig(disk=DiskTierConfig(every_steps=1000, keep_best=1), best_metric="accuracy")
    job = Job(SavingRules(rule, on=True))
    job.step(1)
    job.handle(SaveAsked({"accuracy": 0.5}))
    job.handle(do.Heard(wire.JobEnded(state="completed", reason="done", exit_code=0)))
    job.run()
    assert job.of(Save) == [] and isinstance(job.seen[-1], do.GatherDone)


def test_what_is_only_as_good_as_the_best_is_no_reason_for_a_checkpoint() -> None:
    one = Alone(SavingRules(BEST, on=True))
    for accuracy, saves in ((0.5, True), (0.5, False), (0.4, False), (0.6, True)):
        assert bool(one.saver.verdict(SaveAsked({"accuracy": accuracy}))) is saves
