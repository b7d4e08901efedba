"""Config values that are fine alone and contradict each other. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.base.config_keys import Config
from everstep.base.errors import ConfigError
from everstep.base.pipeline.table import check_possible
from everstep.base.pool_wish import even_homes, parse_cut
from everstep.base.stage_map import StageMap, devices_of, parse_map


def default_workers(values: Mapping[str, Any]) -> int | None:
    """How many workers the pools need, where nobody says; None: nothing is known about pools. values: by dotted key.

    Raises: ConfigError for a map that is none.
    """
    stages = values.get("stages", 1)
    named = [i for entry in parse_map(values.get("map"), stages) for i in entry.workers]
    if named:
        return len(named)
    if values.get("pool") is not None:
        return int(stages * values["pool"])
    if values.get("redundancy") is not None:
        return int(stages * (values["redundancy"] + 1))
    return int(stages) if stages > 1 else None


def check_together(config: Config) -> None:
    """Raises: ConfigError if values that are fine alone contradict each other."""
    stage_maps = parse_map(config.map, config.stages)
    _check_pools(config, stage_maps)
    _check_devices(config, stage_maps)
    _check_lanes(config, stage_maps)
    if config.stages > 1:
        check_possible(config.schedule, config.stages, config.lanes, config.chunks)
    _check_cut(config, stage_maps)
    if config.min_workers > config.workers:
        raise ConfigError(
            f"min_workers: expected at most workers ({config.workers}), got {config.min_workers}: "
            "lower it or raise 'workers'"
        )
    for low, high, least, most_s in (
        ("heartbeat.floor_s", "heartbeat.ceiling_s", config.heartbeat.floor_s, config.heartbeat.ceiling_s),
        ("backoff.initial_s", "backoff.max_s", config.backoff.initial_s, config.backoff.max_s),
    ):
        if least > most_s:
            raise ConfigError(f"{low}: expected at most {high} ({most_s:g}), got {least:g}: lower it or raise {high!r}")
    _check_address(config.network.address)
    if config.early_stop.target is not None and config.early_stop.metric is None:
        raise ConfigError("early_stop.target: expected early_stop.metric to be set too, got none: name the metric")
    if config.batch == "per_worker" and config.stages > 1:
        raise ConfigError(
            f"batch: expected constant for a model in {config.stages} stages, got per_worker: the batch follows the "
            "number of whole replicas, of which a split model has no count; set batch=constant"
        )


def _check_address(address: str) -> None:
    try:
        found = ipaddress.IPv4Address(address)
    except ValueError:
        found = None
    if found is None or found.is_unspecified or found.is_multicast or int(found) == 2**32 - 1:
        raise ConfigError(
            f"network.address: expected one IPv4 address of this host, which others are told too, got {address!r}: "
            "give e.g. network.address=127.0.0.1"
        )


def _check_pools(config: Config, stage_maps: Sequence[StageMap]) -> None:
    named = [i for entry in stage_maps for i in entry.workers]
    if config.pool is not None and config.redundancy is not None:
        raise ConfigError(
            f"pool: expected one of pool and redundancy, got {config.pool} and {config.redundancy}: redundancy R is "
            "pool R+1 with standby backups; drop one"
        )
    for name, value in (("pool", config.pool), ("redundancy", config.redundancy)):
        if named and value is not None:
            raise ConfigError(f"{name}: expected none beside a map that names workers, got {value}: drop one of them")
    if named:
        if sorted(named) != list(range(config.workers)):
            raise ConfigError(
                f"map: expected it to name the workers 0 to {config.workers - 1}, each once, got {sorted(named)}: "
                "mend the map or 'workers'"
            )
        return
    per_stage = config.pool if config.pool is not None else (config.redundancy or 0) + 1
    if (config.pool is not None or config.redundancy is not None) and config.workers != config.stages * per_stage:
        said = f"pool {config.pool}" if config.pool is not None else f"redundancy {config.redundancy}"
        raise ConfigError(
            f"workers: expected {config.stages * per_stage} ({config.stages} stage{'s' * (config.stages > 1)} x "
            f"{per_stage}, for {said}), got {config.workers}: drop 'workers', or change the pools"
        )


def _check_devices(config: Config, stage_maps: Sequence[StageMap]) -> None:
    """One kind of device for all: others compute other bits."""
    kind = config.device.partition(":")[0]
    for worker_id, device in devices_of(stage_maps).items():
        if device.partition(":")[0] != kind:
            raise ConfigError(
                f"map: worker {worker_id} has device {device}, but the job's is {config.device}: all compute on one "
                f"kind of device, or their bits differ; set device={device.partition(':')[0]}, or mend the map"
            )


def _check_lanes(config: Config, stage_maps: Sequence[StageMap]) -> None:
    """No more active workers in a pool than lanes."""
    if config.redundancy is not None:
        return
    if stage_maps and stage_maps[0].workers:
        sizes = [len(entry.workers) - len(entry.standby) for entry in stage_maps]
    else:
        sizes = [len(pool) for pool in even_homes(config.workers, config.stages)]
    if max(sizes) <= config.lanes:
        return
    if config.stages == 1:
        raise ConfigError(
            f"workers: expected at most {config.lanes} for {config.lanes} lanes, got {config.workers}: "
            f"use fewer workers, or raise 'lanes' to {config.workers}"
        )
    raise ConfigError(
        f"workers: expected at most {config.lanes} active ones per stage for {config.lanes} lanes, got {max(sizes)} in "
        f"stage {sizes.index(max(sizes))}: use fewer workers, or raise 'lanes' to {max(sizes)}"
    )


def _check_cut(config: Config, stage_maps: Sequence[StageMap]) -> None:
    rule = parse_cut(config.cut, config.stages * config.chunks)
    if rule != "auto" and stage_maps and stage_maps[0].units:
        raise ConfigError(f"cut: expected auto beside a map that names units, got {config.cut!r}: drop one of them")
    if rule == "measured" and config.meta_init and config.stages > 1:
        raise ConfigError(
            "cut: measured needs the whole model in one process, which meta_init never builds: use cut=counted, or "
            "give the sizes"
        )
