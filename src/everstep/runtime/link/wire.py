"""Frames of control and peer connections, and the token's files.

A frame is a 4-byte big-endian length, a body of at most `MAX_FRAME_BYTES`, and a tag of 16 bytes. The tag proves that
it is the next frame of the end that proved the token in the handshake (`handshake`). If the length's highest bit is
set, the body is deflated (a plan for a thousand workers is then 7 times smaller).

No other bytes of a stranger are looked at, and a slow stranger is cut off. The parts that compute are functions of
bytes; asyncio and blocking sockets share them.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import ssl
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from everstep.base.below import write_atomically
from everstep.base.doors import at_port
from everstep.base.errors import ProtocolError, TokenRefused, Untrusted
from everstep.base.given import read_given
from everstep.base.plan import Plan
from everstep.protocol.messages import MAX_FRAME_BYTES, AnyMessage, PlanNow, PlanPrepared, encode
from everstep.protocol.telling import WithPlan, parts_of, told
from everstep.runtime.link.handshake import GREETING_BYTES, PROOF_BYTES, TAG_BYTES, Caller, Ends, Seals, frame_digest
from everstep.runtime.link.tls import Tls, TlsSocket, fingerprint_of, no_tls, said

HANDSHAKE_TIMEOUT_S = 5.0
DEFLATE_FROM_BYTES = 16 << 10
_DEFLATED = 1 << 31
_MOST_TOKEN_BYTES = 4096
_LEAST_S = 0.001
_MOST_TOLD = 16
_SAME_MODE = "is security.tls.mode the same here and there?"
_LENGTH = struct.Struct(">I")
Sealable = tuple[bytes, bytes]
"""A frame, and its digest if it is long."""


def new_token() -> bytes:
    """A fresh secret of 32 bytes."""
    return secrets.token_bytes(32)


def write_token(path: Path, token: bytes) -> None:
    """Store the token in hex, readable by the owner alone."""
    write_atomically(path, token.hex())


def read_token(path: Path, *, links: bool = False) -> bytes:
    """Token in a file. links: a user names this file, which may be a link.

    Raises: ProtocolError if the file holds no token; OSError if it cannot be read.
    """
    return token_of(read_given(path, _MOST_TOKEN_BYTES, links=links).decode("latin-1"), str(path))


def token_of(text: str, where: str) -> bytes:
    """Token in a text. Raises: ProtocolError, naming its origin, if it is none."""
    try:
        token = bytes.fromhex(text.strip())
    except ValueError:
        token = b""
    if len(token) < 16:
        raise ProtocolError(f"expected the job's token, at least 32 hex digits, in {where}, found something else")
    return token


# ---- frames


def frame(body: bytes, *, deflate: bool = False) -> bytes:
    """A body with its length before it, deflated if asked for and worth it. Raises: ProtocolError if it is too long."""
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    if deflate and len(body) >= DEFLATE_FROM_BYTES:
        packed = zlib.compress(body, 1)
        if len(packed) < len(body):
            return _LENGTH.pack(len(packed) | _DEFLATED) + packed
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Frames for many receivers, made once: encoded, deflated, digested. Plans go as `protocol.telling` says.

    The last plans that were sent are kept, each with the plan of which it was sent as a change.
    """

    def __init__(self) -> None:
        self._last: tuple[AnyMessage | None, Sealable] = (None, (b"", b""))
        self._told: dict[tuple[int, int], tuple[Plan, Plan | None, Sealable]] = {}

    def of(self, message: AnyMessage, before: Plan | None) -> tuple[list[Sealable], Plan | None]:
        """Frames, each with its digest, of a message for a connection whose last plan was `before`; and the plan that
        is its last one from now on."""
        if not isinstance(message, WithPlan):
            return [self._once(message)], before
        plan = message.plan
        telling = [] if plan is before else [self._telling(plan, before)]
        return [*telling, self._once(message)], plan

    def _once(self, message: AnyMessage) -> Sealable:
        last, made = self._last
        alike = last is message
        if isinstance(message, PlanNow | PlanPrepared) and type(last) is type(message):
            alike = getattr(last, "plan", None) is message.plan
        if not alike:
            made = _made(parts_of(message, getattr(message, "plan", None))[0][-1])
            self._last = (message, made)
        return made

    def _telling(self, plan: Plan, before: Plan | None) -> Sealable:
        key = id(plan), id(before)
        if key not in self._told:
            if len(self._told) >= _MOST_TOLD:
                del self._told[next(iter(self._told))]
            self._told[key] = (plan, before, _made(told(plan, before)))  # keeps both alive: ids stay theirs
        return self._told[key][2]


def _made(message: AnyMessage) -> Sealable:
    data = frame(encode(message), deflate=True)
    return data, frame_digest(data)


