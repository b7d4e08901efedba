"""The end of a job whose coordinator does not answer: who knows of it says so in its record, and all act at that step.

Pure. Apart because it is known before it is agreed, and is carried out in whatever generation there is by then.
"""

from __future__ import annotations

from everstep.base.cause import Why
from everstep.protocol.driver.records import StepOutcome


class EndAlone:
    """asked: why this worker was told to end the job; agreed: why all have decided to, by the records of a step."""

    def __init__(self) -> None:
        self.asked: Why | None = None
        self.agreed: Why | None = None
        self._begun_in = 0

    def ask(self, why: Why) -> None:
        """This worker's host ends the job."""
        self.asked = self.asked or why

    def decided(self, outcome: StepOutcome) -> None:
        """The state is that of this step."""
        if outcome.ends:
            self.agreed = Why(outcome.save_cause, outcome.save[1])

    def begin(self, generation: int) -> bool:
        """Whether the last checkpoint is to be begun in this generation: once in each."""
        due = self.agreed is not None and self._begun_in != generation
        if due:
            self._begun_in = generation
        return due
