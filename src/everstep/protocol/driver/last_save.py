"""How a worker takes a last checkpoint and leaves: because a plan says so, or alone if no coordinator answers. Pure."""

from __future__ import annotations

from everstep.base.cause import Why
from everstep.protocol import messages as wire
from everstep.protocol import step_types as step
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver_parts import DriverParts
from everstep.protocol.driver.machine_effects import MachineEffects


class LastSave:
    """Takes the last checkpoint, and ends the job if no coordinator does."""

    def __init__(self, parts: DriverParts, effects: MachineEffects) -> None:
        self._parts = parts
        self._effects = effects

    @property
    def is_agreed(self) -> bool:
        """Whether all members have agreed to end the job without a coordinator. The application hears of no further
        step then."""
        return self._parts.saver.ending.agreed is not None

    def begin(self) -> None:
        """Start the last checkpoint if all have agreed to end and this worker has settled; once in each generation."""
        parts, ending = self._parts, self._parts.saver.ending
        machine, application = parts.machine, parts.application
        if ending.agreed is not None and application.settled and ending.begin(machine.generation):
            save = parts.saver.boundary(ending.agreed, past=application.past)
            parts.out.start(do.SaveLast, machine.generation, machine.current_plan(), machine.step, save)

    def taken(self, operation: do.SaveLast, where: str) -> None:
        """The last checkpoint is at `where`; "" if it could not be completed."""
        parts, agreed = self._parts, self._parts.saver.ending.agreed
        for effect in parts.machine.handle(step.StepSaved(operation.step)) if where else ():
            self._effects.carry_out(effect)  # at once: nothing is carried out any more when this worker leaves
        parts.saver.last(operation, where)
        if agreed is not None:
            self.leave(agreed)
        else:
            parts.out.start(do.Linger, operation.generation)

    def lingered(self, operation: do.Linger, result: None) -> None:
        """The wait after the last checkpoint is over: the coordinator that asked for it may be gone, so the worker
        may end the job. If it goes on, its checkpoint is no longer the last."""
        self._parts.out.withdraw(wire.Saved)
        asked = self._parts.saver.ending.asked
        if asked is not None and self._parts.application.ended is None:
            self.leave(asked)

    def leave(self, why: Why) -> None:
        """End the job here, without its coordinator."""
        over = wire.JobEnded(state="interrupted", cause=why.cause, reason=why.reason)
        self._parts.application.end(over)
