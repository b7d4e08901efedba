"""Losses and gradients that are not finite: all leave out the same updates, and the job ends after the right step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everstep.protocol.driver.driver import Driver
from everstep.protocol.driver.driver_parts import DriverConfig
from everstep.protocol.driver.nonfinite import APPLIED, NonfiniteRule
from everstep.protocol.driver.records import AgreePayload
from everstep.protocol.step_machine import StepMachine
from everstep.sim.faults import SimFault
from everstep.sim.model import GRADIENT, SimJob, undisturbed
from everstep.sim.scenario import NONFINITE, Verdict, simulate
from everstep.sim.setups import Setup, set_up, set_up_split
from sampling import seeds

SEEDS = seeds(8)
ROW = frozenset({(4, 1), (5, GRADIENT), (6, 0), (6, 3)})
KILLS = (SimFault("kill", 60, "agreeing", 4, 300, 1), SimFault("kill", 60, "updating", 13, 0, 2, same=True))


def setup(mode: str, limit: int = 0, strange: frozenset[tuple[int, int]] = ROW, **more: Any) -> Setup:
    job = SimJob(8, 4, 3, nonfinite=strange, on_nonfinite=mode, nonfinite_limit=limit, **more)
    return Setup(4, 1, 2, 1, "replace", job, KILLS)


def outcomes(chosen: Setup, **more: Any) -> list[Verdict]:
    return [simulate(seed, setup=chosen, **more) for seed in SEEDS]


def ends_at(found: Verdict) -> int:
    """The step with which it ended for what was not finite; 0 if it did not."""
    assert found.ok, str(found)
    return found.steps if found.seen[NONFINITE] else 0


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("mode", "limit", "last"),
    [("warn", 0, 0), ("warn", 3, 6), ("warn", 4, 0), ("skip", 0, 0), ("skip", 2, 5), ("stop", 0, 4)],
)
def test_the_job_ends_after_exactly_so_many(mode: str, limit: int, last: int, stages: int) -> None:
    found = [ends_at(outcome) for outcome in outcomes(setup(mode, limit, stages=stages))]
    assert found == [last] * len(SEEDS)


def test_steps_are_counted_across_a_checkpoint_from_which_the_job_goes_on() -> None:
    """It dies as a whole in the middle of the row."""
    dies = SimFault("launcher", 60, "computing", 19, pick=1, for_ms=50)
    chosen = replace(setup("skip", 3, write_every=1), faults=(dies,))
    found = outcomes(chosen)
    assert {ends_at(outcome) for outcome in found} <= {6, 7}, "it had ended with the newest checkpoint's step, or not"
    assert any(set(outcome.targets) & {4, 5} and ends_at(outcome) == 6 for outcome in found)


def test_what_is_left_out_leaves_the_state_as_it_was() -> None:
    states, made = undisturbed(setup("skip").job)
    assert [k for k in range(1, 9) if states[k] == states[k - 1]] == [4, 5, 6]
    assert all(made[k] != states[k - 1] for k in range(1, 9))


def test_ordinary_seeds_meet_each_rule() -> None:
    for drawn in (set_up, set_up_split):
        jobs = [drawn(seed).job for seed in range(300)]
        assert {(job.on_nonfinite, bool(job.nonfinite_limit)) for job in jobs if job.nonfinite} >= {
            *(("warn", True), ("warn", False), ("skip", True), ("skip", False)),
            ("stop", False),
        }
        assert {lane == GRADIENT for job in jobs for _, lane in job.nonfinite} == {True, False}


# ---- bugs that are caught


def ruled(rule: NonfiniteRule, *, but: int = -1) -> Any:
    """Drivers that go by another rule, all but one of them."""

    def make(config: DriverConfig, machine: StepMachine) -> Driver:
        return Driver(config if machine.me.worker_id == but else replace(config, nonfinite=rule), machine)

    return make


def test_a_worker_that_makes_an_update_that_others_leave_out_is_noticed() -> None:
    problems = [outcome.problem for outcome in outcomes(setup("skip"), driver=ruled(APPLIED, but=1))]
    assert all("wrong state" in problem for problem in problems), problems


def test_a_job_that_ends_too_late_or_too_early_is_noticed() -> None:
    late = [outcome.problem for outcome in outcomes(setup("warn", 2), driver=ruled(NonfiniteRule("warn", 3)))]
    assert all("go on after step 5" in problem for problem in late), late
    early = [outcome.problem for outcome in outcomes(setup("warn", 3), driver=ruled(NonfiniteRule("warn", 2)))]
    assert all("ends the job with step 5" in problem for problem in early), early


def test_steps_that_nobody_counts_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    stamped = AgreePayload.stamped
    monkeypatch.setattr(AgreePayload, "stamped", lambda self, *said: stamped(self, *said[:4], 0, *said[5:]))
    problems = [outcome.problem for outcome in outcomes(setup("warn", 2))]
    assert all("go on after step 5" in problem for problem in problems), problems
