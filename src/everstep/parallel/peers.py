"""One generation's sockets for small records: each member is connected with each other one.

Apart from the gloo group because there a record passes through several threads per hop and its size must be known
before; here whoever waits reads by itself, ticks by itself, and looks for aborts by itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import xxhash
from torch._C._distributed_c10d import PrefixStore, Store

from everstep.base.errors import CollectiveAborted, InvariantViolation, StaleGeneration
from everstep.base.ports import OnTick
from everstep.parallel.fence import Fence

_WAIT_MS = 5
_GRACE_S = 0.1
_HEADER = struct.Struct("<QQ40s")
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<q{_TOKEN_BYTES}s")
_RETRY_S = 0.01
_BACKLOG = 1024


class Door(NamedTuple):
    """Where a member takes connections, and the word that callers must say."""

    host: str
    port: int
    token: bytes

    def text(self) -> str:
        return f"{self.host} {self.port} {self.token.hex()}"

    @staticmethod
    def parse(text: str) -> Door:
        host, port, token = text.split()
        return Door(host, int(port), bytes.fromhex(token))


class Meeting(NamedTuple):
    """Who meets in a generation, this one among them, and where: the part of a store that is this group's own.

    host: address to listen on. Of what is made for a meeting, every method that waits raises CollectiveAborted within
    milliseconds after the fence went down.
    """

    worker_ids: tuple[int, ...]
    me: int
    store: Store
    host: str
    fence: Fence


class PeerSockets:
    """Connections to the other members of one generation; all methods are called by one thread.

    tick is called every few milliseconds while a method waits.
    """

    def __init__(self, meeting: Meeting, tick: OnTick) -> None:
        self._worker_ids, self._me, store, self._host, self._fence = meeting
        self._store = PrefixStore("records", store)
        self._tick = tick
        self._sockets: dict[int, socket.socket] = {}
        self._token = os.urandom(_TOKEN_BYTES)

    def connect(self) -> None:
        """Meet the others: call those with smaller ids, be called by those with larger ones.

        Raises: CollectiveAborted.
        """
        family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((self._host, 0), family=family, backlog=_BACKLOG) as listener:
            listener.setblocking(False)
            host, port = listener.getsockname()[:2]
            doors = self._doors(Door(host, port, self._token))
            for worker_id in (w for w in doors if w < self._me):
                self._sockets[worker_id] = self._call(worker_id, doors[worker_id])
            callers = {worker_id for worker_id in doors if worker_id > self._me}
            while callers:
                callers.discard(self._answer(listener, callers))
        for sock in self._sockets.values():
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def gather(self, key: bytes, payload: bytes) -> dict[int, bytes]:
        """The payloads of all, in the order of their ids; `key` (40 bytes) must be the same at everybody's.

        Raises: CollectiveAborted; InvariantViolation if a peer is at another record.
        """
        digest = xxhash.xxh3_64_intdigest(key + payload)
        frame = _HEADER.pack(digest, len(payload), key) + payload
        poller = select.poll()
        pending = {sock.fileno(): _Talk(w, sock, key, frame) for w, sock in self._sockets.items()}
        found = {self._me: payload}
        for talk in pending.values():
            self._guarded(talk.send, talk.worker_id)
            poller.register(talk.sock, talk.events())
        while pending:
            for descriptor, events in self._poll(poller):
                talk = pending[descriptor]
                if events & select.POLLOUT:
                    self._guarded(talk.send, talk.worker_id)
                if events & ~select.POLLOUT:
                    self._guarded(talk.receive, talk.worker_id)
                if talk.events():
                    poller.modify(descriptor, talk.events())
                else:
                    found[talk.worker_id] = talk.payload()
                    poller.unregister(descriptor)
                    del pending[descriptor]
        return dict(sorted(found.items()))

    def retire(self) -> None:
        """Hang up."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()

    # ---- inside

    def _doors(self, own: Door) -> dict[int, Door]:
        """The others' doors by worker id."""
        try:
            self._store.set(str(self._me), own.text())
            texts = self._store.multi_get([str(w) for w in self._worker_ids])
        except StaleGeneration as error:
            raise CollectiveAborted(str(error)) from None
        except RuntimeError as error:
            self._fence.check()
            raise CollectiveAborted(f"generation {self._fence.generation}: no doors: {error}") from None
        self._fence.check()
        return {w: Door.parse(t.decode()) for w, t in zip(self._worker_ids, texts, strict=True) if w != self._me}

    def _poll(self, poller: select.poll) -> list[tuple[int, int]]:
        ready = poller.poll(_WAIT_MS)
        self._fence.check()
        self._tick()
        return ready

    def _await(self, sock: socket.socket, event: int, until: float = inf) -> None:
        poller = select.poll()
        poller.register(sock, event)
        while not self._poll(poller) and time.monotonic() < until:
            pass

    def _guarded(self, operation: Callable[[], None], worker_id: int) -> None:
        try:
            operation()
        except OSError as error:
            self._lost(worker_id, error)

    def _lost(self, worker_id: int, error: OSError) -> None:
        """A peer that leaves because of a new plan hangs up too: that plan may be on its way to us."""
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until:
            self._fence.check()
            time.sleep(0.001)
        self.retire()
        raise CollectiveAborted(
            f"generation {self._fence.generation}: worker {worker_id} is lost: {error}", [worker_id]
        )

    def _call(self, worker_id: int, door: Door) -> socket.socket:
        """A connection refused at first is tried again: who said where it listens does listen, or has left."""
        hello = _HELLO.pack(self._me, door.token)
        until = time.monotonic() + _GRACE_S
        while True:
            sock = socket.socket(socket.AF_INET6 if ":" in door.host else socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                sock.connect_ex((door.host, door.port))
                self._await(sock, select.POLLOUT)
                error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not error and sock.send(hello) == len(hello):
                    return sock
            except BaseException:
                sock.close()
                raise
            sock.close()
            if time.monotonic() > until:
                self._lost(worker_id, OSError(error, os.strerror(error)))
            time.sleep(_RETRY_S)

    def _answer(self, listener: socket.socket, expected: set[int]) -> int:
        """Take one call; returns whose it was, or -1 if a stranger's."""
        self._await(listener, select.POLLIN)
        try:
            sock, _ = listener.accept()
        except OSError:
            return -1
        with contextlib.ExitStack() as refused:
            refused.callback(sock.close)
            sock.setblocking(False)
            self._await(sock, select.POLLIN, time.monotonic() + _GRACE_S * 10)
            with contextlib.suppress(OSError, struct.error):
                worker_id, token = _HELLO.unpack(sock.recv(_HELLO.size))
                if token == self._token and worker_id in expected:
                    refused.pop_all()
                    self._sockets[worker_id] = sock
                    return int(worker_id)
        return -1


class _Talk:
    """One peer's part of one gathering: our frame on its way there, its frame on its way here."""

    def __init__(self, worker_id: int, sock: socket.socket, key: bytes, frame: bytes) -> None:
        self.worker_id = worker_id
        self.sock = sock
        self._key = key
        self._out = memoryview(frame)
        self._in = bytearray(_HEADER.size)
        self._have = 0
        self._body = False

    def events(self) -> int:
        """What to poll for; 0 when both directions are done."""
        done = self._body and self._have == len(self._in)
        return (select.POLLOUT if self._out else 0) | (0 if done else select.POLLIN)

    def send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._out = self._out[self.sock.send(self._out) :]

    def receive(self) -> None:
        """Never reads beyond the frame: the next one may be there already."""
        while self._have < len(self._in):
            try:
                count = self.sock.recv_into(memoryview(self._in)[self._have :])
            except BlockingIOError:
                return
            if not count:
                raise ConnectionError("it closed the connection")
            self._have += count
            if not self._body and self._have == _HEADER.size:
                self._begin_body()

    def _begin_body(self) -> None:
        self._digest, length, key = _HEADER.unpack(self._in)
        if key != self._key:
            raise InvariantViolation(f"expected record {self._key!r} of worker {self.worker_id}, got {key!r}")
        self._in, self._have, self._body = bytearray(length), 0, True

    def payload(self) -> bytes:
        """Raises: CollectiveAborted if it came damaged."""
        found = bytes(self._in)
        if xxhash.xxh3_64_intdigest(self._key + found) != self._digest:
            raise CollectiveAborted(f"a record of worker {self.worker_id} came damaged", [self.worker_id])
        return found
