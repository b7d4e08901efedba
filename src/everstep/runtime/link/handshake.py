"""How two ends of a connection prove a token to each other, and what makes every frame after that theirs alone. Pure.

Each role has a token of its own, made from the job's (`role_token`), and so may be handed out without the others.

    server -> client   MAGIC, version (2 bytes), server nonce (32)
    client -> server   length (2); client nonce (32), role, NUL, name, NUL, address, NUL, bulk; proof (32)
    server -> client   proof (32)

A proof is the HMAC-SHA256, with the role's token, of the side's label, both nonces and all that the client says. The
address is the one that the client dialled, and over TLS the fingerprint of the certificate that it was shown there; the
server goes on only if both are its own: so nobody can pass a connection on to another server of the job. bulk: whether
long runs of bytes bear a tag too; the client, which knows both addresses, leaves it out where they do not leave the
host, and over TLS, which has tags of its own.

From the same bytes both derive two keys, one for each direction. Behind each frame comes a tag of 16 bytes: BLAKE2b,
with the direction's key, of the number of the frame and the frame; behind a long run of bytes it is GMAC, with a key
made from that one. So what is injected, altered, repeated, left out, reordered, reflected or taken from another
connection ends the connection, before anything of it is looked at.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from typing import NamedTuple

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from everstep.base.doors import host_of
from everstep.base.errors import ProtocolError, TokenRefused
from everstep.protocol.messages import VERSION
from everstep.protocol.roles import WORKER

MAGIC = b"EVST"
NONCE_BYTES = 32
PROOF_BYTES = 32
TAG_BYTES = 16
GREETING_BYTES = len(MAGIC) + 2 + NONCE_BYTES
MAX_ANSWER_BYTES = 640
MAX_NAME_BYTES = 255
PEER = "peer"
_SHORT = struct.Struct(">H")
_TLS = b"\x16\x03"
"""First bytes of a ClientHello."""
_NUMBER = struct.Struct(">Q")
_NONCE = struct.Struct(">4xQ")
_LONG_BYTES = 4 << 10

Keys = Callable[[str, str], bytes | None]
"""The token of a role (and name), None if a server does not deal with that role."""


def role_token(token: bytes, role: str, name: str = "") -> bytes:
    """The token of one role, made from the job's. name: of the speaking life, for workers, each of which has a token of
    its own; lives of other roles share one."""
    return hmac.digest(token, b"everstep role\0" + role.encode() + b"\0" + name.encode(), "sha256")


def keys_of(token: bytes, roles: frozenset[str]) -> Keys:
    """Keys of a server that has the job's token and deals with these roles."""
    return lambda role, name: role_token(token, role, name if role == WORKER else "") if role in roles else None


def peer_keys(token: bytes) -> Keys:
    """Keys of a server that has the peers' token alone."""
    return lambda role, name: token if role == PEER else None


class Ends(NamedTuple):
    """Addresses of the two ends of a connection, as "host:port"; "" if there are none. channel: over TLS, the
    fingerprint of the server's certificate."""

    here: str
    there: str
    channel: str = ""

    @property
    def on_one_host(self) -> bool:
        """Whether all data stays on the host."""
        return host_of(self.here) == host_of(self.there)

    @property
    def needs_tags(self) -> bool:
        """Whether an attacker on the way could change bytes without a tag."""
        return not (self.on_one_host or self.channel)


class Seals:
    """One end of a connection after the handshake. Each direction is for one thread at a time.

    role, name: of the client. bulk_tags: whether long runs of bytes bear tags too.
    """

    def __init__(self, role: str, name: str, bulk_tags: bool, send_key: bytes, receive_key: bytes) -> None:
        self.role = role
        self.name = name
        self.bulk_tags = bulk_tags
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0

    def tag(self, *parts: bytes | memoryview, digest: bytes = b"") -> bytes:
        """Tag of the next frame to send, which consists of these parts. digest: of the parts, if it is known."""
        self._sent += 1
        return _tag(self._send_key, self._sent, parts, digest)

    def check(self, tag: bytes | memoryview, *parts: bytes | memoryview) -> None:
        """Check the next frame. Raises: ProtocolError if these are not the next frame that the other end has sent."""
        self._received += 1
        if not hmac.compare_digest(tag, _tag(self._receive_key, self._received, parts)):
            raise ProtocolError(f"expected frame {self._received} of the other end, got something else: cut off")

    def bulk_tag(self) -> BulkTag:
        """Tag for the next long run of bytes that is sent."""
        self._sent += 1
        return BulkTag(_bulk_key(self._send_key), self._sent)

    def bulk_check(self) -> BulkTag:
        """Check for the next long run of bytes that is received."""
        self._received += 1
        return BulkTag(_bulk_key(self._receive_key), self._received)


