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
TRANSPORTS = ("shm", "sockets", "nccl")
NO_MPI = (
    "transport=mpi is not available: an MPI world can neither lose nor gain a process; use transport=auto, which also "
    "works under mpirun"
)
SINKS = ("tensorboard", "wandb", "mlflow", "otel")
NOTICES = "notify"
"""The sink behind `notify.*`, which is not named among the others."""
_NOTED = (
    *("job_started", "job_completed", "job_failed", "waiting", "worker_evicted", "worker_suspected", "worker_healed"),
    *("leader_changed", "coordinator_restarted", "recovery_completed", "fallback", "checkpoint_failed", "warning"),
    "coordinator_killed",
)


@dataclass(frozen=True)
class HeartbeatConfig:
    """How the coordinator notices silence."""

    interval_s: float | Literal["auto"] = key(
        "auto", "time between heartbeats; auto: 10 x the median round trip, 0.2 to 5", above=0
    )
    floor_s: float = key(2.0, "nobody is taken for dead after a shorter silence", above=0)
    ceiling_s: float = key(20.0, "everybody is after a longer one", above=0)
    reconnect_s: float = key(
        1.0, "a host is too, whose agent and workers have all lost their connections for so long", above=0
    )


@dataclass(frozen=True)
class LoaderConfig:
    """How samples are read."""

    workers: int = key(0, "loader threads or processes per worker; 0: read in the training loop", low=0)
    prefetch: int = key(2, "steps to read ahead", low=0)
    pin_memory: bool = key(False, "page-locked batches for faster copies to a GPU")


@dataclass(frozen=True)
class EarlyStopConfig:
    """When to stop before the last step."""

    metric: str | None = key(None, "evaluated metric to watch; none: never stop early")
    mode: str = key("max", "whether more or less of it is better", choices=("max", "min"))
    patience: int = key(3, "evaluations without improvement before stopping", low=1)
    min_delta: float = key(0.0, "least change that counts as an improvement", low=0)
    target: float | None = key(None, "stop as soon as the metric reaches it")


@dataclass(frozen=True)
class HostsConfig:
    """Several hosts in one job."""

    min: int = key(1, "hosts that have to be there before the job begins", low=1)
    wait_s: float = key(600.0, "how long it waits for them, and an agent for the job", low=0)
    return_: str = key(
        "rebalance",
        "whether workers move, without a stop, to a host that has come (back) for 30 s and has fewer than others",
        choices=("rebalance", "stay"),
    )
    mixed: bool = key(
        False, "admit hosts with other kernels: the bits then depend on where lanes are computed; sets numerics.changed"
    )


@dataclass(frozen=True)
class NumericsConfig:
    """What the bits of the result depend on, beside the config."""

    changed: str = key(
        "refuse",
        "what becomes of a worker or a checkpoint whose numerics fingerprint is not the job's",
        choices=("refuse", "warn"),
    )


@dataclass(frozen=True)
class BackoffConfig:
    """How long to wait before a dead worker is restarted."""

    initial_s: float = key(0.5, "before the first restart; doubles with each, with jitter", low=0)
    max_s: float = key(30.0, "at most", low=0)


@dataclass(frozen=True)
class TierConfig:
    """When one checkpoint tier takes a checkpoint, and which it keeps."""

    every_steps: int | None = key(None, "take one every so many steps", low=1)
    every_minutes: float | None = key(None, "take one every so many minutes", above=0)
    keep_last: int = key(2, "keep the newest ones", low=1)
    keep_every: int | None = key(None, "keep those of every so many steps for ever", low=1)
    keep_best: int = key(0, "keep the best ones by best_metric", low=0)


@dataclass(frozen=True)
class MemoryTierConfig(TierConfig):
    """Snapshots in the workers' memory."""

    keep_last: int = key(1, "keep the newest ones that are complete in all stages", low=1)
    limit_mb: int = key(4096, "memory for snapshots per worker", low=1)


@dataclass(frozen=True)
class DiskTierConfig(TierConfig):
    """Checkpoints in a directory."""

    full_every: int = key(10, "every so many checkpoints all is written anew, not only what changed", low=1)
    path: str | None = key(None, "directory; none: 'checkpoints' in the run directory")


