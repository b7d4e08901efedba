"""What a host with a directory of its own has to bring to the job's: events, ledger, samples, final weights, traces.

Its files are the store of what is on the way: the processes of the host write them as ever, a thread reads what is new
and sends it piece by piece, the next when the one before is there. So a connection that breaks, or a head that is away
for long, costs nothing but disk; and what that refuses is counted by whoever wrote it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.base.below import write_atomically
from everstep.base.errors import ConfigError
from everstep.base.given import open_given
from everstep.protocol.messages import FilePiece, PieceTaken
from everstep.runtime.files.gathering import ASK_AGAIN, LEDGER, METRICS, OUTPUT, WHOLE, digest_of
from everstep.runtime.files.places import checkpoints_in
from everstep.runtime.link.address import CHECKPOINTS_DIR, EVENTS_FILE, METRICS_FOLDER, PROFILES_FOLDER

HELD_FILE = "held.json"
"""What has arrived of the files that are brought whole: their digests by name."""
TOLD_FILE = "told.json"
"""Up to which step all have been told in the job's events; workers keep what is to be told of those after it."""
PIECE_BYTES = 512 << 10
_MOST_LINE_BYTES = 8 << 20
_LOOK_S = 0.1
_ANSWER_S = 5.0
_NOTE_S = 1.0
_FOLDERS = ("ledger", METRICS_FOLDER, "logs", "final")
_ORDER = ("digest.json",)
"""Comes last of what is whole: who finds it finds the rest."""


@dataclass
class _Load:
    """One file. key: of its content, as far as that can be told without reading it. held: so much has arrived; asked:
    whether the other end has been asked how much is there."""

    path: str
    source: str
    whole: bool
    key: tuple[int, ...]
    held: int = 0
    asked: bool = False
    size: int = 0
    digest: str = ""
    file: Path = Path()


