"""The config of a job: how layers of values become one config, its checks, and its other shapes.

The keys are in `config_keys`. Frozen, standard library only (the coordinator reads it without torch). Pure: files are
read elsewhere.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from everstep.base.cell_keys import MAX_RANKS
from everstep.base.config_fields import Kind, convert, free, shown, variable
from everstep.base.config_keys import MAX_STAGES, MAX_WORKERS, NO_MPI, ZeroConfig
from everstep.base.config_keys import Config as Config
from everstep.base.doors import check_private, is_loopback, parse_ports
from everstep.base.errors import ConfigError, nearest
from everstep.base.foreign_keys import known_elsewhere
from everstep.base.pipeline.schedule_table import KINDS, check_possible
from everstep.base.pool_wish import PoolWish, even_homes, make_wish, parse_cut
from everstep.base.stage_map import StageMap, devices_of, parse_map

# ---- the table

_MOST = dict.fromkeys(("stages", "chunks"), MAX_STAGES)
_MOST |= dict.fromkeys(("workers", "spares", "min_workers", "pool", "redundancy"), MAX_WORKERS)


@dataclass(frozen=True)
class _Leaf:
    path: tuple[str, ...]
    kind: Kind
    default: Any

    @property
    def name(self) -> str:
        return ".".join(self.path)


def _walk(group: type[Any], path: tuple[str, ...] = ()) -> Iterator[_Leaf]:
    hints = get_type_hints(group)
    for item in dataclasses.fields(group):
        here = (*path, item.name.rstrip("_"))  # a key may be called like a Python keyword
        if item.metadata:
            yield _Leaf(here, Kind.of(hints[item.name], **item.metadata), item.default)
        elif isinstance(item.default_factory, type) and dataclasses.is_dataclass(item.default_factory):
            yield from _walk(item.default_factory, here)


FREE = ("env", "task")
LENGTHS = ("steps", "epochs")
"""Groups whose keys are not ours to name."""

_LEAVES: dict[str, _Leaf] = {leaf.name: leaf for leaf in _walk(Config)}
_GROUPS: frozenset[str] = frozenset(
    ".".join(leaf.path[:depth]) for leaf in _LEAVES.values() for depth in range(1, len(leaf.path))
) | set(FREE)


def describe() -> list[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every key, in the order of the table; all are text."""
    rows = []
    for leaf in _LEAVES.values():
        default = "none" if leaf.default in (None, ()) else str(leaf.default)
        default = default.lower() if leaf.kind.base == "bool" else default
        rows.append((leaf.name, leaf.kind.type_name, default, leaf.kind.meaning))
    rows.append(("env.*", "text", "", "environment variables of the workers on every host, like env.NCCL_IB_DISABLE=1"))
    return [*rows, ("task.*", "anything", "", "options of the task itself")]


# ---- layers -> config