@dataclass(frozen=True)
class ObjectTierConfig(TierConfig):
    """Checkpoints in an object store."""

    url: str | None = key(
        None,
        "where; none: off. Keys come from the environment alone: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; "
        "GOOGLE_APPLICATION_CREDENTIALS",
        pattern=rf"({'|'.join(BUCKETS)})://[^@/?#]+(/[^?#]*)?|file:///.+",
        example="s3://bucket/prefix",
    )
    endpoint: str | None = key(
        None,
        "address of another server than the usual; none: AWS_ENDPOINT_URL, GOOGLE_BASE_URL",
        pattern=r"https?://[^@/?#]+/?",
        example="https://host:9000",
    )
    region: str | None = key(None, "region of an s3:// bucket; none: AWS_REGION")


@dataclass(frozen=True)
class CheckpointConfig:
    """Snapshots beyond what the workers hold."""

    enabled: bool = key(True, "take checkpoints at all")
    memory: MemoryTierConfig = field(default_factory=MemoryTierConfig)
    disk: DiskTierConfig = field(default_factory=DiskTierConfig)
    object: ObjectTierConfig = field(default_factory=ObjectTierConfig)
    interval: float | Literal["auto"] = key(
        "auto", "seconds between checkpoints; auto: from their cost and the rate of faults", above=0
    )
    mtbf_minutes: float | None = key(None, "time between failures, for interval: auto; none: as observed", above=0)
    best_metric: str | None = key(None, "evaluated metric by which checkpoints are compared")
    best_mode: str = key("max", "whether more or less of it is better", choices=("max", "min"))
    shared: str = key(
        "auto",
        "whether all hosts see one checkpoint directory. auto: each host looks; yes: one that does not is refused; no: "
        "each keeps its parts on its own disk",
        choices=("auto", "yes", "no"),
    )
    copies: int = key(2, "on how many hosts each part lies, where they do not share a directory", low=1)
    grace_s: float = key(30.0, "time for an emergency checkpoint after SIGTERM or SIGINT", low=0)
    sign_key: str | None = key(
        None, "private ed25519 key, a PEM file, that each one is signed with; none: they are not (checkpoints keygen)"
    )
    allow_mismatch: bool = key(False, "load checkpoints of another model or config as far as they fit")


@dataclass(frozen=True)
class MetricsConfig:
    """What is measured while the job runs."""

    interval_s: float = key(1.0, "between samples of what the workers spend; 0: none are taken", low=0)
    listen: str | None = key(
        None,
        "address at which Prometheus finds them while the job runs, port 0: any; none: they are not served",
        pattern=r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5}",
        example="127.0.0.1:9400",
    )


@dataclass(frozen=True)
class NetworkConfig:
    """Where the processes of a job find each other."""

    address: str = key(
        "127.0.0.1",
        "IPv4 address of this host that coordinator and workers listen at, and tell each other",
        pattern=r"\d{1,3}(\.\d{1,3}){3}",
        example="127.0.0.1",
    )
    interface: str | None = key(
        None,
        "interface to use when network.address is unset; NCCL gets it, too. none: the one with the route to the head",
        pattern=r"[^/\s:]{1,15}",
        example="eth0",
    )
    listen: str | None = key(
        None,
        "where the coordinator listens, if not at network.address; 0.0.0.0: at all addresses of its host",
        pattern=r"\d{1,3}(\.\d{1,3}){3}",
        example="0.0.0.0",
    )
    ports: str | None = key(
        None,
        "range that workers listen in, for firewalls: two ports for each worker of a host; none: any port",
        pattern=r"\d{1,5}-\d{1,5}",
        example="29500-29599",
    )
    trusted: bool = key(False, "whether public addresses, and all of a host at once, may be listened at")


@dataclass(frozen=True)
class CoordinatorKeys:
    """How patient the job's process is with its coordinator."""

    silent_s: float = key(
        5.0,
        "a coordinator that has not answered this long is started again; time that it waits for a processor does not "
        "count, and the limit doubles with each kill",
        above=0,
    )


