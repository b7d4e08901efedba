"""A reduction over several hosts: inside each of them in shared memory, between them over sockets, by the one tree.

A byte crosses between two hosts once where the tree allows that. The courier of a host folds the sums of its members as
far as they complete a subtree, sends them to the couriers that finish them, and has the whole result in its own result
area, where the others read it (`placement.tiers`).

Nothing waits for the last lane: members report in shared memory which blocks of their nodes are final, and the courier
folds and sends a block when those of all lanes of the subtree are. The plan alone decides which subtrees a host sends,
whichever nodes its members make of their lanes. Blocks with absent entries wait for the records of the reduction.

Why nothing is overwritten too early: a member that has left the reduction of a step has the result of all blocks, from
all couriers, and so have all members of its host. So everything that its host sent has been received and added up, and
nodes and scratch memory are free. The rules of `shared_memory` for result areas hold here, too. A block that leaves in
a generation that ends counts for nothing: the generation's thread ends before the next one is met, and blocks that it
had begun to finish are not marked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from everstep.base.errors import ProtocolError, check
from everstep.base.extents import Runs, within
from everstep.base.plan import Plan
from everstep.base.ports import Node, OnFinal, Reduced, Tag
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout
from everstep.exact.reduce import finish, merge_presence
from everstep.parallel.early import runs_in
from everstep.parallel.group import GroupTransport, pieces_of
from everstep.parallel.reduction import Flats, decode_offers, encode_offers
from everstep.parallel.shared_memory import SharedMemoryTransport
from everstep.parallel.socket_mesh import BlockNote, SocketMesh
from everstep.parallel.streaming import BlockStream, BlockSums, Reach, Work
from everstep.placement.shards import Division, Takers, finishers
from everstep.placement.tiers import Tiers, folded
from everstep.placement.tree import cover

TOLD_BLOCKS = 16
"""Blocks (4 MiB) that are reported together, if a node has more; the rest of one is reported by the reduction."""
_LOOK_S = 0.01

_Offered = tuple[Node, int, bytes]
"""A node, the slot in which its member holds it, and its presence bytes."""


class _Charge(NamedTuple):
    """One of this host's sums of the blocks that another host's courier finishes."""

    courier: int
    sums: BlockSums


class FinalBlocks:
    """Reports final blocks to the courier of this host, several at a time: each report wakes a thread of it."""

    def __init__(self, near: SharedMemoryTransport, courier: int, step: int, n_blocks: int) -> None:
        self._near = near
        self._courier = courier
        self._generation = near.generation
        self._step = step
        self._n_blocks = n_blocks
        self._waiting: dict[Node, list[tuple[int, int]]] = {}
        self._told: Counter[Node] = Counter()

    def take(self, node: Node, first: int, last: int) -> None:
        """Receiver of final blocks, an `OnFinal`."""
        runs = self._waiting.setdefault(node, [])
        runs.append((first, last))
        waiting = sum(stop - start for start, stop in runs)
        if waiting >= TOLD_BLOCKS or self._told[node] + waiting == self._n_blocks:
            self._near.tell_final(self._courier, self._generation, self._step, node, runs)
            self._told[node] += waiting
            runs.clear()


class TierStream(BlockStream):
    """The reductions of one generation, of the nodes of all members of this host; members other than the courier do
    nothing in it. lanes: by worker, of all members. divided: each step has a division of its own. `offer` is not used
    here: members report final blocks in shared memory."""

    def __init__(
        self,
        me: int,
        layout: GradientLayout,
        n_lanes: int,
        near: SharedMemoryTransport,
        flats: Flats,
        tiers: Tiers,
        lanes: Mapping[int, Sequence[int]],
        divided: bool,
    ) -> None:
        def tops(there: Sequence[int]) -> tuple[Node, ...]:
            return cover((lane for w in there for lane in lanes[w]), n_lanes)

        self._inside = tiers.inside(me)
        self._carries = self._inside[0] == me
        self._outside = tiers.outside(me) if self._carries else []
        couriers = [there[0] for there in self._outside]
        ids = sorted(w for there in tiers.hosts for w in there)
        may_come = frozenset((there[0], top) for there in self._outside for top in tops(there))
        division = None if divided else Division.whole(tiers.shares(layout.n_blocks), layout.n_blocks)
        super().__init__(
            *(me, ids, division, layout, n_lanes, near.finisher, flats.scratch),
            lambda step: near.own_result(step, early=True),
            Reach(couriers, couriers, may_come),
        )
        self._near = near
        self._sent = [(courier, top) for top in tops(self._inside) for courier in couriers]
        self._charges: dict[int, list[_Charge]] = {}
        self._rooms: dict[tuple[int, int], torch.Tensor] = {}
        self._bells: dict[int, int] = {}

    def begin(self, mesh: SocketMesh) -> None:
        """Begin over these connections, which are up."""
        if self._carries:
            super().begin(mesh)

    def reduce_offered(self, step: int, offers: Mapping[int, Sequence[_Offered]]) -> None:
        """Reduce the nodes that all members have offered, by worker. Returns when the courier has the result.

        Raises: CollectiveAborted.
        """
        if not self._carries:
            self._finisher.begin(step)
            return
        told = {node: (w, row) for w in self._inside for node, _, row in offers[w]}
        for there in self._outside:
            rows = {node: row for w in there for node, _, row in offers[w]}
            for top, nodes in folded(rows, self._n_lanes).items():
                told[top] = there[0], merge_presence(rows[node] for node in nodes)
        with self._lock:
            for w in self._inside:
                for node, slot, _ in offers[w]:
                    self._take_in(step, w, node, slot, [(0, self._layout.n_blocks)], whole=False)
        mine = self._division(step).takes[self._me]
        self._conclude(step, told)
        for run in mine:
            self._finisher.received(step, run)

    # ---- inside, with the lock held

    def _take_in(
        self, step: int, w: int, node: Node, slot: int, final: Iterable[tuple[int, int]], *, whole: bool
    ) -> None:
        """Note final blocks of a node of this host; blocks that are known to be final do not count again."""
        if self._over or step <= self._reduced or not self._divided(step):
            return
        blocks = self._step(step)
        if step not in self._charges:
            finishes = self._division(step).finishes
            self._charges[step] = [_Charge(courier, BlockSums(top, finishes[courier])) for courier, top in self._sent]
        mine = [(k, c.sums) for k, c in enumerate(self._charges[step], 1) if c.sums.into.lo <= node.lo < c.sums.into.hi]
        if node not in blocks.parts:
            for found in (blocks, *(sums for _, sums in mine)):
                found.add(w, node, self._near.held(w, slot), 0)
        if blocks.parts[node][0] != w:
            raise ProtocolError(f"worker {w} tells of blocks of a sum that worker {blocks.parts[node][0]} has")
        for run in (run for first, last in final for run in blocks.leave(node, first, last)):
            for k, sums in mine:
                self._finishable(step, sums.come(node, *run, whole), k)
            self._finishable(step, blocks.come(node, *run, whole))

    def _sums_of(self, step: int, what: int) -> BlockSums:
        return self._charges[step][what - 1].sums if what else super()._sums_of(step, what)

    def _tell(self, step: int) -> None:
        for k, charge in enumerate(self._charges.get(step, ()), 1):
            self._finishable(step, charge.sums.tell(), k)
        super()._tell(step)

    def _forget(self, step: int) -> None:
        super()._forget(step)
        self._charges.pop(step, None)
        self._rooms = {key: room for key, room in self._rooms.items() if key[0] != step}

    def _wake(self) -> None:
        self._near.own.ring()

    def divide(self, step: int, division: Division, *, frees: bool = False) -> None:
        super().divide(step, division, frees=frees)
        with self._lock:
            self._bells.clear()  # reports of the step may have been passed over
            self._wake()

    # ---- the thread that adds up

    def _next(self) -> Work | None:
        own = self._near.own
        while True:
            seen = own.bell
            self._look_around()
            with self._lock:
                if self._over:
                    return None
                if self._ready:
                    return self._take()
            own.await_bell(seen, _LOOK_S)

    def _look_around(self) -> None:
        """Take in new reports of members of this host."""
        for w in self._inside:
            bell = self._near.segment_of(w).bell
            found = self._near.final_blocks(w) if self._bells.get(w) != bell else None
            self._bells[w] = bell
            if found is not None:
                step, nodes = found
                with self._lock:
                    for node, slot, flags in nodes:
                        self._take_in(step, w, node, slot, runs_in(flags), whole=True)

    def _perform(self, work: Work) -> None:
        """Fold sums of others' blocks and send them. A subtree has the shape of the tree over its lanes."""
        if not work.what:
            super()._perform(work)
            return
        courier, sums = self._charges[work.step][work.what - 1]
        lo, hi = sums.into
        shifted = [part._replace(node=Node(part.node.lo - lo, part.node.hi - lo)) for part in work.parts]
        flat, origin = work.parts[0].tensor, 0
        if len(shifted) > 1:
            with self._lock:
                first, last = within(self._division(work.step).finishes[courier])
            flat, origin = self._folded_into(work.step, work.what, last - first), first * BLOCK_ELEMENTS
        for begin, end in self._cut.pieces(work.first, work.last):
            self._near.look()
            start, stop = begin * BLOCK_ELEMENTS, end * BLOCK_ELEMENTS
            if len(shifted) > 1:
                finish(self._layout, hi - lo, shifted, start, stop, flat[start - origin : stop - origin])
            self._push(courier, BlockNote(work.step, lo, hi, begin, work.whole), flat, end, origin)

    def _folded_into(self, step: int, what: int, blocks: int) -> torch.Tensor:
        with self._lock:
            if (step, what) not in self._rooms:
                self._rooms[step, what] = self._room(step, blocks)
            return self._rooms[step, what]


