"""What makes one pipeline schedule differ from another, as data. Pure.

In all of them a worker does some forward passes first, then forward and backward passes in turn, then the backward
passes that are left; `placement.schedules` makes the lists. A kind says how many passes are ahead, and in which order
the chunks have their turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Shape(NamedTuple):
    """What a stage worker's list is made for. behind: how many other workers come after this one on the way."""

    stages: int
    behind: int
    micro_batches: int
    chunks: int


class Fit(NamedTuple):
    """Numbers of micro-batches that a kind is for, in words, and those nearest to one that is not among them."""

    wanted: str
    nearest: tuple[int, ...]


@dataclass(frozen=True)
class ScheduleKind:
    """One schedule.

    name: as in the config. about: what it is good for. ahead: forward passes before the first backward pass. group: how
    many micro-batches go through one chunk before the next chunk has its turn. unlooped: None: one chunk per stage;
    else it needs several, and this is the schedule that takes one. fits: (stages, micro-batches) -> None if that many
    are possible.
    """

    name: str
    about: str
    ahead: Callable[[Shape], int]
    group: Callable[[Shape], int] = lambda shape: shape.micro_batches
    unlooped: str | None = None
    fits: Callable[[int, int], Fit | None] = lambda stages, micro_batches: None
