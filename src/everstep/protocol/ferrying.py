"""Connections between processes of different hosts, carried by messages that one process of each host, its ferry,
exchanges with the others'. Pure.

Messages of two ferries arrive whole and in order. Each has a `Word`, and behind that its content, if any. A way is one
connection: whoever opens it numbers it. Each side may have `WINDOW_BYTES` under way, and may send more once they were
taken: so a process that takes nothing costs the ferries no more than that, and delays no other way.

Who is asked and answers nothing for `SILENT_S` is away until it says something: ways to it end, as connections to a
silent host do. A ferry that leaves tells all others, and answers them until they leave, too; its last word to each is
said once both do. So it is through when the last words of all have come, and nothing is under way then, which MPI would
not bear.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from everstep.base.errors import ProtocolError

WINDOW_BYTES = 4 << 20
PIECE_BYTES = 256 << 10
SILENT_S = 5.0
_ASK_S = 1.0
_TELL_BYTES = WINDOW_BYTES // 4
_MAX_ADDRESS_BYTES = 255
_MAX_WAYS = 4096
_WORD = struct.Struct(">B?IQ")
WORD_BYTES = _WORD.size


class Saying(IntEnum):
    """What a message says of its way, or of its sender."""

    OPEN = 1
    BYTES = 2
    TAKEN = 3
    CLOSE = 4
    ASK = 5
    HERE = 6
    LEAVE = 7
    LAST = 8


class Word(NamedTuple):
    """What comes before a message's content. own: the way was opened by who sends this. size: of the content, in bytes;
    of TAKEN, how much was taken."""

    kind: Saying
    own: bool = False
    number: int = 0
    size: int = 0

    def packed(self) -> bytes:
        """`WORD_BYTES` bytes."""
        return _WORD.pack(*self)

    @property
    def content(self) -> int:
        """Bytes that follow in a message of their own; 0: none."""
        return self.size if self.kind in (Saying.OPEN, Saying.BYTES) else 0

    @property
    def last(self) -> bool:
        """Nothing follows from who sends this."""
        return self.kind == Saying.LAST

    @staticmethod
    def read(packed: bytes) -> Word:
        """Raises: ProtocolError if it is none, or its content is larger than any."""
        kind, own, number, size = _WORD.unpack(packed)
        most = {Saying.OPEN: _MAX_ADDRESS_BYTES, Saying.BYTES: PIECE_BYTES}.get(kind, WINDOW_BYTES)
        if kind not in iter(Saying) or size > most:
            raise ProtocolError(f"expected a word of a ferry, got kind {kind} of {size} bytes")
        return Word(Saying(kind), own, number, size)


class Message(NamedTuple):
    """To the ferry of that rank."""

    rank: int
    word: Word
    content: memoryview = memoryview(b"")


@dataclass(eq=False)
class Way:
    """One connection to a process of another host. own: a process of this one has opened it. room: bytes that may
    still be sent; due: that have come and were not taken; untold: that were taken, which the other side does not know.
    """

    rank: int
    number: int
    own: bool
    room: int = WINDOW_BYTES
    due: int = 0
    untold: int = 0


class DialDoor(NamedTuple):
    """Connect the way with who listens at that address of this host."""

    way: Way
    address: str


class Give(NamedTuple):
    """These bytes are the process's of this host; say when it has taken them (`Ferry.took`)."""

    way: Way
    content: memoryview


class End(NamedTuple):
    """Nothing more will come of this way: hang up once everything was given."""

    way: Way


class Go(NamedTuple):
    """There is room again for what the process sends."""

    way: Way


FerryEffect = DialDoor | Give | End | Go


