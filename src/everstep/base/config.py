"""The config of a job: every key, its type, default and meaning in one table, and how layers of values become one.

Frozen, standard library only (the coordinator reads it without torch). Pure: files are read elsewhere.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from everstep.base.config_checks import check_together, default_workers
from everstep.base.config_fields import Kind, convert, free, key, shown
from everstep.base.errors import ConfigError
from everstep.base.pool_wish import PoolWish, make_wish
from everstep.base.stage_map import devices_of, parse_map

SINKS = ("tensorboard", "wandb", "mlflow", "otel")


@dataclass(frozen=True)
class HeartbeatConfig:
    """How the coordinator notices silence."""

    interval_s: float | Literal["auto"] = key(
        "auto",
        "float",
        "time between heartbeats; auto: 10 x the median round trip, 0.2 to 5",
        low=0,
        above=True,
        auto=True,
    )
    floor_s: float = key(2.0, "float", "nobody is taken for dead after a shorter silence", low=0, above=True)
    ceiling_s: float = key(20.0, "float", "everybody is after a longer one", low=0, above=True)


@dataclass(frozen=True)
class LoaderConfig:
    """How samples are read."""

    workers: int = key(0, "int", "loader threads or processes per worker; 0: read in the training loop", low=0)
    prefetch: int = key(2, "int", "steps to read ahead", low=0)
    pin_memory: bool = key(False, "bool", "page-locked batches for faster copies to a GPU")


@dataclass(frozen=True)
class EarlyStopConfig:
    """When to stop before the last step."""

    metric: str | None = key(None, "str", "evaluated metric to watch; none: never stop early", none=True)
    mode: str = key("max", "str", "whether more or less of it is better", choices=("max", "min"))
    patience: int = key(3, "int", "evaluations without improvement before stopping", low=1)
    min_delta: float = key(0.0, "float", "least change that counts as an improvement", low=0)
    target: float | None = key(None, "float", "stop as soon as the metric reaches it", none=True)


@dataclass(frozen=True)
class BackoffConfig:
    """How long to wait before a dead worker is restarted."""

    initial_s: float = key(0.5, "float", "before the first restart; doubles with each, with jitter", low=0)
    max_s: float = key(30.0, "float", "at most", low=0)


@dataclass(frozen=True)
class TierConfig:
    """When one checkpoint tier takes a checkpoint, and which it keeps."""

    every_steps: int | None = key(None, "int", "take one every so many steps", low=1, none=True)
    every_minutes: float | None = key(None, "float", "take one every so many minutes", low=0, above=True, none=True)
    keep_last: int = key(2, "int", "keep the newest ones", low=1)
    keep_every: int | None = key(None, "int", "keep those of every so many steps for ever", low=1, none=True)
    keep_best: int = key(0, "int", "keep the best ones by best_metric", low=0)


@dataclass(frozen=True)
class MemoryTierConfig(TierConfig):
    """Snapshots in the workers' memory."""

    keep_last: int = key(1, "int", "keep the newest ones that are complete in all stages", low=1)
    limit_mb: int = key(4096, "int", "memory for snapshots per worker", low=1)


@dataclass(frozen=True)
class DiskTierConfig(TierConfig):
    """Checkpoints in a directory."""

    full_every: int = key(10, "int", "every so many checkpoints all is written anew, not only what changed", low=1)
    path: str | None = key(None, "str", "directory; none: 'checkpoints' in the run directory", none=True)


@dataclass(frozen=True)
class ObjectTierConfig(TierConfig):
    """Checkpoints in an object store."""

    url: str | None = key(
        None,
        "str",
        "where; none: off. Keys come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY alone",
        pattern=r"s3://[^@/?#]+(/[^?#]*)?|file:///.+",
        example="s3://bucket/prefix",
        none=True,
    )
    endpoint: str | None = key(
        None,
        "str",
        "address of an S3-compatible server; none: AWS_ENDPOINT_URL",
        pattern=r"https?://[^@/?#]+/?",
        example="https://host:9000",
        none=True,
    )
    region: str | None = key(None, "str", "region of the bucket; none: AWS_REGION", none=True)


