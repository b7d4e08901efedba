"""A reduction over several hosts: inside each of them in shared memory, between them over sockets, by the one tree.

A byte crosses between two hosts once where the tree allows that: the sums of a host's members are folded as far as they
complete a subtree, one member sends them to the owner elsewhere, and one takes the result, in its own result area,
where the others read it (`placement.tiers` says who).

Why nothing is overwritten too early: what `shared_memory` says of result areas holds here too, because the exchange of
the nodes offered shows that all members have begun the reduction before anything is written. What is folded for others
lies in scratch memory until the next reduction begins, after another exchange: by then all has been received.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from everstep.base.errors import check
from everstep.base.plan import Plan
from everstep.base.ports import Node, Piece, Reduced, Tag
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout
from everstep.exact.reduce import NodePart, finish, merge_presence
from everstep.parallel.group import GroupTransport
from everstep.parallel.mesh import Batch, GlooMesh, Transfer
from everstep.parallel.reduction import CHUNK_BLOCKS, Flats, batches, decode_offers, encode_offers
from everstep.parallel.shared_memory import SharedMemoryTransport
from everstep.parallel.socket_mesh import SocketMesh
from everstep.placement.owners import owners
from everstep.placement.tiers import Tiers, folded

_TAG_RESULT, _TAG_NODE = 2, 16

_Blocks = tuple[int, int]
"""Blocks [first, last)."""
_Offered = tuple[Node, int, bytes]
"""A node, the slot in which its member holds it, and its presence bytes."""


class _Sum(NamedTuple):
    """What members of this host have of one subtree; flat: where its sum is, from the block `first` on."""

    parts: list[NodePart]
    flat: torch.Tensor
    first: int


class TieredTransport:
    """Reduces what lies in `near`'s memory over the members of a generation on any hosts, as `Transport` has it.

    near: opened before for the members of this host. far: moves bytes and records between hosts; it is this one's.
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
        self._tiers = Tiers(((me,),))
        self._owned: dict[int, _Blocks] = {}

    def open(self, plan: Plan, machines: Mapping[int, str]) -> None:
        """Meet the members of the plan. machines: where each of them is, by worker id. Raises: CollectiveAborted."""
        self._tiers = Tiers.of(machines)
        self._owned = owners(self._layout.n_blocks, plan.worker_ids)
        self._far.open(plan)

    def exchange(self, tag: Tag, payload: bytes) -> dict[int, bytes]:
        """All-gather of small records. Raises: CollectiveAborted."""
        return self._far.exchange(tag, payload)

    def settled(self) -> None:
        """All members are known to have received everything that was sent here in this generation."""
        self._far.settled()

    def rest(self) -> None:
        """All members are known to have left the last generation, and there is none until the next `open`."""
        self._far.rest()

    def abort(self, generation: int) -> None:
        """Thread-safe; who waits for members of this host is freed by the abort of `near`."""
        self._far.abort(generation)

    def close(self) -> None:
        """Leave the others."""
        self._far.close()

    def offering(self, step: int) -> None:
        """Nothing leaves early: what a machine sends is what its members have added up."""

    def reduce(self, step: int, presence: Mapping[Node, bytes]) -> Reduced:
        """As `Transport.reduce`. Raises: CollectiveAborted."""
        near, far = self._near, self._far
        near.begin(step)
        with far.ticking():
            slots = {node: near.slots.index(step, node) for node in presence}
            records = far.exchange(Tag("reduce", step, 0), encode_offers(slots, presence))
            offers = {w: decode_offers(record, len(self._layout.entries)) for w, record in records.items()}
            nodes = [node for offered in offers.values() for node, _, _ in offered]
            check(len(set(nodes)) == len(nodes), f"nodes of step {step} were offered twice: {sorted(nodes)}")
            mesh = far.mesh
            try:
                self._move(mesh, step, offers)
            finally:
                mesh.forget()
            near.finish_together(step)
        present = merge_presence(row for offered in offers.values() for _, _, row in offered)
        return Reduced(step, self._pieces(step), present, self._owned[self._me])

    # ---- inside

    def _move(self, mesh: GlooMesh | SocketMesh, step: int, offers: Mapping[int, Sequence[_Offered]]) -> None:
        """In batches: while one comes, the one before is finished and its result is on its way."""
        me, tiers, owned = self._me, self._tiers, self._owned
        local = [self._held(w, *offer) for w in tiers.inside(me) for offer in offers[w]]
        result, charges = self._near.result(me, step), tiers.charges(me)
        parts, wanted = self._wanted(offers)
        mine = batches(*owned[me])
        coming = [mesh.receive([_cut(transfer, owned[me][0], run) for transfer in wanted]) for run in mine]
        results: list[tuple[int, Batch]] = []
        for owner in charges:
            for run in batches(*owned[owner]):
                results.append((owner, mesh.receive([_cut((result, owner, _TAG_RESULT), 0, run)])))
        self._send_sums(mesh, charges, local, first_scratch=len(wanted))
        parts = sorted([*parts, *local], key=lambda part: part.node)
        couriers = [courier for courier, _ in tiers.outside(me)]
        for run, batch in zip(mine, coming, strict=True):
            mesh.wait(batch)
            self._near.finisher.finish(step, run, parts, result)
            mesh.send([_cut((result, courier, _TAG_RESULT), 0, run) for courier in couriers])
        for _, batch in results:
            mesh.wait(batch)
        for owner in charges:
            self._near.finisher.received(step, owned[owner])

    def _held(self, worker_id: int, node: Node, slot: int, row: bytes) -> NodePart:
        """A node of a member of this host, where it lies."""
        return NodePart(node, self._near.held(worker_id, slot), row)

    def _wanted(self, offers: Mapping[int, Sequence[_Offered]]) -> tuple[list[NodePart], list[Transfer]]:
        """The other hosts' sums over the own blocks, and what is to be received before they can be used."""
        start, stop = (block * BLOCK_ELEMENTS for block in self._owned[self._me])
        parts: list[NodePart] = []
        recvs: list[Transfer] = []
        for courier, there in self._tiers.outside(self._me) if stop > start else ():
            rows = {node: row for w in there for node, _, row in offers[w]}
            for k, (top, nodes) in enumerate(folded(rows, self._n_lanes).items()):
                part = self._scratch.scratch(len(recvs), stop - start)
                recvs.append((part, courier, _TAG_NODE + k))
                parts.append(NodePart(top, part, merge_presence(rows[node] for node in nodes), start))
        return parts, recvs

    def _send_sums(
        self, mesh: GlooMesh | SocketMesh, charges: Sequence[int], local: Sequence[NodePart], first_scratch: int
    ) -> None:
        """This host's sums to the owners that this worker carries for; of all, the first batch goes first."""
        by_node = {part.node: part for part in local}
        groups = [[by_node[node] for node in nodes] for nodes in folded(by_node, self._n_lanes).values()]
        theirs = {owner: batches(*self._owned[owner]) for owner in charges}
        sums: dict[int, list[_Sum]] = {owner: [] for owner in charges}
        for owner in charges:
            first, last = self._owned[owner]
            for group in groups:
                if len(group) == 1:
                    sums[owner].append(_Sum(group, group[0].tensor, 0))
                else:
                    room = self._scratch.scratch(first_scratch, (last - first) * BLOCK_ELEMENTS)
                    first_scratch += 1
                    sums[owner].append(_Sum(group, room, first))
        for turn in range(max(map(len, theirs.values()), default=0)):
            for owner in (w for w in charges if turn < len(theirs[w])):
                run = theirs[owner][turn]
                for k, found in enumerate(sums[owner]):
                    if len(found.parts) > 1:
                        self._fold(found, run)
                    mesh.send([_cut((found.flat, owner, _TAG_NODE + k), found.first, run)])

    def _fold(self, into: _Sum, run: _Blocks) -> None:
        """Add up, in the blocks `run`. A subtree has the shape of the tree over as many lanes."""
        lo, hi = min(part.node.lo for part in into.parts), max(part.node.hi for part in into.parts)
        shifted = [part._replace(node=Node(part.node.lo - lo, part.node.hi - lo)) for part in into.parts]
        for at in range(run[0], run[1], CHUNK_BLOCKS):
            self._near.look()
            start, stop = (block * BLOCK_ELEMENTS for block in (at, min(at + CHUNK_BLOCKS, run[1])))
            origin = into.first * BLOCK_ELEMENTS
            finish(self._layout, hi - lo, shifted, start, stop, into.flat[start - origin : stop - origin])

    def _pieces(self, step: int) -> tuple[Piece, ...]:
        return tuple(self._all_pieces(step))

    def _all_pieces(self, step: int) -> Iterable[Piece]:
        for owner, (first, last) in self._owned.items():
            if first < last:
                start, stop = first * BLOCK_ELEMENTS, last * BLOCK_ELEMENTS
                holder = self._tiers.holder(self._me, owner)
                yield Piece(start, stop, self._near.result(holder, step)[start:stop])


def _cut(transfer: Transfer, first: int, run: _Blocks) -> Transfer:
    """The part of a transfer that lies in the blocks `run`; `first`: the block at which its tensor begins."""
    tensor, worker_id, tag = transfer
    start, stop = ((block - first) * BLOCK_ELEMENTS for block in run)
    return tensor[start:stop], worker_id, tag
