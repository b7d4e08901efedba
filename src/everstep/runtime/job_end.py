"""How a job comes to its end: signals, the coordinator's word, workers that leave without one. Time is passed in."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from everstep.base.cause import Cause, Why
from everstep.protocol.messages import JobEnded

GRACE_S = 10.0
AGENTS_WAIT_S = 40.0
LAST_WAIT_S = 15.0

ToDo = Literal["nothing", "ask", "end"]


@dataclass(frozen=True)
class Outcome:
    """How the job ended: 'completed', 'failed' or 'interrupted', and why."""

    exit_code: int
    state: str
    why: Why


class JobEnd:
    """Says when the job is over, and how. finish_s: how long workers may go on after the last step."""

    def __init__(self, finish_s: float) -> None:
        self._finish_s = finish_s
        self._signals = 0
        self._left: set[str] = set()
        self._present: set[str] = set()
        self._deadline_s: float | None = None
        self.interrupted = 0
        self.outcome: Outcome | None = None
        self.over = False

    def due_in(self, now_s: float) -> float | None:
        """Seconds until `look` has something to say if nothing comes before; None: never."""
        return None if self._deadline_s is None else self._deadline_s - now_s

    def signal(self, number: int, now_s: float, grace_s: float) -> ToDo:
        """One that is to end the job. grace_s: for a checkpoint before that.

        Returns 'ask' if the coordinator is to be asked to end it, 'end' if everything is to be ended now.
        """
        self._signals += 1
        if self._signals > 1:
            ours = _interrupted(number)
            self.outcome = ours if self.interrupted else (self.outcome or ours)
            self.over = True
            return "end"
        self.interrupted = number
        if self.outcome is not None:
            return "nothing"
        self._deadline_s = now_s + grace_s + GRACE_S
        return "ask"

    def told(self, message: JobEnded, now_s: float) -> None:
        """The coordinator's word. Agents leave when their workers have."""
        why = Why(message.cause, message.reason)
        outcome = Outcome(message.exit_code, message.state, why)
        if self.interrupted and message.state != "completed":
            outcome = Outcome(128 + self.interrupted, "interrupted", why)
        if self.outcome is None:
            self.outcome = outcome
            self._deadline_s = now_s + AGENTS_WAIT_S + (self._finish_s if message.state == "completed" else 0.0)

    def fail(self, why: Why) -> None:
        """It cannot go on, and nobody is there who could end it in order."""
        self.outcome = self.outcome or Outcome(1, "failed", why)
        self.over = True

    def present(self, agents: Iterable[str]) -> None:
        """These agents are connected."""
        self._present = set(agents)
        self._left &= self._present

    def all_left(self, agent_id: str) -> None:
        """No worker of this agent runs or is about to."""
        self._left.add(agent_id)

    def started(self, agent_id: str) -> None:
        """A worker of this agent runs."""
        self._left.discard(agent_id)

    def look(self, now_s: float, local: bool) -> None:
        """Time has passed, or something has come. local: the agent of the job's own host runs."""
        late = self._deadline_s is not None and now_s >= self._deadline_s
        if self.outcome is not None:
            self.over = self.over or late or not (local or self._present)
        elif self.interrupted:
            if late:
                text = f"interrupted by {signal.Signals(self.interrupted).name}; the coordinator did not answer"
                self.outcome = Outcome(128 + self.interrupted, "interrupted", Why(Cause.INTERRUPTED, text))
                self.over = True
        elif not self._left or self._left < self._present:
            self._deadline_s = None
        elif self._deadline_s is None:
            self._deadline_s = now_s + LAST_WAIT_S
        elif late:
            text = "all workers have left, but the coordinator has not said how the job ended"
            self.fail(Why(Cause.UNKNOWN, text))


def _interrupted(number: int) -> Outcome:
    why = Why(Cause.INTERRUPTED, f"interrupted by {signal.Signals(number).name}")
    return Outcome(128 + number, "interrupted", why)
