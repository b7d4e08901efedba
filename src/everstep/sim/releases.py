"""The promise about effects of steps: what leaves a worker, and when."""

from __future__ import annotations

from everstep.base.plan import WorkerKey
from everstep.protocol.step_types import Key
from everstep.sim.promises import PromiseBroken, require


class Effects:
    """P2: the effects of every step leave exactly once, and only effects of committed steps.

    floor: the newest step whose effects have left, and that was not found tainted since.
    """

    def __init__(self) -> None:
        self.effects: dict[int, int] = {}
        self.released: dict[WorkerKey, int] = {}
        self.committed = 0
        self.floor = 0

    def commit(self, step: int) -> None:
        self.committed = max(self.committed, step)

    def back(self, step: int) -> None:
        """States after the step were tainted."""
        self.floor = min(self.floor, step)

    def release(self, who: WorkerKey, position: Key, step: int, effect: int) -> None:
        if not (position > Key(step, 0)):
            raise PromiseBroken(f"P2: {who} released step {step} at {position}: others may lack it")
        known = self.effects.setdefault(step, effect)
        require(known == effect, "P2", f"{who} released other effects of step {step}")
        require(step <= self.committed, "P2", f"{who} released step {step}, which nobody had committed")
        require(step > self.released.get(who, 0), "P2", f"{who} released step {step} twice or out of order")
        self.released[who] = step
        self.floor = max(self.floor, step)
