"""A job before it starts: its effective config, its checks, and job.json, which remembers it.

Errors of the user are found here as far as possible, before a process is started.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everstep import __version__
from everstep.base.below import write_atomically
from everstep.base.config import (
    LENGTHS,
    Config,
    default_workers,
    dotted,
    known_of,
    load_config,
    numerics,
    read_layers,
    to_dict,
    with_batch_size,
)
from everstep.base.config_fields import shown
from everstep.base.doors import at_port
from everstep.base.errors import ConfigError
from everstep.base.given import read_json
from everstep.base.plan import Divides
from everstep.base.stage_map import hosts_of, parse_map
from everstep.chaos.spec import parse, simulated_failure
from everstep.order.cursor import last_step
from everstep.protocol.identity import Code, Kernels, read_code, read_divides, read_kernels, told
from everstep.report.words import one_line
from everstep.runtime.link.address import DATASET_FILE, JOB_FILE
from everstep.runtime.link.listening import family_of

_DISK = "checkpoint.disk.path"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_VERSIONED = ("torch", "numpy", "safetensors", "msgspec")


@dataclass(frozen=True)
class Request:
    """Wishes of the user. `layers` by rising precedence, without the task's own defaults."""

    layers: tuple[tuple[str, dict[str, Any]], ...]
    batch_size: int | None = None
    simulate_failure: bool = False

    @property
    def explicit(self) -> tuple[str, ...]:
        """Dotted keys that the user set."""
        keys = {key for _, layer in self.layers for key in dotted(layer)}
        return tuple(sorted(keys | ({"micro_batch"} if self.batch_size is not None else set())))


@dataclass(frozen=True)
class JobFile:
    """Content of job.json. `task` is canonical: the same for the same task, from wherever it is started.

    dataset_size: in samples, None if only the script knows. streamed: they come in the dataset's own order.
    begins_after: step of the other job's checkpoint that this job began with, 0 if none; resumes_at: step of the
    checkpoint from which this run goes on. unit_ms: measured times of the units by which `cut` was chosen, empty if
    nothing was measured. batch_size: samples of a global batch, None if the user did not set it. split_checked: the
    task was proven to be splittable before the start. numerics: kernels that compute it; code: modules that its workers
    have imported; code_before: those of an earlier run from whose checkpoint this one goes on; all None until a worker
    reports them. divides: by stage, how the optimizer's state is divided, as far as a worker has found that out.
    lane_digest: as `Probe` has it. unknown: by dotted key, values written by another version and unknown here; they
    have no effect.
    """

    task: str
    argv: tuple[str, ...]
    config: Config
    dataset_size: int | None = None
    explicit: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    created_unix_ns: int = 0
    begins_after: int = 0
    resumes_at: int = 0
    unit_ms: tuple[float, ...] = ()
    split_checked: bool = False
    batch_size: int | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)
    numerics: Kernels | None = None
    code: Code | None = None
    code_before: Code | None = None
    divides: Mapping[int, Divides] = field(default_factory=dict)
    lane_digest: str = ""
    streamed: bool = False

    @property
    def name(self) -> str | None:
        """Name of the job in its checkpoints; None if the time of its creation is unknown."""
        return f"{self.created_unix_ns:x}" if self.created_unix_ns else None

    def to_dict(self) -> dict[str, Any]:
        said = {**vars(self), "config": to_dict(self.config), "seed": self.config.seed}
        said |= {name: told(said[name]) for name in ("numerics", "code", "code_before")}
        del said["unknown"]
        return said


