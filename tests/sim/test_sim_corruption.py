"""A bit flips in one copy of a stage: a comparison finds it, all go back behind it, and the bits are the right ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from msgspec import structs
from planted_bugs import machine_with

from everstep.protocol.coordinator import workers
from everstep.protocol.coordinator.agreement import JobProgress
from everstep.protocol.driver import comparing
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.comparing import Comparing
from everstep.protocol.driver.records import AgreePayload
from everstep.protocol.driver.stepper import Stepper
from everstep.protocol.stepping.known import Known
from everstep.protocol.stepping.switching import Switching
from everstep.sim.computing import Reduction
from everstep.sim.faults import SimFault
from everstep.sim.life import Disk
from everstep.sim.model import SimJob, by_unit, cut_anew, flipped, leaf, undisturbed, update, wrong
from everstep.sim.scenario import DRIFT, Verdict, simulate
from everstep.sim.setups import Setup
from sampling import mostly_longer, seeds

FLIP = SimFault("flip", 40)
AT_ONCE = SimFault("flip", 5, "computing")
LATE = SimFault("flip", 5, "updating", 14)


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
    # Compared after the last step alone.
    "just before the end": quiet(3, SimJob(6, 4, 4), 50, LATE),
    "just before the end, in stages": quiet(4, SimJob(5, 3, 4, 2, 1), 50, LATE),
    "just before the end, and a checkpoint of it": quiet(3, SimJob(6, 4, 4, write_every=1), 50, LATE),
    "after a heal": quiet(3, SimJob(9, 6, 4), 3, SimFault("kill", 40, pick=1), SimFault("flip", 130)),
    "before a checkpoint": quiet(3, SimJob(9, 6, 4, write_every=3), 50, FLIP),
    # All had been alike at step 2 before both pools that held a stage were lost; when it was done again its copies were
    # found to differ, and counted as sound all the same.
    "while steps are done again": Setup(
        *(6, 4, 2, 1, "replace", SimJob(8, 3, 3, 3, keep_every=1)),
        (*(SimFault("pool", 280, pick=stage) for stage in (1, 2)), SimFault("flip", 420)),
        verify_every=3,
        rewindable=True,
    ),
    # Worker 1 had computed a lane, a bit of its state flipped, and worker 0, started again, copied that state, since
    # there was no other. The lane came out otherwise there: worker 0 was refused, as was each of its next lives.
    "the only one who is left, and has computed something before": replace(
        quiet(
            2,
            SimJob(6, 6, 3, keep_every=1),
            1,
            SimFault("flip", 40, "computing", 2, delay_us=1000, pick=1),
            SimFault("kill", 40, "computing", 2, delay_us=1500, pick=0),
        ),
        min_workers=2,
    ),
    # The coordinator and one of two workers died long after all had gone back: the next coordinator took the doubt from
    # the plan in its journal, and all went back again.
    "the coordinator dies when that is over": quiet(
        *(2, SimJob(14, 4, 3), 2, FLIP, SimFault("coordinator", 400, for_ms=100), SimFault("kill", 400, pick=1))
    ),
    "loops that cannot go back": quiet(3, SimJob(8, 6, 3, write_every=2), 2, FLIP, rewindable=False),
}


def runs(name: str, count: int = 24, start: int = 0, **makes: object) -> Iterator[Verdict]:
    return (simulate(start + seed, setup=SCENARIOS[name], **makes) for seed in range(count))  # type: ignore[arg-type]


@pytest.mark.parametrize("start", mostly_longer((0, 110), lambda start: start == 0))
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_promises_hold_and_nothing_escapes_where_nothing_else_happens(name, start):
    outcomes = list(runs(name, len(seeds(12)), start))
    failed = [str(o) for o in outcomes if not o.ok]
    assert not failed, failed[0]
    assert sum(o.flipped for o in outcomes) > len(outcomes) // 2
    assert any(o.found for o in outcomes)
    if len(SCENARIOS[name].faults) == 1:
        assert not [str(o) for o in outcomes if o.unnoticed or (o.flipped and not o.found)]


def test_whoever_copies_the_last_state_compares_it_with_what_all_agreed_on():
    """The others are through with the last step, and compare nothing any more. A bit flips in the copy of one of them
    while the leader, who is to write the result, is copying it."""
    copying = SimFault("flip", 62, "fetching", 1, 135, 38, same=True)
    cut, kill = (
        SimFault("cut_control", 377, "agreeing", 1, 167, 69, 1616),
        SimFault("kill", 390, "fetching", 1, 432, 66),
    )
    setup = Setup(3, 0, 3, 3, "wait", SimJob(9, 4, 3), (copying, cut, kill), verify_every=3, rewindable=True)
    outcomes = [simulate(seed, setup=setup) for seed in seeds(24, 800)]
    failed = [str(o) for o in outcomes if not o.ok]
    assert not failed, failed[0]
    struck = [o for o in outcomes if o.flipped]
    assert len(struck) > len(outcomes) // 2
    assert sum(map(drifted, struck)) > len(struck) // 2


# ---- drift


def drifted(outcome: Verdict) -> bool:
    """Whether the job has ended since states differed again, or in a worker that was healed."""
    return outcome.seen.get(DRIFT, 0) > 0


def drifting(which: str, workers: int = 3, rewindable: bool = True, *faults: SimFault, **job: int) -> Setup:
    setup = quiet(workers, SimJob(6, 6, 4, **job), 4, *faults, rewindable=rewindable)
    return replace(setup, differs=which)


@pytest.mark.parametrize("rewindable", [True, False])
@pytest.mark.parametrize("setup", [{}, {"workers": 2}, {"write_every": 2}, {"stages": 2, "workers": 4}], ids=str)
def test_a_script_that_changes_the_leaders_state_ends_the_job(setup, rewindable):
    for seed in seeds(6):
        outcome = simulate(seed, setup=drifting("leader", rewindable=rewindable, **setup))
        assert outcome.ok and drifted(outcome), outcome
        assert "job_completed" not in outcome.reports


def test_a_script_that_changes_the_state_of_who_was_healed_ends_the_job_at_its_first_step():
    outcomes = [simulate(seed, setup=drifting("healed", 3, True, SimFault("kill", 60, pick=1))) for seed in seeds(12)]
    assert all(o.ok for o in outcomes) and any(drifted(o) for o in outcomes)
    assert all(drifted(o) or o.unnoticed or not o.flipped for o in outcomes), "all begin again, and drift alike"


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("fault", [(), (SimFault("kill", 60, pick=1),)], ids=["alone", "killed"])
def test_a_script_that_sets_the_leaders_model_alone_ends_the_job(workers, fault, monkeypatch):
    """As `if run.is_main: bn.eval()` from step 3 on: compared in every step, with no state that differs."""
    payload = Reduction._payload

    def set_otherwise(reduction, operation, gradients):
        leads = operation.plan.leader(0) == reduction.life.me.worker_id and operation.step >= 3
        if leads:
            reduction.life.site.checks.taint.flip()
        sections = [
            structs.replace(s, settings=bytes(20 - leads) + bytes([1] * leads))
            for s in payload(reduction, operation, gradients).sections
        ]
        return AgreePayload(sections)

    monkeypatch.setattr(Reduction, "_payload", set_otherwise)
    for seed in seeds(6):
        setup = quiet(workers, SimJob(8, 6, 4), 100, *fault)
        outcome = simulate(seed, setup=setup)
        assert outcome.ok and drifted(outcome), outcome
        assert "job_completed" not in outcome.reports


def test_a_second_flip_before_all_have_come_as_far_is_taken_for_drift():
    """Of hardware that fails twice within so few steps as of a script: nobody can tell."""
    twice = quiet(3, SimJob(9, 6, 4), 4, FLIP, SimFault("flip", 430))
    outcomes = [simulate(seed, setup=twice) for seed in seeds(12)]
    assert all(o.ok for o in outcomes) and any(drifted(o) for o in outcomes)
    assert not any(drifted(o) for o in runs("the outvoted worker alone knows", len(seeds(24))))


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
    found = comparing.Disagreement("they differ", frozenset({0}))
    monkeypatch.setattr(comparing, "verdict", lambda when, copies, fresh: found if when == "before step 4" else None)
    outcome = simulate(1, setup=quiet(2, SimJob(8, 4, 3), 2))
    assert words in outcome.problem


class KeepsTheLiveState(Known):
    """What has been found to differ counts as long as its step does."""

    def doubt(self, sound: int) -> None:
        self.held.doubt(sound)


@pytest.mark.parametrize("name", ["the very first state", "the very first state of a stage"])
def test_the_scenario_of_the_first_state_meets_its_bug(name):
    assert any(o.problem for o in runs(name, machine=machine_with(KeepsTheLiveState)))


def test_the_scenario_of_pace_meets_its_bug(monkeypatch):
    def present(self: Stepper) -> int:
        return self._machine.generation

    monkeypatch.setattr(Stepper, "_generation", property(present, lambda self, value: None), raising=False)
    assert any(drifted(o) for o in runs("all find it at their own pace", 20, start=110))


def test_the_scenario_of_steps_that_are_done_again_meets_its_bug(monkeypatch):
    real = Comparing.entered

    def remembers(self: Comparing, *settled: object, back: bool) -> None:
        sound = self._sound | self._heard
        real(self, *settled, back=back)  # type: ignore[arg-type]
        self._sound |= sound

    monkeypatch.setattr(Comparing, "entered", remembers)
    assert any("with wrong states" in o.problem for o in runs("while steps are done again"))


class Forgets(Switching):
    """Knows only what it has found itself, or what members state."""

    def _take(self, plan):
        object.__setattr__(plan, "sound", -1)
        return super()._take(plan)


def test_the_scenario_of_the_next_coordinator_meets_its_bug(monkeypatch):
    """Neither the journal nor a worker says that the doubt is over."""
    monkeypatch.setattr(JobProgress, "replay_settled", lambda self, generation: None)
    monkeypatch.setattr(workers, "_go_on", _before_hellos_said(workers._go_on))
    outcomes = runs("the coordinator dies when that is over")
    assert any("members had settled" in o.problem for o in outcomes)


def _before_hellos_said(go_on):
    return lambda job, worker, hello: go_on(job, worker, structs.replace(hello, settled=False))


@pytest.mark.parametrize("name", ["checkpoints of what is wrong", "after a heal"])
def test_scenarios_meet_the_bug_of_a_plan_whose_doubt_is_not_heard(name):
    outcomes = runs(name, 24, machine=machine_with(Forgets))
    assert any(o.problem or o.unnoticed for o in outcomes)


# ---- the model


def test_what_descends_from_a_flipped_bit_is_marked_and_nothing_else():
    states = undisturbed(SimJob(2, 4, stages=2))[0][1]
    assert not any(map(wrong, states.values()))
    bad = flipped(states[0])
    assert wrong(bad) and all(wrong((block,)) for block in leaf(bad, 2, 0))
    cut = cut_anew(states, SimJob(2, 4, stages=1, units=2))
    assert by_unit(cut) == by_unit(states) and cut == undisturbed(SimJob(2, 4, units=2))[0][1]
    assert wrong(update(states[1], 2, leaf(bad, 2, 0))) and not wrong(update(states[1], 2, leaf(states[0], 2, 0)))


def test_a_checkpoint_that_another_cut_left_incomplete_is_begun_anew():
    disk = Disk(None)
    disk.saving[4], disk.past[4, 1] = {0}, True
    disk.cut_anew(SimJob(2, 4, stages=1, units=2))
    assert not disk.saving and not disk.past
