"""What other threads and signal handlers have for a loop that waits for descriptors."""

from __future__ import annotations

import contextlib
import os
import select
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue and a descriptor. `fd` is readable while there may be something in it."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self.fd, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def put(self, item: T) -> None:
        """Any thread; also a signal handler."""
        self._items.append(item)
        with contextlib.suppress(OSError):  # full: it is readable anyway; closed: nobody waits any more
            os.write(self._wake, b"\0")

    def take(self) -> list[T]:
        """All that is there."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
        return [self._items.popleft() for _ in range(len(self._items))]

    def close(self) -> None:
        """Give the descriptors back."""
        wake, self._wake = self._wake, -1
        os.close(wake)
        os.close(self.fd)


def readable(fds: Iterable[int], timeout_s: float) -> set[int]:
    """Those of these descriptors that can be read, or have come to an end; negative ones are passed over."""
    poller = select.poll()
    for fd in fds:
        if fd >= 0:
            poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(max(0.0, timeout_s) * 1000)}