def inflate(packed: bytes, most_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Undo the deflating of a frame's body. Raises: ProtocolError if it is damaged or beyond the limit."""
    try:
        body = zlib.decompressobj().decompress(packed, most_bytes + 1)
    except zlib.error as error:
        raise ProtocolError(f"expected a deflated frame, got something else: {error}") from None
    if len(body) > most_bytes:
        raise ProtocolError(f"expected frames of at most {most_bytes} bytes, got one that inflates beyond it")
    return body


def sealed(seals: Seals, packed: bytes) -> bytes:
    """A result of `frame` with its tag: the next that goes out over this connection."""
    return packed + seals.tag(packed)


def _split_length(length: int, most_bytes: int = MAX_FRAME_BYTES) -> tuple[int, bool]:
    size, deflated = length & ~_DEFLATED, bool(length & _DEFLATED)
    if size > most_bytes:
        raise ProtocolError(f"expected frames of at most {most_bytes} bytes, got one of {size}")
    return size, deflated


class FrameReader:
    """Cuts a stream of bytes into bodies. `unpack` undoes deflating. most_bytes: of one body."""

    def __init__(
        self,
        seals: Seals,
        unpack: Callable[[bytes, int], bytes] = inflate,
        most_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._seals = seals
        self._buffer = bytearray()
        self._unpack = unpack
        self._most_bytes = most_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete now. Raises: ProtocolError for a frame beyond the limit, or not the next one of
        the other end."""
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start, view = 0, memoryview(buffer)
        try:
            while len(buffer) - start >= _LENGTH.size:
                length, deflated = _split_length(_LENGTH.unpack_from(buffer, start)[0], self._most_bytes)
                end = start + _LENGTH.size + length
                if len(buffer) < end + TAG_BYTES:
                    break
                with view[start:end] as whole, view[end : end + TAG_BYTES] as tag:
                    self._seals.check(tag, whole)
                body = bytes(view[start + _LENGTH.size : end])
                bodies.append(self._unpack(body, self._most_bytes) if deflated else body)
                start = end + TAG_BYTES
        finally:
            view.release()
        if start:
            del buffer[:start]
        return bodies


# ---- blocking sockets


def recv_exact(sock: socket.socket, size: int) -> bytes:
    """As `recv_exact_into`."""
    data = bytearray(size)
    recv_exact_into(sock, memoryview(data))
    return bytes(data)


def recv_exact_into(sock: socket.socket, out: memoryview) -> None:
    """Fill `out` (bytes). Raises: ProtocolError if the other side closes first; OSError (TimeoutError) as the socket
    does."""
    got = 0
    size = len(out)
    while got < size:
        n = sock.recv_into(out[got:] if got else out)
        if n == 0:
            raise ProtocolError(f"the connection ended after {got} of {size} bytes")
        got += n


def ends(sock: socket.socket) -> Ends:
    """Addresses of a connection's two ends; for its client also the server's certificate."""
    channel = ""
    if isinstance(sock, TlsSocket) and not sock.server_side:
        channel = fingerprint_of(sock.getpeercert(binary_form=True))
    return Ends(address_text(sock.getsockname()), address_text(sock.getpeername()), channel)


def address_text(name: object) -> str:
    """Address of a socket as "host:port"; "" for those without a port."""
    if not isinstance(name, tuple) or len(name) < 2:
        return ""
    host = ipaddress.ip_address(str(name[0]).partition("%")[0])
    mapped = getattr(host, "ipv4_mapped", None)
    return at_port(str(mapped or host), name[1])


def secured(sock: socket.socket, tls: Tls | None) -> socket.socket:
    """The client's end of a connection: over TLS if the ends use it. The socket is closed if that fails.

    Raises: Untrusted if the server is none of the job's; ProtocolError if it speaks no TLS; OSError.
    """
    try:
        between = ends(sock)
        if tls is None or not tls.covers(between):
            return sock
        sock = tls.call(sock, between)
        sock.do_handshake()
        return sock
    except (ssl.SSLError, ValueError) as error:  # the latter: no certificate where a CA's was expected
        sock.close()
        if isinstance(error, ssl.SSLError) and (words := no_tls(error)):
            raise ProtocolError(words) from None
        words = said(error) if isinstance(error, ssl.SSLError) else str(error)
        raise Untrusted(f"the server cannot be trusted: {words}") from None
    except BaseException:
        sock.close()
        raise


def _recv_soon(sock: socket.socket, size: int) -> bytes:
    """Receive as `recv_exact` does, all of it within the socket's timeout: a server that trickles is cut off."""
    timeout_s, data = sock.gettimeout(), b""
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while len(data) < size:
            if end_s is not None:
                sock.settimeout(max(_LEAST_S, end_s - time.monotonic()))
            more = sock.recv(size - len(data))
            if not more:
                raise ProtocolError(f"the connection ended after {len(data)} of {size} bytes")
            data += more
            if end_s is not None and len(data) < size and time.monotonic() >= end_s:
                raise TimeoutError
    finally:
        sock.settimeout(timeout_s)
    return data


def handshake_client(sock: socket.socket, key: bytes, role: str, name: str) -> Seals:
    """Prove the token of a role to the server, and have it prove it too. Honours the socket's timeout.

    Raises: ProtocolError if the server is not ours or refuses; OSError.
    """
    try:
        greeting = _recv_soon(sock, GREETING_BYTES)
    except ConnectionAbortedError as error:
        raise ProtocolError(f"the server does not trust this host: {error}") from None
    except TimeoutError:
        raise TimeoutError(f"it says nothing: {_SAME_MODE}") from None
    except ProtocolError as error:
        raise ProtocolError(f"{error}: {_SAME_MODE}") from None
    caller = Caller(key, role, name, ends(sock))
    sock.sendall(caller.answer(greeting))
    try:
        proof = _recv_soon(sock, PROOF_BYTES)
    except (ProtocolError, ConnectionError):
        raise TokenRefused(
            f"the server refused this job's token: it serves another job, or is not at {caller.address} itself"
        ) from None
    return caller.accept(proof)


def send_frame(sock: socket.socket, seals: Seals, body: bytes) -> None:
    """Raises: ProtocolError if the body is too long; OSError."""
    sock.sendall(sealed(seals, frame(body)))


def recv_frame(sock: socket.socket, seals: Seals, most_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Raises: ProtocolError at the end of the stream, and for a frame that is beyond the limit or not the next one of
    the other end; OSError."""
    header = recv_exact(sock, _LENGTH.size)
    length, deflated = _split_length(_LENGTH.unpack(header)[0], most_bytes)
    body = recv_exact(sock, length)
    seals.check(recv_exact(sock, TAG_BYTES), header, body)
    return inflate(body, most_bytes) if deflated else body
