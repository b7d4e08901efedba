"""Connections between workers for bulk data (healing): a handshake, a JSON request, then runs of bytes.

Blocking and threaded on purpose: the streams are gigabytes long, few, and run beside a training loop that asyncio would
have to share. `sendall` of memoryviews and `recv_into` of existing memory make no copies in between.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from everstep.base.doors import at_port, host_of, split_at_port
from everstep.base.errors import CollectiveAborted, EverstepError, ProtocolError, check
from everstep.base.readable import readable
from everstep.protocol.messages import MAX_FRAME_BYTES
from everstep.runtime.link.handshake import PEER, TAG_BYTES, Seals, peer_keys
from everstep.runtime.link.listening import listen
from everstep.runtime.link.silence import LINK_SILENT_S, notice_silence
from everstep.runtime.link.tls import Tls, TlsSocket
from everstep.runtime.link.unproven_connections import Complaints, UnprovenConnections
from everstep.runtime.link.wire import (
    HANDSHAKE_TIMEOUT_S,
    handshake_client,
    recv_exact_into,
    recv_frame,
    secured,
    send_frame,
)

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 30.0
MAX_CONNECTIONS = 256
_BACKLOG = 1024
_ACCEPT_WAIT_S = 0.5
_PIECE_BYTES = 1 << 20
_SIZE = struct.Struct(">Q")


class PeerConnection:
    """One conversation between two workers. Blocking; one thread at a time in each direction.

    Every operation raises `CollectiveAborted` when the other side is gone, when nothing moves for `timeout_s`, and when
    another thread calls `abort`; `ProtocolError` when the other side sends something unexpected. `sent_bytes` counts
    the bytes of `send_bytes`. All messages are tagged, and so are runs of bytes that leave the host without TLS.
    """

    def __init__(self, sock: socket.socket, seals: Seals, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(timeout_s)
        self._sock = sock
        self._seals = seals
        self.sent_bytes = 0

    def notice_silence(self) -> None:
        """From now on it ends when the other host has been silent for `LINK_SILENT_S`, which only its kernel can be."""
        notice_silence(self._sock, LINK_SILENT_S)

    def readable(self, timeout_s: float) -> bool:
        """Whether something can be read within the timeout."""
        there = isinstance(self._sock, TlsSocket) and self._sock.pending() > 0
        fd = self._sock.fileno()
        return there or fd < 0 or bool(readable([fd], timeout_s))  # a closed one raises in the next operation

    def send_json(self, value: Any) -> None:
        """Send a small JSON-able value."""
        with _faults("sending to a peer"):
            send_frame(self._sock, self._seals, json.dumps(value).encode())

    def recv_json(self, most_bytes: int = MAX_FRAME_BYTES) -> Any:
        """Receive a value of `send_json`. Raises: ProtocolError beyond `most_bytes`."""
        with _faults("receiving from a peer"):
            body = recv_frame(self._sock, self._seals, most_bytes)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise ProtocolError("expected JSON from a peer, got something else") from None

    def send_bytes(self, parts: Sequence[memoryview | bytes | bytearray]) -> None:
        """Send the parts as one run of bytes; none of them is copied."""
        views = [memoryview(part).cast("B") for part in parts if len(memoryview(part)) > 0]
        size = sum(v.nbytes for v in views)
        with _faults("sending to a peer"):
            send_frame(self._sock, self._seals, _SIZE.pack(size))
            if self._seals.bulk_tags:
                tag = self._seals.bulk_tag()
                for piece in _pieces(views):
                    tag.add(piece)
                    self._sock.sendall(piece)
                self._sock.sendall(tag.tag())
            else:
                for view in views:
                    self._sock.sendall(view)
        self.sent_bytes += size

    def recv_into(self, out: memoryview | bytearray) -> None:
        """Receive one `send_bytes` into memory of just that many bytes. Raises: ProtocolError for another size."""
        view = memoryview(out).cast("B")
        size = self._recv_size()
        if size != view.nbytes:
            raise ProtocolError(f"expected {view.nbytes} bytes from a peer, it sends {size}")
        self._fill([view])

    def recv_at_most(self, room: memoryview) -> memoryview:
        """Receive one `send_bytes` into this room; returns the part that it fills. Raises: ProtocolError if it is
        larger."""
        size = self._recv_size()
        if size > room.nbytes:
            raise ProtocolError(f"expected at most {room.nbytes} bytes from a peer, it sends {size}")
        self._fill([room[:size]])
        return room[:size]

    def recv_bytes(self, max_bytes: int) -> bytearray:
        """Receive one `send_bytes` of unknown size. Raises: ProtocolError beyond `max_bytes`."""
        size = self._recv_size()
        if size > max_bytes:
            raise ProtocolError(f"expected at most {max_bytes} bytes from a peer, it sends {size}")
        data = bytearray(min(size, _PIECE_BYTES))
        self._fill(_growing(data, size))
        return data

    def abort(self) -> None:
        """From any thread: make pending operations raise at once."""
        _hang_up(self._sock)

    def close(self) -> None:
        """End the conversation; the other side sees the end of the stream."""
        self.abort()
        self._sock.close()

    def __enter__(self) -> PeerConnection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _recv_size(self) -> int:
        with _faults("receiving from a peer"):
            header = recv_frame(self._sock, self._seals, _SIZE.size)
        if len(header) != _SIZE.size:
            raise ProtocolError(f"expected the size of what a peer sends, got {len(header)} bytes")
        return int(_SIZE.unpack(header)[0])

    def _fill(self, views: Iterable[memoryview]) -> None:
        with _faults("receiving from a peer"):
            if not self._seals.bulk_tags:
                for view in views:
                    recv_exact_into(self._sock, view)
                return
            check, tag = self._seals.bulk_check(), bytearray(TAG_BYTES)
            for piece in _pieces(views):
                with piece:
                    recv_exact_into(self._sock, piece)
                    check.add(piece)
            recv_exact_into(self._sock, memoryview(tag))
            check.check(tag)


def _pieces(views: Iterable[memoryview]) -> Iterator[memoryview]:
    """Cut views into pieces, so that one is on its way while the next one's tag is made."""
    return (view[at : at + _PIECE_BYTES] for view in views for at in range(0, view.nbytes, _PIECE_BYTES))


