"""This host's network as its kernel knows it: addresses, interfaces, routes, sizes of packets. Linux."""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct

from everstep.base.config_keys import NetworkConfig
from everstep.base.doors import is_loopback
from everstep.base.errors import ConfigError

_SIOCGIFCONF = 0x8912
_SIOCGIFMTU = 0x8921
_IP_MTU = 14
_ROW_BYTES, _NAME_BYTES, _ADDRESS_AT = 40, 16, 20  # struct ifreq of 64-bit Linux: a name, then a sockaddr
_MOST_ROWS = 4096
_DISCARD = 9


def addresses() -> dict[str, str]:
    """The IPv4 addresses of this host, each with the name of its interface."""
    rows = array.array("B", bytes(_ROW_BYTES * _MOST_ROWS))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, struct.pack("iL", len(rows), rows.buffer_info()[0]))
    data, found = rows.tobytes()[: struct.unpack("iL", answer)[0]], {}
    for at in range(0, len(data), _ROW_BYTES):
        name = data[at : at + _NAME_BYTES].split(b"\0")[0].decode(errors="replace")
        address = socket.inet_ntoa(data[at + _ADDRESS_AT : at + _ADDRESS_AT + 4])
        found[address] = name.partition(":")[0]  # a second address may have a label
    return found


def address_on(interface: str, key: str = "network.interface") -> str:
    """The first IPv4 address of an interface. key: the config key or option that named it.

    Raises: ConfigError naming the interfaces that there are.
    """
    known = addresses()
    for address, name in known.items():
        if name == interface:
            return address
    there = ", ".join(f"{name} ({address})" for address, name in known.items())
    raise ConfigError(
        f"{key}: expected an interface of this host with an IPv4 address, got {interface!r}: there are {there}"
    )


def interface_of(address: str) -> str:
    """Interface with this address, "" if none."""
    return addresses().get(address, "")


def check_own(name: str, address: str) -> None:
    """name: the key or option that the address comes from.

    Raises: ConfigError if nothing can listen there, on this host.
    """
    with socket.socket() as sock:
        try:
            sock.bind((address, 0))
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(
                f"{name}: expected one of this host's addresses, got {address!r} ({why}): give one of 'ip -4 addr'"
            ) from None


def route_to(host: str) -> str:
    """This host's address from which packets to that one leave. Nothing is sent.

    Raises: OSError if there is no route, or no host has the name.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, _DISCARD))
        return str(sock.getsockname()[0])


def path_mtu(host: str) -> int:
    """Bytes of the largest packet that gets there whole, as far as this host knows by now. Raises: OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, _DISCARD))
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
        check_own("--address", given)
    own = given or (address_on(network.interface) if network.interface is not None else route_to(head))
    if is_loopback(own) and not is_loopback(route_to(head)):
        raise ConfigError(
            f"--address: expected an address that the job's other hosts can reach, got {own} (loopback), while the job "
            f"listens at {head}: leave it out, or give one of 'ip -4 addr'"
        )
    return own


def bind_collectives(address: str) -> dict[str, str]:
    """Environment variables that make gloo and NCCL use this address's interface and no other."""
    name = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}
