"""Inside a cell: the head commands its limbs, and they obey for as long as it is there.

A head and each of its limbs share a socket that the fork server has made. One command is under way at a time; all limbs
carry it out, and each answers. Deaths are not reported here: the fork server sees them, and ends the whole cell.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from everstep.base.cause import Cause
from everstep.base.cell_keys import MAX_RANKS
from everstep.base.errors import EverstepError, ProtocolError, check
from everstep.base.plan import Rank, WorkerKey
from everstep.base.readable import readable
from everstep.runtime.host.board import Board
from everstep.runtime.host.cell_doors import Deputies
from everstep.runtime.link.context import WorkerContext

MOST_BYTES = 1 << 16
"""Largest command or answer; larger data goes by other ways."""
_LOOK_S = 0.02
_END_S = 5.0


class LimbLost(EverstepError):
    """A limb has gone, and nobody has ended this cell for it."""

    cause = Cause.LINK


class CellCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command to all limbs."""

    name: str
    arguments: dict[str, Any]


command_in = msgspec.msgpack.Decoder(CellCommand).decode
_rank = msgspec.msgpack.Decoder(Rank)


class Head:
    """The head's end of all channels. One thread calls it. A worker of one process is a head without limbs.

    tick: called every few milliseconds while it waits. Every waiting method raises `LimbLost`.
    """

    def __init__(self, context: WorkerContext, tick: Callable[[], None]) -> None:
        check(
            context.cell_rank == 0, f"rank {context.cell_rank} of worker {context.key} is no head: it awaits commands"
        )
        limbs = context.cell_size - 1
        check(len(context.cell_fds) == limbs, f"expected {limbs} sockets to limbs, got {context.cell_fds}")
        self._me = context.key
        self._tick = tick
        self._limbs = [socket.socket(fileno=fd) for fd in context.cell_fds]
        self._ranks: tuple[Rank, ...] | None = None
        self._asked = False
        self.deputies: Deputies | None = None
        """Those of the other parts, of a worker that spans hosts."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of all ranks that have introduced themselves, this one first."""
        return (os.getpid(), *(rank.pid for rank in self._ranks or ()))

    def meet(self) -> tuple[Rank, ...]:
        """The limbs, by rank, from their introductions; waits for the last of them."""
        if self._ranks is None:
            self._ranks = tuple(_rank.decode(said) for said in self._hear())
        return self._ranks

    def command(self, name: str, **arguments: Any) -> list[Any]:
        """Have all limbs carry out a command; returns their answers, by rank."""
        self.begin(name, **arguments)
        return self.answers()

    def begin(self, name: str, **arguments: Any) -> None:
        """Have all limbs carry out a command, while this process does other things. Answers to the one before that
        nobody has asked for are dropped."""
        self.meet()
        if self._asked:
            self.answers()
        data = _packed(CellCommand(name, arguments))
        for cell_rank, limb in enumerate(self._limbs, 1):
            try:
                limb.sendall(data)
            except OSError:
                self._await_end(cell_rank)
        if self.deputies is not None:
            self.deputies.send(data)
        self._asked = True

    def answers(self) -> list[Any]:
        """The answers to the command that was begun last, by rank."""
        self._asked = False
        found = [msgspec.msgpack.decode(answer) for answer in self._hear()]
        if self.deputies is not None:
            for answers in self.deputies.hear(MOST_BYTES * MAX_RANKS, self._tick):
                found += msgspec.msgpack.decode(answers)
        return found

    def close(self) -> None:
        """Let go of the limbs, and wait for a while until they have left."""
        if self.deputies is not None:
            self.deputies.close()
        until_s = time.monotonic() + _END_S
        for limb in self._limbs:
            with contextlib.suppress(OSError):  # it has gone
                limb.shutdown(socket.SHUT_WR)
        for limb in self._limbs:
            with limb, contextlib.suppress(OSError):  # it takes too long: the fork server will end it
                limb.settimeout(max(0.0, until_s - time.monotonic()))
                while limb.recv(MOST_BYTES):
                    pass
        self._limbs = []

    def _hear(self) -> list[bytes]:
        heard: dict[int, bytes] = {}
        waiting = {limb.fileno(): cell_rank for cell_rank, limb in enumerate(self._limbs, 1)}
        while waiting:
            ready = readable(waiting, _LOOK_S)
            self._tick()
            for fd in ready:
                cell_rank = waiting.pop(fd)
                heard[cell_rank] = _received(fd) or self._await_end(cell_rank)
        return [heard[cell_rank] for cell_rank in sorted(heard)]

    def _await_end(self, cell_rank: int) -> bytes:
        """Wait for the fork server to end this process; an error raised now would be taken for the cause."""
        threading.Event().wait(_END_S)
        raise LimbLost(f"rank {cell_rank} of worker {self._me} has left its cell")


class Limb:
    """A limb's end of its channel, and its row of the board.

    The end stays open until the process ends; from that a head learns that a limb has left.
    """

    def __init__(self, context: WorkerContext) -> None:
        check(context.cell_rank > 0, f"worker {context.key} asks its head for commands, but is one itself")
        check(len(context.cell_fds) == 1, f"expected one socket to the head, got {context.cell_fds}")
        self._me: WorkerKey = context.key
        self._head = context.cell_fds[0]
        self.row = Board.attach(context.board_fd).row(context.worker_id, context.cell_rank)

    def serve(self, act: Mapping[str, Callable[..., Any]]) -> None:
        """Introduce this rank, then carry out the head's commands until the head goes.

        act: functions by the names of commands; their results go to the head, and must be plain data.
        Raises: their exceptions; ProtocolError for a command that is not among them.
        """
        said: Any = Rank(os.getpid())
        self.row.set(phase="idle")
        while self._say(said) and (data := self._wait()):
            command = command_in(data)
            if command.name not in act:
                names = ", ".join(sorted(act)) or "none"
                raise ProtocolError(f"worker {self._me}: its head commands {command.name!r:.60}; known: {names}")
            said = act[command.name](**command.arguments)

    def _say(self, said: Any) -> bool:
        """Send a message; returns whether the head is there to hear it."""
        with contextlib.suppress(OSError):
            return os.write(self._head, _packed(said)) > 0
        return False

    def _wait(self) -> bytes:
        while not readable([self._head], _LOOK_S):
            self.row.tick()
        self.row.tick()
        return _received(self._head)


def _packed(said: Any) -> bytes:
    data = msgspec.msgpack.encode(said)
    check(len(data) <= MOST_BYTES, f"{len(data)} bytes are too many for a cell's channel, limit {MOST_BYTES}")
    return data


def _received(fd: int) -> bytes:
    """Receive one message; empty once the other side has gone."""
    try:
        return os.read(fd, MOST_BYTES)
    except ConnectionError:
        return b""
