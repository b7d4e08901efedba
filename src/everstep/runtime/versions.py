"""Facts that must be alike on all hosts of a job before anything starts: versions, Everstep's own sources, the task.

Finding them imports nothing, and runs nothing of the task.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from everstep import __version__
from everstep.base.given import read_given

_PACKAGES = ("torch", "numpy")
_MOST_FILE_BYTES = 16 << 20


def versions() -> dict[str, str]:
    """Versions of this host and its environment, by name."""
    found = {"python": platform.python_version(), "everstep": __version__}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {**found, "everstep's sources": own_sources()}


@functools.cache
def own_sources() -> str:
    """Digest, 16 digits, of Everstep's source files: different checkouts may bear the same version."""
    folder, found = Path(__file__).parents[1], hashlib.blake2b(digest_size=8)
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)}\0".encode() + read_given(path))
    return found.hexdigest()


def task_digest(task: str) -> str:
    """SHA-256, first 16 digits, of the file of a task; "" for a ready task, or if there is no such file."""
    where = task.rpartition(":")[0] or task
    if where.endswith(".py"):
        files = [Path(where)]
    elif ":" in task:
        parts = Path(*where.split("."))
        files = [Path(p or ".", f) for p in ["", *sys.path] for f in (parts.with_suffix(".py"), parts / "__init__.py")]
    else:
        files = []
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            return hashlib.sha256(read_given(file, _MOST_FILE_BYTES, links=True)).hexdigest()[:16]
    return ""


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Differences in plain words. there: versions of the job's own host."""
    return [
        f"{name} is {here.get(name) or 'not here'}, the job's host has {theirs}"
        for name, theirs in sorted(there.items())
        if theirs and here.get(name) != theirs
    ]
