"""The checkers can fail: known bugs, planted one at a time, are caught, each with the promise that it breaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from planted_bugs import OneRecordTooFew, machine_with

from everstep.base.cause import Cause
from everstep.base.plan import Plan
from everstep.placement.lanes import place
from everstep.protocol import messages as wire
from everstep.protocol.coordinator import speeds
from everstep.protocol.coordinator.coordinator import Coordinator
from everstep.protocol.coordinator.types import Report
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver
from everstep.protocol.driver.driver_parts import DriverConfig
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import (
    Discard,
    GradientReduced,
    HoldingArrived,
    Release,
    StepEffect,
    Updated,
)
from everstep.protocol.stepping.contributing import Contributing
from everstep.protocol.stepping.deciding import Deciding
from everstep.protocol.stepping.entering import Entering
from everstep.protocol.stepping.states_held import NextStep
from everstep.sim import scenario
from everstep.sim.checks import SimRecords
from everstep.sim.faults import SimFault
from everstep.sim.life import SimSite
from everstep.sim.model import SimJob
from everstep.sim.promises import PromiseBroken
from everstep.sim.scenario import simulate

WRONG = ((2, 1), (2, 3), (0, 2))
"""(step, bits) of lives; odd bits descend from a flipped one."""

SMALL = scenario.Setup(3, 0, 2, 1, "replace", SimJob(6, 6, 3), ())
DISTURBED = replace(
    SMALL,
    workers=4,
    faults=(
        SimFault("kill", 60, "agreeing", 1, 300, 1),
        SimFault("kill", 120, "updating", 1, 0, 2, same=True),
        SimFault("link", 200, "agreeing", 1, 0, 1),
    ),
)

JOINED = replace(DISTURBED, faults=(SimFault("kill", 60, pick=1), SimFault("kill", 90, "computing", 9, 2000, 2)))
POOL_DIES = replace(
    SMALL,
    workers=4,
    job=SimJob(8, 4, 3, stages=2, keep_every=2),
    faults=(SimFault("pool", 250, "computing", 4, 0, 1),),
)
UPDATING = replace(SMALL, faults=tuple(SimFault("kill", 20, "updating", n, 0, 1) for n in range(2, 14, 3)))


def problems(setup: scenario.Setup, **bug: Any) -> Iterator[str]:
    """Those that are found when every worker runs the machine or driver with this bug, seed by seed."""
    outcomes = (simulate(seed, setup=setup, **bug) for seed in range(24))
    return (outcome.problem for outcome in outcomes if not outcome.ok)


class ReleasesTooEarly(Deciding):
    """Lets the effects of a step leave after its update, not when the next decision has proven that all have it."""

    def updated(self, event: Updated) -> list[StepEffect]:
        return [*super().updated(event), Release(event.step)]


class SettlesAlone(Entering):
    """Goes on after its own holding, without the others'."""

    def _stated(self) -> dict[int, Any]:
        stated = super()._stated()
        mine = stated.get(self._known.me.worker_id)
        return dict.fromkeys(self._known.plans.current.worker_ids, mine) if mine is not None else {}


class NeverSettlesAgain(Entering):
    """Does not hear the others in any generation but the first."""

    def holding_arrived(self, event: HoldingArrived) -> list[StepEffect]:
        return super().holding_arrived(event) if event.generation == 1 else []


class VotesWithoutTheGradient(Contributing):
    """Contributes to the agree of a step with a gradient of another generation's reduction that was cut short."""

    def _begin_step(self) -> list[StepEffect]:
        effects, known = super()._begin_step(), self._known
        if known.plans.generation > 1 and known.phase == "reducing":
            stale = self.gradient_reduced(GradientReduced(known.plans.generation, known.step + 1, b"1;0;0;0"))
            return effects + stale
        return effects


class KeepsOldLanes(NextStep):
    """Takes lanes of the step before for lanes of this one."""

    def is_another(self) -> None:
        held = set(self.lanes)
        super().is_another()
        self.lanes = held


