"""What the workers of this host spend: metrics/<host>.jsonl, one line per interval, from the board and from /proc.

In a thread of the agent's, so that a slow disk delays no heartbeat. Workers do nothing for it but add to counters in
shared memory. Lines inform: what cannot be written is dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from everstep.protocol.messages import WorkerLife
from everstep.runtime.board import OPERATIONS, PHASES, Board

MOST_BYTES = 64 << 20
MOST_FILES = 4
_GROUPS = {"heal": "recover", "settle": "recover", "idle": "other", "starting": "other", "evaluate": "other"}
_GROUPS |= {"finish": "other"}
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Sampler:
    """Writes samples until it is closed. lives: thread-safe, the processes that run now."""

    def __init__(
        self, folder: Path, host: str, board: Board, lives: Callable[[], Iterable[WorkerLife]], interval_s: float
    ) -> None:
        self._folder = folder
        self._path = folder / f"{host}.jsonl"
        self._host = host
        self._board = board
        self._lives = lives
        self._interval_s = interval_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """A last sample, and no more."""
        self._closed.set()
        self._thread.join(2.0)

    def line(self, now_unix_ns: int) -> dict[str, Any]:
        """All workers as they are now. Counters grow within a life (incarnation), seconds and bytes alike."""
        rows = [self._row(life) for life in self._lives()]
        return {"t": now_unix_ns, "host": self._host, "workers": [row for row in rows if row]}

    def _row(self, life: WorkerLife) -> dict[str, Any] | None:
        pulse = self._board.read(life.worker_id)
        usage = process_usage(life.pid)
        limbs = [found for pid in life.limbs if (found := process_usage(pid)) is not None]
        if pulse.incarnation != life.incarnation or usage is None:
            return None
        seconds: dict[str, float] = {}
        for phase, spent_ns in zip(PHASES, pulse.spent_ns, strict=True):
            group = _GROUPS.get(phase, phase)
            seconds[group] = seconds.get(group, 0.0) + spent_ns / 1e9
        return {
            "worker_id": life.worker_id,
            "incarnation": life.incarnation,
            "pid": life.pid,
            **({"pids": [life.pid, *life.limbs]} if life.limbs else {}),
            "step": pulse.step,
            "generation": pulse.generation,
            "phase": pulse.phase,
            "samples": pulse.samples,
            "passes": pulse.lanes,
            "rss_bytes": usage[1] + sum(rss_bytes for _, rss_bytes in limbs),
            "cpu_s": usage[0] + sum(cpu_s for cpu_s, _ in limbs),
            "seconds": {group: round(spent, 6) for group, spent in seconds.items() if spent},
            "bytes": {name: sent for name, sent in zip(OPERATIONS, pulse.sent_bytes, strict=True) if sent},
        }

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._closed.wait(max(0.0, due_s - time.monotonic())):
            due_s = max(due_s + self._interval_s, time.monotonic())
            self._write()
        self._write()

    def _write(self) -> None:
        line = self.line(time.time_ns())
        if not line["workers"]:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_size >= MOST_BYTES:
                    rotate(self._path, MOST_FILES)
            with open(self._path, "ab") as file:
                file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def rotate(path: Path, most_files: int) -> None:
    """`x.jsonl` becomes `x.1.jsonl`, that `x.2.jsonl`, and so on; the oldest goes. Raises: OSError."""
    names = [path] + [path.with_name(f"{path.stem}.{k}{path.suffix}") for k in range(1, most_files)]
    for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
        with contextlib.suppress(FileNotFoundError):
            newer.rename(older)


def process_usage(pid: int) -> tuple[float, int] | None:
    """(CPU seconds, resident bytes) of a process; None if it is gone. Linux, from /proc; see proc(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, int(fields[21]) * _PAGE_BYTES
