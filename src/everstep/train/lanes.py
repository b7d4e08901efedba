"""The lanes of a step, as this worker computes them: by the user's loop where the model is whole, else by the pipeline.

Apart from updates because nothing here changes the state: what is computed is kept by the stages until a step is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from everstep.base.errors import DeterminismError
from everstep.base.plan import Plan
from everstep.base.ports import Node
from everstep.data.loader import LaneLoader, to_device
from everstep.order.ledger import use_digest
from everstep.protocol.driver.operations import Compute, Open, Opened
from everstep.train.pipeline import Pipeline
from everstep.train.restoring import Restorer
from everstep.train.transports import JobTransport
from everstep.train.view import WorkerView

LaneDone = Callable[[int, int, int], None]
"""Told step, stage and lane of what is done."""


class Lanes:
    """One worker's lanes. `done` is told of each, at each stage."""

    def __init__(
        self,
        view: WorkerView,
        transport: JobTransport,
        restorer: Restorer,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        device: torch.device,
        done: LaneDone,
    ) -> None:
        config = view.config
        self.device = device
        self._view = view
        self._transport = transport
        self._restorer = restorer
        self._done = done
        self._samples = 0
        self._probed = False
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
        lost = [(stage, lane) for stage in held for lane in self._begin(operation.step, plan, stage)]
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
            self._begin(number, plan, stage)
            if stage in (0, plan.stages - 1):
                ends.update(plan.lanes_of(view.me, stage))
        if ends:
            self._loader.schedule(number, sorted(ends))
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
                if lane in stages[stage].missing:
                    stages[stage].empty_lane(lane, use_digest(samples))
                self._done(number, stage, lane)
        return True

    def _begin(self, number: int, plan: Plan, stage: int) -> tuple[int, ...]:
        """The plan's lanes of the step are wanted at this stage; returns those that are still to be computed."""
        replica, mine = self._view.stages[stage], plan.lanes_of(self._view.me, stage)
        replica.begin(number, mine, lambda node: self._node(stage, number, node))
        lacking = replica.lacking(mine)
        if not lacking:
            return ()
        missing = replica.missing
        return tuple(lane for lane in lacking if lane in missing)

    def _node(self, stage: int, number: int, node: Node) -> torch.Tensor:
        return self._transport.node(stage, number, node)

    # ---- lanes in the user's loop

    def begin(self, operation: Compute) -> list[int]:
        """The lanes that are handed to the loop."""
        plan, number = operation.plan, operation.step
        lacking = self._begin(number, plan, 0)
        if lacking:
            self._loader.schedule(number, plan.lanes_of(self._view.me))
        for lane in operation.lanes:
            if lane not in lacking:
                self._done(number, 0, lane)
        return list(lacking)

    def enter(self, operation: Compute, lane: int) -> tuple[Any, int, int] | None:
        """(batch, number of samples, digest of their use), and everything is seeded; None: the lane has no samples, and
        is done."""
        view, number = self._view, operation.step
        view.phase("load", number, operation.plan)
        batch, samples = self._loader.batch(number, lane)
        if not samples:
            view.stages.only.empty_lane(lane, use_digest(samples))
            self._done(number, 0, lane)
            return None
        view.phase("forward", number, operation.plan)
        view.stages.only.enter_lane(number, lane)
        return to_device(batch, self.device), len(samples), use_digest(samples)

    def backward(self, number: int, loss: torch.Tensor, weight: Any, count: int) -> None:
        """Backward of the lane that was entered last."""
        view = self._view
        view.phase("backward", number, view.plan)
        view.stages.only.backward(loss, weight, count / view.order.micro_batch)

    def leave(self, number: int, lane: int, count: int, use: int) -> None:
        """The loop is through with the lane."""
        self._view.stages.only.leave_lane(lane, count, use)
        self._count(count)
        self._done(number, 0, lane)

    def should_probe(self) -> bool:
        """Whether the lane about to be computed is to be computed twice, to see that it gives the same bits."""
        due, self._probed = not self._probed, True
        return due

    def enter_again(self, number: int, lane: int) -> str:
        """The lane once more; returns the digest of what it would have contributed."""
        replica = self._view.stages.only
        digest = replica.lane_digest()
        replica.abandon_lane()
        replica.enter_lane(number, lane)
        return digest

    def compare_probe(self, first: str, number: int, lane: int) -> None:
        """Raises: DeterminismError if the lane just computed again gave something else."""
        if first != self._view.stages.only.lane_digest():
            raise DeterminismError(
                f"lane {lane} of step {number} was computed twice and gave different gradients: the model or the loss "
                "uses an operation or a random source that is not deterministic (one seeded by time or by os.urandom, "
                "say); use torch's, numpy's or random's global generators"
            )

    def _count(self, samples: int) -> None:
        self._samples += samples
        self._view.link.row.set(samples=self._samples)

    # ---- what the pipeline has done here

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
        return self._view.order.samples(number, lane).samples

    def lane_done(self, number: int, stage: int, lane: int) -> None:
        """A stage is through with a lane."""
        if self._view.stages[stage].spec.is_last:
            self._count(len(self.samples(number, lane)))
        self._done(number, stage, lane)
