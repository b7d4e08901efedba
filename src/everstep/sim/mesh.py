"""The data plane of one simulated worker: one connection to every peer per generation, and the canonical reduction.

It stands where shared memory, gloo or NCCL stand in production, with what they have in common: a peer's death or a
broken link is seen, silence is not (a limit on how long a message may be stuck is). What is lost ends the operation
that needs it; nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from everstep.base.plan import Plan
from everstep.base.ports import Node, Tag
from everstep.placement.owners import owners
from everstep.placement.tree import fold_order, root
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.records import AgreePayload, LaneReport, StageSection
from everstep.protocol.step_types import Record
from everstep.sim.checks import Vote
from everstep.sim.model import BLOCKS, Gradient, add
from everstep.sim.world import MS, Connection, connect

if TYPE_CHECKING:
    from everstep.sim.worker import SimWorker

_CONNECT_NS = 1000 * MS
_USE = 0xFFFFFFFF

Part = Mapping[Node, Gradient]


class Mesh:
    """Everything one worker exchanges with the members of its generation."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self.plan: Plan | None = None
        self.out: dict[int, Connection] = {}
        self.incoming: list[tuple[int, Connection]] = []
        self.lost: set[int] = set()
        self._early: dict[int, list[tuple[Any, ...]]] = {}
        self._clear()

    def _clear(self) -> None:
        self.records: dict[Tag, dict[int, bytes]] = {}
        self.parts: dict[tuple[int, int], dict[int, Part]] = {}  # by (step, stage)
        self.pieces: dict[tuple[int, int], dict[int, Gradient]] = {}

    @property
    def generation(self) -> int:
        return self.plan.generation if self.plan is not None else 0

    # ---- a generation begins and ends

    def leave(self, generation: int) -> None:
        """Cut the connections of this generation and older; the peers see them end, after what was sent over them."""
        if self.generation <= generation:
            for _, connection in sorted(self.out.items()):
                connection.close(self.worker)
            self.out = {}
        for opened_in, connection in self.incoming:
            if opened_in <= generation:
                connection.close(self.worker)
        self.incoming = [(g, c) for g, c in self.incoming if g > generation]

    def open(self, operation: do.Open) -> None:
        """Connect to the members of the plan."""
        plan = operation.plan
        self.leave(plan.generation - 1)
        self._clear()
        self.plan, self.lost = plan, set()
        early, self._early = self._early, {}
        for worker_id in plan.worker_ids:
            if worker_id != self.worker.me.worker_id:
                self._connect(operation, worker_id, self.worker.world.now_ns + _CONNECT_NS)
        for message in early.get(plan.generation, []):
            self.worker.later(0, self.received, message)
        self._early = {g: m for g, m in early.items() if g > plan.generation}
        self._met(operation)

    def _connect(self, operation: do.Open, worker_id: int, until_ns: int) -> None:
        me, plan = self.worker, operation.plan
        if me.operation is not operation:
            return
        world = me.world
        peer = me.site.lives.get(plan.member(worker_id).key)
        connection = connect(world, me, peer)
        if connection is not None and peer is not None:
            self.out[worker_id] = connection
            connection.listen(me, lambda _: None, lambda: self._lost(plan.generation, worker_id))
            peer.mesh.accept(connection, plan.generation, me.me.worker_id)
            self._met(operation)
        elif peer is not None and peer.alive and not world.spoiled(me.name, peer.name) and world.now_ns < until_ns:
            me.later(100 * MS, self._connect, operation, worker_id, until_ns)
        else:
            me.later(world.latency_ns(), self._lost, plan.generation, worker_id)

    def _met(self, operation: do.Open) -> None:
        if len(self.out) == len(operation.plan.worker_ids) - 1:
            self.worker.later(self.worker.world.latency_ns(), self.worker.opened, operation)

    def accept(self, connection: Connection, generation: int, worker_id: int) -> None:
        """A peer has connected, perhaps for a generation that this worker has not heard of yet."""
        if generation < self.generation or generation <= self.worker.cut_to:
            connection.close(self.worker)
            return
        self.incoming.append((generation, connection))
        connection.listen(self.worker, self.received, lambda: self._lost(generation, worker_id))

    def _lost(self, generation: int, worker_id: int) -> None:
        self.incoming = [(g, c) for g, c in self.incoming if c.open]
        if generation == self.generation:
            self.lost.add(worker_id)
            self.look()
        elif generation > self.generation:
            self._early.setdefault(generation, []).append(("lost", generation, worker_id))

    # ---- messages

    def _send(self, worker_id: int, message: tuple[Any, ...]) -> None:
        me = self.worker
        if worker_id == me.me.worker_id:
            me.later(me.world.between(0, MS // 10), self.received, message)
        elif worker_id in self.out:
            self.out[worker_id].send(me, message)

    def received(self, message: tuple[Any, ...]) -> None:
        """A message of some generation: (kind, generation, ...). Older ones have no effect, newer ones wait."""
        kind, generation = message[0], message[1]
        if generation == self.generation:
            getattr(self, f"_on_{kind}")(*message[2:])
        elif generation > self.generation:
            self._early.setdefault(generation, []).append(message)

    def _on_lost(self, worker_id: int) -> None:
        self.lost.add(worker_id)
        self.look()

    # ---- small records

    def exchange(self, operation: do.Exchange) -> None:
        """All-gather."""
        plan, me = operation.generation, self.worker.me.worker_id
        if self.plan is None or plan != self.plan.generation:
            raise AssertionError(f"{operation} in generation {self.generation}")
        self.worker.site.checks.contributed(plan, operation.tag, me, operation.payload)
        for worker_id in self.plan.worker_ids:
            self._send(worker_id, ("record", plan, operation.tag, me, operation.payload))

    def _on_record(self, tag: Tag, worker_id: int, payload: bytes) -> None:
        records = self.records.setdefault(tag, {})
        records[worker_id] = payload
        operation = self.worker.operation
        if self.plan is None or len(records) < len(self.plan.worker_ids):
            return
        if isinstance(operation, do.Exchange) and operation.tag == tag:
            del self.records[tag]
            self.worker.done(operation, records)

    # ---- from stage to stage

    def send_lane(self, worker_id: int, *parts: Any) -> None:
        """What one stage hands to another: kind, step, stage, lane, value."""
        self._send(worker_id, ("lane", self.generation, *parts))

    def _on_lane(self, kind: str, step: int, stage: int, lane: int, value: int) -> None:
        self.worker.lanes.arrived(kind, step, stage, lane, value)

    def send_snapshot(self, worker_id: int, *parts: Any) -> None:
        """To be kept by a worker of another pool: stage, step, state, records."""
        self._send(worker_id, ("snapshot", self.generation, *parts))

    def _on_snapshot(self, stage: int, step: int, state: int, records: Mapping[int, Record]) -> None:
        self.worker.memory.take(stage, step, state, records)

    # ---- the reduction

    def _pool(self, stage: int) -> tuple[int, ...]:
        return tuple(s.worker_id for s in self.plan.pool(stage)) if self.plan is not None else ()

    def reduce(self, operation: do.Reduce) -> None:
        """Hand the own subtrees of each stage, cut by owner, to the owners."""
        plan, me = operation.plan, self.worker.me.worker_id
        for stage in plan.stages_of(me):
            nodes = self.worker.lanes.sums(plan, operation.step, stage)
            for worker_id, (first, last) in owners(BLOCKS, self._pool(stage)).items():
                part = {node: value[first:last] for node, value in nodes.items()}
                self._send(worker_id, ("part", plan.generation, operation.step, stage, me, part))

    def _on_part(self, step: int, stage: int, worker_id: int, part: Part) -> None:
        parts = self.parts.setdefault((step, stage), {})
        parts[worker_id] = part
        pool = self._pool(stage)
        if self.plan is None or len(parts) < len(pool):
            return
        values = {node: value for _, one in sorted(parts.items()) for node, value in one.items()}
        for left, right, into in fold_order(self.plan.lanes, sorted(values)):
            values[into] = tuple(map(add, values[left], values[right]))
        result = values[root(self.plan.lanes)]
        for pool_mate in pool:
            self._send(pool_mate, ("piece", self.generation, step, stage, self.worker.me.worker_id, result))

    def _on_piece(self, step: int, stage: int, worker_id: int, values: Gradient) -> None:
        pieces = self.pieces.setdefault((step, stage), {})
        pieces[worker_id] = values
        operation = self.worker.operation
        if not isinstance(operation, do.Reduce) or operation.step != step:
            return
        mine = operation.plan.stages_of(self.worker.me.worker_id)
        if any(len(self.pieces.get((step, k), ())) < len(self._pool(k)) for k in mine):
            return
        gradients = {
            k: tuple(value for _, part in sorted(self.pieces[step, k].items()) for value in part) for k in mine
        }
        self.parts = {key: value for key, value in self.parts.items() if key[0] > step}
        self.pieces = {key: value for key, value in self.pieces.items() if key[0] > step}
        self.worker.state.reduced(step, gradients)
        self.worker.done(operation, self._payload(operation, gradients))

    def _payload(self, operation: do.Reduce, gradients: Mapping[int, Gradient]) -> AgreePayload:
        """A section per stage; the first one bears what the checks want to know."""
        plan, step, me = operation.plan, operation.step, self.worker.me.worker_id
        mine = {k: plan.lanes_of(me, k) for k in plan.stages_of(me)}
        vote = Vote(
            plan.generation,
            me,
            tuple(k * plan.lanes + lane for k, lanes in mine.items() for lane in lanes),
            tuple((k, hash(gradient)) for k, gradient in sorted(gradients.items())),
            tuple((k, self.worker.state.stages[k]) for k in sorted(gradients)),
        )
        sections = []
        for k, lanes in mine.items():
            last = k + 1 == plan.stages
            reports = [LaneReport(n, 0.0, 1.0, 1, hash((step, n)) & _USE) for n in lanes] if last else []
            sections.append(StageSection(k, reports, (0, 0), b"", [], [vote.encode()], self.worker.digest(step, k)))
        return AgreePayload(sections)

    # ---- neighbours that are gone

    def look(self) -> None:
        """End the operation under way if lost peers owe it something."""
        operation = self.worker.operation
        missing = tuple(i for i in sorted(self.lost) if self._needs(operation, i))
        if missing and operation is not None:
            self.worker.abort(operation, missing, "a transfer failed")

    def _needs(self, operation: do.Operation | None, worker_id: int) -> bool:
        match operation:
            case do.Open():
                return worker_id not in self.out
            case do.Exchange(tag=tag):
                return worker_id not in self.records.get(tag, {})
            case do.Compute(plan=plan):
                return plan.stages > 1 and worker_id in self.worker.lanes.neighbours()
            case do.Reduce(plan=plan, step=step):
                return any(
                    worker_id not in self.parts.get((step, k), {}) or worker_id not in self.pieces.get((step, k), {})
                    for k in plan.stages_of(self.worker.me.worker_id)
                    if worker_id in self._pool(k)
                )
        return False
