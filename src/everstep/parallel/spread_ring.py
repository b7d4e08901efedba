"""Updated parameters, from each member of a host to those that lack them: pieces through a few slots of shared memory.

The source copies a piece out of its parameters once, however many take it, and takers copy it straight into theirs. A
slot is written again when all takers of the piece before have said that they have it, so the memory of a spread does
not depend on the size of the model:

    pieces     one record per slot: which piece lies there
    taken      one record per source: the last piece that this worker has taken from it
    slots      float32, see `PIECE_ELEMENTS`

A record bears generation, step, stage and round of its piece, so a piece of another spread, cut or finished, is never
taken for one of this. A spread that was cut can be made again in the next generation: it gives the same bits.

Order of writes: data, then the record, then the bell. A taker reads the record again after copying: if it has changed,
the source has left the generation, and so must the taker.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from everstep.base.errors import CollectiveAborted, check
from everstep.base.ports import OnTick, Portion
from everstep.parallel.fence import Fence
from everstep.parallel.mapping import PAGE, OwnMapping, load_fence
from everstep.parallel.mapping import Mapping as Memory

PIECE_ELEMENTS = 1 << 18
"""Most elements of a piece: 1 MiB."""
_SLOTS = 4
_WAIT_S = 0.002
_LIFE_CHECK_S = 0.05
_RECORD = struct.Struct("<Qqqqqq")
_DIGEST_BYTES = 8
_MOST_SOURCES = 1024
_TAKEN_AT = PAGE
_SLOTS_AT = _TAKEN_AT + -(-_MOST_SOURCES * _RECORD.size // PAGE) * PAGE
RING_BYTES = _SLOTS_AT + _SLOTS * 4 * PIECE_ELEMENTS
"""Size of a ring in a worker's memory; it begins with a page."""


class SpreadName(NamedTuple):
    """Name of one spread. Those of a generation are made in ascending order."""

    step: int
    stage: int
    round: int


class _Piece(NamedTuple):
    number: int
    takers: tuple[int, ...]
    views: tuple[Tensor, ...]


def pieces_from(source: int, portions: Iterable[Portion]) -> Iterator[_Piece]:
    """The portions of a source, in order, in pieces of at most `PIECE_ELEMENTS` elements, each for the same takers."""
    number, room, takers, views = 0, 0, tuple[int, ...](), list[Tensor]()
    for portion in portions:
        data, first = portion.data, 0
        while portion.source == source and first < data.numel():
            if not room or portion.takers != takers:
                if views:
                    yield _Piece(number, takers, tuple(views))
                    number += 1
                room, takers, views = PIECE_ELEMENTS, portion.takers, []
            views.append(data[first : first + room])
            first += views[-1].numel()
            room -= views[-1].numel()
    if views:
        yield _Piece(number, takers, tuple(views))


