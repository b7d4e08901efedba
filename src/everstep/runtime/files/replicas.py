"""The head's end of replicas: hosts that stand by without the job's directory are sent what is new in it.

One message at a time for each host, read in a thread, so a slow one holds up nobody; and of what others are told
that it may be forgotten no more is said than those hosts have that could take over (`InStep`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from everstep.base.given import open_given
from everstep.protocol.messages import AnyMessage
from everstep.protocol.messages_base import ReplicaHeld, ReplicaHello, ReplicaPiece, ReplicaPieces
from everstep.runtime.files.carrier import PIECE_BYTES, whole_lines
from everstep.runtime.files.gathering import digest_of
from everstep.runtime.files.replica import GROWS, LATE_S, replicated
from everstep.runtime.link.address import EVENTS_FILE

MOST_BYTES = 1 << 20
MOST_PIECES = 500
_LOOK_S = 0.1
_END_WAIT_S = 5.0
_SHARE = 10
"""Looking for what is new takes no more of the time than one part in so many."""
Sender = Callable[[str, AnyMessage], None]


# ---- what to send. Pure


class FileSeen(NamedTuple):
    """A file as it is now. version: another one if it has been replaced."""

    version: str
    size: int


class Wanted(NamedTuple):
    """What a replica lacks of a file: from byte `at` on."""

    path: str
    version: str
    at: int


def wanted(seen: Mapping[str, FileSeen], held: Mapping[str, tuple[str, int]]) -> list[Wanted]:
    """What a replica lacks. seen: the files, in the order in which they are sent; held: what it has of them."""
    found = []
    for path, file in seen.items():
        version, at = held.get(path, ("", 0))
        if version != file.version or at > file.size:
            found.append(Wanted(path, file.version, 0))
        elif at < file.size:
            found.append(Wanted(path, file.version, at))
    return found


class _Had(NamedTuple):
    """What a host had of the moment as_of_s: the steps up to `through`. at_s: when it was last heard of."""

    at_s: float
    through: int
    as_of_s: float


class InStep:
    """Up to where hosts that could take over have the job's files. Pure: the time is passed in, in seconds."""

    def __init__(self) -> None:
        self._had: dict[str, _Had] = {}

    def had(self, host: str, now_s: float, through: int, as_of_s: float) -> None:
        """A host has all that there was at some moment, and with it the steps up to this one. It is counted on from
        then on."""
        before = self._had[host].through if host in self._had else 0
        self._had[host] = _Had(now_s, max(before, through), as_of_s)

    def said(self, host: str, now_s: float) -> None:
        """A host has said something: if it is counted on, it still is."""
        if host in self._had:
            self._had[host] = self._had[host]._replace(at_s=now_s)

    def least(self, now_s: float, through: int) -> int:
        """Up to which step all have it that are counted on: not those that have been silent for long. through: that of
        the job's own directory."""
        self._had = {host: had for host, had in self._had.items() if now_s - had.at_s < LATE_S}
        return min([through, *(had.through for had in self._had.values())])

    def behind(self, since_s: float, now_s: float) -> bool:
        """Whether one of them may lack what there was at this moment."""
        return any(had.as_of_s < since_s for had in self._had.values() if now_s - had.at_s < LATE_S)


# ---- of one host


class Supply:
    """What a replica gets, and has been sent. Used by one thread at a time."""

    def __init__(self, run_dir: Path, place: str, hello: ReplicaHello) -> None:
        self._run_dir = run_dir
        self._held = dict(hello.held) if hello.place == place else {}
        self._digests: dict[str, tuple[str, str]] = {}
        self._sent: list[tuple[ReplicaPiece, str]] = []

    @property
    def events_bytes(self) -> int:
        """So many bytes of the job's events are there."""
        return self._held.get(EVENTS_FILE, ("", 0))[1]

    def next(self) -> tuple[list[ReplicaPiece], bool]:
        """What it is sent next, and whether it lacks more than that. Raises: OSError."""
        self._sent, room, rest, seen = [], MOST_BYTES, False, _seen(self._run_dir)
        for want in wanted(seen, self._held):
            if room <= 0 or len(self._sent) >= MOST_PIECES:
                rest = True
                break
            with contextlib.suppress(OSError):  # it has been replaced, or is gone
                piece = self._piece(want)
                if piece is not None:
                    self._sent.append((piece, want.version))
                    room -= len(piece.data)
                    rest |= bool(piece.data) and want.at + len(piece.data) < seen[want.path].size
        return [piece for piece, _ in self._sent], rest

    def confirm(self, lacking: Mapping[str, int]) -> None:
        """The host has answered. A file of which it has nothing is begun anew, also one that is empty."""
        for piece, version in self._sent:
            there = lacking.get(piece.path, piece.at + len(piece.data))
            if there or piece.path not in lacking:
                self._held[piece.path] = (version, there)
            else:
                self._held.pop(piece.path, None)
        self._sent = []

    def _piece(self, want: Wanted) -> ReplicaPiece | None:
        path = self._run_dir / want.path
        if GROWS.fullmatch(want.path):
            data = whole_lines(path, want.path.count("/"), want.at)
            new = self._held.get(want.path, ("", 0))[0] != want.version
            return ReplicaPiece(path=want.path, version=want.version, at=want.at, data=data) if data or new else None
        digest = self._digest(want, path)
        with open_given(path, want.path.count("/")) as file:
            data, size = os.pread(file.fileno(), PIECE_BYTES, want.at), os.fstat(file.fileno()).st_size
        return ReplicaPiece(path=want.path, version=want.version, at=want.at, data=data, size=size, digest=digest)

    def _digest(self, want: Wanted, path: Path) -> str:
        version, digest = self._digests.get(want.path, ("", ""))
        if version != want.version:
            digest = digest_of(path, want.path.count("/"))
            self._digests[want.path] = (want.version, digest)
        return digest


