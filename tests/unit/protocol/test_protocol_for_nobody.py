"""What comes for nobody, twice, or about what is not there any more: it changes nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from coordinator_harness import CONFIG, World, drop, running

from everstep.base.cause import Cause, Why
from everstep.base.config import load_config
from everstep.base.extents import WHOLE
from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.placement.probes import ProbeRule
from everstep.protocol import messages as m
from everstep.protocol.coordinator import joins
from everstep.protocol.coordinator.environment import Environment
from everstep.protocol.coordinator.membership import GONE_MOST, Agents
from everstep.protocol.coordinator.restoring import sensible
from everstep.protocol.coordinator.user_commands import _keep
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.comparing import Statements
from everstep.protocol.driver.nonfinite import NonfiniteRule
from everstep.protocol.driver.outbox import Outbox
from everstep.protocol.driver.probing import LanesGiven, Probing
from everstep.protocol.driver.records import StageSection
from everstep.protocol.driver.saver import Keeper
from everstep.protocol.following import PlanAsked
from everstep.protocol.lease.writer import compacted
from everstep.protocol.moving.chunks import Chunk, Chunks
from everstep.protocol.moving.memory_retention import Retention
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_phases import Phase
from everstep.protocol.step_types import (
    Entered,
    HoldingArrived,
    Key,
    LaneSaid,
    LanesLost,
    PlanArrived,
    Record,
    RecordArrived,
    SendHolding,
    StepLeft,
    StepWanted,
)

GONE = WorkerKey(9, 0)


def asked(world: World) -> list[str]:
    return [to for to, message in world.sent if isinstance(message, PlanAsked)]


# ---- the coordinator


def test_over_a_connection_that_is_gone_everything_may_come() -> None:
    world = running()
    exited = m.WorkerExited(agent_id="a9", worker_id=0, incarnation=0, reason="", died_unix_ns=1)
    assert world.coordinator.refusal("gone", exited) == ""
    assert world.say("gone", exited) == []


def test_a_notice_of_an_agent_is_for_the_process_around() -> None:
    world = running()
    assert world.say("a1", m.AgentNotice(agent_id="a1", kind="warning", fields={})) == []


def test_a_job_that_is_not_about_to_end_is_not_ended_by_a_checkpoint() -> None:
    world = running()
    world.coordinator.job.saving.end_with("no checkpoint was completed in time")
    assert world.coordinator.job.progress.ended is None


def test_a_life_that_is_over_is_sent_no_ticket() -> None:
    job = running().coordinator.job
    joins._send_heal(job, GONE)
    assert not job.healing.joins and not job.env.take_effects()


def test_who_says_hello_with_the_plan_that_leaves_it_out_leaves_and_is_ordered_nothing_more() -> None:
    world = running()
    assert world.command("drain", worker_id=2).ok
    prepared = world.prepared
    assert prepared is not None and prepared.worker_ids == (0, 1)
    world.clear()
    name = world.hello(2, plan=prepared, step=3)
    assert world.plan is not None and world.plan.generation == prepared.generation
    assert [m.Dismissed] == [type(message) for to, message in world.sent if to == name]


def test_no_speeds_are_known_while_a_member_is_dead() -> None:
    world = running(2)
    plan, job = world.plan, world.coordinator.job
    assert plan is not None
    for member in plan.members:
        job.speeds.say(member.key, 10.0)
    assert job.speeds.measured(plan) == {0: 10.0, 1: 10.0}
    del job.membership.workers[1]
    assert job.speeds.measured(plan) is None


def test_a_plan_that_is_written_twice_counts_once() -> None:
    before = running()
    plans = [entry for entry in before.journal if entry["kind"] == "plan"]
    world = before.restart([*before.journal, *plans])
    assert world.plan == before.plan and not world.coordinator._aside


def test_who_follows_an_older_plan_than_the_wanted_one_is_not_asked_for_that() -> None:
    before = running()
    first = before.plan
    before.exited(2)
    world = before.restart([])
    world.agent(0, 1)
    world.hello(0, plan=before.plan, shows=False)
    world.hello(1, plan=first, shows=False)
    drop(world, "w0.0")
    world.wait(1)
    assert asked(world) == ["w0.0"]


def test_who_is_gone_is_not_asked_for_its_plan() -> None:
    before = running()
    world = before.restart([])
    world.agent(0, 1, 2)
    for i in range(3):
        world.hello(i, plan=before.plan, shows=False)
    drop(world, "w1.0")
    drop(world, "w0.0")
    world.wait(1)
    assert asked(world) == ["w0.0", "w2.0"]


def test_entries_are_sensible_or_not() -> None:
    journal = running().journal
    assert sensible(journal) and sensible([{"kind": "of another version"}])
    assert not sensible([*journal, {"kind": "entered"}])


@pytest.mark.parametrize("generation", [1, 7])
def test_a_switch_to_no_prepared_plan_is_left_out_of_a_shorter_journal(generation: int) -> None:
    journal = [entry for entry in running().journal if entry["kind"] == "plan"]
    assert [entry["kind"] for entry in compacted([*journal, {"kind": "entered", "generation": generation}])] == ["plan"]


def test_of_hosts_that_are_gone_the_last_hundred_are_known() -> None:
    env = Environment(CONFIG)
    agents = Agents(env)
    for n in range(GONE_MOST + 1):
        agents.watch(f"a{n}", f"a{n}")
        agents.remove(f"a{n}")
    assert len(agents.gone) == GONE_MOST and "a0" not in agents.gone and "a1" in agents.gone


def test_nobody_leaves_a_pool_of_one() -> None:
    job = running(2, stages=2).coordinator.job
    assert _keep(job, [0, 1], 1) == [0, 1]


# ---- a worker


def entered(generation: int = 1) -> StepMachine:
    """The only member of a plan, which has settled in it."""
    machine = StepMachine(WorkerKey(0, 0))
    stated = machine.handle(PlanArrived(alone(generation)))[-1]
    assert isinstance(stated, SendHolding)
    assert any(isinstance(e, Entered) for e in machine.handle(HoldingArrived(generation, 0, stated.holding)))
    return machine


def alone(generation: int) -> Plan:
    return Plan(generation, "", (Member(0, 0, "h"),), (Seat(0, 0, "active", (0, 1)),), 2)


def test_what_is_of_another_step_or_an_older_generation_has_no_effect() -> None:
    machine = entered(2)
    holding = machine.holding()
    assert machine.handle(RecordArrived(2, Key(0, 0), 0, Record(0, b""))) == []
    assert machine.handle(HoldingArrived(1, 0, holding)) == []
    assert machine.phase is Phase.IDLE and machine.position == Key(0, 0)
    settling = StepMachine(WorkerKey(0, 0))
    settling.handle(PlanArrived(alone(1)))
    assert settling.handle(LanesLost(7, ((0, 0),))) == []


def test_a_step_that_is_not_wanted_any_more_before_all_have_settled_is_not_begun() -> None:
    machine = StepMachine(WorkerKey(0, 0))
    stated = machine.handle(PlanArrived(alone(1)))[-1]
    assert machine.handle(StepWanted()) == [] and machine.handle(StepLeft()) == []
    assert machine.phase is Phase.SETTLING and isinstance(stated, SendHolding)
    assert machine.handle(HoldingArrived(1, 0, stated.holding)) == [Entered(1, 0)] and machine.phase is Phase.IDLE


def test_last_states_name_the_copies_of_what_stages_share() -> None:
    section = StageSection(0, [], (), b"", [], [], "d", {"embedding": "e"})
    assert Statements.last(3, {4: [section]}).ties == {"the tied parameter embedding": {(0, 4): "e"}}


def test_a_snapshot_that_had_no_room_long_ago_changes_nothing() -> None:
    out, machine = Outbox(WorkerKey(0, 0)), SimpleNamespace(plan=None, me=WorkerKey(0, 0), held={})
    Keeper(machine, out, lambda number: 0).refused(do.NotKept(4, Why(Cause.CONFIG, "no room")))  # type: ignore[arg-type]
    assert not out.drain()


def test_lanes_are_known_of_their_own_step_alone() -> None:
    given = LanesGiven()
    given.note(3, 1, 0, LaneSaid("data"))
    assert [given.has(step, lane) for step, lane in ((3, 1), (3, 2), (4, 1))] == [True, False, False]


def test_without_a_plan_no_lane_is_tried_again() -> None:
    assert Probing(ProbeRule(every=1)).trials(1, None) == ()


@pytest.mark.parametrize(("precision", "scaled"), [("fp16", True), ("bf16", False)])
def test_a_loss_scaler_goes_with_half_precision(precision: str, scaled: bool) -> None:
    said: dict[str, Any] = {"on_nonfinite": "skip", "nonfinite_limit": 3, "precision": precision}
    assert NonfiniteRule.of(load_config([("test", said)])) == NonfiniteRule("skip", 3, scaled)


def test_blocks_of_a_snapshot_that_is_gone_cannot_be_lost() -> None:
    kept = Retention(SimpleNamespace(), 10)  # type: ignore[arg-type]
    kept.lose(0, 3, WHOLE)
    assert not kept.there


def test_blocks_that_nobody_was_asked_for_are_not_counted() -> None:
    chunks: Chunks[str] = Chunks(4)
    chunks.want(0, WHOLE, (("model", 2),))
    chunks.done("stranger", Chunk(0, WHOLE))
    chunks.join("a", {0: WHOLE})
    chunks.done("a", Chunk(0, WHOLE))
    assert not chunks.finished and chunks.next("a") is not None
