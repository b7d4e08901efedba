"""Frames and the handshake of control and peer connections.

A frame is a 4-byte big-endian length and a body of at most `MAX_FRAME_BYTES`; with the length's highest bit set, the
body is deflated (a plan for a thousand workers is then 10 times smaller, and it goes to all of them). Before the first
frame both sides prove that they know the job's token, without showing it:

    server -> client   MAGIC, version (2 bytes), server nonce (32)
    client -> server   length (2); client nonce (16), role, NUL, name; HMAC-SHA256(token, "client", nonces, role, name)
    server -> client   HMAC-SHA256(token, "server", nonces, role, name)

Nothing else that a stranger sends is looked at, and a stranger who is slow is cut off. The parts that compute are
functions of bytes; asyncio and blocking sockets share them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from everstep.base.errors import ProtocolError
from everstep.base.given import read_given
from everstep.protocol.messages import MAX_FRAME_BYTES, VERSION

MAGIC = b"EVST"
HANDSHAKE_TIMEOUT_S = 5.0
SERVER_NONCE_BYTES = 32
CLIENT_NONCE_BYTES = 16
MAC_BYTES = 32
GREETING_BYTES = len(MAGIC) + 2 + SERVER_NONCE_BYTES
MAX_ANSWER_BYTES = 512
DEFLATE_FROM_BYTES = 16 << 10
_DEFLATED = 1 << 31
_MOST_TOKEN_BYTES = 4096
_LENGTH = struct.Struct(">I")
_SHORT = struct.Struct(">H")


def new_token() -> bytes:
    """A fresh secret of 32 bytes."""
    return secrets.token_bytes(32)


def write_token(path: Path, token: bytes) -> None:
    """Store the token in hex, readable by the owner alone."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(token.hex())


def read_token(path: Path) -> bytes:
    """Raises: ProtocolError if the file holds no token; OSError if it cannot be read."""
    return token_of(read_given(path, _MOST_TOKEN_BYTES).decode("latin-1"), str(path))


def token_of(text: str, where: str) -> bytes:
    """The token that a text says. Raises: ProtocolError, naming where it came from, if it is none."""
    try:
        token = bytes.fromhex(text.strip())
    except ValueError:
        token = b""
    if len(token) < 16:
        raise ProtocolError(f"expected the job's token, at least 32 hex digits, in {where}, found something else")
    return token


# ---- the handshake as functions of bytes


def greeting() -> tuple[bytes, bytes]:
    """The server's first bytes, and the nonce in them."""
    nonce = secrets.token_bytes(SERVER_NONCE_BYTES)
    return MAGIC + _SHORT.pack(VERSION) + nonce, nonce


def _mac(token: bytes, side: bytes, nonce: bytes, body: bytes) -> bytes:
    return hmac.new(token, side + nonce + body, hashlib.sha256).digest()


def answer(token: bytes, greeted: bytes, role: str, name: str) -> tuple[bytes, bytes]:
    """The client's answer to a greeting, and what the server must reply with.

    Raises: ProtocolError if the greeting is not that of a server of our version.
    """
    if greeted[: len(MAGIC)] != MAGIC:
        raise ProtocolError("expected an Everstep server, something else answered: check host and port")
    version = _SHORT.unpack_from(greeted, len(MAGIC))[0]
    if version != VERSION:
        raise ProtocolError(f"expected protocol version {VERSION}, the server speaks {version}: use one release")
    nonce = greeted[len(MAGIC) + 2 :]
    body = secrets.token_bytes(CLIENT_NONCE_BYTES) + role.encode() + b"\0" + name.encode()[:200]
    sent = body + _mac(token, b"client", nonce, body)
    return _SHORT.pack(len(sent)) + sent, _mac(token, b"server", nonce, body)


def verify(token: bytes, nonce: bytes, answered: bytes) -> tuple[str, bytes]:
    """Check a client's answer (without its length): its role ('agent', 'worker', 'job', 'client' or 'peer'; its name is
    for people who look at the wire), and the server's reply.

    Raises: ProtocolError if the client does not know the token.
    """
    body, mac = answered[:-MAC_BYTES], answered[-MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(token, b"client", nonce, body)):
        raise ProtocolError("expected proof of the job's token, got a wrong one")
    role = body[CLIENT_NONCE_BYTES:].partition(b"\0")[0].decode("utf-8", "replace")
    return role, _mac(token, b"server", nonce, body)


