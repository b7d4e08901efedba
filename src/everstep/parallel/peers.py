"""One generation's sockets for small records: each member is connected with each other one.

Apart from gloo's group, where a record passes through several threads per hop and its size must be known before. Here
the waiting thread itself reads, ticks, and looks for aborts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store

from everstep.base.errors import CollectiveAborted, InvariantViolation, ProtocolError, StaleGeneration
from everstep.base.ports import OnTick
from everstep.parallel.fence import Fence
from everstep.runtime.link.handshake import GREETING_BYTES, PEER, PROOF_BYTES, TAG_BYTES, Caller, Seals, peer_keys
from everstep.runtime.link.listening import family_of, listen
from everstep.runtime.link.silence import LINK_SILENT_S, notice_silence
from everstep.runtime.link.tls import Tls, TlsSocket, said
from everstep.runtime.link.unproven_connections import Complaints, UnprovenConnections
from everstep.runtime.link.wire import ends

log = logging.getLogger(__name__)

_WAIT_MS = 5
_GRACE_S = 0.1
_HEADER = struct.Struct("<Q40s")
_RETRY_S = 0.01
_MOST_RECORD_BYTES = 1 << 30
"""Members of one host have no such limit, so a job finds it when the first other host joins."""
_AT_ONCE_BYTES = 32 << 10
"""Bytes that a late peer's kernel takes in any case."""
_BACKLOG = 1024


class Door(NamedTuple):
    """Address where a member takes connections."""

    host: str
    port: int

    def text(self) -> str:
        return f"{self.host} {self.port}"

    @staticmethod
    def parse(text: str) -> Door:
        host, port = text.split()
        return Door(host, int(port))


class Meeting(NamedTuple):
    """The members that meet in a generation, this one among them, and the group's own part of a store.

    host: address to listen on. key: the token of the role `peer`, which members prove to each other; tls: certificates
    for connections that need TLS. Objects made for a meeting raise CollectiveAborted from each method that waits,
    within milliseconds after the fence went down.
    """

    worker_ids: tuple[int, ...]
    me: int
    store: Store
    host: str
    fence: Fence
    key: bytes
    tls: Tls | None = None


