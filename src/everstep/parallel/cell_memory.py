"""The memory that the processes of one worker share: a memfd that all of them write.

Each other worker's memory has one writer, because a worker that was evicted may come back to life. The processes of a
cell die together, so what they share needs no such care. Its first page holds words by which they wait for each other;
what the others hold is said by `SharedPlace`s, which each of them derives from the same model.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from everstep.base.errors import EverstepError, MembershipError, check
from everstep.base.own_pages import NORESERVE
from everstep.parallel.mapping import PAGE, Mapping, load_fence, pages

_WORDS_AT = 1024
_MOST_RANKS = 64
_COUNTS, _INNER, _BROKEN, _GO = 0, _MOST_RANKS, 2 * _MOST_RANKS, 3 * _MOST_RANKS
_WORDS = _GO + 1
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

    A worker that spans hosts has one on each, in which everything has the same place; what is not there takes no
    memory."""

    def __init__(self, fd: int, rank: int, size_bytes: int) -> None:
        self._fd = fd
        self.rank = rank
        self._tell: Callable[[int, int], None] = lambda index, value: None
        super().__init__(mmap.mmap(fd, size_bytes))
        self._words = self.array(ctypes.c_int64, _WORDS, _WORDS_AT)
        self._command = 1

    @classmethod
    def create(cls, size_bytes: int, rank: int = 0) -> CellMemory:
        """The end of the first process of a host. Pages that nobody has touched cost nothing."""
        fd = os.memfd_create("everstep-cell", os.MFD_CLOEXEC)
        os.ftruncate(fd, pages(size_bytes))
        return cls(fd, rank, pages(size_bytes))

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
        flags, access = mmap.MAP_PRIVATE | NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(self._fd, extent.size, flags=flags, prot=access, offset=extent.offset)

    # ---- waiting for each other

    @property
    def go(self) -> bool:
        """Whether the pass at the gate is made."""
        return bool(self._words[_GO])

    def open_gate(self, go: bool) -> None:
        """The head says, before it comes to the gate, whether the next pass is made."""
        self._write(_GO, int(go))

    def start(self, command: int) -> None:
        """This process begins a command: passes of earlier ones are over. command: its number, from 1 on."""
        self._command = command

    def break_pass(self) -> None:
        """This process leaves a pass of this command before its end: the others are not to wait for it."""
        self._write(_BROKEN + self.rank, self._command)

    def meet(self, point: int, ranks: Sequence[int], tick: Callable[[], None], *, inner: bool = False) -> None:
        """Come to a point, and wait until all these ranks, this one among them, have come to it or to a later one. What
        one has written before, the others can read after.

        point: grows from one to the next, also from command to command. inner: points of ranks that compute one lane
        together, all on one host, which are counted apart. Raises: PassBroken if one has left the pass.
        """
        first, words = _INNER if inner else _COUNTS, self._words
        self._write(first + self.rank, point, told=not inner)
        waits = 0
        while True:
            seen = self.bell
            if all(words[first + rank] >= point for rank in ranks):
                load_fence()
                return
            if any(words[_BROKEN + rank] == self._command for rank in range(_MOST_RANKS)):
                raise PassBroken("another process of this worker has left the pass")
            waits += 1
            if waits > _SPINS:
                self.await_bell(seen, _SLEEP_S)
            tick()

    def _write(self, index: int, value: int, *, told: bool = True) -> None:
        self._words[index] = value
        self._ring()
        if told:
            self._tell(index, value)

    def receive(self, index: int, value: int) -> None:
        """A process on another host has written this word. Raises: InvariantViolation if there is none."""
        check(0 <= index < _WORDS, f"a cell has no word {index}")
        self._words[index] = value
        self._ring()

    def _ring(self) -> None:
        self._bell.value = (self._bell.value + 1) & 0xFFFFFFFF
        self.poke()

    def tell_with(self, tell: Callable[[int, int], None]) -> None:
        """Have other hosts' memories `receive` the words that this process writes."""
        self._tell = tell

    # ---- what is here for a while, of a worker that spans hosts

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no other process of this host is inside."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def free(self, start: int, stop: int) -> None:
        """Give the whole pages in this range back; they read as zeros."""
        start, stop = pages(start), stop // PAGE * PAGE
        if start < stop:
            self.memory.madvise(mmap.MADV_REMOVE, start, stop - start)

    def guard(self, start: int, stop: int, access: int) -> None:
        """Have this process end if it touches a whole page in this range in another way. access: `mmap.PROT_READ`,
        `PROT_WRITE`, both, or 0."""
        start, stop = pages(start), stop // PAGE * PAGE
        if start < stop and _libc.mprotect(self.address + start, stop - start, access):
            raise OSError(ctypes.get_errno(), "mprotect")

    def close(self) -> None:
        """Let nobody else attach. Tensors over it stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
