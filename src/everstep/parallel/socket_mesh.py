"""One generation's own sockets for bulk data, over connections whose ends have proved the token.

Gloo takes any caller for a member, loses a descriptor to each stranger, and cannot be aborted. Here each connection is
authenticated before anything is read from it, and abort is a shutdown. A receiver asks first, and the member that has
the tensor then sends it: so each byte goes straight into its final memory, and unwanted bytes stay with their sender.
Blocks of gradients are pushed, because their receiver has room for them (`Receiver`). Two threads move all bytes of a
mesh, one out and one in. Between hosts a tag covers every byte; on one host tags cover only the frames around the
bytes.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn, Protocol

import torch

from everstep.base.errors import CollectiveAborted, InvariantViolation, ProtocolError
from everstep.base.ports import Node, OnTick
from everstep.parallel.nccl_links import Transfer
from everstep.parallel.peers import Meeting, PeerSockets
from everstep.runtime.link.handshake import TAG_BYTES, Seals

_GRACE_S = 0.1
_WAIT_S = 0.05
_PIECE_BYTES = 1 << 20
_HEAD = struct.Struct(">BqQIII")
"""Kind; tag, or the step of blocks; size in bytes; for blocks: lanes from and to, and the first block."""
_ASK, _CONTENT, _BLOCKS, _WHOLE_BLOCKS = 1, 2, 3, 4

_Address = tuple[int, int]
"""(worker id of the other side, tag)."""


class BlockNote(NamedTuple):
    """Description of blocks: of the sum of the lanes lo..hi-1, or of the result, (0, 0); beginning with block `first`.
    whole: no entry of the layout is absent in them."""

    step: int
    lo: int
    hi: int
    first: int
    whole: bool

    @property
    def of_node(self) -> bool:
        return self.hi > 0

    @property
    def node(self) -> Node:
        return Node(self.lo, self.hi)


class Receiver(Protocol):
    """Takes blocks that are pushed; called by the receiving thread, except for `lost`."""

    def space(self, w: int, note: BlockNote, size: int) -> memoryview:
        """Memory for that many bytes of worker `w`. Raises: ProtocolError if they are not wanted."""

    def came(self, note: BlockNote, size: int) -> None:
        """All of these bytes have come. Raises: ProtocolError if they had come before."""

    def lost(self) -> None:
        """A connection has ended. Called by any thread."""


class Parcel:
    """One tensor to send. Its sender keeps it until the receiver is known to have it. `is_completed`: all of it has
    left, so that its memory may change."""

    def __init__(self, worker_id: int, content: memoryview, left: Callable[[], None] | None = None) -> None:
        """left: called when all of it has left, by the sending thread."""
        self.worker_id = worker_id
        self.content = content
        self._gone = False
        self._left = left

    def is_completed(self) -> bool:
        return self._gone

    def complete(self) -> None:
        self._gone = True
        if self._left is not None:
            self._left()


class Receipt:
    """One tensor to receive. `is_completed`: it has come."""

    def __init__(self, worker_id: int, content: memoryview) -> None:
        self.worker_id = worker_id
        self.content = content
        self._there = False

    def is_completed(self) -> bool:
        return self._there

    def complete(self) -> None:
        self._there = True
        self.content = memoryview(b"")


class _Line(NamedTuple):
    """The connection with one member. out: frames that have not left yet, each as pieces in order."""

    worker_id: int
    sock: socket.socket
    seals: Seals
    out: deque[Iterator[memoryview]]


class SocketMesh:
    """The connections of one generation. Transfers between two members that bear the same tag are received in the order
    in which they are sent."""

    def __init__(self, meeting: Meeting, tick: OnTick, receiver: Receiver | None = None) -> None:
        """receiver: of pushed blocks; without one they are refused."""
        self._receiver = receiver
        self._fence = meeting.fence
        self._generation = meeting.fence.generation
        self._peers = PeerSockets(meeting, tick, "bulk")
        self._lines: dict[int, _Line] = {}
        self._changed = threading.Condition()
        self._lost: dict[int, str] = {}
        self._wanted: defaultdict[_Address, deque[Receipt]] = defaultdict(deque)
        self._parcels: defaultdict[_Address, deque[weakref.ref[Parcel]]] = defaultdict(deque)
        self._asked: defaultdict[_Address, deque[int]] = defaultdict(deque)
        self._over = False
        self._broken: Exception | None = None
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._threads: list[threading.Thread] = []

    def connect(self) -> None:
        """Meet the others. Raises: CollectiveAborted."""
        self._peers.connect()
        lines = {w: _Line(w, sock, seals, deque()) for w, (sock, seals) in self._peers.lines().items()}
        with self._changed:
            self._lines = lines
        self._fence.check()
        for name, run in (("in", self._run_in), ("out", self._run_out)):
            thread = threading.Thread(target=self._guarded, args=(run,), name=f"everstep-bulk-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    # ---- sending and receiving

    def receive(self, transfer: Transfer) -> Receipt:
        """Begin to receive a contiguous tensor; `wait` says when it has come. Raises: CollectiveAborted."""
        return self._begin_receive(*transfer)

    def send(self, transfer: Transfer) -> Parcel:
        """Begin to send a contiguous tensor. The caller keeps the parcel, and does not change the tensor, until all has
        been received. Raises: CollectiveAborted."""
        return self._begin_send(*transfer)

    def push(self, w: int, note: BlockNote, tensor: torch.Tensor, left: Callable[[], None] | None = None) -> None:
        """Begin to send contiguous blocks for which the other side has room, or that it will no longer want. They must
        not change until a later exchange, or until `left` is called, by another thread, when all of it has left.
        Nothing happens if the connection has ended."""
        parcel = Parcel(w, bytes_of(tensor), left)
        kind = _WHOLE_BLOCKS if note.whole else _BLOCKS
        head = _HEAD.pack(kind, note.step, len(parcel.content), note.lo, note.hi, note.first)
        with self._changed:
            if w not in self._lost:
                self._enqueue(w, head, parcel)

    @property
    def whole(self) -> bool:
        return not (self._lost or self._over or self._fence.down)

    def fail(self) -> NoReturn:
        """Report a connection that has ended. Raises: CollectiveAborted naming the worker of the first one;
        InvariantViolation if a thread of this mesh could not go on."""
        self._fail(next(iter(self._lost), -1))

    def wait(self, transfer: Receipt | Parcel) -> None:
        """Wait until the tensor has come, or has left. Raises: CollectiveAborted."""
        with self._changed:
            while not (transfer.is_completed() or transfer.worker_id in self._lost or self._fence.down):
                self._changed.wait(_WAIT_S)
        if not transfer.is_completed():
            self._fail(transfer.worker_id)

    def cut(self) -> None:
        """Thread-safe. All pending transfers raise within milliseconds, here and at the other ends."""
        with self._changed:
            self._over = True
            for line in self._lines.values():
                self._lost.setdefault(line.worker_id, "the connections were cut")
                with contextlib.suppress(OSError):
                    line.sock.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
            self._wake()
        self._tell_lost()

    def retire(self) -> None:
        self.cut()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._peers.retire()
        with self._changed:
            if self._wake_w >= 0:
                os.close(self._wake_w)
                os.close(self._wake_r)
                self._wake_w = -1

    # ---- inside

    def _begin_receive(self, tensor: torch.Tensor, w: int, tag: int) -> Receipt:
        receipt = Receipt(w, bytes_of(tensor))
        size = len(receipt.content)
        self._check(w)
        with self._changed:
            self._wanted[w, tag].append(receipt)
            self._queue(w, _ASK, tag, size, None)
        return receipt

    def _begin_send(self, tensor: torch.Tensor, w: int, tag: int) -> Parcel:
        parcel = Parcel(w, bytes_of(tensor))
        self._check(w)
        with self._changed:
            waiting = self._parcels[w, tag]
            while waiting and waiting[0]() is None:
                waiting.popleft()
            waiting.append(weakref.ref(parcel))
            self._match(w, tag)
        return parcel

    def _check(self, w: int) -> None:
        self._fence.check()
        if w in self._lost:
            self._fail(w)

    def _match(self, w: int, tag: int) -> None:
        """Send tensors that were asked for, as far as they are here."""
        asked, waiting = self._asked[w, tag], self._parcels[w, tag]
        while asked and waiting:
            parcel = waiting.popleft()()
            if parcel is None:
                continue
            size = asked.popleft()
            if size == len(parcel.content):
                self._queue(w, _CONTENT, tag, size, parcel)
            else:
                self._lost[w] = f"it wants {size} bytes where {len(parcel.content)} are sent"
                self._changed.notify_all()

    def _fail(self, worker_id: int) -> NoReturn:
        """Raise for a lost peer, after a pause: a peer that leaves because of a new plan closes its connections, too,
        and that plan may be on its way here."""
        if self._broken is not None:  # no peer's fault
            raise InvariantViolation(f"a thread that moves bytes failed: {self._broken!r}") from self._broken
        until = time.monotonic() + _GRACE_S
        while not self._fence.down and time.monotonic() < until:
            time.sleep(0.001)
        why = self._lost.get(worker_id, "the connections were cut")
        self.cut()
        self._fence.check()
        raise CollectiveAborted(f"generation {self._generation}: transfer with [{worker_id}]: {why}", [worker_id])

    def _queue(self, w: int, kind: int, tag: int, size: int, parcel: Parcel | None) -> None:
        self._enqueue(w, _HEAD.pack(kind, tag, size, 0, 0, 0), parcel)

    def _enqueue(self, w: int, head: bytes, parcel: Parcel | None) -> None:
        line = self._lines[w]
        line.out.append(_pieces(line.seals, head, parcel))
        self._wake()

    def _wake(self) -> None:
        if self._wake_w >= 0:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_w, b"\0")

    def _mark_lost(self, line: _Line, why: str) -> None:
        with self._changed:
            self._lost.setdefault(line.worker_id, why)
            line.out.clear()
            self._changed.notify_all()
        self._tell_lost()

    def _tell_lost(self) -> None:
        if self._receiver is not None:
            self._receiver.lost()

    def _guarded(self, run: Callable[[], None]) -> None:
        """Run a thread; if it ends unforeseen, for example for want of memory, nobody is left waiting for it."""
        try:
            run()
        except Exception as error:
            self._broken = error
            self.cut()

    # ---- the thread that sends

    def _run_out(self) -> None:
        leaving: dict[int, memoryview] = {}
        poller = select.poll()
        poller.register(self._wake_r, select.POLLIN)
        registered: set[int] = set()
        while not self._over:
            for fd, _ in poller.poll():
                if fd == self._wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_r, 4096)
            for line in self._lines.values():
                busy = line.worker_id not in self._lost and self._send(line, leaving)
                if busy and line.worker_id not in registered:
                    poller.register(line.sock, select.POLLOUT)
                    registered.add(line.worker_id)
                elif not busy and line.worker_id in registered:
                    poller.unregister(line.sock)
                    registered.discard(line.worker_id)

    def _send(self, line: _Line, leaving: dict[int, memoryview]) -> bool:
        """Send as much as the kernel takes at once. Returns whether there is more."""
        while True:
            piece = leaving.pop(line.worker_id, None) or self._next(line)
            if piece is None:
                return False
            try:
                sent = line.sock.send(piece)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._mark_lost(line, str(error))
                return False
            if sent < len(piece):
                leaving[line.worker_id] = piece[sent:]
                return True

    def _next(self, line: _Line) -> memoryview | None:
        """Next piece to send. Made without the lock: tags take time, and others can queue frames."""
        while True:
            with self._changed:
                frame = line.out[0] if line.out else None
            if frame is None:
                return None
            piece = next(frame, None)
            if piece is not None:
                return piece
            with self._changed:
                if line.out and line.out[0] is frame:
                    line.out.popleft()
                self._changed.notify_all()

    # ---- the thread that receives

    def _run_in(self) -> None:
        poller = select.poll()
        talks = {line.sock.fileno(): (line, self._incoming_spaces(line)) for line in self._lines.values()}
        space = {fd: next(talk) for fd, (_, talk) in talks.items()}
        for fd in talks:
            poller.register(fd, select.POLLIN)
        while talks and not self._over:
            for fd, _ in poller.poll():
                line, talk = talks[fd]
                try:
                    space[fd] = self._fill(line, talk, space[fd])
                except (OSError, ProtocolError) as error:
                    self._mark_lost(line, str(error))
                    poller.unregister(fd)
                    del talks[fd]

    def _fill(self, line: _Line, talk: Iterator[memoryview], space: memoryview) -> memoryview:
        """Read available bytes. Returns the space that is still to be filled."""
        while True:
            with self._changed:  # so that memory given up is not written to
                if self._over:
                    raise ConnectionError("the connections were cut")
                try:
                    got = line.sock.recv_into(space)
                except BlockingIOError:
                    return space
            if got == 0:
                raise ConnectionError("it closed the connection")
            space = space[got:]
            if not space:
                space = next(talk)

    def _incoming_spaces(self, line: _Line) -> Iterator[memoryview]:
        """Spaces for incoming bytes, one after the other; none of them is empty."""
        head, tag_bytes = bytearray(_HEAD.size + TAG_BYTES), bytearray(TAG_BYTES)
        while True:
            yield memoryview(head)
            line.seals.check(memoryview(head)[_HEAD.size :], memoryview(head)[: _HEAD.size])
            kind, tag, size, lo, hi, first = _HEAD.unpack_from(head)
            if kind == _ASK:
                self._tensor_asked(line.worker_id, tag, size)
                continue
            note = BlockNote(tag, lo, hi, first, kind == _WHOLE_BLOCKS) if kind in (_BLOCKS, _WHOLE_BLOCKS) else None
            receipt = self._receipt(line.worker_id, tag, size) if note is None else None
            content = self._space(line.worker_id, note, size) if receipt is None else receipt.content
            check = line.seals.bulk_check() if line.seals.bulk_tags else None
            step = _PIECE_BYTES if check is not None else max(size, 1)
            for at in range(0, len(content), step):
                yield content[at : at + step]
                if check is not None:
                    check.add(content[at : at + step])
            if check is not None:
                yield memoryview(tag_bytes)
                check.check(tag_bytes)
            if receipt is None:
                self._receiver.came(note, size)  # type: ignore[union-attr, arg-type]
                continue
            with self._changed:
                receipt.complete()
                self._changed.notify_all()

    def _space(self, w: int, note: BlockNote | None, size: int) -> memoryview:
        if note is None or self._receiver is None:
            raise ProtocolError(f"worker {w} sends blocks that this worker does not take")
        return self._receiver.space(w, note, size)

    def _tensor_asked(self, w: int, tag: int, size: int) -> None:
        with self._changed:
            self._asked[w, tag].append(size)
            self._match(w, tag)

    def _receipt(self, w: int, tag: int, size: int) -> Receipt:
        with self._changed:
            wanted = self._wanted[w, tag]
            if not wanted:
                raise ProtocolError(f"worker {w} sends {size} bytes that were not asked for")
            receipt = wanted.popleft()
        if size != len(receipt.content):
            raise ProtocolError(f"worker {w} sends {size} bytes where {len(receipt.content)} are wanted")
        return receipt


def _pieces(seals: Seals, head: bytes, parcel: Parcel | None) -> Iterator[memoryview]:
    """Pieces of one frame: tags are made in the order in which the pieces leave."""
    yield memoryview(head + seals.tag(head))
    if parcel is None:
        return
    tag = seals.bulk_tag() if seals.bulk_tags else None
    step = _PIECE_BYTES if tag is not None else max(len(parcel.content), 1)
    for at in range(0, len(parcel.content), step):
        piece = parcel.content[at : at + step]
        if tag is not None:
            tag.add(piece)
        yield piece
    if tag is not None:
        yield memoryview(tag.tag())
    parcel.complete()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Memory of a contiguous tensor on the CPU."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
