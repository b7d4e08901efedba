"""Every key of the config: its type, default and meaning, as frozen data. Pure.

Apart from `config`, which makes them of layers of values, because checks of several values need the keys alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from everstep.base.cell_keys import CellConfig
from everstep.base.config_fields import key
from everstep.base.pipeline.schedule_table import KINDS

BUCKETS = ("s3", "gs")
"""Schemes of object stores' URLs."""
TRANSPORTS = ("shm", "sockets", "nccl")
OFFLOAD = r"cpu|(?!(?i:cpu|gpu|cuda(:\d+)?|nvme|auto|on|off|true|false|yes|no)$)[^\0]+"
"""What `zero.offload` may be: words that others use for it are no names of folders."""
NO_MPI = (
    "transport=mpi is not available: an MPI world can neither lose nor gain a process; use transport=auto, which also "
    "works under mpirun"
)
MAX_WORKERS, MAX_STAGES = 10**6, 10**5
"""More would be a slip of the hand, and lists of them would fill the memory."""
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
        "auto", "seconds between heartbeats; auto: 10 x the median round trip, from 0.2 to 5", above=0
    )
    floor_s: float = key(2.0, "a worker or host is never declared dead before this many seconds of silence", above=0)
    ceiling_s: float = key(
        20.0, "a worker or host is declared dead after this many seconds without a heartbeat, at the latest", above=0
    )
    reconnect_s: float = key(
        1.0,
        "a host is declared dead when its agent and all its workers have been disconnected for this many seconds",
        above=0,
    )


@dataclass(frozen=True)
class LoaderConfig:
    """How samples are read."""

    workers: int = key(0, "loader threads or processes per worker; 0: read in the training loop", low=0)
    prefetch: int = key(2, "steps to read ahead", low=0)
    pin_memory: bool = key(False, "use page-locked batches, which are copied faster to a GPU")


@dataclass(frozen=True)
class EarlyStopConfig:
    """When to stop before the last step."""

    metric: str | None = key(None, "evaluated metric to watch; none: never stop early")
    mode: str = key("max", "whether a larger (max) or a smaller (min) value is better", choices=("max", "min"))
    patience: int = key(3, "evaluations without improvement before stopping", low=1)
    min_delta: float = key(0.0, "smallest change that counts as an improvement", low=0)
    target: float | None = key(None, "stop as soon as the metric reaches this value")


@dataclass(frozen=True)
class HostsConfig:
    """Several hosts in one job."""

    min: int = key(1, "hosts that must have joined before the job begins", low=1)
    wait_s: float = key(600.0, "seconds that the job waits for hosts.min hosts, and an agent for the job", low=0)
    return_: str = key(
        "rebalance",
        "rebalance: move workers, without pausing, to a host that (re)joined 30 s ago and runs fewer; stay: leave them",
        choices=("rebalance", "stay"),
    )
    mixed: bool = key(
        False,
        "admit hosts with other kernels; implies numerics.changed=warn. The bits then depend on which host computes "
        "which lane",
    )


@dataclass(frozen=True)
class NumericsConfig:
    """Keys about what the bits of the result depend on, beside the config."""

    changed: str = key(
        "refuse",
        "what to do if the numerics fingerprint of a worker or checkpoint differs from the job's, if the dataset holds "
        "other samples than before a checkpoint, or if a step that is repeated after a resume has another loss than "
        "before: refuse, or warn and go on",
        choices=("refuse", "warn"),
    )


@dataclass(frozen=True)
class BackoffConfig:
    """How long to wait before a dead worker is restarted."""

    initial_s: float = key(0.5, "seconds before the first restart; doubles with each restart, with jitter", low=0)
    max_s: float = key(30.0, "longest wait before a restart, in seconds", low=0)


@dataclass(frozen=True)
class TierConfig:
    """When one checkpoint tier takes a checkpoint, and which it keeps."""

    every_steps: int | None = key(None, "take a checkpoint every N steps", low=1)
    every_epochs: int | None = key(None, "take a checkpoint at the end of every Nth epoch, at any cost", low=1)
    every_minutes: float | None = key(None, "take a checkpoint every N minutes", above=0)
    keep_last: int = key(2, "newest checkpoints to keep", low=1)
    keep_every: int | None = key(None, "keep checkpoints of every Nth step for ever", low=1)
    keep_best: int = key(0, "best checkpoints to keep, by checkpoint.best_metric", low=0)