class PeerSockets:
    """Connections to the other members of one generation; all methods are called by one thread.

    tick is called every few milliseconds while a method waits. what: tells several objects of one meeting apart.
    """

    def __init__(self, meeting: Meeting, tick: OnTick, what: str = "records") -> None:
        self._worker_ids, self._me, store, self._host, self._fence, self._key, self._tls = meeting
        self._store = PrefixStore(what, store)
        self._tick = tick
        self._sockets: dict[int, socket.socket] = {}
        self._seals_of: dict[int, Seals] = {}

    def connect(self) -> None:
        """Meet the others: call members with smaller ids, be called by those with larger ones, all at the same time.

        Raises: CollectiveAborted.
        """
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(listen(self._host, _BACKLOG))
            unproven = UnprovenConnections(listener, peer_keys(self._key), Complaints(log.warning), self._tls)
            stack.callback(unproven.close)
            doors = self._doors(Door(*listener.getsockname()[:2]))
            calls = [_Call(w, doors[w], self._key, self._name(self._me), self._tls) for w in doors if w < self._me]
            for call in calls:
                stack.callback(call.give_up)
            callers = {self._name(w): w for w in doors if w > self._me}
            self._meet(unproven, calls, callers)
        for sock in self._sockets.values():
            notice_silence(sock, LINK_SILENT_S)

    def lines(self) -> dict[int, tuple[socket.socket, Seals]]:
        """Connections by worker id, for other code that moves bytes over them; `retire` closes them."""
        return {worker_id: (sock, self._seals_of[worker_id]) for worker_id, sock in self._sockets.items()}

    def gather(self, key: bytes, payload: bytes) -> dict[int, bytes]:
        """Payloads of all members, in the order of their ids; `key` (40 bytes) must be the same at all members.

        Raises: CollectiveAborted; InvariantViolation if a peer is at another record.
        """
        poller = select.poll()
        talks = [_Talk(w, sock, self._seals_of[w], key, payload) for w, sock in self._sockets.items()]
        pending = {talk.sock.fileno(): talk for talk in talks}
        found = {self._me: payload}
        for descriptor, talk in tuple(pending.items()):
            self._guarded(talk.send, talk.worker_id)
            if isinstance(talk.sock, TlsSocket) and talk.sock.pending():  # it came with the last frame
                self._guarded(talk.receive, talk.worker_id)
            if talk.events():
                poller.register(talk.sock, talk.events())
            else:
                found[talk.worker_id] = pending.pop(descriptor).payload()
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
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()
        self._seals_of.clear()

    # ---- inside

    def _name(self, worker_id: int) -> str:
        """Name with which a member calls; it bears the generation, so members of another one are refused."""
        return f"{self._fence.generation} {worker_id}"

    def _meet(self, unproven: UnprovenConnections, calls: list[_Call], callers: dict[str, int]) -> None:
        waiting = set(calls)
        while waiting or callers:
            now_s = time.monotonic()
            poller = select.poll()
            poller.register(unproven, select.POLLIN)
            due = {call.fileno(): call for call in waiting if call.ready(now_s)}
            for call in due.values():
                poller.register(call, call.events())
            for descriptor, _ in self._poll(poller):
                if descriptor in due and self._advance(call := due.pop(descriptor)):
                    waiting.discard(call)
            for sock, seals in unproven.turn(0.0):
                worker_id = callers.pop(seals.name, None)
                if worker_id is None:
                    sock.close()
                else:
                    self._sockets[worker_id], self._seals_of[worker_id] = sock, seals

    def _advance(self, call: _Call) -> bool:
        """Go on with a call; returns whether they have met."""
        try:
            seals = call.go_on()
        except (OSError, ProtocolError) as error:
            why = ProtocolError(said(error)) if isinstance(error, ssl.SSLError) else error
            # A member that has not answered for so long will not answer now.
            if isinstance(error, TimeoutError) or not call.again(time.monotonic()):
                self._lost(call.worker_id, why)
            return False
        if seals is None:
            return False
        self._sockets[call.worker_id], self._seals_of[call.worker_id] = call.hand_over(), seals
        return True

    def _doors(self, own: Door) -> dict[int, Door]:
        """Addresses of the others, by worker id."""
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

    def _guarded(self, operation: Callable[[], None], worker_id: int) -> None:
        try:
            operation()
        except OSError as error:
            self._lost(worker_id, error)

    def _lost(self, worker_id: int, error: Exception) -> None:
        """Report a lost peer, after a pause: a peer that leaves because of a new plan hangs up, too, and that plan may
        be on its way here."""
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until:
            self._fence.check()
            time.sleep(0.001)
        self.retire()
        raise CollectiveAborted(
            f"generation {self._fence.generation}: worker {worker_id} is lost: {error}", [worker_id]
        )


