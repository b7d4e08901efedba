"""Processes of one host that a foreign launcher has started wait here for the one of them that became the job or the
agent, and learn its exit code.

That one listens at an abstract socket of the host, which ends with it; the others connect and wait. Nobody can take its
name first: half of it is random, and the others find it in the kernel's list of sockets. The kernel says whose process
is at the other end, so only processes of the same user count.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import struct
import sys
import time

from everstep.base.errors import ConfigError, NoHead

PATIENCE_S = 600.0
_AGAIN_S = 0.1
_PEER = struct.Struct("3i")
_CODE = struct.Struct("B")
_MOST_WAITING = 4096
_LISTENS = b"00010000"
_NAME_AT = 7  # in a row of /proc/net/unix; source: proc(5)


class Waited:
    """The process that the others on this host wait for; key: names the launcher's start on this host.

    Raises: ConfigError if a process of this user already has that part.
    """

    def __init__(self, key: str) -> None:
        name = _prefix(key) + secrets.token_hex(16).encode()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(name)
        self._listener.listen(_MOST_WAITING)
        for other in _listening(key) - {name}:
            if (found := _own_at(other)) is not None:
                found.close()
                self._listener.close()
                raise ConfigError(
                    "another process of this host is the first of this launcher's: expected one with local rank 0"
                )

    def tell(self, exit_code: int) -> None:
        """Have the waiting processes end with this code, too; later ones find nobody."""
        self._listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                found, _ = self._listener.accept()
                with found, contextlib.suppress(OSError):
                    if user_of(found) == os.getuid():
                        found.sendall(_CODE.pack(exit_code & 0xFF))
        self._listener.close()


def wait_for(key: str, patience_s: float = PATIENCE_S) -> int:
    """Wait for that process of this host. Returns its exit code, 1 if it has died without a word.

    The first SIGINT or SIGTERM is for that process to act upon, which gets it too; a second one ends the wait.

    Raises: NoHead if there is none for so long.
    """
    signals: list[int] = []
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda found, frame: signals.append(found))
    with _connected(key, time.monotonic() + patience_s, signals) as sock:
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        while not poller.poll(1000.0):
            if len(signals) > 1:
                return 128 + signals[-1]
        said = b""
        with contextlib.suppress(ConnectionError):
            said = sock.recv(_CODE.size)
    if said:
        return int(_CODE.unpack(said)[0])
    print("error: the first process of this host, which ran the job here, has died", file=sys.stderr, flush=True)
    return 1


def user_of(sock: socket.socket) -> int:
    """User of the process at the other end of this Unix socket, by the kernel's word."""
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid)


def _connected(key: str, end_s: float, signals: list[int]) -> socket.socket:
    while True:
        for name in _listening(key):
            if (found := _own_at(name)) is not None:
                return found
        if signals or time.monotonic() > end_s:
            raise NoHead("the first process of this host has not started: its own output says why")
        time.sleep(_AGAIN_S)


def _own_at(name: bytes) -> socket.socket | None:
    """Connection to a process of this user that listens at an abstract name; None if there is none. Never waits."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.connect(name)
        if user_of(sock) == os.getuid():
            sock.setblocking(True)
            return sock
    sock.close()
    return None


def _prefix(key: str) -> bytes:
    return f"\0everstep-{os.getuid()}-{key}-".encode()


def _listening(key: str) -> set[bytes]:
    """Abstract names with the first process's prefix at which somebody listens."""
    prefix = _prefix(key)
    with contextlib.suppress(OSError), open("/proc/net/unix", "rb") as file:
        rows = (line.rstrip(b"\n").split(None, _NAME_AT) for line in file)
        found = (row[_NAME_AT] for row in rows if len(row) > _NAME_AT and row[3] == _LISTENS)
        return {b"\0" + name[1:] for name in found if name.startswith(b"@" + prefix[1:])}
    return set()
