"""Between the hosts of one worker: each has a door, where the processes of the others read and write its memory.

A worker that spans hosts has a part on each: a few processes that share a memory (`parallel.cell_memory`), of which the
first has the door. What a process of one part needs of another it reads by itself, and a word that it writes into its
own memory it tells the others, so waiting for each other is the same as on one host. The head's commands come to the
door, too. All connections are those of peers: they prove the token, and name the cell that they belong to. When one
that is to live as long as the cell has ended, the cell is over, and this process with it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from everstep.base.cause import Cause
from everstep.base.errors import CheckpointCorrupt, CollectiveAborted, EverstepError, ProtocolError
from everstep.base.own_pages import own_pages
from everstep.runtime.link.peer import PeerConnection, PeerServer
from everstep.runtime.link.tls import Tls
from everstep.runtime.process import RETURNS

_PIECE_BYTES = 32 << 20
_LOOK_S = 1.0
_END_S = 5.0
_MEET_S = 30.0
_WRITTEN, _READ, _WRITE = "word", "read", "write"
_COPY, _COPIED, _KEEP, _DROP = "copy", "copied", "keep", "drop"
_MEMORY, _COMMANDS, _LIFE = "memory", "commands", "life"


class PartLost(EverstepError):
    """Another host's part of this worker has gone, and nobody has ended this process for it."""

    cause = Cause.LINK


class PartMemory(Protocol):
    """The memory of a part. memory: all of it."""

    memory: Any

    def receive(self, index: int, value: int) -> None:
        """A process of another part has written this word."""


@dataclass(frozen=True)
class CellPlan:
    """A worker that spans hosts, as one of its parts sees it. name: of this very life of it; part: number of this part,
    0 for the head's; doors: the addresses of all parts' doors; each: processes of a part. dropped: (part,
    number) of copies that nobody reads any more, which the part is to be told."""

    name: str
    part: int
    doors: tuple[str, ...]
    each: int
    dropped: deque[tuple[int, int]] = field(default_factory=deque, compare=False, repr=False)

    def part_of(self, rank: int) -> int:
        """The part that has this process of the worker."""
        return rank // self.each


