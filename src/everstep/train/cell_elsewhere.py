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
import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from everstep.base.errors import CheckpointCorrupt
from everstep.exact.digest import digest_with
from everstep.exact.state_memory import Destination, HeldBlock
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

    def end_passes(self) -> None:
        """No pass of a unit is under way in this process."""

    def let_go(self) -> None:
        """Parameters are about to change: those of the others are not here any more."""

    def divide(self, place: SharedPlace, runs: Sequence[Sequence[tuple[int, int]]]) -> None:
        """What the optimizer keeps for a parameter has this place, and nothing of it is here yet. runs: of elements, by
        rank."""

    def destinations(self, view: memoryview) -> list[Destination]:
        """Where bytes are written that are to come into this memory: there, or, where that lies elsewhere, in memory of
        their own, which is sent."""
        return [(view, _nothing)]

    def close(self) -> None:
        """The memory is not used any more."""


class OtherParts(NoOthers):
    """Of a worker that spans hosts, each part holds its own."""

    def __init__(
        self,
        memory: CellMemory,
        lines: PartLines,
        parameters: Sequence[Sequence[OwnedRange]],
        notes: SharedPlace,
        *,
        made: bool = True,
    ) -> None:
        """parameters: ranges of each, by offset; made: all are here, in the first version. notes: place of
        `notes_bytes`."""
        self.version = 1
        self._memory, self._lines = memory, lines
        self.plan = lines.plan
        self._parameters = [[one for one in ranges if one.part != self.plan.part] for ranges in parameters]
        self._all = [one for ranges in self._parameters for one in ranges]
        words = memory.tensor(notes, torch.int64).view(-1, len(parameters)) if parameters else torch.empty(1, 0)
        self._versions, self._uses = words[0], words[1:]
        first = self.plan.part * lines.plan.each
        self._here, self._mine = self._uses[first : first + lines.plan.each], self._uses[memory.rank]
        self._always: Collection[int] = range(len(parameters))
        self._holds = False
        self._passes: UnitPasses | None = None
        self._end_digests = digest_with(self.whole)
        memory.tell_with(lines.tell)
        self._versions.fill_(self.version if made else 0)
        self._guard(self._all, _READ if made else _NOTHING)

    def divide(self, place: SharedPlace, runs: Sequence[Sequence[tuple[int, int]]]) -> None:
        ranges = owned(self.plan, place, runs, place.offset + place.size)
        found = [one for one in ranges if one.part != self.plan.part]
        self._guard(found, _NOTHING)
        self._all = sorted([*self._all, *found])

    def bring(self, rank: int, offset: int, size: int) -> None:
        part = self.plan.part_of(rank)
        if part != self.plan.part and size > 0:
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
        self._lines.drop()
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
        at = _address(view) - self._memory.address
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
        runs = list(self.runs(start, stop))
        if all(part == self.plan.part for part, _, _ in runs):
            return None
        data = memoryview(bytearray(stop - start))
        for part, first, last in runs:
            if part == self.plan.part:
                data[first - start : last - start] = ctypes.string_at(self._memory.address + first, last - first)
            else:
                self._lines.read(part, first, data[first - start : last - start])
        return data

    def destinations(self, view: memoryview) -> list[Destination]:
        if not len(view):
            return [(view, _nothing)]
        at, found = _address(view) - self._memory.address, list[Destination]()
        for part, first, last in self.runs(at, at + len(view)):
            if part == self.plan.part:
                found.append((view[first - at : last - at], _nothing))
            else:
                room = memoryview(bytearray(last - first))
                found.append((room, partial(self._lines.write, part, first, room)))
        return found

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The parts that hold what lies in a range of the memory: (part, from, to)."""
        return _runs(self._all, self.plan.part, start, stop)

    def copies(self, arena: Tensor) -> PartCopies:
        """A copy of the state, of which each part keeps what it holds. arena: where this one's is."""
        return PartCopies(self, self._memory, self._lines, arena)

    def room(self, nbytes: int) -> PartRoom:
        """Room for a state that comes from other workers."""
        return PartRoom(self._lines, nbytes)

    # ----

    def _fill(self, part: int, start: int, stop: int) -> None:
        with memoryview(self._memory.memory) as everything, everything[start:stop] as into:
            self._lines.read(part, start, into)

    def _guard(self, ranges: Sequence[OwnedRange], access: int) -> None:
        for one in ranges:
            self._memory.guard(one.offset, one.room, access)