@dataclass(frozen=True)
class MemoryTierConfig(TierConfig):
    """Snapshots in the workers' memory."""

    keep_last: int = key(1, "newest snapshots to keep that are complete in all stages", low=1)
    limit_mb: int = key(4096, "memory for snapshots per worker, in MiB", low=1)


@dataclass(frozen=True)
class DiskTierConfig(TierConfig):
    """Checkpoints in a directory."""

    full_every: int = key(
        10, "every Nth checkpoint is written in full; the others write only blocks that changed", low=1
    )
    path: str | None = key(None, "directory; none: 'checkpoints' in the run directory")


@dataclass(frozen=True)
class ObjectTierConfig(TierConfig):
    """Checkpoints in an object store."""

    url: str | None = key(
        None,
        "URL of the store; none: off. Keys come from the environment alone: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; "
        "GOOGLE_APPLICATION_CREDENTIALS",
        pattern=rf"({'|'.join(BUCKETS)})://[^@/?#]+(/[^?#]*)?|file:///.+",
        example="s3://bucket/prefix",
    )
    endpoint: str | None = key(
        None,
        "address of a server other than the provider's own; none: AWS_ENDPOINT_URL, GOOGLE_BASE_URL",
        pattern=r"https?://[^@/?#]+/?",
        example="https://host:9000",
    )
    region: str | None = key(None, "region of an s3:// bucket; none: AWS_REGION")


@dataclass(frozen=True)
class CheckpointConfig:
    """Snapshots beyond what the workers hold."""

    enabled: bool = key(True, "take checkpoints")
    memory: MemoryTierConfig = field(default_factory=MemoryTierConfig)
    disk: DiskTierConfig = field(default_factory=DiskTierConfig)
    object: ObjectTierConfig = field(default_factory=ObjectTierConfig)
    interval: float | Literal["auto"] = key(
        "auto", "seconds between checkpoints; auto: from their cost and the rate of faults", above=0
    )
    mtbf_minutes: float | None = key(None, "minutes between failures, for interval: auto; none: as observed", above=0)
    best_metric: str | None = key(None, "evaluated metric that ranks checkpoints")
    best_mode: str = key("max", "whether a larger (max) or a smaller (min) value is better", choices=("max", "min"))
    shared: str = key(
        "auto",
        "whether all hosts see one checkpoint directory. auto: each host looks; yes: a host that does not see it is "
        "refused; no: each host keeps its parts on its own disk",
        choices=("auto", "yes", "no"),
    )
    copies: int = key(2, "hosts that hold a copy of each part, where hosts do not share a directory", low=1)
    staging_mb: int | None = key(
        None,
        "memory per worker, in MiB, for the part of a checkpoint that is not on disk when the next update comes; none: "
        "half of the free memory of the host or control group, shared by its workers. A checkpoint that does not fit "
        "is skipped, so no step waits for a slow disk",
        low=0,
    )
    grace_s: float = key(30.0, "seconds for an emergency checkpoint after SIGTERM or SIGINT", low=0)
    sign_key: str | None = key(
        None,
        "private ed25519 key (PEM file) that signs each checkpoint; none: checkpoints are not signed. `checkpoints "
        "keygen` makes one",
    )
    allow_mismatch: bool = key(False, "load a checkpoint of another model or config as far as it fits")


@dataclass(frozen=True)
class ZeroConfig:
    """Where the parts of the training state lie. None of it changes a bit."""

    stage: int = key(
        0,
        "1: the members of a pool divide the optimizer's state among them (ZeRO), and send each other the parameters "
        "that they have updated. 2: they divide gradients, too: each member keeps the gradients of what it updates, "
        "and .grad is None after backward(). On one host the others are freed as soon as they have been added up",
        low=0,
    )
    copies: int = key(2, "members that hold each part of the optimizer's state, with zero.stage=1 and 2", low=1)
    offload: str | None = key(
        None,
        "where each worker keeps the optimizer's state. none: with its parameters; cpu: in the host's memory; a "
        "folder: in a file there, of which memory holds what is in use",
        pattern=OFFLOAD,
        example="cpu, or a folder",
    )
    offload_params: bool = key(
        False,
        "keep parameters in the folder of zero.offload, too, and gradients if all workers are on one host: for models "
        "larger than memory",
    )


