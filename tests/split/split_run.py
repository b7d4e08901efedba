"""Drives the stages of a job in one process, in any schedule, and compares with the unsplit run, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from everstep import Task
from everstep.base.config import Config, load_config
from everstep.base.ports import Node, Piece, Reduced
from everstep.data.loader import Recipe, fetch
from everstep.exact.layout import GradientLayout
from everstep.exact.reduce import NodePart, finish, merge_presence, tied_out
from everstep.exact.seeding import build_seed, seed_all
from everstep.exact.topology import merge, model_digest, state_digest
from everstep.exact.trees import Bundle, from_wire, to_wire
from everstep.placement.cuts import ModelCut
from everstep.placement.schedules import Op, schedule
from everstep.protocol.driver.nonfinite import NonfiniteRule
from everstep.protocol.driver.records import AgreePayload, conclude, encode
from everstep.protocol.step_types import Record
from everstep.train.elastic import sample_order
from everstep.train.part_pass import Lane
from everstep.train.replica import StageReplica
from everstep.train.stage import Parts, cut_out
from everstep.zoo.text import TransformerText

CPU = torch.device("cpu")


class Text(TransformerText):
    """Its text is read once per process."""

    _read_once: tuple[Any, Any] | None = None

    def _read(self) -> tuple[Any, Any]:
        if Text._read_once is None:
            Text._read_once = super()._read()
        return Text._read_once


def config_of(task: Task, values: dict[str, Any]) -> Config:
    config = load_config([("task", dict(task.defaults)), ("test", values)])
    task.config = config
    return config


def maker(task: Task, config: Config) -> Callable[[], Parts]:
    """As `assemble_task`: everything from the build seed."""

    def make() -> Parts:
        seed_all(build_seed(config.seed))
        model = task.build_model()
        units = task.units(model)
        task.build_dataset("train")
        optimizer = task.build_optimizer(list(model.parameters()))
        return Parts(model, optimizer, task.build_scheduler(optimizer), units)

    return make


class Sums:
    """The nodes of one pool member, and their canonical reduction."""

    def __init__(self, layout: GradientLayout) -> None:
        self.layout = layout
        self.flats: dict[Node, torch.Tensor] = {}

    def node(self, node: Node) -> torch.Tensor:
        return self.flats.setdefault(node, torch.full((self.layout.numel,), torch.nan))


def reduce_pool(
    layout: GradientLayout, n_lanes: int, step: int, members: Sequence[tuple[Sums, dict[Node, bytes]]]
) -> list[Reduced]:
    parts = [NodePart(n, sums.flats[n], row) for sums, presence in members for n, row in presence.items()]
    out = torch.zeros(layout.numel)
    finish(layout, n_lanes, parts, 0, layout.numel, out)
    row = merge_presence(p.presence for p in parts)
    pieces = (Piece(0, layout.numel, out),)
    last = len(members) - 1
    ends = [layout.n_blocks * k // len(members) for k in range(len(members) + 1)]
    return [Reduced(step, pieces, row, ((ends[k], ends[k + 1]),)) for k in range(last + 1)]


class SplitRun:
    """All stages of a job, `pools` workers each, in one process."""

    def __init__(
        self,
        task: Task,
        config: Config,
        cut: ModelCut,
        stages: int,
        *,
        kind: str = "1f1b",
        recompute: bool = False,
        pools: int = 1,
        wire: bool = False,
    ) -> None:
        self.task, self.config, self.stages, self.pools, self.wire = task, config, stages, pools, wire
        make = maker(task, config)
        self.workers: list[dict[int, StageReplica]] = [
            {0: StageReplica(make(), config, CPU)}
            if len(cut) == 1
            else {k: self.stage(make(), cut, k) for k in range(stages)}
            for _ in range(pools)
        ]
        self.parts = len(cut)
        dataset = task.build_dataset("train")
        self.order = sample_order(config, dataset)
        self.recipe = Recipe(dataset, self.order, task.collate, config.seed)
        self.schedule = lambda n: schedule(kind, stages, n, self.parts // stages, recompute)
        self.losses: list[float] = []
        self.held: list[int] = []

    def stage(self, whole: Parts, cut: ModelCut, stage: int) -> StageReplica:
        parts, spec = cut_out(whole, cut, self.stages, stage)
        return StageReplica(parts, self.config, CPU, spec, self.task.loss)

    def lane_batch(self, step: int, lane: int) -> tuple[Any, int]:
        """A fresh batch, and how many samples it has."""
        batch, samples = fetch(self.recipe, step, lane)
        return batch, len(samples)

    def step(self, step: int) -> None:
        lanes, n = self.config.lanes, self.pools
        sums = [{k: Sums(w[k].layout) for k in w} for w in self.workers]
        mine = [range(w * lanes // n, (w + 1) * lanes // n) for w in range(n)]
        for w, worker in enumerate(self.workers):
            for k, stage in worker.items():
                stage.lanes.begin(step, list(mine[w]), sums[w][k].node)
            if self.parts == 1:
                self.unsplit(step, worker[0], mine[w])
            else:
                filled = [lane for lane in mine[w] if len(self.order.samples(step, lane))]
                for stage in worker.values():
                    for lane in set(mine[w]) - set(filled):
                        stage.lanes.add_empty(lane, 0)
                self.drive(step, worker, filled)
        pool = [
            reduce_pool(
                self.workers[0][k].layout,
                lanes,
                step,
                [(sums[w][k], self.workers[w][k].lanes.presence(step, list(mine[w]))) for w in range(n)],
            )
            for k in range(self.stages)
        ]
        held = self.workers[0]
        out = [tied_out(held[k].spec.ties, held[k].layout, pool[k][0]) for k in range(self.stages)]
        received = [{p: t for j, o in enumerate(out) if j != k for p, t in o.items()} for k in range(self.stages)]
        records = {
            w: Record(
                0,
                encode(
                    AgreePayload(
                        [
                            self.workers[w][k].section(pool[k][w], list(mine[w]), "", received[k])
                            for k in range(self.stages)
                        ],
                        0,
                    )
                ),
            )
            for w in range(n)
        }
        outcome = conclude(step, lanes, records, NonfiniteRule.of(self.config))
        self.losses.append(outcome.loss)
        for w, worker in enumerate(self.workers):
            for k, stage in worker.items():
                stage.apply(outcome, pool[k][w], 0, received[k])
                stage.lanes.discard()

    def unsplit(self, step: int, replica: StageReplica, lanes: Sequence[int]) -> None:
        for lane in lanes:
            batch, count = self.lane_batch(step, lane)
            if not count:
                replica.lanes.add_empty(lane, 0)
                continue
            replica.loop.enter(step, lane)
            loss = self.task.loss(replica.parts.model, batch)
            share = count / self.config.micro_batch
            replica.loop.backward(*(loss if isinstance(loss, tuple) else (loss, None)), share)
            replica.loop.leave(lane, count, 0)

    def drive(self, step: int, worker: dict[int, StageReplica], lanes: list[int]) -> None:
        """Each stage goes through its list as soon as what it needs is there."""
        schedules = self.schedule(len(lanes)) if lanes else ()
        queues = [list(ops) for ops in schedules]
        mail: dict[tuple[str, int, int], Bundle] = {}
        again = {(op.stage, op.chunk, op.micro_batch) for ops in schedules for op in ops if op.kind == "recompute"}
        flying = most = 0
        while any(queues):
            moved = False
            for queue in queues:
                while queue and self.ready(queue[0], mail, lanes):
                    op = queue.pop(0)
                    self.run(step, worker[op.stage], op, lanes, mail, tuple(op[1:]) not in again)
                    flying += {"forward": 1, "backward": -1}.get(op.kind, 0)
                    most = max(most, flying)
                    moved = True
            assert moved, f"stuck at {[q[0] for q in queues if q]}"
        self.held.append(most)

    def part_of(self, op: Op) -> int:
        return op.chunk * self.stages + op.stage

    def ready(self, op: Op, mail: dict[tuple[str, int, int], Bundle], lanes: list[int]) -> bool:
        part, lane = self.part_of(op), lanes[op.micro_batch]
        if op.kind == "forward":
            return part == 0 or ("act", part, lane) in mail
        return op.kind == "recompute" or part == self.parts - 1 or ("grad", part, lane) in mail

    def run(
        self,
        step: int,
        stage: StageReplica,
        op: Op,
        lanes: list[int],
        mail: dict[tuple[str, int, int], Bundle],
        keep: bool,
    ) -> None:
        part, lane = self.part_of(op), lanes[op.micro_batch]
        if op.kind == "recompute":
            stage.lanes.recompute(step, part, lane)
        elif op.kind == "backward":
            back = stage.lanes.backward(step, part, lane, mail.pop(("grad", part, lane), None))
            if back is not None:
                mail["grad", part - 1, lane] = self.sent(back)
        else:
            batch, count = self.lane_batch(step, lane) if part in (0, self.parts - 1) else (None, 1)
            passing = Lane(mail.pop(("act", part, lane), None), batch, count / self.config.micro_batch, keep)
            out = stage.lanes.forward(step, part, lane, passing, count)
            if out is not None:
                mail["act", part + 1, lane] = self.sent(out)

    def sent(self, parcel: Bundle) -> Bundle:
        if not self.wire:
            return parcel
        tensors, data = to_wire(parcel)
        copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in tensors]
        return from_wire(copies, data)

    def manifests(self, worker: int = 0) -> list[dict[str, Any]]:
        found = []
        for stage in self.workers[worker].values():
            stage.lanes.settle_buffers()
            found.append(stage.state.manifest())
        return found

    def whole(self, worker: int = 0) -> dict[str, Any]:
        return merge(self.manifests(worker))

    def digests(self, step: int) -> tuple[str, str]:
        found = {(model_digest(m), state_digest(m, step)) for m in map(self.whole, range(self.pools))}
        assert len(found) == 1
        return found.pop()


def run_split(
    task: Task, cut: ModelCut, stages: int, steps: int, *, values: dict[str, Any], **options: Any
) -> SplitRun:
    """A job of so many steps over this cut; `ModelCut` of one part: unsplit."""
    config = config_of(task, {"steps": steps, **values})
    run = SplitRun(task, config, cut, stages, **options)
    for step in range(1, steps + 1):
        run.step(step)
    return run
