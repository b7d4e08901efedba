"""The transport between hosts: one generation's connections after the other, which can be aborted.

Nodes go point to point: each member sends each block owner its part of every node, owners finish the tree, and send
their result to all who take it. Records have their own sockets (`peers`). Gradients go over further sockets, block by
block as they become final (`streaming`), or over NCCL, once an exchange has settled who sends which nodes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from everstep.base.doors import host_of
from everstep.base.errors import ConfigError, InvariantViolation, check
from everstep.base.extents import Runs, within
from everstep.base.plan import Plan, WorkerKey
from everstep.base.ports import Node, OnFinal, OnTick, Piece, Reduced, Tag
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout
from everstep.exact.reduce import NodePart, merge_presence
from everstep.parallel.fence import Fence
from everstep.parallel.mapping import record_key
from everstep.parallel.nccl_links import NcclLinks, Transfer
from everstep.parallel.peers import Meeting, PeerSockets
from everstep.parallel.reduction import (
    BlockFinisher,
    Flats,
    decode_offers,
    encode_offers,
    zero_absent,
)
from everstep.parallel.socket_mesh import SocketMesh
from everstep.parallel.streaming import BlockStream
from everstep.placement.shards import Division, Takers, finishers
from everstep.runtime.link.tls import Tls

_LOOPBACK = "127.0.0.1"
_TICK_S = 0.01
_TAG_RESULT, _TAG_NODE = 2, 16
_BACKLOG = 8

Offers = dict[int, list[tuple[Node, bytes]]]


class GroupTransport:
    """`everstep.base.ports.Transport` for members on any hosts.

    store: torch store that all members reach, best a `ControlStore`; keys bear the generation. key: the token of the
    role `peer`, which members prove to each other; tls: certificates for connections that need TLS. device: of
    gradients; they go over our own sockets from the CPU, and over NCCL from a CUDA device. flats: memory of the nodes,
    None: its own.
    """

    def __init__(
        self,
        me: WorkerKey,
        layout: GradientLayout,
        n_lanes: int,
        store: Store,
        tick: OnTick,
        device: torch.device | str = "cpu",
        *,
        key: bytes,
        tls: Tls | None = None,
        name: str = "",
        flats: Flats | None = None,
    ) -> None:
        self._me = me
        self._layout = layout
        self._n_lanes = n_lanes
        self._device = torch.device(device)
        self._groups = GroupLinks(me, store, tick, key, tls, f"/{name}" if name else "")
        self._stream: BlockStream | None = None
        self._ticker = _Ticker(tick, lambda: self._groups.fence.down)
        self._owned: dict[int, Runs] = {}
        self._division: tuple[int, Division] | None = None
        self._flats = flats or Flats(layout.numel, self._device)
        self._finisher = BlockFinisher(layout, n_lanes, self._groups.fence.check)

    @property
    def segment(self) -> str:
        """ "": peers have nothing to attach to."""
        return ""

    def open(self, plan: Plan, stream: BlockStream | None = None) -> None:
        """Meet the members of the plan in a new group. stream: takes the blocks that are pushed over our own sockets,
        in place of one for nodes of this worker alone; it begins and ends with the generation.

        Raises: CollectiveAborted if the generation ends before all are there, or a member cannot be reached.
        """
        check(plan.has(self._me), f"{self._me} is no member of generation {plan.generation}")
        self._groups.enter(plan)
        self.leave()
        self._flats.lose()
        self._finisher.enter()
        self._owned, self._division = finishers(plan, self._layout.n_blocks), None
        if self._device.type == "cpu":
            division = None if plan.divided_stages else Division.whole(self._owned, self._layout.n_blocks)
            own = self._me.worker_id, plan.worker_ids, division, self._layout, self._n_lanes
            memory = self._flats.scratch, self._flats.result
            self._stream = stream or BlockStream(*own, self._finisher, *memory, give_back=self._flats.give_back)
        self._groups.link(self._stream or self._device)
        with self._ticker.ticking():
            self._groups.fence.check()
            if len(plan.members) > 1:
                self._groups.connect()
                if self._stream is not None:
                    self._stream.begin(self.mesh)

    @property
    def mesh(self) -> SocketMesh:
        """Sockets for other point-to-point transfers among the members; not connected if there is only one member."""
        links = self._groups.links
        if not isinstance(links, SocketMesh):
            raise InvariantViolation("expected an open transport in host memory")
        return links

    def ticking(self) -> AbstractContextManager[None]:
        """Keep the progress counter going while the caller is blocked inside torch."""
        return self._ticker.ticking()

    def settled(self) -> None:
        self._groups.retire_old()

    def node(self, step: int, node: Node) -> torch.Tensor:
        """float32 [layout.numel] on the transport's device."""
        return self._flats.tensor(step, node)

    def divide(self, step: int, takes: Takers | None, *, frees: bool = False) -> None:
        """As `Transport.divide`; NCCL gives all to all, and nodes stay."""
        if self._stream is not None and (self._division is None or self._division[0] != step):
            n_blocks = self._layout.n_blocks
            among = Division.among(takes, n_blocks) if takes is not None else Division.whole(self._owned, n_blocks)
            self._division = step, among
            self._stream.divide(step, among, frees=frees)

    def given_back(self, step: int) -> frozenset[Node]:
        return self._flats.lost(step)

    def offering(self, step: int) -> OnFinal | None:
        """Receiver of final blocks, if they go over our own sockets and there are other members."""
        stream = self._stream
        if stream is None or len(self._owned) < 2:
            return None
        return lambda node, first, last: stream.offer(step, node, self._flats.held(step, node), first, last)

    def exchange(self, tag: Tag, payload: bytes) -> dict[int, bytes]:
        self._groups.fence.check()
        found = self._groups.gather(tag, payload)
        self._groups.retire_old()
        return found

    def reduce(self, step: int, presence: Mapping[Node, bytes]) -> Reduced:
        """Offer own nodes, finish the tree for the own blocks, send the result to all."""
        self._groups.fence.check()
        self._finisher.begin(step)
        self._flats.begin(step)
        with self._ticker.ticking():
            own = {node: self._flats.held(step, node) for node in presence}
            alone = Node(0, self._n_lanes)
            offers = self._streamed(step, own, presence)
            streamed = offers is not None
            offers = self._offers(step, presence) if offers is None else offers
            present = merge_presence(row for offered in offers.values() for _, row in offered)
            owned, takes = self._owned[self._me.worker_id], _all(self._layout)
            if streamed:
                result = self._flats.result(step)
                if self._division is not None and self._division[0] == step:
                    owned, takes = (
                        of[self._me.worker_id] for of in (self._division[1].finishes, self._division[1].takes)
                    )
                for run in takes:
                    self._finisher.received(step, run)
            elif len(offers) == 1 and list(own) == [alone]:
                result = own[alone]
                zero_absent(self._layout, result, present)
            else:
                result = self._flats.result(step)
                self._move(step, own, offers, result)
        return Reduced(step, pieces_of(result, takes), present, owned)

    def abort(self, generation: int) -> None:
        """Thread-safe; a pending transfer raises within a few milliseconds."""
        self._groups.abort(generation)

    def rest(self) -> None:
        """All members are known to have left the last generation, and there is none until the next `open`."""
        self._groups.part()
        self.leave()
        self._groups.retire_old()

    def leave(self) -> None:
        """Stop all writes for the generation, which has been cut, or all have left it."""
        if self._stream is not None:
            self._stream.leave()
            self._stream = None

    def close(self) -> None:
        """Leave the group and free everything but tensors that were handed out."""
        self.abort(1 << 62)
        self.rest()
        self._groups.close()
        self._ticker.close()

    # ---- inside

    def _offers(self, step: int, presence: Mapping[Node, bytes]) -> Offers:
        """Offers of all members, once all have begun to reduce."""
        records = self._groups.gather(Tag("reduce", step, 0), encode_offers(dict.fromkeys(presence, 0), presence))
        return {
            worker_id: [(node, row) for node, _, row in decode_offers(record, len(self._layout.entries))]
            for worker_id, record in records.items()
        }

    def _streamed(self, step: int, own: Mapping[Node, torch.Tensor], presence: Mapping[Node, bytes]) -> Offers | None:
        """The whole reduction, if blocks go over our own sockets; blocks that have left before are not sent again."""
        stream = self._stream
        if stream is None or len(self._owned) < 2:
            return None
        try:
            rows = stream.reduce(step, own, presence, lambda: self._offers(step, presence))
        except BaseException:
            self.mesh.cut()  # nothing may write to the receive buffers any more
            raise
        return {w: list(offered) for w, offered in rows.items()}

    def _move(self, step: int, own: Mapping[Node, torch.Tensor], offers: Offers, result: torch.Tensor) -> None:
        """Send nodes to their owners, finish the tree there, and send the results to all; one after the other, since a
        group of NCCL begins and ends as a whole. A single member has nothing to send."""
        others, mine = _others(self._owned, self._me.worker_id), self._owned[self._me.worker_id]
        parts, recvs = self._parts(own, offers)
        nodes = [(t, w, _TAG_NODE + k) for w in others for k, t in enumerate(own.values())]
        self._groups.transfer([cut for node in nodes for cut in _cut(node, 0, self._owned[node[1]])], recvs)
        for run in mine:
            self._finisher.finish(step, run, parts, result)
        results = [(result, w, _TAG_RESULT) for w in others]
        sends = [cut for one in results for cut in _cut(one, 0, mine)]
        self._groups.transfer(sends, [cut for one in results for cut in _cut(one, 0, self._owned[one[1]])])
        self._finisher.received(step)

    def _parts(self, own: Mapping[Node, torch.Tensor], offers: Offers) -> tuple[list[NodePart], list[Transfer]]:
        """All members' nodes over the own range, and the transfers that must come before they can be used."""
        me = self._me.worker_id
        mine = self._owned[me]
        start, stop = (block * BLOCK_ELEMENTS for block in within(mine))
        parts = [NodePart(node, own[node], row) for node, row in offers[me]]
        recvs: list[Transfer] = []
        for w in _others(self._owned, me) if stop > start else ():
            for k, (node, row) in enumerate(offers[w]):
                part = self._flats.scratch(len(parts), stop - start)
                recvs += _cut((part, w, _TAG_NODE + k), start, mine)
                parts.append(NodePart(node, part, row, start))
        parts.sort(key=lambda part: part.node)
        return parts, recvs


