"""The run directory as `everstep run` finds it (new, stopped, finished, of another job), its preparation, and the job's
start: step 0, its own newest checkpoint, or one brought from elsewhere.

These findings are for the user; the workers look again, and rely only on what they can verify.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from everstep.base.config import Config
from everstep.base.config_keys import CheckpointConfig
from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError, StoreError
from everstep.base.given import read_json
from everstep.checkpoint.names import MAX_STEP
from everstep.cli.job import JobFile, differences, read_job
from everstep.cli.task_loading import TaskSpec
from everstep.observe.events import last_committed_step
from everstep.runtime.files.file_sets import NEWEST_FILE
from everstep.runtime.files.host_directory import checkpoints_in
from everstep.runtime.files.private import close_folder, close_run_dir, close_store
from everstep.runtime.link.address import EVENTS_FILE, JOB_FILE, LOCK_FILE

if TYPE_CHECKING:
    from everstep.cli.checkpoints_exchange import StorePlace

RUNS = Path("runs")
_PREVIOUS = "previous-"
_TIME = "%Y%m%d-%H%M%S"
_ASK_S = 5.0


def refuse_no_run(run_dir: Path) -> None:
    """Raises: ConfigError if the folder is missing, or holds nothing of a job."""
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    if not any((run_dir / name).exists() for name in (JOB_FILE, EVENTS_FILE, "logs")):
        raise ConfigError(f"{run_dir} is not a run directory: there is no {JOB_FILE}")


@dataclass(frozen=True)
class Found:
    """Content of a run directory. `step`: the last one committed there; `digest`: of a finished job; `job`: as it was
    started before."""

    state: Literal["new", "stopped", "finished"]
    step: int = 0
    digest: dict[str, Any] | None = None
    job: JobFile | None = None


def in_runs(prefix: str) -> Path:
    """runs/<prefix>-<time>, for commands that make several runs; makes `RUNS`, if there, private."""
    with contextlib.suppress(OSError):
        close_folder(RUNS)
    return RUNS / f"{prefix}-{time.strftime(_TIME)}"


def named_directory(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Callback of an option: refuses "--run-dir --steps", which lacks its value; "--steps" is no directory to make.

    Raises: ConfigError.
    """
    if value is not None and str(value).startswith("-"):
        raise ConfigError(
            f"--run-dir: expected a directory, got {str(value)!r} (for a directory of that name: ./{value})"
        )
    return value


def default_run_dir(spec: TaskSpec) -> Path:
    """runs/<task>-<time>, a path that does not exist yet."""
    base = RUNS / f"{spec.short}-{time.strftime(_TIME)}"
    path, count = base, 1
    while path.exists():
        count += 1
        path = base.with_name(f"{base.name}-{count}")
    return path


def close_to_others(run_dir: Path, config: Config) -> str:
    """Make private the files that jobs left in a (locked) directory and in their checkpoints elsewhere, and `RUNS` if
    the directory is in it. Returns a warning for the user if that fails, else ""."""
    path = config.checkpoint.disk.path
    try:
        if run_dir.parent == RUNS:
            close_folder(RUNS)
        close_run_dir(run_dir)
        if path is not None and Path(path).is_dir():
            close_store(Path(path))
    except OSError as error:
        return f"warning: others can read {error.filename}: {error.strerror or error}"
    return ""


