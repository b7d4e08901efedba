"""Where the hosts of a foreign launcher's start meet: which address the job has for the others, and at which port.

A launcher that keeps a store is asked to pass the address on (`train.launcher_store`). Else the job listens at one of a
few ports that all of them know, and the others try these until one proves the job's token.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Sequence

from everstep.base.config_keys import TlsConfig
from everstep.base.errors import ConfigError, ProtocolError, QuorumLost
from everstep.protocol.roles import READ
from everstep.runtime.link import wire
from everstep.runtime.link.handshake import role_token
from everstep.runtime.link.tls import Tls, shown_by

PATIENCE_S = 600.0
_ANSWER_S = 2.0
_AGAIN_S = 0.25


def address_towards(host: str, port: int = 9) -> str:
    """This host's IPv4 address on its way to another one; "" if that has no address, or no way leads there."""
    with contextlib.suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, port))  # sends nothing
        return str(sock.getsockname()[0])
    return ""


def is_reachable(address: str) -> bool:
    """Whether other hosts may reach one at this IPv4 address."""
    try:
        found = ipaddress.IPv4Address(address)
    except ValueError:
        return False
    return not (found.is_loopback or found.is_unspecified or found.is_multicast)


def reserve(address: str, ports: Sequence[int] = (0,)) -> socket.socket:
    """The first of these ports that is free, 0: any, kept for who listens with SO_REUSEADDR until it is closed.

    Raises: ConfigError if none is free there.
    """
    why = ""
    for port in ports:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            return sock
        except OSError as error:
            sock.close()
            why = error.strerror or str(error)
    tried = ", ".join(map(str, ports))
    raise ConfigError(f"cannot listen at {address}, port {tried} ({why}): set MASTER_ADDR and MASTER_PORT")


def find_job(host: str, ports: Sequence[int], token: bytes, tls: TlsConfig, patience_s: float = PATIENCE_S) -> int:
    """The port of the job with this token, which listens at one of these there; waits until it does.

    Raises: QuorumLost if none has answered for so long.
    """
    end_s = time.monotonic() + patience_s
    while True:
        said = ""
        for port in ports:
            try:
                _ask(host, port, token, tls)
                return port
            except (OSError, ProtocolError, UnicodeError) as error:
                said = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if time.monotonic() > end_s:
            tried = ", ".join(map(str, ports))
            raise QuorumLost(f"no job answers at {host}, port {tried}, for {patience_s:g} s (last: {said})")
        time.sleep(_AGAIN_S)


def _ask(host: str, port: int, token: bytes, tls: TlsConfig) -> None:
    """Raises: OSError, ProtocolError unless a job with this token answers."""
    sock = socket.create_connection((host, port), _ANSWER_S)
    shown = Tls.of(shown_by(tls, token, str(sock.getsockname()[0])))
    with wire.secured(sock, shown) as sock:
        wire.handshake_client(sock, role_token(token, READ), READ, f"host-{os.getpid()}")
