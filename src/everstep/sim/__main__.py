"""`python -m everstep.sim`: simulate seeds; exit 1 at the first that breaks a promise, with what replays it."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence

from everstep.sim.scenario import simulate


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all promises held, 1 one was broken."""
    parser = argparse.ArgumentParser(prog="everstep sim", description="Train under simulated faults, seed by seed.")
    parser.add_argument("--seed", type=int, help="simulate this seed alone")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--seeds", type=int, default=300, help="how many seeds (default 300)")
    parser.add_argument("--start", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--forever", action="store_true", help="go on until a seed fails or you interrupt")
    parser.add_argument("--split", action="store_true", help="models in several stages")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    args = parser.parse_args(argv)
    if args.seed is not None:
        return _one(args.seed, args.split, args.trace)
    seeds = itertools.count(args.start) if args.forever else range(args.start, args.start + args.seeds)
    try:
        return _many(seeds, args.split, args.keep_going)
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
            print(f"{outcome}\n  replay with: python -m everstep.sim {how}", flush=True)
            if not keep_going:
                return 1
        if count % 1000 == 0:
            print(f"{count} seeds, {failed} failed", flush=True)
    took = time.monotonic() - begin
    print(f"{count} seeds, {failed} failed, {events} events, {took:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