@dataclass(frozen=True)
class ControlConfig:
    """Where the coordinator's journal is, and who takes its place when its host is lost."""

    etcd: str | None = key(
        None,
        "members and prefix of the etcd that has the job's lease and journal, so that another host can take over; "
        "etcds:// is over TLS; none: the journal is in the run directory, and everstep takeover DIR is for a person to "
        "type",
        pattern=r"etcds?://[A-Za-z0-9.:,_\[\]-]+(/[A-Za-z0-9._-]{1,100}){1,10}/?",
        example="etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379/jobs/mine",
    )
    etcd_ca: str | None = key(
        None,
        "whose certificates are believed of etcd, a PEM file (else $EVERSTEP_ETCD_CA); none: those of the system's CAs",
    )
    etcd_cert: str | None = key(
        None, "certificate chain that is shown to etcd, a PEM file (else $EVERSTEP_ETCD_CERT); none: none is shown"
    )
    etcd_key: str | None = key(None, "its private key, a PEM file without a password (else $EVERSTEP_ETCD_KEY)")
    lease_s: int = key(
        2, "seconds after which a coordinator that prolongs its lease no more is replaced", low=1, high=60
    )


@dataclass(frozen=True)
class TlsConfig:
    """How what is said between processes is hidden from others, and what this host shows of itself."""

    mode: str = key(
        "auto",
        "auto: TLS wherever a connection leaves the host; on: on one host, too; off: nowhere",
        choices=("auto", "on", "off"),
    )
    cert: str | None = key(
        None,
        "this host's certificate chain, a PEM file, that names its address; none: one is made from the job's token",
    )
    ca: str | None = key(
        None, "whose certificates are believed, a PEM file; none: the job's own CA, made from its token"
    )
    key: str | None = key(None, "its private key, a PEM file without a password")


@dataclass(frozen=True)
class SecurityConfig:
    """Who may take part in a job."""

    token_file: str | None = key(None, "file with the job's token; none: $EVERSTEP_TOKEN, else a new one is made")
    tls: TlsConfig = field(default_factory=TlsConfig)


@dataclass(frozen=True)
class NotifyConfig:
    """Who is told when something happens."""

    events: tuple[str, ...] = key(
        ("job_completed", "job_failed", "waiting", "fallback", "checkpoint_failed"),
        "of which events",
        choices=_NOTED,
        example="[job_failed, waiting]",
    )
    command: str | None = key(
        None,
        "program and arguments, run for each of them: it finds the notice as JSON on its standard input, and in "
        "EVERSTEP_EVENT, EVERSTEP_TEXT and EVERSTEP_RUN",
    )
    webhook: str | None = key(
        None,
        "environment variable that holds the address to which each is posted as JSON; the address itself is a secret, "
        "and stands in no config",
        pattern=r"[A-Za-z_][A-Za-z0-9_]*",
        example="EVERSTEP_WEBHOOK",
        secret=True,
    )
    timeout_s: float = key(10.0, "how long a command or a server may take for one", above=0, high=600)


@dataclass(frozen=True)
class LogsConfig:
    """How much room the workers' logs may take."""

    max_mb: float = key(64.0, "size of a worker's log, in MiB, from which on it is rotated", above=0)
    keep: int = key(3, "older files of each worker's log that are kept", low=0)


