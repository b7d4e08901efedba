"""The end of a job whose coordinator does not answer: a worker that knows of it says so in its record, and all
members act at that step.

Pure. Apart because a worker knows of the end before all have agreed on it, and carries it out in a later generation.
"""

from __future__ import annotations

from everstep.base.cause import Why
from everstep.protocol.driver.records import StepOutcome


class EndAlone:
    """asked: why this worker was told to end the job; agreed: why all members decided to end it, by the records of a
    step."""

    def __init__(self) -> None:
        self.asked: Why | None = None
        self.agreed: Why | None = None
        self._begun_in = 0

    def ask(self, why: Why) -> None:
        """This worker's host ends the job."""
        self.asked = self.asked or why

    def decided(self, outcome: StepOutcome) -> None:
        """Note whether the records of an applied step say that the job ends."""
        if outcome.ends:
            self.agreed = Why(outcome.save_cause, outcome.save[1])

    def begin(self, generation: int) -> bool:
        """Whether the last checkpoint is to be begun in this generation: once in each."""
        due = self.agreed is not None and self._begun_in != generation
        if due:
            self._begun_in = generation
        return due
