"""The pools of the stages as the config asks for them, before any worker has come. Pure data.

Apart from the plan, which says who really sits where. Placement follows the wish as far as the living workers allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from everstep.base.errors import ConfigError
from everstep.base.stage_map import StageMap

CutRule = Literal["auto", "counted", "measured"]
CUT_RULES: tuple[CutRule, ...] = ("auto", "counted", "measured")


@dataclass(frozen=True)
class PoolWish:
    """The pools that are wanted.

    homes: worker ids by stage; in a job with fewer workers than stages, a worker is in several. Empty: evenly, in
    order. active: number of members of each pool that get lanes, by stage; the others are standby. Empty: all of them.
    standby: workers that get lanes only if too few others can. leaders: by stage, None: the first in id order. named:
    the config names the workers of each stage one by one. copies: of each segment of the optimizer's state, among the
    members of a pool; 0: each member has all of it.
    """

    homes: tuple[tuple[int, ...], ...] = ()
    active: tuple[int, ...] = ()
    standby: tuple[int, ...] = ()
    leaders: tuple[int | None, ...] = ()
    named: bool = False
    copies: int = 0

    @cached_property
    def _homes_of(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for stage, pool in enumerate(self.homes):
            for worker_id in pool:
                found[worker_id] = (*found.get(worker_id, ()), stage)
        return found

    def homes_of(self, worker_id: int) -> tuple[int, ...]:
        """Stages where this worker is wanted, ascending; empty for a spare."""
        return self._homes_of.get(worker_id, ())

    def size(self, stage: int) -> int:
        """Number of members that the pool should have; 0 if nothing is said."""
        return len(self.homes[stage]) if stage < len(self.homes) else 0


def parse_cut(value: Any, parts: int) -> CutRule | tuple[int, ...]:
    """The `cut` of a config: a rule, or the number of units of each part.

    Raises: ConfigError, one line, for anything else, or sizes for another number of parts.
    """
    if value in CUT_RULES:
        return value  # type: ignore[no-any-return]
    sizes = () if isinstance(value, str) or not isinstance(value, Sequence) else tuple(value)
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ConfigError(
            f"cut: expected {', '.join(CUT_RULES)}, or the number of units of each part such as [4, 4, 2], got "
            f"{value!r:.60}"
        )
    if parts > 1 and len(sizes) != parts:
        raise ConfigError(f"cut: expected {parts} sizes, one per part, got {len(sizes)} in {list(sizes)}: correct them")
    return sizes


def even_homes(workers: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Even contiguous pools of the workers 0 to `workers` - 1; fewer workers than stages get a run of stages each.

    Sizes differ by at most one, larger ones first.
    """
    if workers >= stages:
        size, larger = divmod(workers, stages)
        firsts = [stage * size + min(stage, larger) for stage in range(stages + 1)]
        return tuple(tuple(range(firsts[s], firsts[s + 1])) for s in range(stages))
    size, larger = divmod(stages, workers)
    return tuple((i,) for i in range(workers) for _ in range(size + (i < larger)))


def make_wish(
    workers: int, stages: int, redundancy: int | None = None, stage_maps: Sequence[StageMap] = ()
) -> PoolWish:
    """The wish that the config makes. redundancy: standby backups per stage; None: all members are active."""
    if stage_maps and stage_maps[0].workers:
        return PoolWish(
            homes=tuple(tuple(sorted(s.workers)) for s in stage_maps),
            active=tuple(len(s.workers) - len(s.standby) for s in stage_maps),
            standby=tuple(sorted(i for s in stage_maps for i in s.standby)),
            leaders=tuple(s.leader for s in stage_maps) if any(s.leader is not None for s in stage_maps) else (),
            named=True,
        )
    return PoolWish(homes=even_homes(workers, stages), active=(1,) * stages if redundancy is not None else ())
