"""What a worker has: of the state at its position, of states that it could go back to, and of the next step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.base.extents import NONE, WHOLE, Extents
from everstep.protocol.settling import less
from everstep.protocol.step_types import SnapshotsKept, StepEffect


class StatesHeld:
    """States. digest: of the initial one. blocks: by stage, what is held of its state at the position. kept: what this
    worker could go back to. sound: later states than that of this step are tainted; -1: no doubt."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.blocks: Mapping[int, Extents] = {0: WHOLE}
        self.kept = SnapshotsKept()
        self.sound = -1

    @property
    def present(self) -> Mapping[int, Extents]:
        """What it has of the stages of which it has anything; ascending."""
        return {k: blocks for k, blocks in sorted(self.blocks.items()) if blocks}

    def lacks(self, stage: int, share: Extents) -> bool:
        """Whether it has less of a stage than this share."""
        return bool(less(self.blocks.get(stage, NONE), share))

    def keeps(self, event: SnapshotsKept) -> list[StepEffect]:
        """What could be gone back to is this."""
        self.kept = event
        return []

    def becomes(self, blocks: Mapping[int, Extents]) -> None:
        """What is there of the state at the position."""
        self.blocks = dict(blocks)

    def lose(self, stage: int, lost: Extents) -> Extents:
        """Blocks of a stage are gone. Returns what is left of it."""
        left = self.blocks.get(stage, NONE) - lost
        self.blocks = {**self.blocks, stage: left}
        return left

    def begins_with(self, digest: str) -> None:
        """The initial state is another one's."""
        self.digest = digest

    def doubt(self, sound: int) -> None:
        """Later states count for nothing; -1: all do."""
        self.sound = sound


class NextStep:
    """Of the step after the position: lanes, and the reduced gradient.

    lanes: (stage, lane) of results that are held; awaited: of the present `LanesNeeded`, not reported yet. rerun: lanes
    that all compute anew; None: all. gradient_step: that of which the reduced gradient is held, 0 if none; gradients:
    by stage, what it takes to that step; takes: the same, as far as it was said. undone: the newest step that was
    decided, and is done again from the same state.
    """

    def __init__(self) -> None:
        self.lanes: set[tuple[int, int]] = set()
        self.awaited: set[tuple[int, int]] = set()
        self.rerun: frozenset[int] | None = None
        self.gradient_step = 0
        self.gradients: Mapping[int, Extents] = {0: WHOLE}
        self.takes: Mapping[int, Extents] = {}
        self.undone = 0

    def forget(self) -> None:
        """Nothing that has been computed of it counts."""
        self.lanes, self.gradient_step, self.takes = set(), 0, {}

    def is_another(self) -> None:
        """The position is that of another step."""
        self.forget()
        self.rerun = None

    def is_done_again(self, step: int) -> None:
        """It was decided, and not applied."""
        self.undone = step

    def runs(self, rerun: frozenset[int] | None) -> None:
        """All compute these lanes."""
        self.rerun = rerun

    def awaits(self, lanes: Iterable[tuple[int, int]]) -> None:
        """These are asked for, and no others."""
        self.awaited = set(lanes)

    def has(self, stage: int, lane: int) -> None:
        """One has been computed; it may not be one that is asked for."""
        self.lanes.add((stage, lane))

    def lose_lanes(self, lanes: Iterable[tuple[int, int]]) -> None:
        """Results are not held any more."""
        self.lanes -= set(lanes)

    def will_take(self, blocks: Mapping[int, Extents]) -> None:
        """What the gradient that is being reduced takes to its step."""
        self.takes = blocks

    def said_to_take(self) -> Mapping[int, Extents]:
        """What was said of the reduction that has ended; nothing of one that comes after it."""
        takes, self.takes = self.takes, {}
        return takes

    def reduced(self, step: int, gradients: Mapping[int, Extents]) -> None:
        """Its reduced gradient is held."""
        self.gradient_step, self.gradients = step, gradients

    def lose_blocks(self, stage: int, left: Extents) -> None:
        """The gradient cannot be applied to what is left of a stage if that lacks blocks that it is for."""
        self.gradients = {k: part for k, part in self.gradients.items() if k != stage or not less(left, part)}
        if not self.gradients:
            self.gradient_step = 0
