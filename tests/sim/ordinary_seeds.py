"""Seeds without a planted bug, each simulated once in a process: several tests look at the same ones."""

from __future__ import annotations

from functools import cache

from everstep.sim.scenario import SeedKind, Verdict, simulate
from everstep.sim.setups import Setup


@cache
def ordinary(seed: int, kind: SeedKind = "") -> Verdict:
    """What came of it."""
    return simulate(seed, **({kind: True} if kind else {}))


@cache
def under(setup: Setup, seed: int) -> Verdict:
    """What came of it in this setup."""
    return simulate(seed, setup=setup)


def meets_flips(kind: SeedKind, drawn: dict[int, bool]) -> None:
    """Most flips of bits are found; a few are lost with their copy, or reach all copies before a comparison.

    drawn: the seeds, and whether a bit flips there. One with a worker that computes otherwise is to be left out: where
    that worker is alone in a pool, nobody can know.
    """
    chosen = [seed for seed, flips in drawn.items() if flips]
    outcomes = [ordinary(seed, kind) for seed in chosen]
    failed = [str(outcome) for outcome in outcomes if not outcome.ok]
    assert not failed, failed[0]
    struck = [outcome for outcome in outcomes if outcome.flipped]
    assert len(struck) > len(chosen) // 3
    assert sum(outcome.found for outcome in struck) > len(struck) // 3
    assert sum(outcome.unnoticed for outcome in struck) < len(struck) // 8