@dataclass(frozen=True)
class MetricsConfig:
    """Keys about measurements while the job runs."""

    interval_s: float = key(1.0, "seconds between samples of the resources that workers use; 0: no samples", low=0)
    listen: str | None = key(
        None,
        "address that serves the metrics to Prometheus while the job runs, port 0: any free port; none: not served",
        pattern=r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5}",
        example="127.0.0.1:9400",
    )


@dataclass(frozen=True)
class NetworkConfig:
    """Where the processes of a job find each other."""

    address: str = key(
        "127.0.0.1",
        "address of this host, IPv4 or IPv6, where coordinator and workers listen, and which they tell each other",
        pattern=r"\d{1,3}(\.\d{1,3}){3}|[0-9a-f:]{2,39}",
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
        "address where the coordinator listens, if not network.address; 0.0.0.0 or ::: all addresses of its kind",
        pattern=r"\d{1,3}(\.\d{1,3}){3}|[0-9a-f:]{2,39}",
        example="0.0.0.0",
    )
    ports: str | None = key(
        None,
        "ports that a firewall lets through: 2 per worker (3 with cell.hosts), 1 per agent, 1 per standby; none: any",
        pattern=r"\d{1,5}-\d{1,5}",
        example="29500-29599",
    )
    trusted: bool = key(False, "allow listening on public addresses, on 0.0.0.0 and ::")


@dataclass(frozen=True)
class CoordinatorKeys:
    """How patient the job's process is with its coordinator."""

    silent_s: float = key(
        5.0,
        "the coordinator is restarted after this many seconds without an answer; time that it waits for a processor "
        "does not count, and the limit doubles with each kill",
        above=0,
    )


@dataclass(frozen=True)
class ControlConfig:
    """Where the coordinator's journal is, and who takes its place when its host is lost."""

    etcd: str | None = key(
        None,
        "members and prefix of the etcd that holds the job's lease and journal, so that another host can take over; "
        "etcds:// uses TLS; none: the journal is in the run directory, and a person must type everstep takeover DIR",
        pattern=r"etcds?://[A-Za-z0-9.:,_\[\]-]+(/[A-Za-z0-9._-]{1,100}){1,10}/?",
        example="etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379/jobs/mine",
    )
    etcd_ca: str | None = key(
        None,
        "CA that etcd's certificates must come from, a PEM file (else $EVERSTEP_ETCD_CA); none: the system's CAs",
    )
    etcd_cert: str | None = key(
        None, "certificate chain to show to etcd, a PEM file (else $EVERSTEP_ETCD_CERT); none: show no certificate"
    )
    etcd_key: str | None = key(
        None, "private key of control.etcd_cert, a PEM file without a password (else $EVERSTEP_ETCD_KEY)"
    )
    lease_s: int = key(
        2, "seconds after which a coordinator that no longer renews its lease is replaced", low=1, high=60
    )


@dataclass(frozen=True)
class TlsConfig:
    """How traffic between processes is encrypted, and the certificates of this host."""

    mode: str = key(
        "auto",
        "auto: TLS on every connection that leaves the host; on: within a host, too; off: no TLS",
        choices=("auto", "on", "off"),
    )
    cert: str | None = key(
        None,
        "certificate chain of this host, a PEM file that names its address; none: made from the job's token",
    )
    ca: str | None = key(
        None, "CA that certificates must come from, a PEM file; none: the job's own CA, made from its token"
    )
    key: str | None = key(None, "private key of security.tls.cert, a PEM file without a password")


@dataclass(frozen=True)
class SecurityConfig:
    """Keys about who may take part in a job."""

    token_file: str | None = key(None, "file with the job's token; none: $EVERSTEP_TOKEN, else a new token")
    tls: TlsConfig = field(default_factory=TlsConfig)