def answer_length(prefix: bytes) -> int:
    """Bytes of the answer that follow its 2-byte length. Raises: ProtocolError if no client of ours says so."""
    length: int = _SHORT.unpack(prefix)[0]
    if not CLIENT_NONCE_BYTES + MAC_BYTES < length <= MAX_ANSWER_BYTES:
        raise ProtocolError(f"expected a handshake of at most {MAX_ANSWER_BYTES} bytes, got one of {length}")
    return length


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


def inflate(packed: bytes) -> bytes:
    """Undo the deflating of a frame's body. Raises: ProtocolError if it is damaged or beyond the limit."""
    try:
        body = zlib.decompressobj().decompress(packed, MAX_FRAME_BYTES + 1)
    except zlib.error as error:
        raise ProtocolError(f"expected a deflated frame, got something else: {error}") from None
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"expected frames of at most {MAX_FRAME_BYTES} bytes, got one that inflates beyond it")
    return body


def _split_length(length: int) -> tuple[int, bool]:
    size, deflated = length & ~_DEFLATED, bool(length & _DEFLATED)
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"expected frames of at most {MAX_FRAME_BYTES} bytes, got one of {size}")
    return size, deflated


class FrameReader:
    """Cuts a stream of bytes into bodies. `unpack` undoes deflating."""

    def __init__(self, unpack: Callable[[bytes], bytes] = inflate) -> None:
        self._buffer = bytearray()
        self._unpack = unpack

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete now. Raises: ProtocolError for a frame beyond the limit."""
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(buffer) - start >= 4:
            length, deflated = _split_length(_LENGTH.unpack_from(buffer, start)[0])
            if len(buffer) - start - 4 < length:
                break
            body = bytes(memoryview(buffer)[start + 4 : start + 4 + length])
            bodies.append(self._unpack(body) if deflated else body)
            start += 4 + length
        if start:
            del buffer[:start]
        return bodies


# ---- blocking sockets


def recv_exact(sock: socket.socket, size: int, deadline_s: float | None = None) -> bytes:
    """As `recv_exact_into`. deadline_s: monotonic time until which all has to be there, however slowly it drips."""
    data = bytearray(size)
    recv_exact_into(sock, memoryview(data), deadline_s)
    return bytes(data)


def recv_exact_into(sock: socket.socket, out: memoryview, deadline_s: float | None = None) -> None:
    """Fill `out` (bytes). Raises: ProtocolError if the other side closes first; OSError (TimeoutError) as the socket
    does."""
    got = 0
    size = len(out)
    while got < size:
        if deadline_s is not None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the handshake took too long")
            sock.settimeout(left_s)
        n = sock.recv_into(out[got:] if got else out)
        if n == 0:
            raise ProtocolError(f"the connection ended after {got} of {size} bytes")
        got += n


def handshake_client(sock: socket.socket, token: bytes, role: str, name: str) -> None:
    """Prove the token to the server, and have it prove it too. Honours the socket's timeout.

    Raises: ProtocolError if the server is not ours or refuses; OSError.
    """
    sent, expected = answer(token, recv_exact(sock, GREETING_BYTES), role, name)
    sock.sendall(sent)
    try:
        reply = recv_exact(sock, MAC_BYTES)
    except (ProtocolError, ConnectionError):
        raise ProtocolError("the server refused this job's token: it serves another job") from None
    if not hmac.compare_digest(reply, expected):
        raise ProtocolError("the server does not know this job's token: it serves another job")


def handshake_server(sock: socket.socket, token: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> str:
    """Have a client prove the token within `timeout_s`, however slowly it drips; returns its role. Leaves the socket
    without a timeout.

    Raises: ProtocolError; OSError (TimeoutError).
    """
    deadline_s = time.monotonic() + timeout_s
    sock.settimeout(timeout_s)
    sent, nonce = greeting()
    sock.sendall(sent)
    length = answer_length(recv_exact(sock, 2, deadline_s))
    role, reply = verify(token, nonce, recv_exact(sock, length, deadline_s))
    sock.sendall(reply)
    sock.settimeout(None)
    return role


def send_frame(sock: socket.socket, body: bytes) -> None:
    """Raises: ProtocolError if the body is too long; OSError."""
    sock.sendall(frame(body))


def recv_frame(sock: socket.socket) -> bytes:
    """Raises: ProtocolError at the end of the stream or for a frame beyond the limit; OSError."""
    length, deflated = _split_length(_LENGTH.unpack(recv_exact(sock, 4))[0])
    body = recv_exact(sock, length)
    return inflate(body) if deflated else body
