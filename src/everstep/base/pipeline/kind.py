"""Differences between pipeline schedules, as data. Pure.

In all schedules a worker does some forward passes first, then forward and backward passes in turn, then the remaining
backward passes; `placement.schedules` makes the lists. A kind says how many passes are ahead, and in which order the
chunks take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Shape(NamedTuple):
    """Inputs of a stage worker's list. behind: number of other workers that come after this one on the way."""

    stages: int
    behind: int
    micro_batches: int
    chunks: int


class Fit(NamedTuple):
    """Numbers of micro-batches that a kind accepts, in words, and those nearest to a refused one."""

    wanted: str
    nearest: tuple[int, ...]


@dataclass(frozen=True)
class ScheduleKind:
    """One schedule.

    name: as in the config. about: its purpose. ahead: forward passes before the first backward pass. group: number of
    micro-batches that go through one chunk before the next chunk takes its turn. unlooped: None: one chunk per stage;
    else it needs several, and this is the schedule that takes one. fits: (stages, micro-batches) -> None if that many
    are possible.
    """

    name: str
    about: str
    ahead: Callable[[Shape], int]
    group: Callable[[Shape], int] = lambda shape: shape.micro_batches
    unlooped: str | None = None
    fits: Callable[[int, int], Fit | None] = lambda stages, micro_batches: None
