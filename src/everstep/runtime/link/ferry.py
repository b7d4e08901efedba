"""The ferry of a host: a process that carries connections between this host's processes and other hosts' over MPI.

Apart from them because MPI's processes are there from its beginning to its end, and cannot be replaced: workers come
and go, and their ferry stays. It has the rank of the process that mpirun has started, and nothing else to lose: where
it ends, connections are made without it.

The other end of a way is dialled from a loopback address, which has two effects: it is on this host, whatever it was
asked for, and takes the connection for one from another host, which it is.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from everstep.base.errors import ProtocolError
from everstep.protocol.ferrying import (
    PIECE_BYTES,
    SILENT_S,
    WORD_BYTES,
    DialDoor,
    End,
    Ferry,
    FerryEffect,
    Give,
    Go,
    Message,
    Way,
    Word,
)
from everstep.runtime.link.landing import READY, VARIABLE, Landing, dialled, is_own
from everstep.runtime.process import die_with_parent, raise_descriptor_limit

_BACKLOG = 1024
_STRANGER_S = 10.0
_BUSY_S, _NAP_S = 0.0005, 0.002
_LOOK_S = 0.25
_WORD_TAG, _CONTENT_TAG = 0, 1


class Mail(Protocol):
    """Moves messages between ferries, in order between each two."""

    def send(self, message: Message) -> None:
        """Begin to. The content is not written to any more."""

    def turn(self) -> list[Message]:
        """What has come since, with the sender's rank; sends go on meanwhile."""

    @property
    def sent(self) -> bool:
        """Whether all has been."""


class TorchMail:
    """Over the default process group of torch.distributed, whatever that is made of."""

    def __init__(self, others: Sequence[int]) -> None:
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()
        self._receives = {rank: self._receive(rank, WORD_BYTES, _WORD_TAG) for rank in others}
        self._words: dict[int, Word] = {}

    def send(self, message: Message) -> None:
        self._begin(message.rank, memoryview(bytearray(message.word.packed())), _WORD_TAG)
        if message.word.content:
            self._begin(message.rank, message.content, _CONTENT_TAG)

    def turn(self) -> list[Message]:
        """Raises: ProtocolError."""
        for _ in range(len(self._sends)):
            if not self._sends[0][0].is_completed():
                self._sends.rotate(-1)
            else:
                self._sends.popleft()
        return [message for rank in tuple(self._receives) for message in self._come(rank)]

    @property
    def sent(self) -> bool:
        return not self._sends

    @property
    def whole(self) -> bool:
        """Whether nothing is waited for: what is under way when a process ends has MPI kill it."""
        return self.sent and not self._receives

    def _begin(self, rank: int, content: memoryview, tag: int) -> None:
        tensor = torch.frombuffer(content, dtype=torch.uint8)
        self._sends.append((torch.distributed.isend(tensor, dst=rank, tag=tag), tensor))

    def _receive(self, rank: int, size: int, tag: int) -> tuple[Any, torch.Tensor]:
        tensor = torch.empty(size, dtype=torch.uint8)
        return torch.distributed.irecv(tensor, src=rank, tag=tag), tensor

    def _come(self, rank: int) -> list[Message]:
        found = []
        while self._receives[rank][0].is_completed():
            content = self._receives[rank][1].numpy().data
            word = self._words.pop(rank, None)
            if word is None:
                word = Word.read(bytes(content))
                if word.content:
                    self._words[rank] = word
                    self._receives[rank] = self._receive(rank, word.content, _CONTENT_TAG)
                    continue
                content = memoryview(b"")
            found.append(Message(rank, word, content))
            if word.last:
                del self._receives[rank]
                return found
            self._receives[rank] = self._receive(rank, WORD_BYTES, _WORD_TAG)
        return found


@dataclass(eq=False)
class _Line:
    """A connection with a process of this host. way: None as long as it has not said where to."""

    sock: socket.socket
    since_s: float
    way: Way | None = None
    heard: bytes = b""
    given: deque[memoryview] = field(default_factory=deque)
    connecting: bool = False
    ending: bool = False
    events: int = 0


