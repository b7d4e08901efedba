"""TLS 1.3 between the hosts of a job: the certificates that each host shows and believes.

The job has a CA of its own, whose key is made from the job's token. A host that proves to be of the job can therefore
make its own certificate, and knows the CA's, without being sent anything: there is no first contact in which an
impostor could step in. A host's certificate names its address, and only its agent has the token: a worker gets the
host's certificate and the key to that, and can speak for its host alone. A client with only the token of a role for
people shows no certificate; for it, the CA's, which is no secret, stands beside the coordinator's address.

The handshake that proves the token (`handshake`) follows inside, and covers the server's certificate: so nobody who has
a certificate of the CA can stand between two others.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import hmac
import ipaddress
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID

from everstep.base.config_keys import TlsConfig
from everstep.base.doors import host_of
from everstep.base.errors import ConfigError, ProtocolError
from everstep.base.given import read_given
from everstep.runtime.link.handshake import Ends

_MOST_PEM_BYTES = 1 << 18
_PIECE_BYTES = 1 << 18
_READ_BYTES = 1 << 16
_EPOCH = datetime.datetime(2000, 1, 1)
_NEVER = datetime.datetime(9999, 12, 31)
"""Hosts' clocks may differ, and the job's CA ends with the job."""
T = TypeVar("T")


@dataclass(frozen=True)
class Shown:
    """Certificates that one host shows and believes, as PEM texts; JSON-able. cert, key: "" for people, who show none.

    everywhere: on connections within one host, too.
    """

    cert: str
    key: str
    ca: str
    everywhere: bool = False


def shown_by(settings: TlsConfig, token: bytes, address: str) -> Shown | None:
    """Certificates of the host at this address for others of the job; None if it speaks without TLS.

    Raises: ConfigError if a file cannot be read or holds something else.
    """
    if settings.mode == "off" or (settings.mode == "auto" and ipaddress.ip_address(address).is_loopback):
        return None
    everywhere = settings.mode == "on"
    if settings.cert is None or settings.key is None or settings.ca is None:
        return _issued(token, address, everywhere)
    names = {name: str(getattr(settings, name)) for name in ("cert", "key", "ca")}
    found = Shown(
        **{name: read_pem(f"security.tls.{name}", path) for name, path in names.items()}, everywhere=everywhere
    )
    _checked(found, names)
    return found


def check_tls(settings: TlsConfig, address: str) -> None:
    """Raises: ConfigError, as `shown_by` would."""
    shown_by(settings, bytes(32), address)


# ---- certificates


def _issued(token: bytes, address: str, everywhere: bool) -> Shown:
    ca_key = ed25519.Ed25519PrivateKey.from_private_bytes(hmac.digest(token, b"everstep ca\0", "sha256"))
    ca_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "everstep job")])
    ca_public = ca_key.public_key()

    def made(name: Any, public: Any, serial: int, extensions: list[tuple[Any, bool]]) -> str:
        builder = x509.CertificateBuilder(ca_name, name, public, serial, _EPOCH, _NEVER)
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return str(builder.sign(ca_key, None).public_bytes(serialization.Encoding.PEM).decode())

    ca_id = x509.SubjectKeyIdentifier.from_public_key(ca_public)
    signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = made(ca_name, ca_public, 1, [(x509.BasicConstraints(True, 0), True), (signs, True), (ca_id, False)])
    key = ed25519.Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"everstep host {address}")])
    cert = made(
        name,
        key.public_key(),
        x509.random_serial_number(),
        [
            (x509.BasicConstraints(False, None), True),
            (x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), False),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_public), False),
        ],
    )
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    return Shown(cert, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none).decode(), ca, everywhere)


def read_pem(name: str, path: str) -> str:
    """A PEM file's text. name: the key that names the path. Raises: ConfigError if it cannot be read, or is no PEM."""
    try:
        return read_given(Path(path), _MOST_PEM_BYTES, pipes=True).decode("ascii")
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: expected a PEM file, found something else in {path}") from None


def _checked(shown: Shown, names: dict[str, str]) -> None:
    try:
        _trusting(ssl.PROTOCOL_TLS_CLIENT, shown.ca)
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"security.tls.ca: expected certificates in PEM form, found none in {names['ca']}") from None
    try:
        Tls(shown)._context(ssl.PROTOCOL_TLS_SERVER)
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or "no certificate"
        raise ConfigError(
            f"security.tls.cert: expected a certificate in {names['cert']}, and its key, without a password, in "
            f"{names['key']}, found something else ({_lower(why)})"
        ) from None


# ---- connections with them


def _trusting(protocol: int, ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=ca)
    return context


