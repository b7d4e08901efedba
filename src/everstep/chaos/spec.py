"""Parser of `--chaos`: from text to faults. No clock, no input or output.

Apart from the injector so that a specification is checked before a job starts, and so that every worker draws the same
random faults from (seed, step) without talking to the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.base.errors import ConfigError, did_you_mean
from everstep.base.strikes import Strike
from everstep.chaos.fault import COMPUTE_PHASES, PHASES, Fault, Target, parse_target
from everstep.chaos.fault_kinds import KINDS, FaultKind
from everstep.observe.events import KINDS as EVENT_KINDS

DRAWN = tuple(kind.name for kind in KINDS.values() if kind.drawn)
"""Kinds of random faults."""
EVENTS = tuple(sorted(EVENT_KINDS))
SIDES = ("coordinator", "peers")

_FORMS = {
    "phase": "phase=PHASE",
    "for": "for=SECONDS",
    "from": f"from={'|'.join(SIDES)}",
    "by": "by=SECONDS",
    "until": "until=EVENT*COUNT",
    "mbit": "mbit=NUMBER",
    "p": "p=SHARE",
}
_FAULT_KEYS = ("target", "at", *_FORMS)
_MOST_SECONDS = 1e9
_RANDOM_KEYS = ("p", "seed", "after_step")


@dataclass(frozen=True)
class RandomFaults:
    """A random fault with probability `p` in each step after `after_step`. Determined by (seed, step)."""

    p: float
    seed: int
    after_step: int
    index: int = 0

    def draw(self, step: int, worker_ids: Sequence[int]) -> Fault | None:
        """The fault of this step, if any, among these members and the coordinator."""
        if step <= self.after_step or uniform(self.seed, step, 0) >= self.p:
            return None
        who = choose(len(worker_ids) + 1, self.seed, step, 1)
        if who == len(worker_ids):
            return self.of_coordinator(step)
        kind = DRAWN[choose(len(DRAWN), self.seed, step, 2)]
        phase = COMPUTE_PHASES[choose(len(COMPUTE_PHASES), self.seed, step, 3)]
        for_s = 0.5 + 2.5 * uniform(self.seed, step, 4) if "for" in KINDS[kind].takes else None
        return Fault(kind, Target("worker", worker_ids[who]), step, phase, for_s, self.index)

    def of_coordinator(self, step: int = 0) -> Fault:
        """The fault that strikes the coordinator."""
        return Fault("kill", Target("coordinator"), step, index=self.index)

    def __str__(self) -> str:
        return f"random:p={self.p:g},seed={self.seed},after_step={self.after_step}"


AnyFault = Fault | RandomFaults


def uniform(*numbers: int) -> float:
    """A number in [0, 1) that depends on these integers alone."""
    text = ",".join(str(n) for n in numbers).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64


def choose(n: int, *numbers: int) -> int:
    """One of 0..n-1 that depends on these integers alone."""
    return min(n - 1, int(uniform(*numbers) * n))


def parse(spec: str) -> tuple[AnyFault, ...]:
    """Faults of a specification, "FAULT; FAULT; ...", each `kind:key=value,key=value`; empty for an empty one.

    Raises: ConfigError, one line that names the fault and the allowed keys.
    """
    return tuple(_parse_one(text, index) for index, text in enumerate(_texts(spec)))


def parse_now(text: str) -> Fault:
    """Parse a fault for a running job: without `at` it strikes at once.

    Raises: ConfigError, as `parse`; also for several faults and for random ones.
    """
    texts = _texts(text)
    if len(texts) != 1:
        raise ConfigError(f"expected one fault such as kill:target=worker:2, got {text!r}")
    fault = _parse_one(texts[0], 0, now=True)
    if isinstance(fault, RandomFaults):
        why = "random faults are for --chaos, before a job starts; use target=random here"
        raise ConfigError(f"chaos fault {texts[0]!r}: {why}")
    return fault


def _texts(spec: str) -> list[str]:
    return [text.strip() for text in spec.split(";") if text.strip()]


def simulated_failure(total_steps: int | None, seed: int) -> Fault:
    """Fault of `--simulate-failure`: one random worker is killed once, in the middle third of the run.

    total_steps: None if it is not known beforehand; then the fault comes early, so that it strikes in a short run, too.
    """
    low, high = (
        (3, 6) if total_steps is None else (total_steps // 3 + 1, max(2 * total_steps // 3, total_steps // 3 + 1))
    )
    at = low + choose(high - low + 1, seed, 0x5F, 0)
    phase = COMPUTE_PHASES[choose(3, seed, 0x5F, 1)]
    return Fault("kill", Target("random"), max(1, at), phase)


def _parse_one(text: str, index: int, now: bool = False) -> AnyFault:
    kind, _, rest = text.partition(":")
    kind = kind.strip()
    try:
        if kind == "random":
            return _parse_random(_pairs(rest, _RANDOM_KEYS), index)
        if kind not in KINDS:
            known = ", ".join((*KINDS, "random"))
            raise ConfigError(f"unknown kind {kind!r}; known: {known}{did_you_mean(kind, KINDS)}")
        return _parse_fault(KINDS[kind], _pairs(rest, _FAULT_KEYS), index, now)
    except ConfigError as error:
        raise ConfigError(f"chaos fault {text!r}: {error}") from None


def _parse_fault(kind: FaultKind, values: Mapping[str, str], index: int, now: bool) -> Fault:
    if "at" not in values and not now:
        raise ConfigError("it must say at=STEP")
    for key in values:
        if key in _FORMS and key not in kind.takes:
            takers = ", ".join(other.name for other in KINDS.values() if key in other.takes)
            raise ConfigError(f"{_FORMS[key]} belongs to {takers}, not to {kind.name}")
    target = parse_target(values.get("target", "random"))
    for key, why in kind.needs.items():
        if key not in values:
            late = "by which each packet is late"
            raise ConfigError(f"it must say {_FORMS[key]}, {late if key == 'by' and target.name else why}")
    phase = values.get("phase")
    if phase not in (None, "any", *PHASES):
        raise ConfigError(f"unknown phase {phase!r}; known: {', '.join(PHASES)}{did_you_mean(str(phase), PHASES)}")
    _check_place(kind, target, values)
    if (target.kind == "coordinator" or target.rank) and not kind.by_signal:
        able = " or ".join(other.name for other in KINDS.values() if other.by_signal)
        whom, whose = ("one rank of a worker", "whole workers") if target.rank else ("the coordinator", "workers only")
        raise ConfigError(f"kinds for {whom} are {able}; {kind.name} is for {whose}")
    side = values.get("from", SIDES[0])
    if side not in SIDES:
        raise ConfigError(f"from must be {' or '.join(SIDES)}, got {side!r}")
    return Fault(
        kind.name,
        target,
        _integer(values, "at", low=1) if "at" in values else 0,
        phase if phase != "any" else None,
        _number(values, "for") if "for" in values else None,
        index,
        side == "peers",
        _number(values, "by") if "by" in values else 0.0,
        _until(values["until"]) if "until" in values else None,
        _number(values, "mbit") if "mbit" in values else 0.0,
        _share(values) if "p" in values else 1.0,
    )


def _check_place(kind: FaultKind, target: Target, values: Mapping[str, str]) -> None:
    """Check that this kind is for the target, and has the keys that it needs there."""
    place = target.kind if target.name else "worker"
    if place not in kind.on:
        able = ", ".join(other.name for other in KINDS.values() if place in other.on)
        raise ConfigError(f"kinds for a {place} are {able}; {kind.name} is for a {' or a '.join(sorted(kind.on))}")
    if place == "link" and not 0 < target.name.find("-") < len(target.name) - 1:
        raise ConfigError(f"a link is between two hosts, link:NAME-NAME, got {str(target)!r}")
    if place != "worker" and kind.name == "slow" and ("for" not in values or "until" in values):
        raise ConfigError(f"it must say for=SECONDS, after which the {place} is as fast as before, and no until")
    if values.get("mbit") is not None and _number(values, "mbit") <= 0:
        raise ConfigError("mbit must be greater than 0")


def _share(values: Mapping[str, str]) -> float:
    share = _number(values, "p")
    if not 0 < share <= 1:
        raise ConfigError(f"p is a share of packets, greater than 0 and at most 1, got {values['p']}")
    return share


def strikes_of(faults: Sequence[AnyFault]) -> list[Strike]:
    """Faults that agents carry out, or the job's process."""
    found = (fault.strike() if isinstance(fault, Fault) else fault.of_coordinator().strike() for fault in faults)
    return [strike for strike in found if strike is not None]


