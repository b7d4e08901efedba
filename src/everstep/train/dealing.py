"""A worker's part in a state whose optimizer's part the members of a pool have divided: what a step's gradient takes to
its step here, which parts are updated, and the exchange of the parameters after that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from everstep.base.extents import NONE, WHOLE, Extents
from everstep.base.plan import Plan
from everstep.base.ports import Hop
from everstep.exact.dealt import Dealt
from everstep.protocol.driver import operations as do
from everstep.protocol.step_types import Holds, StepEvent, Takes
from everstep.train.view import WorkerView


class Dealing:
    """One worker's."""

    def __init__(self, view: WorkerView, say: Callable[[StepEvent], None]) -> None:
        """say: tells the driver something during an operation."""
        self._view, self._say = view, say
        self._plan: tuple[int, Plan] | None = None  # the step that was reduced last, and in which plan

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        """Handlers of the driver's operations."""
        return {do.Spread: self.spread}

    def _mine(self, plan: Plan) -> list[int]:
        """Own stages that are divided."""
        divided = {shard.stage for shard in plan.shards if shard.segments is not None}
        return sorted(divided & set(plan.stages_of(self._view.me)))

    def _dealt(self, plan: Plan, number: int, stage: int) -> Dealt | None:
        """A stage as it is divided in an update; None if all members update all of it. All say the same: the first step
        makes state, of which the gradients tell, unless the optimizer keeps different things for different parameters;
        what has none then is updated by all from there on."""
        replica = self._view.stages[stage]
        state, kind = replica.state, replica.update.kind
        known = state.optimizer is not None and bool(state.optimizer.state)
        first = number == 1 and kind is not None and kind.uniform
        return Dealt(state, plan, stage, self._view.me) if known or first else None

    def reduced(self, plan: Plan, number: int) -> None:
        """The gradient of a step is there. Of the first one nobody can say yet what it takes forward."""
        self._plan = number, plan
        dealt = {stage: self._dealt(plan, number, stage) for stage in self._mine(plan)}
        takes = {k: one.made() if number > 1 else NONE for k, one in dealt.items() if one is not None}
        if takes:
            self._say(Takes(number, takes))

    def of(self, number: int, stage: int) -> Dealt | None:
        """The parts of a stage that this worker updates, in the plan in which the step was reduced; None if these are
        all."""
        plan = self._plan[1] if self._plan is not None and self._plan[0] == number else None
        return self._dealt(plan, number, stage) if plan is not None and stage in self._mine(plan) else None

    def updated(self, number: int) -> None:
        """The step's update has been made, or was left out."""
        plan = self._plan[1] if self._plan is not None and self._plan[0] == number else None
        held: dict[int, Extents] = {}
        for stage, replica in self._view.stages.items() if plan is not None else ():
            made, there = replica.update.dealt, self.of(number, stage)
            if made is not None:
                held[stage] = made.made()
            elif there is not None:
                held[stage] = there.spread() if number > 1 else WHOLE
        if held:
            self._say(Holds(number, {**self._view.driver.machine.held, **held}))

    def spread(self, operation: do.Spread) -> dict[int, Extents]:
        """Give the parameters that were updated here to those who have not, and take those of others. The messages are
        of the next step: those of this one may be forgotten by a member that decides it later. Raises:
        CollectiveAborted."""
        view, plan, number, me = self._view, operation.plan, operation.step, self._view.me
        channel, held = view.transport.channel, dict(view.driver.machine.held)
        view.phase("update", number, plan)
        dealt = {k: one for k in self._mine(plan) if (one := view.stages[k].update.dealt) is not None}
        for stage, one in dealt.items():
            for seat in plan.pool(stage):
                if parts := one.given(me, seat.worker_id):
                    channel.send(seat.worker_id, Hop(number + 1, "part", stage, 0), parts)
        for stage, one in dealt.items():
            for seat in plan.pool(stage):
                if targets := one.given(seat.worker_id, me):
                    came, _ = channel.recv(seat.worker_id, Hop(number + 1, "part", stage, 0))
                    with torch.no_grad():
                        for target, part in zip(targets, came, strict=True):
                            target.copy_(part)
            held[stage] = one.spread()
            one.release()
        return held
