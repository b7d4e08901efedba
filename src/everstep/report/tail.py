"""Incremental reading of files that grow, are rotated, replaced or cut off while they are read.

All displays read the same way: whole lines only, a bounded number of bytes at a time, and never twice. A file is known
by its inode, so a rename (rotation) loses nothing and a new file under an old name begins at its first line.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from everstep.base.given import open_given, skip_hole
from everstep.observe.events import MOST_LINE_BYTES, absurd, begun_last

CHUNK_BYTES = 1 << 20
EVERYTHING = 1 << 62
_MOST_DIGITS = 400
_decode = msgspec.json.Decoder().decode


def object_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line, even after half of another line; None if there is none, or its numbers are absurd."""
    found = _parsed(line)
    return None if found is None or absurd(found) else found


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            found = json.loads(begun_last(line), parse_int=_whole)  # or it has NaN, which strict readers refuse
        except (ValueError, RecursionError):
            return None
    return found if isinstance(found, dict) else None


def _whole(digits: str) -> float:
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)  # int refuses longer ones, and so the line


class Tail:
    """One growing file. `replaced` counts how often another file came under its name, or it was cut off; `absurd` names
    the line with impossible numbers, `trouble` the reason why the newest look could not read it; "" if there is none.

    last_bytes: of the data already there, only so much of its end is read; None: all. folders: as for `base.below`.
    """

    def __init__(self, path: Path, last_bytes: int | None = None, folders: int = 0) -> None:
        self.path = path
        self._folders = folders
        self._last_bytes = last_bytes
        self.replaced = 0
        self.absurd = self.trouble = ""
        self._number = 0
        self._position = 0
        self._rest = b""
        self._skipping = False
        self._known: tuple[int, int] | None = None
        self._head = b""

    def read(self, most_bytes: int = 64 << 20) -> Iterator[list[bytes]]:
        """Data appended since the last call: lists of whole lines, at most about `most_bytes` in all. A list is empty
        if its portion has no end of a line of ours.

        A missing or unreadable file has nothing new. A torn last line waits for its end.
        """
        self.trouble = ""
        try:
            with open_given(self.path, self._folders) as file:
                self._look(file.fileno())
                file.seek(self._position)
                left = most_bytes
                while left > 0:
                    data = file.read(min(CHUNK_BYTES, left))
                    if not data:
                        return
                    left -= len(data)
                    skip_hole(file, data)
                    self._position = file.tell()
                    if len(self._head) < 64:
                        self._head = os.pread(file.fileno(), 64, 0)
                    yield self._split(data)
        except FileNotFoundError:
            return
        except OSError as error:
            self.trouble = error.strerror or str(error)

    def lines(self) -> Iterator[bytes]:
        """All lines appended since the last call, one by one."""
        return (line for lines in self.read(EVERYTHING) for line in lines)

    def objects(self, lines: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
        """Objects that `object_of` finds in all lines of this file, in order; the first absurd one is kept."""
        for line in lines:
            self._number += 1
            found = _parsed(line)
            wrong = "" if found is None else absurd(found)
            if wrong and not self.absurd:
                self.absurd = f"{self.path}, line {self._number}: {wrong}: the line is left out"
            yield None if wrong else found

    def unread_bytes(self) -> int:
        try:
            return max(0, self.path.stat().st_size - self._position)
        except OSError:
            return 0

    def _look(self, fd: int) -> None:
        found = os.fstat(fd)
        known = (found.st_dev, found.st_ino)
        head = os.pread(fd, len(self._head), 0) if self._head else b""
        same = self._known in (None, known) and found.st_size >= self._position and head == self._head
        if not same:
            self.replaced += 1
            self._position, self._rest, self._skipping, self._head = 0, b"", False, b""
            self._number, self.absurd = 0, ""
        if self._known is None and self._last_bytes is not None and found.st_size > self._last_bytes:
            self._position, self._skipping = found.st_size - self._last_bytes, True
        self._known = known

    def _split(self, data: bytes) -> list[bytes]:
        if self._skipping:
            cut = data.find(b"\n")
            if cut < 0:
                return []
            data, self._skipping = data[cut + 1 :], False
            self._number += 1
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MOST_LINE_BYTES:
            self._rest, self._skipping = b"", True
        return lines


class Folder:
    """All files of a folder that match a pattern, rotated ones included: each is read once, under any name."""

    def __init__(self, folder: Path, pattern: str, last_bytes: int | None = None) -> None:
        self._last_bytes = last_bytes
        self._folder = folder
        self._pattern = pattern
        self._tails: dict[tuple[int, int], Tail] = {}

    @property
    def free_bytes(self) -> int | None:
        """Free bytes for this user on its disk, None if unknown."""
        return free_bytes(self._folder)

    def read(self, most_bytes: int = 64 << 20) -> Iterator[list[bytes]]:
        """New lines of all files, the oldest file first; files that are gone are forgotten."""
        present: dict[tuple[int, int], tuple[int, Path]] = {}
        try:
            for path in self._folder.glob(self._pattern):
                with contextlib.suppress(OSError):  # it has been rotated away, or is a link that leads nowhere
                    found = path.stat()
                    present[found.st_dev, found.st_ino] = (found.st_mtime_ns, path)
        except OSError:
            return
        self._tails = {
            key: self._tails.get(key) or Tail(path, self._last_bytes, 1) for key, (_, path) in present.items()
        }
        for key, (_, path) in sorted(present.items(), key=lambda item: item[1]):
            tail = self._tails[key]
            tail.path = path
            for lines in tail.read(most_bytes):
                most_bytes -= sum(map(len, lines))
                yield lines
            if most_bytes <= 0:
                return

    def lines(self) -> Iterator[bytes]:
        return (line for lines in self.read(EVERYTHING) for line in lines)

    def unread_bytes(self) -> int:
        """Number of bytes not yet read, in the files that were there at the last look."""
        return sum(tail.unread_bytes() for tail in self._tails.values())


def free_bytes(folder: Path) -> int | None:
    """Free bytes for this user on the disk of a folder, None if unknown."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
