"""The coordinator's memory on disk: JSON lines with a checksum each, synced before anything that depends on them.

A crash leaves at most one torn line at the end; opening cuts it off. A damaged line before good ones stays: it stands
for an entry that makes no sense. A full disk must not stop training: entries that cannot be written wait in memory and
go first with the next that can. After much growth the file is rewritten, shorter, beside the old one and then in its
place: until then the old one counts. A job is taken over in a new file, too. So what the lost coordinator still writes
lands in the old one, and it sees that its file has lost the name.
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

from everstep.base.below import open_below, write_atomically
from everstep.base.errors import ConfigError, EverstepError
from everstep.base.given import read_given
from everstep.protocol.coordinator.restoring import DAMAGED, end_in, sensible
from everstep.protocol.lease.writer import MOST_TERM, compacted
from everstep.protocol.messages import JobEnded

COMPACT_BYTES = 1 << 20
_MOST_BYTES = 1 << 30
_CHUNK = 1 << 20


class JournalTaken(EverstepError):
    """Another coordinator writes the job's journal by now."""


class Journal:
    """An append-only file of JSON objects.

    `entries` were in it when it was opened; `cut_bytes` of a torn tail were cut off; `damaged` lines cannot be read;
    `pending` counts entries that are not on disk yet because the disk refused them. compact_bytes: the growth after
    which, if its size has also doubled, the file is shortened to the entries that still count, unless it was opened
    with invalid entries.
    """

    def __init__(self, path: str | os.PathLike[str], compact_bytes: int = COMPACT_BYTES) -> None:
        self.path = Path(path)
        try:
            self._fd = open_below(self.path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EISDIR, errno.ELOOP):
                raise
            raise ConfigError(f"{self.path}: expected the journal that Everstep wrote; {error.strerror}") from None
        number = _number(os.fstat(self._fd))
        # None: this file system has other numbers for names than for open files, so the size alone tells.
        self._known = number if number == _number(os.stat(self.path)) else None
        data = self._read()
        self.entries, self._end = parse(data)
        self._most = len(data)  # size that the file may have, as far as this life knows
        self.cut_bytes = len(data) - self._end
        self.damaged = sum(entry is DAMAGED for entry in self.entries)
        self._waiting = b""
        self.pending = 0
        self._compact_bytes = self._compact_at = compact_bytes
        self._found = list(self.entries)  # entries in the file
        self._new: list[dict[str, Any]] = []  # entries waiting for it
        self._placed = True  # whether the file is sure to have the name
        self._shortens = DAMAGED not in self.entries
        if self.cut_bytes:
            with contextlib.suppress(OSError):  # of a disk that is still full: the rest is overwritten
                os.ftruncate(self._fd, self._end)
                os.fsync(self._fd)
        if self._end >= self._compact_at:
            self._shortens = sensible(self.entries)  # a damaged line is not
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
        """Write and sync an entry. Returns False if the disk refused; the entry then waits for the next append, or for
        `retry`. Raises: JournalTaken; it is not known then whether the entry counts."""
        self._waiting += format_entry(entry)
        self._new.append(entry)
        self.pending += 1
        return self.retry()

    def retry(self) -> bool:
        """Write and sync the entries that wait. Returns and raises as `append`."""
        try:
            self._look()
            self._most = max(self._most, self._end + len(self._waiting))
            written = os.pwrite(self._fd, self._waiting, self._end)
            if written < len(self._waiting):
                os.ftruncate(self._fd, self._end)
                return False
            os.fdatasync(self._fd)
            self._place()
            self._look()
        except OSError as error:
            if error.errno == errno.ESTALE:  # the file server has dropped this file: it has lost its name
                raise self._taken() from None
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

    def take_over(self, entry: dict[str, Any]) -> None:
        """Go on in a new file, which begins with all entries and this one. The first damaged file is kept beside it.
        Raises: OSError, and then the entry need not be there; JournalTaken."""
        entries = [*self._found, entry]
        aside = self.path.with_name(f"{self.path.name}.damaged")
        if self.damaged and not aside.exists():
            with contextlib.suppress(OSError):
                write_atomically(aside, read_given(self.path, _MOST_BYTES))
        self._replace(entries, b"".join(map(format_entry, entries)))

    def _look(self) -> None:
        """Raises: JournalTaken if the name is another file's, or others have written into this one; OSError if that is
        not known."""
        try:
            there = os.stat(self.path)
        except FileNotFoundError:  # removed with its directory, which its job finds by itself
            return
        if self._known not in (None, _number(there)) or not self._end <= there.st_size <= self._most:
            raise self._taken()

    def _taken(self) -> JournalTaken:
        return JournalTaken(f"another coordinator writes {self.path} by now")

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
            os.stat(self.path)  # a name that is gone is not made again
            self._look()
            if not self._is_at(fd, draft):
                raise self._taken()
            self._move(fd, draft)
        except (OSError, JournalTaken):
            os.close(fd)
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
        os.close(self._fd)
        self._fd, self._end, self._found, self._placed = fd, len(data), list(entries), False
        self._known, self._most = self._known and _number(os.fstat(fd)), self._end
        self._place()

    def _move(self, fd: int, draft: Path) -> None:
        """Rename the draft. Raises: OSError; but not if it took effect and a file server's answer was lost."""
        try:
            os.rename(draft, self.path)
        except OSError:
            if not self._is_at(fd, self.path):
                raise

    def _is_at(self, fd: int, path: Path) -> bool:
        here, there = os.fstat(fd), os.stat(path)
        return here.st_size == there.st_size and (self._known is None or _number(here) == _number(there))

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


