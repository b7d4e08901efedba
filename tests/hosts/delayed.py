"""Hosts as network namespaces behind a switch in user space that delays every packet: a wire to another city.

Apart from `net` because packets pass through a process here: for what takes round trips, not for what takes bandwidth.
Needs root, Linux and /dev/net/tun.

    python delayed.py NAME HOSTS DELAY_MS     the switch itself, as `DelayedNet` starts it: it ends with its input
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time

from net import Host

_TUNSETIFF, _TAP, _NO_INFO = 0x400454CA, 2, 0x1000
_CLONE_NEWNET = 0x40000000
_MOST_BYTES = 65600
_AT_ONCE = 64


class DelayedNet:
    """Hosts at 10.77.0.1, .2, ... whose packets take `delay_ms` to any other; all is removed in the end."""

    def __init__(self, hosts: int, name: str, delay_ms: float) -> None:
        self.name = name
        self.hosts = [Host(self, number) for number in range(1, hosts + 1)]
        words = [sys.executable, __file__, name, str(hosts), str(delay_ms)]
        self._switch = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._switch.stdout is not None
        assert self._switch.stdout.readline() == b"ready\n", "the switch did not start"

    @property
    def switch(self) -> str:
        """Nothing of it is in a namespace of its own."""
        return ""

    def close(self) -> None:
        """End everything, and remove it. A second time does nothing."""
        hosts, self.hosts = self.hosts, []
        for host in hosts:
            host.kill()
        if self._switch.stdin is not None and hosts:
            self._switch.stdin.close()
            self._switch.wait()


def _tap(namespace: str, address: str) -> int:
    """A link called eth0 in the namespace; returns the descriptor of its other end, which stays here."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(there, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    try:
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", b"eth0", _TAP | _NO_INFO))
    finally:
        libc.setns(home, _CLONE_NEWNET)
        os.close(home)
        os.close(there)
    for words in ("link set lo up", "link set eth0 mtu 9000 up", f"addr add {address}/24 dev eth0"):
        subprocess.run(["ip", "-n", namespace, *words.split()], check=True)
    return end


def _serve(ends: list[int], delay_s: float) -> None:
    """Carry frames until standard input ends."""
    known: dict[bytes, int] = {}
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    poller = select.poll()
    for end in (*ends, sys.stdin.fileno()):
        poller.register(end, select.POLLIN)
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        for fd, _ in poller.poll(1000 * wait_s):
            if fd not in ends:
                return
            for _ in range(_AT_ONCE):
                try:
                    frame = os.read(fd, _MOST_BYTES)
                except BlockingIOError:
                    break
                known[frame[6:12]] = fd
                to = known.get(frame[:6])
                for other in [to] if to is not None else [end for end in ends if end != fd]:
                    count += 1
                    heapq.heappush(waiting, (time.monotonic() + delay_s, count, other, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, other, frame = heapq.heappop(waiting)
            try:
                os.write(other, frame)
            except OSError:  # lost, as on any wire
                continue


def _main() -> None:
    name, hosts, delay_ms = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    names = [f"{name}h{number}" for number in range(1, hosts + 1)]
    for namespace in names:
        subprocess.run(["ip", "netns", "add", namespace], check=True)
    try:
        ends = [_tap(namespace, f"10.77.0.{number}") for number, namespace in enumerate(names, start=1)]
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        _serve(ends, delay_ms / 1e3)
    finally:
        for namespace in names:
            subprocess.run(["ip", "netns", "del", namespace])


if __name__ == "__main__":
    _main()
