"""What a process and all that descend from it hold together, and limits of that: looked at from outside, or the
kernel's own."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20
_NAMES = {
    1: {"limit": "memory.limit_in_bytes", "most": "memory.max_usage_in_bytes", "events": "memory.oom_control"},
    2: {"limit": "memory.max", "most": "memory.peak", "events": "memory.events"},
}
"""Files of a control group, by the version of these."""


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _held_mb(pid: int, kinds: Collection[str]) -> float:
    """What a process holds of these kinds, shared pages divided among those who share them (PSS)."""
    with contextlib.suppress(OSError):
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(row.split()[1]) for row in rows if row.partition(":")[0] in kinds) / 1024
    return 0.0


class Limit:
    """Kills a process and all its descendants as soon as they hold more than that together. most_mb: what they have
    held at the most. kinds: rows of smaps_rollup; Pss is all."""

    def __init__(self, pid: int, limit_mb: float = math.inf, kinds: Collection[str] = ("Pss",)) -> None:
        self.most_mb = 0.0
        self._pid, self._limit_mb, self._kinds = pid, limit_mb, kinds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.wait(0.05):
            there = _family(self._pid)
            self.most_mb = max(self.most_mb, sum(_held_mb(pid, self._kinds) for pid in there))
            for pid in there if self.most_mb > self._limit_mb else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def holds(self) -> Iterator[None]:
        """While this is entered."""
        self._thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._thread.join()


class ControlGroup:
    """Processes of which the kernel kills one as soon as all together hold more memory than that and none of it can be
    taken back. No swap counts as room."""

    def __init__(self, limit_mb: int) -> None:
        """Raises: OSError that says why this machine does not allow it."""
        self._folder, version = _new_group()
        self._names = _NAMES[version]
        swap = {1: "memory.memsw.limit_in_bytes", 2: "memory.swap.max"}[version]
        self._write(self._names["limit"], limit_mb * MIB)
        with contextlib.suppress(OSError):  # a kernel without swap has no such file
            self._write(swap, limit_mb * MIB if version == 1 else 0)

    def _write(self, name: str, value: int) -> None:
        (self._folder / name).write_text(f"{value}\n")

    def start(self, argv: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        """A process that belongs to it from its first instruction on. how: as of Popen."""
        place = str(self._folder / "cgroup.procs")
        return subprocess.Popen(["/bin/sh", "-c", 'echo 0 >"$0" && exec "$@"', place, *argv], **how)

    @property
    def killed(self) -> int:
        """Processes that the kernel has killed."""
        rows = (self._folder / self._names["events"]).read_text().splitlines()
        return int(next(row.split()[1] for row in rows if row.startswith("oom_kill ")))

    @property
    def most_mb(self) -> float:
        """The most that was held; files that could have been dropped count, too."""
        return int((self._folder / self._names["most"]).read_text()) / MIB

    def close(self) -> None:
        """End what is left in it, and the group."""
        for _ in range(200):
            for pid in (self._folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.05)
        raise OSError(f"{self._folder} has processes that do not end")

    def __enter__(self) -> ControlGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _new_group() -> tuple[Path, int]:
    """A folder in which processes can be put, and the version of its files. Raises: OSError if there is none."""
    why = "no memory controller is mounted"
    for root, version in ((Path("/sys/fs/cgroup/memory"), 1), (Path("/sys/fs/cgroup"), 2)):
        for parent in (root / _own(version), root):
            folder = parent / f"everstep-test-{os.getpid()}-{time.monotonic_ns()}"
            try:
                folder.mkdir()
            except OSError as error:
                why = f"{folder}: {error.strerror}"
                continue
            if os.access(folder / _NAMES[version]["limit"], os.W_OK):
                return folder, version
            folder.rmdir()
            why = f"{parent} lets no memory be limited"
    raise OSError(f"control groups cannot limit memory here: {why}")


def _own(version: int) -> str:
    """This process's group, below the root."""
    rows: Mapping[str, str] = {
        row.split(":")[1]: row.split(":", 2)[2] for row in Path("/proc/self/cgroup").read_text().splitlines()
    }
    found = rows.get("", "/") if version == 2 else next((v for k, v in rows.items() if "memory" in k.split(",")), "/")
    return found.strip().lstrip("/")
