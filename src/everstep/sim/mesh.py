"""The data plane of one simulated worker: one connection to every peer per generation, and the canonical reduction.

It stands where shared memory, gloo or NCCL stand in production, with what they have in common: a peer's death or a
broken link is seen, silence is not (a limit on how long a message may be stuck is).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from everstep.base.plan import Plan
from everstep.base.ports import Node
from everstep.placement.owners import owners
from everstep.placement.tree import children, cover, fold_order, root
from everstep.protocol.step_machine import Phase
from everstep.protocol.step_types import GradientReduced, Holding, HoldingArrived, Key, Record, RecordArrived
from everstep.sim.checks import Vote
from everstep.sim.model import BLOCKS, Gradient, add
from everstep.sim.world import MS, Connection, connect

if TYPE_CHECKING:
    from everstep.sim.worker import SimWorker

_CONNECT_NS = 1000 * MS


def subtree(node: Node, leaves: Mapping[int, Gradient]) -> Gradient:
    """The sum of a complete subtree, all blocks."""
    if node.hi - node.lo == 1:
        return leaves[node.lo]
    left, right = children(node)
    return tuple(add(x, y) for x, y in zip(subtree(left, leaves), subtree(right, leaves), strict=True))


class Mesh:
    """Everything one worker exchanges with the members of its generation."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self.plan: Plan | None = None
        self.out: dict[int, Connection] = {}
        self.incoming: list[tuple[int, Connection]] = []
        self.waiting: dict[int, list[tuple[Any, ...]]] = {}
        self.lost: set[int] = set()
        self.accused: set[int] = set()
        self._early: dict[int, list[tuple[Any, ...]]] = {}
        self._clear()

    def _clear(self) -> None:
        self.holdings: set[int] = set()
        self.records: dict[Key, set[int]] = {}
        self.parts: dict[tuple[int, int], dict[int, dict[Node, Gradient]]] = {}  # by (step, stage)
        self.pieces: dict[tuple[int, int], dict[int, Gradient]] = {}
        self.reduced: dict[int, dict[int, Gradient]] = {}

    @property
    def generation(self) -> int:
        return self.plan.generation if self.plan is not None else 0

    # ---- a generation begins and ends

    def leave(self) -> None:
        """Abandon every transfer; the peers see the connections end, after what was sent over them."""
        for _, connection in sorted(self.out.items()):
            connection.close(self.worker)
        self.out = {}
        for generation, connection in self.incoming:
            if generation <= self.generation:
                connection.listen(self.worker, lambda _: None, lambda: None)
        self.incoming = [(g, c) for g, c in self.incoming if g > self.generation]

    def open(self, plan: Plan) -> None:
        """Connect to the members of a plan."""
        self.leave()
        self._clear()
        self.plan, self.lost, self.accused, self.waiting = plan, set(), set(), {}
        early, self._early = self._early, {}
        for worker_id in plan.worker_ids:
            if worker_id != self.worker.me.worker_id:
                self._connect(plan, worker_id, self.worker.world.now_ns + _CONNECT_NS)
        for message in early.get(plan.generation, []):
            self.worker.later(0, self.received, message)
        self._early = {g: m for g, m in early.items() if g > plan.generation}

    def _connect(self, plan: Plan, worker_id: int, until_ns: int) -> None:
        if plan.generation != self.generation or worker_id in self.out:
            return
        world, me = self.worker.world, self.worker
        peer = me.site.lives.get(plan.member(worker_id).key)
        connection = connect(world, me, peer)
        if connection is not None and peer is not None:
            self.out[worker_id] = connection
            connection.listen(me, lambda _: None, lambda: self._lost(plan.generation, worker_id))
            peer.mesh.accept(connection, plan.generation, me.me.worker_id)
            for message in self.waiting.pop(worker_id, []):
                connection.send(me, message)
        elif peer is not None and peer.alive and not world.spoiled(me.name, peer.name) and world.now_ns < until_ns:
            me.later(100 * MS, self._connect, plan, worker_id, until_ns)
        else:
            me.later(world.latency_ns(), self._lost, plan.generation, worker_id)

    def accept(self, connection: Connection, generation: int, worker_id: int) -> None:
        """A peer has connected, perhaps for a generation that this worker has not heard of yet."""
        self.incoming.append((generation, connection))
        connection.listen(self.worker, self.received, lambda: self._lost(generation, worker_id))

    def _lost(self, generation: int, worker_id: int) -> None:
        if generation == self.generation:
            self.lost.add(worker_id)
            if self.waiting.pop(worker_id, None):
                self._accuse([worker_id])
            self.look()
        elif generation > self.generation:
            self._early.setdefault(generation, []).append(("lost", generation, worker_id))

    # ---- messages

    def _send(self, worker_id: int, message: tuple[Any, ...]) -> None:
        me = self.worker
        if worker_id == me.me.worker_id:
            me.later(me.world.between(0, MS // 10), self.received, message)
        elif worker_id in self.lost:
            self._accuse([worker_id])
        elif worker_id in self.out:
            self.out[worker_id].send(me, message)
        else:
            self.waiting.setdefault(worker_id, []).append(message)

    def _to_all(self, *message: Any) -> None:
        if self.plan is not None:
            for worker_id in self.plan.worker_ids:
                self._send(worker_id, message)

    def received(self, message: tuple[Any, ...]) -> None:
        """A message of some generation: (kind, generation, ...). Older ones have no effect, newer ones wait."""
        kind, generation = message[0], message[1]
        if generation < self.generation:
            return
        if kind == "holding":
            self.worker.feed(HoldingArrived(*message[1:]))
        if generation > self.generation:
            self._early.setdefault(generation, []).append(message)
            return
        getattr(self, f"_on_{kind}")(*message[2:])
        self.look()

    def _on_lost(self, worker_id: int) -> None:
        self.lost.add(worker_id)

    def _on_holding(self, worker_id: int, holding: Holding) -> None:
        self.holdings.add(worker_id)

    def _on_record(self, key: Key, worker_id: int, record: Record) -> None:
        self.records.setdefault(key, set()).add(worker_id)
        self.worker.feed(RecordArrived(self.generation, key, worker_id, record))

    def send_holding(self, holding: Holding) -> None:
        self._to_all("holding", self.generation, self.worker.me.worker_id, holding)

    def send_record(self, key: Key, record: Record) -> None:
        self._to_all("record", self.generation, key, self.worker.me.worker_id, record)

    def send_lane(self, worker_id: int, *parts: Any) -> None:
        """What one stage hands to another: kind, step, stage, lane, value."""
        self._send(worker_id, ("lane", self.generation, *parts))

    def _on_lane(self, kind: str, step: int, stage: int, lane: int, value: int) -> None:
        self.worker.lanes.arrived(kind, step, stage, lane, value)

    def send_snapshot(self, worker_id: int, *parts: Any) -> None:
        """To be kept by a worker of another pool: stage, step, state, records."""
        if worker_id not in self.lost:
            self._send(worker_id, ("snapshot", self.generation, *parts))

    def _on_snapshot(self, stage: int, step: int, state: int, records: Mapping[int, Record]) -> None:
        self.worker.keeper.keep(stage, step, state, records)

    # ---- the reduction

    def _pool(self, stage: int) -> tuple[int, ...]:
        return tuple(s.worker_id for s in self.plan.pool(stage)) if self.plan is not None else ()

    def reduce(self, step: int, stage: int, lanes: tuple[int, ...], leaves: Mapping[int, Gradient]) -> None:
        """Hand the own subtrees of one stage, cut by owner, to the owners."""
        if self.plan is None:
            raise AssertionError("a reduction without a plan")
        nodes = {node: subtree(node, leaves) for node in cover(lanes, self.plan.lanes)}
        for worker_id, (first, last) in owners(BLOCKS, self._pool(stage)).items():
            part = {node: value[first:last] for node, value in nodes.items()}
            self._send(worker_id, ("part", self.generation, step, stage, self.worker.me.worker_id, part))

    def _on_part(self, step: int, stage: int, worker_id: int, part: dict[Node, Gradient]) -> None:
        parts = self.parts.setdefault((step, stage), {})
        parts[worker_id] = part
        if self.plan is None or len(parts) < len(self._pool(stage)):
            return
        values = {node: value for _, one in sorted(parts.items()) for node, value in one.items()}
        for left, right, into in fold_order(self.plan.lanes, sorted(values)):
            values[into] = tuple(add(x, y) for x, y in zip(values[left], values[right], strict=True))
        result = values[root(self.plan.lanes)]
        for pool_mate in self._pool(stage):
            self._send(pool_mate, ("piece", self.generation, step, stage, self.worker.me.worker_id, result))

    def _on_piece(self, step: int, stage: int, worker_id: int, values: Gradient) -> None:
        pieces = self.pieces.setdefault((step, stage), {})
        pieces[worker_id] = values
        if self.plan is None or len(pieces) < len(self._pool(stage)):
            return
        me = self.worker
        reduced = self.reduced.setdefault(step, {})
        reduced[stage] = tuple(value for _, part in sorted(pieces.items()) for value in part)
        mine = self.plan.stages_of(me.me.worker_id)
        if len(reduced) < len(mine):
            return
        self.reduced = {step: reduced}
        self.pieces = {key: value for key, value in self.pieces.items() if key[0] >= step}
        me.hold(step, reduced)
        lanes = tuple(k * self.plan.lanes + n for k in mine for n in self.plan.lanes_of(me.me.worker_id, k))
        sums = tuple((k, hash(gradient)) for k, gradient in sorted(reduced.items()))
        vote = Vote(self.generation, me.me.worker_id, lanes, sums)
        me.feed(GradientReduced(self.generation, step, vote.encode()))

    # ---- neighbours that are gone

    def look(self) -> None:
        """Accuse lost peers that something is still needed from."""
        needed = [i for i in sorted(self.lost) if self._needs(i)]
        if needed:
            self._accuse(needed)

    def _needs(self, worker_id: int) -> bool:
        machine = self.worker.machine
        step = machine.position.step + 1
        match machine.phase:
            case Phase.SETTLING:
                return worker_id not in self.holdings
            case Phase.COMPUTING:
                return worker_id in self.worker.lanes.neighbours()
            case Phase.REDUCING:
                mine = self.plan.stages_of(self.worker.me.worker_id) if self.plan is not None else ()
                return any(
                    worker_id not in self.parts.get((step, k), {}) or worker_id not in self.pieces.get((step, k), {})
                    for k in mine
                    if worker_id in self._pool(k)
                )
            case Phase.AGREEING:
                return worker_id not in self.records.get(Key(step, 0), set())
            case Phase.GATHERING:
                return worker_id not in self.records.get(machine.next_gather, set())
        return False

    def _accuse(self, worker_ids: list[int]) -> None:
        new = [i for i in worker_ids if i not in self.accused]
        self.accused.update(new)
        if new:
            self.worker.report_fault(self.generation, new)