class TieredTransport:
    """`Transport` that reduces the nodes in `near`'s memory over the members of a generation on any hosts.

    near: opened before for the members of this host. far: moves bytes and records between hosts; it belongs to this
    one.
    """

    def __init__(
        self, me: int, layout: GradientLayout, n_lanes: int, near: SharedMemoryTransport, far: GroupTransport
    ) -> None:
        self._me = me
        self._layout = layout
        self._n_lanes = n_lanes
        self._near = near
        self._far = far
        self._scratch = Flats(0, torch.device("cpu"))
        self._courier = me
        self._stream: TierStream | None = None
        self._owned: dict[int, Runs] = {}
        self._tiers = Tiers(())
        self._division: tuple[int, Division] | None = None

    def open(self, plan: Plan, machines: Mapping[int, str]) -> None:
        """Meet the members of the plan. machines: machine of each of them, by worker id. Raises: CollectiveAborted."""
        self._tiers = tiers = Tiers.of(machines)
        self._courier = tiers.inside(self._me)[0]
        self._owned, self._division = finishers(plan, self._layout.n_blocks), None
        lanes: dict[int, Sequence[int]] = dict.fromkeys(plan.worker_ids, ())
        lanes.update((seat.worker_id, seat.lanes) for seat in plan.seats)
        memory = self._near, self._scratch
        self._stream = TierStream(
            self._me, self._layout, self._n_lanes, *memory, tiers, lanes, bool(plan.divided_stages)
        )
        self._far.open(replace(plan, shards=()), self._stream)  # `far` has no gradient of its own

    def leave(self) -> None:
        self._far.leave()

    def exchange(self, tag: Tag, payload: bytes) -> dict[int, bytes]:
        """All-gather of small records. Raises: CollectiveAborted."""
        return self._far.exchange(tag, payload)

    def settled(self) -> None:
        self._far.settled()

    def rest(self) -> None:
        self._far.rest()

    def abort(self, generation: int) -> None:
        """Thread-safe; a caller that waits for members of this host is freed by the abort of `near`."""
        self._far.abort(generation)

    def close(self) -> None:
        self._far.close()

    def divide(self, step: int, takes: Takers | None, *, frees: bool = False) -> None:
        """As `Transport.divide`: a courier takes what a member of its host does."""
        if self._stream is not None and (self._division is None or self._division[0] != step):
            n_blocks, tiers = self._layout.n_blocks, self._tiers
            whole = takes is None
            among = Division.whole(self._owned, n_blocks) if takes is None else Division.among(takes, n_blocks)
            self._division = step, among
            shares = Division.whole(tiers.shares(n_blocks), n_blocks) if whole else among.joined(tiers.hosts, n_blocks)
            self._stream.divide(step, shares)

    def offering(self, step: int) -> OnFinal:
        """Receiver of final blocks: it reports them to the courier of this host, which sends blocks that have come of
        all its lanes."""
        return FinalBlocks(self._near, self._courier, step, self._layout.n_blocks).take

    def reduce(self, step: int, presence: Mapping[Node, bytes]) -> Reduced:
        """As `Transport.reduce`. Raises: CollectiveAborted."""
        near, far, stream = self._near, self._far, self._stream
        check(stream is not None, "a reduction before the members have met")
        near.look()
        with far.ticking():
            slots = {node: near.slots.index(step, node) for node in presence}
            records = far.exchange(Tag("reduce", step, 0), encode_offers(slots, presence))
            offers = {w: decode_offers(record, len(self._layout.entries)) for w, record in records.items()}
            nodes = [node for offered in offers.values() for node, _, _ in offered]
            check(len(set(nodes)) == len(nodes), f"nodes of step {step} were offered twice: {sorted(nodes)}")
            try:
                stream.reduce_offered(step, offers)  # type: ignore[union-attr]
            except BaseException:
                far.mesh.cut()  # no further writes to the receive buffers
                raise
            results = near.finish_together(step)
        present = merge_presence(row for offered in offers.values() for _, _, row in offered)
        division = self._division[1] if self._division is not None and self._division[0] == step else None
        division = division or Division.whole(self._owned, self._layout.n_blocks)
        pieces = pieces_of(results[self._courier], division.takes[self._me])
        return Reduced(step, pieces, present, division.finishes[self._me])
