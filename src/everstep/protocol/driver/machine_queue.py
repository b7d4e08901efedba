"""Events for the step machine, handed over at once, and its effects, carried out one by one. Pure."""

from __future__ import annotations

from collections import deque

from everstep.protocol import step_types as step
from everstep.protocol.driver.stepper import Stepper
from everstep.protocol.step_machine import StepMachine

_DECIDED = step.StepDecided | step.Gathered | step.Release | step.Discard


class MachineQueue:
    """Effects that have not been carried out yet; true if there are any."""

    def __init__(self, machine: StepMachine, stepper: Stepper) -> None:
        self._machine = machine
        self._stepper = stepper
        self._effects: deque[step.StepEffect] = deque()

    def __bool__(self) -> bool:
        return bool(self._effects)

    def feed(self, *events: step.StepEvent) -> None:
        """Hand events to the machine and queue its effects."""
        for event in events:
            effects = self._machine.handle(event)
            if not effects:
                continue
            kinds = {type(e) for e in effects}
            if step.Leave in kinds or step.Regroup in kinds:
                self.drop_transfers()
            if step.StepDecided in kinds or step.Gathered in kinds:
                self._stepper.decision(self._machine.generation)  # a plan may come before it is carried out
            self._effects.extend(effects)

    @property
    def gathered(self) -> bool:
        """Whether a gather is decided, and the application about to be answered."""
        return any(isinstance(effect, step.Gathered) for effect in self._effects)

    def next(self) -> step.StepEffect:
        return self._effects.popleft()

    def drop_transfers(self) -> None:
        """Drop effects that need the old generation; decisions are still carried out."""
        self._effects = deque(e for e in self._effects if isinstance(e, _DECIDED))

    def drop_holding(self) -> None:
        """Drop queued statements of holdings: another generation makes new ones."""
        self._effects = deque(e for e in self._effects if not isinstance(e, step.SendHolding))
