"""Packets that take longer, on purpose: a process keeps each of them for a while, then sends it on. Linux, root.

They come by a TAP interface that is made for them, into which a filter redirects them (`links.py`), and leave by the
one that they were for. There they bear a mark, so that the filter lets them pass; whatever else is done to packets
there is done to them, too. The TAP interface hands over packets that the kernel has cut to size and summed. It is gone
with the process; and when somebody removes it the process sends what it still has, and ends.

Apart because it is a process of its own: one packet at a time is too much for an agent that has heartbeats to send.

Source: Linux, Documentation/networking/tuntap.rst; packet(7); socket(7) for SO_MARK.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from math import inf

from everstep.base.errors import ConfigError
from everstep.base.readable import readable
from everstep.runtime.process import lasting_command

MODULE = "everstep.runtime.host.delaying"
MARK = 0x65767374
"""What packets bear that have been delayed; nobody else is likely to mark any with it."""
QUEUE_PACKETS = 10_000
"""So many may wait in the interface while the process does something else."""
_TUN = "/dev/net/tun"
_TUNSETIFF, _TAP, _NO_INFO = 0x400454CA, 2, 0x1000
_NAME_BYTES = 16
_ETHERNET = 1
_SO_SNDBUFFORCE = 32
_MOST_SENT_BYTES = 8 << 20  # by the socket and not yet by the interface
_MOST_HELD_BYTES = 64 << 20
_OVERHEAD_BYTES = 160  # of one packet that waits
_MOST_PACKET_BYTES = 65_600
_AT_ONCE = 64
_LIMIT_S = 10.0
_MOST_WORDS_BYTES = 300
_READY = "ready"


class PacketQueue:
    """Packets in their order, each for `by_s`. Those that come when `most_bytes` are full are lost. Pure."""

    def __init__(self, by_s: float, most_bytes: int = _MOST_HELD_BYTES) -> None:
        self._by_s = by_s
        self._room = most_bytes
        self._waiting: deque[tuple[float, bytes]] = deque()

    def put(self, packet: bytes, now_s: float) -> bool:
        """One has come; False: it is lost. now_s: never less than before."""
        size = len(packet) + _OVERHEAD_BYTES
        if size > self._room:
            return False
        self._room -= size
        self._waiting.append((now_s + self._by_s, packet))
        return True

    def due(self, now_s: float) -> list[bytes]:
        """Those whose time has come, which wait no more."""
        found = []
        while self._waiting and self._waiting[0][0] <= now_s:
            found.append(self._waiting.popleft()[1])
            self._room += len(found[-1]) + _OVERHEAD_BYTES
        return found

    def due_in(self, now_s: float) -> float | None:
        """Seconds until the next one is due, None if there is none."""
        return max(0.0, self._waiting[0][0] - now_s) if self._waiting else None


class Detour:
    """An interface for packets on their way through a process. It is there from now on, down, until that ends.

    name: what the kernel has called it.

    Raises: ConfigError if there can be none here.
    """

    def __init__(self) -> None:
        try:
            self._end = os.fdopen(os.open(_TUN, os.O_RDWR | os.O_NONBLOCK), "r+b", buffering=0)
            answer = fcntl.ioctl(self._end, _TUNSETIFF, struct.pack(f"{_NAME_BYTES}sH22x", b"evs%d", _TAP | _NO_INFO))
        except OSError as error:
            raise ConfigError(f"{_TUN}: {error.strerror or error}") from None
        self.name = answer[:_NAME_BYTES].split(b"\0")[0].decode()

    def start(self, interface: str, by_s: float) -> subprocess.Popen[bytes]:
        """Start the process, which keeps each packet for `by_s` and sends it out by `interface`; returns when it is
        ready.

        Raises: ConfigError with its words if it cannot.
        """
        command = lasting_command(MODULE, interface, self.name, repr(by_s))
        with self._end as end:
            process = subprocess.Popen(
                command, stdin=end, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
            )
        words = ""
        if process.stdout is not None:
            with process.stdout as said:
                if readable([said.fileno()], _LIMIT_S):
                    words = said.readline(_MOST_WORDS_BYTES).decode(errors="replace").strip()
        if words != _READY:
            process.kill()
            process.wait()
            raise ConfigError(words or "the process that delays packets did not begin")
        return process


def link_by(interface: str) -> socket.socket:
    """What sends whole Ethernet frames out there, with the mark, and never waits.

    Raises: ConfigError if there are no such frames there; OSError.
    """
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    link.setblocking(False)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
    link.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _MOST_SENT_BYTES)
    link.bind((interface, 0))
    if link.getsockname()[3] != _ETHERNET:
        raise ConfigError(f"expected an Ethernet interface, to delay packets there, got {interface}")
    return link


def carry(end: int, own: bytes, link: socket.socket, queue: PacketQueue) -> None:
    """Take packets from `end`, and send them when they are due, until the interface is gone.

    own: the interface's address: what the kernel says by itself there is for nobody.
    """
    there = True
    while there:
        there = _take(end, own, queue)
        for packet in queue.due(time.monotonic() if there else inf):
            try:
                link.send(packet)
            except OSError:  # no room, or the link is down: lost, as on any
                continue
        if there:
            readable([end], queue.due_in(time.monotonic()))


def _take(end: int, own: bytes, queue: PacketQueue) -> bool:
    """What has come, or much of it; False: the interface is gone."""
    for _ in range(_AT_ONCE):
        try:
            packet = os.read(end, _MOST_PACKET_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not packet:
            return False
        if packet[6:12] != own:
            queue.put(packet, time.monotonic())
    return True


def main() -> int:
    """Entry point of the process. Its standard input is the interface; it says one line."""
    interface, name, by_s = sys.argv[-3:]
    try:
        link, own = link_by(interface), link_by(name).getsockname()[4]
    except (ConfigError, OSError) as error:
        print(error)
        return 2
    print(_READY, flush=True)
    carry(sys.stdin.fileno(), own, link, PacketQueue(float(by_s)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
