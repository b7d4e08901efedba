"""Messages between workers: inside a host through shared memory, between hosts over our own sockets.

On one host the sender writes into its own memory, and the receiver copies from there:

    page 0     header and bell (see `mapping`)
    page 1     the opening: the generation that the sender is in, and the number of its first message there
    ring       updated parameters for many, see `spread_ring`
    log        one record per message: receiver, hop, place
    room       the messages, see `Arena` and `frame`

Order of writes: message, then record, its checksum first but its number in the checksum, then the bell.

Why no wrong bytes are read, without a lock:
- Messages of a step are overwritten after that step's agree, which proves that all members have received them; or
  in a newer generation, after the opening has been rewritten. A receiver looks at the opening again after copying: if
  it has changed, the sender has left the generation, and so must the receiver, which throws the copy away.
- Records are numbered through, and bear their generation: a record of an older generation is never taken for a newer
  one.

Sockets move bytes when both sides have named them, and the receiver has to know their size. So each *edge* (sender,
receiver, kind, part) first says in a small *lead* how large its frames are, once in a generation; all its frames have
that size, and a receiver can ask for many of them before it needs them. A message that is larger than its edge's frames
says so in the frame, and its content follows as a message of its own.

Tensors on other devices pass through host memory. NCCL serves gradients, but single messages in any order would have to
be paired by order on both sides, with each direction in a communicator of its own.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from everstep.base.errors import CollectiveAborted, InvariantViolation, check
from everstep.base.plan import Plan, WorkerKey
from everstep.base.ports import MOST_LANES, Hop, OnTick, Portion
from everstep.exact.layout import ALIGN_BYTES
from everstep.parallel.fence import Fence
from everstep.parallel.frame import HEAD_LENGTHS, Frame, frame_of, fresh_bytes, head_size, parse_head
from everstep.parallel.group import GroupTransport
from everstep.parallel.mapping import PAGE, Attached, Mapping, OwnMapping, PeerMapping, load_fence
from everstep.parallel.socket_mesh import Parcel, Receipt, SocketMesh
from everstep.parallel.spread_ring import RING_BYTES, SpreadName, SpreadRing

KINDS = ("act", "grad", "tied", "eval")

_MAGIC = b"EVERSTC2"
_WAIT_S = 0.005
_OPENING = struct.Struct("<QqQ")
_OPENING_AT = PAGE
_RECORD = struct.Struct("<QQqqiiiiQQ")
_RECORDS = 1 << 16
_RING_AT = 2 * PAGE
_LOG_AT = _RING_AT + RING_BYTES
_ROOM_AT = _LOG_AT + _RECORDS * _RECORD.size
_DIGEST_BYTES = 8
_ROOM_BYTES = 64 << 30  # most bytes in flight at once; costs address space only
_WINDOW = 8
_SLACK_BYTES = 16 << 20


class _Taken(NamedTuple):
    step: int
    start: int
    stop: int


class Arena:
    """Places of messages in a sender's memory: 64-byte aligned runs of [0, room_bytes), taken by step and given back
    all at once. The same steps in the same order get the same places again, so pages once touched go on being used."""

    def __init__(self, room_bytes: int) -> None:
        self._room = room_bytes
        self._taken: list[_Taken] = []
        self._next = 0
        self._limit = room_bytes
        self._touched = 0
        self._peaks: deque[int] = deque(maxlen=_WINDOW)
        self._peak = 0

    def __len__(self) -> int:
        """Number of runs that are taken."""
        return len(self._taken)

    def take(self, step: int, size_bytes: int) -> int:
        """Take a run of size_bytes (a multiple of 64); returns its start."""
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
        """Free the runs of steps up to this one. Returns a range [start, stop) that has not been used for long."""
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
        self.forget(1 << 62)


class SharedMemoryChannel:
    """`everstep.base.ports.Channel` for members of one host.

    device: of received tensors.
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
        self._ring = SpreadRing(me.worker_id, self._own, _RING_AT, self._fence, tick)
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
        self._own.ring()  # a barrier: a member that copies a message overwritten from here on sees the new opening
        self._arena.clear()
        self._inboxes = {}
        mappings: dict[int, Mapping] = {self._me.worker_id: self._own, **self._attached.meet(plan, self._fence)}
        self._inboxes = {w: _Inbox(m, w, self._me.worker_id, plan.generation) for w, m in mappings.items()}
        self._ring.open(mappings)

    def send(self, to: int, key: Hop, tensors: Sequence[torch.Tensor], meta: bytes = b"") -> None:
        """Copy the message into the own memory, once. Raises: CollectiveAborted if the generation has been aborted."""
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
        """Nothing to prepare: the message is readable as soon as it is sent."""

    def recv(self, source: int, key: Hop) -> tuple[list[torch.Tensor], bytes]:
        """Copy the message out of the sender's memory, once.

        Raises: CollectiveAborted after `abort`, if the sender died without sending it, and if the sender has entered a
        newer generation.
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
                inbox.look()  # the sender's last messages
                if not inbox.has(key):
                    raise CollectiveAborted(f"worker {source} died before it sent {key}", [source])

    def spread(self, step: int, stage: int, portions: Sequence[Portion], *, relayed: bool = False) -> None:
        """Through the own memory, bit by bit. relayed: these have come from other hosts before.

        Raises: CollectiveAborted after `abort`, and if a member died on which it had to wait.
        """
        self._ring.spread(SpreadName(step, stage, int(relayed)), portions)

    def forget(self, step: int) -> None:
        """Messages of steps up to this one may be overwritten."""
        start, stop = self._arena.forget(step)
        start = -(-start // PAGE) * PAGE
        stop -= stop % PAGE
        if start < stop:
            self._own.give_back(_ROOM_AT + start, stop - start)
        for inbox in self._inboxes.values():
            inbox.forget(step)

    def rest(self) -> None:
        self._attached.close()
        self._inboxes = {}

    def abort(self, generation: int) -> None:
        self._fence.abort(generation)

    def close(self) -> None:
        self._fence.abort(1 << 62)
        self._attached.close()
        self._inboxes.clear()
        self._ring.close()
        self._room = torch.empty(0, dtype=torch.uint8)
        self._own.close()


class _Inbox:
    """Messages of one sender for this worker in one generation."""

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
        """Read new records.

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
        """Keep up with the log even if nothing is received from this sender."""
        try:
            self.look()
        except CollectiveAborted:
            return  # `recv` will raise it
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


