"""The meeting place of hosts that a foreign launcher started: the job's address for the others, and its port.

A launcher with a store is asked to pass the address on (`train.launcher_store`). Otherwise the job listens at one of a
few ports that all of them know, and the others try these until one proves the job's token.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

from everstep.base.errors import ConfigError
from everstep.runtime.link.interfaces import route_to
from everstep.runtime.link.listening import family_of

PATIENCE_S = 600.0


def address_towards(host: str) -> str:
    """This host's address on its way to another one; "" if that has no address, or there is no route."""
    with contextlib.suppress(OSError, UnicodeError):
        return route_to(host)
    return ""


def is_reachable(address: str) -> bool:
    """Whether other hosts may reach this host at this address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    linked = found.version == 6 and found.is_link_local
    return not (found.is_loopback or found.is_unspecified or found.is_multicast or linked)


def reserve(address: str, ports: Sequence[int] = (0,)) -> socket.socket:
    """The first of these ports that is free, 0: any, kept for a listener with SO_REUSEADDR until it is closed.

    Raises: ConfigError if none is free there.
    """
    why = ""
    for port in ports:
        sock = socket.socket(family_of(address))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            return sock
        except OSError as error:
            sock.close()
            why = error.strerror or str(error)
    tried = ", ".join(map(str, ports))
    raise ConfigError(f"cannot listen at {address}, port {tried} ({why}): set MASTER_ADDR and MASTER_PORT")
