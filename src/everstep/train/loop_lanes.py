"""The lanes of a step that the user's own loop computes, of a model that is whole.

Apart from `lanes` because here the worker is asked lane by lane, and gives the way to the user's code in between.
"""

from __future__ import annotations

from typing import Any

import torch

from everstep.base.errors import DeterminismError
from everstep.order.ledger import use_digest
from everstep.protocol.driver.operations import Compute
from everstep.train.lanes import Lanes
from everstep.train.view import WorkerView


class LoopLanes:
    """What `run` does with each lane. The first of all is computed twice, to see that it gives the same bits."""

    def __init__(self, view: WorkerView, lanes: Lanes) -> None:
        self._view = view
        self._lanes = lanes
        self._probed = False

    def begin(self, operation: Compute) -> list[int]:
        """The lanes that are handed to the loop."""
        plan, number = operation.plan, operation.step
        lacking = self._lanes.begin(number, plan, 0)
        if lacking:
            self._lanes.schedule(number, plan.lanes_of(self._view.me))
        for lane in operation.lanes:
            if lane not in lacking:
                self._lanes.done(number, 0, lane)
        return list(lacking)

    def over(self, operation: Compute) -> bool:
        """Whether the loop is to get no more of its lanes."""
        return self._lanes.over(operation.generation)

    def enter(self, operation: Compute, lane: int) -> tuple[Any, int, int] | None:
        """(batch, number of samples, digest of their use), and everything is seeded; None: the lane has no samples, and
        is done."""
        view, number = self._view, operation.step
        view.phase("load", number, operation.plan)
        batch, samples = self._lanes.batch(number, lane)
        if not samples:
            view.stages.only.lanes.add_empty(lane, use_digest(samples))
            self._lanes.done(number, 0, lane)
            return None
        view.phase("forward", number, operation.plan)
        view.stages.only.loop.enter(number, lane)
        return batch, len(samples), use_digest(samples)

    def backward(self, number: int, loss: torch.Tensor, weight: Any, count: int) -> None:
        """Backward of the lane that was entered last."""
        view = self._view
        view.phase("backward", number, view.plan)
        view.stages.only.loop.backward(loss, weight, count / view.order.micro_batch)

    def leave(self, number: int, lane: int, count: int, use: int) -> None:
        """The loop is through with the lane."""
        self._view.stages.only.loop.leave(lane, count, use)
        self._lanes.count(count)
        self._lanes.done(number, 0, lane)

    # ---- the lane that is computed twice

    def should_probe(self) -> bool:
        """Whether the lane about to be computed is to be computed twice, to see that it gives the same bits."""
        due, self._probed = not self._probed, True
        return due

    def enter_again(self, number: int, lane: int) -> str:
        """The lane once more; returns the digest of what it would have contributed."""
        loop = self._view.stages.only.loop
        digest = loop.digest()
        loop.abandon()
        loop.enter(number, lane)
        return digest

    def compare_probe(self, first: str, number: int, lane: int) -> None:
        """Raises: DeterminismError if the lane just computed again gave something else."""
        if first != self._view.stages.only.loop.digest():
            raise DeterminismError(
                f"lane {lane} of step {number} was computed twice and gave different gradients: the model or the loss "
                "uses an operation or a random source that is not deterministic (one seeded by time or by os.urandom, "
                "say); use torch's, numpy's or random's global generators"
            )
