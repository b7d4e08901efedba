"""Effects of the step machine, carried out by a worker: they start the next operation, or are done at once. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.plan import Plan
from everstep.protocol import step_types as step
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver_parts import DriverParts
from everstep.protocol.driver.machine_queue import MachineQueue
from everstep.protocol.driver.stepper import Differs


class MachineEffects:
    """Carries the effects out, one after the other."""

    def __init__(self, parts: DriverParts, queue: MachineQueue) -> None:
        self._parts = parts
        self._queue = queue
        self._table = self._means()
        self._saves_for: Plan | None = None

    def carry_out(self, effect: step.StepEffect) -> None:
        self._table[type(effect)](effect)

    def _means(self) -> dict[type, Callable[[Any], object]]:
        """The table of how each effect of the machine is carried out."""
        parts = self._parts
        settler, stepper, out = parts.settler, parts.stepper, parts.out
        return {
            step.Leave: lambda e: settler.leave(e.generation),
            step.Regroup: lambda e: self._open(e.plan),
            step.SendHolding: lambda e: settler.state_holding(*self._loop()),
            step.SettleAnew: lambda e: settler.settle_again(Why(Cause.CORRUPT, e.reason)),
            step.ServeState: self._serve,
            step.FetchState: settler.fetch,
            step.GoBack: self._go_back,
            step.Entered: self._entered,
            step.LanesNeeded: self._compute,
            step.ReductionDue: stepper.reduce,
            step.SendRecord: stepper.contribute,
            step.StepDecided: self._update,
            step.Gathered: self._gathered,
            step.Release: self._release,
            step.Discard: out.put,
            step.LeftPlan: lambda e: parts.application.answer(do.Exit("the plan goes on without it", drained=True)),
        }

    # ---- generations

    def _loop(self) -> tuple[int, int]:
        """heard and stays_at as in `Holding`. A loop stays that has raised, or if all have agreed to end the job."""
        application, asked = self._parts.application, self._parts.application.asked
        over = application.holds or self._parts.saver.ending.agreed is not None
        waits = isinstance(application.ask, do.StepAsked | do.EndAsked | do.JoinAsked)
        heard = min(asked, self._parts.machine.step) if application.holds else asked - waits
        return heard, asked if over else -1

    def _open(self, plan: Plan) -> None:
        parts, self._saves_for = self._parts, None
        parts.joiner.stop()
        parts.saver.regroup(plan)
        if parts.probing.void(plan, parts.machine.step + 1):
            parts.out.put(parts.machine.void())
        parts.settler.open(plan)

    def _serve(self, effect: step.ServeState) -> None:
        """A worker that is about to go back may answer its application at once, which may change the state then."""
        parts = self._parts
        stands = parts.application.waits and effect.position == parts.machine.position
        parts.settler.serve(effect, stands=stands)

    def _go_back(self, effect: step.GoBack) -> None:
        leaves = self._parts.settler.go_back(effect)
        if leaves is not None:
            self._parts.application.answer(leaves)

    def _entered(self, effect: step.Entered) -> None:
        parts, application = self._parts, self._parts.application
        parts.stepper.entered(effect.generation)
        parts.followers.regroup()
        parts.settler.entered(effect, application.loop)
        again = application.again()
        if again is not None:
            self.gather(again)
        parts.saver.entered(parts.settler.positions)
        plan = parts.machine.current_plan()
        self._saves_for = plan if plan.save else None

    def save_last(self) -> bool:
        """Begin the last checkpoint, if the plan asks for one. A worker whose application can be answered waits for
        its next ask: the loops of others may have done what this one is about to do, and have changed the state. If
        one never will, or none has begun, all stay where they are. Returns whether it has begun."""
        parts, application, saver, plan = self._parts, self._parts.application, self._parts.saver, self._saves_for
        answerable = application.answerable or self._queue.gathered
        if plan is None or not application.settled or (answerable and parts.settler.goes_on):
            return False
        self._saves_for = None
        if saver.on:
            save = None if application.ended else saver.boundary(Why(plan.cause, plan.save), past=application.past)
            parts.out.start(do.SaveLast, plan.generation, plan, parts.machine.step, save)
        else:
            parts.out.start(do.Linger, plan.generation)
        return True

    # ---- steps and gathers

    def gather(self, data: bytes) -> None:
        """The application wants data gathered."""
        parts = self._parts
        ask, at = parts.application.ask, parts.machine.step
        ends = isinstance(ask, do.EndAsked)
        states = ask.states if isinstance(ask, do.EndAsked) and ask.at == at else ()
        self._queue.feed(parts.stepper.gather(data, ends, states))

    def _compute(self, effect: step.LanesNeeded) -> None:
        if not self._parts.application.holds:
            self._parts.stepper.compute(effect)

    def _release(self, effect: step.Release) -> None:
        self._parts.out.put(effect)
        self._queue.feed(*self._parts.keeper.released(effect.step))

    def _gathered(self, effect: step.Gathered) -> None:
        if effect.here:  # else others may still be copying the state
            self._parts.settler.unshelve()
        self.refuse(self._parts.stepper.gathered(effect))

    def _update(self, effect: step.StepDecided) -> None:
        self._parts.settler.unshelve()
        self.refuse(self._parts.stepper.update(effect))

    def refuse(self, differs: Differs | None) -> None:
        """Act on a difference that a decision's records show: outvoted members restart and the others go back, or
        the job ends."""
        if differs is None:
            return
        parts, probe = self._parts, differs.probe
        if probe is None or probe.ends:
            parts.saver.invalidated()
        tainted = differs.tainted, differs.generation
        mine_is_wrong = parts.machine.me.worker_id in differs.odd
        if mine_is_wrong and probe is not None:  # its state is right, but its results are not
            parts.application.answer(do.Exit(differs.why.reason))
            return
        if mine_is_wrong:
            parts.application.answer(do.Outvoted(differs.why.reason, *tainted, differs.sound))
            return
        self._queue.drop_holding()
        self._queue.feed(step.UpdateRefused(differs.sound, probe is not None and not probe.ends))
        parts.settler.settle_again(differs.why, *tainted, odd=differs.odd, drift=differs.drift, probe=probe)
