"""Every key of the config: its type, default and meaning, as frozen data. Pure.

Apart from `config`, which makes them of layers of values, because checks of several values need the keys alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from everstep.base.config_fields import key
from everstep.base.pipeline.table import KINDS

BUCKETS = ("s3", "gs")
"""Schemes of object stores' URLs."""
TRANSPORTS = ("shm", "gloo", "nccl")
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
        "where; none: off. Keys come from the environment alone: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; "
        "GOOGLE_APPLICATION_CREDENTIALS",
        pattern=rf"({'|'.join(BUCKETS)})://[^@/?#]+(/[^?#]*)?|file:///.+",
        example="s3://bucket/prefix",
        none=True,
    )
    endpoint: str | None = key(
        None,
        "str",
        "address of another server than the usual; none: AWS_ENDPOINT_URL, GOOGLE_BASE_URL",
        pattern=r"https?://[^@/?#]+/?",
        example="https://host:9000",
        none=True,
    )
    region: str | None = key(None, "str", "region of an s3:// bucket; none: AWS_REGION", none=True)


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
class NetworkConfig:
    """Where the processes of a job find each other."""

    address: str = key(
        "127.0.0.1",
        "str",
        "IPv4 address of this host that coordinator and workers listen at, and tell each other",
        pattern=r"\d{1,3}(\.\d{1,3}){3}",
        example="127.0.0.1",
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
    rehearse: bool = key(
        True,
        "bool",
        "of scripts: before the first step, do some in a process that begins anew, to find what join does not carry",
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
    network: NetworkConfig = field(default_factory=NetworkConfig)
    transport: str = key("auto", "str", "how workers exchange gradients", choices=("auto", *TRANSPORTS))

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
    schedule: str = key("1f1b", "str", "order of forward and backward passes in a pipeline", choices=tuple(KINDS))
    chunks: int = key(1, "int", "parts of the model per stage, for schedules that take several", low=1)
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
