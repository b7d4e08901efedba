"""Jobs in which people and the owners of hosts have a hand: every promise holds, and each of their acts is met."""

from __future__ import annotations

from collections import Counter

import pytest

from everstep.protocol.coordinator.coordinator import Coordinator
from everstep.protocol.coordinator.environment import Environment
from everstep.protocol.coordinator.types import CoordinatorEffect, CoordinatorEvent, Received
from everstep.protocol.messages import Command, Heartbeat
from everstep.sim.odd_messages import ODD_FAULTS
from everstep.sim.operating import OPERATING_FAULTS
from everstep.sim.scenario import simulate
from everstep.sim.setups import LeasedSetup, set_up_operated
from sampling import seeds

SEEDS = seeds(60)
ACTS = (*OPERATING_FAULTS, "drain_host", "given_up", "senseless")


def test_the_promises_hold_and_each_act_is_met() -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for seed in SEEDS:
        outcome = simulate(seed, operated=True)
        assert outcome.ok, f"{outcome}\nreplay: everstep sim --seed {seed} --operated --trace"
        seen.update(outcome.seen)
    assert not [act for act in ACTS if not seen["faults", act]], seen


def test_the_setups_have_rules_of_their_own() -> None:
    setups = [set_up_operated(seed) for seed in range(300)]
    rules = [setup.rules for setup in setups]
    saves = {"", "interval", "auto", "minutes", "epochs", "evaluated", "memory", "none", "object", "objects"}
    assert {one.saves for one in rules} == saves
    assert any(one.shared and one.room for one in rules) and any(one.least > 1 for one in rules)
    assert any(one.by_steps for one in rules) and any(one.reboots for one in rules)
    assert any(one.patience_ms for one in rules) and any(one.first for one in rules)
    assert {one.told_lanes for one in rules} == {one.returns for one in rules} == {False, True}
    assert {fault.kind for setup in setups for fault in setup.faults} > ODD_FAULTS.keys() | {"end_alone"}
    assert any(isinstance(setup, LeasedSetup) for setup in setups)
    assert any(setup.job.stages > 1 for setup in setups)


class Forgets(Coordinator):
    """Decides again after each event, with nothing remembered of what it has looked at: nothing may come of that."""

    def handle(self, now_ns: int, event: CoordinatorEvent) -> list[CoordinatorEffect]:
        effects = super().handle(now_ns, event)
        self._decided, self.job.slots._shared = (), None
        self._decide()
        more = self.job.env.take_effects()
        assert not more, f"decided by a memory, and otherwise without: {more}"
        return effects


def test_what_is_remembered_is_what_would_be_found() -> None:
    failed = [
        str(o) for o in (simulate(seed, operated=True, coordinator=Forgets) for seed in range(100, 112)) if not o.ok
    ]
    assert not failed, failed[0]


class HearsTwice(Coordinator):
    """Hears each message of agents and workers a second time at once."""

    def handle(self, now_ns: int, event: CoordinatorEvent) -> list[CoordinatorEffect]:
        effects = super().handle(now_ns, event)
        again = isinstance(event, Received) and not isinstance(event.message, Command | Heartbeat)
        return effects + super().handle(now_ns, event) if again else effects


def test_each_message_may_come_a_second_time() -> None:
    failed = [str(o) for o in (simulate(seed, operated=True, coordinator=HearsTwice) for seed in range(10)) if not o.ok]
    assert not failed, failed[0]


def test_a_change_that_nobody_notes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environment, "change", lambda self: None)
    outcomes = [simulate(seed, operated=True, coordinator=Forgets) for seed in range(100, 106)]
    assert any("decided by a memory" in outcome.problem for outcome in outcomes)


def test_who_left_with_a_host_that_was_taken_away_is_no_holder() -> None:
    """One of those who leave has yet to do the update after which they leave, when the only other holder dies and the
    coordinator learns from the workers of a plan that its journal lacks."""
    outcome = simulate(72000682, operated=True)
    assert outcome.ok and outcome.lost_everything, outcome
