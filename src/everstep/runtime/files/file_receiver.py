"""Receives files of another host's directory: reports how many bytes of each are there, and writes the next ones.

A repeated piece has no effect. Names are matched, sizes bounded, no links followed. A file that counts only when whole
gets its name when its digest is right. Bytes that a full disk refuses count as not received, and come again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from everstep.base.below import APPEND, folder_of, open_below
from everstep.base.given import read_given
from everstep.observe.events import encoded, parse_events
from everstep.observe.told import CAME_FROM, ToldFile
from everstep.protocol.messages import FilePiece, FilePieces, FilesHeld
from everstep.runtime.files.file_sets import LATEST, LEDGER, NEWEST_FILE, SOURCE, TO_HEAD, FileSet
from everstep.runtime.link.address import EVENTS_FILE

MOST_METRICS_BYTES = 64 << 20
_MOST_WHOLE_BYTES = 1 << 44
_MOST_WORDS = 100
_MOST_POINTER_BYTES = 4096
_STEP = re.compile(rb'"step":(\d{1,18})')
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass
class _Coming:
    """A file that is being received. held: number of bytes received; found: their digest."""

    version: str
    held: int = 0
    found: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))


class FileReceiver:
    """Receives into a folder, one message at a time. versions: of the files that are there, by name."""

    def __init__(self, folder: Path, kind: FileSet, versions: dict[str, str]) -> None:
        self.folder, self._kind, self.versions = folder, kind, versions
        self._coming: dict[str, _Coming] = {}

    def take(self, message: FilePieces) -> FilesHeld:
        """Take in pieces, or the question how many bytes are there."""
        held: dict[str, int] = {}
        refused: dict[str, str] = {}
        for piece in message.pieces:
            try:
                there = self._put(message.source, piece)
                if there is not None:
                    held[piece.path] = there
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    refused[piece.path] = (error.strerror or str(error))[:_MOST_WORDS]
        return FilesHeld(number=message.number, held=held, refused=refused)

    def _put(self, source: str, piece: FilePiece) -> int | None:
        """Returns how many bytes of the file are there; None: the sender has to ask again. Raises: OSError."""
        if self._kind.grows.fullmatch(piece.path):
            return self._grow(source, piece)
        if self._kind.whole.fullmatch(piece.path) and _DIGEST.fullmatch(piece.version):
            return self._complete_file(source, piece, piece.path)
        return None

    def _grow(self, source: str, piece: FilePiece) -> int | None:
        """Append to a file of this version; a file of another version is first emptied."""
        path, folders = self.folder / piece.path, piece.path.count("/")
        if self.versions.get(piece.path) != piece.version:
            if piece.at:
                return 0
            os.close(open_below(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, folders, make=True))
            self.versions[piece.path] = piece.version
        return append_at(path, folders, piece.at, piece.data)

    def _complete_file(self, source: str, piece: FilePiece, name: str) -> int | None:
        """Receive a file that counts when whole, verified as it comes: a large one is not read again. name: its name
        here."""
        path, folders = self.folder / name, name.count("/")
        draft = path.with_name(f".{path.name}.partial")
        with folder_of(path, folders, make=True) as folder:
            if self.versions.get(name) == piece.version and _size(path.name, folder) == piece.size:
                return piece.size
            come = self._coming.get(name)
            if come is None or come.version != piece.version:
                come = self._coming[name] = _Coming(piece.version)
                _remove(draft.name, folder)
            if piece.at == come.held and piece.at + len(piece.data) <= piece.size <= _MOST_WHOLE_BYTES:
                come.held = append_at(draft, folders, piece.at, piece.data, durably=True)
                come.found.update(piece.data[: come.held - piece.at])
            if come.held < piece.size:
                return come.held
            del self._coming[name]
            if come.found.hexdigest() != piece.version:
                _remove(draft.name, folder)
                return None
            if self._is_older(source, piece.version, path, draft):
                _remove(draft.name, folder)
                return piece.size
            os.replace(draft.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)  # the sender may remove its own file now
        self.versions[name] = piece.version
        return piece.size

    def _is_older(self, source: str, version: str, path: Path, draft: Path) -> bool:
        """Whether a file that has come whole is older than the one that is there."""
        return False


def append_at(path: Path, folders: int, at: int, data: bytes, *, durably: bool = False) -> int:
    """Append data to a file if its size is `at`. Returns its new size; data that fits only in part is cut off again.
    folders: as for `base.below`. Raises: OSError."""
    fd = open_below(path, os.O_WRONLY | os.O_CREAT, folders, make=True)
    try:
        there = os.fstat(fd).st_size
        if there != at or not data:
            return there
        if os.pwrite(fd, data, at) != len(data):
            os.ftruncate(fd, at)
            return at
        if durably:
            try:
                os.fdatasync(fd)
            except OSError:  # the kernel tells that once
                os.ftruncate(fd, at)
                raise
        return at + len(data)
    finally:
        os.close(fd)


def _size(name: str, folder: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    return -1


def _remove(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


class HeadReceiver(FileReceiver):
    """Receives at the head the files of hosts without the job's directory. Events are written once; a ledger gets a
    name of its own for each host; samples and launcher's lines of several lives go into one file."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, TO_HEAD, {})
        self._told = ToldFile(run_dir / EVENTS_FILE)
        self._grown: dict[tuple[str, str, str], int] = {}
        self._pointed: dict[str, str] = {}

    @property
    def looked(self) -> tuple[int, int]:
        """(step up to which all are in the job's events, as far as they were read; number of bytes read)."""
        return self._told.told.through, self._told.position

    def take(self, message: FilePieces) -> FilesHeld:
        if not SOURCE.fullmatch(message.source):
            return FilesHeld(number=message.number)
        answer, told = super().take(message), 0
        with contextlib.suppress(OSError):
            told = self._told.told.through if self._told.look() else 0
        return msgspec.structs.replace(answer, told=told)

    def _complete_file(self, source: str, piece: FilePiece, name: str) -> int | None:
        return super()._complete_file(source, piece, NEWEST_FILE if name == LATEST else name)

    def _is_older(self, source: str, version: str, path: Path, draft: Path) -> bool:
        """A host that comes back may bring a word of before. Where all have gone back to an earlier step, a host that
        has sent another word names an earlier one."""
        if path.name != NEWEST_FILE:
            return False
        before, self._pointed[source] = self._pointed.get(source), version
        return before in (None, version) and _step_in(draft) < _step_in(path)

    def _grow(self, source: str, piece: FilePiece) -> int | None:
        if piece.path == EVENTS_FILE:
            return self._events(source, piece)
        if LEDGER.fullmatch(piece.path):  # an earlier run may have had a life of that number with another ledger here
            path = self.folder / f"{piece.path.removesuffix('.jsonl')}-{source}.jsonl"
            return append_at(path, 1, piece.at, piece.data)
        return self._lines(source, piece)

    def _events(self, source: str, piece: FilePiece) -> int | None:
        """Write the events that the file lacks, each with the place that it came from."""
        if not self._told.look():
            return None  # a long file; the rest is read next time
        key = (piece.path, source, "")
        held = max(self._told.told.held.get(source, 0), self._grown.get(key, 0))
        if piece.at != held or not piece.data:
            return held
        lines, at = bytearray(), piece.at
        for line in piece.data.splitlines(keepends=True):
            at += len(line)
            for event in parse_events(line):
                if self._told.told.is_new(event):
                    lines += encoded({**event, CAME_FROM: f"{source}:{at}"}) + b"\n"
        if lines and _append(self.folder / EVENTS_FILE, 0, bytes(lines)) != len(lines):
            return None  # lines that fitted are recognised by their origin when they are read back
        self._told.look()
        self._grown[key] = at
        return at

    def _lines(self, source: str, piece: FilePiece) -> int:
        """Append lines for people, or samples. A new head believes the sender about bytes that are there."""
        key = (piece.path, source, piece.version)
        held = self._grown.get(key, piece.at)
        if piece.at == held and piece.data:
            path = self.folder / piece.path
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size > MOST_METRICS_BYTES:
                    os.replace(path, path.with_name(f"{path.stem}.1{path.suffix}"))
            held += _append(path, 1, piece.data)
        self._grown[key] = held
        return held


def _step_in(path: Path) -> int:
    """Step that a pointer names, -1 if none."""
    with contextlib.suppress(OSError):
        found = _STEP.search(read_given(path, _MOST_POINTER_BYTES))
        return int(found[1]) if found else -1
    return -1


def _append(path: Path, folders: int, data: bytes) -> int:
    """Append to a file that others write, too. Returns how many bytes fitted. Raises: OSError."""
    fd = open_below(path, APPEND, folders, make=True)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)
