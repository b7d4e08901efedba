"""Simulates seeds, one or many; says of one that breaks a promise what replays it."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from everstep.sim import faults, worker
from everstep.sim.scenario import Verdict, simulate

_KNOWN = (*worker.KNOWN, *faults.KNOWN)


@dataclass
class SeedTally:
    """What came of many seeds. seen: how often what happened, by group and name; what never did counts 0."""

    count: int = 0
    events: int = 0
    failed: list[Verdict] = field(default_factory=list)
    seen: Counter[tuple[str, str]] = field(default_factory=lambda: Counter(dict.fromkeys(_KNOWN, 0)))

    def add(self, outcome: Verdict) -> None:
        """One more seed."""
        self.count += 1
        self.events += outcome.events
        self.seen.update(outcome.seen)
        self.seen.update({("reports", kind): n for kind, n in outcome.reports.items()})
        if not outcome.ok:
            self.failed.append(outcome)

    def as_json(self, split: bool, cpu_s: float) -> dict[str, Any]:
        """For programs. cpu_s: what it took."""
        coverage: dict[str, dict[str, int]] = {}
        for (group, name), n in sorted(self.seen.items()):
            coverage.setdefault(group, {})[name] = n
        violations = [
            {
                "seed": outcome.seed,
                "promise": outcome.problem.partition(":")[0],
                "problem": outcome.problem,
                "schedule": [str(fault) for fault in outcome.setup.faults],
                "replay": _replay(outcome.seed, split),
            }
            for outcome in self.failed
        ]
        return {
            "seeds": self.count,
            "violations": violations,
            "seeds_per_cpu_s": round(self.count / max(cpu_s, 1e-9), 2),
            "coverage": coverage,
        }


def run_one(seed: int, split: bool, trace: bool) -> int:
    """Returns the exit code: 0 all promises held, 1 one was broken."""
    outcome = simulate(seed, split=split, tracing=trace)
    for line in outcome.trace:
        print(line)
    print(outcome)
    print(
        f"{outcome.steps} steps, {outcome.generations} generations, {outcome.virtual_ms:.0f} virtual ms, "
        f"{outcome.events} events, {outcome.reports}"
    )
    return 0 if outcome.ok else 1


def run_many(start: int, stop: int | None, split: bool, keep_going: bool, as_json: bool) -> int:
    """Seeds from `start` to before `stop`; None: until one fails or the user interrupts. Exit codes as `run_one`."""
    tally, begin_s, begin_cpu_s = SeedTally(), time.monotonic(), time.process_time()
    seeds: Iterable[int] = itertools.count(start) if stop is None else range(start, stop)
    try:
        for seed in seeds:
            outcome = simulate(seed, split=split)
            tally.add(outcome)
            if not as_json:
                _tell(tally, outcome, split)
            if not outcome.ok and not keep_going:
                break
    except KeyboardInterrupt:
        if stop is not None:
            raise
    if as_json:
        print(json.dumps(tally.as_json(split, time.process_time() - begin_cpu_s)))
    else:
        took = time.monotonic() - begin_s
        print(f"{tally.count} seeds, {len(tally.failed)} failed, {tally.events} events, {took:.1f} s")
    return 1 if tally.failed else 0


def _tell(tally: SeedTally, outcome: Verdict, split: bool) -> None:
    if not outcome.ok:
        print(f"{outcome}\n  replay with: {_replay(outcome.seed, split)}", flush=True)
    if tally.count % 1000 == 0:
        print(f"{tally.count} seeds, {len(tally.failed)} failed", flush=True)


def _replay(seed: int, split: bool) -> str:
    return f"everstep sim --seed {seed}{' --split' if split else ''} --trace"