def effective_config(defaults: Mapping[str, Any], request: Request, *, script: bool = False) -> Config:
    """defaults < task's own (`defaults`) < file < --set < options; `--batch-size` becomes `micro_batch`. If the user
    gives a length, steps or epochs, it replaces both of the task's own.

    script: a script says its own lanes and length in `join`, so neither steps nor epochs is missing.

    Raises: ConfigError for unknown keys, bad values and contradictions.
    """
    asked = read_layers(list(request.layers))
    if any(asked.get(name) is not None for name in LENGTHS):
        defaults = {name: value for name, value in defaults.items() if name not in LENGTHS}
    layers: list[tuple[str, Mapping[str, Any]]] = [("the task's defaults", defaults), *request.layers]
    given = read_layers(layers)
    open_lanes = script and "lanes" not in given  # the script sets them later; until then assume enough
    workers = given.get("workers") or default_workers(given) or 1
    if open_lanes and workers > Config.lanes:
        layers.insert(0, ("the script", {"lanes": workers}))
    if given.get("accumulate", 1) > 1 and not open_lanes:
        layers.append(("accumulate", {"lanes": given.get("lanes", Config.lanes) * given["accumulate"]}))
    path = given.get(_DISK)
    if isinstance(path, str) and not os.path.isabs(path):  # whoever continues or looks at the job may be elsewhere
        layers.append((_DISK, {_DISK: os.path.abspath(path)}))
    config = load_config(layers)
    if request.batch_size is not None and not (open_lanes and request.batch_size % config.lanes):
        sized = with_batch_size({"lanes": config.lanes}, request.batch_size)
        config = load_config([*layers, ("--batch-size", sized)])
    if script and config.stages > 1:
        raise ConfigError(
            f"stages: expected 1 for a script that calls everstep.join, got {config.stages}: its loop computes the "
            "whole model; write a Task (file.py:Class) to split it"
        )
    if script and config.cell.shards > 1:
        raise ConfigError(
            f"cell.shards: expected 1 for a script that calls everstep.join, got {config.cell.shards}: its loop makes "
            "and computes the model; write a Task (file.py:Class) with parallelize to cut it"
        )
    if config.steps is None and config.epochs is None and not script:
        raise ConfigError("the job has no end: give --steps or --epochs")
    if config.early_stop.metric is not None and not (config.eval_every or config.eval_every_epochs) and not script:
        raise ConfigError(
            f"early_stop.metric is {config.early_stop.metric!r}, but nothing is evaluated: give --set eval_every=STEPS"
        )
    return config


def check_dataset(config: Config, dataset_size: int) -> None:
    """Raises: ConfigError if the dataset is smaller than one global batch."""
    batch = config.lanes * config.micro_batch
    if dataset_size < batch:
        raise ConfigError(
            f"the dataset has {dataset_size} samples, fewer than one global batch of {batch} ({config.lanes} lanes x "
            f"{config.micro_batch}); use a smaller --batch-size"
        )


def check_hosts(config: Config, *, alone: bool = True) -> None:
    """Check the hosts of the placement map. alone: no other host can join.

    Raises: ConfigError if the map names a host although no other can join.
    """
    if not alone:
        return
    here = socket.gethostname()
    for worker_id, host in hosts_of(parse_map(config.map, config.stages)).items():
        if host not in (here, here.partition(".")[0], *_LOOPBACK):
            raise ConfigError(
                f"map: worker {worker_id} is to run on host {host!r}, but this job starts its workers on {here!r} "
                "only: name that, or localhost, or let others join with --listen"
            )


def refuse_hosts_of_cells(config: Config) -> None:
    """Raises: ConfigError if workers are to be on several hosts; no other host can join."""
    if config.cell.hosts > 1:
        raise ConfigError(
            f"cell.hosts: expected 1 for a job on this host alone, got {config.cell.hosts}: let others join with "
            "--listen ADDR:PORT, an address of 'ip addr', or set cell.hosts=1"
        )


def check_network(config: Config, port: int = 0) -> None:
    """Raises: ConfigError if this host cannot listen at the config's address, or at this port."""
    address = config.network.listen or config.network.address
    with socket.socket(family_of(address)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"network.address: expected an address of this host, got {address}: give one of 'ip addr'"
                ) from None
            place = at_port(address, port)
            raise ConfigError(
                f"--listen: cannot listen at {place} ({error.strerror}): choose another port, 0 for any"
            ) from None


