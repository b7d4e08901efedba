"""What a user's loop says of a lane or a step: losses by `step.backward`, values by `step.log` and `run.log`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from everstep.base.errors import Misused

MOST_LOGGED = 32
"""Names in one step."""
_LONGEST_NAME = 60


def sums(given: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Sum and count of each value. Raises: Misused for something else, or a name that cannot be shown."""
    found: dict[str, tuple[float, float]] = {}
    for name, value in given.items():
        _check_name("step.log", name)
        try:
            total, count = value
            found[name] = _number(total), _number(count)
        except (TypeError, ValueError, RuntimeError):
            raise Misused(
                f"step.log({name}=...): expected (sum, count) over the batch, got {_shown(value)}: give e.g. "
                f"{name}=(value * len(x), len(x)), or use run.log for numbers of a whole step"
            ) from None
    return found


def numbers(given: Mapping[str, Any]) -> dict[str, float]:
    """Each value as a number. Raises: Misused for something else, too many, or a name that cannot be shown."""
    found: dict[str, float] = {}
    for name, value in given.items():
        _check_name("run.log", name)
        try:
            found[name] = _number(value)
        except (TypeError, ValueError, RuntimeError):
            raise Misused(f"run.log({name}=...): expected a number, got {_shown(value)}: give one number") from None
    if len(found) > MOST_LOGGED:
        raise Misused(f"run.log: expected at most {MOST_LOGGED} names, got {len(found)}: log fewer")
    return found


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _check_name(of: str, name: str) -> None:
    if not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
        raise Misused(
            f"{of}: expected a name of 1 to {_LONGEST_NAME} printable characters, got {name!r:.80}: rename it"
        )


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(value, tuple | list) and any(hasattr(one, "shape") for one in value[:2]):
        return f"({', '.join(map(_shown, value[:2]))})"
    return f"{type(value).__name__} of shape {tuple(shape)}" if shape is not None else f"{value!r:.60}"


@dataclass
class LaneTotals:
    """Sums over what the loop says of one lane. calls: of `step.backward`. weight: None before the first."""

    loss: float = 0.0
    weight: float | None = None
    calls: int = 0
    logged: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, loss: float, weight: float) -> None:
        """Add a loss. Raises: Misused for another weight than that of an earlier one of this lane."""
        if self.weight not in (None, weight):
            raise Misused(
                f"step.backward was called for one batch with the weights {self.weight:g} and {weight:g}: the losses "
                "of a batch are added up, and share one weight: give all of them the same, or add them up yourself"
            )
        self.loss, self.weight, self.calls = self.loss + loss, weight, self.calls + 1

    def log(self, found: Mapping[str, tuple[float, float]]) -> None:
        """Add sums and counts. Raises: Misused for too many names."""
        for name, (total, count) in found.items():
            before = self.logged.get(name, (0.0, 0.0))
            self.logged[name] = before[0] + total, before[1] + count
        if len(self.logged) > MOST_LOGGED:
            raise Misused(f"step.log: expected at most {MOST_LOGGED} names, got {len(self.logged)}: log fewer")
