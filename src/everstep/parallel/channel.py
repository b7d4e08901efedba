"""Messages between workers of one host: the sender writes into its own memory, the receiver copies from there.

    page 0     header and bell (see `mapping`)
    page 1     the opening: the generation that the sender is in, and the number of its first message there
    log        one record per message: to whom, which hop, where it lies
    room       the messages, see `Arena` and `frame`

Order of writes: message, then record, its checksum first but its number in the checksum, then the bell.

Why nothing wrong is read, without a lock:
- What was sent for a step is overwritten after that step's agree, which proves that all members have received it; or
  in a newer generation, after the opening has been rewritten. A receiver looks at the opening again after copying: if
  it has changed, the sender has left the generation, and so must the receiver, who throws the copy away.
- Records are numbered through, and bear their generation: one of an older generation is never taken for a newer one.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from everstep.base.errors import CollectiveAborted, InvariantViolation, check
from everstep.base.plan import Plan, WorkerKey
from everstep.base.ports import Hop, OnTick
from everstep.parallel.fence import Fence
from everstep.parallel.frame import HEAD_LENGTHS, frame_of, head_size, parse_head
from everstep.parallel.mapping import PAGE, Attached, Mapping, OwnMapping, PeerMapping, load_fence

KINDS = ("act", "grad", "tied", "eval")

_MAGIC = b"EVERSTC1"
_WAIT_S = 0.005
_OPENING = struct.Struct("<QqQ")
_OPENING_AT = PAGE
_RECORD = struct.Struct("<QQqqiiiiQQ")
_RECORDS = 1 << 16
_LOG_AT = 2 * PAGE
_ROOM_AT = _LOG_AT + _RECORDS * _RECORD.size
_DIGEST_BYTES = 8
_ROOM_BYTES = 64 << 30  # in flight at once at most; costs address space only
_WINDOW = 8
_SLACK_BYTES = 16 << 20


class _Taken(NamedTuple):
    step: int
    start: int
    stop: int


class Arena:
    """Where messages lie in a sender's memory: 64-byte aligned runs of [0, room_bytes), taken by step and given back
    all at once. The same steps in the same order get the same places again, so pages once touched go on being used.
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


