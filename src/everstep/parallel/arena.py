"""Where messages lie in a sender's memory: runs of bytes that are taken by step and given back all at once."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from everstep.base.errors import check

_WINDOW = 8
_SLACK_BYTES = 16 << 20


class _Taken(NamedTuple):
    step: int
    start: int
    stop: int


class Arena:
    """Hands out 64-byte aligned runs of [0, room_bytes). The same steps in the same order get the same places again,
    so pages once touched go on being used.
    """

    def __init__(self, room_bytes: int) -> None:
        self._room = room_bytes
        self._taken: list[_Taken] = []
        self._next = 0
        self._limit = room_bytes
        self._touched = 0
        self._peaks: deque[int] = deque(maxlen=_WINDOW)
        self._peak = 0

    def __len__(self) -> int:
        """How many runs are taken."""
        return len(self._taken)

    def take(self, step: int, size_bytes: int) -> int:
        """The start of a run of size_bytes (a multiple of 64)."""
        if self._next + size_bytes > self._limit and self._limit < self._room:
            # The gap below the oldest run is full: go on above all of them.
            self._next, self._limit = max(t.stop for t in self._taken), self._room
        stop = self._next + size_bytes
        check(stop <= self._limit, f"{stop} bytes in flight do not fit into the channel's {self._room}")
        self._taken.append(_Taken(step, self._next, stop))
        start, self._next = self._next, stop
        self._touched = max(self._touched, stop)
        self._peak = max(self._peak, stop)
        return start

    def forget(self, step: int) -> tuple[int, int]:
        """Runs of steps up to this one are free. Returns a range [start, stop) that has not been used for long."""
        kept = [t for t in self._taken if t.step > step]
        if len(kept) == len(self._taken):
            return 0, 0
        self._taken = kept
        self._next, self._limit = 0, min((t.start for t in kept), default=self._room)
        if not self._limit:
            self._next, self._limit = max(t.stop for t in kept), self._room
        self._peaks.append(self._peak)
        self._peak = max((t.stop for t in kept), default=0)
        used = max(*self._peaks, self._peak) + _SLACK_BYTES
        if len(self._peaks) < _WINDOW or used >= self._touched:
            return 0, 0
        idle = used, self._touched
        self._touched = used
        return idle

    def clear(self) -> None:
        """Everything is free."""
        self.forget(1 << 62)
