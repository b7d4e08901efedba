"""Loops left before the last step: all workers leave after the same step, or the job ends. Pure.

A worker that leaves its loop says so and waits for the others. If they do not follow soon, a plan of the same
members is made, in which each reports what its loop does. So the workers that go on are known, including one that
waits for results of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from everstep.base.cause import Cause, Why
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.agreement import Agreement
from everstep.protocol.coordinator.environment import SECOND_NS, Alarm, Environment, listed

FOLLOW_NS = SECOND_NS


class Leaving:
    """Loops that were left, with the step, and loops that went on, with the generation."""

    def __init__(
        self, env: Environment, agreement: Agreement, end: Callable[[Why], None], ending: Callable[[], bool]
    ) -> None:
        """end: ends the job, with a checkpoint. ending: whether it is about to end."""
        self._env, self._agreement, self._end, self._ending = env, agreement, end, ending
        self._left: dict[WorkerKey, int] = {}
        self._on: dict[WorkerKey, tuple[int, int]] = {}
        self._due_ns = 0

    def left(self, key: WorkerKey, step: int) -> None:
        """A member has left its loop after this step."""
        self._left[key] = step
        self._give_time(self._env.now + FOLLOW_NS)

    def _give_time(self, until_ns: int) -> None:
        """Ring when all have had the time to follow."""
        self._due_ns = until_ns
        self._env.alarms.set(Alarm.LEFT, until_ns)

    def entered(self, key: WorkerKey, generation: int, step: int, loop: str) -> None:
        """A member has settled at this step, and reports what its loop does."""
        self._left.pop(key, None)
        if loop == "left":
            self.left(key, step)
        elif loop == "on":
            self._on[key] = (generation, step)
        self._look()

    def due(self) -> None:
        """The other members may have had time to follow."""
        left, others = self._members()
        if not left or not others or self._ending():
            return
        if self._env.now < self._due_ns:
            self._give_time(self._due_ns)
            return
        self._give_time(self._env.now + FOLLOW_NS)
        agreement = self._agreement
        if not agreement.broken and len(agreement.entered) == len(agreement.plan.members):
            step = max(self._left[key] for key in left)
            agreement.break_off(
                Why(Cause.LEFT, f"{_named(left)} left the loop after step {step}: asking whether the others did, too")
            )

    def pardon(self, gap_ns: int) -> None:
        """The coordinator was away for this long."""
        self._due_ns += gap_ns

    def _members(self) -> tuple[list[WorkerKey], list[WorkerKey]]:
        """Members of the present plan that have left their loops, and the others."""
        keys = [member.key for member in self._agreement.plan.members]
        return [k for k in keys if k in self._left], [k for k in keys if k not in self._left]

    def _look(self) -> None:
        """End the job if members are known to disagree, in one generation."""
        left, others = self._members()
        step, here = max((self._left[k] for k in left), default=0), self._agreement.plan.generation
        gone_on = [k for k in others if k in self._on and self._on[k][0] == here and self._on[k][1] >= step]
        if not left or not gone_on or self._ending():
            return
        text = (
            f"{_named(left)} left the loop after step {step}, {_named(gone_on)} went on: leave it after the same step "
            "in all workers, by what they have in common (step.number, step.loss, metrics)"
        )
        self._end(Why(Cause.LEFT, text))


def _named(keys: Iterable[WorkerKey]) -> str:
    ids = [key.worker_id for key in keys]
    return f"worker{'s' if len(ids) > 1 else ''} {listed(ids)}"
