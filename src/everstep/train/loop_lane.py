"""The lane that the user's own loop computes, of a model that is whole.

Apart from the stage's lanes because here somebody else's code runs between entering a lane and its backward pass: one
lane at a time, in the modes and with the seeds that it has to find.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from everstep.base.errors import DeterminismError, TaskError
from everstep.exact.digest import named_digest
from everstep.protocol.driver.records import LaneReport
from everstep.train.part_pass import NOT_DETERMINISTIC, measured
from everstep.train.precision import LossScaler
from everstep.train.stage_lanes import StageLanes


class LoopLane:
    """One lane after the other, from `enter` over `backward` to `leave`. The first is computed twice (`probes`)."""

    def __init__(self, lanes: StageLanes, model: nn.Module, scaler: LossScaler, autocast: Callable[[], Any]) -> None:
        """lanes: of the one stage, which are told of each lane. autocast: makes the context of a forward pass."""
        self._lanes = lanes
        self._pass = lanes.whole
        self._model = model
        self._scaler = scaler
        self._autocast_of = autocast
        self._autocast: Any = None
        self._step = self._lane = 0
        self._loss = 0.0
        self._weight = 0.0
        self._spoke = False
        self._probed = False
        self._first = ""

    def enter(self, step: int, lane: int) -> None:
        """Seed everything, put the step's buffers in place, and begin autocast: the forward pass may run."""
        self._pass.guard.begin_lane()
        self._pass.accumulator.enter(lane)
        self._step, self._lane = step, lane
        self._lanes.seeder.begin_lane(step, lane)
        self._loss = self._weight = 0.0
        self._spoke = False
        self._autocast = self._autocast_of()
        self._autocast.__enter__()

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None, share: float) -> None:
        """Backward of one lane. weight None: `loss` is a mean, of a micro-batch that is `share` of a full one.

        Raises: TaskError if the loss is not a scalar tensor with a graph, or if the lane called it twice.
        """
        self._end_autocast()
        if self._spoke:
            raise TaskError("step.backward(loss) was called twice for one batch; add the losses up and call it once")
        scaled, self._loss, self._weight = measured(loss, weight, share)
        self._pass.accumulator.capture(self._lane)
        self._pass.guard.end_lane()
        torch.autograd.backward(scaled * self._scaler.scale if self._scaler.enabled else scaled)
        self._spoke = True

    def leave(self, lane: int, count: int, use: int) -> None:
        """Take the lane's gradient and buffers. Raises: TaskError if the lane never called backward."""
        self._end_autocast()
        self._lanes.seeder.end_lane()
        if not self._spoke:
            raise TaskError("a batch was taken without step.backward(loss); call it once for every batch")
        self._pass.accumulator.add(lane)
        self._lanes.note(LaneReport(lane, self._loss, self._weight, count, use))

    # ---- the lane that is computed twice

    def probes(self) -> bool:
        """Whether the lane about to be computed is to be computed twice, to see that it gives the same bits."""
        due, self._probed = not self._probed, True
        return due

    def again(self) -> None:
        """Enter the lane once more; what it has left is thrown away, and the guard puts the buffers back."""
        self._first = self._digest()
        self._pass.guard.forget_lanes()
        for parameter in self._model.parameters():
            parameter.grad = None
        self.enter(self._step, self._lane)

    def compare(self) -> None:
        """Raises: DeterminismError if the lane just computed again gave something else."""
        if self._first != self._digest():
            raise DeterminismError(
                f"lane {self._lane} of step {self._step} was computed twice and gave different gradients: "
                f"{NOT_DETERMINISTIC}"
            )

    def _digest(self) -> str:
        """Of the gradients and buffers that a lane has left, and its loss."""
        self._end_autocast()
        self._lanes.seeder.end_lane()
        named = [(f"grad {n}", p.grad) for n, p in self._model.named_parameters() if p.grad is not None]
        buffers = [(f"buffer {n}", b) for n, b in self._model.named_buffers()]
        return f"{named_digest([*named, *buffers])} {self._loss.hex()}"

    def _end_autocast(self) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
            self._autocast = None