def read_digest(run_dir: Path) -> dict[str, Any] | None:
    """Content of final/digest.json, None if the job has not finished.

    Raises: ConfigError if it is there but cannot be read.
    """
    path = run_dir / "final" / "digest.json"
    try:
        data = read_json(path, folders=1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    step = data.setdefault("step", 0) if isinstance(data, dict) else None
    if type(step) is not int or not 0 <= step <= MAX_STEP or not isinstance(data.get("model"), str):
        raise ConfigError(f"cannot read {path}: expected step, model and state")
    found: dict[str, Any] = data
    return found


def inspect(run_dir: Path, job: JobFile) -> Found:
    """Look into a (locked) directory on behalf of this job.

    Raises: ConfigError, with the differences, if it belongs to another job; or to one that has finished, and more is
    asked for.
    """
    if not (run_dir / JOB_FILE).exists():
        return Found("new")
    before = read_job(run_dir, joined=False)
    different = differences(before, job)
    if different:
        raise ConfigError(
            f"{run_dir} belongs to another job: {'; '.join(different)}; choose another --run-dir, or --fresh to set "
            "the old one aside"
        )
    digest = read_digest(run_dir)
    if digest is not None:
        step = int(digest.get("step", 0))
        _refuse_more(run_dir, before, job, step)
        return Found("finished", step, digest)
    return Found("stopped", last_committed_step(run_dir / EVENTS_FILE), job=before)


def _refuse_more(run_dir: Path, before: JobFile, job: JobFile, step: int) -> None:
    """step: the one with which the job has finished. Raises: ConfigError if more of what ended it is asked for."""
    key = "steps" if before.config.steps == step else "epochs"
    had, wanted = getattr(before.config, key), getattr(job.config, key)
    if key in job.explicit and had is not None and wanted is not None and wanted > had:
        raise ConfigError(
            f"{key}={wanted}: this job has finished with {key}={had}, in {run_dir}: to train on, choose another "
            f"--run-dir and add --resume-from {run_dir}"
        )


def set_aside(run_dir: Path, moves: Callable[[str], bool] = lambda name: True) -> Path | None:
    """Move the contents of a (locked) directory into previous-N/; returns that path, None if there was nothing. moves:
    whether what has this name is moved."""
    stays = {LOCK_FILE, *(p.name for p in run_dir.iterdir() if p.name.startswith(_PREVIOUS) or not moves(p.name))}
    content = [p for p in run_dir.iterdir() if p.name not in stays]
    if not content:
        return None
    number = 1
    while (target := run_dir / f"{_PREVIOUS}{number}").exists():
        number += 1
    try:
        target.mkdir()
        for path in content:
            os.rename(path, target / path.name)
    except OSError as error:
        raise ConfigError(f"cannot move the old contents of {run_dir} to {target}: {error.strerror or error}") from None
    return target


@dataclass(frozen=True)
class StartPoint:
    """Checkpoint to go on from. step: 0 if none. words: for the user. brought: it was copied from elsewhere."""

    step: int = 0
    words: str = ""
    brought: bool = False


def checkpoint_dir(run_dir: Path, job: JobFile) -> Path:
    """Folder of the job's own checkpoints. Raises: ConfigError for a link."""
    path = job.config.checkpoint.disk.path
    return Path(path) if path is not None else checkpoints_in(run_dir)


def _newest_elsewhere(run_dir: Path) -> int:
    """The newest step with a checkpoint on hosts with disks of their own, 0 if none is known."""
    if not (run_dir / NEWEST_FILE).exists():
        return 0
    from everstep.checkpoint.pointers import read_pointer
    from everstep.checkpoint.store import DirectoryStore

    with contextlib.suppress(CheckpointCorrupt, StoreError):
        return read_pointer(DirectoryStore(run_dir), NEWEST_FILE) or 0
    return 0


@dataclass(frozen=True)
class Trust:
    """Checkpoints that a job may begin with. key: the public key that must have signed them all, since damage may make
    an older one count; None: any. not_before: the oldest step allowed."""

    key: str | None = None
    not_before: int | None = None

    def refuse(self, step: int, where: str) -> None:
        """Raises: ConfigError if a job would begin with this step and it is too old."""
        if self.not_before is not None and step < self.not_before:
            raise ConfigError(
                f"--not-before {self.not_before}: the newest checkpoint that is whole in {where} is of step {step}: "
                "bring a newer one, or give an earlier step"
            )


def find_start(run_dir: Path, job: JobFile, *, script: bool, trust: Trust = Trust()) -> StartPoint:
    """Where the job in a (locked) directory begins; copies the one of `--resume-from` if the directory has no
    checkpoint.

    Raises: ConfigError if that is no checkpoint, another job's, or not signed so. CheckpointCorrupt, StoreError.
    """
    from everstep.report.history import newest_step  # agents import this module without needing it

    config = job.config
    if not config.checkpoint.enabled and config.resume_from is None:
        return StartPoint()
    folder = checkpoint_dir(run_dir, job)
    try:
        own = newest_step(folder)
    except OSError as error:
        raise ConfigError(f"cannot look for checkpoints in {folder}: {error.strerror}: make it readable") from None
    if own:
        if trust.key is not None or trust.not_before is not None:
            trust.refuse(_newest_good(folder, job, trust.key), str(folder))
        return StartPoint(own, f"goes on from the checkpoint of step {own} in {folder}")
    elsewhere = _newest_elsewhere(run_dir)
    if elsewhere:
        if trust.key is not None or trust.not_before is not None:
            raise ConfigError(
                "--require-signature, --not-before: expected the job's checkpoints on this host, but other hosts have "
                "them"
            )
        return StartPoint(elsewhere, f"goes on from the checkpoint of step {elsewhere}, which its hosts have")
    if config.resume_from is None:
        trust.refuse(0, str(folder))
        return StartPoint()
    if not config.checkpoint.enabled:
        raise ConfigError("--resume-from: expected checkpoint.enabled=true, got false: set it")
    step, passed_over, origin = _bring(config.resume_from, folder, job, script=script, trust=trust)
    words = [*passed_over, f"goes on from the checkpoint of step {step} in {config.resume_from} ({origin})"]
    return StartPoint(step, "\n".join(words), brought=True)


def ask_object_store(rule: CheckpointConfig) -> str:
    """Check the object tier: "" if it can be used, or there is none; else a warning, since it may come back.

    Raises: ConfigError if it refuses: there is no such bucket, or the credentials are wrong or have expired.
    """
    if not rule.enabled or rule.object.url is None:
        return ""
    from everstep.checkpoint.object_store import ObjectOptions, ObjectStore, StoreRefused
    from everstep.checkpoint.stores.store_table import open_store

    where = ObjectOptions(
        rule.object.endpoint, rule.object.region, request_timeout_s=_ASK_S, connect_timeout_s=_ASK_S, retries=0
    )
    try:
        store = open_store(rule.object.url, where)
        if isinstance(store, ObjectStore):
            store.ask()
    except StoreRefused as error:
        raise ConfigError(f"checkpoint.object.url: {error}") from None
    except StoreError as error:
        return f"warning: {error}; the job runs, and uploads checkpoints once the store answers"
    return ""


def _newest_good(folder: Path, job: JobFile, key: str | None) -> int:
    """The newest of the job's checkpoints whose bytes are all right, 0 if there is none.

    Raises: ConfigError if one of them is not signed with this key, or is another job's.
    """
    from everstep.checkpoint.reader import steps_in, verify_store
    from everstep.checkpoint.signing import check_signature
    from everstep.checkpoint.store import DirectoryStore

    store, newest = DirectoryStore(folder), 0
    for step in sorted(steps_in(store)):
        try:
            if key is not None:
                check_signature(store, step, key, job=None if step == job.begins_after else job.name)
            elif verify_store(store, [step]):
                continue
        except CheckpointCorrupt:
            continue  # no worker goes on from it either
        newest = step
    return newest


def _bring(source: str, folder: Path, job: JobFile, *, script: bool, trust: Trust) -> tuple[int, list[str], str]:
    """Copy a checkpoint into the job's own: the named one, else the newest that is whole. Returns its step, the reasons
    for passing newer ones over, and its origin."""
    from everstep.checkpoint.reader import steps_in
    from everstep.cli.checkpoints_exchange import find_place

    rule = job.config.checkpoint.object
    place = find_place(source, rule.endpoint, rule.region)
    steps = [place.step] if place.step is not None else sorted(steps_in(place.store), reverse=True)
    trust.refuse(max(steps, default=0), place.store.url)
    passed_over: list[str] = []
    for step in (s for s in steps if s >= (trust.not_before or 0)):
        try:
            step, origin = _bring_step(place, step, folder, job, script=script, key=trust.key)
            return step, passed_over, origin
        except CheckpointCorrupt as error:
            if place.step is not None:
                raise
            passed_over.append(f"passed over step {step}: {error}")
    if passed_over:
        raise CheckpointCorrupt("; ".join(passed_over))
    raise ConfigError(f"there is no checkpoint in {place.store.url}")


def _bring_step(
    place: StorePlace, step: int, folder: Path, job: JobFile, *, script: bool, key: str | None
) -> tuple[int, str]:
    from everstep.base.config import numerics
    from everstep.checkpoint.manifest import JobIdentity, refuse_foreign
    from everstep.checkpoint.store import DirectoryStore
    from everstep.cli.checkpoints_exchange import choose, origin_words, progress_bar
    from everstep.cli.signed import transfer_signed

    checkpoint = choose(place, str(step))
    if not script:  # only workers know a script's own settings
        identity = JobIdentity(job.task, numerics(job.config))
        refuse_foreign(checkpoint.manifest, identity, allow_mismatch=job.config.checkpoint.allow_mismatch)
    with progress_bar(f"bringing step {checkpoint.step}", shown=True) as progress:
        try:
            transfer_signed(place.store, DirectoryStore(folder), step, key, progress)
        except (BlobMissing, CheckpointCorrupt) as error:
            raise CheckpointCorrupt(f"{checkpoint.name} cannot be used: {error}") from None
        except OSError as error:
            raise StoreError(f"cannot write {folder}: {error.strerror or error}") from None
    return checkpoint.step, f"{origin_words(checkpoint)}{', which is valid' if key is not None else ''}"