@dataclass(frozen=True)
class CheckpointConfig:
    """Snapshots beyond what the workers hold."""

    enabled: bool = key(True, "bool", "take checkpoints at all")
    memory: MemoryTierConfig = field(default_factory=MemoryTierConfig)
    disk: DiskTierConfig = field(default_factory=DiskTierConfig)
    object: ObjectTierConfig = field(default_factory=ObjectTierConfig)
    interval: float | Literal["auto"] = key(
        "auto",
        "float",
        "seconds between checkpoints; auto: from their cost and the rate of faults",
        low=0,
        above=True,
        auto=True,
    )
    mtbf_minutes: float | None = key(
        None, "float", "time between failures, for interval: auto; none: as observed", low=0, above=True, none=True
    )
    best_metric: str | None = key(None, "str", "evaluated metric by which checkpoints are compared", none=True)
    best_mode: str = key("max", "str", "whether more or less of it is better", choices=("max", "min"))
    grace_s: float = key(30.0, "float", "time for an emergency checkpoint after SIGTERM or SIGINT", low=0)
    allow_mismatch: bool = key(False, "bool", "load checkpoints of another model or config as far as they fit")


@dataclass(frozen=True)
class MetricsConfig:
    """What is measured while the job runs."""

    interval_s: float = key(1.0, "float", "between samples of what the workers spend; 0: none are taken", low=0)
    listen: str | None = key(
        None,
        "str",
        "address at which Prometheus finds them while the job runs, port 0: any; none: they are not served",
        pattern=r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5}",
        example="127.0.0.1:9400",
        none=True,
    )


@dataclass(frozen=True)
class LogsConfig:
    """How much room the workers' logs may take."""

    max_mb: float = key(64.0, "float", "size of a worker's log, in MiB, from which on it is rotated", low=0, above=True)
    keep: int = key(3, "int", "older files of each worker's log that are kept", low=0)


