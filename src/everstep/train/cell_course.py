"""What the head of a cell tells its limbs of a step's passes through stages. Plain data."""

from __future__ import annotations

from typing import Any

import msgspec

PASSES = "passes"


class CellTurn(msgspec.Struct, frozen=True, array_like=True):
    """A pass of several lanes. lanes: by seat, trials under their own numbers; repeats: the lanes that they are; told:
    whether their results are compared with others'; counted: whether they count here. first: the pass of the first seat
    is computed twice."""

    kind: str
    part: int
    stage: int
    keep: bool
    lanes: tuple[int, ...]
    repeats: tuple[int, ...]
    told: tuple[bool, ...]
    counted: tuple[bool, ...]
    first: bool

    def comes(self, parts: int) -> bool:
        """Whether it needs something of another part."""
        return (self.kind == "forward" and self.part > 0) or (self.kind == "backward" and self.part + 1 < parts)

    def goes(self, parts: int) -> bool:
        """Whether another part needs something of it."""
        return (self.kind == "forward" and self.part + 1 < parts) or (self.kind == "backward" and self.part > 0)

    @property
    def summed(self) -> tuple[int | None, ...]:
        """Its lanes as the sums have them."""
        return tuple(lane if counts else None for lane, counts in zip(self.lanes, self.counted, strict=True))


class CellCourse(msgspec.Struct, frozen=True, array_like=True):
    """All that a limb has to know for a command. beside: by stage, what it takes on before the step's lanes, or None;
    points, counted: by stage, the point at which all have met last, and the lanes that count."""

    step: int
    scale: float
    turns: tuple[CellTurn, ...]
    beside: dict[str, Any]
    points: dict[str, int]
    counted: dict[str, list[int]]