class BulkTag:
    """The tag of a long run of bytes, computed as they pass: GMAC with AES-256. Its nonce is the number of the frame,
    which occurs once in a direction. With processors' instructions for it, it is nine times as fast as HMAC-SHA256 (16
    GB/s against 1.8, measured on pieces of 1 MiB).

    Source: NIST SP 800-38D.
    """

    def __init__(self, key: bytes, number: int) -> None:
        self._mac = Cipher(algorithms.AES(key), modes.GCM(_NONCE.pack(number))).encryptor()

    def add(self, part: bytes | bytearray | memoryview) -> None:
        self._mac.authenticate_additional_data(part)

    def tag(self) -> bytes:
        """Tag of all bytes; nothing can be added afterwards."""
        self._mac.finalize()
        return self._mac.tag

    def check(self, tag: bytes | bytearray) -> None:
        """Compare the tags. Raises: ProtocolError if that is the tag of other bytes."""
        if not hmac.compare_digest(tag, self.tag()):
            raise ProtocolError("expected the bytes that the peer has sent, got others: cut off")


def frame_digest(*parts: bytes | memoryview) -> bytes:
    """Digest for the tag of a long frame, so that a frame for a thousand ends is read once; b"" for a short one."""
    if sum(map(len, parts)) < _LONG_BYTES:
        return b""
    found = hashlib.blake2b(digest_size=32, person=b"frame")
    for part in parts:
        found.update(part)
    return found.digest()


def _tag(key: bytes, number: int, parts: tuple[bytes | memoryview, ...], digest: bytes = b"") -> bytes:
    digest = digest or frame_digest(*parts)
    if digest:
        long = hashlib.blake2b(_NUMBER.pack(number), key=key, digest_size=TAG_BYTES, person=b"long")
        long.update(digest)
        return long.digest()
    mac = hashlib.blake2b(_NUMBER.pack(number), key=key, digest_size=TAG_BYTES)
    for part in parts:
        mac.update(part)
    return mac.digest()


class Greeter:
    """The server's side of one handshake. `greeting` goes out first; then `feed` takes the client's bytes.

    here: the address at which the client reached it; channel: over TLS, the fingerprint of its certificate. seals: set
    once the client has proved the token.
    """

    def __init__(self, keys: Keys, here: str, channel: str = "") -> None:
        self._keys = keys
        self._here = here
        self._dialled = _dialled(here, channel)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._heard = b""
        self.greeting = MAGIC + _SHORT.pack(VERSION) + self._nonce
        self.seals: Seals | None = None

    def feed(self, data: bytes) -> bytes:
        """Take the client's bytes. Returns bytes to send: none while its answer is incomplete.

        Raises: ProtocolError if the client does not know the token of the role that it claims, dialled another address,
        or sends too much.
        """
        self._heard += data
        if len(self._heard) < _SHORT.size:
            return b""
        end = _SHORT.size + _answer_length(self._heard[: _SHORT.size])
        if len(self._heard) < end:
            return b""
        if len(self._heard) > end:
            raise ProtocolError(f"expected {end} bytes until the token is proven, got {len(self._heard)}")
        body, proof = self._heard[_SHORT.size : -PROOF_BYTES], self._heard[-PROOF_BYTES:]
        words = body[NONCE_BYTES:].decode("utf-8", "replace").split("\0")
        if len(words) != 4:
            raise ProtocolError("expected role, name and address of a client, got something else")
        role, name, address, bulk = words
        key = self._keys(role, name)
        if key is None:
            raise ProtocolError(f"expected a role that is served here, got {role[:40]!r}")
        if not hmac.compare_digest(proof, _proof(key, b"client", self._nonce, body)):
            raise ProtocolError(f"expected proof of the job's token for the role {role!r}, got a wrong one")
        if address != self._dialled:
            what = f"one that dialled {address[:80]!r}" if self._here == self._dialled else "one that was shown another"
            raise ProtocolError(f"expected a client of {self._here}, got {what}: a relay?")
        to_server, to_client = _directions(key, self._nonce, body)
        self.seals = Seals(role, name, bulk == "tags", to_client, to_server)
        return _proof(key, b"server", self._nonce, body)


