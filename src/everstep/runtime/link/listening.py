"""Ports at which this process listens for others of its job: any, or those that a firewall lets through."""

from __future__ import annotations

import errno
import os
import socket

from everstep.base.doors import PORTS_PER_WORKER, PortRange
from everstep.base.errors import ConfigError

_within: list[PortRange] = []
"""The range of this process, if it has one: all its listeners are meant for the same firewall."""


def keep_within(ports: PortRange | None) -> None:
    """From now on `listen` takes ports of this range only; None: any port."""
    _within[:] = [] if ports is None else [ports]


def family_of(address: str) -> socket.AddressFamily:
    """The kind of sockets for an address; for a name that of IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen(host: str, backlog: int) -> socket.socket:
    """A socket that listens at this address, at a port of the range, or at any that is free.

    Raises: ConfigError if no port of the range is free; OSError.
    """
    family = family_of(host)
    if not _within:
        return socket.create_server((host, 0), family=family, backlog=backlog)
    ports = _within[0]
    begin = os.getpid() * PORTS_PER_WORKER % ports.size  # so that not all processes begin with the same ones
    for turn in range(ports.size):
        try:
            port = ports.first + (begin + turn) % ports.size
            return socket.create_server((host, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise ConfigError(
        f"network.ports: all of {ports} are taken at {host}: each worker of a host needs {PORTS_PER_WORKER}, and its "
        "agent may need 1; give a larger range"
    )
