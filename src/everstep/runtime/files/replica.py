"""A replica: what a host that stands by, and does not see the job's directory, has of that one's files.

The head sends what is new, and the host puts it into a directory of its own, in which it leads the job should it have
to. Files that grow are the same bytes up to some line; all others are there whole or not at all. Names are matched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.base.below import open_below, write_atomically
from everstep.base.given import read_json
from everstep.protocol.messages_base import ReplicaPiece, ReplicaPieces
from everstep.runtime.files.places import PAGES, REPLICA_FILE
from everstep.runtime.link.address import DATASET_FILE, EVENTS_FILE, JOB_FILE, NOTES_FILE

GROWS = re.compile(
    r"events\.jsonl|ledger/worker-\d{1,7}-\d{1,9}(-[0-9a-f]{16})?\.jsonl"
    r"|metrics/[A-Za-z0-9_][A-Za-z0-9._-]{0,69}\.jsonl|logs/output(\.1)?\.log"
)
WHOLE = re.compile(
    "|".join(map(re.escape, (JOB_FILE, DATASET_FILE, NOTES_FILE, *PAGES, "newest-checkpoint.json")))
    + r"|final/(model\.safetensors|digest\.json)|chaos/[0-9][0-9.-]{0,40}|(wandb|otel|notify)/published\.json"
    r"|profiles/[0-9A-Za-z][0-9A-Za-z_-]{0,63}/worker-\d{1,7}\.json\.gz"
)
FOLDERS = ("ledger", "metrics", "logs", "final", "chaos", "wandb", "otel", "notify", "profiles/*")
"""Where such files lie, beside the directory itself."""
_BEFORE, _DRAFT = ".before", ".before-draft"
_MOST_WHOLE_BYTES = 1 << 44
_Versions = dict[str, str]


class Replica:
    """One, in this folder. Thread-safe. place: the directory that it is of, "" if it is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self.place, self._versions, self._complete = _remembered(folder)
        self._coming: dict[str, tuple[str, Any]] = {}

    def state(self, in_step_s: float | None) -> ReplicaState:
        """How it stands. in_step_s: as `ReplicaState` has it."""
        return ReplicaState(self._complete, in_step_s, (self._folder / _BEFORE).is_dir())

    def fall_back(self) -> None:
        """Nobody fills it any more: if it is not complete, what it was before takes its place. Raises: OSError."""
        with self._lock:
            before = self._folder / _BEFORE
            if not self._complete and before.is_dir():
                if replicated(before):  # else it has taken its place, and that could not be noted
                    for path in replicated(self._folder):
                        (self._folder / path).unlink()
                    _move(before, self._folder)
                self._remember(complete=True)
            shutil.rmtree(before, ignore_errors=True)

    def held(self) -> dict[str, tuple[str, int]]:
        """The version and size of each of its files."""
        with self._lock:
            return {path: (version, self._size(path)) for path, version in self._versions.items()}

    def there(self, pieces: Iterable[ReplicaPiece]) -> dict[str, int]:
        """How much there is of the files that these pieces are of, in the versions that these are of."""
        with self._lock:
            return {piece.path: self._there(piece) for piece in pieces}

    def take(self, message: ReplicaPieces) -> dict[str, int]:
        """What the head has sent. Returns how much there is of files for which a piece had no effect: it comes again.

        Raises: OSError if nothing can be written.
        """
        with self._lock:
            if message.place != self.place:
                self._begin(message.place)
            self._begin_versions(message.pieces)
            lacking: dict[str, int] = {}
            for piece in message.pieces:
                if not self._put(piece):
                    lacking[piece.path] = self._there(piece)
            if not (message.rest or lacking or self._complete):
                self._remember(complete=True)
                shutil.rmtree(self._folder / _BEFORE, ignore_errors=True)
            return lacking

    # ---- with the lock held

    def _begin(self, place: str) -> None:
        """Nothing of what is here is of the directory that this is a replica of from now on. What was complete is kept
        until that is again: who fills it may be lost meanwhile."""
        draft, before, complete = self._folder / _DRAFT, self._folder / _BEFORE, self._complete
        shutil.rmtree(draft, ignore_errors=True)
        self._coming.clear()
        self._remember(complete=False, begun="")  # so that what fails, or is killed, before all has gone is done again
        _move(self._folder, draft)
        if complete:
            shutil.rmtree(before, ignore_errors=True)
            os.replace(draft, before)
        shutil.rmtree(draft, ignore_errors=True)
        self._remember(begun=place)

    def _begin_versions(self, pieces: Iterable[ReplicaPiece]) -> None:
        """Files that are other ones by now are begun anew, before that is remembered."""
        found: _Versions = {}
        for piece in pieces:
            if GROWS.fullmatch(piece.path) and self._versions.get(piece.path) != piece.version and not piece.at:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                os.close(open_below(self._folder / piece.path, flags, piece.path.count("/"), make=True))
                found[piece.path] = piece.version
        if found:
            self._versions.update(found)
            self._remember()

    def _put(self, piece: ReplicaPiece) -> bool:
        if GROWS.fullmatch(piece.path) and not piece.digest:
            known = self._versions.get(piece.path) == piece.version
            return known and self._size(piece.path) == piece.at and _write(self._folder / piece.path, piece)
        if WHOLE.fullmatch(piece.path) and piece.at + len(piece.data) <= piece.size <= _MOST_WHOLE_BYTES:
            return self._put_whole(piece)
        return False

    def _put_whole(self, piece: ReplicaPiece) -> bool:
        """Verified as it comes; it gets its name when all of it has."""
        path = self._folder / piece.path
        partial = path.with_name(f".{path.name}.partial")
        if piece.at == 0:
            partial.unlink(missing_ok=True)
            self._coming[piece.path] = (piece.version, hashlib.blake2b(digest_size=16))
        version, digest = self._coming.get(piece.path, ("", None))
        there = partial.stat().st_size if partial.exists() else 0
        if version != piece.version or there != piece.at or not _write(partial, piece):
            self._coming.pop(piece.path, None)
            return False
        digest.update(piece.data)
        if piece.at + len(piece.data) < piece.size:
            return True
        del self._coming[piece.path]
        if digest.hexdigest() != piece.digest:
            partial.unlink()
            return False
        os.replace(partial, path)
        self._versions[piece.path] = piece.version
        self._remember()
        return True

    def _there(self, piece: ReplicaPiece) -> int:
        """Nothing of a file counts that is here in another version."""
        return self._size(piece.path) if self._versions.get(piece.path) == piece.version else 0

    def _size(self, path: str) -> int:
        """What counts of a file; of one that is still coming nothing does."""
        if path in self._coming or not (GROWS.fullmatch(path) or WHOLE.fullmatch(path)):
            return 0
        with contextlib.suppress(OSError):
            return (self._folder / path).stat().st_size
        return 0

    def _remember(self, complete: bool | None = None, begun: str | None = None) -> None:
        """begun: it is a replica of that directory from now on, of which it has nothing. Raises: OSError; then it is
        as it was."""
        complete = self._complete if complete is None else complete
        place, versions = (self.place, self._versions) if begun is None else (begun, {})
        said = {"place": place, "complete": complete, "versions": versions}
        write_atomically(self._folder / REPLICA_FILE, json.dumps(said) + "\n")
        self.place, self._versions, self._complete = place, versions, complete


