"""What a process and all that descend from it hold together, with or without a limit."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections.abc import Collection, Iterator
from pathlib import Path


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
