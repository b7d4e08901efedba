"""Two coordinators and one lease: whichever is lost, deposed or cut off, and whatever the store answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from everstep.base.errors import InvariantViolation
from everstep.protocol.coordinator.types import CoordinatorEffect, Persist
from everstep.protocol.lease.held import HeldEffects
from everstep.protocol.lease.requests import (
    Append,
    Appended,
    Campaign,
    Compact,
    Fenced,
    JournalEntry,
    Load,
    Loaded,
    StoreAnswer,
    Unanswered,
)
from everstep.protocol.lease.writer import Writer
from everstep.sim.lease_store import SimStore
from everstep.sim.scenario import simulate
from everstep.sim.world import World
from sampling import seeds

SEEDS = (*seeds(120), 248)
"""The last one meets what is rare: a term that is refused."""
TELLING = (56, 68, 74, 77)
"""Seeds by which the mistakes below are found."""


def test_seeds_keep_the_promises() -> None:
    outcomes = [simulate(seed, leased=True) for seed in SEEDS]
    failed = [str(outcome) for outcome in outcomes if not outcome.ok]
    assert not failed, "\n".join(failed)
    seen = sum((Counter(outcome.seen) for outcome in outcomes), Counter[tuple[str, str]]())
    for group, name in (
        ("lease", "lost"),
        ("lease", "fenced"),
        ("store", "Compact"),
        ("store", "CompactPart"),
        ("terms", "refused"),
    ):
        assert seen[group, name], f"never: {group} {name}"


def test_what_shortens_the_journal_late_does_not_put_an_older_one_back() -> None:
    store = SimStore(World(0), lambda term, entries: None)
    store.do(Campaign("one", {}, 2))
    assert store.holder is not None
    term = store.holder.term
    for number in range(1, 5):
        assert store.do(Append(term, number, [{"n": number}])) == Appended()
        if number % 2 == 0:
            assert store.do(Compact(term, number, [{"n": number}])) == Appended()
    assert store.do(Compact(term, 2, [{"n": 2}])) == Appended(), "it is done, by a later one"
    assert store.do(Load()) == Loaded([{"n": 4}], 5)
    assert store.do(Compact(term + 1, 2, [{"n": 2}])) == Fenced()
    store.do(Append(term, 6, [{"n": 6}]))
    with pytest.raises(InvariantViolation, match="of the journal is gone"):
        store.do(Load())


def test_a_late_request_of_an_earlier_life_of_the_job_is_fenced() -> None:
    store = SimStore(World(0), lambda term, entries: None)
    terms = []
    for _ in range(2):
        store.clear()
        store.do(Campaign("one", {}, 2))
        assert store.holder is not None
        terms.append(store.holder.term)
    assert store.do(Append(terms[0], 3, [{"n": 3}])) == Fenced() and store.do(Load()) == Loaded([], 1)


def test_effects_that_do_not_wait_for_the_journal_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(
        self: HeldEffects, effects: Iterable[CoordinatorEffect]
    ) -> tuple[list[JournalEntry], list[CoordinatorEffect]]:
        said = list(effects)
        return [e.entry for e in said if isinstance(e, Persist)], [e for e in said if not isinstance(e, Persist)]

    monkeypatch.setattr(HeldEffects, "take", take)
    assert any("P3: two plans" in simulate(seed, leased=True).problem for seed in TELLING)


def test_taking_silence_for_a_yes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = Writer.answered

    def hopeful(self: Writer, answer: StoreAnswer) -> int:
        if isinstance(answer, Unanswered) and isinstance(self._asked, Append):
            count, self._asked = len(self._asked.entries), None
            self.number += 1
            return count
        return answered(self, answer)

    monkeypatch.setattr(Writer, "answered", hopeful)
    assert any("P3: two plans" in simulate(seed, leased=True).problem for seed in TELLING)
