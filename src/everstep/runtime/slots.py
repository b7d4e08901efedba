"""When a dead worker is started again, and when its slot is given up. Pure: time and random numbers are passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from everstep.base.cause import Cause, Why
from everstep.base.config import Config

HEALTHY_S = 60.0
HOUR_S = 3600.0
LOOP_OWN = 3
LOOP_KILLED = 10

SlotState = Literal["empty", "starting", "running", "resting", "left", "lost"]


@dataclass
class Slot:
    """One worker slot of this host and its lives.

    state: 'empty' (never started), 'starting' (asked for), 'running', 'resting' (waits for its restart), 'left' (ended
    in order), 'lost' (given up). pids: of the present life's processes, the head's first. first: the least incarnation
    that a next life may have.
    """

    worker_id: int
    wanted: bool = True
    state: SlotState = "empty"
    incarnation: int = -1
    pids: tuple[int, ...] = ()
    restart_at_s: float = 0.0
    started_s: float = 0.0
    attempt: int = 0
    early_own: int = 0
    early_killed: int = 0
    restarts_s: deque[float] = field(default_factory=deque)
    first: int = 0

    @property
    def live(self) -> bool:
        return self.state == "running"

    @property
    def pid(self) -> int:
        """Of the head of the present life, 0 if there is none."""
        return self.pids[0] if self.pids else 0

    def begin(self, now_s: float) -> int:
        """A new life is asked for. Returns its incarnation."""
        self.incarnation = max(self.incarnation + 1, self.first)
        self.state, self.pids, self.started_s = "starting", (), now_s
        return self.incarnation

    def started(self, *pids: int) -> None:
        """The processes of the present life exist."""
        self.state, self.pids = "running", pids

    def exited(
        self, now_s: float, config: Config, why: Why, *, in_order: bool, ready: bool, killed: bool, random: float
    ) -> Why | None:
        """The present life has ended. Returns why the slot is lost by that; else it has left, or rests until its next.

        in_order: exit code 0. ready: it got beyond its start-up. killed: by a signal from outside. random: in [0, 1).
        """
        self.pids = ()
        if in_order or not self.wanted:
            self.state = "left"
            return None
        self.state = "lost"
        if config.on_failure == "shrink":
            return Why(why.cause, f"{why.reason}; on_failure is 'shrink', so it is not started again")
        if ready:
            self.early_own = self.early_killed = 0
        elif killed:
            self.early_killed += 1
        else:
            self.early_own += 1
        if self.early_own >= LOOP_OWN or self.early_killed >= LOOP_KILLED:
            times = max(self.early_own, self.early_killed)
            text = f"crash loop: it died {times} times in a row before it was ready, last: {why.reason}"
            return Why(Cause.CRASH_LOOP, text)
        while self.restarts_s and now_s - self.restarts_s[0] >= HOUR_S:
            self.restarts_s.popleft()
        if len(self.restarts_s) >= config.max_restarts:
            most = f"{len(self.restarts_s)} restarts within an hour are all that it may have (max_restarts)"
            return Why(Cause.CRASH_LOOP, f"{most}, last: {why.reason}")
        self.state, self.restart_at_s = "resting", now_s + self._delay_s(now_s, config, ready, random)
        self.restarts_s.append(now_s)
        return None

    def _delay_s(self, now_s: float, config: Config, ready: bool, random: float) -> float:
        """None at first, then longer and longer, until a life has been healthy."""
        most_s, delay_s = config.backoff.max_s, 0.0
        if ready and now_s - self.started_s >= HEALTHY_S:
            self.attempt = 0
        if self.attempt > 0:
            delay_s = min(most_s, config.backoff.initial_s * 2 ** (self.attempt - 1)) * (0.5 + random)
        self.attempt += 1
        return min(delay_s, most_s)


@dataclass
class StepCrashes:
    """Crashes of workers by their own doing, over all slots, and whether they keep the job from getting any further.

    Three alike at one step, and that step cannot be done; three of each worker without a new step, and nothing can.
    """

    at: tuple[int, str] = (-1, "")
    alike: int = 0
    furthest: int = -1
    fruitless: int = 0

    def observe(self, step: int, how: str, furthest: int, workers: int) -> str:
        """A worker crashed in this way while it computed `step`; `furthest`: the newest step that any has committed.

        Returns why to give up, "" while there is hope.
        """
        if furthest > self.furthest:
            self.at, self.alike, self.furthest, self.fruitless = (-1, ""), 0, furthest, 0
        self.alike = self.alike + 1 if (step, how) == self.at else 1
        self.at = (step, how)
        self.fruitless += 1
        if self.alike >= LOOP_OWN:
            return f"workers ended themselves {self.alike} times in a row while they computed step {step}"
        if self.fruitless >= LOOP_OWN * workers:
            return f"workers ended themselves {self.fruitless} times without getting beyond step {self.furthest}"
        return ""
