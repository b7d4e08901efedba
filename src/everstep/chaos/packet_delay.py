"""A process that delays packets on purpose: it keeps each one for a while, then sends it on. Linux, root.

Packets come by a TAP interface, into which a filter redirects them (`runtime/host/packet_faults.py`), and leave by the
interface that they were for. There they bear a mark, so that the filter lets them pass; all other rules of that
interface apply to them, too. The TAP interface hands over packets that the kernel has cut to size and summed. It ends
with the process; if it is removed, the process sends its remaining packets, and ends.

Apart because it is a process of its own: one packet at a time is too much for an agent that has heartbeats to send.
The agent starts it by its module's name.

Source: Linux, Documentation/networking/tuntap.rst; packet(7); socket(7) for SO_MARK.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from math import inf

from everstep.base.errors import ConfigError
from everstep.base.readable import readable

_ETHERNET = 1
_SO_SNDBUFFORCE = 32
_MOST_SENT_BYTES = 8 << 20  # in the socket's buffer, before the interface takes them
_MOST_HELD_BYTES = 64 << 20
_OVERHEAD_BYTES = 160  # of one waiting packet
_MOST_PACKET_BYTES = 65_600
_AT_ONCE = 64


class PacketQueue:
    """Packets in their order, each held for `by_s`. Packets that come when `most_bytes` are full are lost. Pure."""

    def __init__(self, by_s: float, most_bytes: int = _MOST_HELD_BYTES) -> None:
        self._by_s = by_s
        self._room = most_bytes
        self._waiting: deque[tuple[float, bytes]] = deque()

    def put(self, packet: bytes, now_s: float) -> bool:
        """Add a packet; False: it is lost. now_s: never less than before."""
        size = len(packet) + _OVERHEAD_BYTES
        if size > self._room:
            return False
        self._room -= size
        self._waiting.append((now_s + self._by_s, packet))
        return True

    def due(self, now_s: float) -> list[bytes]:
        """Packets whose time has come; they leave the queue."""
        found = []
        while self._waiting and self._waiting[0][0] <= now_s:
            found.append(self._waiting.popleft()[1])
            self._room += len(found[-1]) + _OVERHEAD_BYTES
        return found

    def due_in(self, now_s: float) -> float | None:
        """Seconds until the next packet is due, None if there is none."""
        return max(0.0, self._waiting[0][0] - now_s) if self._waiting else None


def link_by(interface: str, mark: int) -> socket.socket:
    """Socket that sends whole Ethernet frames on the interface, with the mark, and never waits.

    Raises: ConfigError if the interface has no such frames; OSError.
    """
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    link.setblocking(False)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
    link.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _MOST_SENT_BYTES)
    link.bind((interface, 0))
    if link.getsockname()[3] != _ETHERNET:
        raise ConfigError(f"expected an Ethernet interface, to delay packets there, got {interface}")
    return link


def carry(end: int, own: bytes, link: socket.socket, queue: PacketQueue) -> None:
    """Take packets from `end`, and send them when they are due, until the interface is gone.

    own: the interface's address; packets that the kernel itself sends there are dropped.
    """
    there = True
    while there:
        there = _take(end, own, queue)
        for packet in queue.due(time.monotonic() if there else inf):
            try:
                link.send(packet)
            except OSError:  # no room, or the link is down: lost, as on any link
                continue
        if there:
            readable([end], queue.due_in(time.monotonic()))


def _take(end: int, own: bytes, queue: PacketQueue) -> bool:
    """Take packets that have come, up to a limit; False: the interface is gone."""
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
    """Entry point of the process. Its standard input is the TAP interface. It prints one line: that interface's name
    when it is ready, or why it cannot start."""
    interface, name, by_s, mark = sys.argv[-4:]
    try:
        link, own = link_by(interface, int(mark)), link_by(name, int(mark)).getsockname()[4]
    except (ConfigError, OSError) as error:
        print(error)
        return 2
    print(name, flush=True)
    carry(sys.stdin.fileno(), own, link, PacketQueue(float(by_s)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
