"""Models in several stages: hundreds of seeds, named scenarios, and broken rules that must be noticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from ordinary_seeds import meets_flips, ordinary, under
from planted_bugs import machine_with

from everstep.base.extents import WHOLE
from everstep.protocol.settling import Settlement, settle
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import Holding, LanesLost, StepEffect
from everstep.protocol.stepping import entering
from everstep.protocol.stepping.contributing import Contributing
from everstep.protocol.stepping.entering import Entering
from everstep.protocol.stepping.known import Known
from everstep.sim.faults import SimFault
from everstep.sim.model import SimJob
from everstep.sim.rules import Rules
from everstep.sim.scenario import simulate
from everstep.sim.setups import Setup, set_up_split
from sampling import seeds

POOL_DIES = Setup(
    4, 0, 2, 1, "replace", SimJob(8, 4, 3, stages=2, keep_every=2), (SimFault("pool", 250, "computing", 4, 0, 1),)
)
POOL_DIES_UPDATING = replace(POOL_DIES, faults=(SimFault("pool", 150, "updating", 9, 0, 1, for_ms=1),))
WEAK_POOL = Setup(
    6, 0, 2, 1, "shrink", SimJob(14, 6, 3, stages=2, keep_every=2), rules=Rules(lasting_ms=10),
    faults=(SimFault("kill", 60, pick=5), SimFault("kill", 120, pick=2), SimFault("kill", 200, "fetching", 1, 500)),
)  # fmt: skip
# Who had copied a stage of a new seat still held the one without a seat, but did not state it any more when the last
# other holder of that one died.
SEAT_LOST = Setup(
    6, 0, 2, 1, "shrink", SimJob(8, 3, 3, stages=3, keep_every=1),
    (SimFault("pool", 200, "agreeing", 3, 0, 1), SimFault("pool", 205, "fetching", 2, 8000, 0)),
)  # fmt: skip
SCENARIOS = {
    "a pool dies while what it holds is in memory without a seat": SEAT_LOST,
    "a whole pool dies, and its state is in another pool's memory": POOL_DIES,
    "a whole pool dies in the update": POOL_DIES_UPDATING,
    "a second fault while some have gone back": replace(
        POOL_DIES,
        workers=6,
        spares=1,
        faults=(
            SimFault("pool", 250, "computing", 4, 0, 1),
            SimFault("kill", 250, "fetching", 2, 3000),
            SimFault("kill", 250, "fetching", 5, 1000, same=True),
        ),
    ),
    "everybody dies, and there is a checkpoint": replace(
        POOL_DIES,
        job=SimJob(8, 4, 3, stages=2, write_every=2),
        faults=tuple(SimFault("kill", 320 + n // 8, pick=n % 4) for n in range(16)),
    ),
    "a joiner follows while the members go back": replace(
        POOL_DIES,
        workers=6,
        faults=(
            SimFault("kill", 150, pick=0),
            SimFault("pool", 180, "heal", 1, 1500, 2),
            SimFault("pool", 260, pick=1),
        ),
    ),
    "fewer workers than stages": Setup(
        2, 1, 1, 1, "shrink", SimJob(6, 3, 3, stages=4, keep_every=1), (SimFault("kill", 200, pick=1),)
    ),
    "a weak pool gets a member of another, and somebody dies meanwhile": WEAK_POOL,
    "a standby takes over": Setup(
        6,
        0,
        2,
        1,
        "shrink",
        SimJob(6, 3, 3, stages=2),
        tuple(SimFault("kill", 100 + 90 * n, pick=0) for n in range(2)),
        1,
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_promises_hold(name):
    failed = [str(o) for o in (under(SCENARIOS[name], seed) for seed in seeds(8)) if not o.ok]
    assert not failed, failed[0]


def test_the_scenarios_go_back_and_not_to_the_beginning():
    for name in list(SCENARIOS)[1:5]:
        outcomes = [under(SCENARIOS[name], seed) for seed in range(4)]
        assert any(any(o.targets) for o in outcomes), name


def test_a_weak_pool_gets_a_member_of_another():
    outcomes = [simulate(s, setup=replace(WEAK_POOL, faults=WEAK_POOL.faults[:2])) for s in range(6)]
    assert all(o.ok for o in outcomes) and sum(o.reports.get("worker_healed", 0) for o in outcomes) > 2


def test_the_seeds_meet_what_they_are_meant_to_meet():
    setups = [set_up_split(seed) for seed in range(200)]
    assert {s.job.stages for s in setups} == {2, 3, 4}
    assert any(s.workers < s.job.stages for s in setups) and any(s.active for s in setups)
    outcomes = [ordinary(seed, "split") for seed in range(60)]
    assert sum(bool(o.targets) for o in outcomes) > 15
    assert sum(any(o.targets) for o in outcomes) > 5
    assert sum(o.generations for o in outcomes) > 150


def test_most_flips_are_found():
    setups = {seed: set_up_split(seed) for seed in seeds(300)}
    meets_flips("split", {n: s.differs is None and any(f.kind == "flip" for f in s.faults) for n, s in setups.items()})


def test_a_seed_replays_exactly():
    assert simulate(7, split=True, tracing=True) == simulate(7, split=True, tracing=True)


# ---- broken rules


def problems(setup: Setup, machine: type[StepMachine] = StepMachine) -> Iterator[str]:
    return (o.problem for o in (simulate(s, setup=setup, machine=machine) for s in range(8)) if not o.ok)


def test_the_top_without_one_of_its_stages_is_noticed(monkeypatch):
    """Goes on at the top though nobody holds a stage there."""

    def blind(plan, holdings) -> Settlement:
        held = {k for h in holdings.values() for k in h.stages if h.position.step}
        everything = dict.fromkeys(range(plan.stages), WHOLE)
        full = {i: replace(h, stages=everything) if held else h for i, h in holdings.items()}
        return settle(plan, full)

    monkeypatch.setattr(entering, "settle", blind)
    assert any("P" in p for p in problems(POOL_DIES))


class GoesForwardAlone(Entering):
    """Stays at the top with its stage when the others have to go back."""

    def settle(self) -> list[StepEffect]:
        plan = self._known.plans.current
        if len(self._stated()) == len(plan.members):
            settled = settle(plan, self._stated())
            if settled.back and self._known.decisions.position > settled.target:
                return self._enter()
        return super().settle()


class RunsOnlyItsOwn(Contributing):
    """Runs again what itself lacks, not what others lack."""

    def _begin_step(self) -> list[StepEffect]:
        known = self._known
        known.next.runs(frozenset(lane for _, lane in known.plans.seats() - known.next.lanes))
        return super()._begin_step()


class KeepsTornSums(Contributing):
    """Takes lanes for held whose sum a plan has torn apart."""

    def lanes_lost(self, event: LanesLost) -> list[StepEffect]:
        return []


class ForgetsWhatIsHeld(Known):
    """Says that it lacks nothing, so nobody runs its lanes again."""

    def holding(self) -> Holding:
        return replace(super().holding(), lacking=())


INTERRUPTED = replace(POOL_DIES, faults=tuple(SimFault("kill", 60, "computing", n, 4000, n) for n in (3, 9)))
TORN = Setup(
    4, 0, 2, 1, "replace", SimJob(8, 8, 9), tuple(SimFault("kill", 60 + n, "computing", n, 12000, n) for n in (1, 6))
)


@pytest.mark.parametrize(
    ("machine", "setup"),
    [
        (GoesForwardAlone, POOL_DIES),
        (RunsOnlyItsOwn, INTERRUPTED),
        (ForgetsWhatIsHeld, INTERRUPTED),
        (KeepsTornSums, TORN),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bug_in_the_step_machine_is_noticed(machine, setup):
    assert next(problems(setup, machine_with(machine)), "")


def test_the_same_setups_pass_with_the_real_machine():
    assert [said for one in (INTERRUPTED, TORN) for said in problems(one)] == []
