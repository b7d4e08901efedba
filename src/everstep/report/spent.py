"""A worker's use of time and bytes between two of its samples, per step and per second. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep.report.words import as_dict, number, one_line, whole_number

COMMUNICATION = ("transfer", "reduce", "agree")
WORK = ("load", "forward", "backward", "update")
_MOST_OPERATIONS = 8


@dataclass(frozen=True)
class Spent:
    """A worker's time and bytes between two samples. step_s, communication_s: per step, None if none was done; busy:
    the share of time in passes, loading and updates; bytes_per_s: sent to others, by operation."""

    step_s: float | None
    communication_s: float | None
    busy: float | None
    bytes_per_s: Mapping[str, float]


def spent_between(old: Mapping[str, Any], new: Mapping[str, Any], over_s: float) -> Spent:
    """old, new: rows of samples of the same life of a worker, `over_s` apart."""

    def grown(phases: tuple[str, ...]) -> float:
        before, after = as_dict(old.get("seconds")), as_dict(new.get("seconds"))
        return sum(max(0.0, number(after.get(phase)) - number(before.get(phase))) for phase in phases)

    steps = whole_number(new.get("step")) - whole_number(old.get("step"))
    sent, before = as_dict(new.get("bytes")), as_dict(old.get("bytes"))
    names = list(sent)[:_MOST_OPERATIONS]
    return Spent(
        over_s / steps if steps > 0 else None,
        grown(COMMUNICATION) / steps if steps > 0 else None,
        min(1.0, grown(WORK) / over_s) if over_s > 0 else None,
        {one_line(op, 40): max(0.0, number(sent[op]) - number(before.get(op))) / over_s for op in names},
    )
