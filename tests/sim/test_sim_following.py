"""A coordinator whose journal lacks the newest plan asks one worker for it: what must hold at every timing, and whoever
dies, falls silent or is cut off meanwhile."""

from __future__ import annotations

from collections import Counter
from random import Random

from everstep.sim.faults import SimFault
from everstep.sim.model import SimJob
from everstep.sim.scenario import simulate
from everstep.sim.setups import Setup
from sampling import seeds

SEEDS = seeds(24)
MEANWHILE = ("kill", "kill", "freeze", "coordinator", "coordinator_mid_effects", "drop_control", "cut_control", "host")


def _setup(seed: int) -> Setup:
    rng = Random(f"following {seed}")
    back_ms = 130 + rng.randint(10, 60)
    faults = [SimFault(rng.choice(("kill", "scale", "drain")), 90, pick=rng.randrange(4))]
    faults.append(SimFault("senseless", 130, for_ms=back_ms - 130, pick=rng.randrange(2)))
    for _ in range(rng.choice((0, 1, 1, 2))):
        kind, pick = rng.choice(MEANWHILE), rng.randrange(4)
        faults.append(SimFault(kind, back_ms + rng.randint(0, 120), for_ms=rng.choice((40, 400, 3000)), pick=pick))
    return Setup(4, 1, 2, 1, "replace", SimJob(30, 6, 3), tuple(faults))


def test_the_newest_plan_is_found_whoever_is_lost_meanwhile() -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for seed in SEEDS:
        outcome = simulate(seed, setup=_setup(seed))
        assert outcome.ok, outcome
        seen.update(outcome.seen)
    assert seen["plans", "shown"] > len(SEEDS) // 3, seen["plans", "shown"]
