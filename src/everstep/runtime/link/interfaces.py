"""This host's network as its kernel knows it: addresses, interfaces, routes, sizes of packets. Linux."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator

from everstep.base.config_keys import NetworkConfig
from everstep.base.doors import canonical, is_loopback
from everstep.base.errors import ConfigError
from everstep.runtime.link.listening import family_of

_SIOCGIFCONF = 0x8912
_SIOCGIFMTU = 0x8921
_IP_MTU, _IPV6_MTU = 14, 24
_IF_INET6 = "/proc/net/if_inet6"
_LINK_LOCAL, _UNFIT = 0x20, 0x48  # a scope; flags of addresses that are not unique on their link, or may not be
_ROW_BYTES, _NAME_BYTES, _ADDRESS_AT = 40, 16, 20  # struct ifreq of 64-bit Linux: a name, then a sockaddr
_MOST_ROWS = 4096
_DISCARD = 9


def addresses() -> dict[str, str]:
    """The addresses of this host, each with the name of its interface: IPv4 first, then IPv6 ones that other hosts can
    use without a name of a link."""
    rows = array.array("B", bytes(_ROW_BYTES * _MOST_ROWS))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, struct.pack("iL", len(rows), rows.buffer_info()[0]))
    data, found = rows.tobytes()[: struct.unpack("iL", answer)[0]], {}
    for at in range(0, len(data), _ROW_BYTES):
        name = data[at : at + _NAME_BYTES].split(b"\0")[0].decode(errors="replace")
        address = socket.inet_ntoa(data[at + _ADDRESS_AT : at + _ADDRESS_AT + 4])
        found[address] = name.partition(":")[0]  # a second address may have a label
    with contextlib.suppress(OSError), open(_IF_INET6) as file:  # none without IPv6
        for row in file:
            digits, _, _, scope, flags, name = row.split()
            if int(scope, 16) != _LINK_LOCAL and not int(flags, 16) & _UNFIT:
                found[str(ipaddress.IPv6Address(bytes.fromhex(digits)))] = name
    return found


def address_on(interface: str, key: str = "network.interface", like: str = "") -> str:
    """The first address of an interface. key: the config key or option that named it. like: an address; one of its kind
    is preferred.

    Raises: ConfigError naming the interfaces that there are.
    """
    known = addresses()
    there = [address for address, name in known.items() if name == interface]
    if there:
        return next((address for address in there if (":" in address) == (":" in like)), there[0])
    others = ", ".join(f"{name} ({address})" for address, name in known.items())
    raise ConfigError(
        f"{key}: expected an interface of this host with an address, got {interface!r}: there are {others}"
    )


def interface_of(address: str) -> str:
    """Interface with this address, "" if none."""
    return addresses().get(canonical(address), "")


def check_own(name: str, address: str) -> str:
    """The address as all hosts write it. name: the key or option that it comes from.

    Raises: ConfigError if nothing can listen there, on this host.
    """
    own = canonical(address)
    with socket.socket(family_of(own)) as sock:
        try:
            sock.bind((own, 0))
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(
                f"{name}: expected one of this host's addresses, got {address!r} ({why}): give one of 'ip addr'"
            ) from None
    return own


def found_at(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Where a host may be called, with the kind of socket: its IPv4 addresses first. Raises: OSError if it has none;
    UnicodeError for what cannot be a name."""
    rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    both = ((row[0], (str(row[4][0]), port)) for row in rows if row[0] in (socket.AF_INET, socket.AF_INET6))
    return sorted(both, key=lambda row: row[0] != socket.AF_INET)


@contextlib.contextmanager
def _towards(host: str) -> Iterator[socket.socket]:
    """A socket whose packets would go there. Raises: OSError if there is no route, or no host has the name."""
    why = OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
    for family, address in found_at(host, _DISCARD):
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect(address)
            except OSError as error:
                why = error
                continue
            yield sock
            return
    raise why


def route_to(host: str) -> str:
    """This host's address from which packets to that one leave. Nothing is sent.

    Raises: OSError if there is no route, or no host has the name.
    """
    with _towards(host) as sock:
        return str(sock.getsockname()[0])


def path_mtu(host: str) -> int:
    """Bytes of the largest packet that gets there whole, as far as this host knows by now. Raises: OSError."""
    with _towards(host) as sock:
        if sock.family == socket.AF_INET6:
            return sock.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
        return sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)


def mtu_of(interface: str) -> int:
    """Bytes of the largest packet that leaves by an interface, 0 if unknown."""
    row = struct.pack(f"{_NAME_BYTES}s{_ROW_BYTES - _NAME_BYTES}x", interface.encode())
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        found: int = struct.unpack_from("i", fcntl.ioctl(sock.fileno(), _SIOCGIFMTU, row), _NAME_BYTES)[0]
        return found
    return 0


def own_address(network: NetworkConfig, given: str | None, head: str) -> str:
    """The address of this host that others of the job are told: the given one, else that of the interface which the
    config names, else the one from which the job's head is reached. head: address at which that listens.

    Raises: ConfigError if it is none of this host's, or one that the head's host cannot reach; OSError if there is no
    route to the head.
    """
    if given is not None and network.interface is not None and interface_of(given) != network.interface:
        raise ConfigError(
            f"--address: expected an address of the interface {network.interface} (network.interface), got {given}: "
            "give one of the two"
        )
    if given is not None:
        given = check_own("--address", given)
    own = given or (route_to(head) if network.interface is None else _on(network.interface, head))
    if is_loopback(own) and not is_loopback(route_to(head)):
        raise ConfigError(
            f"--address: expected an address that the job's other hosts can reach, got {own} (loopback), while the job "
            f"listens at {head}: leave it out, or give one of 'ip addr'"
        )
    return own


def _on(interface: str, head: str) -> str:
    """The interface's address of the kind that the head has."""
    towards = ""
    with contextlib.suppress(OSError):
        towards = route_to(head)
    return address_on(interface, like=towards)


def bind_collectives(address: str) -> dict[str, str]:
    """Environment variables that make gloo and NCCL use this address's interface and no other."""
    name = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}
