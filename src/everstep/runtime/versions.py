"""What has to be alike on all hosts of a job for its bits to be those of one host: versions, instruction set, the task.

Nothing is imported to find out, and nothing of the task is run.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from everstep.base.given import read_given

_PACKAGES = ("everstep", "torch", "numpy")
_SETS = ("avx512f", "avx2", "avx", "sse4_2", "sve", "asimd")
_MOST_FILE_BYTES = 16 << 20


def versions() -> dict[str, str]:
    """Of this host and its environment, by name."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {**found, "instruction set": f"{platform.machine()} {instruction_set()}".strip()}


def instruction_set() -> str:
    """The widest that libraries choose between; "" if it cannot be told."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return next((known for known in _SETS if known in flags.split()), "")
    return ""


def task_digest(task: str) -> str:
    """SHA-256 of the file that a task is in, the first 16 digits; "" for a ready task, or if there is no such file."""
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
            return hashlib.sha256(read_given(file, _MOST_FILE_BYTES)).hexdigest()[:16]
    return ""


def differences(here: Mapping[str, str], there: Mapping[str, str], *, mixed: bool = False) -> list[str]:
    """What is not alike, in plain words. there: of the job's own host. mixed: other instruction sets are admitted."""
    passed = {"instruction set"} if mixed else set()
    return [
        f"{name} is {here.get(name) or 'not here'}, the job's host has {theirs}"
        for name, theirs in sorted(there.items())
        if theirs and here.get(name) != theirs and name not in passed
    ]
