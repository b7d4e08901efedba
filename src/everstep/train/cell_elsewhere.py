"""What a process of a worker that spans hosts has of the other hosts' part of the state.

Each host holds the ranges of parameters, and of what the optimizer keeps, that its processes update. Parameters of the
others come before a step's lanes, once for each host, and are given back before the update. Meanwhile the memory where
they would be is guarded: to touch it ends the process, for wrong values must not look like right ones; and those that
are here can only be read. The head reads all of the state range by range, over the connections to the others, and what
it loads it hands on.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from everstep.parallel.cell_memory import CellMemory
from everstep.runtime.host.cell_doors import CellPlan, PartLines

_NOTHING, _WRITTEN = 0, mmap.PROT_READ | mmap.PROT_WRITE


class OwnedRange(NamedTuple):
    """A range of the memory, in bytes, and the part of the worker that holds it. room: where the next one begins."""

    offset: int
    stop: int
    part: int
    room: int


class Elsewhere:
    """What the other parts hold. version: of the parameters, as the head counts it."""

    def __init__(self, memory: CellMemory, lines: PartLines, parameters: Sequence[OwnedRange]) -> None:
        """parameters: all of them, by offset. They are here, in the first version."""
        self.version = 1
        self._memory, self._lines = memory, lines
        self._own = lines.plan.part
        self._parameters = [one for one in parameters if one.part != self._own]
        self._all = list(self._parameters)
        memory.tell = lines.tell
        memory.hold(self.version)
        self._guard(self._parameters, mmap.PROT_READ)

    @property
    def plan(self) -> CellPlan:
        """Which part this is."""
        return self._lines.plan

    def add(self, ranges: Sequence[OwnedRange]) -> None:
        """Of what the optimizer keeps, these ranges lie here and there. Nothing of them is here yet."""
        found = [one for one in ranges if one.part != self._own]
        for one in found:
            self._memory.guard(one.offset, one.room, _NOTHING)
        self._all = sorted([*self._all, *found])

    def fetch(self, part: int, offset: int, size: int) -> None:
        """Read so many bytes there into the same place here."""
        if part != self._own:
            self._fill(part, offset, offset + size)

    # ---- parameters, for lanes

    def hold(self, version: int) -> None:
        """Have all parameters here, in this version."""
        self.version = version
        with self._memory.alone():
            if self._memory.held != version:
                self._guard(self._parameters, _WRITTEN)
                for one in self._parameters:
                    self._fill(one.part, one.offset, one.stop)
                self._memory.hold(version)
        self._guard(self._parameters, mmap.PROT_READ)

    def let_go(self) -> None:
        """Parameters are about to change: those of the others are not here any more."""
        self.version += 1
        self._guard(self._parameters, _WRITTEN)
        with self._memory.alone():
            if self._memory.held:
                self._memory.hold(0)
                for one in self._parameters:
                    self._memory.free(one.offset, one.room)
        self._guard(self._parameters, _NOTHING)

    # ---- the whole state, at the head

    def there(self, view: memoryview) -> memoryview:
        """The content of this memory, of which some may lie elsewhere: itself, or a copy."""
        if not len(view):
            return view
        at = np.frombuffer(view, np.uint8).ctypes.data - self._memory.address
        return self._copy(at, at + len(view)) or view

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor, of which some may lie elsewhere: itself, or a copy."""
        if not tensor.numel() or tensor.device.type != "cpu":
            return tensor
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        at = tensor.data_ptr() - self._memory.address
        data = self._copy(at, at + (last + 1) * tensor.element_size())
        if data is None:
            return tensor
        return torch.frombuffer(data, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)

    def _copy(self, start: int, stop: int) -> memoryview | None:
        """These bytes of the memory; None if all of them are this part's."""
        found = self._overlaps(self._all, start, stop)
        if not found:
            return None
        data, at = memoryview(bytearray(stop - start)), start
        for one in found:
            first, last = max(one.offset, start), min(one.stop, stop)
            self._copy_own(data, at - start, at, first)
            self._lines.read(one.part, first, data[first - start : last - start])
            at = last
        self._copy_own(data, at - start, at, stop)
        return data

    def _copy_own(self, data: memoryview, into: int, first: int, last: int) -> None:
        if last > first:
            data[into : into + last - first] = ctypes.string_at(self._memory.address + first, last - first)

    @contextmanager
    def writing(self, start: int = 0, stop: int = 1 << 62) -> Iterator[None]:
        """Inside, all of this range of the memory is written here; afterwards each part has its own. What had been here
        of the others' parameters is not theirs any more."""
        found = self._overlaps(self._all, start, stop)
        whole = len(found) == len(self._all)
        if whole:
            self.version += 1
            self._memory.hold(0)
        self._guard(found, _WRITTEN)
        try:
            yield
        finally:
            with memoryview(self._memory.memory) as everything:
                for one in found:
                    with everything[one.offset : one.stop] as written:
                        self._lines.write(one.part, one.offset, written)
                    self._memory.free(one.offset, one.room)
            self._guard(found, _NOTHING)

    # ----

    @staticmethod
    def _overlaps(ranges: Sequence[OwnedRange], start: int, stop: int) -> list[OwnedRange]:
        found = []
        for one in ranges[max(bisect_right(ranges, start, key=lambda one: one.offset) - 1, 0) :]:
            if one.offset >= stop:
                break
            if one.stop > start:
                found.append(one)
        return found

    def _fill(self, part: int, start: int, stop: int) -> None:
        with memoryview(self._memory.memory) as everything, everything[start:stop] as into:
            self._lines.read(part, start, into)

    def _guard(self, ranges: Sequence[OwnedRange], access: int) -> None:
        for one in ranges:
            self._memory.guard(one.offset, one.room, access)
