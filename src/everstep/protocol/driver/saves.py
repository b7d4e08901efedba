"""What a driver asks, and is told, about checkpoints: effects, events, and what the application asks. Pure data.

Apart from other operations because beside the driver only those know them who take checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.base.cause import Why
from everstep.base.plan import Plan
from everstep.protocol.driver.policy import Due
from everstep.protocol.step_types import Record


@dataclass(frozen=True)
class Save:
    """Begin a checkpoint of the state as it is, that of this step. Where this worker is the job's leader, `PartsThere`
    says when all has come that is to go into it, and `SaveEnded` what became of it.

    boundary: it does not follow directly upon the update, so the application may have learnt something since; then one
    that is on disk already is not taken again. past: it is through with the step.
    """

    plan: Plan
    step: int
    due: Due
    records: Mapping[int, Record]
    boundary: bool = False
    past: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AbandonSave:
    """The checkpoint that is incomplete will never be complete. plan: of the generation that is the reason, if one is:
    then what is still to be written of the own part is copied now."""

    why: Why
    plan: Plan | None


@dataclass(frozen=True)
class PartsThere:
    """Of a checkpoint nothing is lacking any more, or it was given up: the next one may begin."""

    step: int


@dataclass(frozen=True)
class SaveEnded:
    """A checkpoint is on disk, or will never be. reason: it was taken; or was not completed. where: it is. cost_s: what
    one costs, if that is known by now."""

    step: int
    ok: bool
    reason: str
    where: str = ""
    cost_s: float | None = None


@dataclass(frozen=True)
class SaveAsked:
    """The application has evaluated, and a checkpoint may follow from what came of it; each member asks, in the same
    order as it gathers. Answered as `GatherAsked`. stored: the best value by now according to what is on disk, if
    anything is; from the job's leader alone."""

    metrics: Mapping[str, float]
    stored: float | None = None