# ---- between workers of several hosts: over the sockets that connect all members of a generation anyway
_HEADER = struct.Struct("<qiiiiQ")
_LEAD = struct.Struct("<Q")
_PARTS = 1 << 10
_TAGS = 1 << 28
_FRAME, _MORE = 0, 1
"""Each hop has two tags: that of its frame, and that of the content that does not fit into the frame."""
_LEADS = _TAGS + 2 * len(KINDS) * _PARTS * MOST_LANES
_SPREADS = _LEADS + len(KINDS) * _PARTS
_SPREAD_TAGS = 16
"""Number of successive steps whose portions bear different tags; those of older ones have all come."""


class _Edge(NamedTuple):
    peer: int
    kind: str
    part: int


class _Coming(NamedTuple):
    content: torch.Tensor
    receipt: Receipt


class GroupChannel:
    """`everstep.base.ports.Channel` over the sockets of `carrier`, a transport of all members.

    The carrier is opened before the channel, and aborted with it. device: of received tensors.
    """

    segment = ""

    def __init__(self, me: WorkerKey, carrier: GroupTransport, *, device: torch.device | str = "cpu") -> None:
        self._me = me
        self._carrier = carrier
        self._device = torch.device(device)
        self._fence = Fence()
        self._members: tuple[int, ...] = ()
        self._clear()

    def _clear(self) -> None:
        self._rooms: dict[_Edge, int] = {}
        self._leads: dict[_Edge, _Coming] = {}
        self._frames: dict[_Edge, int] = {}
        self._wanted: dict[_Edge, list[Hop]] = {}
        self._coming: dict[tuple[int, Hop], _Coming] = {}
        self._own: dict[Hop, tuple[torch.Tensor, Frame]] = {}
        self._sent: list[tuple[int, list[object]]] = []

    def open(self, plan: Plan) -> None:
        """Use the carrier's new mesh."""
        check(plan.has(self._me), f"{self._me} is no member of generation {plan.generation}")
        self._fence.enter(plan.generation)
        self._clear()
        self._members = plan.worker_ids
        self._fence.check()

    def send(self, to: int, key: Hop, tensors: Sequence[torch.Tensor], meta: bytes = b"") -> None:
        """Copy the message into a frame that is kept until `forget`, once. Raises: CollectiveAborted."""
        mesh = self._checked(to, key)
        layout = frame_of(tensors, meta)
        if to == self._me.worker_id:
            self._own[key] = _filled(layout, tensors), layout
            return
        edge = _Edge(to, key.kind, key.part)
        if edge not in self._rooms:
            self._rooms[edge] = layout.size
            lead = fresh_bytes(_LEAD.size)
            _write(lead, _LEAD.pack(layout.size))
            self._post(mesh, key.step, lead, to, _lead_tag(edge))
        room = self._rooms[edge]
        frame = fresh_bytes(ALIGN_BYTES + room)
        _write(frame, _HEADER.pack(key.step, KINDS.index(key.kind), key.part, key.lane, 0, layout.size))
        if layout.size <= room:
            layout.fill(frame[ALIGN_BYTES:], tensors)
        self._post(mesh, key.step, frame, to, _tag(key) + _FRAME)
        if layout.size > room:
            self._post(mesh, key.step, _filled(layout, tensors), to, _tag(key) + _MORE)

    def expect(self, source: int, key: Hop) -> None:
        """Ask for the message now, if the size of the edge's frames is known, else as soon as it is.

        Raises: CollectiveAborted.
        """
        mesh = self._checked(source, key)
        if source == self._me.worker_id or (source, key) in self._coming:
            return
        edge = _Edge(source, key.kind, key.part)
        wanted = self._wanted.setdefault(edge, [])
        if key not in wanted:
            wanted.append(key)
        if edge not in self._frames and edge not in self._leads:
            self._leads[edge] = _receive(mesh, _LEAD.size, source, _lead_tag(edge))
        self._ask(mesh)

    def recv(self, source: int, key: Hop) -> tuple[list[torch.Tensor], bytes]:
        """Wait for the message. Raises: CollectiveAborted after `abort`, and if the connection broke."""
        mesh = self._checked(source, key)
        if source == self._me.worker_id:
            check(key in self._own, f"{key} was not sent by the only one who could, this worker")
            content, layout = self._own.pop(key)
            return self._tensors(layout, content), layout.meta
        self.expect(source, key)
        edge = _Edge(source, key.kind, key.part)
        with self._carrier.ticking():
            if edge in self._leads:
                mesh.wait(self._leads[edge].receipt)
                self._ask(mesh)
            coming = self._coming.pop((source, key))
            mesh.wait(coming.receipt)
            step, kind, part, lane, _, size = _HEADER.unpack(coming.content[: _HEADER.size].numpy().tobytes())
            found = Hop(step, KINDS[kind], part, lane)  # type: ignore[arg-type]
            check(found == key, f"expected {key} of worker {source}, got {found}")
            content = coming.content[ALIGN_BYTES:]
            if size > content.numel():
                content, receipt = _receive(mesh, size, source, _tag(key) + _MORE)
                mesh.wait(receipt)
        length = head_size(content[:HEAD_LENGTHS].numpy().tobytes())
        layout = parse_head(content[:length].numpy().tobytes())
        return self._tensors(layout, content), layout.meta

    def spread(
        self, step: int, stage: int, portions: Sequence[Portion], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Out of and into the parameters' memory. meanwhile: called while bytes move. Raises: CollectiveAborted."""
        self._fence.check()
        mesh, tag, me = self._carrier.mesh, _SPREADS + step % _SPREAD_TAGS * _PARTS + stage, self._me.worker_id
        try:
            moving: list[Receipt | Parcel] = []
            for one in portions:
                if one.source == me:
                    moving += [mesh.send((one.data, taker, tag)) for taker in one.takers]
                elif me in one.takers:
                    moving.append(mesh.receive((one.data, one.source, tag)))
            meanwhile()
            with self._carrier.ticking():
                for transfer in moving:
                    mesh.wait(transfer)
        except BaseException:
            mesh.cut()  # nothing may write to the parameters any more
            raise

    def forget(self, step: int) -> None:
        """Release the messages of steps up to this one."""
        self._sent = [sent for sent in self._sent if sent[0] > step]
        self._own = {key: kept for key, kept in self._own.items() if key.step > step}

    def abort(self, generation: int) -> None:
        """Thread-safe. A caller that waits already is freed by the abort of the carrier."""
        self._fence.abort(generation)

    def close(self) -> None:
        """Forget everything; the mesh is the carrier's."""
        self._fence.abort(1 << 62)
        self._clear()

    # ---- inside

    def _checked(self, peer: int, key: Hop) -> SocketMesh:
        self._fence.check()
        check(peer in self._members, f"worker {peer} is no member of generation {self._fence.generation}")
        fits = 0 <= key.part < _PARTS and 0 <= key.lane < MOST_LANES
        check(fits, f"{key}: at most {_PARTS} parts and {MOST_LANES} lanes")
        return self._carrier.mesh

    def _post(self, mesh: SocketMesh, step: int, content: torch.Tensor, to: int, tag: int) -> None:
        """Send, and keep the content until the step is forgotten."""
        self._sent.append((step, [content, mesh.send((content, to, tag))]))

    def _ask(self, mesh: SocketMesh) -> None:
        """Begin to receive all wanted messages whose size is known by now."""
        for edge in [e for e, lead in self._leads.items() if lead.receipt.is_completed()]:
            lead = self._leads.pop(edge)
            (self._frames[edge],) = _LEAD.unpack(lead.content.numpy().tobytes())
        for edge in [e for e in self._wanted if e in self._frames]:
            for key in self._wanted.pop(edge):
                size = ALIGN_BYTES + self._frames[edge]
                self._coming[edge.peer, key] = _receive(mesh, size, edge.peer, _tag(key) + _FRAME)

    def _tensors(self, layout: Frame, content: torch.Tensor) -> list[torch.Tensor]:
        """The message's tensors. On the CPU without a copy: each over its own part of the content."""
        if self._device.type == "cpu":
            return [place.adopt(content) for place in layout.places]
        return [place.fresh(self._device).copy_(place.view(content)) for place in layout.places]


def _filled(layout: Frame, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    content = fresh_bytes(layout.size)
    layout.fill(content, tensors)
    return content


def _receive(mesh: SocketMesh, size: int, source: int, tag: int) -> _Coming:
    content = fresh_bytes(size)
    return _Coming(content, mesh.receive((content, source, tag)))


def _write(target: torch.Tensor, content: bytes) -> None:
    target[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _tag(key: Hop) -> int:
    return _TAGS + 2 * ((KINDS.index(key.kind) * _PARTS + key.part) * MOST_LANES + key.lane)


def _lead_tag(edge: _Edge) -> int:
    return _LEADS + KINDS.index(edge.kind) * _PARTS + edge.part
