"""The lanes of a step on this worker: what is wanted, where batches come from, and the pipeline of a split model.

Apart from updates because nothing here changes the state: what is computed is kept by the stages until a step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from everstep.base.plan import Plan
from everstep.base.ports import Node
from everstep.data.loader import LaneLoader, to_device
from everstep.order.ledger import use_digest
from everstep.parallel.staged import StagedTransport
from everstep.protocol.driver.operations import Compute, Open, Opened
from everstep.train.pipeline import Pipeline
from everstep.train.restoring import Restorer
from everstep.train.view import WorkerView

OnLaneDone = Callable[[int, int, int], None]
"""Told step, stage and lane of what is done."""


class Lanes:
    """One worker's lanes. `done` is told of each, at each stage."""

    def __init__(
        self,
        view: WorkerView,
        transport: StagedTransport,
        restorer: Restorer,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        device: torch.device,
        done: OnLaneDone,
    ) -> None:
        config = view.config
        self.device = device
        self._view = view
        self._transport = transport
        self._restorer = restorer
        self.done = done
        self._samples = 0
        self._loader = LaneLoader(
            dataset,
            view.order,
            seed=config.seed,
            collate=collate,
            workers=config.loader.workers,
            prefetch=config.loader.prefetch,
            pin_memory=config.loader.pin_memory,
            preserve_generators=False,  # entering a lane seeds them all
        )
        self._pipeline = Pipeline(view.me, config, self, lambda: view.order.micro_batch)

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        """What it does for the driver; lanes of a model that is whole are computed by the user's loop."""
        return {Open: self.open} | ({Compute: self.compute} if self._view.stages.split else {})

    def close(self) -> None:
        """Give back what the loader holds."""
        self._loader.close()

    # ---- operations

    def open(self, operation: Open) -> Opened:
        """Have the stages of the plan's seats, and meet the members."""
        view, plan = self._view, operation.plan
        seats = plan.stages_of(view.me)
        view.stages.want(seats)
        self._transport.open(plan, view.stages.layouts(seats))
        held = [stage for stage in seats if stage in view.driver.machine.stages]
        lost = [(stage, lane) for stage in held for lane in self.begin(operation.step, plan, stage)]
        disk = self._restorer.restorable(operation.limit) if operation.disk else ()
        return Opened(tuple(lost), disk)

    def compute(self, operation: Compute) -> None:
        """The lanes of a split model, wherever they pass through this worker.

        Raises: CollectiveAborted.
        """
        view, plan, number = self._view, operation.plan, operation.step
        seats = plan.stages_of(view.me)
        ends: set[int] = set()
        for stage in seats:
            self.begin(number, plan, stage)
            if stage in (0, plan.stages - 1):
                ends.update(plan.lanes_of(view.me, stage))
        if ends:
            self.schedule(number, sorted(ends))
        full = [lane for lane in operation.lanes if not self._empty(number, plan, lane)]
        self._pipeline.run(plan, number, full, view.stages, self._transport.channel)

    def _empty(self, number: int, plan: Plan, lane: int) -> bool:
        """Whether the lane has no samples; then it is through at once, at all stages."""
        samples = self.samples(number, lane)
        if samples:
            return False
        me, stages = self._view.me, self._view.stages
        for stage in plan.stages_of(me):
            if lane in plan.lanes_of(me, stage):
                if lane in stages[stage].lanes.missing:
                    stages[stage].lanes.add_empty(lane, use_digest(samples))
                self.done(number, stage, lane)
        return True

    def begin(self, number: int, plan: Plan, stage: int) -> tuple[int, ...]:
        """The plan's lanes of the step are wanted at this stage; returns those that are still to be computed."""
        lanes, mine = self._view.stages[stage].lanes, plan.lanes_of(self._view.me, stage)
        lanes.begin(number, mine, lambda node: self._node(stage, number, node))
        lacking = lanes.lacking(mine)
        if not lacking:
            return ()
        missing = lanes.missing
        return tuple(lane for lane in lacking if lane in missing)

    def _node(self, stage: int, number: int, node: Node) -> torch.Tensor:
        return self._transport.node(stage, number, node)

    # ---- what is done here, of whichever lanes

    def schedule(self, number: int, lanes: Sequence[int]) -> None:
        """Have these loaded, soon."""
        self._loader.schedule(number, lanes)

    def count(self, samples: int) -> None:
        """So many more were trained on."""
        self._samples += samples
        self._view.link.row.set(samples=self._samples)

    def tick(self) -> None:
        self._view.tick()

    def receiving(self) -> None:
        """Waits for what another part hands over."""
        self._view.link.row.set(phase="transfer")

    def sent(self, operation: str, n_bytes: int) -> None:
        """So many bytes were given to other workers."""
        self._view.link.row.sent(operation, n_bytes)

    def phase(self, name: str, number: int, plan: Plan) -> None:
        self._view.phase(name, number, plan)

    def over(self, generation: int) -> bool:
        """Whether nothing is to be computed for this generation any more."""
        return self._view.cutter.over(generation)

    def batch(self, number: int, lane: int) -> tuple[Any, Any]:
        """A lane's batch on the device, and its samples."""
        batch, samples = self._loader.batch(number, lane)
        return to_device(batch, self.device), samples

    def samples(self, number: int, lane: int) -> Any:
        """Which samples a lane has."""
        return self._view.order.samples(number, lane)

    def lane_done(self, number: int, stage: int, lane: int) -> None:
        """A stage is through with a lane."""
        if self._view.stages[stage].spec.is_last:
            self.count(len(self.samples(number, lane)))
        self.done(number, stage, lane)
