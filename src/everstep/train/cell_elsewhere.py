"""What a process of a worker that spans hosts has of the other hosts' part of the state.

Each host holds the ranges of parameters, and of what the optimizer keeps, that its processes update. Parameters of the
others come while they are computed with, once for each host, and are given back once no process of it uses them. The
memory where they would be is guarded: to touch it ends the process, for wrong values must not look like right ones; and
those that are here can only be read. The head reads all of the state range by range, over the connections to the
others, and what it loads it hands on.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from everstep.exact.digest import digest_with
from everstep.parallel.cell_memory import CellMemory, SharedPlace
from everstep.runtime.host.cell_doors import CellPlan, PartLines

_NOTHING, _READ, _WRITTEN = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_WORD, _FLOAT = 8, 4


class UnitPasses(Protocol):
    """The passes of units in this process."""

    def end(self) -> None:
        """None is under way."""


class OwnedRange(NamedTuple):
    """A range of the memory, in bytes, and the part of the worker that holds it. room: where the next one begins."""

    offset: int
    stop: int
    part: int
    room: int


def notes_bytes(parameters: int, ranks: int) -> int:
    """Memory for what the processes of a host note about so many parameters."""
    return _WORD * parameters * (ranks + 1)


def owned(
    plan: CellPlan, place: SharedPlace, runs: Sequence[Sequence[tuple[int, int]]] | None, room: int
) -> list[OwnedRange]:
    """Who holds what of this place. runs: of elements, by rank; None: the head has all. room: where the next one
    begins."""
    ends = [] if runs is None else [(place.offset + run[-1][1] * _FLOAT, rank) for rank, run in enumerate(runs) if run]
    at, found = place.offset, list[OwnedRange]()
    for stop, rank in ends or [(place.offset + place.size, 0)]:
        part = plan.part_of(rank)
        if found and found[-1].part == part:
            at = found.pop().offset
        found.append(OwnedRange(at, stop, part, stop))
        at = stop
    return [*found[:-1], found[-1]._replace(room=room)]


class NoOthers:
    """Of a worker on one host, all is always here. version: of the parameters, as the head counts it."""

    version = 0

    def bring(self, rank: int, offset: int, size: int) -> None:
        """Have here these bytes of the memory, which a rank has written."""

    def hold(self, version: int) -> None:
        """A step's lanes begin, or begin again, with parameters of this version: have those here that are always to be,
        until `let_go`."""

    def hold_all(self) -> None:
        """Have all parameters here, until `let_go`."""

    def end_passes(self) -> None:
        """No pass of a unit is under way in this process."""

    def let_go(self) -> None:
        """Parameters are about to change: those of the others are not here any more."""

    def divide(self, place: SharedPlace, runs: Sequence[Sequence[tuple[int, int]]]) -> None:
        """What the optimizer keeps for a parameter has this place, and nothing of it is here yet. runs: of elements, by
        rank."""

    def writing(self, start: int = 0, stop: int = 1 << 62) -> AbstractContextManager[None]:
        """Inside, all of this range of the memory is written here; afterwards each part has its own, and what had been
        here of the others' is not theirs any more."""
        return nullcontext()

    def close(self) -> None:
        """The memory is not used any more."""