class SpreadRing:
    """One worker's slots, and what it reads of others'. own: its memory, of which `RING_BYTES` from `offset` on are
    used, and as much of all others'."""

    def __init__(self, me: int, own: OwnMapping, offset: int, fence: Fence, tick: OnTick) -> None:
        self._me, self._own, self._offset = me, own, offset
        self._fence, self._tick = fence, tick
        self._mappings: dict[int, Memory] = {}
        self._last = SpreadName(-1, -1, -1)
        self._lies: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """By slot: name and number of the piece there, and its takers."""

    def open(self, mappings: Mapping[int, Memory]) -> None:
        """Begin the generation of the fence. mappings: of its members on this host, by worker id, this one's too."""
        check(len(mappings) <= _MOST_SOURCES, f"at most {_MOST_SOURCES} members of a host, got {len(mappings)}")
        self._mappings = dict(sorted(mappings.items()))
        self._last, self._lies = SpreadName(-1, -1, -1), {}

    def spread(self, name: SpreadName, portions: Sequence[Portion]) -> None:
        """Give the portions of which this worker is the source, and take those that it lacks, first ones first. Returns
        when it has all, and what it gives may change again. All members of the spread have the same portions.

        Raises: CollectiveAborted after `abort`, or if a source or a taker died on which it had to wait.
        """
        check(name > self._last, f"expected a spread after {self._last} in generation {self._fence.generation}: {name}")
        self._last = name
        own = deque(pieces_from(self._me, portions))
        lacking = self._lacking(portions)
        looked = time.monotonic()
        while own or lacking:
            whom = self._waited_for(own, lacking)
            bell = self._mappings[whom].bell
            self._fence.check()
            self._tick()
            moved = self._give(name, own)
            for source, waiting in lacking.items():
                moved |= self._take(name, source, waiting)
            lacking = {source: waiting for source, waiting in lacking.items() if waiting}
            if moved or not (own or lacking):
                continue
            self._mappings[whom].await_bell(bell, _WAIT_S)
            if time.monotonic() - looked > _LIFE_CHECK_S:
                looked = time.monotonic()
                self._look_alive(name, own, lacking)

    def close(self) -> None:
        """Let go of all memory."""
        self._mappings = {}

    # ---- inside

    def _lacking(self, portions: Sequence[Portion]) -> dict[int, deque[_Piece]]:
        """Pieces that this worker has to take, by source, beginning with the next one so that not all begin alike."""
        sources = {one.source for one in portions if self._me in one.takers}
        order = sorted(sources, key=lambda source: (source < self._me, source))
        return {k: deque(one for one in pieces_from(k, portions) if self._me in one.takers) for k in order}

    def _waited_for(self, own: deque[_Piece], lacking: Mapping[int, deque[_Piece]]) -> int:
        """The member whose next act is waited for, should there be nothing to do before."""
        if lacking:
            return max(lacking, key=lambda source: len(lacking[source]))
        return next(iter(self._slow(own)), self._me)

    def _slow(self, own: deque[_Piece]) -> list[int]:
        """Members that have still to take what lies in the slot of the next own piece."""
        there = self._lies.get(own[0].number % _SLOTS) if own else None
        return [] if there is None else [w for w in there[1] if not self._has_taken(w, there[0])]

    def _has_taken(self, worker_id: int, piece: tuple[int, ...]) -> bool:
        found = self._read(worker_id, self._taken_at(self._me))
        return found is not None and found >= piece

    def _give(self, name: SpreadName, own: deque[_Piece]) -> bool:
        """Put pieces into slots that are free. Returns whether any was put."""
        given = False
        while own and not self._slow(own):
            piece = own.popleft()
            for place, view in self._places(self._own, piece):
                place.copy_(view)
            load_fence()
            self._lies[piece.number % _SLOTS] = (*name, piece.number), piece.takers
            self._write(self._record_at(piece), name, piece.number)
            given = True
        return given

    def _take(self, name: SpreadName, source: int, waiting: deque[_Piece]) -> bool:
        """Take the next piece of a source if it is there."""
        piece = waiting[0]
        if not self._gives(source, name, piece):
            return False
        load_fence()
        for place, view in self._places(self._mappings[source], piece):
            view.copy_(place)
        load_fence()
        if not self._gives(source, name, piece):
            generation = self._fence.generation
            raise CollectiveAborted(f"generation {generation}: worker {source} has left it for a newer one")
        waiting.popleft()
        self._write(self._taken_at(source), name, piece.number)
        return True

    def _look_alive(self, name: SpreadName, own: deque[_Piece], lacking: Mapping[int, deque[_Piece]]) -> None:
        dead = {w for w in (*lacking, *self._slow(own)) if not self._mappings[w].alive()}
        # a source may have given its next piece before it died
        lost = sorted(w for w in dead if w not in lacking or not self._gives(w, name, lacking[w][0]))
        if lost:
            raise CollectiveAborted(f"workers {lost} died while parameters were given", lost)

    # ---- records

    def _taken_at(self, source: int) -> int:
        return self._offset + _TAKEN_AT + list(self._mappings).index(source) * _RECORD.size

    def _record_at(self, piece: _Piece) -> int:
        return self._offset + piece.number % _SLOTS * _RECORD.size

    def _places(self, memory: Memory, piece: _Piece) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part of a piece in the slot of a member's memory, and in the parameters."""
        at = self._offset + _SLOTS_AT + piece.number % _SLOTS * 4 * PIECE_ELEMENTS
        room = torch.frombuffer(memory.array(ctypes.c_float, PIECE_ELEMENTS, at), dtype=torch.float32)
        first = 0
        for view in piece.views:
            yield room[first : first + view.numel()], view
            first += view.numel()

    def _gives(self, source: int, name: SpreadName, piece: _Piece) -> bool:
        """Whether a source has put this piece into its slot."""
        return self._read(source, self._record_at(piece)) == (*name, piece.number)

    def _write(self, at: int, name: SpreadName, number: int) -> None:
        fields = self._fence.generation, *name, number
        packed = _RECORD.pack(0, *fields)[_DIGEST_BYTES:]
        _RECORD.pack_into(self._own.memory, at, xxhash.xxh3_64_intdigest(packed), *fields)
        self._own.ring()

    def _read(self, worker_id: int, at: int) -> tuple[int, ...] | None:
        """Fields of a member's record of this generation, None if it is of another one or being written."""
        raw = self._mappings[worker_id].memory[at : at + _RECORD.size]
        digest, generation, *found = _RECORD.unpack(raw)
        whole = digest == xxhash.xxh3_64_intdigest(raw[_DIGEST_BYTES:])
        return tuple(found) if whole and generation == self._fence.generation else None
