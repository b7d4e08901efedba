"""The memory that the processes of one worker share: a memfd that all of them write.

Each other worker's memory has one writer, because a worker that was evicted may come back to life. The processes of a
cell die together, so what they share needs no such care. Its first page holds words by which they wait for each other;
what the others hold is said by `SharedPlace`s, which each of them derives from the same model.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from everstep.base.errors import EverstepError, MembershipError, check
from everstep.parallel.mapping import PAGE, Mapping, load_fence, pages

_COUNTS_AT, _INNER_AT, _WORDS_AT = 1024, 1536, 2048
_MOST_RANKS = 64
_SLEEP_S = 0.002
_SPINS = 20


class PassBroken(EverstepError):
    """Another process of this worker has left the pass that this one is in."""


class SharedPlace(NamedTuple):
    """A place in the memory, in bytes."""

    offset: int
    size: int


class CellMemory(Mapping):
    """One worker's shared memory, from either side. rank: of this process; its head has rank 0.

    Words that the head alone writes: `go`, whether the pass at the gate is made. A process that leaves a pass early
    sets `broken`, and the head clears it before the next command.
    """

    def __init__(self, fd: int, rank: int, size_bytes: int) -> None:
        self._fd = fd
        self.rank = rank
        super().__init__(mmap.mmap(fd, size_bytes))
        self._counts = self.array(ctypes.c_int64, _MOST_RANKS, _COUNTS_AT)
        self._inner = self.array(ctypes.c_int64, _MOST_RANKS, _INNER_AT)
        self._words = self.array(ctypes.c_int64, 2, _WORDS_AT)

    @classmethod
    def create(cls, size_bytes: int) -> CellMemory:
        """The head's end. Pages that nobody has touched cost nothing."""
        fd = os.memfd_create("everstep-cell", os.MFD_CLOEXEC)
        os.ftruncate(fd, pages(size_bytes))
        return cls(fd, 0, pages(size_bytes))

    @classmethod
    def attach(cls, path: str, rank: int, size_bytes: int) -> CellMemory:
        """A limb's end. path: as the head says. Raises: MembershipError if that is no memory of this size."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != pages(size_bytes):
            os.close(fd)
            raise MembershipError(
                f"expected {pages(size_bytes)} bytes that the processes of this worker share, got {found.st_size}: "
                "they have built different models"
            )
        return cls(fd, rank, pages(size_bytes))

    @property
    def path(self) -> str:
        """Where a process of the same user and host opens it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def tensor(self, extent: SharedPlace, dtype: torch.dtype) -> Tensor:
        """The content of a place, flat."""
        check(extent.offset >= PAGE and extent.offset + extent.size <= len(self.memory), f"{extent} is not in here")
        count = extent.size // dtype.itemsize
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=extent.offset)

    def copied(self, extent: SharedPlace) -> mmap.mmap:
        """A mapping of whole pages whose content is shared until this process writes it: writes are its own."""
        flags, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(self._fd, extent.size, flags=flags, prot=access, offset=extent.offset)

    # ---- waiting for each other

    @property
    def go(self) -> bool:
        """Whether the pass at the gate is made."""
        return bool(self._words[0])

    def open_gate(self, go: bool) -> None:
        """The head says, before it comes to the gate, whether the next pass is made."""
        self._words[0] = go

    def break_pass(self) -> None:
        """This process leaves a pass before its end: the others are not to wait for it."""
        self._words[1] = 1
        self._ring()

    def mend(self) -> None:
        """The head is about to give a command: no process is in a pass."""
        self._words[1] = 0

    def meet(self, point: int, ranks: Sequence[int], tick: Callable[[], None], *, inner: bool = False) -> None:
        """Come to a point, and wait until all these ranks, this one among them, have come to it or to a later one. What
        one has written before, the others can read after.

        point: grows from one to the next, also from command to command. inner: points of ranks that compute one lane
        together, which are counted apart. Raises: PassBroken if one has left the pass.
        """
        counts = self._inner if inner else self._counts
        counts[self.rank] = point
        self._ring()
        waits = 0
        while True:
            seen = self.bell
            if all(counts[rank] >= point for rank in ranks):
                load_fence()
                return
            if self._words[1]:
                raise PassBroken("another process of this worker has left the pass")
            waits += 1
            if waits > _SPINS:
                self.await_bell(seen, _SLEEP_S)
            tick()

    def _ring(self) -> None:
        self._bell.value = (self._bell.value + 1) & 0xFFFFFFFF
        self.poke()

    def close(self) -> None:
        """Let nobody else attach. Tensors over it stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
