"""Everything that a worker's step machine knows, and the changes that concern several parts of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.base.extents import NONE
from everstep.base.plan import WorkerKey
from everstep.protocol.step_phases import Phase
from everstep.protocol.step_types import Discard, Holding, Key, Record, StepEffect
from everstep.protocol.stepping.decisions import Decisions
from everstep.protocol.stepping.own_plans import Plans
from everstep.protocol.stepping.states_held import NextStep, StatesHeld


class Known:
    """phase: what the worker is doing; me: who it is."""

    def __init__(self, me: WorkerKey, digest: str) -> None:
        self.me = me
        self.phase = Phase.WAITING
        self.plans = Plans(me)
        self.decisions = Decisions()
        self.held = StatesHeld(digest)
        self.next = NextStep()
        self._before = self.held.blocks
        self._whole: tuple[object, object, tuple[int, ...]] = None, None, ()  # stages, and what they follow from

    @property
    def step(self) -> int:
        """Updates applied or being applied."""
        return self.decisions.position.step

    def goes(self, phase: Phase) -> None:
        self.phase = phase

    def lacks(self, stage: int) -> bool:
        """Whether this worker has less of a stage than its share by the present plan."""
        return self.held.lacks(stage, self.plans.share(stage, self.held.blocks.get(stage, NONE).of))

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages of whose state at the position this worker has its whole share; ascending."""
        blocks, plan = self.held.blocks, self.plans.plan
        if self._whole[0] is not blocks or self._whole[1] is not plan:  # each event asks, and few change it
            self._whole = blocks, plan, tuple(stage for stage in self.held.present if not self.lacks(stage))
        return self._whole[2]

    def holding(self) -> Holding:
        """What this worker holds now, as it is stated in the present plan. Raises: InvariantViolation without a
        plan."""
        held, coming, decisions = self.held, self.next, self.decisions
        computed = {(stage, lane) for stage, lane in coming.lanes if not self.lacks(stage)}
        return Holding(
            position=decisions.position,
            records=decisions.records,
            gradient_step=coming.gradient_step,
            digest=held.digest if self.step == 0 else "",
            stages=held.present,
            lacking=tuple(sorted({lane for _, lane in self.plans.seats() - computed})),
            snapshots=dict(held.kept.snapshots),
            disk=tuple(sorted(held.kept.disk)),
            gradients=dict(coming.gradients),
            sound=held.sound,
        )

    def move(self, position: Key, records: Mapping[int, Record]) -> list[StepEffect]:
        """The state becomes that of another position, or is about to."""
        self._leave(position.step)
        return self.decisions.move(position, records)

    def take(self, key: Key, records: Mapping[int, Record]) -> list[StepEffect]:
        """Take a decision: the records of all members settle any doubt about the states before it."""
        self._before = self.held.blocks
        self._leave(key.step)
        self.held.doubt(-1)
        return self.decisions.take(key, records)

    def take_back(self, *, intact: bool) -> None:
        """Undo the last decision, a step that is not applied. intact: the state before it counts."""
        self.decisions.take_back(intact=intact)
        if intact:
            self.held.becomes(self._before)

    def _leave(self, step: int) -> None:
        if step != self.step:
            self.next.is_another()

    def doubt(self, sound: int) -> None:
        """States after this step are void, and so is the live state of this step, since copies of it have just
        differed."""
        self.held.doubt(sound)
        if self.step >= sound and self.phase is not Phase.UPDATING:  # that leads beyond it
            self.held.becomes({})
            self.next.forget()

    def lose_all(self) -> None:
        """All have returned to a state before the live one, without this worker: nothing of it counts."""
        self.held.becomes({})
        self.next.forget()
        self.decisions.forget()

    def void(self) -> Discard:
        """Forget all results for the next step. Returns the effect that drops them."""
        self.next.forget()
        return Discard(self.step + 1, undone=True)