def free_port(address: str) -> int:
    """A port of this address that nobody listens on."""
    with socket.socket(family_of(address)) as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


def total_steps(config: Config, dataset_size: int | None) -> int | None:
    """Number of the last step, None where it cannot be known beforehand."""
    return last_step(dataset_size, config.lanes * config.micro_batch, config.steps, config.epochs)


def with_chaos(config: Config, request: Request, dataset_size: int | None) -> Config:
    """The config with `--simulate-failure` written out as a fault; checks the specification.

    Raises: ConfigError naming the fault that cannot be read.
    """
    if request.simulate_failure:
        fault = simulated_failure(total_steps(config, dataset_size), config.seed)
        chaos = "; ".join(text for text in (config.chaos.strip().rstrip(";"), str(fault)) if text)
        config = load_config([("job", to_dict(config)), ("--simulate-failure", {"chaos": chaos})])
    parse(config.chaos)
    return config


def make_job(task: str, argv: Sequence[str], config: Config, dataset_size: int | None, request: Request) -> JobFile:
    """A job that begins now."""
    versions = {"python": platform.python_version(), "platform": platform.platform(), "everstep": __version__}
    for name in _VERSIONED:
        versions[name] = importlib.metadata.version(name)
    explicit, created = request.explicit, time.time_ns()
    return JobFile(task, tuple(argv), config, dataset_size, explicit, versions, created, batch_size=request.batch_size)


def with_cut(job: JobFile, cut: Sequence[Sequence[int]], unit_ms: Sequence[float], before: JobFile | None) -> JobFile:
    """The job with the cut that was measured, so that all its workers and later runs cut alike.

    cut: [first unit, unit after the last] of each part. before: this job at its previous start. Its cut is kept if it
    was measured and has as many parts.
    """
    if not unit_ms:
        return job
    if before is not None and before.unit_ms and len(before.config.cut) == len(cut):
        return replace(job, config=replace(job.config, cut=before.config.cut), unit_ms=before.unit_ms)
    sizes = [last - first for first, last in cut]
    return replace(job, config=replace(job.config, cut=sizes), unit_ms=tuple(unit_ms))


def going_on(job: JobFile, before: JobFile) -> JobFile:
    """The job with what workers of the run before, from whose checkpoint it goes on, have reported. Of a stage, only if
    its number still means the same units."""
    cuts = ((one.stages, one.chunks, one.cut, one.map) for one in (job.config, before.config))
    code, divides = before.code or before.code_before, before.divides if len({*map(repr, cuts)}) == 1 else {}
    return replace(job, numerics=before.numerics, code_before=code, divides=divides)


def differences(old: JobFile, new: JobFile) -> list[str]:
    """Differences that make these two jobs different: task, arguments, dataset, or config that changes the numbers."""
    found: list[str] = []
    if old.task != new.task:
        found.append(f"task is {old.task!r} there, {new.task!r} here")
    if old.argv != new.argv:
        found.append(f"the task's arguments are {' '.join(old.argv)!r} there, {' '.join(new.argv)!r} here")
    if None not in (old.dataset_size, new.dataset_size) and old.dataset_size != new.dataset_size:
        found.append(f"the dataset has {old.dataset_size} samples there, {new.dataset_size} here")
    then, now = dotted(numerics(old.config)), dotted(numerics(new.config))
    for key in sorted((then.keys() | now.keys()) - _said_later(old, new)):
        if then.get(key) != now.get(key):
            found.append(f"{key} is {then.get(key)} there, {now.get(key)} here")
    return found


