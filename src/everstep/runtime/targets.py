"""Metrics targets for Prometheus: one file of targets and one token beside the runs of a folder.

Prometheus gives one token to all targets of a file, so runs that share the file share the token. Both are only put into
a folder that is ours, and that nobody else can write to.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everstep.base.below import open_below, write_atomically
from everstep.base.given import read_json
from everstep.runtime.files.run_lock import is_locked

TARGETS_FILE = "everstep-targets.json"
TARGETS_TOKEN_FILE = "everstep-metrics-token"
_LOCK_FILE = ".everstep-targets.lock"
_MOST_TARGETS = 2000
_PATIENCE_S = 2.0


def shared_folder(run_dir: Path) -> Path | None:
    """The folder whose runs share their targets; None if others could write there."""
    folder = run_dir.resolve().parent
    try:
        found = folder.stat()
    except OSError:
        return None
    return folder if found.st_uid == os.getuid() and not found.st_mode & 0o022 else None


def put_target(run_dir: Path, target: dict[str, Any] | None) -> None:
    """List this run as a target from now on, and no other one that nobody holds; None: list it no more. Failed writes
    are ignored: the file only informs."""
    folder, name = shared_folder(run_dir), run_dir.resolve().name
    if folder is None or (target is None and not (folder / TARGETS_FILE).exists()):
        return
    with contextlib.suppress(OSError), _alone(folder):
        others = [one for one in _targets(folder / TARGETS_FILE) if (said := _run_of(one)) and said != name]
        kept = [one for one in others if target is None or is_locked(folder / _run_of(one))][:_MOST_TARGETS]
        write_atomically(folder / TARGETS_FILE, json.dumps([*kept, *([target] if target is not None else [])]))


def _targets(path: Path) -> list[Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def _run_of(target: Any) -> str:
    """Name of the run in a target's label; "" if the target is not ours."""
    labels = target.get("labels") if isinstance(target, dict) else None
    name = labels.get("run") if isinstance(labels, dict) else None
    good = isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)
    return str(name) if good else ""


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises: OSError if another process does not let go of it."""
    fd = open_below(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT)
    deadline_s = time.monotonic() + _PATIENCE_S
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)
