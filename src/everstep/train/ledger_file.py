"""A worker's own file of ledger rows: rows wait in memory while the disk refuses them, and no half row stays.

Apart because a row is a proof, not a piece of news: unlike an event it may not be lost to a disk that is full for a
while. Others write the same rows into files of their own, so only what nobody could write is missing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

MOST_WAITING_BYTES = 64 << 20
"""Rows of 300,000 steps of 8 lanes, which is days of a full disk."""
LAST_WAIT_S = 5.0
"""How long the end waits for a disk that is full; less than what agents give workers to leave."""
_RETRY_S = 0.1
_BLOCK_BYTES = 1 << 16


class LedgerFile:
    """Appends whole lines to a file that nobody else writes. Never raises for the file's sake.

    `waiting`: rows that are not on disk yet; `given_up`: those that came when `most_bytes` were waiting already;
    `error`: what the disk said last.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_WAITING_BYTES) -> None:
        self.path = path
        self.waiting = 0
        self.given_up = 0
        self.error = ""
        self._most_bytes = most_bytes
        self._lines = bytearray()
        self._fd = -1

    def append(self, row: bytes) -> None:
        """A row, its line feed included; it is on disk once `flush` has said so."""
        if len(self._lines) + len(row) > self._most_bytes:
            self.given_up += 1
            return
        self._lines += row
        self.waiting += 1

    def flush(self) -> bool:
        """Write what waits. Returns whether all of it is on disk; the rest waits for the next call."""
        if not self._lines:
            return True
        try:
            if self._fd < 0:
                self._fd = _open_whole(self.path)
            written = os.write(self._fd, self._lines)
        except OSError as error:
            self.error = error.strerror or str(error)
            self._forget()  # the file may have been replaced, or the mount come back: open anew next time
            return False
        whole = self._lines.rfind(b"\n", 0, written) + 1
        self.waiting -= self._lines.count(b"\n", 0, whole)
        del self._lines[:whole]
        if self._lines:
            self.error = "only a part of the rows fitted"
            self._forget()  # opening it again cuts the half row off
        return not self._lines

    def close(self, wait_s: float = LAST_WAIT_S) -> int:
        """Try for a while to write what waits, and give the descriptor back; returns how many rows are not on disk."""
        end_s = time.monotonic() + wait_s
        while not self.flush() and time.monotonic() < end_s:
            time.sleep(_RETRY_S)
        self._forget()
        return self.waiting + self.given_up

    def _forget(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_whole(path: Path) -> int:
    """A descriptor to append with, after the half row is cut off that a full disk or an earlier life left at the end.

    Raises: OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = end = os.fstat(fd).st_size
        while end > 0:
            begin = max(0, end - _BLOCK_BYTES)
            cut = os.pread(fd, end - begin, begin).rfind(b"\n") + 1
            end = begin + cut
            if cut:
                break
        if end < size:
            os.ftruncate(fd, end)
    except OSError:
        os.close(fd)
        raise
    return fd
