"""The transport between workers of one host: each offers its sums in its own shared memory, and reads its peers'.

No gradient is copied from one worker to another. A worker's nodes lie in its segment from the start; the owner of a
block range reads them there, finishes the tree into its own result area, and all members read the result there.

Why nothing is overwritten too early, without a lock:
- Nodes of a step: a member that begins the next step has left `reduce`, so all results are finished and nobody reads
  the nodes.
- Writing the result of step s begins when the nodes of all members have arrived for s, so all of them have begun it,
  and promised not to use an earlier result any more: one result area is enough.
- A step is reduced again in another generation only if no member of it took the decision, so nobody reads the earlier
  result. Its blocks are written again: they may contain lanes of a member that has left because it computes otherwise.
- If others are on other hosts (`tiers`), blocks are read and finished before the reduction begins, so two result areas
  alternate: a member that computes step s in a settled generation has all records of step s - 1, so nobody uses the
  result of s - 2 any more.
- Where nodes are given back (`divide`), blocks are finished before that, too, but by members of one host alone, each of
  which has said that it has begun the step (`early`); one result area is enough.
- Exchange slots alternate: a member that writes its k-th record has read all (k-1)-th ones, so nobody waits for the
  (k-2)-th. A peer may thus be one exchange ahead, also beyond a prepared change of generation; both slots are read.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch

from everstep.base.errors import CollectiveAborted, check
from everstep.base.extents import Runs, common
from everstep.base.plan import Plan, WorkerKey
from everstep.base.ports import Node, OnFinal, OnTick, Piece, Reduced, Tag
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout
from everstep.exact.reduce import NodePart
from everstep.exact.reduce import presence as union
from everstep.parallel.early import EarlyReduction
from everstep.parallel.fence import Fence
from everstep.parallel.mapping import (
    DONE,
    EXCHANGE,
    FINAL,
    NODES,
    RESULT,
    Attached,
    Geometry,
    OwnSegment,
    PeerSegment,
    load_fence,
    record_key,
)
from everstep.parallel.reduction import BlockFinisher, decode_offers, encode_offers, zero_absent
from everstep.placement.shards import Division, Takers, finishers

_WAIT_S = 0.005
_LIFE_CHECK_S = 0.05
_TOTAL = struct.Struct("<Q")
_STEP = struct.Struct("<q")

Ready = Callable[[int, PeerSegment], bool]


class SharedMemoryTransport:
    """`everstep.base.ports.Transport` for members of one host.

    record_bytes: capacity of one exchange record; larger payloads go in several rounds. finisher: of the own result
    areas. folder: gradients lie in a file there.
    """

    def __init__(
        self,
        me: WorkerKey,
        layout: GradientLayout,
        n_lanes: int,
        tick: OnTick,
        *,
        record_bytes: int = 1 << 20,
        folder: Path | None = None,
    ) -> None:
        check(record_bytes > _TOTAL.size, f"record_bytes must hold a header, got {record_bytes}")
        self._me = me
        self._layout = layout
        self._n_lanes = n_lanes
        self._tick = tick
        self._geometry = Geometry(layout.numel, len(layout.entries), n_lanes, record_bytes)
        self._own = OwnSegment(me, self._geometry, folder if layout.numel else None)
        self._peers: dict[int, PeerSegment] = {}
        self._attached = Attached(me, lambda m: PeerSegment(m.segment, m.key, self._geometry))
        self._fence = Fence()
        self._owned: dict[int, Runs] = {}
        self._division: tuple[int, Division] | None = None
        self._frees = False
        self._early: EarlyReduction | None = None
        self._exchanges = 0
        self._final: tuple[bytes, int, dict[Node, bytearray]] = (b"", 0, {})
        self._slots = NodeSlots(self._own)
        self.finisher = BlockFinisher(layout, n_lanes, self.look)

    @property
    def segment(self) -> str:
        return self._own.name

    @property
    def slots(self) -> NodeSlots:
        """Slots of the nodes, for code that reduces them in another way."""
        return self._slots

    def open(self, plan: Plan) -> None:
        """Attach to the members of the plan that are not attached yet.

        Raises: CollectiveAborted if members are dead; MembershipError if a segment is not that of a member.
        """
        check(plan.has(self._me), f"{self._me} is no member of generation {plan.generation}")
        self._fence.enter(plan.generation)
        self._peers = {}
        self._peers = self._attached.meet(plan, self._fence)
        self._owned, self._division = finishers(plan, self._layout.n_blocks), None
        self._frees, self._early = False, None
        self.finisher.enter()
        self._slots.lose()

    def node(self, step: int, node: Node) -> torch.Tensor:
        """Node in the own segment, float32 [layout.numel]."""
        return self._slots.tensor(step, node)

    def divide(self, step: int, takes: Takers | None, *, frees: bool = False) -> None:
        self._frees = frees
        if takes is not None and (self._division is None or self._division[0] != step):
            self._division = step, Division.among(takes, self._layout.n_blocks)

    def offering(self, step: int) -> OnFinal | None:
        """None, since peers read nodes in place, unless nodes are to be given back."""
        found = self._begin_early(step)
        return None if found is None else found.take

    def given_back(self, step: int) -> frozenset[Node]:
        return self._slots.lost(step)

    def exchange(self, tag: Tag, payload: bytes) -> dict[int, bytes]:
        room = self._geometry.record_bytes - _TOTAL.size
        parts: dict[int, list[bytes]] = {}
        part = 0
        rounds = 1
        while part < rounds:
            chunk = payload[part * room : (part + 1) * room]
            round_tag = tag if part == 0 else Tag(f"{tag.kind}+{part}", tag.step, tag.seq)
            for worker_id, record in self._round(round_tag, _TOTAL.pack(len(payload)) + chunk).items():
                (total,) = _TOTAL.unpack_from(record)
                rounds = max(rounds, -(-total // room))
                parts.setdefault(worker_id, []).append(record[_TOTAL.size :])
            part += 1
        return {worker_id: b"".join(parts[worker_id]) for worker_id in sorted(parts)}

    def reduce(self, step: int, presence: Mapping[Node, bytes]) -> Reduced:
        """Offer own nodes, finish the tree for the own blocks, and return views of all members' results."""
        self._fence.check()
        self.finisher.begin(step)
        key = record_key(self._fence.generation, Tag("reduce", step, 0))
        slots = {node: self._slots.index(step, node) for node in presence}
        alone = Node(0, self._n_lanes)
        if not self._peers and list(presence) == [alone]:
            return self._keep_root(step, alone, presence[alone])
        self._own.write(NODES, key, encode_offers(slots, presence))
        early = self._begin_early(step)
        check(early is None or not early.is_over, f"step {step} is reduced again, and its nodes were given back")
        if early is not None:
            early.tell_rest()
        parts = [NodePart(node, self.node(step, node), presence[node]) for node in presence]
        parts += self._await_nodes(key)
        parts.sort(key=lambda part: part.node)
        division = self._division_of(step)
        owned = division.finishes[self._me.worker_id]
        result = self.result_for(step, owned)
        for run in owned:
            self.finisher.finish(step, run, parts, result)
        reduced = Reduced(step, self._pieces(self.finish_together(step), division), union(parts), owned)
        if early is not None:
            early.end()
        return reduced

    # ---- parts of the reduction, for code that reduces beyond this host

    @property
    def generation(self) -> int:
        """The generation that was opened last."""
        return self._fence.generation

    @property
    def own(self) -> OwnSegment:
        return self._own

    def segment_of(self, worker_id: int) -> OwnSegment | PeerSegment:
        return self._own if worker_id == self._me.worker_id else self._peers[worker_id]

    def tell_final(self, whom: int, generation: int, step: int, node: Node, runs: Sequence[tuple[int, int]]) -> None:
        """As `say_final`, and wake a member of this host that sleeps on its own bell."""
        self.say_final(generation, step, node, runs)
        if whom in self._peers:
            self._peers[whom].poke()

    def say_final(self, generation: int, step: int, node: Node | None, runs: Sequence[tuple[int, int]]) -> None:
        """Let members of this host know that these blocks of an own node are final and readable, as runs [first, last);
        no entry in them is absent. None: that the step has begun here. Nothing happens once the generation has
        ended."""
        if self._fence.down or self._fence.generation != generation:
            return
        key = _final_key(generation)
        if self._final[:2] != (key, step):
            self._final = (key, step, {})
        final = self._final[2]
        if node is not None:
            flags = final.setdefault(node, bytearray(self._geometry.blocks))
            for first, last in runs:
                flags[first:last] = b"\x01" * (last - first)
        slots = {known: self._slots.index(step, known) for known in final}
        load_fence()  # the blocks before the record
        self._own.write(FINAL, key, _STEP.pack(step) + encode_offers(slots, final))

    def final_blocks(self, worker_id: int) -> tuple[int, list[tuple[Node, int, bytes]]] | None:
        """Final blocks that a member of this host has reported in this generation, None if they cannot be read now: the
        step, and for each of its nodes the slot and a byte for each block, 1 if it is final. A member that reports more
        pokes (`Mapping.poke`) the others.

        Raises: InvariantViolation if the record makes no sense.
        """
        record = self.segment_of(worker_id).read(FINAL, _final_key(self._fence.generation))
        if record is None:
            return None
        load_fence()
        check(len(record) >= _STEP.size, f"a record of final blocks begins with its step, got {len(record)} bytes")
        return _STEP.unpack_from(record)[0], decode_offers(record[_STEP.size :], self._geometry.blocks)

    def tell_done(self, step: int, flags: bytes) -> None:
        """Tell all members of this host which blocks of the result are complete here: a byte for each, 1 if it is."""
        self._own.write(DONE, record_key(self._fence.generation, Tag("done", step, 0)), flags)

    def done_blocks(self, worker_id: int, step: int) -> bytes | None:
        """Blocks that a member has reported with `tell_done` in this generation, None if none."""
        key = record_key(self._fence.generation, Tag("done", step, 0))
        record = self.segment_of(worker_id).read(DONE, key)
        check(record is None or len(record) == self._geometry.blocks, "expected a byte for each block of a result")
        return record

    def result_for(self, step: int, blocks: Runs) -> torch.Tensor:
        """`own_result`, for these blocks of it; no worker uses an earlier result any more."""
        self._slots.keep_of_result(step, blocks)
        return self.own_result(step)

    def give_back(self, step: int, first: int, last: int) -> None:
        """Give back the memory of the blocks [first, last) of all own nodes of the step."""
        self._slots.give_back(step, first, last)

    def held(self, worker_id: int, slot: int) -> torch.Tensor:
        """Node in that slot of a member of this host, float32 [layout.numel]."""
        return self.segment_of(worker_id).slot(slot)

    def own_result(self, step: int, *, early: bool = False) -> torch.Tensor:
        """This worker's part of the step's result, at its place, float32 [layout.numel]. early: it is written while
        members of this host may still use the result of the step before."""
        return self._own.result(self._slots.area(step, early))

    def finish_together(self, step: int) -> dict[int, torch.Tensor]:
        """Report that this worker's part of the step's result is complete, and wait for all parts of this host: each
        member's, at its place, float32 [layout.numel].

        Raises: CollectiveAborted.
        """
        record, key = RESULT[step % 2], record_key(self._fence.generation, Tag("reduce", step, 0))
        self._own.write(record, key, bytes([self._slots.area(step)]))
        found = {self._me.worker_id: self.own_result(step)}

        def ready(worker_id: int, peer: PeerSegment) -> bool:
            area = peer.read(record, key)
            if area is not None:
                found[worker_id] = peer.result(area[0])
            return area is not None

        self._await(ready, f"results of step {step}")
        return found

    def look(self) -> None:
        """Tick; call it every few milliseconds of work. Raises: CollectiveAborted."""
        self._fence.check()
        self._tick()

    def settled(self) -> None:
        """Nothing to do: peers read in place, so nothing is on its way."""

    def rest(self) -> None:
        self._attached.close()
        self._peers = {}

    def abort(self, generation: int) -> None:
        """Thread-safe; a waiting caller sees it within 5 ms."""
        self._fence.abort(generation)

    def close(self) -> None:
        """Detach. Tensors that were handed out stay valid while they are referred to."""
        self._fence.abort(1 << 62)
        self._attached.close()
        self._peers = {}
        self._own.close()

    # ---- inside

    def _round(self, tag: Tag, payload: bytes) -> dict[int, bytes]:
        self._fence.check()
        key = record_key(self._fence.generation, tag)
        self._own.write(EXCHANGE[self._exchanges % 2], key, payload)
        self._exchanges += 1
        found = {self._me.worker_id: payload}

        def ready(worker_id: int, peer: PeerSegment) -> bool:
            for slot in EXCHANGE:
                record = peer.read(slot, key)
                if record is not None:
                    found[worker_id] = record
                    return True
            return False

        self._await(ready, f"records of {tag.kind} {tag.step}.{tag.seq}")
        return found

    def _division_of(self, step: int) -> Division:
        found = self._division
        if found is not None and found[0] == step:
            return found[1]
        return Division.whole(self._owned, self._layout.n_blocks)

    def _begin_early(self, step: int) -> EarlyReduction | None:
        """The part of the step's reduction that is done before it begins; None if nothing is."""
        if not self._frees or not self._peers:
            return None
        if self._early is None or self._early.step != step:
            ids, shape = sorted([self._me.worker_id, *self._peers]), (self._n_lanes, len(self._layout.entries))
            division, blocks = self._division_of(step), self._layout.n_blocks
            self._early = EarlyReduction(self, self._me.worker_id, ids, *shape, blocks, division, step)
        return self._early

    def _await_nodes(self, key: bytes) -> list[NodePart]:
        parts: list[NodePart] = []

        def ready(_: int, peer: PeerSegment) -> bool:
            record = peer.read(NODES, key)
            if record is None:
                return False
            for node, slot, present in decode_offers(record, self._geometry.entries):
                parts.append(NodePart(node, peer.slot(slot), present))
            return True

        self._await(ready, "nodes")
        return parts

    def _pieces(self, results: Mapping[int, torch.Tensor], division: Division) -> tuple[Piece, ...]:
        pieces, takes = [], division.takes[self._me.worker_id]
        taken = ((run, w) for w, runs in division.finishes.items() for run in common(runs, takes))
        for (first, last), worker_id in sorted(taken):
            start, stop = first * BLOCK_ELEMENTS, last * BLOCK_ELEMENTS
            pieces.append(Piece(start, stop, results[worker_id][start:stop]))
        return tuple(pieces)

    def _keep_root(self, step: int, root: Node, present: bytes) -> Reduced:
        """Result of a worker that has added up everything alone: its node, with zeros for entries that no lane had."""
        flat = self.node(step, root)
        zero_absent(self._layout, flat, present)
        return Reduced(step, (Piece(0, self._layout.numel, flat),), present, self._owned[self._me.worker_id])

    def _await(self, ready: Ready, what: str) -> None:
        """Wait until `ready` has said yes once for every peer.

        Raises: CollectiveAborted after `abort`, or if a peer died without having become ready.
        """
        waiting = dict(self._peers)
        life_checked = time.monotonic()
        while True:
            if self._early is not None:
                self._early.look()
            bells = {worker_id: peer.bell for worker_id, peer in waiting.items()}
            for worker_id in bells:
                if ready(worker_id, waiting[worker_id]):
                    del waiting[worker_id]
            self.look()
            if not waiting:
                return
            worker_id, peer = next(iter(waiting.items()))
            peer.await_bell(bells[worker_id], _WAIT_S)
            if time.monotonic() - life_checked > _LIFE_CHECK_S:
                life_checked = time.monotonic()
                dead = [w for w, p in waiting.items() if not p.alive() and not ready(w, p)]
                if dead:
                    raise CollectiveAborted(f"workers {dead} died while their {what} were waited for", dead)


