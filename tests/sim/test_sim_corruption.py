"""A bit flips in one copy of a stage: a comparison finds it, all go back behind it, and the bits are the right ones."""

from __future__ import annotations

import pytest

from everstep.protocol.driver import operations as do
from everstep.protocol.driver.stepper import Stepper
from everstep.protocol.step_machine import StepMachine
from everstep.sim.faults import SimFault
from everstep.sim.model import SimJob, by_unit, cut_anew, flipped, leaf, undisturbed, update, wrong
from everstep.sim.scenario import Setup, Verdict, set_up, set_up_split, simulate

FLIP = SimFault("flip", 40)
AT_ONCE = SimFault("flip", 5, "computing")


def quiet(workers: int, job: SimJob, every: int, *faults: SimFault, rewindable: bool = True) -> Setup:
    return Setup(workers, 0, 2, 1, "replace", job, faults, verify_every=every, rewindable=rewindable)


SCENARIOS = {
    # Copies differed in the state that counts as sound: all stood there, nobody fetched another one, and nobody asked
    # for the step again.
    "the very first state": quiet(2, SimJob(6, 4, 3), 1, AT_ONCE),
    "the very first state, and one is outvoted": quiet(4, SimJob(6, 4, 3), 1, AT_ONCE),
    "the very first state of a stage": quiet(4, SimJob(6, 3, 3, 2, 1), 1, AT_ONCE),
    # A plan was taken in between the decision and its update: the same finding was told as one of the next generation,
    # and ended the job as the second at this step.
    "all find it at their own pace": quiet(2, SimJob(6, 5, 3, keep_every=1), 1, FLIP),
    "all find it at their own pace, in stages": quiet(6, SimJob(8, 3, 3, 3, 1), 1, FLIP),
    # The outvoted worker decided first and left; the plan without it came before the others had its last record, so
    # they never compared anything, and went on from states that its gradients had spoilt.
    "the outvoted worker alone knows": quiet(3, SimJob(10, 6, 3, keep_every=1), 2, FLIP),
    "some who know die": quiet(
        4,
        SimJob(10, 6, 3, keep_every=1),
        2,
        FLIP,
        *(SimFault("kill", 50, "agreeing", n, 400, same=True) for n in (9, 17)),
    ),
    # What was being written when states were found to differ was completed by those who had not found it themselves.
    "checkpoints of what is wrong": quiet(3, SimJob(9, 6, 3, write_every=2), 3, FLIP, SimFault("kill", 160, pick=1)),
    "loops that cannot go back": quiet(3, SimJob(8, 6, 3, write_every=2), 2, FLIP, rewindable=False),
}


def runs(name: str, seeds: int = 24, start: int = 0, **makes: object) -> list[Verdict]:
    return [simulate(start + seed, setup=SCENARIOS[name], **makes) for seed in range(seeds)]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_promises_hold(name):
    outcomes = [*runs(name), *runs(name, 20, start=110)]
    failed = [str(o) for o in outcomes if not o.ok]
    assert not failed, failed[0]
    assert sum(o.flipped for o in outcomes) > len(outcomes) // 2
    assert any(o.found for o in outcomes)


@pytest.mark.parametrize("name", [n for n, setup in SCENARIOS.items() if len(setup.faults) == 1])
def test_nothing_escapes_where_nothing_else_happens(name):
    for outcome in runs(name):
        assert not outcome.unnoticed, outcome
        assert outcome.found or not outcome.flipped, outcome


@pytest.mark.parametrize(("set_one_up", "split"), [(set_up, False), (set_up_split, True)])
def test_seeds_meet_what_they_are_meant_to_meet(set_one_up, split):
    """Most flips are found; a few are lost with their copy, or reach all copies before a comparison."""
    chosen = [seed for seed in range(250) if any(f.kind == "flip" for f in set_one_up(seed).faults)]
    outcomes = [simulate(seed, split=split) for seed in chosen]
    failed = [str(o) for o in outcomes if not o.ok]
    assert not failed, failed[0]
    struck = [o for o in outcomes if o.flipped]
    assert len(struck) > len(chosen) // 3
    assert sum(o.found for o in struck) > len(struck) // 3
    assert sum(o.unnoticed for o in struck) < len(struck) // 8


# ---- the checks see what they are to see


class NeverCompares(Stepper):
    """Applies whatever was decided."""

    def compare(self, outcome: do.Outcome) -> None:
        return None


def test_a_driver_that_does_not_compare_is_caught(monkeypatch):
    monkeypatch.setattr(Stepper, "compare", NeverCompares.compare)
    assert any("P1" in o.problem and "applies step" in o.problem for o in runs("the outvoted worker alone knows"))


def test_a_driver_that_cries_wolf_is_caught(monkeypatch):
    words = "all copies are alike"
    found = ("they differ", frozenset({0}))
    monkeypatch.setattr(
        "everstep.protocol.driver.stepper.differing", lambda outcome: found if outcome.step == 4 else None
    )
    outcome = simulate(1, setup=quiet(2, SimJob(8, 4, 3), 2))
    assert words in outcome.problem


class KeepsTheLiveState(StepMachine):
    """What has been found to differ counts as long as its step does."""

    def _doubt(self, sound: int) -> None:
        self.sound = sound


@pytest.mark.parametrize("name", ["the very first state", "the very first state of a stage"])
def test_the_scenario_of_the_first_state_meets_its_bug(name):
    assert any(o.problem for o in runs(name, machine=KeepsTheLiveState))


def test_the_scenario_of_pace_meets_its_bug(monkeypatch):
    def present(self: Stepper) -> int:
        return self._machine.generation

    monkeypatch.setattr(Stepper, "_generation", property(present, lambda self, value: None), raising=False)
    problems = [o.problem for o in runs("all find it at their own pace", 20, start=110)]
    assert any("second time" in problem for problem in problems), problems


class Forgets(StepMachine):
    """Knows only what it has found itself, or what members state."""

    def _take(self, plan):
        object.__setattr__(plan, "sound", -1)
        return super()._take(plan)


def test_the_scenario_of_the_outvoted_meets_its_bug():
    outcomes = runs("the outvoted worker alone knows", 80, machine=Forgets)
    assert any(o.problem or o.unnoticed for o in outcomes)


# ---- the model


def test_what_descends_from_a_flipped_bit_is_marked_and_nothing_else():
    states = undisturbed(SimJob(2, 4, stages=2))[1]
    assert not any(map(wrong, states.values()))
    bad = flipped(states[0])
    assert wrong(bad) and all(wrong((block,)) for block in leaf(bad, 2, 0))
    cut = cut_anew(states, SimJob(2, 4, stages=1, units=2))
    assert by_unit(cut) == by_unit(states) and cut == undisturbed(SimJob(2, 4, units=2))[1]
    assert wrong(update(states[1], 2, leaf(bad, 2, 0))) and not wrong(update(states[1], 2, leaf(states[0], 2, 0)))