class NeverUpdates(Deciding):
    """Drops the step that it has decided."""

    def updated(self, event: Updated) -> list[StepEffect]:
        return [e for e in super().updated(event) if isinstance(e, Discard)] if event.step != 3 else []


@pytest.mark.parametrize(
    ("machine", "setup", "expected"),
    [
        (OneRecordTooFew, SMALL, "lacks lanes"),
        (ReleasesTooEarly, SMALL, "P2"),
        (SettlesAlone, POOL_DIES, ""),
        (NeverSettlesAgain, DISTURBED, "P4"),
        (VotesWithoutTheGradient, DISTURBED, "InvariantViolation"),
        (KeepsOldLanes, SMALL, "KeyError"),
        (NeverUpdates, SMALL, "P4"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_bug_in_the_step_machine_is_caught(machine, setup, expected):
    assert any(expected in problem for problem in problems(setup, machine=machine_with(machine)))


def test_the_same_setups_pass_with_the_real_machine():
    for setup in (SMALL, DISTURBED, UPDATING, JOINED, POOL_DIES):
        assert [str(one) for one in (simulate(seed, setup=setup) for seed in range(8)) if not one.ok] == []


# ---- the driver


class LeavesTheUpdate(Driver):
    """Drops a step that it has decided when a plan comes."""

    def __init__(self, config: DriverConfig, machine: StepMachine) -> None:
        super().__init__(config, machine)
        self._queue.drop_transfers = lambda: self._queue._effects.clear()


class KeepsTheShelf(Driver):
    """Never says that nobody asks for the state any more."""

    def __init__(self, config: DriverConfig, machine: StepMachine) -> None:
        super().__init__(config, machine)
        self._parts.settler.unshelve = lambda: None


class KeepsFollowing(Driver):
    """Never lets go of its donors when a plan comes."""

    def __init__(self, config: DriverConfig, machine: StepMachine) -> None:
        super().__init__(config, machine)
        self._effects._open = self._parts.settler.open


class HearsAtOnce(Driver):
    """Takes in a plan in the middle of an operation."""

    def handle(self, now_ns: int, event: object) -> list[do.Effect]:
        if isinstance(event, do.Heard) and isinstance(event.message, wire.PlanNow):
            self._parts.out.operation = None
        return super().handle(now_ns, event)


class AnswersTheLastGather(Driver):
    """Tells the application of the gather before."""

    def handle(self, now_ns: int, event: object) -> list[do.Effect]:
        effects = super().handle(now_ns, event)
        for n, effect in enumerate(effects):
            if isinstance(effect, do.GatherDone) and effect.records:
                last, self._told = getattr(self, "_told", effect.records), effect.records
                effects[n] = do.GatherDone(last)
        return effects


@pytest.mark.parametrize(
    ("driver", "setup", "expected"),
    [
        (LeavesTheUpdate, UPDATING, "P5"),
        (KeepsTheShelf, POOL_DIES, "P5"),
        (KeepsFollowing, JOINED, "P5"),
        (HearsAtOnce, DISTURBED, "Error"),
        (AnswersTheLastGather, SMALL, "and is told"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_bug_in_the_driver_is_caught(driver, setup, expected):
    assert any(expected in problem for problem in problems(setup, driver=driver))


# ---- the coordinator


def test_a_placement_that_gives_a_lane_away_twice_is_caught(monkeypatch):
    def twice(worker_ids, lanes, **inputs):
        seats = place(worker_ids, lanes, **inputs)
        return (replace(seats[0], lanes=tuple(range(lanes))), *seats[1:])

    monkeypatch.setattr(speeds, "place", twice)
    assert "lane" in scenario.simulate(0, setup=SMALL).problem


@pytest.mark.parametrize("frozen", [False, True])
def test_a_worker_that_goes_on_and_is_taken_for_hung_is_caught(frozen: bool) -> None:
    simulation = scenario.Simulation(0, SMALL, tracing=False)
    assert not simulation.run()
    control = simulation.control
    worker = next(iter(control.workers.values()))
    worker.frozen_ns = control.world.now_ns if frozen else None
    fields = {"worker_id": worker.me.worker_id, "incarnation": worker.me.incarnation, "cause": Cause.HUNG}
    machine = SimpleNamespace(status=lambda: {"workers": []})
    with nullcontext() if frozen else pytest.raises(PromiseBroken, match="is taken for hung, but"):
        control.said(1, [Report("worker_evicted", fields)], machine)


def test_two_plans_of_one_generation_are_caught():
    checks = scenario.Simulation(0, SMALL, tracing=False).checks
    plans = []

    class TwoFaced(Coordinator):
        def handle(self, now_ns, event):
            effects = super().handle(now_ns, event)
            for n, effect in enumerate(effects):
                plan = getattr(getattr(effect, "message", None), "plan", None)
                if isinstance(plan, Plan):
                    plans.append(plan)
                    other = replace(plan, reason=f"said to {effect.connection}")
                    effects[n] = effect._replace(message=type(effect.message)(plan=other))
            return effects

    outcome = scenario.simulate(0, setup=SMALL, coordinator=TwoFaced)
    assert outcome.problem.startswith("PromiseBroken: P3: two plans"), outcome.problem
    assert plans and not checks.records.plans


@pytest.mark.parametrize(("sound", "lasts"), [(3, True), (2, True), (4, False), (-1, False)])
def test_a_doubt_lasts_until_a_generation_was_entered_with_it(sound: int, lasts: bool) -> None:
    simulation = scenario.Simulation(0, SMALL, tracing=False)
    assert not simulation.run()
    first = replace(simulation.checks.records.plans[1], generation=5, sound=3)
    for entered in (4, 5):
        records = SimRecords()
        records.plan(first)
        records.entered(entered)
        with nullcontext() if lasts or entered == 5 else pytest.raises(PromiseBroken, match="in doubt since"):
            records.plan(replace(first, generation=6, sound=sound))


def test_a_prepared_plan_says_nothing_of_a_doubt() -> None:
    """Its members come from the plan before it."""
    simulation = scenario.Simulation(0, SMALL, tracing=False)
    assert not simulation.run()
    first = replace(simulation.checks.records.plans[1], generation=5, sound=3)
    records = SimRecords()
    records.plan(first)
    records.plan(replace(first, generation=6, sound=-1, prepared=True))
    with pytest.raises(PromiseBroken, match="in doubt since generation 5"):
        records.plan(replace(first, generation=7, sound=-1))


@pytest.mark.parametrize("shown", [False, True])
def test_a_doubt_that_the_journal_lost_counts_once_a_worker_has_shown_its_plan(shown: bool) -> None:
    simulation = scenario.Simulation(0, SMALL, tracing=False)
    assert not simulation.run()
    first = replace(simulation.checks.records.plans[1], generation=5, sound=3)
    records = SimRecords()
    records.plan(replace(first, generation=4, sound=-1))
    records.plan(first)
    records.forget({4})
    if shown:
        records.journaled(5)
    with pytest.raises(PromiseBroken, match="in doubt since") if shown else nullcontext():
        records.plan(replace(first, generation=6, sound=-1))


def test_a_joiner_that_has_trained_nothing_does_not_know_better() -> None:
    """Its initial state is right, and says nothing of states that were trained with a flipped bit."""
    lives = [SimpleNamespace(alive=True, state=SimpleNamespace(at=at, stages={0: ((bit,),)})) for at, bit in WRONG]
    site: Any = SimpleNamespace(lives=dict(enumerate(lives)))
    assert SimSite.all_wrong(site, 0) and not SimSite.all_wrong(site, 1)
    lives[0].state.stages = {0: ((2,),)}
    assert not SimSite.all_wrong(site, 0)
