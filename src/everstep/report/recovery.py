"""A recovery, by its event. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.base.cause import Cause
from everstep.report.wall_time import Stretch, recovery_phases
from everstep.report.words import Event, as_dict, cause, known, number, reason_text, whole_number


@dataclass(frozen=True)
class RecoveryFact:
    """From a fault to the next committed step, which is `step` (`told`: by that commit's own event, else what is likely
    so far); `phases` are its parts, one after another."""

    begin_ns: int
    end_ns: int
    generation: int
    step: int
    worker_id: int | None
    cause: Cause
    reason: str
    duration_s: float
    phases_s: dict[str, float]
    phases: tuple[Stretch, ...]
    told: bool = False


def recovery_of(event: Event, time_ns: int) -> RecoveryFact:
    """Fact of a `recovery_completed` event of that time."""
    spent = as_dict(event.get("phases_s"))
    phases_s, duration_s = {k: number(v) for k, v in spent.items()}, max(0.0, number(event.get("duration_s")))
    step = whole_number(event.get("step")) + 1  # most often the commit is not counted yet
    whose = (whole_number(event.get("generation")), step, known(event.get("worker_id")))
    phases = recovery_phases(time_ns, duration_s, phases_s)
    begin_ns, why = time_ns - round(duration_s * 1e9), (cause(event), reason_text(event.get("reason")))
    return RecoveryFact(begin_ns, time_ns, *whose, *why, duration_s, phases_s, tuple(phases))