@dataclass(frozen=True)
class Config:
    """A job's effective config. Attributes are the keys; those of a group follow a dot (`loader.workers`)."""

    lanes: int = key(8, "parts of the global batch: the finest that workers can share", low=1, numerics=True)
    micro_batch: int = key(8, "samples per lane; --batch-size / lanes", low=1, numerics=True)
    steps: int | None = key(None, "last step; if epochs is given too, the earlier end counts", low=1)
    epochs: int | None = key(None, "passes over the data", low=1)
    seed: int = key(
        0, "of the initial weights, the sample order and all random numbers", low=0, high=2**63 - 1, numerics=True
    )
    threads: int = key(1, "intra-op threads per worker", low=1, numerics=True)
    device: str = key(
        "cpu", "where tensors live", pattern=r"cpu|cuda(:\d+)?", example="cpu, cuda or cuda:0", numerics=True
    )
    precision: str = key(
        "fp32", "arithmetic of forward and backward passes", choices=("fp32", "bf16", "fp16"), numerics=True
    )
    clip_norm: float | None = key(None, "largest global norm of the gradient", above=0, numerics=True)
    rehearse: bool = key(
        True,
        "of scripts: do some steps twice before the first, to find what join does not carry",
    )
    verify_every: int = key(
        100, "steps between comparisons of states, beside those at checkpoints, heals and the end", low=0
    )

    spot_check: float = key(
        0.0,
        "share of the lanes that a second worker computes too, to see that it gets the same, beside those of workers "
        "that join and one every `verify_every` steps",
        low=0.0,
        high=1.0,
    )
    on_nonfinite: str = key(
        "warn",
        "what becomes of a step whose loss or gradient is not finite. warn: it is applied, and said; skip: its update "
        "is left out; stop: likewise, and the job ends with a checkpoint",
        choices=("warn", "stop", "skip"),
    )
    nonfinite_limit: int = key(
        10, "so many steps in a row that are not finite end the job, with exit code 1; 0: never", low=0
    )

    workers: int = key(1, "worker processes in all", low=1)
    spares: int = key(0, "idle processes that stand in at once", low=0)
    min_workers: int = key(1, "with fewer, wait", low=1)
    on_failure: str = key(
        "replace",
        "shrink: go on with fewer; replace: the same, and replace as soon as possible; wait: for the replacement",
        choices=("shrink", "replace", "wait"),
    )
    max_restarts: int = key(20, "restarts of one worker in an hour before it is given up", low=0)
    quorum_wait_s: float = key(600.0, "how long to wait for too few workers to become enough", low=0)
    hang_limit_s: float | Literal["auto"] = key(
        "auto", "how long a worker may stand still; auto: 10 x the slowest of the last 100 steps, at least 10", above=0
    )
    hang_first_s: float = key(
        600.0,
        "the same where it may compile (the first step of a life, an evaluation, a new shape under torch.compile), as "
        "long as the worker shows life; one that shows none for 60 s hangs",
        above=0,
    )
    heartbeat: HeartbeatConfig = field(default_factory=HeartbeatConfig)
    backoff: BackoffConfig = field(default_factory=BackoffConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    coordinator: CoordinatorKeys = field(default_factory=CoordinatorKeys)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    transport: str = key("auto", "how workers exchange gradients", choices=("auto", *TRANSPORTS))

    eval_every: int = key(0, "steps between evaluations; 0: never", low=0)
    log_every: int = key(1, "steps between progress lines; 0: none", low=0)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    sinks: tuple[str, ...] = key(
        (), "where else the job is told to, while it runs", choices=SINKS, example="[tensorboard]"
    )
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    logs: LogsConfig = field(default_factory=LogsConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    batch: str = key(
        "constant",
        "constant: the global batch stays; per_worker: it follows the number of workers (not exact)",
        choices=("constant", "per_worker"),
        numerics=True,
    )
    lr_rule: str = key(
        "none",
        "how the learning rate follows the batch, with batch: per_worker",
        choices=("none", "linear", "sqrt"),
        numerics=True,
    )
    lr_warmup_steps: int = key(100, "steps over which a changed learning rate is reached", low=0, numerics=True)

    stages: int = key(1, "parts the model is split into", low=1)
    pool: int | None = key(None, "workers per stage, all active; makes workers = stages x pool", low=1)
    redundancy: int | None = key(None, "standby backups per stage; makes workers = stages x (1 + redundancy)", low=0)
    map: Any = key(  # noqa: RUF009
        None, "which units, workers, hosts and devices each stage has, and who leads; none: evenly, in order", none=True
    )
    cut: Any = key(  # noqa: RUF009
        "auto",
        "where the model is cut. auto: as map or Task.cuts say, else counted; counted, measured: balanced by units' "
        "parameters, or by their time for one lane, taken once before the start; or the units per part: [4, 4, 2]",
    )
    schedule: str = key("1f1b", "order of forward and backward passes in a pipeline", choices=tuple(KINDS))
    chunks: int = key(1, "parts of the model per stage, for schedules that take several", low=1)
    recompute: bool = key(False, "compute activations again instead of keeping them")
    meta_init: bool = key(
        False,
        "initialise each module by itself, from a generator of its own, so that no worker builds the whole model",
        numerics=True,
    )
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume_from: str | None = key(None, "checkpoint (path or URL) to begin with; none: the job's own")

    chaos: str = key("", "faults to inject, as for --chaos")
    emulate_compute_ms: float = key(
        0.0,
        "with stages: only wait so long for each forward pass of a lane through a stage, twice for backward; nothing "
        "is learnt, but schedules and placements can be timed without the hardware",
        low=0,
    )
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the workers on every host, `env.NAME`; set before the task is loaded, after torch is."""

    task: Mapping[str, Any] = field(default_factory=dict)
    """The task's own options, `task.NAME`: anything."""
