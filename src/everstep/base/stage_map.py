"""The explicit `map` of a config: units, workers, hosts and devices of each stage, its leader and its standbys.

Pure. Hosts and devices are only read here; whether they exist is checked where they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from everstep.base.errors import ConfigError

MapRole = Literal["active", "standby"]
_KEYS = ("units", "workers", "hosts", "leader", "backups", "host", "device", "devices")
_PLACE_KEYS = ("worker", "host", "device")
_BACKUP_KEYS = (*_PLACE_KEYS, "role")
_DEVICE = r"cpu|cuda(:\d+)?"


@dataclass(frozen=True)
class StageMap:
    """One stage of an explicit `map`.

    units: (first, last) of each of its parts, both inclusive; empty: the cut is automatic. workers: ids; empty: they
    are seated automatically. leader: None: the first live one in id order. hosts, devices: one for each of the workers,
    in their order, None if the map says nothing of it; empty if it says nothing of any.
    """

    units: tuple[tuple[int, int], ...] = ()
    workers: tuple[int, ...] = ()
    leader: int | None = None
    standby: tuple[int, ...] = ()
    hosts: tuple[str | None, ...] = ()
    devices: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class _Place:
    """One worker as an entry of the map names it: by id, or by its host."""

    worker: int | None = None
    host: str | None = None
    device: str | None = None
    role: MapRole = "active"


@dataclass(frozen=True)
class _Stage:
    """An entry before workers that are named by host have ids. led: its first worker is the leader."""

    units: tuple[tuple[int, int], ...] = ()
    places: tuple[_Place, ...] = ()
    led: bool = False


def parse_map(value: Any, stages: int) -> tuple[StageMap, ...]:
    """The explicit `map` of a config: one entry per stage, or empty if there is none.

    Raises: ConfigError, one line, for anything that is not such a list, a worker in two places, or an empty stage.
    """
    if value is None:
        return ()
    if not _is_list(value):
        raise ConfigError(f"map: expected a list with one entry per stage, got {value!r:.60}")
    if len(value) != stages:
        raise ConfigError(
            f"map: expected {stages} entries, one per stage, got {len(value)}: add entries, or set stages={len(value)}"
        )
    found = _numbered([_stage(stage, entry) for stage, entry in enumerate(value)])
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


def devices_of(stage_maps: Sequence[StageMap]) -> dict[int, str]:
    """Device of each worker for which the map names one."""
    return {i: d for s in stage_maps for i, d in zip(s.workers, s.devices, strict=False) if d is not None}


def hosts_of(stage_maps: Sequence[StageMap]) -> dict[int, str]:
    """Host of each worker for which the map names one."""
    return {i: h for s in stage_maps for i, h in zip(s.workers, s.hosts, strict=False) if h is not None}


def _numbered(stages: Sequence[_Stage]) -> tuple[StageMap, ...]:
    """Give ids, in order, to workers that are named by host alone: in each stage the leader first."""
    places = [place for stage in stages for place in stage.places]
    by_host = [place for place in places if place.worker is None]
    if by_host and len(by_host) < len(places):
        named = next(place.worker for place in places if place.worker is not None)
        raise ConfigError(
            f"map: worker {named} is named by its id and another by its host {by_host[0].host!r} alone: name all "
            "workers the same way"
        )
    found, first = [], 0
    for stage in stages:
        ids = [first + k if place.worker is None else place.worker for k, place in enumerate(stage.places)]
        first += len(stage.places)
        hosts, devices = tuple(p.host for p in stage.places), tuple(p.device for p in stage.places)
        found.append(
            StageMap(
                stage.units,
                tuple(ids),
                ids[0] if stage.led else None,
                tuple(i for i, place in zip(ids, stage.places, strict=True) if place.role == "standby"),
                hosts if any(hosts) else (),
                devices if any(devices) else (),
            )
        )
    return tuple(found)


# ---- one entry


def _stage(stage: int, entry: Any) -> _Stage:
    where = f"map: stage {stage}"
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected keys such as 'workers', got {entry!r:.60}")
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}: expected some of {', '.join(_KEYS)}")
    ways = [way for way in ("workers", "hosts", "leader") if way in entry]
    if len(ways) > 1 or ("backups" in entry and ways[:1] in (["workers"], ["hosts"])):
        others = "'leader' and 'backups'" if "backups" in entry or "leader" in ways else f"'{ways[1]}'"
        raise ConfigError(f"{where}: expected either '{ways[0]}', or {others}, got both: keep one")
    units = _units(where, entry["units"]) if entry.get("units") is not None else ()
    if not ways:
        _refuse_unplaced_keys(where, entry)
        return _Stage(units)
    if ways == ["leader"]:
        places = _led(where, entry)
    elif ways == ["hosts"]:
        places = [
            _Place(host=_valid(where, "host", name)) for name in _some(where, "hosts", entry["hosts"], "host names")
        ]
    else:
        places = [_place(where, item, "worker") for item in _some(where, "workers", entry["workers"], "worker ids")]
    return _Stage(units, _with_shared(where, entry, places), ways == ["leader"])


def _refuse_unplaced_keys(where: str, entry: Mapping[str, Any]) -> None:
    """Refuse keys about the workers in an entry that names no workers."""
    if "backups" in entry:
        raise ConfigError(f"{where}: has backups and no leader: name its leader")
    about = [key for key in ("host", "device", "devices") if key in entry]
    if about:
        raise ConfigError(f"{where}: has a {about[0]} and no workers: name them with workers, hosts, or leader")


def _led(where: str, entry: Mapping[str, Any]) -> list[_Place]:
    backups = entry.get("backups") or ()
    if not _is_list(backups):
        raise ConfigError(
            f"{where}: expected a list of backups such as {{worker: 3, role: standby}}, got {backups!r:.60}"
        )
    return [_place(where, entry["leader"], "leader"), *(_place(where, backup, "backup") for backup in backups)]


def _place(where: str, value: Any, what: str) -> _Place:
    """A worker: 3, a host's name, or {worker: 3, device: cuda:1}; a backup may have a role."""
    if isinstance(value, str) and what != "worker":
        return _Place(host=_valid(where, "host", value))
    if not isinstance(value, Mapping):
        return _Place(_valid(where, "worker", value))
    known = _BACKUP_KEYS if what == "backup" else _PLACE_KEYS
    if [key for key in value if key not in known] or not ("worker" in value or "host" in value):
        example = "{worker: 3, role: standby}" if what == "backup" else "{worker: 3, device: cuda:1}"
        raise ConfigError(f"{where}: expected a {what} such as {example}, got {dict(value)!r:.60}")
    role = value.get("role", "active")
    if role not in ("active", "standby"):
        raise ConfigError(f"{where}: a backup's role is active or standby, got {role!r:.60}")
    return _Place(_said(where, value, "worker"), _said(where, value, "host"), _said(where, value, "device"), role)