class OtherParts(NoOthers):
    """Of a worker that spans hosts, each part holds its own."""

    def __init__(
        self, memory: CellMemory, lines: PartLines, parameters: Sequence[Sequence[OwnedRange]], notes: SharedPlace
    ) -> None:
        """parameters: ranges of each, by offset; all are here, in the first version. notes: place of `notes_bytes`."""
        self.version = 1
        self._memory, self._lines = memory, lines
        self._own = lines.plan.part
        self._parameters = [[one for one in ranges if one.part != self._own] for ranges in parameters]
        self._all = [one for ranges in self._parameters for one in ranges]
        words = memory.tensor(notes, torch.int64).view(-1, len(parameters)) if parameters else torch.empty(1, 0)
        self._versions, self._uses = words[0], words[1:]
        first = self._own * lines.plan.each
        self._here, self._mine = self._uses[first : first + lines.plan.each], self._uses[memory.rank]
        self._always: Collection[int] = range(len(parameters))
        self._holds = False
        self._passes: UnitPasses | None = None
        self._end_digests = digest_with(self.whole)
        memory.tell_with(lines.tell)
        self._versions.fill_(self.version)
        self._guard(self._all, _READ)

    @property
    def plan(self) -> CellPlan:
        """Which part this is."""
        return self._lines.plan

    def divide(self, place: SharedPlace, runs: Sequence[Sequence[tuple[int, int]]]) -> None:
        ranges = owned(self.plan, place, runs, place.offset + place.size)
        found = [one for one in ranges if one.part != self._own]
        self._guard(found, _NOTHING)
        self._all = sorted([*self._all, *found])

    def bring(self, rank: int, offset: int, size: int) -> None:
        part = self.plan.part_of(rank)
        if part != self._own and size > 0:
            self._fill(part, offset, offset + size)

    def close(self) -> None:
        self._end_digests()
        self._end_digests = _nothing

    # ---- parameters, to compute with

    def follow(self, passes: UnitPasses, always: Collection[int]) -> None:
        """Have parameters come and go with passes of units, but for these, by number, which are always here."""
        self._passes, self._always = passes, always

    def end_passes(self) -> None:
        if self._passes is not None:
            self._passes.end()

    def hold(self, version: int) -> None:
        self.end_passes()
        if not self._holds or version != self.version:
            self.version, self._holds = version, True
            self.use(self._always)

    def hold_all(self) -> None:
        self.use(range(len(self._parameters)))

    def use(self, numbers: Collection[int]) -> None:
        """Have these parameters here; a second time they are used twice."""
        with self._memory.alone():
            for number in numbers:
                ranges = self._parameters[number]
                if ranges and int(self._versions[number]) != self.version:
                    self._guard(ranges, _WRITTEN)
                    for one in ranges:
                        self._fill(one.part, one.offset, one.stop)
                    self._versions[number] = self.version
                self._mine[number] += 1
                self._guard(ranges, _READ)

    def leave(self, numbers: Collection[int]) -> None:
        """These are used once less: who uses them no more has them no more, and the last one of a host gives them
        back."""
        with self._memory.alone():
            for number in numbers:
                self._mine[number] -= 1
                if int(self._mine[number]) == 0:
                    self._drop(number)

    def let_go(self) -> None:
        self.end_passes()
        self.version += 1
        self._holds = False
        with self._memory.alone():
            for number in range(len(self._parameters)):
                self._mine[number] = 0
                self._drop(number)

    def _drop(self, number: int) -> None:
        ranges = self._parameters[number]
        if int(self._versions[number]) and not int(self._here[:, number].sum()):
            self._guard(ranges, _WRITTEN)
            for one in ranges:
                self._memory.free(one.offset, one.room)
            self._versions[number] = 0
        self._guard(ranges, _NOTHING)

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
        found = _overlaps(self._all, start, stop)
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
        found = _overlaps(self._all, start, stop)
        if len(found) == len(self._all):
            self.let_go()
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

    def _fill(self, part: int, start: int, stop: int) -> None:
        with memoryview(self._memory.memory) as everything, everything[start:stop] as into:
            self._lines.read(part, start, into)

    def _guard(self, ranges: Sequence[OwnedRange], access: int) -> None:
        for one in ranges:
            self._memory.guard(one.offset, one.room, access)


def _overlaps(ranges: Sequence[OwnedRange], start: int, stop: int) -> list[OwnedRange]:
    found = []
    for one in ranges[max(bisect_right(ranges, start, key=lambda one: one.offset) - 1, 0) :]:
        if one.offset >= stop:
            break
        if one.stop > start:
            found.append(one)
    return found


def _nothing() -> None:
    pass
