"""What a worker holds: of the state at its position, of states that it could go back to, and of the next step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.base.extents import NONE, WHOLE, Extents
from everstep.protocol.settling import less
from everstep.protocol.step_types import SnapshotsKept, StepEffect


class StatesHeld:
    """The states that a worker holds.

    digest: of the initial state. blocks: by stage, what is held of its state at the position. kept: snapshots and
    checkpoints to go back to. sound: states after this step are tainted; -1: none is. since: the newest generation in
    which the blocks were stated, or were copied as a joiner.
    """

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.blocks: Mapping[int, Extents] = {0: WHOLE}
        self.kept = SnapshotsKept()
        self.sound = -1
        self.since = 0

    @property
    def present(self) -> Mapping[int, Extents]:
        """Blocks held of each stage, without the stages of which nothing is held; ascending."""
        return {k: blocks for k, blocks in sorted(self.blocks.items()) if blocks}

    def lacks(self, stage: int, share: Extents) -> bool:
        """Whether less of a stage is held than this share."""
        return bool(less(self.blocks.get(stage, NONE), share))

    def keeps(self, event: SnapshotsKept) -> list[StepEffect]:
        """Set the snapshots and checkpoints to go back to."""
        self.kept = event
        return []

    def becomes(self, blocks: Mapping[int, Extents]) -> None:
        """Set what is held of the state at the position."""
        self.blocks = dict(blocks)

    def begins_with(self, digest: str) -> None:
        """Set the digest of the initial state, which was copied."""
        self.digest = digest

    def counts_in(self, generation: int) -> None:
        self.since = generation

    def doubt(self, sound: int) -> None:
        """States after this step are void; -1: none is."""
        self.sound = sound


class NextStep:
    """Results for the step after the position: lanes and the reduced gradient.

    lanes: (stage, lane) of results that are held; awaited: those of the present `LanesNeeded` that have not come.
    rerun: lanes that all members compute again; None: all. gradient_step: the step whose reduced gradient is held, 0
    if none; gradients: by stage, the blocks that it takes to that step; takes: the same, as announced before the
    reduction ends. undone: the newest step that was decided and then repeated from the same state.
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
        self.lanes, self.gradient_step, self.takes = set(), 0, {}

    def is_another(self) -> None:
        self.forget()
        self.rerun = None

    def is_done_again(self, step: int) -> None:
        """This step was decided, but not applied."""
        self.undone = step

    def runs(self, rerun: frozenset[int] | None) -> None:
        """Set the lanes that all members compute again."""
        self.rerun = rerun

    def awaits(self, lanes: Iterable[tuple[int, int]]) -> None:
        self.awaited = set(lanes)

    def has(self, stage: int, lane: int) -> None:
        """A lane has been computed; it may be one that is not waited for."""
        self.lanes.add((stage, lane))

    def lose_lanes(self, lanes: Iterable[tuple[int, int]]) -> None:
        self.lanes -= set(lanes)

    def will_take(self, blocks: Mapping[int, Extents]) -> None:
        """Set the blocks that the gradient under reduction takes to its step."""
        self.takes = blocks

    def said_to_take(self) -> Mapping[int, Extents]:
        """Take the announcement for the reduction that has ended, so that it does not count for the next one."""
        takes, self.takes = self.takes, {}
        return takes

    def reduced(self, step: int, gradients: Mapping[int, Extents]) -> None:
        self.gradient_step, self.gradients = step, gradients