def _seen(run_dir: Path) -> dict[str, FileSeen]:
    found: dict[str, FileSeen] = {}
    for path in replicated(run_dir):
        with contextlib.suppress(OSError):
            stat = os.stat(run_dir / path, follow_symlinks=False)
            grows = GROWS.fullmatch(path) is not None
            version = f"{stat.st_ino}" if grows else f"{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"
            if stat.st_size or not grows:
                found[path] = FileSeen(version, stat.st_size)
    return found


# ---- of all of them


@dataclass
class _Guest:
    """A host that stands by, over one connection."""

    host: str
    answers: asyncio.Queue[ReplicaHeld]
    task: asyncio.Task[None]


class Replicas:
    """In the coordinator's loop. place: by which the directory is known. send: to a connection. looked: up to which
    step all are told in the events, as far as has been looked, and how many bytes of them that was."""

    def __init__(self, run_dir: Path, place: str, send: Sender, looked: Callable[[], tuple[int, int]]) -> None:
        self._run_dir, self._place, self._send, self._looked = run_dir, place, send, looked
        self._guests: dict[str, _Guest] = {}
        self._in_step = InStep()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="replicas")

    def take(self, connection: str, message: AnyMessage) -> bool:
        """Whether this message of a connection is meant for this."""
        if isinstance(message, ReplicaHello):
            self.gone([connection])
            answers: asyncio.Queue[ReplicaHeld] = asyncio.Queue()
            supply = Supply(self._run_dir, self._place, message)
            task = asyncio.get_running_loop().create_task(self._supply(connection, message.host, supply, answers))
            self._guests[connection] = _Guest(message.host, answers, task)
            return True
        if isinstance(message, ReplicaHeld):
            if connection in self._guests:
                self._guests[connection].answers.put_nowait(message)
            return True
        return False

    def gone(self, connections: Iterable[str]) -> None:
        """These have ended."""
        for name in connections:
            guest = self._guests.pop(name, None)
            if guest is not None:
                guest.task.cancel()

    def told(self, through: int) -> int:
        """Up to which step others may forget what they know. through: all of these are told in the job's own events."""
        return self._in_step.least(time.monotonic(), through)

    async def caught_up(self) -> None:
        """Until those that are counted on have all that there is now; not for long."""
        begin_s = time.monotonic()
        while self._in_step.behind(begin_s, time.monotonic()) and time.monotonic() < begin_s + _END_WAIT_S:
            await asyncio.sleep(_LOOK_S / 4)

    async def _supply(self, connection: str, host: str, supply: Supply, answers: asyncio.Queue[ReplicaHeld]) -> None:
        loop, number, through = asyncio.get_running_loop(), 0, 0
        while True:
            looked, looked_bytes = self._looked()
            begin_s = time.monotonic()
            try:
                pieces, rest = await loop.run_in_executor(self._pool, supply.next)
            except OSError:
                await asyncio.sleep(_LOOK_S)
                continue
            pause_s = max(_LOOK_S, _SHARE * (time.monotonic() - begin_s))
            number += 1
            self._send(connection, ReplicaPieces(place=self._place, number=number, pieces=pieces, rest=rest))
            answer = await answers.get()
            while answer.number != number:
                answer = await answers.get()
            supply.confirm(answer.lacking)
            if supply.events_bytes >= looked_bytes:
                through = looked
            if rest or answer.lacking:
                self._in_step.said(host, time.monotonic())
            else:
                self._in_step.had(host, time.monotonic(), through, begin_s)
            if answer.lacking or not rest:
                await asyncio.sleep(pause_s)
