"""The step whose state a worker has: whether its loss and gradient were finite, and what else its records say. Pure.

Apart because two parts need it: the next record counts non-finite steps in a row, and the application may have to
stop, or to give its state to joiners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from everstep.protocol.driver import operations as do
from everstep.protocol.driver.nonfinite import FINITE, Nonfinite
from everstep.protocol.driver.outbox import Gathers
from everstep.protocol.driver.records import StepOutcome, asked_in
from everstep.protocol.step_machine import StepMachine


class LastStep:
    """Records of the last step, read. gathers: those after it. conclude: makes the records of a step into its
    outcome."""

    def __init__(
        self, machine: StepMachine, gathers: Gathers, conclude: Callable[[int, do.Records], StepOutcome]
    ) -> None:
        self._machine = machine
        self.gathers = gathers
        self._conclude = conclude
        self._judged: tuple[do.Records, Nonfinite] = {}, FINITE
        self._done = 0

    def did(self, outcome: StepOutcome, records: do.Records) -> None:
        self._done, self._judged = outcome.step, (records, outcome.nonfinite)

    @property
    def nonfinite(self) -> Nonfinite:
        """Verdict on the step's loss and gradient, if its records are known."""
        number = self._machine.step
        records = self.gathers.of_update(number)
        if records is not self._judged[0]:
            self._judged = records, self._conclude(number, records).nonfinite if records else FINITE
        return self._judged[1]

    @property
    def asked(self) -> Mapping[int, frozenset[int]]:
        """By ticket of a joiner, the members that it had asked before the step, if its records are known."""
        return asked_in(self.gathers.of_update(self._machine.step))

    @property
    def ends_job(self) -> str:
        """Why the job ends with this step; "" if it goes on. A step that this worker did not apply itself may be the
        last step of an earlier run of the job."""
        return self.nonfinite.ends if self._done == self._machine.step else ""