class Tls:
    """One host's side of all its connections. Raises: ssl.SSLError, ValueError if its certificates are malformed."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown

    @staticmethod
    def of(shown: Shown | None) -> Tls | None:
        """TLS with these certificates; None stays None."""
        return None if shown is None else Tls(shown)

    def covers(self, ends: Ends) -> bool:
        """Whether a connection between these ends uses TLS. Both ends must decide alike, or they cannot talk."""
        return self._shown.everywhere or not ends.on_one_host

    def call(self, sock: socket.socket, ends: Ends) -> TlsSocket:
        """The client's side; `do_handshake` is the caller's. Raises: OSError."""
        host = host_of(ends.there)
        return self._calling.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)  # type: ignore[return-value]

    def answer(self, sock: socket.socket) -> TlsSocket:
        """The server's side for a client that shows a certificate; `do_handshake` is the caller's."""
        return self._answering.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)  # type: ignore[return-value]

    def pipe(self) -> TlsPipe:
        """The server's side for any client, without a socket."""
        return TlsPipe(self._answering_people)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of this host's certificate, hex."""
        end = "-----END CERTIFICATE-----"
        return fingerprint_of(ssl.PEM_cert_to_DER_cert(self._shown.cert.strip().partition(end)[0] + end))

    @cached_property
    def _calling(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    @cached_property
    def _answering(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    @cached_property
    def _answering_people(self) -> ssl.SSLContext:
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = _trusting(protocol, self._shown.ca)
        context.sslsocket_class = TlsSocket
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # no session is resumed, and a mere sender has nothing to read
        if self._shown.cert:
            show(context, self._shown.cert, self._shown.key)
        return context


def show(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Load a certificate (PEM texts) into the context. Raises: ssl.SSLError, ValueError if it is malformed."""
    fd = os.memfd_create("certificate", os.MFD_CLOEXEC)  # the key touches no disk
    try:
        os.write(fd, f"{key.strip()}\n{cert}".encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}", password=lambda: b"")
    finally:
        os.close(fd)


def fingerprint_of(certificate: bytes | None) -> str:
    """SHA-256 of a certificate (DER), hex; "" if there is none."""
    return hashlib.sha256(certificate).hexdigest() if certificate else ""


class TlsSocket(ssl.SSLSocket):
    """`Tls`'s form of a socket: used like one, by a thread for each direction if need be.

    OpenSSL allows one call at a time for a connection, so none of them waits; the waiting happens outside of the call.
    Errors are those of a socket, ConnectionAbortedError if TLS refuses, and ssl.SSLError in the handshake.
    """

    _patience_s: float | None = None

    @cached_property
    def _turn(self) -> threading.Lock:
        return threading.Lock()

    def settimeout(self, value: float | None) -> None:
        self._patience_s = value
        super().settimeout(0.0)

    def gettimeout(self) -> float | None:
        return self._patience_s

    def setblocking(self, flag: bool) -> None:
        self.settimeout(None if flag else 0.0)

    def shutdown(self, how: int) -> None:
        """End the connection. Any thread; a thread that waits in another operation sees the end of the stream."""
        socket.socket.shutdown(self, how)

    def do_handshake(self, block: bool = False) -> None:
        """Raises: ssl.SSLError, OSError."""
        self._until_done(lambda tls: tls.do_handshake())

    def send(self, data: Any, flags: int = 0) -> int:
        """Send as a socket does. After an order to wait, the caller has to send the same bytes again."""
        with memoryview(data).cast("B") as view, view[:_PIECE_BYTES] as piece:
            sent = self._moved(lambda tls: tls.write(piece))
        if sent is None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        return int(sent)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        return self._moved(lambda tls: tls.read(buflen)) or b""

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        with memoryview(buffer).cast("B") as view:
            size = nbytes or len(view)
            return self._moved(lambda tls: tls.read(size, view)) or 0

    def _moved(self, operation: Callable[[Any], T]) -> T | None:
        """Result of an operation, after as many tries as it takes; None at the end of the stream."""
        try:
            return self._until_done(operation)
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return None
        except ssl.SSLError as error:
            raise ConnectionAbortedError(said(error)) from None

    def _until_done(self, operation: Callable[[Any], T]) -> T:
        end_s = None if self._patience_s is None else time.monotonic() + self._patience_s
        while True:
            try:
                with self._turn:
                    tls = self._sslobj  # type: ignore[attr-defined]
                    if tls is None:
                        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
                    return operation(tls)
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            self._await(event, end_s)

    def _await(self, event: int, end_s: float | None) -> None:
        if self._patience_s == 0.0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left_ms = None if end_s is None else 1000 * (end_s - time.monotonic())
        poller = select.poll()
        poller.register(self.fileno(), event)
        if left_ms is not None and (left_ms <= 0 or not poller.poll(left_ms)):
            raise TimeoutError("timed out")
        if left_ms is None:
            poller.poll()


class TlsPipe:
    """The server's side of TLS as functions of bytes, for a server without a blocking socket. Pure but for randomness.

    ready: the handshake is over. shows_certificate: the client has shown one of the job's CA.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self.ready = False

    @property
    def shows_certificate(self) -> bool:
        return self.ready and bool(self._tls.getpeercert(binary_form=True))

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the wire; returns them decrypted. Raises: ProtocolError for no TLS, or an untrusted
        sender."""
        self._in.write(data)
        found = []
        try:
            if not self.ready:
                self._tls.do_handshake()
                self.ready = True
            while piece := self._tls.read(_READ_BYTES):
                found.append(piece)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            raise ProtocolError(said(error)) from None
        return b"".join(found)

    def write(self, data: bytes) -> None:
        self._tls.write(data)

    def leaving(self) -> bytes:
        return self._out.read()


def said(error: ssl.SSLError) -> str:
    """The error in words, one line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here: {error.verify_message.rstrip('.')}"
    code = error.reason or ""
    if _alerted(code):
        alert = _lower(code.partition("ALERT_")[2])
        return f"it refused the certificate of this end ({alert}): another job, or another CA?"
    if code == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "expected a certificate, it showed none"
    if "MAC" in code or "DECRYPT" in code:
        return "expected the bytes that the other end sent, got others: cut off"
    return f"expected TLS, got something else ({_lower(code)}): is security.tls.mode the same everywhere?"


def no_tls(error: ssl.SSLError) -> str:
    """Words about a server that speaks no TLS of ours; "" if either end does not believe the other's certificate."""
    code = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError) or _alerted(code):
        return ""
    return f"it speaks no TLS there ({_lower(code)}): security.tls.mode has to be the same everywhere, or it is no job"


def _alerted(code: str) -> bool:
    """Whether the other end refuses our certificate; an alert about the version comes before any certificate."""
    return "ALERT" in code and "VERSION" not in code


def _lower(code: str) -> str:
    return code.lower().replace("_", " ")
