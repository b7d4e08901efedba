"""The job's end of what hosts with directories of their own have to bring: it is written into the run directory.

A host asks how much of a file is there, and goes on from that byte; so nothing is lost with a connection, and what
comes twice is passed over. Names are matched, and nothing is written outside of the directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from everstep.base.below import APPEND, open_below
from everstep.base.given import open_given, portions
from everstep.observe.events import parse_events
from everstep.observe.told import CAME_FROM, ToldFile
from everstep.protocol.messages import FilePiece, PieceTaken
from everstep.runtime.link.address import EVENTS_FILE

LEDGER = re.compile(r"ledger/worker-\d{1,7}-\d{1,9}\.jsonl")
METRICS = re.compile(r"metrics/[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\.jsonl")
OUTPUT = re.compile(r"logs/output\.log")
WHOLE = re.compile(
    r"final/(model\.safetensors|digest\.json)|rehearsed\.json|dataset\.json"
    r"|checkpoints/latest\.json|profiles/[0-9A-Za-z][0-9A-Za-z_-]{0,63}/worker-\d{1,7}\.json\.gz"
)
"""What is brought whole."""
_SOURCE = re.compile(r"[0-9a-f]{16}(-\d{1,20})?")
_DIGEST = re.compile(r"[0-9a-f]{32}")
ASK_AGAIN = -1
NEWEST_FILE = "newest-checkpoint.json"
"""What hosts with disks of their own say which checkpoint is the newest, for a job that goes on."""
_LATEST = "checkpoints/latest.json"
MOST_METRICS_BYTES = 64 << 20
_encode = msgspec.json.Encoder().encode


def digest_of(path: Path, folders: int = 0) -> str:
    """BLAKE2b of a file, 32 hex digits. folders: as for `base.below`. Raises: OSError."""
    found = hashlib.blake2b(digest_size=16)
    with open_given(path, folders) as file:
        for data in portions(file):
            found.update(data)
    return found.hexdigest()


@dataclass
class _Coming:
    """A file that is being brought whole. held: so many bytes have come; found: their digest."""

    digest: str
    held: int = 0
    found: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))


class Receiving:
    """Takes pieces in, one at a time; each answer says how much of the file is there."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._told = ToldFile(run_dir / EVENTS_FILE)
        self._grown: dict[tuple[str, str], int] = {}
        self._coming: dict[str, _Coming] = {}
        self._done: dict[str, str] = {}

    @property
    def looked(self) -> tuple[int, int]:
        """Up to which step all are told in the job's events, as far as has been looked; and how many bytes that is."""
        return self._told.told.through, self._told.position

    def take(self, piece: FilePiece) -> PieceTaken:
        """A piece came, or the question how much is there. What the disk refuses is not there, and comes again."""
        at, told = ASK_AGAIN, 0
        with contextlib.suppress(OSError):
            at = self._take(piece)
            told = self._told.told.through if self._told.look() else 0
        return PieceTaken(path=piece.path, source=piece.source, at=at, told=told)

    def _take(self, piece: FilePiece) -> int:
        path = piece.path
        if not _SOURCE.fullmatch(piece.source):
            return ASK_AGAIN
        if path == EVENTS_FILE:
            return self._events(piece)
        if LEDGER.fullmatch(path):
            return self._ledger(piece)
        if METRICS.fullmatch(path) or OUTPUT.fullmatch(path):
            return self._grow(piece)
        if WHOLE.fullmatch(path) and _DIGEST.fullmatch(piece.digest):
            return self._whole(piece)
        return ASK_AGAIN

    def _events(self, piece: FilePiece) -> int:
        """Lines that nobody has told yet, each with the place that it came from."""
        source = piece.source
        if not self._told.look():
            return ASK_AGAIN  # a long file, of which the rest is read next time
        held = self._told.told.held.get(source, 0)
        held = max(held, self._grown.get((piece.path, source), 0))
        if piece.at != held or not piece.data:
            return held
        lines, at = bytearray(), piece.at
        for line in piece.data.splitlines(keepends=True):
            at += len(line)
            for event in parse_events(line):
                if self._told.told.is_new(event):
                    event[CAME_FROM] = f"{source}:{at}"
                    lines += _line(event)
        if lines:
            if _append(self._run_dir / EVENTS_FILE, 0, bytes(lines)) != len(lines):
                raise OSError("only a part fitted")  # what did is known by its place when it is read back
            self._told.look()
        self._grown[piece.path, source] = at
        return at

    def _ledger(self, piece: FilePiece) -> int:
        """Into a file of its own, as a life of that number may have written another one here, in an earlier run."""
        path = self._run_dir / f"{piece.path.removesuffix('.jsonl')}-{piece.source}.jsonl"
        held = path.stat().st_size if path.exists() else 0
        if piece.at == held and piece.data:
            held += _append(path, 1, piece.data)
        return held

    def _grow(self, piece: FilePiece) -> int:
        """Lines for people, or samples: a new coordinator takes the word of who brings them for what is there."""
        key = (piece.path, piece.source)
        held = self._grown.get(key, piece.at)
        if piece.at == held and piece.data:
            path = self._run_dir / piece.path
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size > MOST_METRICS_BYTES:
                    os.replace(path, path.with_name(f"{path.stem}.1{path.suffix}"))
            held += _append(path, 1, piece.data)
        self._grown[key] = held
        return held

    def _whole(self, piece: FilePiece) -> int:
        """Verified as it comes, so that nobody waits for a large one to be read again."""
        path = self._run_dir / (NEWEST_FILE if piece.path == _LATEST else piece.path)
        if self._done.get(piece.path) == piece.digest:
            return piece.size
        folders = len(path.relative_to(self._run_dir).parts) - 1
        partial = path.with_name(f".{path.name}-{piece.digest}.partial")
        come = self._coming.get(piece.path)
        if come is None or come.digest != piece.digest:
            partial.unlink(missing_ok=True)
            come = self._coming[piece.path] = _Coming(piece.digest)
        if piece.at == come.held and come.held + len(piece.data) <= piece.size:
            self._add(come, partial, folders, piece.data)
        if come.held < piece.size:
            return come.held
        del self._coming[piece.path]
        if come.found.hexdigest() != piece.digest:
            partial.unlink(missing_ok=True)
            return ASK_AGAIN
        if not piece.size:
            os.close(open_below(partial, APPEND, folders, make=True))
        os.replace(partial, path)
        self._done[piece.path] = piece.digest
        return piece.size

    def _add(self, come: _Coming, partial: Path, folders: int, data: bytes) -> None:
        if not data:
            return
        if _append(partial, folders, data, come.held, durably=True) != len(data):
            raise OSError("only a part fitted")
        come.found.update(data)
        come.held += len(data)


def _append(path: Path, folders: int, data: bytes, at: int | None = None, *, durably: bool = False) -> int:
    """Returns how much of it is there. folders: as for `base.below`. at: where it goes, None for the end. Raises:
    OSError."""
    fd = open_below(path, APPEND if at is None else os.O_WRONLY | os.O_CREAT, folders, make=True)
    try:
        written = os.write(fd, data) if at is None else os.pwrite(fd, data, at)
        if durably:
            os.fdatasync(fd)
        return written
    finally:
        os.close(fd)


def _line(event: dict[str, Any]) -> bytes:
    return _encode(event) + b"\n"