class CellDoor:
    """The door of one part, in its first process."""

    def __init__(self, address: str, key: bytes, tls: Tls | None) -> None:
        """key: of the role `peer`."""
        self._memories: dict[int, PartMemory] = {}
        self._copies: dict[int, memoryview] = {}
        self._name: str | None = None
        self._named, self._over = threading.Event(), threading.Event()
        self._came: queue.SimpleQueue[PeerConnection] = queue.SimpleQueue()
        self._server = PeerServer(address, key, self._serve, tls)

    @property
    def address(self) -> str:
        return self._server.address

    def belong(self, name: str) -> None:
        """The cell of this name alone may come in."""
        self._name = name
        self._named.set()

    def show(self, stage: int, memory: PartMemory | None) -> None:
        """Have others read and write a stage's memory; None: no more. Copies of another that it had stay until they are
        dropped."""
        self._memories.pop(stage, None)
        if memory is not None:
            self._memories[stage] = memory

    def commander(self, timeout_s: float) -> PeerConnection | None:
        """The head's connection for commands; None if it has not come in time."""
        with contextlib.suppress(queue.Empty):
            return self._came.get(timeout=timeout_s)
        return None

    def close(self) -> None:
        """Let nobody in any more; the ends of connections mean nothing from now on."""
        self._over.set()
        self._server.close()

    def _serve(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        self._named.wait(_MEET_S)
        if self._name is None or request.get("cell") != self._name:
            raise ProtocolError(f"expected a process of worker {self._name}, got {request.get('cell')!s:.60}")
        what = request.get("what")
        if what == _MEMORY:
            self._share(connection, int(request["stage"]))
        elif what == _COMMANDS:
            self._came.put(connection)
            self._over.wait()
        elif what == _LIFE:
            end_with(connection, self._over)
        else:
            raise ProtocolError(f"expected memory, commands or life, got {what!s:.60}")

    def _share(self, connection: PeerConnection, stage: int) -> None:
        shown = self._memories.get(stage)
        if shown is None:
            raise ProtocolError(f"there is no stage {stage} here")
        while not self._over.is_set():
            if not connection.readable(_LOOK_S):
                continue
            what, *numbers = connection.recv_json()
            if what == _WRITTEN:
                shown.receive(*numbers)
            elif what == _COPY:
                connection.send_json(self._copy(shown, *numbers))
            elif what == _KEEP:
                self._keep(connection, *numbers)
            elif what == _DROP:
                self._copies.pop(numbers[0], None)
            elif what == _COPIED:
                number, at, size = numbers
                copy = self._copies.get(number)
                connection.send_json(copy is not None)
                if copy is not None:
                    with _extent(copy, at, size) as part:
                        connection.send_bytes([part])
            else:
                with _extent(shown.memory, *numbers) as part:
                    if what == _READ:
                        connection.send_bytes([part])
                    else:
                        connection.recv_into(part)
                        connection.send_json(True)

    def _copy(self, shown: PartMemory, number: int, total: int, at: int, to: int, size: int) -> list[Any]:
        """Copy bytes into a copy; returns as `_has`."""
        problem = self._has(number, total)
        if not problem:
            with _extent(shown.memory, at, size) as part, _extent(self._copies[number], to, size) as into:
                into[:] = part
        return problem

    def _keep(self, connection: PeerConnection, number: int, total: int, to: int, size: int) -> None:
        """Take bytes that follow into a copy."""
        problem = self._has(number, total)
        kept, at = (bytearray(size), 0) if problem else (self._copies[number], to)
        with _extent(kept, at, size) as into:
            connection.recv_into(into)
        connection.send_json(problem)

    def _has(self, number: int, total: int) -> list[Any]:
        """Have a copy of that number, which is made if there is none; returns [] or what the system says."""
        try:
            if number not in self._copies:
                self._copies.setdefault(number, own_pages(total))  # of those that come at once, one counts
        except OSError as error:
            return [error.errno, f"no {total} bytes for a copy of the state: {error.strerror}"]
        return []


@contextlib.contextmanager
def _extent(memory: Any, offset: int, size: int) -> Iterator[memoryview]:
    with memoryview(memory) as whole:
        if not 0 <= offset <= offset + size <= len(whole):
            raise ProtocolError(f"there are no {size} bytes at {offset} of {len(whole)}")
        with whole[offset : offset + size] as part:
            yield part


def end_with(connection: PeerConnection, over: threading.Event) -> None:
    """Wait for the end of a connection, which nobody uses, and end this process a little later, unless it is `over`:
    somebody who knows why the other end has gone will kill it before that. A host that is cut off is silent: what the
    parts tell each other would be waited for without end."""
    with contextlib.suppress(EverstepError, OSError):
        connection.notice_silence()
        while not connection.readable(_LOOK_S):
            if over.is_set():
                return
        connection.recv_json()
    if not over.wait(_END_S):
        os._exit(RETURNS)


class PartLines:
    """One process's connections to the memories of the other parts, each thread's own. Every method raises `PartLost`
    once a part has gone."""

    def __init__(self, plan: CellPlan, stage: int, call: Callable[[str, dict[str, Any]], PeerConnection]) -> None:
        """call: connects to a peer."""
        self.plan = plan
        self._request = {"cell": plan.name, "what": _MEMORY, "stage": stage}
        self._call = call
        self._open = threading.local()

    def read(self, part: int, offset: int, into: memoryview) -> None:
        """Read so many bytes of a part's memory from there."""
        self._fetch(part, [_READ], offset, into)

    def copy(self, part: int, number: int, total: int, offset: int, to: int, size: int) -> None:
        """Have a part copy bytes of its memory to a place in a copy of that number, which has so many bytes. Raises:
        OSError if it has no room for that."""
        with self._talking(part) as line:
            line.send_json([_COPY, number, total, offset, to, size])
            problem = line.recv_json()
        self._refuse(part, problem)

    def keep(self, part: int, number: int, total: int, to: int, data: memoryview) -> None:
        """As `copy`, of bytes that are here."""
        with self._talking(part) as line:
            line.send_json([_KEEP, number, total, to, len(data)])
            line.send_bytes([data])
            problem = line.recv_json()
        self._refuse(part, problem)

    def _refuse(self, part: int, problem: Sequence[Any]) -> None:
        if problem:
            number, text = problem
            raise OSError(number, f"part {part} of this worker, at {self.plan.doors[part]}: {text}")

    def copied(self, part: int, number: int, offset: int, into: memoryview) -> None:
        """As `read`, of a copy. Raises: CheckpointCorrupt if the part has none of that number."""
        self._fetch(part, [_COPIED, number], offset, into)

    def drop(self) -> None:
        """Tell the others of all copies in `CellPlan.dropped`."""
        with contextlib.suppress(IndexError):
            while True:
                part, number = self.plan.dropped.popleft()
                with self._talking(part) as line:
                    line.send_json([_DROP, number])

    def _fetch(self, part: int, what: list[Any], offset: int, into: memoryview) -> None:
        for at in range(0, len(into), _PIECE_BYTES):
            piece = into[at : at + _PIECE_BYTES]
            with self._talking(part) as line:
                line.send_json([*what, offset + at, len(piece)])
                there = what[0] != _COPIED or line.recv_json()
                if there:
                    line.recv_into(piece)
            if not there:
                raise CheckpointCorrupt(f"part {part} of this worker has no copy {what[1]} of the state")

    def write(self, part: int, offset: int, data: memoryview) -> None:
        """Write bytes there; they are there afterwards."""
        for at in range(0, len(data), _PIECE_BYTES):
            piece = data[at : at + _PIECE_BYTES]
            with self._talking(part) as line:
                line.send_json([_WRITE, offset + at, len(piece)])
                line.send_bytes([piece])
                line.recv_json()

    def tell(self, index: int, value: int) -> None:
        """This process has written a word: all other parts have to know."""
        for part in range(len(self.plan.doors)):
            if part != self.plan.part:
                with self._talking(part) as line:
                    line.send_json([_WRITTEN, index, value])

    def close(self) -> None:
        """End this thread's connections."""
        for line in self._open.__dict__.pop("lines", {}).values():
            line.close()

    @contextlib.contextmanager
    def _talking(self, part: int) -> Iterator[PeerConnection]:
        lines: dict[int, PeerConnection] = self._open.__dict__.setdefault("lines", {})
        try:
            if part not in lines:
                lines[part] = self._call(self.plan.doors[part], self._request)
            yield lines[part]
        except CollectiveAborted as error:
            _await_end(part, error)


class Deputies:
    """The head's connections to the first processes of the other parts, which pass its commands on. Methods raise
    `PartLost`."""

    def __init__(self, plan: CellPlan, door: CellDoor, call: Callable[[str, dict[str, Any]], PeerConnection]) -> None:
        self.plan, self.door, self.call = plan, door, call
        self._over = threading.Event()
        self._lines: dict[int, PeerConnection] = {}
        for part in range(1, len(plan.doors)):
            try:
                self._lines[part] = call(plan.doors[part], {"cell": plan.name, "what": _COMMANDS})
                life = call(plan.doors[part], {"cell": plan.name, "what": _LIFE})
            except EverstepError as error:
                _await_end(part, error)
            threading.Thread(target=end_with, args=(life, self._over), name="cell-life", daemon=True).start()

    def send(self, data: bytes) -> None:
        for part, line in self._lines.items():
            try:
                line.send_bytes([data])
            except CollectiveAborted as error:
                _await_end(part, error)

    def hear(self, most_bytes: int, tick: Callable[[], None]) -> list[bytes]:
        """The answer of each, by part."""
        found = []
        for part, line in self._lines.items():
            try:
                while not line.readable(0.02):
                    tick()
                found.append(bytes(line.recv_bytes(most_bytes)))
            except CollectiveAborted as error:
                _await_end(part, error)
        return found

    def close(self) -> None:
        """Let go of them: they leave."""
        self._over.set()
        for line in self._lines.values():
            with contextlib.suppress(EverstepError):
                line.send_bytes([])
        self.door.close()


def _await_end(part: int, error: EverstepError) -> None:
    """Wait for somebody to end this process: an error raised now would be taken for the cause."""
    threading.Event().wait(_END_S)
    raise PartLost(f"part {part} of this worker, on another host, has gone: {error}") from None