def load_config(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Config:
    """The config that these layers make over the defaults; later layers win.

    layers: (source, values) such as ("run.yaml", {...}); keys are dotted or nested, or both; numbers, booleans and
    none may come as text.

    Raises: ConfigError, one line, for an unknown key (naming the source and the nearest known key), a value of the
    wrong type or range, or values that contradict each other.
    """
    values = read_layers(layers)
    values.setdefault("cell.shards", values.get("cell.tp", 1))
    wanted = default_workers(values) if "workers" not in values else None
    config: Config = _build(Config, values if wanted is None else {**values, "workers": wanted}, ())
    check_together(config)
    return config


def read_layers(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Values of these layers by dotted key. Each is valid by itself; together they may contradict each other.

    Raises: ConfigError, one line, for an unknown key or a value of the wrong type or range.
    """
    values: dict[str, Any] = {}
    for source, layer in layers:
        for name, value in _flatten(source, layer):
            leaf = _LEAVES.get(name)
            if name == "transport" and value == "mpi":
                raise ConfigError(NO_MPI)
            if leaf is not None:
                values[name] = convert(source, name, leaf.kind, value, leaf.default)
            else:
                values[name] = variable(source, name, value) if name.startswith("env.") else free(value)
    _check_counts(values)
    return values


def _check_counts(values: Mapping[str, Any]) -> None:
    """Raises: ConfigError for numbers of processes that would fill the memory before anything else is looked at."""
    wanted = {"workers": default_workers(values)} if not values.keys() & {"workers", "map"} else {}
    counts = {**wanted, **values}
    for name, most in _MOST.items():
        value = counts.get(name)
        if value is not None and value > most:
            by = ", by the pools" if name in wanted else ""
            raise ConfigError(f"{name}: expected at most {most}, got {value:.16g}{by}: lower it")


def _is_free(name: str) -> bool:
    group, _, rest = name.partition(".")
    return group in FREE and bool(rest)


def check_keys(source: str, layer: Mapping[str, Any]) -> None:
    """Raises: ConfigError, one line, for an unknown key of the layer, with any value."""
    for _ in _flatten(source, layer):
        pass


def known_of(source: str, layer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a layer that another version may have written, by dotted key: (known values, the rest). The rest are
    unknown keys and keys whose value is not valid here."""
    known: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    for name, value in _flatten(source, layer, unknown=unknown):
        try:
            known.update(read_layers([(source, {name: value})]))
        except ConfigError:
            unknown[name] = value
    return known, unknown


def _flatten(
    source: str, layer: Any, prefix: str = "", unknown: dict[str, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Keys and values, in order. unknown: collects unknown keys, which otherwise are an error."""
    if not isinstance(layer, Mapping):
        raise ConfigError(f"{source}: expected keys with values, got {shown(layer)}: write e.g. lanes: 8")
    for part, value in layer.items():
        name = f"{prefix}{part}"
        if name in _GROUPS and isinstance(value, Mapping):
            yield from _flatten(source, value, f"{name}.", unknown)
        elif name in _LEAVES or _is_free(name):
            yield name, value
        elif unknown is not None:
            unknown[name] = value
        elif name in _GROUPS:
            raise ConfigError(
                f"{name}: expected keys below it, got {shown(value)} (from {source}): set e.g. {_below(name)}"
            )
        else:
            raise ConfigError(f"unknown key {name!r} (from {source}): {instead_of(name)}")


def _below(group: str) -> str:
    return next((name for name in _LEAVES if name.startswith(f"{group}.")), f"{group}.name")


def instead_of(name: str, others: Sequence[str] = ()) -> str:
    """Replacement for a key that does not exist, as a clause: what is known of another tool's key, or a known key that
    is near. A part of a dotted name counts, too, but in a group of ours nearness comes first. others: further words
    that are known."""
    elsewhere = known_elsewhere(name)
    if elsewhere is not None:
        return elsewhere
    parts = name.split(".")
    near = _near_keys(name, others)
    guess = f"did you mean {' or '.join(map(repr, near))}?" if near else None
    by_part = next(filter(None, map(known_elsewhere, reversed(parts))), None)
    answer = guess or by_part if parts[0] in _GROUPS else by_part or guess
    return answer or "`everstep config` lists all keys, and `everstep config --search WORD` those with a word"


def _near_keys(name: str, others: Sequence[str]) -> list[str]:
    """The key that is near, or the keys of which the last part is (`prefetch` for `loader.prefetch`). Where the name
    begins with a group of ours, these are of that group."""
    near = nearest(name, [*_LEAVES, *others])
    if near is not None:
        return [near]
    group, dot, _ = name.partition(".")
    within = f"{group}." if dot and group in _GROUPS else ""
    by_last: dict[str, list[str]] = {}
    for key in _LEAVES:
        if key.startswith(within):
            by_last.setdefault(key.rpartition(".")[2], []).append(key)
    last = nearest(name.rpartition(".")[2], by_last)
    return by_last[last] if last is not None else []


def _build(group: type[Any], values: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    made: dict[str, Any] = {}
    for item in dataclasses.fields(group):
        name = ".".join((*path, item.name.rstrip("_")))
        if item.metadata:
            if name in values:
                made[item.name] = values[name]
        elif name in FREE:
            made[name] = {n.partition(".")[2]: v for n, v in values.items() if n.startswith(f"{name}.")}
        else:
            made[item.name] = _build(item.default_factory, values, (*path, item.name))  # type: ignore[arg-type]
    return group(**made)


# ---- other shapes


def to_dict(config: Config) -> dict[str, Any]:
    """Nested, JSON-able; `load_config([(name, to_dict(config))])` gives an equal config."""
    return dataclasses.asdict(config, dict_factory=lambda items: {name.rstrip("_"): value for name, value in items})


def dotted(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat.update(dotted(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def pool_wish(config: Config) -> PoolWish:
    """The pools that the config asks for: who belongs to which stage, and how many of each pool are active."""
    wish = make_wish(config.workers, config.stages, config.redundancy, parse_map(config.map, config.stages))
    return replace(wish, copies=config.zero.copies if config.zero.stage else 0)


def device_of(config: Config, worker_id: int, cell_rank: int = 0) -> str:
    """Device of one rank of a worker. The head has the map's or the job's device; limbs have the next ones."""
    device = devices_of(parse_map(config.map, config.stages)).get(worker_id, config.device)
    kind, _, index = device.partition(":")
    return f"{kind}:{int(index) + cell_rank}" if cell_rank and index.isdecimal() else device


def parse_set(text: str) -> tuple[str, str]:
    """Key and (unconverted) value of `--set key=value`.

    Raises: ConfigError if it has no '='.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set: expected key=value, got {text!r}: write e.g. --set lanes=16")
    return name.strip(), value.strip()


def numerics(config: Config) -> dict[str, Any]:
    """Values, by dotted key, that decide the bits of the result; they must be equal to resume a job."""
    values = dotted(to_dict(config))
    found = {leaf.name: values[leaf.name] for leaf in _LEAVES.values() if leaf.kind.numerics}
    found["device"] = str(found["device"]).partition(":")[0]
    return {**found, **{f"task.{name}": value for name, value in sorted(config.task.items())}}


def inexact(config: Config) -> bool:
    """Whether workers and checkpoints with other kernels than the job's are warned about instead of refused."""
    return config.hosts.mixed or config.numerics.changed == "warn"


def with_batch_size(values: Mapping[str, Any], batch_size: int | str) -> dict[str, Any]:
    """These config values with `micro_batch` set so that a global batch has `batch_size` samples.

    values: one layer; only its `lanes` is read (the default if it has none).

    Raises: ConfigError naming the nearest sizes that can be divided by the lanes.
    """
    lanes_leaf, batch_kind = _LEAVES["lanes"], _LEAVES["micro_batch"].kind
    lanes = convert("config", "lanes", lanes_leaf.kind, values.get("lanes", lanes_leaf.default), lanes_leaf.default)
    size = convert("--batch-size", "batch size", batch_kind, batch_size, lanes * _LEAVES["micro_batch"].default)
    below = size // lanes * lanes
    if size != below:
        near = f"{below} or {below + lanes}" if below else f"{lanes}"
        raise ConfigError(
            f"--batch-size: expected a multiple of the {lanes} lanes, got {size}: use {near}, or change 'lanes'"
        )
    return {**values, "micro_batch": size // lanes}


# ---- values that are fine alone and contradict each other


def default_workers(values: Mapping[str, Any]) -> int | None:
    """Number of workers that the pools need if `workers` is not set; None: the config says nothing of pools. values: by
    dotted key.

    Raises: ConfigError for an invalid map.
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
    _check_cell(config)
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
    _check_zero(config)
    _check_network(config)
    _check_tls(config)
    if config.early_stop.target is not None and config.early_stop.metric is None:
        raise ConfigError("early_stop.target: expected early_stop.metric to be set too, got none: name the metric")
    if config.batch == "per_worker" and config.stages > 1:
        raise ConfigError(
            f"batch: expected constant for a model in {config.stages} stages, got per_worker, which follows the number "
            "of whole replicas: set batch=constant"
        )


def _check_address(name: str, address: str, *, everywhere: bool = False) -> None:
    refused, like = True, "127.0.0.1"
    with suppress(ValueError):
        found = ipaddress.ip_address(address)
        refused = (found.is_unspecified and not everywhere) or found.is_multicast or str(found) == "255.255.255.255"
        if isinstance(found, ipaddress.IPv6Address):
            refused |= found.is_link_local or found.ipv4_mapped is not None or str(found) != address
            like = "::1" if found.ipv4_mapped is None and str(found) == address else str(found.ipv4_mapped or found)
    if refused:
        raise ConfigError(
            f"{name}: expected one IPv4 address of this host that other processes can use, or such an IPv6 address, "
            f"got {address!r}: give e.g. {name}={like}"
        )


def _check_network(config: Config) -> None:
    network = config.network
    _check_address("network.address", network.address)
    check_private("network.address", network.address, trusted=network.trusted)
    if network.listen is not None:
        _check_address("network.listen", network.listen, everywhere=True)
        check_private("network.listen", network.listen, trusted=network.trusted)
        if (":" in network.listen) != (":" in network.address):
            raise ConfigError(
                f"network.listen: expected an address of the same kind as network.address, {network.address}, got "
                f"{network.listen}: give two IPv4 or two IPv6 addresses"
            )
    if config.hosts.min > 1 and is_loopback(network.address):
        raise ConfigError(
            f"network.address: expected an address that {config.hosts.min} hosts (hosts.min) can reach, got "
            f"{network.address} (loopback): give --listen ADDR:PORT with one of 'ip addr'"
        )
    if parse_ports(network.ports) is not None and config.transport == "nccl":
        raise ConfigError(
            f"network.ports: expected transport auto, shm or sockets, got {config.transport}, which listens on any "
            "port: drop network.ports, or set transport=auto"
        )


def _check_tls(config: Config) -> None:
    tls = config.security.tls
    given = {f"security.tls.{name}": getattr(tls, name) for name in ("cert", "key", "ca")}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ConfigError(
            f"{missing[0]}: expected security.tls.cert, .key and .ca together, or none of them, got no file for this "
            "one: name the file, or drop the others"
        )


def _check_pools(config: Config, stage_maps: Sequence[StageMap]) -> None:
    named = [i for entry in stage_maps for i in entry.workers]
    if config.pool is not None and config.redundancy is not None:
        raise ConfigError(
            f"pool: expected pool or redundancy, got both ({config.pool} and {config.redundancy}): drop one; "
            "redundancy R is pool R+1 with standby backups"
        )
    for name, value in (("pool", config.pool), ("redundancy", config.redundancy)):
        if named and value is not None:
            raise ConfigError(
                f"{name}: expected none with a map that names workers, got {value}: drop {name} or the map"
            )
    if named:
        if sorted(named) != list(range(config.workers)):
            raise ConfigError(
                f"map: expected the workers 0 to {config.workers - 1}, each once, got {sorted(named)}: "
                "correct the map or 'workers'"
            )
        return
    per_stage = config.pool if config.pool is not None else (config.redundancy or 0) + 1
    if (config.pool is not None or config.redundancy is not None) and config.workers != config.stages * per_stage:
        said = f"pool {config.pool}" if config.pool is not None else f"redundancy {config.redundancy}"
        raise ConfigError(
            f"workers: expected {config.stages * per_stage} ({config.stages} stage{'s' * (config.stages > 1)} x "
            f"{per_stage}, for {said}), got {config.workers}: drop 'workers', or change the pools"
        )


def _check_zero(config: Config) -> None:
    """Only the optimizer's state and gradients can be divided, and only in memory that pages can be given back of."""
    if config.zero.stage > 2:
        raise ConfigError(
            f"zero.stage: expected 0, 1 or 2, got {config.zero.stage}: the optimizer's state (1) and the gradients (2) "
            "are divided among workers; parameters are divided among the processes of each worker: set cell.fsdp=N"
        )
    if config.zero.stage and config.device != "cpu":
        raise ConfigError(
            f"zero.stage: expected 0 with device {config.device}, got {config.zero.stage}: what others hold is given "
            "back in the memory of CPUs alone; set zero.stage=0, or device=cpu"
        )
    if config.zero.stage and config.zero.offload_params:
        raise ConfigError(
            f"zero.offload_params: expected false with zero.stage={config.zero.stage}, got true: the gradients of "
            "parameters in files are not divided; set zero.offload_params=false, or zero.stage=0"
        )
    if config.zero.offload_params and config.zero.offload is None:
        raise ConfigError(
            "zero.offload_params: expected false with zero.offload=none, got true: name the folder for the parameters "
            "as zero.offload"
        )
    if config.zero.offload_params and config.device != "cpu":
        raise ConfigError(
            f"zero.offload_params: expected false with device {config.device}, got true: parameters are computed with "
            "where they lie, and a device does not read files; set zero.offload_params=false, or device=cpu"
        )


def _check_cell(config: Config) -> None:
    """A worker of several processes is on one host's CPUs, and shares one state there."""
    _check_precision(config)
    _check_shards(config)
    _check_hosts_of_cell(config)
    name, n = config.cell.key, config.cell.ranks
    if n == 1:
        return
    unlooped = KINDS[config.schedule].unlooped
    for other, expected, got, why in (
        ("device", "cpu", config.device, "its processes share parameters in the memory of the host"),
        ("chunks", "1", config.chunks, "its processes add up a stage's gradients in one backward pass"),
        ("zero.offload", "none", config.zero.offload or "none", "its processes share the optimizer's state in memory"),
        ("batch", "constant", config.batch, "which lanes a process computes must not change what they are"),
    ):
        if str(got) != expected:
            also = f" and schedule={unlooped}" if other == "chunks" and unlooped else ""
            raise ConfigError(
                f"{name}: expected 1 with {other}={got}, got {n}: {why}; set {other}={expected}{also}, or {name}=1"
            )
    if config.cell.fsdp > config.lanes:
        raise ConfigError(
            f"cell.fsdp: expected at most {config.lanes} for {config.lanes} lanes, got {config.cell.fsdp}: use fewer "
            f"processes, or raise 'lanes' to {config.cell.fsdp}"
        )
    if config.cell.ranks > MAX_RANKS:
        raise ConfigError(
            f"cell.tp: expected at most {MAX_RANKS} processes in a worker, got {n} (cell.fsdp={config.cell.fsdp} "
            f"x cell.tp={config.cell.tp}): lower either"
        )


def _check_precision(config: Config) -> None:
    """What autocast makes of values and what the copies are must be one type."""
    own, types = config.cell.precision, config.cell.types
    if own is not None and config.precision not in ("fp32", types.parameters):
        raise ConfigError(
            f"cell.precision: expected parameters={config.precision} with precision={config.precision}, got {own}: set "
            "precision=fp32, which leaves it to cell.precision, or cell.precision=none"
        )


def _check_hosts_of_cell(config: Config) -> None:
    """Each host has as many processes as any other, and what computes a lane together is on one."""
    cell = config.cell
    if cell.fsdp % cell.hosts:
        raise ConfigError(
            f"cell.hosts: expected a divisor of cell.fsdp={cell.fsdp}, got {cell.hosts}: each host has as many of a "
            f"worker's processes as any other; set cell.fsdp to a multiple of {cell.hosts}"
        )
    if cell.hosts > 1 and config.zero.stage:
        raise ConfigError(
            f"cell.hosts: expected 1 with zero.stage={config.zero.stage}, got {cell.hosts}: each host of a worker has "
            "its own part of the optimizer's state already; set zero.stage=0, or cell.hosts=1"
        )


def _check_shards(config: Config) -> None:
    """Each rank of those that compute a lane has as many shards as any other."""
    cell = config.cell
    if cell.shards % cell.tp:
        raise ConfigError(
            f"cell.shards: expected a multiple of cell.tp={cell.tp}, got {cell.shards}: a process computes as many "
            f"shards as any other; set cell.tp to a divisor of {cell.shards}"
        )
    if cell.sp and cell.shards == 1:
        raise ConfigError("cell.sp: expected cell.shards or cell.tp above 1, got 1 shard: set either, or cell.sp=false")


def zero_notes(config: Config) -> list[str]:
    """A sentence for each key of `zero.*` that is set and changes or saves nothing here."""
    zero, found = config.zero, []
    if zero.offload == "cpu" and config.device == "cpu":
        keys = "zero.offload=cpu" + " with zero.offload_params" * zero.offload_params
        found.append(f"{keys} changes nothing where the device is the CPU; name a folder to use a disk")
    if not zero.stage and zero.copies != ZeroConfig.copies:
        found.append(
            f"zero.copies={zero.copies} changes nothing here: with zero.stage=0 each worker has all of the optimizer's "
            "state"
        )
    least = min(map(len, pool_wish(config).homes))
    if zero.stage and least <= zero.copies:
        found.append(
            f"zero.stage={zero.stage} saves no memory where a stage has no more workers ({least}) than zero.copies "
            f"({zero.copies}): each of them has all of the optimizer's state"
        )
    return found


def _check_devices(config: Config, stage_maps: Sequence[StageMap]) -> None:
    """All devices are of one kind: other kinds compute other bits."""
    kind = config.device.partition(":")[0]
    for worker_id, device in devices_of(stage_maps).items():
        if device.partition(":")[0] != kind:
            raise ConfigError(
                f"map: expected devices of one kind, as others compute other bits, got {device} for worker {worker_id} "
                f"and device {config.device}: set device={device.partition(':')[0]}, or correct the map"
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
        raise ConfigError(f"cut: expected auto with a map that names units, got {config.cut!r}: drop cut or the units")
    if rule == "measured" and config.meta_init and config.stages > 1:
        raise ConfigError(
            "cut: expected counted or sizes with meta_init, got measured, which needs the whole model in one process: "
            "set cut=counted, or give the sizes"
        )