class Pier:
    """This host's side of a ferry: its listening socket, and the connections with processes of this host."""

    def __init__(self, ferry: Ferry, listener: socket.socket) -> None:
        self._ferry = ferry
        self._listener = listener
        self._poller = select.epoll()
        self._poller.register(listener, select.EPOLLIN)
        self._lines: dict[int, _Line] = {}
        self._deaf = False
        self._scratch = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        self._of_way: dict[Way, _Line] = {}

    def turn(self, now_s: float) -> bool:
        """Returns whether anything has moved."""
        moved = False
        for fd, events in self._poller.poll(0.0):
            moved = True
            if fd == self._listener.fileno():
                self._let_in(now_s)
            elif fd in self._lines:
                self._attend(self._lines[fd], events, now_s)
        return moved

    def look(self, now_s: float) -> None:
        """Time has passed."""
        if self._deaf:
            self._deaf = False
            self._poller.register(self._listener, select.EPOLLIN)
        for line in [line for line in self._lines.values() if line.way is None]:
            if now_s - line.since_s > _STRANGER_S:
                self._close(line)

    def do(self, effects: Sequence[FerryEffect], now_s: float) -> None:
        """What the other ferries' words amount to."""
        for effect in effects:
            if isinstance(effect, DialDoor):
                self._dial(effect, now_s)
                continue
            line = self._of_way.get(effect.way)
            if line is None:
                continue
            if isinstance(effect, Give):
                line.given.append(effect.content)
            elif isinstance(effect, End):
                line.ending = True
            if not line.connecting and not isinstance(effect, Go):
                self._give(line)
            self._watch(line)

    # ---- inside

    def _let_in(self, now_s: float) -> None:
        try:
            sock, _ = self._listener.accept()
            if is_own(sock):
                self._begin(_Line(sock, now_s))
            else:
                sock.close()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: others are served until the next look
            self._deaf = True
            self._poller.unregister(self._listener)

    def _begin(self, line: _Line) -> None:
        line.sock.setblocking(False)
        self._lines[line.sock.fileno()] = line
        self._watch(line)

    def _dial(self, effect: DialDoor, now_s: float) -> None:
        sock = None
        try:
            host, _, port = effect.address.rpartition(":")
            there = ipaddress.ip_address(host)
            sock = socket.socket(socket.AF_INET6 if there.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.bind(("::1" if there.version == 6 else "127.0.0.2", 0))
            sock.connect_ex((host, int(port)))
            line = _Line(sock, now_s, effect.way, connecting=True)
            self._begin(line)
        except (OSError, ValueError, OverflowError):
            if sock is not None:
                self._lines.pop(sock.fileno(), None)
                sock.close()
            self._ferry.hung_up(effect.way)
            return
        self._of_way[effect.way] = line

    def _attend(self, line: _Line, events: int, now_s: float) -> None:
        if line.connecting:
            if line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._close(line)
                return
            line.connecting = False
        if events & select.EPOLLOUT:
            self._give(line)
        if events & ~select.EPOLLOUT and line.sock.fileno() >= 0:
            if line.way is None:
                self._hear_where(line, now_s)
            else:
                self._read(line, line.way)
        self._watch(line)

    def _hear_where(self, line: _Line, now_s: float) -> None:
        try:
            while isinstance(found := dialled(line.heard), int):
                data = line.sock.recv(found)
                if not data:
                    raise ConnectionError("it hung up")
                line.heard += data
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            self._close(line)
            return
        way = self._ferry.open(*found, now_s)
        if way is None:
            self._close(line)
        else:
            line.way = way
            self._of_way[way] = line

    def _read(self, line: _Line, way: Way) -> None:
        if way.room <= 0:
            return
        content = self._scratch[: way.room]
        try:
            size = line.sock.recv_into(content.numpy().data)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if size > PIECE_BYTES // 4:
            self._scratch = torch.empty(PIECE_BYTES, dtype=torch.uint8)
            self._ferry.said(way, content[:size].numpy().data)
        elif size:
            self._ferry.said(way, content[:size].clone().numpy().data)
        else:
            self._close(line)

    def _give(self, line: _Line) -> None:
        took = 0
        try:
            while line.given:
                size = line.sock.send(line.given[0])
                took += size
                line.given[0] = line.given[0][size:]
                if not line.given[0]:
                    line.given.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._close(line)
            return
        if took and line.way is not None:
            self._ferry.took(line.way, took)
        if line.ending and not line.given:
            self._close(line)

    def _watch(self, line: _Line) -> None:
        """Ask the kernel for what can be dealt with: it tells of a hang-up again and again."""
        if line.sock.fileno() < 0:
            return
        reads = line.way is None or (line.way.room > 0 and not line.ending and not line.connecting)
        events = (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if line.given or line.connecting else 0)
        if events == line.events:
            return
        if not events:
            self._poller.unregister(line.sock)
        elif line.events:
            self._poller.modify(line.sock, events)
        else:
            self._poller.register(line.sock, events)
        line.events = events

    def _close(self, line: _Line) -> None:
        fd = line.sock.fileno()
        if fd < 0:
            return
        if line.events:
            self._poller.unregister(fd)
        self._lines.pop(fd, None)
        line.sock.close()
        if line.way is not None:
            self._of_way.pop(line.way, None)
            self._ferry.hung_up(line.way)


def carry(ferry: Ferry, mail: Mail, pier: Pier, leaves: int) -> None:
    """Until all ferries leave, which this one does once the descriptor `leaves` is at its end.

    Raises: ProtocolError if another ferry says nonsense.
    """
    leaving = select.poll()
    leaving.register(leaves, select.POLLIN)
    moved_s = looked_s = over_s = time.monotonic()
    while not ferry.through or not (mail.sent or time.monotonic() - over_s > SILENT_S):
        now_s = time.monotonic()
        over_s = over_s if ferry.through else now_s
        moved = pier.turn(now_s)
        for message in mail.turn():
            moved = True
            pier.do(ferry.heard(*message, now_s), now_s)
        if now_s - looked_s >= _LOOK_S:
            looked_s = now_s
            if leaving.poll(0):
                pier.do(ferry.leave(), now_s)
            pier.do(ferry.look(now_s), now_s)
            pier.look(now_s)
        while ferry.out:
            mail.send(ferry.out.popleft())
            moved = True
        if moved:
            moved_s = now_s
        elif now_s - moved_s > _BUSY_S:
            time.sleep(min((now_s - moved_s) / 50, _NAP_S))


def main() -> int:
    """One ferry. What it says first is `READY`, or why it cannot be one."""
    parser = argparse.ArgumentParser()
    for name in ("rank", "size", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args(sys.argv[2:])
    die_with_parent(arguments.parent)
    raise_descriptor_limit()
    first = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # MPI has words of its own
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # for its parent to act upon
    landing = Landing.here(os.environ)
    if landing is None:
        print(f"expected the name of this ferry's socket in {VARIABLE}, got none", file=first, flush=True)
        return 2
    listener = landing.listen(_BACKLOG)
    try:
        torch.distributed.init_process_group("mpi")
    except (RuntimeError, ValueError) as error:
        print(" ".join(str(error).split()), file=first, flush=True)
        return 2
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if (rank, size) != (arguments.rank, arguments.size):
        print(f"this process is {rank} of {size} in MPI's world", file=first, flush=True)
        return 2
    others = [other for other in range(size) if other != rank]
    ferry, mail = Ferry(rank, others, time.monotonic()), TorchMail(others)
    print(READY, file=first, flush=True)
    first.close()
    why = "others were silent when it was left"
    try:
        carry(ferry, mail, Pier(ferry, listener), leaves=0)
    except Exception as error:
        why = repr(error)
    if not mail.whole:
        print(f"MPI has ended on this host before its time: {why}", file=sys.stderr, flush=True)
        os._exit(1)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
