"""One fault as data: its kind, target, step and phase. Pure.

Apart from the specification's parser, which knows all kinds, because each kind knows this; and because every worker
finds out alone, from the plan, whom a fault means: all agree without talking.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everstep.base.errors import ConfigError
from everstep.base.plan import Plan
from everstep.base.strikes import Strike

COMPUTE_PHASES = ("load", "forward", "backward", "reduce", "agree", "update")
PHASES = (*COMPUTE_PHASES, "settle", "heal", "finish")
TARGETS = (
    *("worker:N", "leader:STAGE", "backups:STAGE", "stage:STAGE", "coordinator", "random"),
    *("host:NAME", "link:NAME-NAME"),
)
_ALONE = ("coordinator", "random")
_MOST_DIGITS = 9
_RANKED = re.compile(r"worker:([0-9]{1,9})/([0-9]{1,9})")
_PLACE = re.compile(r"(host|link):([A-Za-z0-9_.-]{1,120})")
_NUMBERED = ("worker", "leader", "backups", "stage")


@dataclass(frozen=True)
class Target:
    """Target of a fault. kind: worker, leader, backups, stage, coordinator, random, host or link.

    `number`: worker id or stage, None for other kinds. `also`: further targets of the kinds that have a number. `rank`:
    process of the worker, if its cell has several. name: of a host, or of the two hosts of a link with a hyphen
    between.
    """

    kind: str
    number: int | None = None
    also: tuple[Target, ...] = ()
    rank: int = 0
    name: str = ""

    def __str__(self) -> str:
        if self.name:
            return f"{self.kind}:{self.name}"
        own = self.kind if self.number is None else f"{self.kind}:{self.number}"
        own += f"/{self.rank}" if self.rank else ""
        return "+".join([own, *(str(one) for one in self.also)])

    @property
    def several(self) -> bool:
        """Whether it may mean more than one worker."""
        return bool(self.also) or self.kind in ("backups", "stage")

    def numbers(self, *kinds: str) -> tuple[int, ...]:
        """Worker ids or stages that targets of these kinds name, ascending."""
        own = (self.number,) if self.kind in kinds and self.number is not None else ()
        return tuple(sorted({*own, *(n for one in self.also for n in one.numbers(*kinds))}))

    def victims(self, plan: Plan, choose: Callable[[int], int]) -> tuple[int, ...]:
        """Worker ids that are meant under this plan, ascending; for the coordinator, the worker that strikes it.

        choose: given n, one of 0..n-1, the same at every worker.
        """
        found = set(self._own(plan, choose))
        for one in self.also:
            found |= set(one.victims(plan, choose))
        return tuple(sorted(found))

    def _own(self, plan: Plan, choose: Callable[[int], int]) -> tuple[int, ...]:
        ids = plan.worker_ids
        if self.kind == "worker":
            return (self.number,) if self.number is not None else ()  # a healing worker is not in the plan yet
        if self.kind == "random":
            return (ids[choose(len(ids))],) if ids else ()
        stage = self.number or 0
        pool = tuple(seat.worker_id for seat in plan.pool(stage))
        if not pool or self.kind == "stage":
            return pool
        leader = plan.leader(stage)
        return (leader,) if self.kind != "backups" else tuple(i for i in pool if i != leader)


@dataclass(frozen=True)
class Fault:
    """One fault that strikes each of its victims once.

    kind: a name of `chaos/kinds`. `at`: 0, at once; else the step being computed (with phase heal: the step being
    healed to; with phase settle: the last step done; with phase finish, when final/ is about to be made: the last
    step), or the first later one in which the target takes part. `phase` None: as soon as the target computes the step.
    `for_s`: seconds until it ends (None: never). `until`: (kind, count): slow until this many events of the kind were
    reported. `peers`: a partition from the other workers, too. `mbit`, `share`: remaining bandwidth in Mbit/s, share of
    packets lost. `index`: its place in the specification.
    """

    kind: str
    target: Target
    at: int
    phase: str | None = None
    for_s: float | None = None
    index: int = 0
    peers: bool = False
    by_s: float = 0.0
    until: tuple[str, int] | None = None
    mbit: float = 0.0
    share: float = 1.0

    def __str__(self) -> str:
        parts = [f"target={self.target}", *([f"at={self.at}"] if self.at else [])]
        if self.phase is not None:
            parts.append(f"phase={self.phase}")
        if self.for_s is not None:
            parts.append(f"for={self.for_s:g}")
        if self.peers:
            parts.append("from=peers")
        if self.by_s:
            parts.append(f"by={self.by_s:g}")
        if self.mbit:
            parts.append(f"mbit={self.mbit:g}")
        if self.share < 1.0:
            parts.append(f"p={self.share:g}")
        if self.until is not None:
            parts.append(f"until={self.until[0]}*{self.until[1]}")
        return f"{self.kind}:{','.join(parts)}"

    def request(self) -> dict[str, Any]:
        """Request to the coordinator, which checks whether the fault has a target."""
        target, strike = self.target, self.strike()
        later = bool(self.at or self.phase)  # then workers report when it is due
        if strike is not None and not (strike.coordinator and later):
            return {"fault": str(self), "strike": vars(strike)}
        if strike is not None:
            return {"fault": str(self), "due": vars(strike)}
        stages = target.numbers("leader", "backups", "stage")
        return {"fault": str(self), "workers": list(target.numbers("worker")), "stages": list(stages)}

    def strike(self) -> Strike | None:
        """Instruction for agents, or for the job's process; None if the fault is for workers."""
        of_coordinator = self.target.kind == "coordinator"
        if not self.target.name and not of_coordinator:
            return None
        for_s, link = self.for_s or 0.0, self.target.kind == "link"
        told = (str(self), self.kind, self.target.name or self.target.kind, link, for_s)
        return Strike(*told, self.by_s, self.mbit, self.share, self.index, of_coordinator)


def _number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ConfigError(f"expected numbers of at most {_MOST_DIGITS} digits, got {digits[:20]}...")
    return int(digits)


def parse_target(text: str) -> Target:
    """Parse `worker:2`, `leader:0`, `backups:1`, `stage:1`, several of these with `+`; or alone `coordinator`,
    `random`, `worker:2/1` (rank 1 of its cell), `host:NAME` or `link:NAME-NAME`.

    Raises: ConfigError, one line that lists the known targets.
    """
    parts = [part.strip() for part in text.split("+")]
    if len(parts) == 1 and text in _ALONE:
        return Target(text)
    place = _PLACE.fullmatch(text)
    if place is not None:
        return Target(place[1], name=place[2])
    ranked = _RANKED.fullmatch(text)
    if ranked is not None:
        return Target("worker", _number(ranked[1]), rank=_number(ranked[2]))
    found: list[Target] = []
    for part in parts:
        kind, _, number = part.partition(":")
        if kind not in _NUMBERED or not number.isdecimal():
            if len(parts) > 1 and (part in _ALONE or _PLACE.fullmatch(part) or _RANKED.fullmatch(part)):
                several = ", ".join(one for one in TARGETS if one.partition(":")[0] in _NUMBERED)
                raise ConfigError(f"target {part!r} stands alone: several with + are workers only ({several})")
            raise ConfigError(f"unknown target {part!r}; known: {', '.join(TARGETS)}, or several workers with +")
        found.append(Target(kind, _number(number)))
    if len(set(found)) < len(found):
        raise ConfigError(f"target {text!r} names one twice")
    return Target(found[0].kind, found[0].number, tuple(found[1:]))
