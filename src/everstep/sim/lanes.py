"""The lanes of one simulated worker: what it computes, one thing after the other, and what passes between the stages.

In a split job a lane really flows: a stage computes its forward pass when the activation of the stage before has come,
and its backward pass when the gradient of the stage after has; so if two workers disagree about which lanes are to be
run, somebody waits for ever, and the simulation does not end. What is abstracted: passes run in the order in which
they become possible, not in that of a schedule.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from everstep.base.plan import Plan
from everstep.protocol.step_types import LaneDone
from everstep.sim.model import Gradient, backward, forward, leaf
from everstep.sim.world import MS

if TYPE_CHECKING:
    from everstep.sim.worker import SimWorker

Pass = tuple[str, int, int, int]  # 'forward' or 'backward', step, stage, lane


class Lanes:
    """Computes the lanes asked for; results are kept until `discard`."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self.leaves: dict[int, dict[tuple[int, int], Gradient]] = {}
        self._todo: deque[Pass] = deque()
        self._under_way = False
        self._life = 0
        self._wanted: set[tuple[int, int, int]] = set()  # (step, stage, lane)
        self._came: dict[Pass, int] = {}  # what a pass starts from

    def stop(self) -> None:
        """A generation ends: nothing more is asked for, and what was on its way between stages is lost."""
        self._todo.clear()
        if self.worker.job.stages > 1:
            self._life += 1
            self._under_way = False
            self._wanted.clear()
            self._came.clear()

    def discard(self, step: int) -> None:
        """Drop the results of this step and older."""
        self.leaves = {s: v for s, v in self.leaves.items() if s > step}

    def of(self, step: int, stage: int, lanes: tuple[int, ...]) -> dict[int, Gradient]:
        """The results of these lanes at a stage."""
        held = self.leaves.get(step, {})
        return {lane: held[stage, lane] for lane in lanes}

    def compute(self, plan: Plan, step: int, lanes: tuple[int, ...]) -> None:
        """These lanes are wanted at all own seats that they pass through."""
        if self.worker.job.stages == 1:
            self._todo = deque(("backward", step, 0, lane) for lane in lanes)
        else:
            me = self.worker.me.worker_id
            seats = [(stage, lane) for stage in plan.stages_of(me) for lane in plan.lanes_of(me, stage)]
            self._wanted = {(step, stage, lane) for stage, lane in seats if lane in lanes}
            self._todo.clear()
            for _, stage, lane in sorted(self._wanted):
                if stage == 0:
                    self._came["forward", step, 0, lane] = 0
            for one in sorted(self._came):
                if one[1:] in self._wanted and one not in self._todo:
                    self._todo.append(one)
        self._next()

    def arrived(self, kind: str, step: int, stage: int, lane: int, value: int) -> None:
        """From the stage before or after; perhaps before this worker wants the lane."""
        one = (kind, step, stage, lane)
        self._came[one] = value
        if (step, stage, lane) in self._wanted:
            self._todo.append(one)
            self._next()

    def neighbours(self) -> set[int]:
        """Workers from which something is still to come."""
        plan = self.worker.machine.plan
        if plan is None or plan.stages == 1:
            return set()
        found = set()
        for _, stage, lane in self._wanted:
            if stage > 0:
                found.add(_holder(plan, stage - 1, lane))
            if stage + 1 < plan.stages:
                found.add(_holder(plan, stage + 1, lane))
        return found

    def _next(self) -> None:
        if self._under_way or not self._todo:
            return
        one = self._todo.popleft()
        worker = self.worker
        if one[1] != worker.at + 1:
            raise AssertionError(f"{worker.me} is to compute step {one[1]} at state {worker.at}")
        self._under_way = True
        longest = 16 * MS if worker.job.stages == 1 else 3 * MS
        took = worker.world.between(2 * MS if worker.job.stages == 1 else MS, longest) * worker.slowness
        worker.later(took, self._done, self._life, one, worker.states[one[2]])

    def _done(self, life: int, one: Pass, state: int) -> None:
        if life != self._life:
            return
        self._under_way = False
        kind, step, stage, lane = one
        worker = self.worker
        if step == worker.at + 1 and state == worker.states.get(stage):
            if worker.job.stages == 1:
                self._hold(step, 0, lane, leaf(state, step, lane))
            elif kind == "forward":
                self._forward(step, stage, lane, state)
            else:
                self._backward(step, stage, lane, state)
        self._next()

    def _hold(self, step: int, stage: int, lane: int, gradient: Gradient) -> None:
        self.leaves.setdefault(step, {})[stage, lane] = gradient
        self.worker.feed(LaneDone(step, stage, lane))

    def _forward(self, step: int, stage: int, lane: int, state: int) -> None:
        value = forward(state, step, lane, self._came["forward", step, stage, lane])
        if stage + 1 == self.worker.job.stages:
            self.arrived("backward", step, stage, lane, value)
        else:
            self._send("forward", step, stage + 1, lane, value)

    def _backward(self, step: int, stage: int, lane: int, state: int) -> None:
        entering = self._came.pop(("forward", step, stage, lane))
        coming_back = self._came.pop(("backward", step, stage, lane))
        self._wanted.discard((step, stage, lane))
        if stage > 0:
            self._send("backward", step, stage - 1, lane, backward(state, step, lane, entering, coming_back))
        self._hold(step, stage, lane, leaf(state, step, lane, entering, coming_back))

    def _send(self, kind: str, step: int, stage: int, lane: int, value: int) -> None:
        plan = self.worker.machine.plan
        if plan is None:
            raise AssertionError("a lane without a plan")
        self.worker.mesh.send_lane(_holder(plan, stage, lane), kind, step, stage, lane, value)


def _holder(plan: Plan, stage: int, lane: int) -> int:
    return next(s.worker_id for s in plan.pool(stage) if lane in s.lanes)