class Caller:
    """The client's side of one handshake: `answer` the greeting, then look at the server's proof (`accept`)."""

    def __init__(self, key: bytes, role: str, name: str, ends: Ends) -> None:
        self._key = key
        self._role = role
        self._name = name
        self._ends = ends
        self._nonce = b""
        self._body = b""

    @property
    def address(self) -> str:
        """Address at which the server was reached."""
        return self._ends.there

    def answer(self, greeting: bytes) -> bytes:
        """Bytes to send. Raises: ProtocolError if the greeting is not that of a server of our version."""
        if greeting[: len(MAGIC)] != MAGIC:
            raise ProtocolError("expected an Everstep server, something else answered: check host and port")
        version = _SHORT.unpack_from(greeting, len(MAGIC))[0]
        if version != VERSION:
            raise ProtocolError(f"expected protocol version {VERSION}, the server speaks {version}: use one release")
        if len(self._name.encode()) > MAX_NAME_BYTES or "\0" in self._name:
            raise ProtocolError(f"expected a name of at most {MAX_NAME_BYTES} bytes, got {self._name[:40]!r}")
        self._nonce = greeting[len(MAGIC) + _SHORT.size :]
        dialled = _dialled(self._ends.there, self._ends.channel)
        words = (self._role, self._name, dialled, "tags" if self._ends.needs_tags else "")
        self._body = secrets.token_bytes(NONCE_BYTES) + "\0".join(words).encode()
        sent = self._body + _proof(self._key, b"client", self._nonce, self._body)
        return _SHORT.pack(len(sent)) + sent

    def accept(self, proof: bytes) -> Seals:
        """Check the server's proof. Raises: ProtocolError if the server does not know the token."""
        if not hmac.compare_digest(proof, _proof(self._key, b"server", self._nonce, self._body)):
            raise TokenRefused("the server does not know this job's token: it serves another job")
        to_server, to_client = _directions(self._key, self._nonce, self._body)
        return Seals(self._role, self._name, self._ends.needs_tags, to_server, to_client)


def _dialled(address: str, channel: str) -> str:
    return f"{address} {channel}" if channel else address


def _answer_length(prefix: bytes) -> int:
    if prefix == _TLS:
        raise ProtocolError(
            "expected a plain client, one that speaks TLS came: is security.tls.mode the same everywhere?"
        )
    length: int = _SHORT.unpack(prefix)[0]
    if not NONCE_BYTES + PROOF_BYTES < length <= MAX_ANSWER_BYTES:
        raise ProtocolError(f"expected a handshake of at most {MAX_ANSWER_BYTES} bytes, got one of {length}")
    return length


def _proof(key: bytes, side: bytes, nonce: bytes, body: bytes) -> bytes:
    return hmac.digest(key, side + b" proves\0" + nonce + body, "sha256")


def _bulk_key(key: bytes) -> bytes:
    """Key of a direction for long runs of bytes."""
    return hmac.digest(key, b"bulk\1", "sha256")


def _directions(key: bytes, nonce: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Keys for what goes to the server, and to the client (the two steps of HKDF, one block each)."""
    secret = hmac.digest(key, b"everstep connection\0" + nonce + body, "sha256")
    return hmac.digest(secret, b"to server\1", "sha256"), hmac.digest(secret, b"to client\1", "sha256")
