"""The exchange of parameters after an update, where members of a pool have updated different ones. Pure."""

from __future__ import annotations

from everstep.protocol.driver import operations as do
from everstep.protocol.driver.outbox import Outbox
from everstep.protocol.driver.records import StepOutcome
from everstep.protocol.step_machine import StepMachine


class Spreader:
    """Starts the exchange. If nobody reads the state before the next lanes, it goes on beside whatever follows, and
    a caller that needs all of the state waits for its end."""

    def __init__(self, machine: StepMachine, out: Outbox) -> None:
        self._machine, self._out = machine, out
        self._cut_off = 0

    def due(self, outcome: StepOutcome) -> bool:
        """Whether members have to send each other the parameters that each has updated. If the plan is about to change,
        or was not entered yet, they send them when they settle."""
        machine = self._machine
        if not machine.settled or machine.switch is not None or outcome.nonfinite.left_out:
            return False
        plan = machine.current_plan()
        return bool({shard.stage for shard in plan.shards} & set(plan.stages_of(machine.me.worker_id)))

    def beside(self) -> None:
        """Begin while the next lanes are computed."""
        machine = self._machine
        self._out.put(do.BeginSpread(machine.generation, machine.current_plan(), machine.step))

    def wait(self) -> None:
        """Exchange them now, or wait until they have come; not again in a generation in which that was cut."""
        machine = self._machine
        if self._cut_off != machine.generation:
            self._out.start(do.Spread, machine.generation, machine.current_plan(), machine.step)

    def cut_off(self, operation: do.Spread) -> None:
        """They did not come: the plan that follows sees to that."""
        self._cut_off = operation.generation
