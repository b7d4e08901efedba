"""What one simulated worker holds of the model: states, the gradient of the next step, effects not yet out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from everstep.base.extents import Extents
from everstep.base.plan import WorkerKey
from everstep.protocol.driver.operations import GatheredRecords
from everstep.protocol.step_types import Key, Record
from everstep.sim.checks import Checks
from everstep.sim.model import Blocks, SimGradient, SimJob, flipped, initial, update, without


@dataclass(frozen=True)
class SimCopy:
    """State of some stages: everything a worker needs to be at `position`, effects not yet released included."""

    position: Key
    records: Mapping[int, Record]
    states: Mapping[int, Blocks]
    effects: tuple[tuple[int, int], ...] = ()
    gathers: GatheredRecords = field(default_factory=dict)


class SimState:
    """Of the stages that a worker holds, all of one step. `records`: of that step's agree, as far as known."""

    def __init__(self, me: WorkerKey, job: SimJob, checks: Checks) -> None:
        self.me = me
        self.checks = checks
        self.at = 0
        self.stages = {stage: initial(stage) for stage in range(job.stages)}
        self.records: Mapping[int, Record] = {}
        self.gradients: tuple[int, dict[int, SimGradient]] | None = None
        self.effects: dict[int, int] = {}
        self._all = range(job.stages)

    def build(self) -> None:
        """What nobody has trained can be built."""
        if self.at == 0:
            self.stages = {k: self.stages.get(k, initial(k)) for k in self._all}

    def flip(self, stage: int) -> None:
        """A bit of a stage's state flips."""
        self.stages[stage] = flipped(self.stages[stage])

    def lose(self, stage: int, lost: Extents) -> None:
        """Blocks of a stage are gone."""
        self.stages[stage] = without(self.stages[stage], lost)

    def reduced(self, step: int, gradients: dict[int, SimGradient]) -> None:
        """The gradient of a step is complete, for all own stages."""
        for stage, gradient in gradients.items():
            if None in self.stages[stage]:
                continue
            self.checks.exact.reduced(self.me, step, stage, self.stages[stage], gradient)
        self.gradients = (step, gradients)

    def gradient(self, step: int) -> dict[int, SimGradient]:
        """That of the step, which must be the next one."""
        if self.gradients is None or self.gradients[0] != step or self.at != step - 1:
            raise AssertionError(f"{self.me} at {self.at} is to apply step {step} with {self.gradients}")
        return self.gradients[1]

    def apply(self, step: int, records: Mapping[int, Record], gradients: Mapping[int, SimGradient]) -> None:
        """One step further; stages that are not named are dropped."""
        self.at, self.records = step, records
        self.stages = {k: update(self.stages[k], step, gradient) for k, gradient in gradients.items()}
        self._check()
        self.effects[step] = self.checks.exact.effect(step)

    def copy(
        self, position: Key, records: Mapping[int, Record], gathers: GatheredRecords, stages: Iterable[int]
    ) -> SimCopy:
        """What a peer needs to be where this worker is."""
        effects = ((self.at, self.checks.exact.effect(self.at)),) if self.at else ()
        return SimCopy(position, records, {k: self.stages[k] for k in stages}, effects, gathers)

    def install(self, copy: SimCopy, only: bool = False) -> None:
        """Become a copy; stages of the same step that are not part of it stay, unless `only`."""
        step = copy.position.step
        kept = self.stages if step == self.at and not only else {}
        if step != self.at:
            self.gradients = None
        self.at, self.stages = step, {**kept, **copy.states}
        agreed = copy.gathers.get(Key(step, 0)) or ({} if copy.position.seq else copy.records)
        self.records = agreed or (self.records if kept else {})
        self.effects.update(copy.effects)
        self._check()

    def release(self, step: int, position: Key) -> None:
        """The effects of a step, and of older ones, leave the process."""
        released = self.checks.effects.released.get(self.me, 0)
        for held in sorted(s for s in self.effects if s <= step):
            effect = self.effects.pop(held)
            if held > released:
                self.checks.effects.release(self.me, position, held, effect)

    def _check(self) -> None:
        for stage, state in self.stages.items():
            self.checks.exact.state(self.me, self.at, stage, state)
