"""The end of a job: who may declare it, who is waited for, and for how long. Pure: time is passed in."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from everstep.base.cause import Cause, Why
from everstep.protocol.messages import JobEnded

GRACE_S = 10.0
AGENTS_WAIT_S = 40.0
LAST_WAIT_S = 15.0
ALONE_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """How the job ended: 'completed', 'failed' or 'interrupted', and why. later: a scheduler's signal to the job's own
    host stopped it, so it may be started again. elsewhere: a host that leads in a directory of its own has ended it.
    alone: this host has failed, or been refused, while another one leads."""

    exit_code: int
    state: str
    why: Why
    later: bool = False
    elsewhere: bool = False
    alone: bool = False


class JobEnd:
    """Says when the job is over, and how. finish_s: how long workers may go on after the last step.

    alone: the workers of this host end it, since no coordinator answers, or none can be started.
    """

    def __init__(self, finish_s: float) -> None:
        self._finish_s = finish_s
        self._signals = 0
        self._left: set[str] = set()
        self._present: set[str] = set()
        self._deadline_s = self._asked_s = inf
        self.interrupted = 0
        self.alone = False
        self._failing: Outcome | None = None
        self.outcome: Outcome | None = None
        self.over = False

    @property
    def failing(self) -> bool:
        """Whether no coordinator can be started, and the workers leave."""
        return self._failing is not None

    def due_in(self, now_s: float) -> float:
        """Seconds until `look` has news even if nothing happens before."""
        return self._deadline_s - now_s

    def signal(self, number: int, now_s: float, grace_s: float) -> bool:
        """Take in a signal that ends the job. grace_s: for a checkpoint and until all is over; 0: no grace time.

        Returns whether to ask the coordinator to end the job; a second signal ends everything now.
        """
        self._signals += 1
        if self._signals > 1:
            self.outcome = (None if self.interrupted else self.outcome) or _interrupted(number)
            self.over = True
            return False
        self.interrupted = number
        if self.outcome is not None:
            return False
        self._asked_s, self._deadline_s = now_s, now_s + (grace_s - reserve_s(grace_s) or GRACE_S)
        return True

    def goes_alone(self, now_s: float, unheard_s: float, starting: bool = False) -> bool:
        """Whether the workers of this host have to end the job by themselves from now on. unheard_s: time since the
        coordinator was heard of. starting: it was restarted since then, which may take a busy machine long."""
        patience_s = max(ALONE_S, (self._deadline_s - self._asked_s) / 4) if starting else ALONE_S
        if self.alone or self.outcome is not None or min(now_s - self._asked_s, unheard_s) < patience_s:
            return False
        self.alone = True
        return True

    def told(self, message: JobEnded, now_s: float, elsewhere: bool = False) -> None:
        """Take in the coordinator's word on the end. Agents leave when their workers have. elsewhere: as `Outcome` has
        it."""
        why = Why(message.cause, message.reason)
        stopped = message.state == "interrupted" and message.exit_code == 128 + signal.SIGTERM
        outcome = Outcome(message.exit_code, message.state, why, stopped, elsewhere)
        if self.interrupted and message.state != "completed":
            outcome = Outcome(128 + self.interrupted, "interrupted", why)
        if self.outcome is None:
            self.outcome = outcome
            wait_s = AGENTS_WAIT_S + (self._finish_s if message.state == "completed" else 0.0)
            self._deadline_s = min(now_s + wait_s, self._deadline_s if self.interrupted else inf)

    def fail(self, why: Why, exit_code: int = 1, *, alone: bool = False) -> None:
        """End a job that cannot go on, without anybody who could end it in order. alone: as `Outcome` has it."""
        self.outcome = self.outcome or Outcome(exit_code, "failed", why, alone=alone)
        self.over = True

    def fail_alone(self, why: Why, now_s: float, grace_s: float, *, alone: bool = False) -> None:
        """Let the workers of this host end a job that cannot go on by themselves, within `grace_s`. alone: as `Outcome`
        has it."""
        self.alone, self._failing = True, Outcome(1, "failed", why, alone=alone)
        self._deadline_s = min(self._deadline_s, now_s + grace_s)

    def give_up(self, exit_code: int, why: Why, *, alone: bool = False) -> None:
        """Let this process leave, even if the job does not end. alone: as `Outcome` has it."""
        self.interrupted = self.interrupted or max(0, exit_code - 128)
        self.outcome = self.outcome or Outcome(exit_code, "interrupted", why, alone=alone)
        self.over = True

    def leave(self, number: int) -> None:
        """After this signal, leave a job with which other hosts go on."""
        reason = f"interrupted by {signal.Signals(number).name}: the job goes on elsewhere"
        self.give_up(128 + number, Why(Cause.INTERRUPTED, reason))

    def present(self, agents: Iterable[str]) -> None:
        """Set the connected agents."""
        self._present = set(agents)
        self._left &= self._present

    def others(self, agent_id: str) -> bool:
        """Whether another agent than this one is connected."""
        return bool(self._present - {agent_id})

    def all_left(self, agent_id: str) -> None:
        """Note that no worker of this agent runs or is about to start."""
        self._left.add(agent_id)

    def started(self, agent_id: str) -> None:
        self._left.discard(agent_id)

    def look(self, now_s: float, local: bool, leads: bool = True) -> None:
        """Decide after time has passed, or a message has come. local: the agent of the job's own host runs. leads: the
        coordinator here decides; else another host waits for the other hosts."""
        late = now_s >= self._deadline_s
        if self.outcome is not None:
            self.over = self.over or late or not (local or (leads and self._present))
        elif self.interrupted or self._failing is not None:
            if late or (self.alone and not local):
                text = "; the coordinator did not answer"
                self.outcome, self.over = self._failing or _interrupted(self.interrupted, text), True
        elif not leads or not self._left or self._left < self._present:
            self._deadline_s = inf
        elif self._deadline_s == inf:
            self._deadline_s = now_s + LAST_WAIT_S
        elif late:
            self.fail(Why(Cause.UNKNOWN, "all workers have left, but the coordinator has not said how the job ended"))


def reserve_s(grace_s: float) -> float:
    """Part of the time between a signal and the end that is kept for ending processes."""
    return min(5.0, grace_s / 4)


def _interrupted(number: int, more: str = "") -> Outcome:
    text = f"interrupted by {signal.Signals(number).name}{more}"
    return Outcome(128 + number, "interrupted", Why(Cause.INTERRUPTED, text))
