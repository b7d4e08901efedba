"""How a driver takes steps: lanes, reduction, decisions, update. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everstep.base.cause import Cause, Why
from everstep.base.ports import Tag
from everstep.protocol import step_types as step
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.comparing import differing, proven_step
from everstep.protocol.driver.outbox import Outbox
from everstep.protocol.driver.policy import Due
from everstep.protocol.driver.records import (
    AgreePayload,
    GatherPayload,
    StepOutcome,
    conclude,
    decode_record,
    encode,
    stages_in,
)
from everstep.protocol.driver.settler import Gathers
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import Key, Record


@dataclass(frozen=True)
class Differs:
    """The records of a step show that the states before it differ. sound: the last step at which they were alike.
    generation: in which the step was decided, the same at all."""

    why: Why
    sound: int
    outvoted: bool
    generation: int


class Stepper:
    """What is done for one decision after the other. lanes: of the global batch; verify_every, begins_after: as for
    `proven_step`."""

    def __init__(
        self, machine: StepMachine, out: Outbox, gathers: Gathers, lanes: int, verify_every: int, begins_after: int
    ) -> None:
        self._machine = machine
        self._out = out
        self._gathers = gathers
        self._lanes = lanes
        self._verify_every = verify_every
        self._begins_after = begins_after
        self._committed_ns = 0
        self._entered = self._generation = 0

    def entered(self, generation: int) -> None:
        """The next decision is the first one of this generation."""
        self._entered = generation

    # ---- towards a decision

    def compute(self, effect: step.LanesNeeded) -> None:
        """Lanes are lacking."""
        plan, lanes = self._machine.plan, effect.lanes
        if plan is not None and plan.stages > 1:
            rerun = self._machine.rerun
            lanes = tuple(range(plan.lanes)) if rerun is None else tuple(sorted(rerun))
        self._out.start(do.Compute, self._machine.generation, plan, effect.step, lanes)

    def reduce(self, effect: step.ReductionDue) -> None:
        """All own lanes are there."""
        self._out.start(do.Reduce, effect.generation, self._machine.plan, effect.step)

    def reduced(self, operation: do.Reduce, payload: AgreePayload, kept: int, due: Due) -> Iterable[step.StepEvent]:
        """The whole reduced gradient is held here. kept: the newest step whose snapshots are where they are to be. due:
        what is taken after this one."""
        data = encode(payload.stamped(self._committed_ns, kept, due))
        return [step.GradientReduced(operation.generation, operation.step, data)]

    def gather(self, data: bytes) -> step.GatherWanted:
        """What the application contributes, as a record says it."""
        return step.GatherWanted(encode(GatherPayload(data, self._committed_ns)))

    def contribute(self, effect: step.SendRecord) -> None:
        """Give the own record to all, and get theirs."""
        tag = Tag("decide", effect.key.step, effect.key.seq)
        self._out.start(do.Exchange, effect.generation, tag, encode(effect.record))

    def all_contributed(self, operation: do.Exchange, payloads: Mapping[int, bytes]) -> Iterable[step.StepEvent]:
        """All records are there."""
        key, generation = Key(operation.tag.step, operation.tag.seq), operation.generation
        return [step.RecordArrived(generation, key, w, decode_record(payloads[w])) for w in sorted(payloads)]

    # ---- from a decision

    def decision(self, generation: int) -> None:
        """One was taken, in this generation, and is to be carried out."""
        self._generation = generation

    def gathered(self, effect: step.Gathered) -> None:
        """A gather is decided."""
        self._decided(effect.key)
        self._gathers.decided(effect.key, effect.records)

    def update(self, effect: step.StepDecided) -> Differs | None:
        """Apply a step, unless its records show that nothing must be applied."""
        outcome = self.outcome(effect.step, effect.records)
        found = self.compare(outcome)
        if found is None:
            self._decided(Key(effect.step, 0))
            generation, stages = self._machine.generation, self._machine.stages
            self._out.start(do.Update, generation, effect.step, effect.records, outcome, stages)
        return found

    def updated(self, operation: do.Update, began_unix_ns: int) -> Iterable[step.StepEvent]:
        """The state is that of the step."""
        self._committed_ns = began_unix_ns
        self._gathers.applied(operation.step, operation.records)
        return [step.Updated(operation.step)]

    def outcome(self, number: int, records: Mapping[int, Record]) -> StepOutcome:
        """What everybody concludes from the records of a step."""
        return conclude(number, self._lanes, records, stages_in(records))

    def compare(self, outcome: StepOutcome) -> Differs | None:
        """None if all copies of the state were alike before the step."""
        found = differing(outcome)
        if found is None:
            return None
        reason, outvoted = found
        mine, sound = self._machine.me.worker_id, self.proven(outcome.step - 1)
        everybody = {who for digests in outcome.digests.values() for who in digests}
        self._out.put(do.Invalidate(sound, first=mine == min(everybody - outvoted, default=mine)))
        reason += f"; all steps after {sound} are tainted" if sound else "; all steps are tainted"
        return Differs(Why(Cause.CORRUPT, reason), sound, mine in outvoted, self._generation)

    def proven(self, number: int) -> int:
        """After so many steps: the newest one whose state has been compared among the workers, and was alike."""
        return proven_step(number, self._verify_every, self._begins_after)

    def _decided(self, key: Key) -> None:
        self._out.put(do.Decided(key, self._generation, first=self._entered == self._generation))
        self._entered = 0
