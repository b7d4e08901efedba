"""Simulates seeds, one or many; says of one that breaks a promise what replays it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from everstep.sim.scenario import simulate


def run(seed: int | None, trace: bool, seeds: int, start: int, forever: bool, split: bool, keep_going: bool) -> int:
    """One seed, or many. Returns the exit code: 0 all promises held, 1 one was broken."""
    if seed is not None:
        return _one(seed, split, trace)
    chosen = itertools.count(start) if forever else range(start, start + seeds)
    try:
        return _many(chosen, split, keep_going)
    except KeyboardInterrupt:
        return 0


def _one(seed: int, split: bool, trace: bool) -> int:
    outcome = simulate(seed, split=split, tracing=trace)
    for line in outcome.trace:
        print(line)
    print(outcome)
    print(
        f"{outcome.steps} steps, {outcome.generations} generations, {outcome.virtual_ms:.0f} virtual ms, "
        f"{outcome.events} events, {outcome.reports}"
    )
    return 0 if outcome.ok else 1


def _many(seeds: Sequence[int] | itertools.count[int], split: bool, keep_going: bool) -> int:
    begin, count, failed, events = time.monotonic(), 0, 0, 0
    for seed in seeds:
        outcome = simulate(seed, split=split)
        count += 1
        events += outcome.events
        if not outcome.ok:
            failed += 1
            how = f"--seed {seed}{' --split' if split else ''} --trace"
            print(f"{outcome}\n  replay with: everstep sim {how}", flush=True)
            if not keep_going:
                return 1
        if count % 1000 == 0:
            print(f"{count} seeds, {failed} failed", flush=True)
    took = time.monotonic() - begin
    print(f"{count} seeds, {failed} failed, {events} events, {took:.1f} s")
    return 1 if failed else 0
