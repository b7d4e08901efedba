"""Where a job begins: at step 0, at its own newest checkpoint, or at one that is brought from elsewhere.

What is found here is what the user is told; the workers look again, and go by what they can verify.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.base.config_keys import CheckpointConfig
from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError, StoreError
from everstep.checkpoint.names import manifest_name, step_of
from everstep.cli.job import JobFile
from everstep.runtime.address import CHECKPOINTS_DIR

if TYPE_CHECKING:
    from everstep.cli.checkpoint_place import StorePlace

_ASK_S = 5.0


@dataclass(frozen=True)
class StartPoint:
    """step: of the checkpoint to go on from, 0 if none. words: for the user. brought: it was copied from elsewhere."""

    step: int = 0
    words: str = ""
    brought: bool = False


def checkpoint_dir(run_dir: Path, job: JobFile) -> Path:
    """Where the job's own checkpoints are."""
    path = job.config.checkpoint.disk.path
    return Path(path) if path is not None else run_dir / CHECKPOINTS_DIR


def newest_step(folder: Path) -> int:
    """The newest step of which there is a manifest; 0 if none. Nothing is verified."""
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    steps = [step for step in map(step_of, names) if step is not None]
    return max((step for step in steps if (folder / manifest_name(step)).is_file()), default=0)


def find_start(run_dir: Path, job: JobFile, *, script: bool) -> StartPoint:
    """Where the job in a (locked) directory begins; brings what `--resume-from` names, if the directory has none.

    Raises: ConfigError if that is no checkpoint, or one of another job. CheckpointCorrupt, StoreError.
    """
    config = job.config
    if not config.checkpoint.enabled and config.resume_from is None:
        return StartPoint()
    folder = checkpoint_dir(run_dir, job)
    own = newest_step(folder)
    if own:
        return StartPoint(own, f"goes on from the checkpoint of step {own} in {folder}")
    if config.resume_from is None:
        return StartPoint()
    if not config.checkpoint.enabled:
        raise ConfigError("--resume-from needs checkpoint.enabled, which is false")
    step, passed_over = _bring(config.resume_from, folder, job, script=script)
    words = [*passed_over, f"goes on from the checkpoint of step {step} in {config.resume_from}"]
    return StartPoint(step, "\n".join(words), brought=True)


def ask_object_store(rule: CheckpointConfig) -> str:
    """Whether the object tier can be used: "" if so, or if there is none; else a warning, since it may come back.

    Raises: ConfigError if it refuses: there is no such bucket, or the credentials are wrong or have expired.
    """
    if not rule.enabled or rule.object.url is None:
        return ""
    from everstep.checkpoint.object_store import ObjectOptions, ObjectStore, StoreRefused
    from everstep.checkpoint.stores.table import open_store

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


def _bring(source: str, folder: Path, job: JobFile, *, script: bool) -> tuple[int, list[str]]:
    """Copy a checkpoint into the job's own: the one that is named, else the newest that is whole. Returns its step, and
    why newer ones were passed over."""
    from everstep.checkpoint.reader import steps_in
    from everstep.cli.checkpoint_place import find_place

    rule = job.config.checkpoint.object
    place = find_place(source, rule.endpoint, rule.region)
    steps = [place.step] if place.step is not None else sorted(steps_in(place.store), reverse=True)
    passed_over: list[str] = []
    for step in steps:
        try:
            return _bring_step(place, step, folder, job, script=script), passed_over
        except CheckpointCorrupt as error:
            if place.step is not None:
                raise
            passed_over.append(f"passed over step {step}: {error}")
    if passed_over:
        raise CheckpointCorrupt("; ".join(passed_over))
    raise ConfigError(f"there is no checkpoint in {place.store.url}")


def _bring_step(place: StorePlace, step: int, folder: Path, job: JobFile, *, script: bool) -> int:
    from everstep.base.config import numerics
    from everstep.checkpoint.manifest import JobIdentity, refuse_foreign
    from everstep.checkpoint.store import DirectoryStore
    from everstep.checkpoint.transfer import transfer
    from everstep.cli.checkpoint_place import choose, progress_bar

    checkpoint = choose(place, str(step))
    if not script:  # what a script joins with is known to its workers alone
        identity = JobIdentity(job.task, numerics(job.config))
        refuse_foreign(checkpoint.manifest, identity, allow_mismatch=job.config.checkpoint.allow_mismatch)
    with progress_bar(f"bringing step {checkpoint.step}", shown=True) as progress:
        try:
            transfer(place.store, DirectoryStore(folder), checkpoint.step, progress=progress)
        except (BlobMissing, CheckpointCorrupt) as error:
            raise CheckpointCorrupt(f"{checkpoint.name} cannot be used: {error}") from None
        except OSError as error:
            raise StoreError(f"cannot write {folder}: {error.strerror or error}") from None
    return checkpoint.step
