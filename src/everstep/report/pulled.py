"""Logs of hosts that have directories of their own, fetched when a person wants to read them.

They are put beside those of the job's own host, under names that no file there has, so that all readers of logs find
them. Files that a host has rotated away are removed here, too, so there is never more than the host keeps itself.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from everstep.base.below import APPEND, folder_of, open_below
from everstep.base.errors import ConfigError, EverstepError
from everstep.runtime import commands
from everstep.runtime.files.host_directory import hosts_there
from everstep.runtime.link.address import LOGS_FOLDER

MOST_BYTES = 64 << 20
"""Most bytes of one host at once; the rest comes with the next call."""
_HOST = re.compile(r"[A-Za-z0-9._-]{1,100}")
_LOG = re.compile(r"worker-(\d{1,7})(\.\d{1,3})?\.jsonl")
_MOST_FILES = 4096
_MOST_WAITS = 6
"""A pull of all hosts gives up after so many timeouts."""


def hosts_apart(run_dir: Path) -> list[str]:
    """The hosts of the job in this directory that keep their logs themselves."""
    there = hosts_there(run_dir).items()
    return [name for name, place in there if place.apart and not place.around and _HOST.fullmatch(name)]


def pull_logs(run_dir: Path, host: str | None = None, *, timeout_s: float = 10.0) -> list[str]:
    """Fetch new bytes, from all hosts or from one. Returns the reasons why some sent nothing.

    Raises: ConfigError if there is no such host.
    """
    hosts = hosts_apart(run_dir)
    if host is not None and host not in hosts:
        listed = ", ".join(hosts) or "none"
        raise ConfigError(f"--host: expected a host of {run_dir} with logs of its own ({listed}), got {host!r}")
    problems: list[str] = []
    end_s = time.monotonic() + _MOST_WAITS * timeout_s
    for name in hosts if host is None else [host]:
        if time.monotonic() > end_s:
            problems.append(
                f"the logs of {name} and later hosts did not come: others took {_MOST_WAITS * timeout_s:g} s"
            )
            break
        try:
            _pull(run_dir, name, timeout_s)
        except commands.NoJobRunning:
            return problems  # earlier fetched bytes are there
        except (EverstepError, OSError) as error:
            problems.append(f"the logs of {name} did not come: {error}")
    return problems


def _pull(run_dir: Path, host: str, timeout_s: float) -> None:
    end_s, left = time.monotonic() + timeout_s, MOST_BYTES
    folder = run_dir / LOGS_FOLDER
    told = _ask(run_dir, {"host": host}, timeout_s)
    wanted: dict[str, tuple[str, int]] = {}
    for name, (number, size) in list(told.get("logs", {}).items())[:_MOST_FILES]:
        found = _LOG.fullmatch(name)
        if found is not None:
            wanted[f"worker-{found[1]}.{host}-{number}.jsonl"] = (name, size)
    own = re.compile(rf"worker-\d{{1,7}}\.{re.escape(host)}-\d{{1,20}}\.jsonl")
    with folder_of(folder / "any", 1) as opened:  # links are not followed here either
        for found_name in filter(own.fullmatch, os.listdir(opened)):
            if found_name not in wanted:
                os.unlink(found_name, dir_fd=opened)
    for mirror, (name, size) in wanted.items():
        path = folder / mirror
        at = path.lstat().st_size if path.exists() else 0
        while at < size and left > 0 and time.monotonic() < end_s:
            data = _ask(run_dir, {"host": host, "name": name, "start": at}, timeout_s).get("data", b"")
            if not data:
                break
            _append(path, data)
            at, left = at + len(data), left - len(data)


def _ask(run_dir: Path, args: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    return commands.ask(run_dir, "logs", args, timeout_s)


def _append(path: Path, data: bytes) -> None:
    fd = open_below(path, APPEND, 1)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
