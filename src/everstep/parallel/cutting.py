"""Freeing whoever waits in a gloo operation: by ending the connections beneath it.

gloo's own `abort()` and `shutdown()` unblock nothing. What does is shutdown(2) on the group's connected sockets; they
are found by address: one end is the listening address of a member. Never the listening socket itself (gloo would call
std::terminate), and nothing else that the process has open.
Source: measured on torch 2.13: pending operations raise within 3 ms.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

Address = tuple[str, int]
_SYN_SENT = "02"


def listeners() -> dict[int, Address]:
    """Inode and address of all TCP sockets on which this process listens."""
    found = {}
    for _, inode, sock in _sockets():
        try:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[inode] = sock.getsockname()[:2]
        except OSError:
            continue
    return found


def cut(addresses: frozenset[Address]) -> int:
    """Ends every connection of this process of which one end is one of the addresses; returns how many."""
    connecting = None
    count = 0
    for _, inode, sock in _sockets():
        try:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            ends = {sock.getsockname()[:2]}
            try:
                ends.add(sock.getpeername()[:2])
            except OSError:  # not connected, or not yet
                connecting = _connecting() if connecting is None else connecting
                ends |= connecting.get(inode, set())
            if ends & addresses:
                count += 1
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
    return count


def _sockets() -> Iterator[tuple[int, int, socket.socket]]:
    """(descriptor, inode, duplicate) of the TCP sockets of this process; the duplicate is closed afterwards."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:["):
                continue
            copy = os.dup(int(name))
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield int(name), int(target[8:-1]), sock


def _connecting() -> dict[int, set[Address]]:
    """Where the sockets of this network namespace that are still connecting want to go, by inode."""
    found: dict[int, set[Address]] = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            with open(f"/proc/self/net/{table}") as lines:
                rows = [line.split() for line in lines][1:]
        except OSError:
            continue
        for row in rows:
            if row[3] == _SYN_SENT:
                host, port = row[2].split(":")
                words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
                packed = b"".join(struct.pack("=I", word) for word in words)
                found.setdefault(int(row[9]), set()).add((socket.inet_ntop(family, packed), int(port, 16)))
    return found
