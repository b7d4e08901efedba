"""The copy of the job's directory on a standby host that does not see that directory.

The head fills it (`standby_senders`), and the host leads the job in it if it has to. Files that grow have the same
bytes up to some line; all others are there whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from everstep.base.below import write_atomically
from everstep.base.given import read_json
from everstep.protocol.messages import AnyMessage, FilePieces, FilesHeld, StandbyHello
from everstep.protocol.roles import JOB
from everstep.runtime.files.file_receiver import FileReceiver
from everstep.runtime.files.file_sets import TO_STANDBY
from everstep.runtime.files.host_directory import COPY_FILE
from everstep.runtime.link.address import COORDINATOR_FILE
from everstep.runtime.link.control_client import ControlClient
from everstep.runtime.link.handshake import role_token
from everstep.runtime.link.tls import Tls

_BEFORE = ".before"
_MOVING = ".before-moving"
"""Folder of files of a complete copy on their way to or from `.before`. While it is there, and the copy is incomplete,
all files of that copy, and no others, are here or in the copy's own folder."""


class DirectoryCopy(FileReceiver):
    """The copy in this folder. source: the word of the copied directory, "" if the copy is new."""

    def __init__(self, folder: Path) -> None:
        self.source, versions, self._complete = _remembered(folder)
        self._noted = dict(versions)
        super().__init__(folder, TO_STANDBY, versions)

    def state(self, in_step_s: float | None) -> CopyState:
        """State of the copy. in_step_s: as `CopyState` has it."""
        before = any((self.folder / name).is_dir() for name in (_BEFORE, _MOVING))
        return CopyState(self._complete, in_step_s, before and not self._complete)

    def fall_back(self) -> None:
        """Give up on being filled: an incomplete copy is replaced by its complete predecessor. Raises: OSError."""
        before, moving = self.folder / _BEFORE, self.folder / _MOVING
        if self.state(None).before:
            self._forget()
            if before.is_dir():
                for name in copied(self.folder):
                    (self.folder / name).unlink()
                os.replace(before, moving)
            _move(moving, self.folder)
            self._remember(complete=True)
        for folder in (before, moving):
            shutil.rmtree(folder, ignore_errors=True)

    def take(self, message: FilePieces) -> FilesHeld:
        try:
            if message.source != self.source:
                self._begin(message.source)
            answer = super().take(message)
            if answer.has_all(message) and not self._complete:
                self._remember(complete=True)
                shutil.rmtree(self.folder / _BEFORE, ignore_errors=True)
            elif self.versions != self._noted:
                self._remember()
        except OSError:  # for example a full disk
            return FilesHeld(number=0)
        return answer

    def _begin(self, source: str) -> None:
        """Begin a copy of another directory; no file of the old copy counts for it. A complete old copy is kept until
        the new one is complete: the head that fills it may be lost meanwhile."""
        before, moving = self.folder / _BEFORE, self.folder / _MOVING
        if self._complete:
            if before.is_dir():  # older than this copy
                shutil.rmtree(before)
            moving.mkdir(exist_ok=True)
        self._forget()
        if moving.is_dir():
            _move(self.folder, moving)
            os.replace(moving, before)
        for name in copied(self.folder):
            (self.folder / name).unlink()
        self.source = source
        self._remember()

    def _forget(self) -> None:
        """Note that no file of the copy counts, before files are moved: what is interrupted is then done again."""
        self._coming.clear()
        self.versions.clear()
        self.source = ""
        self._remember(complete=False)

    def _remember(self, complete: bool | None = None) -> None:
        """Raises: OSError."""
        complete = self._complete if complete is None else complete
        said = {"place": self.source, "complete": complete, "versions": self.versions}
        write_atomically(self.folder / COPY_FILE, json.dumps(said) + "\n")
        self._noted, self._complete = dict(self.versions), complete


def copied(folder: Path) -> list[str]:
    """Names of the files that are copied from, or to, a directory."""
    return [name for name, path in TO_STANDBY.found(folder) if path.is_file()]


def _move(source: Path, target: Path) -> None:
    """Move all files of a copy. Raises: OSError."""
    target.mkdir(exist_ok=True)
    for name in copied(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, target / name)


def _remembered(folder: Path) -> tuple[str, dict[str, str], bool]:
    """Note of a copy: (word of the copied directory, versions of its files, whether it was complete)."""
    try:
        said = read_json(folder / COPY_FILE, 64 << 20)
        place, complete = str(said["place"])[:64], said["complete"] is True
        versions = {str(path): str(version)[:100] for path, version in said["versions"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "", {}, False
    return place, {name: version for name, version in versions.items() if TO_STANDBY.has(name)}, complete


class CopyLink:
    """Connection over which the head fills the copy in this folder until it is closed. host: name of this one. tls: as
    `ControlClient` has it. The coordinator.json in the folder, kept up by others, says where the head is."""

    def __init__(self, folder: Path, token: bytes, host: str, tls: Tls | None) -> None:
        self._copy = DirectoryCopy(folder)
        self._in_step_s: float | None = None
        self._changed = threading.Condition()
        self._client = ControlClient(
            *(folder / COORDINATOR_FILE, role_token(token, JOB), JOB, f"copy-{host}"),
            *(lambda: StandbyHello(host=host[:100]), self._receive),
            tls=tls,
        )

    def state(self) -> CopyState:
        """State of the copy now. Any thread."""
        with self._changed:
            return self._copy.state(self._in_step_s)

    def wait_in_step(self, timeout_s: float) -> bool:
        """Wait until the copy has all files as of a moment ago; returns whether it has in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._in_step_s is not None, timeout_s)

    def close(self) -> None:
        self._client.close(0.0)

    def _receive(self, message: AnyMessage) -> None:
        if not isinstance(message, FilePieces):
            return
        asked_s = time.monotonic()
        answer = self._copy.take(message)
        if answer.has_all(message):
            with self._changed:
                self._in_step_s = asked_s
                self._changed.notify_all()
        self._client.send(answer)


# ---- whether the job may be led in it. Pure

LATE_S = 30.0
"""Time in which hosts with newer files take the lease first, and for which a head counts on a silent standby host."""


@dataclass(frozen=True)
class CopyState:
    """State of a copy. complete: it has had all files once; in_step_s: when it last had (monotonic), None if not in
    this life; before: its predecessor, a copy of another directory, was complete."""

    complete: bool
    in_step_s: float | None
    before: bool = False

    @property
    def usable(self) -> bool:
        """Whether the job can be led in it at all."""
        return self.complete or self.before

    def may_lead(self, led_s: float, now_s: float) -> bool:
        """Whether this host may take the lease. led_s: when somebody was last seen to have it. With older files than
        that it has to wait until nobody else has taken it for long; with incomplete ones it never may."""
        fresh = self.complete and self.in_step_s is not None and self.in_step_s >= led_s - LATE_S
        return fresh or (self.usable and now_s - led_s >= LATE_S)

    def words(self, led_s: float) -> str:
        """Words about data that the files of this host may lack; "" if none is known. led_s: the last moment when the
        leader was surely there."""
        if self.complete and self.in_step_s is not None:
            old_s = led_s - self.in_step_s
            old = "" if old_s < 1.0 else f"{old_s:.0f} s old"
        else:
            old = "of an earlier time"
        return f"this host's files are {old}: what only the lost host had since is lost" if old else ""