def _move(source: Path, target: Path) -> None:
    """All that replicas have. Raises: OSError."""
    target.mkdir(exist_ok=True)
    for path in replicated(source):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / path, target / path)


def _write(path: Path, piece: ReplicaPiece) -> bool:
    """At its place in the file; what fitted only in part is not there."""
    fd = open_below(path, os.O_WRONLY | os.O_CREAT, piece.path.count("/"), make=True)
    try:
        whole = os.pwrite(fd, piece.data, piece.at) == len(piece.data)
        if not whole:
            os.ftruncate(fd, piece.at)
        return whole
    finally:
        os.close(fd)


def _remembered(folder: Path) -> tuple[str, _Versions, bool]:
    """Of which directory a folder is a replica, what versions its files have, and whether it was complete."""
    try:
        said = read_json(folder / REPLICA_FILE, 64 << 20)
        place, complete = str(said["place"])[:64], said["complete"] is True
        versions = {str(path): str(version)[:100] for path, version in said["versions"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "", {}, False
    return place, {path: v for path, v in versions.items() if GROWS.fullmatch(path) or WHOLE.fullmatch(path)}, complete


def replicated(folder: Path) -> list[str]:
    """The files of a directory that replicas have, in the order in which they are sent: who finds the digest of the
    weights finds the rest, and events come before what they tell of."""
    found = [path for path in folder.glob("*") if path.is_file()]
    found += [path for name in FOLDERS for path in folder.glob(f"{name}/*")]
    names = sorted(path.relative_to(folder).as_posix() for path in found)
    return sorted(
        (name for name in names if GROWS.fullmatch(name) or WHOLE.fullmatch(name)),
        key=lambda name: (name.endswith("digest.json"), name not in (JOB_FILE, EVENTS_FILE)),
    )


# ---- whether it may be led from. Pure

LATE_S = 30.0
"""For so long others that have more are let go first; and a head counts on a replica of which it hears nothing."""


@dataclass(frozen=True)
class ReplicaState:
    """How a replica stands. complete: it has had all that there was once; in_step_s: when it last had (monotonic), None
    if not in this life; before: it had all of another directory before it was begun anew."""

    complete: bool
    in_step_s: float | None
    before: bool = False

    @property
    def usable(self) -> bool:
        """Whether the job can be led in it at all."""
        return self.complete or self.before

    def may_lead(self, led_s: float, now_s: float) -> bool:
        """Whether this host may take the lease. led_s: when somebody was last seen to have it. With files that are
        older than that only if nobody else has taken it for long, and with a part of them never."""
        fresh = self.complete and self.in_step_s is not None and self.in_step_s >= led_s - LATE_S
        return fresh or (self.usable and now_s - led_s >= LATE_S)

    def words(self, led_s: float) -> str:
        """What the files of this host may lack, in words; "" if nothing is known to be. led_s: when whoever led was
        surely there."""
        if self.complete and self.in_step_s is not None:
            old_s = led_s - self.in_step_s
            old = "" if old_s < 1.0 else f"{old_s:.0f} s old"
        else:
            old = "of an earlier time"
        return f"this host's files are {old}: what only the lost host had since is lost" if old else ""
