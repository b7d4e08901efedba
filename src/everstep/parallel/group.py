"""The transport between hosts: torch process groups (gloo, NCCL), one per generation, that can be aborted.

Nodes go point to point: everybody sends each block owner its part of every node, owners finish the tree, and send their
result to everybody. Who sends what is settled before by an exchange of the nodes offered, because gloo kills a process
that receives another size than it expects. Records always go over gloo; gradients over NCCL where that is asked for.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import xxhash
from torch._C._distributed_c10d import Store

from everstep.base.errors import CollectiveAborted, ConfigError, InvariantViolation, check
from everstep.base.plan import Plan, WorkerKey
from everstep.base.ports import Node, Piece, Reduced, Tag, Tick
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout
from everstep.exact.reduce import NodePart, finish, merge_presence
from everstep.parallel.fence import Fence
from everstep.parallel.flats import Flats
from everstep.parallel.mesh import GlooMesh, Transfer
from everstep.parallel.nccl import NcclLinks
from everstep.parallel.reaper import Reaper
from everstep.parallel.reduction import Finished, decode_offers, encode_offers, zero_absent
from everstep.parallel.segment import record_key
from everstep.placement.owners import owners

_LOOPBACK = "127.0.0.1"
_TICK_S = 0.01
_INLINE_BYTES = 4096
_RECORD = struct.Struct("<QQ40s")
_TAG_RECORD, _TAG_REST, _TAG_RESULT, _TAG_NODE = 2, 3, 4, 16

Offers = dict[int, list[tuple[Node, bytes]]]


class GroupTransport:
    """Satisfies `everstep.base.ports.Transport` for members on any hosts.

    store: torch store that all members reach, best a `ControlStore`; keys bear the generation. backend: 'gloo' (device
    must be the CPU) or 'nccl' (a CUDA device). bind_host: address to listen on; by default loopback when all members
    are on one host, and the host of the member's own address otherwise.
    """

    def __init__(
        self,
        me: WorkerKey,
        layout: GradientLayout,
        n_lanes: int,
        store: Store,
        tick: Tick,
        backend: str = "gloo",
        device: torch.device | str = "cpu",
        *,
        bind_host: str | None = None,
    ) -> None:
        self._device = torch.device(device)
        if (backend, self._device.type) not in (("gloo", "cpu"), ("nccl", "cuda")):
            raise ConfigError(f"expected gloo with cpu or nccl with cuda, got {backend} with {self._device.type}")
        self._me = me
        self._layout = layout
        self._n_lanes = n_lanes
        self._store = store
        self._bind_host = bind_host
        self._fence = Fence()
        self._lock = threading.Lock()
        self._mesh: GlooMesh | None = None
        self._nccl: NcclLinks | None = None
        self._old: list[GlooMesh | NcclLinks] = []
        self._reaper = Reaper()
        self._ticker = _Ticker(tick, lambda: self._fence.down)
        self._owned: dict[int, tuple[int, int]] = {}
        self._flats = Flats(layout.numel, self._device)
        self._done = [Finished(layout.n_blocks), Finished(layout.n_blocks)]
        self._results: list[torch.Tensor | None] = [None, None]

    @property
    def segment(self) -> str:
        """Nothing to attach to."""
        return ""

    def open(self, plan: Plan) -> None:
        """Meet the members of the plan in a new group.

        Raises: CollectiveAborted if the generation ends before all are there, or a member cannot be reached.
        """
        check(plan.has(self._me), f"{self._me} is no member of generation {plan.generation}")
        self._retire_old()
        with self._lock:
            self._fence.enter(plan.generation)
            self._old = [group for group in (self._nccl, self._mesh) if group is not None]
            host = self._bind_host or _own_host(plan, self._me)
            mesh = self._mesh = GlooMesh(plan.worker_ids, self._me.worker_id, self._store, host, self._fence)
            self._nccl = (
                NcclLinks(plan.worker_ids, self._me.worker_id, self._store, self._device, self._fence)
                if self._device.type == "cuda"
                else None
            )
        self._owned = owners(self._layout.n_blocks, plan.worker_ids)
        with self._ticker.ticking():
            self._fence.check()
            if len(plan.members) > 1:
                mesh.connect()
                if self._nccl is not None:
                    self._nccl.connect()

    def node(self, step: int, node: Node) -> torch.Tensor:
        """float32 [layout.numel] on the transport's device."""
        return self._flats.tensor(step, node)

    def exchange(self, tag: Tag, payload: bytes) -> dict[int, bytes]:
        """All-gather of small records."""
        self._fence.check()
        with self._ticker.ticking():
            found = self._gather(tag, payload)
        self._retire_old()
        return found

    def reduce(self, step: int, presence: Mapping[Node, bytes]) -> Reduced:
        """Offer own nodes, finish the tree for the own blocks, hand the result to everybody."""
        self._fence.check()
        self._forget(step)
        with self._ticker.ticking():
            own = {node: self._flats.held(step, node) for node in presence}
            records = self._gather(Tag("reduce", step, 0), encode_offers(dict.fromkeys(presence, 0), presence))
            offers: Offers = {
                worker_id: [(node, row) for node, _, row in decode_offers(record, len(self._layout.entries))]
                for worker_id, record in records.items()
            }
            present = merge_presence(row for offered in offers.values() for _, row in offered)
            alone = Node(0, self._n_lanes)
            if len(offers) == 1 and list(own) == [alone]:
                result = own[alone]
                zero_absent(self._layout, result, present)
                self._flats.keep_result(step, alone)
            else:
                result = self._result(step)
                self._finish_own(step, self._collect(own, offers), result)
                self._spread(step, result)
        return Reduced(step, (Piece(0, self._layout.numel, result),), present, self._owned[self._me.worker_id])

    def abort(self, generation: int) -> None:
        """Thread-safe; a pending transfer raises within a few milliseconds."""
        with self._lock:
            self._fence.abort(generation)
            if not self._fence.down:
                return
            for group in (self._nccl, self._mesh):
                if group is not None:
                    group.cut()

    def close(self) -> None:
        """Leave the group and free everything but what was handed out."""
        self.abort(1 << 62)
        self._retire_old()
        for group in (self._nccl, self._mesh):
            if group is not None:
                self._reaper.take(group)
        self._mesh = self._nccl = None
        self._reaper.close()
        self._ticker.close()

    # ---- inside

    def _retire_old(self) -> None:
        """Called when all members are known to have left the generation before (or it has been cut)."""
        while self._old:
            self._reaper.take(self._old.pop())

    def _others(self) -> list[int]:
        return [worker_id for worker_id in self._owned if worker_id != self._me.worker_id]

    def _range(self, worker_id: int) -> tuple[int, int]:
        first, last = self._owned[worker_id]
        return first * BLOCK_ELEMENTS, last * BLOCK_ELEMENTS

    def _gather(self, tag: Tag, payload: bytes) -> dict[int, bytes]:
        """A slot of fixed size first, which says how much more will come; then the rest, where there is any."""
        others = self._others()
        found = {self._me.worker_id: payload}
        if not others:
            return found
        mesh = self._mesh
        if mesh is None:
            raise InvariantViolation("an exchange before the transport was opened")
        key = record_key(self._fence.generation, tag)
        slot = bytearray(_INLINE_BYTES)
        _RECORD.pack_into(slot, 0, xxhash.xxh3_64_intdigest(key + payload), len(payload), key)
        head = payload[: _INLINE_BYTES - _RECORD.size]
        slot[_RECORD.size : _RECORD.size + len(head)] = head
        mine = torch.frombuffer(slot, dtype=torch.uint8)
        theirs = {w: torch.empty(_INLINE_BYTES, dtype=torch.uint8) for w in others}
        sent = mesh.mark()
        mesh.transfer([(mine, w, _TAG_RECORD) for w in others], [(theirs[w], w, _TAG_RECORD) for w in others])
        mesh.settled(sent)
        slots = {w: theirs[w].numpy().tobytes() for w in others}
        lengths = {w: self._length(slots[w], w, key) for w in others}
        rests = {w: torch.empty(n, dtype=torch.uint8) for w, n in lengths.items() if n > 0}
        tail = torch.frombuffer(bytearray(payload[len(head) :] or b"-"), dtype=torch.uint8)
        receivers = others if len(payload) > len(head) else []
        mesh.transfer([(tail, w, _TAG_REST) for w in receivers], [(rest, w, _TAG_REST) for w, rest in rests.items()])
        for w in others:
            found[w] = self._whole(slots[w], rests.get(w), w, key)
        return dict(sorted(found.items()))

    def _length(self, slot: bytes, worker_id: int, key: bytes) -> int:
        """Bytes of the payload that are not in the slot; negative if it does not fill the slot."""
        _, length, bears = _RECORD.unpack_from(slot)
        if bears != key:
            raise InvariantViolation(f"expected record {key!r} of worker {worker_id}, got {bears!r}")
        return int(length) - (_INLINE_BYTES - _RECORD.size)

    def _whole(self, slot: bytes, rest: torch.Tensor | None, worker_id: int, key: bytes) -> bytes:
        digest, length, _ = _RECORD.unpack_from(slot)
        payload = slot[_RECORD.size :][:length] + (rest.numpy().tobytes() if rest is not None else b"")
        if xxhash.xxh3_64_intdigest(key + payload) != digest:
            raise CollectiveAborted(f"a record of worker {worker_id} came damaged", [worker_id])
        return payload

    def _links(self) -> GlooMesh | NcclLinks | _Nobody:
        links = self._mesh if self._nccl is None else self._nccl
        return links if links is not None and self._others() else _Nobody()

    def _collect(self, own: Mapping[Node, torch.Tensor], offers: Offers) -> list[NodePart]:
        """Everybody's nodes over the own range; sends the own ones to the other owners."""
        start, stop = self._range(self._me.worker_id)
        parts = [NodePart(node, own[node], row) for node, row in offers[self._me.worker_id]]
        sends: list[Transfer] = []
        recvs: list[Transfer] = []
        for w in self._others() if stop > start else ():
            for k, (node, row) in enumerate(offers[w]):
                part = self._flats.scratch(len(recvs), stop - start)
                recvs.append((part, w, _TAG_NODE + k))
                parts.append(NodePart(node, part, row, start))
        for w in self._others():
            lo, hi = self._range(w)
            if hi > lo:
                sends += [(own[node][lo:hi], w, _TAG_NODE + k) for k, node in enumerate(own)]
        self._links().transfer(sends, recvs)
        parts.sort(key=lambda part: part.node)
        return parts

    def _finish_own(self, step: int, parts: list[NodePart], out: torch.Tensor) -> None:
        done = self._done[step % 2]
        done.begin(step)
        for lo, hi in done.missing(*self._owned[self._me.worker_id]):
            self._fence.check()
            start, stop = lo * BLOCK_ELEMENTS, hi * BLOCK_ELEMENTS
            finish(self._layout, self._n_lanes, parts, start, stop, out[start:stop])
            done.mark(lo, hi)

    def _spread(self, step: int, result: torch.Tensor) -> None:
        """Everybody's results to everybody. Blocks that were here before from another generation get the same bits."""
        ranges = {w: self._range(w) for w in self._owned}
        recvs = [(result[lo:hi], w, _TAG_RESULT) for w, (lo, hi) in ranges.items() if hi > lo and w in self._others()]
        lo, hi = self._range(self._me.worker_id)
        sends = [(result[lo:hi], w, _TAG_RESULT) for w in self._others()] if hi > lo else []
        self._links().transfer(sends, recvs)
        self._done[step % 2].mark(0, self._layout.n_blocks)

    def _result(self, step: int) -> torch.Tensor:
        found = self._results[step % 2]
        if found is None:
            found = self._results[step % 2] = torch.empty(self._layout.numel, device=self._device)
        return found

    def _forget(self, step: int) -> None:
        """The reduction of `step` begins: results of step - 2 are free, and those of a future that was undone too."""
        if self._flats.begin_reduction(step):
            for done in self._done:
                done.begin(-1)


class _Nobody:
    """The links of a worker that is alone."""

    def transfer(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> None:
        check(not sends and not recvs, "transfers without peers")


class _Ticker:
    """Calls `tick` from a thread of its own while the caller is blocked inside torch, unless it should have left."""

    def __init__(self, tick: Tick, overdue: Callable[[], bool]) -> None:
        self._tick = tick
        self._overdue = overdue
        self._busy = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="everstep-ticker", daemon=True)
        self._thread.start()

    @contextmanager
    def ticking(self) -> Iterator[None]:
        self._tick()
        self._busy.set()
        try:
            yield
        finally:
            self._busy.clear()

    def close(self) -> None:
        self._closed = True
        self._busy.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._busy.wait()
            if self._closed:
                return
            if not self._overdue():
                self._tick()
            pause.wait(_TICK_S)


def _own_host(plan: Plan, me: WorkerKey) -> str:
    member = plan.member(me.worker_id)
    if len({m.host for m in plan.members}) == 1:
        return _LOOPBACK
    host, _, port = member.address.rpartition(":")
    if not host or not port:
        raise ConfigError(f"members on several hosts need an address to listen on; worker {me} has {member.address!r}")
    return host.strip("[]")
