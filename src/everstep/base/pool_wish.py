"""Who is wanted where: the pools of the stages as the config asks for them, before anybody has come. Pure data.

Apart from the plan, which says who really sits where. Placement follows the wish as far as the workers that live allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from everstep.base.errors import ConfigError

MapRole = Literal["active", "standby"]
_KEYS = ("units", "workers", "leader", "backups")
_BACKUP_KEYS = ("worker", "role")


@dataclass(frozen=True)
class StageMap:
    """One stage of an explicit `map`.

    units: (first, last) of each of its parts, both inclusive; empty: the cut is made by itself. workers: ids; empty:
    they are seated by themselves. leader: None: the first live one in id order.
    """

    units: tuple[tuple[int, int], ...] = ()
    workers: tuple[int, ...] = ()
    leader: int | None = None
    standby: tuple[int, ...] = ()


@dataclass(frozen=True)
class PoolWish:
    """What is wanted of the pools.

    homes: worker ids by stage; a worker of a job with fewer workers than stages is in several. Empty: evenly, in order.
    active: how many members of each pool get lanes, by stage; the others are standby. Empty: all of them.
    standby: those that are passed over while others can be active. leaders: by stage, None: the first in id order.
    """

    homes: tuple[tuple[int, ...], ...] = ()
    active: tuple[int, ...] = ()
    standby: tuple[int, ...] = ()
    leaders: tuple[int | None, ...] = ()

    @cached_property
    def _homes_of(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for stage, pool in enumerate(self.homes):
            for worker_id in pool:
                found[worker_id] = (*found.get(worker_id, ()), stage)
        return found

    def homes_of(self, worker_id: int) -> tuple[int, ...]:
        """The stages where this worker is wanted, ascending; none for a spare."""
        return self._homes_of.get(worker_id, ())

    def size(self, stage: int) -> int:
        """How many members the pool should have; 0 if nothing is said."""
        return len(self.homes[stage]) if stage < len(self.homes) else 0


def parse_map(value: Any, stages: int) -> tuple[StageMap, ...]:
    """The explicit `map` of a config: one entry per stage, or nothing at all.

    Raises: ConfigError, one line, for anything that is not such a list, a worker in two places, or an empty stage.
    """
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"map: expected a list with one entry per stage, got {value!r:.60}")
    if len(value) != stages:
        raise ConfigError(
            f"map: expected {stages} entries, one per stage, got {len(value)}: add entries, or set stages={len(value)}"
        )
    found = tuple(_stage(stage, entry) for stage, entry in enumerate(value))
    seen: dict[int, int] = {}
    for stage, entry in enumerate(found):
        for worker_id in entry.workers:
            if worker_id in seen:
                where = f"in stages {seen[worker_id]} and {stage}" if seen[worker_id] != stage else f"in stage {stage}"
                raise ConfigError(f"map: worker {worker_id} is named twice, {where}: name each worker once")
            seen[worker_id] = stage
    for name, given in (("workers", [s.workers for s in found]), ("units", [s.units for s in found])):
        if any(given) and not all(given):
            empty = next(stage for stage, part in enumerate(given) if not part)
            raise ConfigError(
                f"map: stage {empty} has no {name}, but others have: give every stage its {name}, or none"
            )
    return found


def _stage(stage: int, entry: Any) -> StageMap:
    where = f"map: stage {stage}"
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected keys such as 'workers', got {entry!r:.60}")
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}: expected some of {', '.join(_KEYS)}")
    if "workers" in entry and ("leader" in entry or "backups" in entry):
        raise ConfigError(f"{where}: expected either 'workers', or 'leader' and 'backups', got both: keep one")
    units = _units(where, entry["units"]) if entry.get("units") is not None else ()
    if "workers" in entry:
        ids = entry["workers"]
        if isinstance(ids, str) or not isinstance(ids, Sequence) or not ids:
            raise ConfigError(f"{where}: expected worker ids, got workers {ids!r:.60}: name at least one worker")
        return StageMap(units, tuple(_worker(where, i) for i in ids))
    if "backups" in entry and "leader" not in entry:
        raise ConfigError(f"{where}: has backups and no leader: name its leader")
    if "leader" not in entry:
        return StageMap(units)
    leader = _worker(where, entry["leader"])
    backups = entry.get("backups") or ()
    if isinstance(backups, str) or not isinstance(backups, Sequence):
        raise ConfigError(
            f"{where}: expected a list of backups such as {{worker: 3, role: standby}}, got {backups!r:.60}"
        )
    pairs = [_backup(where, backup) for backup in backups]
    return StageMap(units, (leader, *(i for i, _ in pairs)), leader, tuple(i for i, role in pairs if role == "standby"))


def _backup(where: str, backup: Any) -> tuple[int, MapRole]:
    if not isinstance(backup, Mapping):
        return _worker(where, backup), "active"
    unknown = [key for key in backup if key not in _BACKUP_KEYS]
    if unknown or "worker" not in backup:
        raise ConfigError(f"{where}: expected a backup such as {{worker: 3, role: standby}}, got {dict(backup)!r:.60}")
    role = backup.get("role", "active")
    if role not in ("active", "standby"):
        raise ConfigError(f"{where}: a backup's role is active or standby, got {role!r:.60}")
    return _worker(where, backup["worker"]), role


def _worker(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{where}: a worker is a number from 0, got {value!r:.60}")
    return value


def _units(where: str, value: Any) -> tuple[tuple[int, int], ...]:
    """[first, last], or one such pair per part where a stage has several."""
    pairs = [value] if _is_pair(value) else value
    if isinstance(pairs, str) or not isinstance(pairs, Sequence) or not pairs or not all(_is_pair(p) for p in pairs):
        raise ConfigError(f"{where}: expected units as [first, last] (both count), got {value!r:.60}")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _is_pair(value: Any) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        return False
    return all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value) and value[0] <= value[1]


def even_homes(workers: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Even contiguous pools of the workers 0 to `workers` - 1; with fewer workers than stages, runs of stages for each.

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
        )
    return PoolWish(homes=even_homes(workers, stages), active=(1,) * stages if redundancy is not None else ())
