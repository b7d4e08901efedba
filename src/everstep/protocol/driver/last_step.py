"""The step whose state a worker has, as far as what was not finite in it says what comes next. Pure.

Apart because two look at it: the next record says how many such steps there were in a row, and the application may have
to go no further.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.protocol.driver import operations as do
from everstep.protocol.driver.nonfinite import FINITE, Nonfinite
from everstep.protocol.driver.outbox import Gathers
from everstep.protocol.driver.records import StepOutcome
from everstep.protocol.step_machine import StepMachine


class LastStep:
    """Records of the last step, read. gathers: after it. conclude: the conclusion from records of a step."""

    def __init__(
        self, machine: StepMachine, gathers: Gathers, conclude: Callable[[int, do.Records], StepOutcome]
    ) -> None:
        self._machine = machine
        self.gathers = gathers
        self._conclude = conclude
        self._judged: tuple[do.Records, Nonfinite] = {}, FINITE
        self._done = 0

    def did(self, outcome: StepOutcome, records: do.Records) -> None:
        """This worker has carried out a step."""
        self._done, self._judged = outcome.step, (records, outcome.nonfinite)

    @property
    def nonfinite(self) -> Nonfinite:
        """Whatever was not finite in the step, if its records are known."""
        number = self._machine.step
        records = self.gathers.of_update(number)
        if records is not self._judged[0]:
            self._judged = records, self._conclude(number, records).nonfinite if records else FINITE
        return self._judged[1]

    @property
    def ends_job(self) -> str:
        """Why the job ends with it; "" if it goes on. A step that this worker has not carried out itself may be that
        with which an earlier run of the job has ended."""
        return self.nonfinite.ends if self._done == self._machine.step else ""