class PartCopies:
    """A copy of the state, of which each part keeps what it holds. Thread-safe once it is made."""

    def __init__(self, parts: OtherParts, memory: CellMemory, lines: PartLines, arena: Tensor) -> None:
        """arena: of this part, as large as the copy. What lies elsewhere has the same place there."""
        self._parts, self._memory, self._lines, self._arena = parts, memory, lines, arena
        self._number = next(_numbers)
        self._elsewhere: list[OwnedRange] = []
        self._lock = threading.Lock()
        self._dropped = False
        self._gone = weakref.finalize(self, _gone, parts.plan, self._number, self._elsewhere)

    def take(self, tensor: Tensor, to: Tensor) -> bool:
        self._lines.drop()
        if not (tensor.is_contiguous() and tensor.numel()):
            return False
        start = tensor.data_ptr() - self._memory.address
        runs = list(self._parts.runs(start, start + tensor.nbytes))
        own, shift = self._parts.plan.part, to.data_ptr() - self._arena.data_ptr() - start
        if all(part == own for part, _, _ in runs):
            return False
        for part, first, last in runs:
            if part == own:
                ctypes.memmove(self._arena.data_ptr() + shift + first, self._memory.address + first, last - first)
            else:
                self._lines.copy(part, self._number, self._arena.nbytes, first, first + shift, last - first)
                insort(self._elsewhere, OwnedRange(first + shift, last + shift, part, last + shift))
        return True

    def there(self, view: memoryview) -> memoryview:
        if not len(view):
            return view
        start = _address(view) - self._arena.data_ptr()
        runs = list(_runs(self._elsewhere, self._parts.plan.part, start, start + len(view)))
        if all(part == self._parts.plan.part for part, _, _ in runs):
            return view
        data = memoryview(bytearray(len(view)))
        with self._lock:
            if self._dropped:
                raise CheckpointCorrupt("the snapshot was released")
            for part, first, last in runs:
                piece = data[first - start : last - start]
                if part == self._parts.plan.part:
                    piece[:] = view[first - start : last - start]
                else:
                    self._lines.copied(part, self._number, first, piece)
        return data

    def drop(self) -> None:
        with self._lock:
            self._dropped = True
        self._gone()
        self._lines.drop()


class PartRoom:
    """Room for a state that comes from other workers before it is loaded: each part has as much of it, in order, until
    nothing reads it any more. So no host has all of it. Thread-safe."""

    def __init__(self, lines: PartLines, nbytes: int) -> None:
        self._lines, self._nbytes, self._number = lines, nbytes, next(_numbers)
        weakref.finalize(self, _left, lines.plan, self._number, range(len(lines.plan.doors)))

    def put(self, offset: int, data: memoryview) -> HeldBlock:
        plan = self._lines.plan
        part = offset * len(plan.doors) // self._nbytes
        if part == plan.part:
            return data
        self._lines.keep(part, self._number, self._nbytes, offset, data)
        return partial(self._read, part, offset, len(data))

    def _read(self, part: int, offset: int, size: int) -> memoryview:
        data = memoryview(bytearray(size))
        self._lines.copied(part, self._number, offset, data)
        return data


_numbers = count()
"""Of copies, each its own."""


def _gone(plan: CellPlan, number: int, elsewhere: Sequence[OwnedRange]) -> None:
    """As `_left`, of those that have a part of a copy."""
    _left(plan, number, {one.part for one in elsewhere})


def _left(plan: CellPlan, number: int, parts: Iterable[int]) -> None:
    """Nobody reads this copy any more. Maybe the garbage collector says so, at any point of any thread: others are told
    later."""
    plan.dropped.extend((part, number) for part in parts if part != plan.part)


def _runs(ranges: Sequence[OwnedRange], own: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    at = start
    for one in _overlaps(ranges, start, stop):
        first, last = max(one.offset, start), min(one.stop, stop)
        if at < first:
            yield own, at, first
        yield one.part, first, last
        at = last
    if at < stop:
        yield own, at, stop


def _overlaps(ranges: Sequence[OwnedRange], start: int, stop: int) -> list[OwnedRange]:
    found = []
    for one in ranges[max(bisect_right(ranges, start, key=lambda one: one.offset) - 1, 0) :]:
        if one.offset >= stop:
            break
        if one.stop > start:
            found.append(one)
    return found


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def _nothing() -> None:
    pass
