"""Whom a fault strikes: named workers, leaders, whole stages or their backups, as a function of the plan. Pure.

Apart from the faults because every worker answers it for itself, from the plan alone: all agree without talking.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from everstep.base.errors import ConfigError
from everstep.base.plan import Plan

TARGETS = ("worker:N", "leader:STAGE", "backups:STAGE", "stage:STAGE", "coordinator", "random")
_ALONE = ("coordinator", "random")
_RANKED = re.compile(r"worker:([0-9]{1,9})/([0-9]{1,9})")
_NUMBERED = ("worker", "leader", "backups", "stage")


@dataclass(frozen=True)
class Target:
    """Whom a fault strikes. kind: worker, leader, backups, stage, coordinator or random.

    `number`: worker id or stage, None for the last two. `also`: further ones, of the kinds that have a number. `rank`:
    which process of the worker, where its cell has several.
    """

    kind: str
    number: int | None = None
    also: tuple[Target, ...] = ()
    rank: int = 0

    def __str__(self) -> str:
        own = self.kind if self.number is None else f"{self.kind}:{self.number}"
        own += f"/{self.rank}" if self.rank else ""
        return "+".join([own, *(str(one) for one in self.also)])

    @property
    def several(self) -> bool:
        """Whether it may mean more than one worker."""
        return bool(self.also) or self.kind in ("backups", "stage")

    def numbers(self, *kinds: str) -> tuple[int, ...]:
        """The worker ids or stages that targets of these kinds name, ascending."""
        own = (self.number,) if self.kind in kinds and self.number is not None else ()
        return tuple(sorted({*own, *(n for one in self.also for n in one.numbers(*kinds))}))

    def victims(self, plan: Plan, choose: Callable[[int], int]) -> tuple[int, ...]:
        """The worker ids that are meant under this plan, ascending; for the coordinator, the worker who strikes it.

        choose: given n, one of 0..n-1, the same at every worker.
        """
        found = set(self._own(plan, choose))
        for one in self.also:
            found |= set(one.victims(plan, choose))
        return tuple(sorted(found))

    def _own(self, plan: Plan, choose: Callable[[int], int]) -> tuple[int, ...]:
        ids = plan.worker_ids
        if self.kind == "worker":
            return (self.number,) if self.number is not None else ()  # who heals is not in the plan yet
        if self.kind == "random":
            return (ids[choose(len(ids))],) if ids else ()
        stage = self.number or 0
        pool = tuple(seat.worker_id for seat in plan.pool(stage))
        if not pool or self.kind == "stage":
            return pool
        leader = plan.leader(stage)
        return (leader,) if self.kind != "backups" else tuple(i for i in pool if i != leader)


def parse_target(text: str) -> Target:
    """`worker:2`, `leader:0`, `backups:1`, `stage:1`, several of these with `+`; or alone `coordinator`, `random` or
    `worker:2/1`, rank 1 of its cell.

    Raises: ConfigError, one line that says what is known.
    """
    parts = [part.strip() for part in text.split("+")]
    if len(parts) == 1 and text in _ALONE:
        return Target(text)
    ranked = _RANKED.fullmatch(text)
    if ranked is not None:
        return Target("worker", int(ranked[1]), rank=int(ranked[2]))
    found: list[Target] = []
    for part in parts:
        kind, _, number = part.partition(":")
        if kind not in _NUMBERED or not number.isdecimal():
            only = "; it stands alone" if part in _ALONE else ""
            raise ConfigError(f"unknown target {part!r}{only}; known: {', '.join(TARGETS)}, or several with +")
        found.append(Target(kind, int(number)))
    if len(set(found)) < len(found):
        raise ConfigError(f"target {text!r} names one twice")
    return Target(found[0].kind, found[0].number, tuple(found[1:]))
