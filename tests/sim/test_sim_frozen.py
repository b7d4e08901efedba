"""A coordinator that was frozen at any point, or whose alarms ring early, decides what it would have decided: nobody
who lives is given up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.coordinator import Coordinator
from everstep.protocol.coordinator.types import CoordinatorEffect, CoordinatorEvent, Tick
from everstep.sim.faults import SimFault
from everstep.sim.rules import USUAL
from everstep.sim.scenario import Simulation
from everstep.sim.setups import Setup, set_up, set_up_leased, set_up_split
from everstep.sim.world import MS
from sampling import seeds

SPANS_MS = (20, 150, 450, 700, 1600, 5000, 30_000)
"""Shorter than a heartbeat; about as long as the limits of silence; and so long that the coordinator sees that it was
away (`LATE_NS`): longer than a lease, and the limits of hangs and returns."""


class Hasty(Coordinator):
    """All of its alarms ring after each message, before their time, as one may that was set for something else."""

    def handle(self, now_ns: int, event: CoordinatorEvent) -> list[CoordinatorEffect]:
        effects, alarms = super().handle(now_ns, event), self.job.env.alarms
        if isinstance(event, Tick):
            return effects
        for due, about in sorted(alarms._at):
            alarms.set(due, self.job.env.now, about)
        return effects + super().handle(now_ns, Tick())


def ran(
    seed: int, draw: Callable[[int], Setup], *faults: SimFault, coordinator: type[Coordinator] = Coordinator
) -> Simulation:
    """A job that has ended well, with these faults alone."""
    drawn = draw(seed)
    calm = replace(drawn.job, nonfinite=frozenset(), on_nonfinite="warn")
    setup = replace(drawn, job=calm, faults=faults, differs=None, rules=USUAL)
    one = Simulation(seed, setup, tracing=False, coordinator=coordinator)
    assert one.run() == "" and one.control.fate.completed, (seed, faults)
    return one


def given_up(one: Simulation) -> dict[WorkerKey, int]:
    """Lives that were given up for a fault, and when, in ns."""
    told = [e for e in one.control.site.told if e["kind"] == "worker_evicted" and e["cause"].is_fault]
    return {WorkerKey(e["worker_id"], e["incarnation"]): e["time_unix_ns"] for e in told}


@pytest.mark.parametrize("for_ms", SPANS_MS)
@pytest.mark.parametrize("draw", [set_up, set_up_split, set_up_leased])
def test_nobody_who_lives_is_given_up(draw: Callable[[int], Setup], for_ms: int) -> None:
    for seed in seeds(6):
        at_ms = Random(seed * 1000 + for_ms).randint(1, 400)
        one = ran(seed, draw, SimFault("coordinator_freeze", at_ms, for_ms=for_ms))
        assert given_up(one) == {}, (seed, at_ms)


@pytest.mark.parametrize("for_ms", SPANS_MS)
@pytest.mark.parametrize("draw", [set_up, set_up_leased])
def test_where_some_died_meanwhile_nobody_else_is_given_up(draw: Callable[[int], Setup], for_ms: int) -> None:
    for seed in seeds(6):
        chance = Random(seed * 1000 + for_ms)
        at_ms, pick = chance.randint(60, 250), chance.randint(0, 99)
        kills = [SimFault("kill", at_ms + chance.randint(-20, min(for_ms, 100)), pick=pick + k) for k in range(2)]
        one = ran(seed, draw, SimFault("coordinator_freeze", at_ms, for_ms=for_ms), *kills)
        for key, told_ns in given_up(one).items():
            life = one.control.workers[key]
            assert 0 < life.died_ns <= told_ns, (seed, key, life.died_ns / MS, told_ns / MS)


@pytest.mark.parametrize("draw", [set_up, set_up_split, set_up_leased])
def test_alarms_that_ring_early_give_nobody_up_who_lives(draw: Callable[[int], Setup]) -> None:
    for seed in range(6):
        chance = Random(seed)
        faults = [SimFault(kind, chance.randint(40, 250), pick=seed, for_ms=80) for kind in ("kill", "drop_control")]
        one = ran(seed, draw, *faults, coordinator=Hasty)
        for key, told_ns in given_up(one).items():
            assert 0 < one.control.workers[key].died_ns <= told_ns, (seed, key)
