"""The canonical reduction in the simulation: each block of each stage is added up by its owner, and handed to all."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.base.ports import Node
from everstep.placement.owners import owners
from everstep.placement.tree import fold_order, root
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.records import AgreePayload, LaneReport, StageSection
from everstep.sim.lanes import SimLanes
from everstep.sim.life import Life, SimHandlers
from everstep.sim.mesh import Mesh
from everstep.sim.model import BLOCKS, SimGradient, add, digest
from everstep.sim.records import Vote

_USE = 0xFFFFFFFF

SimPart = Mapping[Node, SimGradient]


class Reduction:
    """What has come of the sums of a generation, and what this worker makes of it."""

    def __init__(self, life: Life, mesh: Mesh, lanes: SimLanes) -> None:
        self.life = life
        self.mesh = mesh
        self.lanes = lanes
        self._parts: dict[tuple[int, int], dict[int, SimPart]] = {}  # by (step, stage)
        self._pieces: dict[tuple[int, int], dict[int, SimGradient]] = {}
        mesh.on("part", self._on_part)
        mesh.on("piece", self._on_piece)
        mesh.install_owes(do.Reduce, self._owes)

    def handlers(self) -> SimHandlers:
        """What it carries out."""
        return {do.Reduce: self._reduce}

    def clear(self) -> None:
        """A generation begins."""
        self._parts, self._pieces = {}, {}

    def _pool(self, stage: int) -> tuple[int, ...]:
        return tuple(s.worker_id for s in self.mesh.plan.pool(stage)) if self.mesh.plan is not None else ()

    def _reduce(self, operation: do.Reduce) -> None:
        """Hand the own subtrees of each stage, cut by owner, to the owners."""
        plan, me = operation.plan, self.life.me.worker_id
        for stage in plan.stages_of(me):
            nodes = self.lanes.sums(plan, operation.step, stage)
            for worker_id, (first, last) in owners(BLOCKS, self._pool(stage)).items():
                part = {node: value[first:last] for node, value in nodes.items()}
                self.mesh.send(worker_id, "part", operation.step, stage, me, part)

    def _on_part(self, step: int, stage: int, worker_id: int, part: SimPart) -> None:
        plan, parts = self.mesh.plan, self._parts.setdefault((step, stage), {})
        parts[worker_id] = part
        pool = self._pool(stage)
        if plan is None or len(parts) < len(pool):
            return
        values = {node: value for _, one in sorted(parts.items()) for node, value in one.items()}
        for left, right, into in fold_order(plan.lanes, sorted(values)):
            values[into] = tuple(map(add, values[left], values[right]))
        result = values[root(plan.lanes)]
        for pool_mate in pool:
            self.mesh.send(pool_mate, "piece", step, stage, self.life.me.worker_id, result)

    def _on_piece(self, step: int, stage: int, worker_id: int, values: SimGradient) -> None:
        pieces = self._pieces.setdefault((step, stage), {})
        pieces[worker_id] = values
        operation = self.life.operation
        if not isinstance(operation, do.Reduce) or operation.step != step:
            return
        mine = operation.plan.stages_of(self.life.me.worker_id)
        if any(len(self._pieces.get((step, k), ())) < len(self._pool(k)) for k in mine):
            return
        gradients = {
            k: tuple(value for _, part in sorted(self._pieces[step, k].items()) for value in part) for k in mine
        }
        self._parts = {key: value for key, value in self._parts.items() if key[0] > step}
        self._pieces = {key: value for key, value in self._pieces.items() if key[0] > step}
        self.life.state.reduced(step, gradients)
        self.life.done(operation, self._payload(operation, gradients))

    def _payload(self, operation: do.Reduce, gradients: Mapping[int, SimGradient]) -> AgreePayload:
        """A section per stage; the first one bears what the checks want to know."""
        plan, step, me = operation.plan, operation.step, self.life.me.worker_id
        mine = {k: plan.lanes_of(me, k) for k in plan.stages_of(me)}
        vote = Vote(
            plan.generation,
            me,
            tuple(k * plan.lanes + lane for k, lanes in mine.items() for lane in lanes),
            tuple((k, hash(gradient)) for k, gradient in sorted(gradients.items())),
            tuple((k, self._state(k)) for k in sorted(gradients)),
        )
        sections = []
        for k, lanes in mine.items():
            last = k + 1 == plan.stages
            reports = [LaneReport(n, 0.0, 1.0, 1, hash((step, n)) & _USE) for n in lanes] if last else []
            sections.append(StageSection(k, reports, (0, 0), b"", [], [vote.encode()], self._digest(step, k)))
        return AgreePayload(sections)

    def _digest(self, step: int, stage: int) -> str:
        """Of the state before the step, if a comparison is due."""
        every = self.life.driver.config.verify_every
        return format(self._state(stage), "x") if every and step % every == 0 else ""

    def _state(self, stage: int) -> int:
        """As it is told; of one that lacks blocks nobody will hear."""
        state = self.life.state.stages[stage]
        return 0 if None in state else digest(state)

    def _owes(self, operation: do.Reduce, worker_id: int) -> bool:
        step = operation.step
        return any(
            worker_id not in self._parts.get((step, k), {}) or worker_id not in self._pieces.get((step, k), {})
            for k in operation.plan.stages_of(self.life.me.worker_id)
            if worker_id in self._pool(k)
        )
