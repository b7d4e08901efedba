"""A script's printed text: all of it goes to the worker's log, and the leader's also to where the user looks.

The leader may change at any line, so each worker checks for each line whether it leads. Text printed before the job has
a plan waits until it has one; in a later life of a worker such text is dropped, because the first life's was shown.

Each line in the file bears the time at which it ended, so that viewers can put it between the right steps.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from everstep.base.below import APPEND, open_below

_MOST_WAITING = 10_000  # characters of a script that prints before it joins
MOST_UNSHOWN_BYTES = 1 << 20
"""Limit of lines that wait for a full disk."""
OUTPUT_FILE = Path("logs") / "output.log"


def older(path: Path) -> Path:
    """Name of a file once another one has replaced it."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def stamped(text: str) -> bytes:
    """Whole lines in the form in which they are kept: each after the time, ns since 1970, and a space."""
    now = time.time_ns()
    return "".join(f"{now} {line}\n" for line in text.removesuffix("\n").split("\n")).encode(errors="replace")


def unstamped(line: bytes) -> tuple[int, str]:
    """Time at which a kept line ended, and the line; 0 and all of it if no time stands before it."""
    stamp, _, text = line.partition(b" ")
    known = len(stamp) <= 20 and stamp.isdigit()
    return (int(stamp), text.decode(errors="replace")) if known else (0, line.decode(errors="replace"))


class LeaderConsole(io.TextIOBase):
    """Stands in for stdout. leads: whether this worker leads, None while unknown. first: its first life.

    Shown text goes through a file that starts over at `most_bytes`. Lines that a full disk refuses wait for the
    next.
    """

    def __init__(
        self,
        log: TextIO,
        run_dir: Path,
        leads: Callable[[], bool | None],
        first: bool = True,
        most_bytes: int = 64 << 20,
    ) -> None:
        self._log = log
        self._most_bytes = most_bytes
        self._first = first
        self._path = run_dir / OUTPUT_FILE
        self._leads = leads
        self._line = ""
        self._unshown = bytearray()
        self._lost = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the log."""
        return self._log.encoding

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        """Descriptor of the log: text written directly to it is not shown."""
        return self._log.fileno()

    def write(self, text: str) -> int:
        """Write to the log at once; to the user by whole lines."""
        written = self._log.write(text)
        self._line += text
        self._show(self._line.rfind("\n") + 1)
        return written

    def flush(self) -> None:
        self._log.flush()

    def finish(self) -> None:
        """Show a last line without an end; from now on the log is written to directly."""
        if self._line:
            self._line += "\n"
            self._show(len(self._line))
        if self._unshown or self._lost:
            self._put()
            count = self._unshown.count(b"\n") + self._lost
            if count:
                self._log.write(f"everstep: {count} lines are here and not in {self._path.name}: the disk was full\n")
        self._log.flush()

    def _show(self, end: int) -> None:
        if end == 0:
            return
        leads = self._leads()
        if leads is None:
            self._line = self._line[-_MOST_WAITING:] if self._first else self._line[end:]
            return
        lines, self._line = self._line[:end], self._line[end:]
        if leads:
            data = stamped(lines)
            if len(self._unshown) + len(data) <= MOST_UNSHOWN_BYTES and not self._lost:
                self._unshown += data
            else:
                self._lost += data.count(b"\n")
            self._put()

    def _put(self) -> None:
        """Append waiting lines; a full disk does not stop training, and the rest comes later."""
        try:
            with os.fdopen(open_below(self._path, APPEND, 1), "ab", buffering=0) as file:
                del self._unshown[: file.write(self._unshown)]
                if self._lost and not self._unshown:
                    said = stamped(f"everstep: {self._lost} lines are missing here: the disk was full\n")
                    self._lost, self._unshown = 0, bytearray(said)
                    del self._unshown[: file.write(self._unshown)]
                if file.tell() > self._most_bytes and not self._unshown:
                    os.replace(self._path, older(self._path))
        except OSError:
            pass
