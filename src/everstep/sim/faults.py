"""Which faults happen when: drawn from the seed, at a time or aimed at a phase of the protocol, as readable data.

A fault aimed at a phase strikes when any worker enters it. Faults come in twos often enough that the second hits the
first one's recovery; so settling, fetching, healing and switching get their share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

PHASES = ("settling", "fetching", "heal", "computing", "reducing", "agreeing", "updating", "gathering")
_WEIGHTS = {
    "kill": 8,
    "freeze": 3,
    "coordinator": 3,
    "coordinator_mid_effects": 3,
    "cut_workers": 2,
    "cut_control": 2,
    "isolate": 1,
    "link": 2,
    "bad_link": 1,
    "host": 1,
    "drop_control": 2,
    "scale": 3,
    "drain": 2,
    "coordinator_freeze": 1,
    "agent_freeze": 1,
    "last_words": 2,
    "stale_plan": 2,
    "raises": 2,
    "damage": 1,
    "stop": 1,
}
_KINDS = tuple(_WEIGHTS)
_LOSSES = ("lose", "lose", "lose_all", "lose_kept")
KNOWN = tuple(("faults", kind) for kind in (*_KINDS, "pool", *dict.fromkeys(_LOSSES)))


@dataclass(frozen=True)
class SimFault:
    """One fault. After `at_ms` it strikes at once (`phase` ""), or `delay_us` after the `count`-th time that a worker
    enters the phase. `pick`: which of the possible targets. `for_ms`: how long it lasts (0: does not end by itself).
    """

    kind: str
    at_ms: int
    phase: str = ""
    count: int = 1
    delay_us: int = 0
    pick: int = 0
    for_ms: int = 0
    same: bool = False  # aimed at the worker that entered the phase

    def __str__(self) -> str:
        when = f"at {self.at_ms} ms"
        if self.phase:
            when += f", {self.delay_us} us after '{self.phase}' number {self.count}{' there' if self.same else ''}"
        lasts = f" for {self.for_ms} ms" if self.for_ms else ""
        return f"{self.kind}[{self.pick}]{lasts} {when}"


def draw(rng: Random, horizon_ms: int) -> tuple[SimFault, ...]:
    """A schedule of mostly 0 to 6 faults within the horizon, in order of time; now and then a storm of a dozen."""
    faults: list[SimFault] = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4)) if rng.random() < 0.93 else rng.randint(8, 14)):
        faults.append(draw_one(rng, rng.randint(5, horizon_ms)))
        if rng.random() < 0.45:  # a second one, into the recovery of the first
            first = faults[-1]
            phase = rng.choice(("settling", "settling", "fetching", "heal", "heal", "updating", "agreeing", ""))
            at = first.at_ms if phase else first.at_ms + rng.randint(0, 60)
            faults.append(draw_one(rng, at, phase))
    return tuple(sorted(faults, key=lambda f: f.at_ms))


def draw_split(rng: Random, horizon_ms: int) -> tuple[SimFault, ...]:
    """The same for a model in several stages: besides, whole pools die, at once or one member after the other."""
    faults = list(draw(rng, horizon_ms))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2))):
        at = rng.randint(30, horizon_ms)
        phase = rng.choice(("", "", *PHASES))
        faults.append(replace(draw_one(rng, at, phase), kind="pool", for_ms=rng.choice((0, 0, 1, 5, 40))))
        if rng.random() < 0.5:  # into the settling
            second = rng.choice(("settling", "fetching", "fetching", "computing", "updating"))
            faults.append(replace(draw_one(rng, at, second), kind=rng.choice(("kill", "kill", "pool", "freeze"))))
    return tuple(sorted(faults, key=lambda f: f.at_ms))


def draw_losses(rng: Random, horizon_ms: int) -> tuple[SimFault, ...]:
    """Blocks that are lost, in every third schedule; often several at once, or into what follows."""
    faults: list[SimFault] = []
    for _ in range(rng.choice((1, 1, 2, 4)) if rng.random() < 0.35 else 0):
        one = draw_one(rng, rng.randint(20, horizon_ms))
        faults.append(replace(one, kind=rng.choice(_LOSSES)))
        if rng.random() < 0.5:
            phase = rng.choice(("settling", "fetching", "fetching", "heal", "reducing"))
            second = draw_one(rng, one.at_ms + rng.randint(0, 20), phase)
            faults.append(replace(second, kind=rng.choice((*_LOSSES, "kill", "kill", "link"))))
    return tuple(faults)


def draw_one(rng: Random, at_ms: int, phase: str | None = None) -> SimFault:
    """Any fault at a time, perhaps aimed at a phase."""
    kind = rng.choices(_KINDS, weights=tuple(_WEIGHTS.values()))[0]
    if phase is None:
        phase = rng.choice(PHASES) if rng.random() < 0.5 else ""
    long = rng.random() < 0.3
    return SimFault(
        kind=kind,
        at_ms=at_ms,
        phase=phase,
        count=rng.choice((1, 1, 1, 2, 3)),
        delay_us=rng.choice((0, 0, rng.randint(0, 800), rng.randint(0, 5000))),
        pick=rng.randint(0, 99),
        for_ms=rng.randint(1000, 4000) if long else rng.randint(5, 600),
        same=rng.random() < 0.5,
    )