def _said_later(old: JobFile, new: JobFile) -> set[str]:
    """Keys that both jobs leave to their script: its workers compare them with their checkpoints."""
    if "lanes" in (*old.explicit, *new.explicit) or (old.dataset_size, new.dataset_size) != (None, None):
        return set()
    follows = old.batch_size is not None and old.batch_size == new.batch_size
    return {"lanes", "micro_batch"} if follows else {"lanes"}


def with_shards(request: Request, run_dir: Path) -> Request:
    """The request with the virtual shards of the job that goes on here, if it is one and the request names none."""
    try:
        kept = read_job(run_dir, joined=False).config.cell.shards
    except ConfigError:
        return request  # no job is here, or the process that goes on with it says what is wrong
    if "cell.shards" in read_layers(request.layers):
        return request
    return replace(request, layers=((JOB_FILE, {"cell.shards": kept}), *request.layers))


def about_to_run(job: JobFile) -> str:
    """Sentence that tells the user which code of a job will run with his rights: its task, its command for notices."""
    task = one_line(shlex.join([job.task, *job.argv]))
    notify = job.config.notify.command
    return f"this runs {task}" + (f", and for notices {one_line(notify)}" if notify else "")


def write_job(run_dir: Path, job: JobFile) -> None:
    """Write job.json. Raises: ConfigError if the directory cannot be written."""
    try:
        write_atomically(run_dir / JOB_FILE, json.dumps(job.to_dict(), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {run_dir / JOB_FILE}: {error.strerror or error}") from None


def read_job(run_dir: Path, *, joined: bool = True) -> JobFile:
    """The job of a run directory. joined: include values that its script gave when it joined, unknown before.

    Unknown keys of a config that another version wrote are passed over (`JobFile.unknown`).

    Raises: ConfigError if there is none, or job.json cannot be read.
    """
    path = run_dir / JOB_FILE
    try:
        data = read_json(path)
        more = _joined(run_dir) if joined else {}
        size, streamed = more.pop("size", None), more.pop("streamed", False) is True
        known, unknown = known_of(JOB_FILE, data["config"])
        known_more, unknown_more = known_of(DATASET_FILE, more)
        return JobFile(
            task=str(data["task"]),
            argv=tuple(str(a) for a in data["argv"]),
            config=load_config([(JOB_FILE, known), (DATASET_FILE, known_more)]),
            dataset_size=_whole("dataset_size", data.get("dataset_size") or size or 0) or None,
            streamed=streamed or data.get("streamed") is True,
            explicit=tuple(str(key) for key in data.get("explicit", ())),
            versions={str(name): str(found) for name, found in dict(data.get("versions", {})).items()},
            created_unix_ns=_whole("created_unix_ns", data.get("created_unix_ns", 0)),
            begins_after=_whole("begins_after", data.get("begins_after", 0)),
            resumes_at=_whole("resumes_at", data.get("resumes_at", 0)),
            unit_ms=tuple(float(ms) for ms in data.get("unit_ms", ())),
            split_checked=bool(data.get("split_checked", False)),
            batch_size=_whole("batch_size", data.get("batch_size") or 0) or None,
            unknown={**unknown, **unknown_more},
            numerics=read_kernels(data.get("numerics")),
            code=read_code(data.get("code")),
            code_before=read_code(data.get("code_before")),
            divides=read_divides(data.get("divides")),
            lane_digest=str(data.get("lane_digest", "")),
        )
    except (FileNotFoundError, NotADirectoryError):
        why = f"there is no {JOB_FILE}"
        if (run_dir / DATASET_FILE).is_file():
            why += ", since its script ran by itself: only jobs of `everstep run` have one"
        raise ConfigError(f"{run_dir} is not a run directory: {why}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: it is not a job file ({type(error).__name__}: {error})") from None


def _whole(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{name}: expected a whole number, got {shown(value)}")
    return value


def _joined(run_dir: Path) -> dict[str, Any]:
    """Values that a script's workers wrote after it joined: size of the dataset, and the script's config."""
    try:
        facts = read_json(run_dir / DATASET_FILE)
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
