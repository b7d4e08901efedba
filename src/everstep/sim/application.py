"""The user's loop in the simulation: a step, the gathers that belong after it, the next step; at the end it says so."""

from __future__ import annotations

from everstep.base.plan import WorkerKey
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.saves import SaveAsked
from everstep.sim.model import SimJob, evaluates

METRIC = "score"
"""What every other gather is about: how good the state is."""


class SimApplication:
    """What is asked after each answer."""

    def __init__(self, me: WorkerKey, job: SimJob) -> None:
        self.me = me
        self.job = job
        self.step = 0
        self.gathers = 0
        self.evaluated = False

    def next(self, answer: do.Answer | None) -> do.Ask:
        """None: before the first ask."""
        match answer:
            case None:
                return do.JoinAsked()
            case do.Arrived(step) | do.Stepped(step) | do.WentBack(step):
                self.step, self.gathers, self.evaluated = step, 0, False
            case do.GatherDone():
                self.gathers += 1
            case do.Evaluated():
                self.evaluated = True
        if evaluates(self.job, self.step) and not self.evaluated:
            return do.EvaluateAsked()
        if self.gathers < self.job.gathers(self.step):
            if self.gathers % 2:
                return SaveAsked({METRIC: float(self.step % 5)})
            return do.GatherAsked(f"{self.me} {self.step} {self.gathers}".encode())
        return do.StepAsked(self.step + 1) if self.step < self.job.steps else do.EndAsked()
