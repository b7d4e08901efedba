"""Connections between workers for bulk data (healing): a token handshake, a JSON request, then raw bytes.

Blocking and threaded on purpose: the streams are gigabytes long, few, and beside a training loop that asyncio would
have to share. `sendall` of memoryviews and `recv_into` of memory that is already there: no copies in between.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from everstep.base.errors import CollectiveAborted, EverstepError, ProtocolError, check
from everstep.runtime.wire import (
    HANDSHAKE_TIMEOUT_S,
    handshake_client,
    handshake_server,
    recv_exact_into,
    recv_frame,
    send_frame,
)

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 30.0
MAX_CONNECTIONS = 256
_SIZE = struct.Struct(">Q")


class PeerConnection:
    """One conversation between two workers. Blocking; one thread at a time in each direction.

    Every operation raises `CollectiveAborted` when the other side is gone, when nothing moves for `timeout_s`, and
    when another thread calls `abort`; `ProtocolError` when it says something that was not asked for. `sent_bytes`
    counts what `send_bytes` sent.
    """

    def __init__(self, sock: socket.socket, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(timeout_s)
        self._sock = sock
        self.sent_bytes = 0

    def fileno(self) -> int:
        """For select: readable means that something has come, or that the other side is gone."""
        return self._sock.fileno()

    def send_json(self, value: Any) -> None:
        """Send a small JSON-able value."""
        with _faults("sending to a peer"):
            send_frame(self._sock, json.dumps(value).encode())

    def recv_json(self) -> Any:
        """Receive what `send_json` sent."""
        with _faults("receiving from a peer"):
            body = recv_frame(self._sock)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise ProtocolError("expected JSON from a peer, got something else") from None

    def send_bytes(self, parts: Sequence[memoryview | bytes | bytearray]) -> None:
        """Send the parts as one run of bytes; none of them is copied."""
        views = [memoryview(part).cast("B") for part in parts if len(memoryview(part)) > 0]
        size = sum(v.nbytes for v in views)
        with _faults("sending to a peer"):
            self._sock.sendall(_SIZE.pack(size))
            for view in views:
                self._sock.sendall(view)
        self.sent_bytes += size

    def recv_into(self, out: memoryview | bytearray) -> None:
        """Receive one `send_bytes` into memory of just that many bytes. Raises: ProtocolError for another size."""
        view = memoryview(out).cast("B")
        size = self._recv_size()
        if size != view.nbytes:
            raise ProtocolError(f"expected {view.nbytes} bytes from a peer, it sends {size}")
        self._fill(view)

    def recv_bytes(self, max_bytes: int) -> bytearray:
        """Receive one `send_bytes` of unknown size. Raises: ProtocolError beyond `max_bytes`."""
        size = self._recv_size()
        if size > max_bytes:
            raise ProtocolError(f"expected at most {max_bytes} bytes from a peer, it sends {size}")
        data = bytearray(size)
        self._fill(memoryview(data))
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
        header = bytearray(_SIZE.size)
        self._fill(memoryview(header))
        return int(_SIZE.unpack(header)[0])

    def _fill(self, view: memoryview) -> None:
        with _faults("receiving from a peer"):
            recv_exact_into(self._sock, view)


class _faults(contextlib.AbstractContextManager[None]):
    """Turns what sockets raise into `CollectiveAborted`."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) or (isinstance(error, ProtocolError) and "connection ended" in str(error)):
            raise CollectiveAborted(f"{self._doing} failed: {error}") from None


PeerHandler = Callable[[PeerConnection, dict[str, Any]], None]


class PeerServer:
    """Listens for peers on a port of the kernel's choice; each request is handled in a daemon thread of its own.

    handler: called with the connection and the request (a JSON object); the connection is closed when it returns.
    """

    def __init__(self, host: str, token: bytes, handler: PeerHandler) -> None:
        self._token = token
        self._handler = handler
        self._listener = socket.create_server((host, 0), backlog=128)
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
        """ "host:port", as `Member.address` wants it."""
        return f"{self.host}:{self.port}"

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
        _hang_up(self._listener)
        self._listener.close()
        self.abort_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                continue
            with self._lock:
                if len(self._open) >= MAX_CONNECTIONS or time.monotonic_ns() < self._deaf_until_ns:
                    sock.close()
                    continue
                self._open.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name="peer", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            try:
                handshake_server(sock, self._token)
                connection = PeerConnection(sock)
                request = connection.recv_json()
                if not isinstance(request, dict):
                    raise ProtocolError("expected a request as a JSON object")
            except (OSError, EverstepError) as error:
                log.warning("refused a peer: %s", error)
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
    address: str, token: bytes, request: dict[str, Any], *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> PeerConnection:
    """Connect to a `PeerServer` at "host:port", prove the token and make the request.

    Raises: CollectiveAborted if nobody answers there; ProtocolError if it is not a peer of this job.
    """
    host, separator, port = address.rpartition(":")
    check(bool(separator) and port.isdigit(), f"expected a peer's address as host:port, got {address!r}")
    try:
        sock = socket.create_connection((host, int(port)), timeout=HANDSHAKE_TIMEOUT_S)
    except OSError as error:
        raise CollectiveAborted(f"no peer at {address}: {error}") from None
    try:
        with _faults(f"greeting the peer at {address}"):
            handshake_client(sock, token, "peer", "peer")
        connection = PeerConnection(sock, timeout_s)
        connection.send_json(request)
    except BaseException:
        sock.close()
        raise
    return connection