class SharedMemoryChannel:
    """Satisfies `everstep.base.ports.Channel` for members of one host.

    device: where received tensors are put.
    """

    def __init__(self, me: WorkerKey, tick: OnTick, *, device: torch.device | str = "cpu") -> None:
        self._me = me
        self._tick = tick
        self._device = torch.device(device)
        self._fence = Fence()
        layout: Any = (_ROOM_AT + _ROOM_BYTES, _MAGIC, (_ROOM_BYTES, _RECORDS, 0, 0))
        self._own = OwnMapping(me, *layout)
        self._room = _bytes(self._own)
        self._arena = Arena(_ROOM_BYTES)
        self._number = 0
        self._attached = Attached(me, lambda m: PeerMapping(m.segment, m.key, *layout))
        self._inboxes: dict[int, _Inbox] = {}

    @property
    def segment(self) -> str:
        return self._own.name

    def open(self, plan: Plan) -> None:
        """Attach to the members of the plan that are not attached yet.

        Raises: CollectiveAborted if members are dead; MembershipError if a segment is not that of a member.
        """
        check(plan.has(self._me), f"{self._me} is no member of generation {plan.generation}")
        self._fence.enter(plan.generation)
        opening = struct.pack("<qQ", plan.generation, self._number)
        _OPENING.pack_into(self._own.memory, _OPENING_AT, _digest(opening), plan.generation, self._number)
        self._own.ring()  # a barrier: who copies what is overwritten from here on sees the new opening
        self._arena.clear()
        self._inboxes = {}
        mappings: dict[int, Mapping] = {self._me.worker_id: self._own, **self._attached.meet(plan, self._fence)}
        self._inboxes = {w: _Inbox(m, w, self._me.worker_id, plan.generation) for w, m in mappings.items()}

    def send(self, to: int, key: Hop, tensors: Sequence[torch.Tensor], meta: bytes = b"") -> None:
        """One copy into the own memory. Raises: CollectiveAborted if the generation has been aborted."""
        self._fence.check()
        check(to in self._inboxes, f"worker {to} is no member of generation {self._fence.generation}")
        check(len(self._arena) < _RECORDS // 2, f"{len(self._arena)} messages in flight are too many; forget steps")
        frame = frame_of(tensors, meta)
        start = self._arena.take(key.step, frame.size)
        frame.fill(self._room[start : start + frame.size], tensors)
        kind = KINDS.index(key.kind)
        fields = (self._number, self._fence.generation, key.step, kind, to, key.part, key.lane, start, frame.size)
        at = _record_at(self._number)
        packed = _RECORD.pack(0, *fields)[_DIGEST_BYTES:]
        _RECORD.pack_into(self._own.memory, at, _digest(packed), *fields)
        self._number += 1
        self._own.ring()

    def expect(self, source: int, key: Hop) -> None:
        """Nothing to prepare: the message lies ready as soon as it was sent."""

    def recv(self, source: int, key: Hop) -> tuple[list[torch.Tensor], bytes]:
        """One copy out of the sender's memory.

        Raises: CollectiveAborted after `abort`, when the sender died without having sent it, and when the sender has
        entered a newer generation.
        """
        self._fence.check()
        check(source in self._inboxes, f"worker {source} is no member of generation {self._fence.generation}")
        inbox = self._inboxes[source]
        while True:
            bell = inbox.mapping.bell
            inbox.look()
            self._fence.check()
            self._tick()
            if inbox.has(key):
                return inbox.take(key, self._device)
            inbox.mapping.await_bell(bell, _WAIT_S)
            if inbox.mapping.bell == bell and not inbox.mapping.alive():
                inbox.look()  # what it sent at the very end
                if not inbox.has(key):
                    raise CollectiveAborted(f"worker {source} died before it sent {key}", [source])

    def forget(self, step: int) -> None:
        """What was sent for steps up to this one may be overwritten."""
        start, stop = self._arena.forget(step)
        start = -(-start // PAGE) * PAGE
        stop -= stop % PAGE
        if start < stop:
            self._own.give_back(_ROOM_AT + start, stop - start)
        for inbox in self._inboxes.values():
            inbox.forget(step)

    def abort(self, generation: int) -> None:
        """Thread-safe; the waiter sees it within 5 ms."""
        self._fence.abort(generation)

    def close(self) -> None:
        """Detach."""
        self._fence.abort(1 << 62)
        self._attached.close()
        self._inboxes.clear()
        self._room = torch.empty(0, dtype=torch.uint8)
        self._own.close()


class _Inbox:
    """What one sender has for this worker in one generation."""

    def __init__(self, mapping: Mapping, sender: int, me: int, generation: int) -> None:
        self.mapping = mapping
        self._sender = sender
        self._me = me
        self._generation = generation
        self._room = _bytes(mapping)
        self._opening = b""
        self._next = 0
        self._found: dict[Hop, tuple[int, int]] = {}

    def has(self, key: Hop) -> bool:
        return key in self._found

    def look(self) -> None:
        """Read the records that have come since.

        Raises: CollectiveAborted if the sender is in a newer generation.
        """
        if not self._opening and not self._entered():
            return
        memory = self.mapping.memory
        while True:
            at = _record_at(self._next)
            raw = memory[at : at + _RECORD.size]
            digest, number, generation, step, kind, to, part, lane, start, size = _RECORD.unpack(raw)
            if number != self._next or generation != self._generation or digest != _digest(raw[_DIGEST_BYTES:]):
                return
            self._next += 1
            if to == self._me:
                self._found[Hop(step, KINDS[kind], part, lane)] = (start, size)  # type: ignore[arg-type]

    def take(self, key: Hop, device: torch.device) -> tuple[list[torch.Tensor], bytes]:
        """Copy a message that has come. Raises: CollectiveAborted if it was overwritten meanwhile."""
        start, size = self._found.pop(key)
        memory, at = self.mapping.memory, _ROOM_AT + start
        length = head_size(memory[at : at + HEAD_LENGTHS])
        head = memory[at : at + length] if length <= size else b""
        self._verify()
        if not head:
            raise InvariantViolation(f"{key} of worker {self._sender}: a head of {length} bytes in {size}")
        frame = parse_head(head)
        source = self._room[start : start + size]
        tensors = [place.fresh(device) for place in frame.places]
        for place, tensor in zip(frame.places, tensors, strict=True):
            if tensor.numel():
                tensor.copy_(place.view(source))
        self._verify()
        return tensors, frame.meta

    def forget(self, step: int) -> None:
        """Keep up with the log also where nothing is received from."""
        try:
            self.look()
        except CollectiveAborted:
            return  # whoever receives will be told
        if self._found:
            self._found = {key: place for key, place in self._found.items() if key.step > step}

    def _entered(self) -> bool:
        raw = self.mapping.memory[_OPENING_AT : _OPENING_AT + _OPENING.size]
        digest, generation, first = _OPENING.unpack(raw)
        if digest != _digest(raw[_DIGEST_BYTES:]) or generation < self._generation:
            return False
        if generation > self._generation:
            self._left()
        self._opening, self._next = raw, first
        return True

    def _verify(self) -> None:
        load_fence()
        if self.mapping.memory[_OPENING_AT : _OPENING_AT + _OPENING.size] != self._opening:
            self._left()

    def _left(self) -> None:
        raise CollectiveAborted(f"generation {self._generation}: worker {self._sender} has left it for a newer one")


def _record_at(number: int) -> int:
    return _LOG_AT + number % _RECORDS * _RECORD.size


def _digest(content: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(content))


def _bytes(mapping: Mapping) -> torch.Tensor:
    """uint8 [_ROOM_BYTES] over the room."""
    return torch.frombuffer(mapping.array(ctypes.c_uint8, _ROOM_BYTES, _ROOM_AT), dtype=torch.uint8)
