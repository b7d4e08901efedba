"""What the digests in a step's records show: whether all copies of the state are alike, and which one is not.

Apart because it is a function of the records alone, so that all workers come to the same conclusion.
Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from everstep.protocol.driver.records import StepOutcome

Holder = TypeVar("Holder", bound=Hashable)


def differing(outcome: StepOutcome) -> tuple[str, frozenset[int]] | None:
    """What is wrong with the states before the step, in words, and which workers are outvoted; None if all are alike.

    A worker is outvoted where more than half of the copies (of a stage, or of a parameter that several stages hold)
    agree on another state.
    """
    split = any(outcome.digests)
    found: list[str] = []
    outvoted: set[int] = set()
    for stage, digests in sorted(outcome.digests.items()):
        if len(set(digests.values())) > 1:
            odd = _minority(digests)
            outvoted.update(odd)
            place = f"stage {stage}" if split else "the state"
            found.append(_words(place, outcome.step, digests, odd))
    for name, copies in sorted(outcome.ties.items()):
        if len(set(copies.values())) > 1:
            holders = {f"{worker} (stage {stage})": digest for (stage, worker), digest in sorted(copies.items())}
            odd_holders = _minority(holders)
            outvoted.update(worker for stage, worker in copies if f"{worker} (stage {stage})" in odd_holders)
            found.append(_words(f"the tied parameter {name}", outcome.step, holders, odd_holders))
    return ("; ".join(found), frozenset(outvoted)) if found else None


def proven_step(number: int, verify_every: int, begins_after: int) -> int:
    """After so many steps: the newest one whose state has been compared among the workers, and was alike.

    verify_every: steps between comparisons, 0 for none; each is of the state before its step. begins_after: the step
    whose state the job began with.
    """
    compared = number // verify_every * verify_every - 1 if verify_every else 0
    return max(0, compared, begins_after)


def _minority(digests: Mapping[Holder, str]) -> list[Holder]:
    """Whoever has another digest than more than half of all; nobody if there is no such digest."""
    (common, count), *_ = Counter(digests.values()).most_common(1)
    return [who for who, digest in digests.items() if digest != common] if 2 * count > len(digests) else []


def _words(place: str, step: int, digests: Mapping[Holder, str], odd: Iterable[Holder]) -> str:
    by: dict[str, list[str]] = {}
    for who, digest in digests.items():
        by.setdefault(digest, []).append(str(who))
    said = ", ".join(f"{digest[:12]} at worker {' and '.join(who)}" for digest, who in sorted(by.items()))
    deviates = " and ".join(str(who) for who in odd)
    verdict = f"worker {deviates} deviates" if deviates else "no copy is outvoted"
    return f"{place} differs among the workers before step {step} ({said}): {verdict}"