def _final_key(generation: int) -> bytes:
    return record_key(generation, Tag("final", 0, 0))


class NodeSlots:
    """Which slots of the own segment hold the nodes of the current step, and which area holds its result."""

    _IDLE_STEPS = 4

    def __init__(self, own: OwnSegment) -> None:
        self._own = own
        self._step = 0
        self._used: dict[Node, int] = {}
        self._area = (0, 0)
        """The last step whose result had an area, and which."""
        self._given: set[Node] = set()
        self._lost: set[Node] = set()
        """Nodes of which blocks were given back, in this generation and in older ones."""
        self._giving = threading.Lock()
        self._touched: dict[int, int] = {}
        self._results: dict[int, Runs] = {}
        """By area: blocks whose memory may be in use."""

    def tensor(self, step: int, node: Node) -> torch.Tensor:
        """Tensor of a node, as `Transport.node`."""
        if step != self._step:
            with self._giving:
                self._step = step
                self._used.clear()
                self._given, self._lost = set(), set()
            self._forget_idle()
        if node not in self._used:
            taken = set(self._used.values())
            slot = next(s for s in range(self._own.geometry.slots) if s not in taken)
            with self._giving:
                self._used[node] = slot
        self._touched[self._used[node]] = step
        return self._own.slot(self._used[node])

    def index(self, step: int, node: Node) -> int:
        """Slot of a node that was asked for before."""
        check(step == self._step and node in self._used, f"node {node} of step {step} was never asked for")
        return self._used[node]

    def give_back(self, step: int, first: int, last: int, nodes: Collection[Node] | None = None) -> None:
        """Give back the memory of the blocks [first, last) of these nodes of the step, None: of all. Any thread may
        call it; nothing happens once another step has begun."""
        with self._giving:
            for node, slot in self._used.items() if step == self._step else ():
                if nodes is None or node in nodes:
                    self._given.add(node)
                    self._own.forget_node(slot, first, last)

    def lose(self) -> None:
        self._given, self._lost = set(), self._lost | self._given

    def lost(self, step: int) -> frozenset[Node]:
        """Those nodes of the step, once: the caller fills them again."""
        found, self._lost = self._lost, set()
        return frozenset(found if step == self._step else ())

    def begun(self, step: int) -> bool:
        """Whether a node of the step was asked for, and none of another one since."""
        return step == self._step

    def area(self, step: int, early: bool = False) -> int:
        """Result area of a step. A later step takes the same one; the other one if it is written early, while that of
        the step before may be in use."""
        last, area = self._area
        if step != last:
            self._area = step, area ^ early
        return self._area[1]

    def keep_of_result(self, step: int, blocks: Runs) -> None:
        """Give the memory of earlier results back, except for these blocks; blocks of this step stay. Call it when no
        worker uses an earlier result any more."""
        fresh, area = step != self._area[0], self.area(step)
        if fresh and blocks != self._results.get(area):
            ends = [0, *(end for run in blocks for end in run), self._own.geometry.blocks]
            for first, last in zip(ends[::2], ends[1::2], strict=True):
                self._own.forget_result(area, first, last)
            self._results[area] = blocks

    def _forget_idle(self) -> None:
        idle = [s for s, step in self._touched.items() if step + self._IDLE_STEPS < self._step]
        for slot in idle:
            del self._touched[slot]
            self._own.forget_slot(slot)