class GroupLinks:
    """The connections of one generation after the other, for records and for gradients, and how the older ones go.

    fence: which generation it is, and whether it has been aborted. links: for gradients, None while there are none.
    """

    def __init__(self, me: WorkerKey, store: Store, tick: OnTick, key: bytes, tls: Tls | None, name: str) -> None:
        self._me = me
        self._store = store
        self._tick = tick
        self._key = key
        self._tls = tls
        self._name = name
        self.fence = Fence()
        self.links: SocketMesh | NcclLinks | None = None
        self._records: PeerSockets | None = None
        self._meeting: Meeting | None = None
        self._lock = threading.Lock()
        self._old: list[PeerSockets | SocketMesh | NcclLinks] = []
        self._reaper = Reaper()

    def enter(self, plan: Plan) -> None:
        """From now on this plan's generation is spoken of; nobody is connected yet."""
        self.retire_old()
        with self._lock:
            self.fence.enter(plan.generation)
            self._part()
            store = PrefixStore(f"generation{plan.generation}{self._name}", self._store)
            ids, host = plan.worker_ids, _own_host(plan, self._me)
            self._meeting = Meeting(ids, self._me.worker_id, store, host, self.fence, self._key, self._tls)
            self._records = PeerSockets(self._meeting, self._tick)

    def link(self, way: BlockStream | torch.device) -> None:
        """Gradients go over our own sockets, and this takes what comes; or over NCCL, from this device."""
        with self._lock:
            meeting = cast(Meeting, self._meeting)
            if isinstance(way, torch.device):
                self.links = NcclLinks(meeting, way)
            else:
                self.links = SocketMesh(meeting, self._tick, way)

    def connect(self) -> None:
        """Meet the others. Raises: CollectiveAborted."""
        for group in (self._records, self.links):
            if group is not None:
                group.connect()

    def gather(self, tag: Tag, payload: bytes) -> dict[int, bytes]:
        """Records of all. A member that wrote one has received everything that was sent to it before."""
        if self._records is None:
            raise InvariantViolation("an exchange before the transport was opened")
        return self._records.gather(record_key(self.fence.generation, tag), payload)

    def transfer(self, sends: list[Transfer], recvs: list[Transfer]) -> None:
        """Over NCCL, if gradients go that way."""
        if isinstance(self.links, NcclLinks):
            self.links.transfer(sends, recvs)

    def abort(self, generation: int) -> None:
        """Thread-safe; a pending transfer raises within a few milliseconds."""
        with self._lock:
            self.fence.abort(generation)
            if self.fence.down and self.links is not None:
                self.links.cut()

    def part(self) -> None:
        """This generation is over, and there is no next one yet."""
        with self._lock:
            self._part()

    def _part(self) -> None:
        self._old += [group for group in (self.links, self._records) if group is not None]
        self.links = self._records = None

    def retire_old(self) -> None:
        """Take down old connections. All members are known to have left the generation before, or it has been cut."""
        while self._old:
            self._reaper.take(self._old.pop().retire)

    def close(self) -> None:
        self.retire_old()
        self._reaper.close()


