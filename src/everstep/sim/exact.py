"""P1: what a worker holds, hands on and leaves behind is that of the undisturbed run, unless a bit has flipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.base.plan import WorkerKey
from everstep.sim.model import Blocks, SimGradient, SimJob, merged, undisturbed, update, wrong
from everstep.sim.promise import require


@dataclass
class Corruption:
    """What is known of flipped bits. verify_every: steps between comparisons. unnoticed: all copies of every stage were
    alike in a comparison, and some were wrong: then nobody can know."""

    verify_every: int
    flipped: WorkerKey | None = None
    found_by: set[WorkerKey] = field(default_factory=set)
    unnoticed: bool = False

    def flip(self, who: WorkerKey) -> None:
        """A bit of its copy has flipped."""
        self.flipped = who

    def escaped(self) -> None:
        """A comparison has shown nothing, of copies that are wrong."""
        self.unnoticed = True

    def due(self, step: int) -> bool:
        """Whether states are compared before the step."""
        return bool(self.verify_every) and step % self.verify_every == 0


class Exact:
    """The states of the undisturbed run, and who must have which."""

    def __init__(self, job: SimJob, corruption: Corruption) -> None:
        self.job = job
        self.corruption = corruption
        self.states = undisturbed(job)
        self.finals: list[dict[int, Blocks]] = []

    def state(self, who: WorkerKey, step: int, stage: int, state: Blocks) -> None:
        """A worker's state of a stage, every block that is there, is now that of `step`."""
        known = 0 <= step <= self.job.steps
        right = known and (wrong(state) or self.states[step][stage] == merged(state, self.states[step][stage]))
        require(right, "P1", f"{who}: wrong state of stage {stage} at step {step}")

    def reduced(self, who: WorkerKey, step: int, stage: int, state: Blocks, gradient: SimGradient) -> None:
        """A worker holds the reduced gradient of `step`, computed from `state`."""
        after = update(state, step, gradient)
        right = wrong(after) or after == self.states[step][stage]
        require(right, "P1", f"{who}: wrong gradient of stage {stage} in step {step}")

    def effect(self, step: int) -> int:
        """What a step would write into the ledger: a function of the step."""
        return hash((step, *sorted(self.states[step].values())))

    def stands(self, who: WorkerKey, step: int, at: int) -> None:
        """An application is told that the state is that of `step`."""
        require(step == at, "P1", f"{who} is told of step {step}, its state is that of {at}")

    def final(self, who: WorkerKey, step: int, states: Mapping[int, Blocks]) -> None:
        """The leader of the first stage wrote its part of the result; the others' are checked like any state."""
        require(step == self.job.steps, "P1", f"{who} finished at step {step} of {self.job.steps}")
        for stage, state in states.items():
            self.state(who, step, stage, state)
            require(None not in state, "P1", f"{who} finished without blocks of stage {stage}")
            unnoticed = wrong(state) and not self.corruption.unnoticed
            require(not unnoticed, "P1", f"{who} finished with a wrong state of stage {stage}")
        self.finals.append(dict(states))

    def saved(self, step: int, states: Mapping[int, Blocks]) -> None:
        """A checkpoint that was asked for is on disk."""
        right = states.keys() == self.states[step].keys() and all(
            wrong(state) or state == self.states[step][stage] for stage, state in states.items()
        )
        require(right, "P1", f"the checkpoint of step {step} holds {states}")
