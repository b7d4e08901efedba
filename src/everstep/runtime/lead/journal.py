"""The coordinator's memory on disk: JSON lines with a checksum each, synced before anything that depends on them.

A crash leaves at most one torn line at the end; opening cuts it off. A full disk must not stop training: entries that
cannot be written wait in memory and go first with the next that can. After much growth the file is rewritten, shorter,
beside the old one and then in its place: until then the old one counts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everstep.base.below import open_below
from everstep.base.errors import ConfigError
from everstep.base.given import read_given
from everstep.protocol.coordinator.restoring import end_in, sensible
from everstep.protocol.lease.writer import compacted
from everstep.protocol.messages import JobEnded

COMPACT_BYTES = 1 << 20
_MOST_BYTES = 1 << 30
_CHUNK = 1 << 20


class Journal:
    """An append-only file of JSON objects.

    `entries` were in it when it was opened; `cut_bytes` of a torn tail were cut off; `pending` counts entries that are
    not on disk yet because the disk refused them. compact_bytes: the growth after which, if its size has also doubled,
    the file is shortened to the entries that still count, unless it was opened with invalid entries.
    """

    def __init__(self, path: str | os.PathLike[str], compact_bytes: int = COMPACT_BYTES) -> None:
        self.path = Path(path)
        try:
            self._fd = open_below(self.path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EISDIR, errno.ELOOP):
                raise
            raise ConfigError(f"{self.path}: expected the journal that Everstep wrote; {error.strerror}") from None
        data = self._read()
        self.entries, self._end = parse(data)
        self.cut_bytes = len(data) - self._end
        self._waiting = b""
        self.pending = 0
        self._compact_bytes = self._compact_at = compact_bytes
        self._found = list(self.entries)  # entries in the file
        self._new: list[dict[str, Any]] = []  # entries waiting for it
        self._placed = True  # whether the file is sure to have the name
        self._shortens = True
        if self.cut_bytes:
            with contextlib.suppress(OSError):  # of a disk that is still full: the rest is overwritten
                os.ftruncate(self._fd, self._end)
                os.fsync(self._fd)
        if self._end >= self._compact_at:
            self._shortens = sensible(self.entries)
            self._shorten()

    def _read(self) -> bytes:
        data = bytearray()
        while chunk := os.read(self._fd, _CHUNK):
            data += chunk
            if len(data) > _MOST_BYTES:
                os.close(self._fd)
                raise ConfigError(f"{self.path} has more than {_MOST_BYTES} bytes: expected a coordinator's journal")
        return bytes(data)

    def append(self, entry: dict[str, Any]) -> bool:
        """Write and sync an entry. Returns False if the disk refused; the entry then waits for the next append."""
        self._waiting += format_entry(entry)
        self._new.append(entry)
        self.pending += 1
        try:
            written = os.pwrite(self._fd, self._waiting, self._end)
            if written < len(self._waiting):
                os.ftruncate(self._fd, self._end)
                return False
            os.fdatasync(self._fd)
            self._place()
        except OSError:
            return False
        self._end += written
        self._found += self._new
        self._waiting, self._new = b"", []
        self.pending = 0
        if self._end >= self._compact_at:
            self._shorten()
        return True

    def close(self) -> None:
        os.close(self._fd)

    # ---- superseded entries

    def _shorten(self) -> None:
        """Shorten the file; if the disk refuses, it stays as it is until it has grown again."""
        if self._shortens:
            short = compacted(self._found)
            data = b"".join(map(format_entry, short))
            if len(data) < self._end:
                with contextlib.suppress(OSError):
                    self._replace(short, data)
        self._compact_at = self._end + max(self._compact_bytes, self._end)

    def _replace(self, entries: Sequence[dict[str, Any]], data: bytes) -> None:
        """Replace the file's entries with these. Raises: OSError; the old ones are in the file then."""
        draft = self.path.with_name(f".{self.path.name}.0")
        draft.unlink(missing_ok=True)
        fd = open_below(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            _write(fd, data)
            os.fsync(fd)
            if not _is_at(self._fd, self.path, self._end) or not _is_at(fd, draft, len(data)):
                raise FileExistsError(f"another coordinator, which has taken over, writes {self.path}")
            _move(fd, draft, self.path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
        os.close(self._fd)
        self._fd, self._end, self._found, self._placed = fd, len(data), list(entries), False
        self._place()

    def _place(self) -> None:
        """Sync the folder: entries count once no crash can give the name back to the old file. Raises: OSError."""
        if self._placed:
            return
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._placed = True


def _write(fd: int, data: bytes) -> None:
    """Write all data. Raises: OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _is_at(fd: int, path: Path, size: int) -> bool:
    mine, there = os.fstat(fd), os.stat(path)
    return (mine.st_dev, mine.st_ino, size) == (there.st_dev, there.st_ino, there.st_size)


def _move(fd: int, draft: Path, path: Path) -> None:
    """Rename the draft. Raises: OSError; but not if it took effect and a file server's answer was lost."""
    size = os.fstat(fd).st_size
    try:
        os.rename(draft, path)
    except OSError:
        if not _is_at(fd, path, size):
            raise


def end_in_file(path: Path) -> JobEnded | None:
    """End of the job, if a journal that another process writes has it already."""
    try:
        return end_in(parse(read_given(path, _MOST_BYTES))[0])
    except (OSError, ValueError):
        return None


def format_entry(entry: dict[str, Any]) -> bytes:
    """One line: checksum, blank, JSON."""
    body = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def parse(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The entries up to the first torn or altered line, and their number of bytes."""
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
