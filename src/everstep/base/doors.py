"""Addresses and ports that a job may use: which of them are refused, and how many ports a host needs. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

from everstep.base.errors import ConfigError

PORTS_PER_WORKER = 2
"""Ports of a running worker: one where peers reach it, and one while a generation meets."""
LEAST_PORT = 1024


class PortRange(NamedTuple):
    """Ports from the first to the last, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def size(self) -> int:
        return self.last - self.first + 1


def parse_ports(text: str | None) -> PortRange | None:
    """Range of ports that `network.ports` names; None: any port.

    Raises: ConfigError if it is no such range.
    """
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and LEAST_PORT <= int(first) <= int(last) <= 65535):
        raise ConfigError(
            f"network.ports: expected FIRST-LAST from {LEAST_PORT} to 65535, got {text!r}: give e.g. 29500-29599"
        )
    return PortRange(int(first), int(last))


def check_ports(text: str | None, workers: int, beside: Sequence[str] = (), *, spans: bool = False) -> None:
    """Check that the range has enough ports for `workers`, the number that may run on one host. beside: what else
    listens there, at a port each. spans: each of them has a part on other hosts, and a port for these.

    Raises: ConfigError if it is too small; the message says how many are needed.
    """
    per_worker = PORTS_PER_WORKER + spans
    found, needed = parse_ports(text), workers * per_worker + len(beside)
    if found is not None and found.size < needed:
        each = ", ".join([f"{per_worker} for each", *(f"1 for {what}" for what in beside)])
        raise ConfigError(
            f"network.ports: expected at least {needed} ports for {workers} worker{'s' * (workers != 1)} on a host "
            f"({each}), got {found.size} ({found}): give a larger range"
        )


def at_port(host: str, port: int) -> str:
    """ "host:port", with an IPv6 address in brackets; `split_at_port` undoes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_at_port(text: str) -> tuple[str, int]:
    """Host and port of "host:port". An IPv6 address stands in brackets there, and is returned without them, in the one
    form that all hosts give it.

    Raises: ValueError for any other text.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535):
        raise ValueError("expected a port from 0 to 65535 behind the last colon")
    if host.startswith("[") and host.endswith("]"):
        try:
            return str(ipaddress.IPv6Address(host[1:-1])), int(port)
        except ValueError:
            raise ValueError("expected an IPv6 address between the brackets") from None
    if not host or ":" in host:
        raise ValueError("expected an IPv6 address in brackets" if host else "expected a host before the colon")
    return host, int(port)


def host_of(text: str) -> str:
    """The host of "host:port"; "" if there is none."""
    try:
        return split_at_port(text)[0]
    except ValueError:
        return ""


def canonical(host: str) -> str:
    """An address in the one form that all hosts give it, without brackets; any other text as it is."""
    try:
        return str(ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host))
    except ValueError:
        return host


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address; False for a name that is no address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(canonical(address)).is_loopback
    except ValueError:
        return False


def check_private(name: str, address: str, *, trusted: bool) -> None:
    """Check an address to listen on. name: key or option that it comes from. trusted: `network.trusted`.

    Raises: ConfigError for a public address, or one that stands for all interfaces, unless `trusted` allows it.
    """
    found = ipaddress.ip_address(address)
    if trusted or not (found.is_global or found.is_unspecified):
        return
    what = "every interface" if found.is_unspecified else "public"
    raise ConfigError(
        f"{name}: expected an address of a private network, got {address} ({what}): use a private address, or set "
        "network.trusted=true if no stranger can reach it"
    )
