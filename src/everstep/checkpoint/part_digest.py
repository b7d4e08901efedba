"""The SHA-256 that a signature has of a part, made from memory by who writes it, as the bytes go out.

What a store hands back later has no say in it. A thread of its own makes it, so that the state is held up no longer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

from torch import Tensor

_ROOMS = 4


def digest_of(head: bytes, blocks: bytes) -> str:
    """Digest of a part in hex, from the SHA-256 of its head, which is known last, and that of all its blocks."""
    return hashlib.sha256(blocks + head).hexdigest()


class PartDigest(AbstractContextManager["PartDigest"]):
    """Hears of the blocks that are written. buffer: makes memory for one block. wanted: else there is no digest."""

    def __init__(self, buffer: Callable[[], Tensor], *, wanted: bool) -> None:
        self._rooms: list[tuple[Tensor, Future[None] | None]] = [
            (buffer(), None) for _ in range(_ROOMS if wanted else 1)
        ]
        self._turn = 0
        self._blocks = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "everstep-sha256") if wanted else None

    def room(self) -> Tensor:
        """Memory for the next block, of which nothing is still to be read."""
        self._turn = (self._turn + 1) % len(self._rooms)
        memory, pending = self._rooms[self._turn]
        if pending is not None:
            pending.result()
        return memory

    def add(self, block: memoryview) -> None:
        """The next block that goes out; it must not change until its room is asked for again."""
        if self._thread is not None:
            self._rooms[self._turn] = self._rooms[self._turn][0], self._thread.submit(self._blocks.update, block)

    def of(self, head: bytes) -> str:
        """The digest of the part with this head; "" if none is wanted."""
        if self._thread is None:
            return ""
        self._thread.shutdown()
        return digest_of(hashlib.sha256(head).digest(), self._blocks.digest())

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