def _growing(data: bytearray, size: int) -> Iterator[memoryview]:
    """Room for so many bytes, grown only as bytes arrive: the other end may only claim that so many come."""
    done = 0
    while done < size:
        with memoryview(data) as whole, whole[done:] as room:
            yield room
        done = len(data)
        data.extend(bytes(min(size - done, done)))


class _faults(contextlib.AbstractContextManager[None]):
    """Turns errors of sockets into `CollectiveAborted`."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) or (isinstance(error, ProtocolError) and "connection ended" in str(error)):
            raise CollectiveAborted(f"{self._doing} failed: {error}") from None


PeerHandler = Callable[[PeerConnection, dict[str, Any]], None]


class PeerServer:
    """Listens for peers on a port of the kernel's choice; each request is handled in a daemon thread of its own.

    key: the token of the role `peer`. Clients that have not proved it wait beside the others and get no thread.
    handler: called with the connection and the request (a JSON object); the connection is closed when it returns. tls:
    as for `UnprovenConnections`.
    """

    def __init__(self, host: str, key: bytes, handler: PeerHandler, tls: Tls | None = None) -> None:
        self._handler = handler
        self._listener = listen(host, _BACKLOG)
        self._complaints = Complaints(log.warning)
        self._unproven = UnprovenConnections(self._listener, peer_keys(key), self._complaints, tls)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._deaf_until_ns = 0
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="peer-server", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """ "host:port", in the form of `Member.address`."""
        return at_port(self.host, self.port)

    def deaf_until(self, end_ns: int) -> None:
        """A scripted fault: conversations break, and no other begins, until `end_ns` (monotonic)."""
        self._deaf_until_ns = end_ns
        self.abort_all()

    def abort_all(self) -> None:
        """Make every conversation in progress raise; go on listening."""
        with self._lock:
            for sock in self._open:
                _hang_up(sock)

    def close(self) -> None:
        """Stop listening and end every conversation."""
        self._closed = True
        _hang_up(self._listener)  # its thread sees that, and ends
        self.abort_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            for sock, seals in self._unproven.turn(_ACCEPT_WAIT_S):
                with self._lock:
                    full = len(self._open) >= MAX_CONNECTIONS
                    if full or self._closed or time.monotonic_ns() < self._deaf_until_ns:
                        sock.close()
                        continue
                    self._open.add(sock)
                threading.Thread(target=self._serve, args=(sock, seals), name="peer", daemon=True).start()
        self._unproven.close()

    def _serve(self, sock: socket.socket, seals: Seals) -> None:
        try:
            try:
                connection = PeerConnection(sock, seals)
                request = connection.recv_json()
                if not isinstance(request, dict):
                    raise ProtocolError("expected a request as a JSON object")
            except (OSError, EverstepError) as error:
                log.info("a peer made no request: %s", error)
                return
            try:
                self._handler(connection, request)
            except EverstepError as error:
                log.info("a peer's request ended early: %s", error)
            except Exception:
                log.exception("handling a peer's request failed")
        finally:
            with self._lock:
                self._open.discard(sock)
            _hang_up(sock)
            sock.close()


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def peer_connect(
    address: str,
    key: bytes,
    request: dict[str, Any],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    tls: Tls | None = None,
) -> PeerConnection:
    """Connect to a `PeerServer` at "host:port", prove the token of the role `peer` and make the request.

    Raises: CollectiveAborted if nobody answers there; ProtocolError if it is not a peer of this job.
    """
    check(bool(host_of(address)), f"expected a peer's address as host:port, got {address!r}")
    try:
        sock = socket.create_connection(split_at_port(address), timeout=min(HANDSHAKE_TIMEOUT_S, timeout_s))
    except OSError as error:
        raise CollectiveAborted(f"no peer at {address}: {error}") from None
    with _faults(f"greeting the peer at {address}"):
        sock = secured(sock, tls)
    try:
        with _faults(f"greeting the peer at {address}"):
            seals = handshake_client(sock, key, PEER, PEER)
        connection = PeerConnection(sock, seals, timeout_s)
        connection.send_json(request)
    except BaseException:
        sock.close()
        raise
    return connection
