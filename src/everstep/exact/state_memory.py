"""Where the state of an optimizer, and copies of whole states, lie: in the memory of the device, and of the process."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from everstep.base.own_pages import own_pages
from everstep.exact.layout import aligned_like

HeldBlock = memoryview | Callable[[], memoryview]
"""Bytes, or what reads them where they lie."""
Destination = tuple[memoryview, Callable[[], None]]
"""Memory that is written, and what is to be called then."""


class OtherHosts(Protocol):
    """Those that hold a part of this process's state."""

    def there(self, view: memoryview) -> memoryview:
        """The content of this memory, of which some may lie there: itself, or a copy."""

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor, of which some may lie there: itself, or a copy."""

    def destinations(self, view: memoryview) -> list[Destination]:
        """As `StateMemory.destinations`."""

    def copies(self, arena: Tensor) -> CopiesThere:
        """A copy of the state, of which each of them keeps its part. arena: where the rest is."""

    def room(self, nbytes: int) -> RoomThere:
        """Room for a state that comes from other workers."""

    def let_go(self) -> None:
        """All of the state is about to be another one."""


class RoomThere(Protocol):
    """Room of which each of them has a part."""

    def put(self, offset: int, data: memoryview) -> HeldBlock:
        """Have these bytes lie where they belong. From any thread."""


class CopiesThere(Protocol):
    """A copy of the state of which some lies with other hosts."""

    def there(self, view: memoryview) -> memoryview:
        """As of `OtherHosts`, of the copy."""

    def take(self, tensor: Tensor, to: Tensor) -> bool:
        """Copy a tensor of the state to its place; False if it lies here as a whole, and the caller is to do it."""

    def drop(self) -> None:
        """It is not read any more."""


class StateMemory:
    """Ordinary memory; subclasses have other places. where: for people. others: hosts that hold a part of it."""

    where = "the device's memory"
    others: OtherHosts | None = None
    _room: Callable[[Tensor, str], Tensor | None] | None = None
    _release: Callable[[Tensor, Sequence[tuple[int, int]]], None] | None = None

    def share(
        self,
        others: OtherHosts | None,
        room: Callable[[Tensor, str], Tensor | None],
        release: Callable[[Tensor, Sequence[tuple[int, int]]], None] | None = None,
    ) -> None:
        """From now on other processes have it, too, and these hosts hold a part of it. room, release: as of the
        methods."""
        self.others, self._room, self._release = others, room, release

    def room(self, parameter: Tensor, key: str) -> Tensor | None:
        """Where what an optimizer keeps for a parameter, under this key, has its place; None if any will do."""
        return None if self._room is None else self._room(parameter, key)

    def release(self, tensor: Tensor, kept: Sequence[tuple[int, int]]) -> None:
        """`give_back` of a tensor of the state."""
        (self._release or give_back)(tensor, kept)

    def there(self, view: memoryview) -> memoryview:
        """The content of this memory, wherever it lies."""
        return view if self.others is None else self.others.there(view)

    def whole(self, tensor: Tensor) -> Tensor:
        """The content of a tensor of the state, wherever it lies."""
        return tensor if self.others is None else self.others.whole(tensor)

    def destinations(self, view: memoryview) -> list[Destination]:
        """Where bytes are written that are to come into this memory."""
        return [(view, _nothing)] if self.others is None else self.others.destinations(view)

    def changes(self) -> None:
        """All of the state is about to be another one."""
        if self.others is not None:
            self.others.let_go()

    def make(self, like: Tensor) -> Tensor:
        """Memory for a tensor of the optimizer's state: of this shape and dtype, with these strides. Its content is
        undefined."""
        return aligned_like(like)

    def flat(self, nbytes: int) -> Tensor:
        """Host memory for the copy of a state."""
        return torch.frombuffer(own_pages(nbytes), dtype=torch.uint8)[:nbytes]

    def let_go(self) -> None:
        """Nothing of it is in use for now."""


def _nothing() -> None:
    pass


IN_MEMORY = StateMemory()
"""Where all of it is here."""


def give_back(tensor: Tensor, kept: Sequence[tuple[int, int]]) -> None:
    """Give the memory of a contiguous tensor in host memory back to the system, but for these ranges of elements, which
    ascend. What is given back reads as zeros, and takes no memory until it is written."""
    size = tensor.numel()
    edges = [0, *(edge for one in kept for edge in one), size]
    for first, stop in zip(edges[::2], edges[1::2], strict=True):
        begin = tensor.data_ptr() + first * tensor.element_size()
        end = tensor.data_ptr() + stop * tensor.element_size()
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end and not tensor.is_cuda:
            _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


class Pages:
    """Memory for a flat float32 vector of which little is in use at a time: none is taken where nothing is written."""

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._flat: Tensor | None = None

    @property
    def flat(self) -> Tensor:
        """float32 [numel], zeros or what was written last. It stays where it is."""
        if self._flat is None:
            self._flat = torch.frombuffer(own_pages(max(self._numel, 1) * 4), dtype=torch.float32)
        return self._flat

    def clear(self) -> None:
        """Give all of it back; it reads as zeros."""
        if self._flat is not None:
            give_back(self._flat, ())


_libc = ctypes.CDLL(None, use_errno=True)