class _Ticker:
    """Calls `tick` from its own thread while the caller is blocked inside torch, unless the caller should have left."""

    def __init__(self, tick: OnTick, overdue: Callable[[], bool]) -> None:
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


def _others(owned: Iterable[int], me: int) -> list[int]:
    """Other members, beginning with the next one, so that not all begin with the same one."""
    ids = list(owned)
    at = ids.index(me)
    return ids[at + 1 :] + ids[:at]


def _all(layout: GradientLayout) -> Runs:
    return ((0, layout.n_blocks),) if layout.n_blocks else ()


def pieces_of(result: torch.Tensor, takes: Runs) -> tuple[Piece, ...]:
    """These blocks of a flat result."""
    ends = ((lo * BLOCK_ELEMENTS, hi * BLOCK_ELEMENTS) for lo, hi in takes)
    return tuple(Piece(start, stop, result[start:stop]) for start, stop in ends)


def _cut(transfer: Transfer, origin: int, runs: Runs) -> list[Transfer]:
    """Parts of a transfer that lie in these blocks; `origin`: the element at which its tensor begins."""
    tensor, worker_id, tag = transfer
    elements = [[block * BLOCK_ELEMENTS - origin for block in run] for run in runs]
    return [(tensor[first:last], worker_id, tag) for first, last in elements]


def _own_host(plan: Plan, me: WorkerKey) -> str:
    address = plan.member(me.worker_id).address
    if host := host_of(address):
        return host
    if len({m.host for m in plan.members}) == 1:
        return _LOOPBACK
    raise ConfigError(f"members on several hosts need an address to listen on; worker {me} has {address!r}")


class Reaper:
    """Takes down unneeded objects off the critical path: one thread, one object after the other. If more than a few
    wait, `take` blocks, so nothing piles up."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_BACKLOG)
        self._thread = threading.Thread(target=self._run, name="everstep-reaper", daemon=True)
        self._thread.start()

    def take(self, retire: Callable[[], None]) -> None:
        """Call `retire` later. The caller must hold no other reference to the object that it frees."""
        self._queue.put(retire)

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish the rest, for `timeout_s` at most."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (retire := self._queue.get()) is not None:
            with contextlib.suppress(RuntimeError):  # a group that was cut complains when it is shut down
                retire()
            del retire
