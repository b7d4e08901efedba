"""The coordinator's memory on disk: JSON lines with a checksum each, synced before anything that depends on them.

A crash leaves at most one torn line at the end; opening cuts it off. A disk that is full must not stop training:
entries that cannot be written wait in memory and go first with the next that can.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any

from everstep.base.errors import ConfigError

_MOST_BYTES = 1 << 30


class Journal:
    """An append-only file of JSON objects.

    `entries` are those that were there when it was opened; `cut_bytes` of a torn tail were cut off; `pending` counts
    entries that are not on disk yet because the disk refused them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise ConfigError(f"{self.path} is no regular file: expected the journal that Everstep wrote")
        data = b""
        while chunk := os.read(self._fd, 1 << 20):
            data += chunk
            if len(data) > _MOST_BYTES:
                os.close(self._fd)
                raise ConfigError(f"{self.path} has more than {_MOST_BYTES} bytes: expected a coordinator's journal")
        self.entries, self._end = parse(data)
        self.cut_bytes = len(data) - self._end
        self._waiting = b""
        self.pending = 0
        if self.cut_bytes:
            with contextlib.suppress(OSError):  # of a disk that is full still: what is left is written over
                os.ftruncate(self._fd, self._end)
                os.fsync(self._fd)

    def append(self, entry: dict[str, Any]) -> bool:
        """Write and sync an entry. Returns False if the disk refused; the entry then waits for the next append."""
        self._waiting += format_entry(entry)
        self.pending += 1
        try:
            written = os.pwrite(self._fd, self._waiting, self._end)
            if written < len(self._waiting):
                os.ftruncate(self._fd, self._end)
                return False
            os.fdatasync(self._fd)
        except OSError:
            return False
        self._end += written
        self._waiting = b""
        self.pending = 0
        return True

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)


def format_entry(entry: dict[str, Any]) -> bytes:
    """One line: checksum, blank, JSON."""
    body = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def parse(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The entries up to the first line that is torn or altered, and how many bytes they take."""
    entries: list[dict[str, Any]] = []
    end = 0
    while (stop := data.find(b"\n", end)) >= 0:
        checksum, _, body = data[end:stop].partition(b" ")
        try:
            if int(checksum, 16) != zlib.crc32(body):
                break
            entry = json.loads(body)
        except (ValueError, RecursionError):
            break
        if not isinstance(entry, dict):
            break
        entries.append(entry)
        end = stop + 1
    return entries, end