class Ferry:
    """One host's. rank: its own; others: those of the other ferries. `out`: messages to be sent, in order."""

    def __init__(self, rank: int, others: Collection[int], now_s: float) -> None:
        self.rank = rank
        self.out: deque[Message] = deque()
        self._ways: dict[tuple[int, bool, int], Way] = {}
        self._last_number = 0
        self._heard_s = dict.fromkeys(sorted(others), now_s)
        self._asked_s: dict[int, float] = {}
        self._looked_s = now_s
        self._away: set[int] = set()
        self._leaving = False
        self._left: set[int] = set()
        self._parted: set[int] = set()
        self._gone: set[int] = set()

    @property
    def through(self) -> bool:
        """It leaves, and so have all others that are not away."""
        return self._leaving and self._heard_s.keys() <= self._gone | self._away

    # ---- what the processes of this host do

    def open(self, rank: int, address: str, now_s: float) -> Way | None:
        """A process wants to reach who listens at that address of that ferry's host. None: nobody can."""
        known = rank in self._heard_s and rank not in self._away | self._left and not self._leaving
        if not known or not address.isascii() or len(address) > _MAX_ADDRESS_BYTES:
            return None
        if rank not in self._asked_s and all(way.rank != rank for way in self._ways.values()):
            self._heard_s[rank] = now_s  # it had nothing to answer before
            self._ask(rank, now_s)
        self._last_number += 1
        way = self._ways[rank, True, self._last_number] = Way(rank, self._last_number, own=True)
        content = memoryview(bytearray(address.encode()))
        self._say(way, Saying.OPEN, len(content), content)
        return way

    def said(self, way: Way, content: memoryview) -> None:
        """The process has sent this, `way.room` and `PIECE_BYTES` at most."""
        if self._is_open(way):
            way.room -= len(content)
            self._say(way, Saying.BYTES, len(content), content)

    def took(self, way: Way, size: int) -> None:
        """The process has taken so many of the bytes that were given to it."""
        way.due -= size
        way.untold += size
        if way.untold >= _TELL_BYTES and self._is_open(way):
            self._say(way, Saying.TAKEN, way.untold)
            way.untold = 0

    def hung_up(self, way: Way) -> None:
        """The process has closed its connection, or there is none to be had."""
        if self._is_open(way):
            self._say(way, Saying.CLOSE)
            del self._ways[way.rank, way.own, way.number]

    def leave(self) -> list[FerryEffect]:
        """No process of this host needs it any more."""
        if self._leaving:
            return []
        ends = self._end(list(self._ways.values()))
        self._leaving = True
        self._away.clear()  # who answers by now is waited for
        self._asked_s.clear()
        for rank in self._heard_s:
            self._tell(rank, Saying.LEAVE)
            self._part(rank)
        return ends

    # ---- what the other ferries say

    def heard(self, rank: int, word: Word, content: memoryview, now_s: float) -> list[FerryEffect]:
        """Raises: ProtocolError if no ferry says that."""
        self._heard_s[rank] = now_s
        self._asked_s.pop(rank, None)
        self._away.discard(rank)
        if word.kind == Saying.ASK:
            self._tell(rank, Saying.HERE)
        elif word.kind == Saying.LEAVE:
            self._left.add(rank)
            self._part(rank)
            return self._end([way for way in self._ways.values() if way.rank == rank])
        elif word.kind == Saying.LAST:
            self._gone.add(rank)
        elif word.kind == Saying.OPEN:
            return self._opened(rank, word.number, bytes(content))
        way = self._ways.get((rank, not word.own, word.number))
        if way is None or word.kind in (Saying.ASK, Saying.HERE, Saying.LAST):
            return []  # of a way that has ended here meanwhile, for one
        if word.kind == Saying.CLOSE:
            del self._ways[way.rank, way.own, way.number]
            return [End(way)]
        if word.kind == Saying.TAKEN:
            way.room += word.size
            if way.room > WINDOW_BYTES:
                raise ProtocolError(f"ferry {rank} has taken more than was sent")
            return [Go(way)]
        way.due += len(content)
        if way.due + way.untold > WINDOW_BYTES:
            raise ProtocolError(f"ferry {rank} sends more than there is room for")
        return [Give(way, content)]

    def look(self, now_s: float) -> list[FerryEffect]:
        """Time has passed. Returns what is to be done with ways to those that are silent."""
        if now_s - self._looked_s > _ASK_S:  # it was stopped itself, and what was said meanwhile has yet to be heard
            self._asked_s = dict.fromkeys(self._asked_s, now_s)
        self._looked_s = now_s
        found: list[FerryEffect] = []
        wanted = set(self._heard_s) - self._gone if self._leaving else {way.rank for way in self._ways.values()}
        for rank in sorted((wanted | self._asked_s.keys()) - self._away):
            asked_s = self._asked_s.get(rank)
            if asked_s is None and now_s - self._heard_s[rank] > _ASK_S:
                self._ask(rank, now_s)
            elif asked_s is not None and now_s - asked_s > SILENT_S:
                self._asked_s.pop(rank)
                self._away.add(rank)
                found += self._end([way for way in self._ways.values() if way.rank == rank])
        return found

    # ---- inside

    def _opened(self, rank: int, number: int, address: bytes) -> list[FerryEffect]:
        if (rank, False, number) in self._ways:
            raise ProtocolError(f"ferry {rank} opens a way that is open")
        way = Way(rank, number, own=False)
        full = sum(1 for other in self._ways.values() if other.rank == rank) >= _MAX_WAYS
        if self._leaving or full or not address.isascii():
            self._say(way, Saying.CLOSE)
            return []
        self._ways[rank, False, number] = way
        return [DialDoor(way, address.decode())]

    def _end(self, ways: list[Way]) -> list[FerryEffect]:
        """The other side is told, and may hear it some day."""
        for way in ways:
            self.hung_up(way)
        return [End(way) for way in ways]

    def _ask(self, rank: int, now_s: float) -> None:
        self._asked_s[rank] = now_s
        self._tell(rank, Saying.ASK)

    def _part(self, rank: int) -> None:
        """Nothing is said to it after that."""
        if self._leaving and rank in self._left and rank not in self._parted:
            self._tell(rank, Saying.LAST)
            self._parted.add(rank)

    def _is_open(self, way: Way) -> bool:
        return self._ways.get((way.rank, way.own, way.number)) is way

    def _say(self, way: Way, kind: Saying, size: int = 0, *content: memoryview) -> None:
        if way.rank not in self._parted:
            self.out.append(Message(way.rank, Word(kind, way.own, way.number, size), *content))

    def _tell(self, rank: int, kind: Saying) -> None:
        if rank not in self._parted:
            self.out.append(Message(rank, Word(kind)))