@dataclass(frozen=True)
class NotifyConfig:
    """Keys about who is told when something happens."""

    events: tuple[str, ...] = key(
        ("job_completed", "job_failed", "waiting", "fallback", "checkpoint_failed"),
        "events that send a notice",
        choices=_NOTED,
        example="[job_failed, waiting]",
    )
    command: str | None = key(
        None,
        "program and arguments to run for each notice; it gets the notice as JSON on standard input, and in "
        "EVERSTEP_EVENT, EVERSTEP_TEXT and EVERSTEP_RUN",
    )
    webhook: str | None = key(
        None,
        "environment variable with the address that each notice is posted to as JSON; the address itself is a secret "
        "and belongs in no config",
        pattern=r"[A-Za-z_][A-Za-z0-9_]*",
        example="EVERSTEP_WEBHOOK",
        secret=True,
    )
    timeout_s: float = key(10.0, "seconds that the command or the server may take for one notice", above=0, high=600)


@dataclass(frozen=True)
class LogsConfig:
    """How much room the workers' logs may take."""

    max_mb: float = key(64.0, "size in MiB at which a worker's log is rotated", above=0)
    keep: int = key(3, "older log files to keep for each worker", low=0)


@dataclass(frozen=True)
class Config:
    """A job's effective config. Attributes are the keys; those of a group follow a dot (`loader.workers`)."""

    lanes: int = key(8, "parts of the global batch; each is computed whole by one worker", low=1, numerics=True)
    micro_batch: int = key(
        8,
        "samples per lane: --batch-size / lanes; auto, in everstep run TASK: the largest that fits, with fewer lanes, "
        "so that the global batch stays the same",
        low=1,
        numerics=True,
    )
    accumulate: int = key(
        1,
        "multiplies the lanes, and with them the global batch; --batch-size is the size after that",
        low=1,
        numerics=True,
    )
    steps: int | None = key(
        None,
        "last step; if you give steps and epochs, the earlier end counts; if you give one, the task's other does not",
        low=1,
    )
    epochs: int | None = key(None, "passes over the data", low=1)
    seed: int = key(
        0, "seed of the initial weights, the sample order and all random numbers", low=0, high=2**63 - 1, numerics=True
    )
    threads: int = key(1, "intra-op threads per worker", low=1, numerics=True)
    device: str = key(
        "cpu",
        "device of all tensors; run takes auto, too: cuda where torch sees a GPU",
        pattern=r"cpu|cuda(:\d+)?",
        example="cpu, cuda or cuda:0",
        numerics=True,
    )
    precision: str = key(
        "fp32", "arithmetic of forward and backward passes", choices=("fp32", "bf16", "fp16"), numerics=True
    )
    clip_norm: float | None = key(None, "largest global norm of the gradient", above=0, numerics=True)
    clip_value: float | None = key(
        None, "largest absolute value of each element of the gradient, after clip_norm", above=0, numerics=True
    )
    shuffle: bool = key(
        True,
        "samples in an order that follows from seed, another one in each epoch; false: the dataset's own order",
        numerics=True,
    )
    rehearse: bool = key(
        True,
        "for scripts: do some steps twice before the first, to find state that join does not carry",
    )
    verify_every: int = key(
        100, "steps between comparisons of the workers' states; checkpoints, heals and the end compare them, too", low=0
    )

    spot_check: float = key(
        0.0,
        "share of the lanes that a second worker computes again to compare the results; lanes of workers that join, "
        "and one lane every `verify_every` steps, are compared in any case",
        low=0.0,
        high=1.0,
    )
    on_nonfinite: str = key(
        "warn",
        "when the loss or gradient of a step is not finite. warn: apply the update and warn; skip: leave the update "
        "out; stop: leave the update out and end the job with a checkpoint",
        choices=("warn", "stop", "skip"),
    )
    nonfinite_limit: int = key(
        10, "end the job with exit code 1 after this many non-finite steps in a row; 0: never", low=0
    )

    workers: int = key(1, "worker processes in total", low=1)
    spares: int = key(0, "idle processes that replace a lost worker at once", low=0)
    min_workers: int = key(1, "wait for more workers while there are fewer than this", low=1)
    on_failure: str = key(
        "replace",
        "after a loss. shrink: go on with a smaller cell or fewer workers; replace: go on and replace as soon as "
        "possible; wait: wait for a replacement",
        choices=("shrink", "replace", "wait"),
    )
    max_restarts: int = key(
        20, "restarts of one worker within an hour before it is given up, or its cell made smaller", low=0
    )
    quorum_wait_s: float = key(
        600.0, "seconds to wait for enough workers before the job gives up with exit code 3", low=0
    )
    hang_limit_s: float | Literal["auto"] = key(
        "auto",
        "seconds without progress until a worker counts as hung; auto: 10 x the slowest of the last 100 steps, at "
        "least 10",
        above=0,
    )
    hang_first_s: float = key(
        600.0,
        "hang limit while a worker may be compiling (first step of a life, evaluation, new shape under torch.compile); "
        "without a sign of life for 60 s it counts as hung anyway",
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
    eval_every_epochs: int = key(0, "epochs between evaluations, in addition to eval_every; 0: never", low=0)
    log_every: int = key(1, "steps between progress lines; 0: none", low=0)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    sinks: tuple[str, ...] = key(
        (), "services that the job also reports to while it runs", choices=SINKS, example="[tensorboard]"
    )
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    logs: LogsConfig = field(default_factory=LogsConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    cell: CellConfig = field(default_factory=CellConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    batch: str = key(
        "constant",
        "constant: the global batch stays the same; per_worker: it follows the number of workers (not exact)",
        choices=("constant", "per_worker"),
        numerics=True,
    )
    lr_rule: str = key(
        "none",
        "how the learning rate follows the batch size, with batch: per_worker",
        choices=("none", "linear", "sqrt"),
        numerics=True,
    )
    lr_warmup_steps: int = key(100, "steps over which a changed learning rate is phased in", low=0, numerics=True)

    stages: int = key(1, "parts the model is split into", low=1)
    pool: int | None = key(None, "workers per stage, all active: workers = stages x pool", low=1)
    redundancy: int | None = key(None, "standby backups per stage: workers = stages x (1 + redundancy)", low=0)
    map: Any = key(  # noqa: RUF009
        None, "units, workers, hosts, devices and leader of each stage; none: evenly, in order", none=True
    )
    cut: Any = key(  # noqa: RUF009
        "auto",
        "where the model is cut. auto: by map, else Task.cuts, else counted; counted: balance the units' parameters; "
        "measured: balance their times, measured for one lane before the start; or the units of each part: [4, 4, 2]",
    )
    schedule: str = key("1f1b", "order of forward and backward passes in a pipeline", choices=tuple(KINDS))
    chunks: int = key(1, "parts of the model per stage, for schedules that allow several", low=1)
    recompute: bool = key(False, "with stages: compute activations again in the backward pass instead of keeping them")
    meta_init: bool = key(
        False,
        "initialise each module alone, with its own random generator, so that no worker builds the whole model",
        numerics=True,
    )
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume_from: str | None = key(None, "checkpoint (path or URL) to start from; none: the job's own")

    chaos: str = key("", "faults to inject, as for --chaos")
    emulate_compute_ms: float = key(
        0.0,
        "for benchmarks: pretend to have another device. With stages, wait this many milliseconds in place of each "
        "forward pass of a lane through a stage (backward: twice that), and train nothing; without stages, stretch "
        "each lane to at least three times that",
        low=0,
    )
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the workers on every host, `env.NAME`; set before the task is loaded, after torch is."""

    task: Mapping[str, Any] = field(default_factory=dict)
    """The task's own options, `task.NAME`: anything."""

    @property
    def passes(self) -> str:
        """The narrowest type of products in forward and backward passes."""
        own = self.cell.types.parameters
        return self.precision if own == "fp32" else own

    @property
    def scales_loss(self) -> bool:
        """Whether gradients pass through fp16, where small ones vanish."""
        return "fp16" in (self.passes, self.cell.types.reduction)
