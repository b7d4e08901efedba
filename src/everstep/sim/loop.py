"""One simulated worker's loop: it asks the application on after each answer, and holds when that has raised."""

from __future__ import annotations

from everstep.base.cause import Cause
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.sim.application import SimApplication
from everstep.sim.lanes import SimLanes
from everstep.sim.life import Life, SimHandlers, nothing
from everstep.sim.promise import freed
from everstep.sim.world import MS

_HOLD_NS = 1000 * MS


class Loop:
    """The application, and what it has raised."""

    def __init__(self, life: Life, lanes: SimLanes) -> None:
        self.life = life
        self.lanes = lanes
        self.app = SimApplication(life.me, life.job)
        self.raised = ""
        lanes.when_left(self._left)

    def handlers(self) -> SimHandlers:
        """What it carries out."""
        return {
            do.Evaluate: self._evaluate,
            do.Arrived: self._stepped,
            do.Stepped: self._stepped,
            do.WentBack: self._stepped,
            do.GatherDone: self._go_on,
            do.Evaluated: self._go_on,
            do.Exit: self._exit,
            do.Released: self._released,
            do.JobOver: self._over,
            do.Skipped: nothing,
        }

    def begin(self) -> None:
        """The first ask."""
        self.life.handle(self.app.next(None))

    def raises(self, reason: str) -> None:
        """The application raises: where it computes, or as soon as it has the turn."""
        self.raised = self.raised or reason
        if isinstance(self.life.operation, do.Compute):
            self.life.abort(self.life.operation, (), reason)

    def _left(self) -> None:
        if self.raised:
            self._hold()

    def _hold(self) -> None:
        """What it holds may be needed: stay for a while."""
        life = self.life
        words = wire.WorkerFailed(
            worker_id=life.me.worker_id,
            incarnation=life.me.incarnation,
            step=life.driver.position.step,
            cause=Cause.EXCEPTION,
            reason=self.raised,
            signature=self.raised,
            fatal=False,
            generation=life.driver.generation,
            holds=True,
        )
        until_ns = life.world.now_ns + _HOLD_NS
        life.later(_HOLD_NS, life.handle, do.TimePassed())
        life.handle(do.HoldAsked(words, until_ns))

    def _evaluate(self, operation: do.Evaluate) -> None:
        self.life.later(self.life.world.between(0, 5 * MS), self.life.done, operation)

    def _stepped(self, effect: do.Stepped) -> None:
        life, checks, at = self.life, self.life.site.checks, self.life.state.at
        checks.exact.stands(life.me, effect.step, at)
        freed(life.me, f"lanes, at step {at}", [s for s in self.lanes.held if s != at + 1])
        freed(life.me, f"gathers, at step {at}", [k for k in life.driver.gathered if k.step != at])
        self._go_on(effect)

    def _go_on(self, effect: do.Answer) -> None:
        life = self.life
        life.site.phases.forget(life.me)
        pause = life.world.between(0, MS) if life.world.rng.random() < 0.3 else 0
        if self.raised:
            life.later(pause, self._hold)
        else:
            life.later(pause, life.handle, self.app.next(effect))

    def _exit(self, effect: do.Exit) -> None:
        self.life.end(Cause.EXITED, effect.reason, not (effect.drained or effect.failed), effect.drained)

    def _over(self, effect: do.JobOver) -> None:
        self.life.end(Cause.EXITED, "the job is over", restart=False)

    def _released(self, effect: do.Released) -> None:
        self.life.end(Cause.EXCEPTION, self.raised)