def _until(text: str) -> tuple[str, int]:
    event, _, count = text.partition("*")
    if event not in EVENTS or (count and not (count.isdecimal() and len(count) < 10)):
        raise ConfigError(f"until must be KIND or KIND*COUNT of events, got {text!r}{did_you_mean(event, EVENTS)}")
    return event, int(count or 1)


def _parse_random(values: Mapping[str, str], index: int) -> RandomFaults:
    if "p" not in values:
        raise ConfigError("it must say p=PROBABILITY")
    p = _number(values, "p")
    if p > 1.0:
        raise ConfigError(f"p is a probability from 0 to 1, got {values['p']}")
    seed, after_step = (_integer(values, key, low=0) if key in values else 0 for key in ("seed", "after_step"))
    return RandomFaults(p, seed, after_step, index)


def _pairs(rest: str, known: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = (s.strip() for s in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"expected key=value, got {part!r}")
        if key not in known:
            raise ConfigError(f"unknown key {key!r}; known: {', '.join(known)}{did_you_mean(key, known)}")
        if key in values:
            raise ConfigError(f"{key} is given twice")
        values[key] = value
    return values


def _integer(values: Mapping[str, str], key: str, low: int) -> int:
    try:
        number = int(values[key])
    except ValueError:
        raise ConfigError(f"{key} must be a whole number, got {values[key]!r}") from None
    if number < low:
        raise ConfigError(f"{key} must be at least {low}, got {number}")
    if number >= 1 << 63:
        raise ConfigError(f"{key} must be less than 2**63, got {values[key][:40]}")
    return number


def _number(values: Mapping[str, str], key: str) -> float:
    try:
        number = float(values[key])
    except ValueError:
        raise ConfigError(f"{key} must be a number, got {values[key]!r}") from None
    if not 0 <= number <= _MOST_SECONDS:
        raise ConfigError(
            f"{key} must be a finite number of at least 0, at most {_MOST_SECONDS:g}, got {values[key][:40]}"
        )
    return number
