"""Values that are told with each step beside its loss: the gradient norm, and what the user's loop logs. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite, nan

from everstep.report.series import POINTS, Series
from everstep.report.words import Event, as_dict, one_line

GRADIENT_NORM = "Gradient norm"
_MOST = 32
_RULES = ("last", "mean")


@dataclass
class Logged:
    """`series`: columns (time_s, value) by name; values that are not finite have no place in a curve. `newest`: the
    newest value of each, finite or not."""

    series: dict[str, Series] = field(default_factory=dict)
    newest: dict[str, float] = field(default_factory=dict)

    def take(self, event: Event, step: int, time_ns: int) -> None:
        """Take in a committed step, or numbers of the leader after it."""
        if "grad_norm" in event:
            self._add(GRADIENT_NORM, event["grad_norm"], step, time_ns)
        for name, value in as_dict(event.get("metrics")).items() if "metrics" in event else ():
            self._add(one_line(name, 60), value, step, time_ns)

    def _add(self, name: str, value: object, step: int, time_ns: int) -> None:
        value = nan if value is None else value  # an event has null for what is not finite
        if type(value) not in (int, float) or (name not in self.newest and len(self.newest) >= _MOST):
            return
        number = float(value)  # type: ignore[arg-type]
        self.newest[name] = number
        if isfinite(number):
            self.series.setdefault(name, Series(_RULES, POINTS)).add(step, (time_ns / 1e9, number))

    def finite(self) -> dict[str, float | None]:
        """The newest values as JSON can hold them: None for what is not finite."""
        return {name: value if isfinite(value) else None for name, value in self.newest.items()}