@dataclass(frozen=True)
class Config:
    """A job's effective config. Attributes are the keys; those of a group follow a dot (`loader.workers`)."""

    lanes: int = key(8, "int", "parts of the global batch: the finest that workers can share", low=1, numerics=True)
    micro_batch: int = key(8, "int", "samples per lane; --batch-size / lanes", low=1, numerics=True)
    steps: int | None = key(None, "int", "last step; if epochs is given too, the earlier end counts", low=1, none=True)
    epochs: int | None = key(None, "int", "passes over the data", low=1, none=True)
    seed: int = key(
        0,
        "int",
        "of the initial weights, the sample order and all random numbers",
        low=0,
        high=2**63 - 1,
        numerics=True,
    )
    threads: int = key(1, "int", "intra-op threads per worker", low=1, numerics=True)
    device: str = key(
        "cpu", "str", "where tensors live", pattern=r"cpu|cuda(:\d+)?", example="cpu, cuda or cuda:0", numerics=True
    )
    precision: str = key(
        "fp32", "str", "arithmetic of forward and backward passes", choices=("fp32", "bf16", "fp16"), numerics=True
    )
    clip_norm: float | None = key(
        None, "float", "largest global norm of the gradient", low=0, above=True, none=True, numerics=True
    )
    verify_every: int = key(100, "int", "steps between comparisons of the workers' digests; 0: never", low=0)

    workers: int = key(1, "int", "worker processes in all", low=1)
    spares: int = key(0, "int", "idle processes that stand in at once", low=0)
    min_workers: int = key(1, "int", "with fewer, wait", low=1)
    on_failure: str = key(
        "replace",
        "str",
        "shrink: go on with fewer; replace: the same, and replace as soon as possible; wait: for the replacement",
        choices=("shrink", "replace", "wait"),
    )
    max_restarts: int = key(20, "int", "restarts of one worker in an hour before it is given up", low=0)
    quorum_wait_s: float = key(600.0, "float", "how long to wait for too few workers to become enough", low=0)
    hang_limit_s: float | Literal["auto"] = key(
        "auto",
        "float",
        "how long a worker may stand still; auto: 10 x the slowest of the last 100 steps, at least 10",
        low=0,
        above=True,
        auto=True,
    )
    heartbeat: HeartbeatConfig = field(default_factory=HeartbeatConfig)
    backoff: BackoffConfig = field(default_factory=BackoffConfig)
    transport: str = key("auto", "str", "how workers exchange gradients", choices=("auto", "shm", "gloo", "nccl"))

    eval_every: int = key(0, "int", "steps between evaluations; 0: never", low=0)
    log_every: int = key(1, "int", "steps between progress lines; 0: none", low=0)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    sinks: tuple[str, ...] = key(
        (), "list", "where else the job is told to, while it runs", choices=SINKS, example="[tensorboard]"
    )
    logs: LogsConfig = field(default_factory=LogsConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    batch: str = key(
        "constant",
        "str",
        "constant: the global batch stays; per_worker: it follows the number of workers (not exact)",
        choices=("constant", "per_worker"),
        numerics=True,
    )
    lr_rule: str = key(
        "none",
        "str",
        "how the learning rate follows the batch, with batch: per_worker",
        choices=("none", "linear", "sqrt"),
        numerics=True,
    )
    lr_warmup_steps: int = key(100, "int", "steps over which a changed learning rate is reached", low=0, numerics=True)

    stages: int = key(1, "int", "parts the model is split into", low=1)
    pool: int | None = key(
        None, "int", "workers per stage, all active; makes workers = stages x pool", low=1, none=True
    )
    redundancy: int | None = key(
        None, "int", "standby backups per stage; makes workers = stages x (1 + redundancy)", low=0, none=True
    )
    map: Any = key(  # noqa: RUF009
        None,
        "any",
        "which units, workers, hosts and devices each stage has, and who leads; none: evenly, in order",
        none=True,
    )
    cut: Any = key(  # noqa: RUF009
        "auto",
        "any",
        "where the model is cut. auto: as map or Task.cuts say, else counted; counted, measured: balanced by units' "
        "parameters, or by their time for one lane, taken once before the start; or the units per part: [4, 4, 2]",
    )
    schedule: str = key(
        "1f1b", "str", "order of forward and backward passes in a pipeline", choices=("gpipe", "1f1b", "interleaved")
    )
    chunks: int = key(1, "int", "parts of the model per stage, in the interleaved schedule", low=1)
    recompute: bool = key(False, "bool", "compute activations again instead of keeping them")
    meta_init: bool = key(
        False,
        "bool",
        "initialise each module by itself, from a generator of its own, so that no worker builds the whole model",
        numerics=True,
    )
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume_from: str | None = key(None, "str", "checkpoint (path or URL) to begin with; none: the job's own", none=True)

    chaos: str = key("", "str", "faults to inject, as for --chaos")
    emulate_compute_ms: float = key(
        0.0,
        "float",
        "with stages: only wait so long for each forward pass of a lane through a stage, twice for backward; nothing "
        "is learnt, but schedules and placements can be timed without the hardware",
        low=0,
    )
    task: Mapping[str, Any] = field(default_factory=dict)
    """The task's own options, `task.NAME`: anything."""


# ---- the table


@dataclass(frozen=True)
class _Leaf:
    path: tuple[str, ...]
    kind: Kind
    default: Any

    @property
    def name(self) -> str:
        return ".".join(self.path)


def _walk(group: type[Any], path: tuple[str, ...] = ()) -> Iterator[_Leaf]:
    for item in dataclasses.fields(group):
        here = (*path, item.name)
        if "kind" in item.metadata:
            yield _Leaf(here, item.metadata["kind"], item.default)
        elif isinstance(item.default_factory, type) and dataclasses.is_dataclass(item.default_factory):
            yield from _walk(item.default_factory, here)


_LEAVES: dict[str, _Leaf] = {leaf.name: leaf for leaf in _walk(Config)}
_GROUPS: frozenset[str] = frozenset(
    ".".join(leaf.path[:depth]) for leaf in _LEAVES.values() for depth in range(1, len(leaf.path))
) | {"task"}


def describe() -> list[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every key, in the order of the table; all are text."""
    rows = []
    for leaf in _LEAVES.values():
        default = "none" if leaf.default in (None, ()) else str(leaf.default)
        rows.append(
            (
                leaf.name,
                leaf.kind.type_name,
                default.lower() if leaf.kind.base == "bool" else default,
                leaf.kind.meaning,
            )
        )
    return [*rows, ("task.*", "anything", "", "options of the task itself")]


# ---- layers -> config


def load_config(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Config:
    """The config that these layers make, over the defaults; later ones win.

    layers: (source, values) such as ("run.yaml", {...}); keys are dotted or nested, or both; numbers, booleans and
    none may come as text.

    Raises: ConfigError for an unknown key (naming the source and the nearest known one), a value of the wrong type or
    range, or values that contradict each other. One line.
    """
    values = read_layers(layers)
    wanted = default_workers(values) if "workers" not in values else None
    config: Config = _build(Config, values if wanted is None else {**values, "workers": wanted}, ())
    check_together(config)
    return config


def read_layers(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The values of these layers by dotted key, each right in itself; together with others they may still not be.

    Raises: ConfigError, one line, for an unknown key, and a value of the wrong type or range.
    """
    values: dict[str, Any] = {}
    for source, layer in layers:
        for name, value in _flatten(source, layer):
            leaf = _LEAVES.get(name)
            values[name] = free(value) if leaf is None else convert(source, name, leaf.kind, value, leaf.default)
    return values


def known_of(source: str, layer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a layer that another version may have written: the values of the keys that are known here, and the rest (keys
    that are unknown, or whose value is no longer one), both by dotted key."""
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
    """Keys and values, in order. unknown: takes what is not known, which otherwise is an error."""
    if not isinstance(layer, Mapping):
        raise ConfigError(f"{source}: expected keys with values, got {shown(layer)}: write e.g. lanes: 8")
    for part, value in layer.items():
        name = f"{prefix}{part}"
        if name in _GROUPS and isinstance(value, Mapping):
            yield from _flatten(source, value, f"{name}.", unknown)
        elif name in _LEAVES or (name.startswith("task.") and name != "task."):
            yield name, value
        elif unknown is not None:
            unknown[name] = value
        elif name in _GROUPS:
            raise ConfigError(
                f"{name}: expected keys below it, got {shown(value)} (from {source}): set e.g. {_below(name)}"
            )
        else:
            raise ConfigError(f"unknown key {name!r} (from {source}): did you mean {_nearest(name)!r}?")


def _below(group: str) -> str:
    return next((name for name in _LEAVES if name.startswith(f"{group}.")), f"{group}.name")


def _nearest(name: str) -> str:
    """The known key that looks most like it; the last part alone counts too (`prefetch` for `loader.prefetch`)."""

    def likeness(known: str) -> float:
        whole = difflib.SequenceMatcher(None, name, known).ratio()
        last = difflib.SequenceMatcher(None, name.rpartition(".")[2], known.rpartition(".")[2]).ratio()
        return max(whole, 0.99 * last)

    return max(_LEAVES, key=likeness)


def _build(group: type[Any], values: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    made: dict[str, Any] = {}
    for item in dataclasses.fields(group):
        name = ".".join((*path, item.name))
        if "kind" in item.metadata:
            if name in values:
                made[item.name] = values[name]
        elif name == "task":
            made["task"] = {n.removeprefix("task."): v for n, v in values.items() if n.startswith("task.")}
        else:
            made[item.name] = _build(item.default_factory, values, (*path, item.name))  # type: ignore[arg-type]
    return group(**made)


# ---- other shapes


def to_dict(config: Config) -> dict[str, Any]:
    """Nested, JSON-able; `load_config([(name, to_dict(config))])` gives an equal config."""
    return dataclasses.asdict(config)


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
    """Who is wanted in which stage, and how many of each pool are active."""
    return make_wish(config.workers, config.stages, config.redundancy, parse_map(config.map, config.stages))


def device_of(config: Config, worker_id: int) -> str:
    """The device of a worker: as the map says, else the job's."""
    return devices_of(parse_map(config.map, config.stages)).get(worker_id, config.device)


def parse_set(text: str) -> tuple[str, str]:
    """The key and the (unconverted) value of a `--set key=value`.

    Raises: ConfigError if it has no '='.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set: expected key=value, got {text!r}: write e.g. --set lanes=16")
    return name.strip(), value.strip()


def numerics(config: Config) -> dict[str, Any]:
    """The values, by dotted key, that the bits of the result depend on: they must be equal to resume a job."""
    found: dict[str, Any] = {}
    for leaf in _LEAVES.values():
        if leaf.kind.numerics:
            value: Any = config
            for part in leaf.path:
                value = getattr(value, part)
            found[leaf.name] = value
    found["device"] = str(found["device"]).partition(":")[0]
    return {**found, **{f"task.{name}": value for name, value in sorted(config.task.items())}}


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
