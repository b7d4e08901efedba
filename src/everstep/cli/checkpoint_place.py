"""Where the checkpoints are that a user names: a run directory, a checkpoint directory, one checkpoint, or a URL.

Apart from the commands, because all of them ask for it in the same words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError
from everstep.checkpoint.names import BEST, LATEST, step_of
from everstep.checkpoint.object_store import ObjectOptions
from everstep.checkpoint.pointers import read_pins, read_pointer
from everstep.checkpoint.reader import Checkpoint, open_checkpoint, steps_in
from everstep.checkpoint.store import BlobStore, DirectoryStore
from everstep.checkpoint.stores.table import open_store
from everstep.runtime.address import JOB_FILE

_STEP = re.compile(r"(?P<top>.*?)/?(?P<step>step-[0-9]{10})/?$")


@dataclass(frozen=True)
class StorePlace:
    """A store, and the step that was named with it (None: none in particular)."""

    store: BlobStore
    step: int | None = None


def find_place(text: str, endpoint: str | None = None, region: str | None = None) -> StorePlace:
    """The store that PATH or a URL names; `.../step-0000000010` names one checkpoint in it. It may still be empty.

    A run directory stands for where its job puts checkpoints. endpoint, region: of an object store; None: from the
    environment.

    Raises: ConfigError.
    """
    found = _STEP.match(text)
    step = step_of(found["step"]) if found else None
    top = (found["top"] or ("/" if text.startswith("/") else ".")) if found else text
    if "://" in top and not top.startswith("file://"):
        return StorePlace(open_store(top, ObjectOptions(endpoint, region)), step)
    folder = Path(top.removeprefix("file://"))
    if (folder / JOB_FILE).is_file():
        return StorePlace(open_store(_of_run(folder)), step)
    if (folder / "checkpoints").is_dir() and not list(folder.glob("step-*")):
        folder = folder / "checkpoints"
    return StorePlace(DirectoryStore(folder), step)


def _of_run(run_dir: Path) -> str:
    from everstep.cli.job import read_job

    path = read_job(run_dir).config.checkpoint.disk.path
    return os.fspath(run_dir / "checkpoints") if path is None else path


def choose(place: StorePlace, which: str | None = None) -> Checkpoint:
    """The checkpoint that is meant. which: a step number, `latest`, `best` or a pin; None: the one that the place
    names, else the newest.

    Raises: ConfigError if there is none; CheckpointCorrupt if its manifest was altered.
    """
    store = place.store
    step = _step(place, which)
    try:
        return open_checkpoint(store, step)
    except BlobMissing:
        known = ", ".join(str(s) for s in steps_in(store)[-8:]) or "none"
        raise ConfigError(f"{store.url} has no checkpoint of step {step}; it has {known}") from None
    except CheckpointCorrupt as error:
        older = [s for s in steps_in(store) if s < step]
        hint = f"; the next older one is step {older[-1]}" if older else ""
        raise CheckpointCorrupt(f"{error}{hint}") from None


def _step(place: StorePlace, which: str | None) -> int:
    store = place.store
    if which is None and place.step is not None:
        return place.step
    if which is None or which == "latest":
        steps = steps_in(store)
        if not steps:
            raise ConfigError(f"there is no checkpoint in {store.url}")
        pointed = read_pointer(store, LATEST) if which == "latest" else None
        return pointed if pointed in steps else steps[-1]
    if which.isdecimal():
        return int(which)
    named = read_pointer(store, BEST) if which == "best" else read_pins(store).get(which)
    if named is None:
        known = ", ".join(sorted(read_pins(store))) or "none"
        raise ConfigError(
            f"{store.url} has no checkpoint called {which!r}: give a step, latest, best or a pin ({known})"
        )
    return named


@contextmanager
def progress_bar(words: str, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, told (bytes done, bytes in all); nothing where it is not shown or nobody looks."""
    import sys

    if not shown or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(words, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