def _number(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def end_in_file(path: Path) -> JobEnded | None:
    """End of the job, if a journal that another process writes has it already."""
    try:
        return end_in(parse(read_given(path, _MOST_BYTES))[0])
    except (OSError, ValueError):
        return None


def newest_term(entries: Sequence[dict[str, Any]]) -> int:
    """The highest term in a file's entries: how often the job was taken over by hand."""
    terms = [entry.get("term") for entry in entries if entry.get("kind") == "term"]
    return max((one for one in terms if type(one) is int and 0 <= one <= MOST_TERM), default=0)


def term_in_file(path: Path) -> int:
    """`newest_term` of a journal that no process should write any more; 0 if it cannot be read."""
    try:
        return newest_term(parse(read_given(path, _MOST_BYTES))[0])
    except (OSError, ValueError):
        return 0


def begin_term(path: Path, term: int = 0) -> int:
    """Write into the journal that a new job process leads, by this term, or by the one after the newest. Only
    coordinators of that process write it from then on. Returns the term. Raises: ConfigError if that cannot be
    written; the next try gets another term, or this one if it is not there."""
    try:
        with contextlib.closing(Journal(path)) as journal:
            term = term or 1 + newest_term(journal.entries)
            journal.take_over({"kind": "term", "term": term})
    except (OSError, JournalTaken) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"cannot write into {path} who leads the job: {why}; make room or give access") from None
    return term


def format_entry(entry: dict[str, Any]) -> bytes:
    """One line: checksum, blank, JSON."""
    body = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def parse(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The entries up to the last good line, and their number of bytes. `DAMAGED` stands for each line before it that is
    torn or altered."""
    entries: list[dict[str, Any]] = []
    begin = end = damaged = 0
    while (stop := data.find(b"\n", begin)) >= 0:
        entry = _entry(data[begin:stop])
        begin = stop + 1
        if entry is None:
            damaged += 1
            continue
        entries += [*[DAMAGED] * damaged, entry]
        end, damaged = begin, 0
    return entries, end


def _entry(line: bytes) -> dict[str, Any] | None:
    """The entry in a line, None if the line is torn or altered."""
    checksum, _, body = line.partition(b" ")
    try:
        entry = json.loads(body) if int(checksum, 16) == zlib.crc32(body) else None
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
