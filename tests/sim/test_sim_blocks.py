"""States of which members have parts: named scenarios, what seeds meet, and broken rules that must be noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from ordinary_seeds import under
from planted_bugs import machine_with

from everstep.base.extents import NONE, WHOLE
from everstep.base.plan import WorkerKey
from everstep.protocol.moving import taker
from everstep.protocol.moving.taker import BlocksCame, SourceOffers, Taker, TakerEffect
from everstep.protocol.settling import Settlement, settle
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import Holding, Key
from everstep.protocol.stepping import entering
from everstep.protocol.stepping.known import Known
from everstep.sim.faults import SimFault
from everstep.sim.model import SimJob, initial, merged, present, without
from everstep.sim.scenario import simulate
from everstep.sim.setups import Setup, set_up
from sampling import seeds

WHOLE_MODEL = SimJob(10, 6, 3)
SPLIT = SimJob(8, 4, 3, stages=2, keep_every=2)
DIVIDED = SimJob(10, 6, 3, write_every=2, copies=2)


def setup(job: SimJob, *faults: SimFault, workers: int = 4, **more) -> Setup:
    return Setup(workers, 0, 2, 1, "replace", job, faults, **more)


ONE_DIES = setup(DIVIDED, SimFault("kill", 100, pick=1), donors=3)
DAMAGE = SimFault("damage_copies", 0, for_ms=1000)
SCENARIOS = {
    "the others take over the segments of one that dies": ONE_DIES,
    "a donor dies while the others get their new segments": replace(
        ONE_DIES, faults=(*ONE_DIES.faults, SimFault("kill", 100, "fetching", 2, 1500, 2))
    ),
    "links break while blocks are on their way": replace(
        ONE_DIES,
        faults=(*ONE_DIES.faults, *(SimFault("link", 100, "fetching", n, 3000 * n, n) for n in range(1, 7))),
    ),
    "a pool dies, and what is kept of it is in parts": setup(
        SPLIT,
        SimFault("lose_kept", 215, "computing", 1, 0, 2, same=True),
        SimFault("pool", 220, "computing", 4, 0, 1),
        workers=6,
    ),
    "segments of several stages, while a pool dies": setup(
        replace(SPLIT, write_every=2, copies=2),
        SimFault("kill", 180, pick=2),
        SimFault("pool", 180, "fetching", 1, 500, 1),
        workers=6,
        donors=2,
    ),
    "blocks come damaged, and are asked of others": replace(ONE_DIES, donors=2, faults=(*ONE_DIES.faults, DAMAGE)),
    "blocks come damaged to joiners": setup(
        WHOLE_MODEL, DAMAGE, *(SimFault("kill", 60 + 90 * n, pick=n) for n in range(3)), donors=3
    ),
    "several donors for a joiner, of which one dies": setup(
        WHOLE_MODEL, SimFault("kill", 60, pick=1), SimFault("kill", 80, "heal", 1, 9000, 2), workers=5, donors=3
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_promises_hold(name):
    failed = [str(o) for o in (under(SCENARIOS[name], seed) for seed in seeds(10)) if not o.ok]
    assert not failed, failed[0]


def seen(setups: list[Setup]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for one in setups:
        for seed in range(5):
            found.update(under(one, seed).seen)
    return found


def test_the_scenarios_meet_what_they_are_meant_to_meet():
    found = seen(list(SCENARIOS.values()))
    for name in ("rest", "of what is not whole", "from several", "in the place of one lost", "refused"):
        assert found["copies", name] > 0, name
    assert "lose_kept" in {fault.kind for n in range(200) for fault in set_up(n).faults}
    assert {set_up(n).donors for n in range(50)} == {1, 2, 3}


def test_one_donor_gives_the_whole_as_long_as_nothing_is_lost():
    quiet = setup(WHOLE_MODEL, SimFault("kill", 100, pick=1), SimFault("kill", 250, pick=2))
    assert not any(group == "copies" for group, _ in seen([quiet]))


def test_states_of_blocks():
    state = initial(SPLIT, 1)
    one = present((None, state[1], None, None))
    assert present(state) == WHOLE and present(without(state, WHOLE)) == NONE
    assert merged(without(state, one), without(state, WHOLE - one)) == state


# ---- broken rules


def problems(given: Setup, machine: type[StepMachine] = StepMachine) -> Iterator[str]:
    return (o.problem for o in (simulate(s, setup=given, machine=machine) for s in range(8)) if not o.ok)


class StatesAllTheSame(Known):
    """States a stage as whole of which it has a part."""

    def holding(self) -> Holding:
        held = super().holding()
        return replace(held, stages=dict.fromkeys(held.stages, WHOLE))


def test_a_bug_in_the_step_machine_is_noticed():
    assert next(problems(ONE_DIES, machine_with(StatesAllTheSame)), "")


def test_who_copies_what_it_has_is_noticed(monkeypatch):
    """The rest was there, and all of it crossed the wire. In pieces it comes only where no member has the whole."""

    def greedy(plan, holdings) -> Settlement:
        settled = settle(plan, holdings)
        found = {i: {k: one for k, one in pieces.items() if one.given} for i, pieces in settled.pieces.items()}
        return replace(settled, pieces={i: pieces for i, pieces in found.items() if pieces})

    monkeypatch.setattr(entering, "settle", greedy)
    assert any("has copied what it had" in simulate(seed, sharded=True).problem for seed in (20, 29, 67, 77))


class IgnoresRefusals(Taker):
    def _came(self, event: BlocksCame) -> None:
        super()._came(replace(event, missing=NONE))


class MatchesAnyOffer(Taker):
    def _offered(self, event: SourceOffers) -> None:
        super()._offered(replace(event, position=self.order.position or Key(0, 0)))


class AsksALostOneAgain(Taker):
    def _gone(self, source: WorkerKey, why: str) -> None:
        super()._gone(source, why)
        self._waiting.appendleft(source)


class ForgetsWhatALostOneOwed(Taker):
    def _gone(self, source: WorkerKey, why: str) -> None:
        self._chunks._donors.pop(source, None)
        super()._gone(source, why)


class GivesUpAtTheFirstLoss(Taker):
    def _gone(self, source: WorkerKey, why: str) -> None:
        self._waiting.clear()
        super()._gone(source, why)


class AsksOneWhereNobodyHasAll(Taker):
    def begin(self) -> list[TakerEffect]:
        self._reach(leads=True)
        return self._taken()


TELLING = {
    IgnoresRefusals: (0, "blocks come damaged, and are asked of others"),
    MatchesAnyOffer: (10, ""),
    AsksALostOneAgain: (0, "links break while blocks are on their way"),
    ForgetsWhatALostOneOwed: (1, "links break while blocks are on their way"),
    GivesUpAtTheFirstLoss: (0, "a pool dies, and what is kept of it is in parts"),
    AsksOneWhereNobodyHasAll: (0, "the others take over the segments of one that dies"),
}
"""By what each was noticed, which is looked at first; "" for what the seed draws."""


@pytest.mark.parametrize("broken", TELLING, ids=lambda broken: broken.__name__)
def test_a_bug_in_the_taker_is_noticed(monkeypatch, broken):
    """By the simulator alone: no tensor, socket or thread is here."""
    monkeypatch.setattr(taker, "Taker", broken)
    named = [(seed, name) for seed in range(4) for name in SCENARIOS]
    drawn = [(seed, "") for seed in range(100)]
    looks = (TELLING[broken], *(one for pair in zip(named, drawn, strict=False) for one in pair))
    assert any(not simulate(seed, setup=SCENARIOS.get(name)).ok for seed, name in looks)


def test_sources_that_go_together():
    """One has gone by itself when the taker, which ends since another one has, leaves it."""
    assert simulate(88006461).ok