class _Call:
    """One call to a member until both have proved the token. Early errors are tried again: a member that published its
    address does listen, or has left."""

    def __init__(self, worker_id: int, door: Door, key: bytes, name: str, tls: Tls | None) -> None:
        self.worker_id = worker_id
        self._door = door
        self._key = key
        self._name = name
        self._tls = tls
        self._sock: socket.socket | None = None
        self._caller: Caller | None = None
        self._heard = b""
        self._greeted = False
        self._failed_s: float | None = None
        self._next_s = 0.0

    def fileno(self) -> int:
        return -1 if self._sock is None else self._sock.fileno()

    def ready(self, now_s: float) -> bool:
        """Whether there is something to poll for; calls if it is time to."""
        if self._sock is None and now_s >= self._next_s:
            self._sock = socket.socket(family_of(self._door.host), socket.SOCK_STREAM)
            self._sock.setblocking(False)
            notice_silence(self._sock, LINK_SILENT_S)
            self._sock.connect_ex((self._door.host, self._door.port))
        return self._sock is not None

    def events(self) -> int:
        connecting = self._caller is None and not isinstance(self._sock, TlsSocket)
        return select.POLLOUT if connecting else select.POLLIN

    def go_on(self) -> Seals | None:
        """Go on; returns the seals once both have proved the token. Raises: OSError, ProtocolError."""
        sock = self._sock
        if sock is None:
            return None
        if self._caller is None:
            sock = self._sock = self._secured(sock)
            with contextlib.suppress(BlockingIOError):
                if isinstance(sock, TlsSocket):
                    sock.do_handshake()
                self._caller = Caller(self._key, PEER, self._name, ends(sock))
            return None
        want = PROOF_BYTES if self._greeted else GREETING_BYTES
        data = sock.recv(want - len(self._heard))
        if not data:
            raise ConnectionError("it hung up during the handshake")
        self._heard += data
        if len(self._heard) < want:
            return None
        heard, self._heard = self._heard, b""
        if self._greeted:
            return self._caller.accept(heard)
        sock.send(self._caller.answer(heard))
        self._greeted = True
        return None

    def _secured(self, sock: socket.socket) -> socket.socket:
        """The connected socket, over TLS where it is used. Raises: OSError."""
        if isinstance(sock, TlsSocket):
            return sock
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        between = ends(sock)
        return self._tls.call(sock, between) if self._tls is not None and self._tls.covers(between) else sock

    def again(self, now_s: float) -> bool:
        """Prepare another try after an error. Returns False if the errors have gone on for too long."""
        self.give_up()
        self._caller, self._heard, self._greeted = None, b"", False
        self._next_s = now_s + _RETRY_S
        self._failed_s = now_s if self._failed_s is None else self._failed_s
        return now_s - self._failed_s <= _GRACE_S

    def hand_over(self) -> socket.socket:
        """Give the connection to the caller."""
        sock, self._sock = self._sock, None
        if sock is None:
            raise InvariantViolation("a call that has ended was handed over")
        return sock

    def give_up(self) -> None:
        """Hang up, if it has not been handed over."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None


class _Talk:
    """One peer's part of one gather: our frame on its way out, the peer's frame on its way in."""

    def __init__(self, worker_id: int, sock: socket.socket, seals: Seals, key: bytes, payload: bytes) -> None:
        self.worker_id = worker_id
        self.sock = sock
        self._seals = seals
        self._key = key
        header = _HEADER.pack(len(payload), key)
        self._out = memoryview(header + payload + seals.tag(header, payload))
        self._size = len(self._out)
        self._in = bytearray(_HEADER.size)
        self._have = 0
        self._body = False

    def events(self) -> int:
        """Events to poll for; 0 when both directions are done."""
        done = self._body and self._have == len(self._in)
        return (select.POLLOUT if len(self._out) > self._held else 0) | (0 if done else select.POLLIN)

    @property
    def _held(self) -> int:
        """Number of last bytes that wait for the peer's header. The peer may come much later than we, and a kernel
        whose reader takes nothing for `LINK_SILENT_S` counts as silent."""
        return 0 if self._body or self._size <= _AT_ONCE_BYTES else self._size - _HEADER.size

    def send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            ready = self._out[: len(self._out) - self._held]
            if ready:
                self._out = self._out[self.sock.send(ready) :]

    def receive(self) -> None:
        """Receive; never read beyond the frame: the next one may be there already."""
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
        length, _ = _HEADER.unpack(self._in)
        if length > _MOST_RECORD_BYTES:
            raise ConnectionError(f"expected a record of at most {_MOST_RECORD_BYTES} bytes, got one of {length}")
        self._in += bytes(length + TAG_BYTES)
        self._body = True

    def payload(self) -> bytes:
        """The peer's payload. Raises: CollectiveAborted if it was damaged, or comes from another sender;
        InvariantViolation if it is another record."""
        whole = memoryview(self._in)
        try:
            self._seals.check(whole[-TAG_BYTES:], whole[:-TAG_BYTES])
        except ProtocolError as error:
            raise CollectiveAborted(
                f"a record of worker {self.worker_id} came damaged: {error}", [self.worker_id]
            ) from None
        _, key = _HEADER.unpack_from(self._in)
        if key != self._key:
            raise InvariantViolation(f"expected record {self._key!r} of worker {self.worker_id}, got {key!r}")
        return bytes(whole[_HEADER.size : -TAG_BYTES])