def _with_shared(where: str, entry: Mapping[str, Any], places: Sequence[_Place]) -> tuple[_Place, ...]:
    """The places, each with the host and device that the entry names for all, or its own one of `devices`."""
    if "device" in entry and "devices" in entry:
        raise ConfigError(f"{where}: expected either 'device' for all its workers, or 'devices', got both: keep one")
    host = _said(where, entry, "host")
    devices: list[str | None] = [_said(where, entry, "device")] * len(places)
    if "devices" in entry:
        devices = [_valid(where, "device", d) for d in _some(where, "devices", entry["devices"], "devices")]
        if len(devices) != len(places):
            raise ConfigError(
                f"{where}: expected {len(places)} devices, one per worker, got {len(devices)}: correct them"
            )
    return tuple(
        _Place(p.worker, p.host or host, p.device or device, p.role) for p, device in zip(places, devices, strict=True)
    )


def _some(where: str, key: str, value: Any, what: str) -> Any:
    if not _is_list(value) or not value:
        one = {"workers": "worker", "hosts": "host"}.get(key, "one")
        raise ConfigError(f"{where}: expected {what}, got {key} {value!r:.60}: name at least one {one}")
    return value


_VALID: dict[str, tuple[Callable[[Any], bool], str]] = {
    "worker": (lambda value: _is_count(value), "a worker is a number from 0"),
    "host": (lambda value: isinstance(value, str) and value != "", "a host is a name such as localhost"),
    "device": (
        lambda value: isinstance(value, str) and re.fullmatch(_DEVICE, value) is not None,
        "a device is cpu, cuda or cuda:0 and so on",
    ),
}


def _said(where: str, entry: Mapping[str, Any], key: str) -> Any:
    """Value of a key of an entry; None if it is missing."""
    return _valid(where, key, entry[key]) if key in entry else None


def _valid(where: str, key: str, value: Any) -> Any:
    is_valid, words = _VALID[key]
    if not is_valid(value):
        raise ConfigError(f"{where}: {words}, got {value!r:.60}")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _units(where: str, value: Any) -> tuple[tuple[int, int], ...]:
    """[first, last], or one such pair per part where a stage has several."""
    pairs = [value] if _is_pair(value) else value
    if not _is_list(pairs) or not pairs or not all(_is_pair(p) for p in pairs):
        raise ConfigError(f"{where}: expected units as [first, last] (both count), got {value!r:.60}")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _is_pair(value: Any) -> bool:
    return _is_list(value) and len(value) == 2 and all(map(_is_count, value)) and bool(value[0] <= value[1])