class Carrier:
    """One host's. folder: its run directory; source: what that is known by among all (`places.word_in_source`). send:
    to the coordinator; never blocks. lost: called with the name of a file that was rotated away unread."""

    def __init__(self, folder: Path, source: str, agent_id: str, send: Callable[[FilePiece], None]) -> None:
        self._folder = folder
        self._source = source
        self._agent_id = agent_id
        self._send = send
        self._loads: dict[str, _Load] = {}
        self._waiting: _Load | None = None
        self._sent: tuple[str, str, int] = ("", "", 0)
        self._deadline_s = 0.0
        self._pause_s = 0.0
        self._idle = False
        self._looks = 0
        self._closed = False
        self._changed = threading.Condition()
        self._arrived: dict[str, str] = {}
        self._told = self._told_noted = 0
        self._note_s = 0.0
        (folder / TOLD_FILE).unlink(missing_ok=True)  # of an earlier run
        self._thread = threading.Thread(target=self._run, name="everstep-carrier", daemon=True)
        self._thread.start()

    def taken(self, message: PieceTaken) -> None:
        """An answer came. Any thread."""
        with self._changed:
            self._told = message.told
            load = self._waiting
            if load is None or (load.path, load.source) != (message.path, message.source):
                return  # of a piece that was given up
            self._waiting = None
            if message.at == ASK_AGAIN:
                load.asked, self._pause_s = False, 2 * _LOOK_S
            elif load.asked and message.at <= load.held and self._sent[2]:
                load.asked, self._pause_s = False, 2 * _LOOK_S  # its disk is full, or it had come before
                load.held = message.at
            else:
                load.held, load.asked = message.at, True
            self._changed.notify_all()

    def begin_anew(self) -> None:
        """The connection is a new one: what was sent over the old one may be lost."""
        with self._changed:
            self._waiting = None
            for load in self._loads.values():
                load.asked = False
            self._changed.notify_all()

    def finish(self, timeout_s: float) -> bool:
        """Until all that is there has arrived; whether that came in time."""
        with self._changed:
            looks = self._looks  # of the files as they are now
            return self._changed.wait_for(lambda: self._idle and self._looks > looks + 1, timeout_s)

    def close(self) -> None:
        """No more is sent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=5.0)
        with contextlib.suppress(OSError):
            self._note_told()

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                if self._waiting is not None and time.monotonic() > self._deadline_s:
                    self._waiting.asked, self._waiting = False, None
                if self._waiting is not None:
                    self._changed.wait(_LOOK_S)
                    continue
                pause_s, self._pause_s = self._pause_s, 0.0
                if pause_s:
                    self._changed.wait(pause_s)
                    continue
            piece, failed = None, False
            with contextlib.suppress(OSError):
                self._note_told()
            try:
                piece = self._next()
            except OSError:
                failed = True
            with self._changed:
                if piece is None:
                    self._idle = not failed
                    self._looks += 1
                    self._changed.notify_all()
                    self._changed.wait(_LOOK_S)
                    continue
                self._idle = False
            self._send(piece)

    def _next(self) -> FilePiece | None:
        """The next thing to say; None if all has arrived. What cannot be read holds up nothing else.

        Raises: OSError if there is nothing to say but of that.
        """
        failed: OSError | None = None
        for name, file in self._found():
            try:
                load = self._load(name, file)
                piece = self._piece(load)
            except FileNotFoundError:  # it has been replaced, or rotated away
                continue
            except OSError as error:
                failed = error
                continue
            if piece is not None:
                with self._changed:
                    self._waiting, self._deadline_s = load, time.monotonic() + _ANSWER_S
                    self._sent = (load.path, load.source, len(piece.data))
                return piece
        if failed is not None:
            raise failed
        return None

    def _piece(self, load: _Load) -> FilePiece | None:
        if load.whole:
            if load.asked and load.held >= load.size:
                self._note(load)
                return None
            data = _read(load.file, load.path.count("/"), load.held, PIECE_BYTES) if load.asked else b""
        else:
            if load.file.stat().st_size <= load.held and load.asked:
                return None
            data = whole_lines(load.file, load.path.count("/"), load.held) if load.asked else b""
            if load.asked and not data:
                return None
        return FilePiece(
            agent_id=self._agent_id,
            path=load.path,
            source=load.source,
            at=load.held,
            data=data,
            size=load.size,
            digest=load.digest,
        )

    def _found(self) -> list[tuple[str, Path]]:
        """All files that are to be brought, in the order in which they are."""
        return sorted(self._files(), key=lambda item: (item[1].name in _ORDER, item[0] != EVENTS_FILE))

    def _load(self, name: str, file: Path) -> _Load:
        """What is known of a file; one that was replaced by another begins anew."""
        found = file.stat()
        whole = WHOLE.fullmatch(name) is not None
        key = (found.st_ino, found.st_size, found.st_mtime_ns) if whole else (found.st_ino,)
        load = self._loads.get(name)
        if load is None or load.key != key:
            rotates = METRICS.fullmatch(name) or OUTPUT.fullmatch(name)
            source = f"{self._source}-{found.st_ino}" if rotates else self._source
            load = _Load(name, source, whole, key, file=file)
            if whole:
                load.size, load.digest = found.st_size, digest_of(file, name.count("/"))
            self._loads[name] = load
        return load

    def _files(self) -> Iterator[tuple[str, Path]]:
        top = self._folder
        if (top / EVENTS_FILE).exists():
            yield EVENTS_FILE, top / EVENTS_FILE
        with contextlib.suppress(ConfigError):
            if (latest := checkpoints_in(top) / "latest.json").exists():
                yield f"{CHECKPOINTS_DIR}/latest.json", latest
        found = [*top.glob("*.json"), *(top / PROFILES_FOLDER).glob("*/worker-*.json.gz")]
        found += [path for folder in _FOLDERS for path in (top / folder).glob("*")]
        for path in found:
            name = path.relative_to(top).as_posix()
            if any(pattern.fullmatch(name) for pattern in (LEDGER, METRICS, OUTPUT, WHOLE)):
                yield name, path

    def _note_told(self) -> None:
        """Now and then, and in the end."""
        told, now_s = self._told, time.monotonic()
        if told != self._told_noted and (self._closed or now_s > self._note_s):
            self._note_s = now_s + _NOTE_S
            write_atomically(self._folder / TOLD_FILE, json.dumps({"through": told}) + "\n")
            self._told_noted = told

    def _note(self, load: _Load) -> None:
        """What this host's own disk refuses is noted at a later look; nothing else waits for it."""
        if self._arrived.get(load.path) != load.digest:
            arrived = {**self._arrived, load.path: load.digest}
            with contextlib.suppress(OSError):
                write_atomically(self._folder / HELD_FILE, json.dumps(arrived) + "\n")
                self._arrived = arrived


def _read(path: Path, folders: int, at: int, most: int) -> bytes:
    with open_given(path, folders) as file:
        return os.pread(file.fileno(), most, at)


def whole_lines(path: Path, folders: int, at: int) -> bytes:
    """What follows in a file up to the end of a line; b"" if none has ended yet. folders: as for `base.below`."""
    most = PIECE_BYTES
    while True:
        data = _read(path, folders, at, most)
        cut = data.rfind(b"\n") + 1
        if cut or len(data) < most or most > _MOST_LINE_BYTES:
            return data[:cut] if cut or most <= _MOST_LINE_BYTES else data
        most *= 2
