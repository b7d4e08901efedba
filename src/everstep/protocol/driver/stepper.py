"""How a driver takes steps: lanes, reduction, decisions, update; and how it follows those of others. Pure.

A worker that is no member yet copies what donors offer, and follows their steps until a plan has it. Each group of
stages has a donor. What they offer may be of different steps; the older ones are brought to the newest with the steps
that their donors feed, before anything is loaded. Then all stages go on together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from everstep.base.cause import Cause, Why
from everstep.base.errors import check
from everstep.base.ports import Tag
from everstep.protocol import messages as wire
from everstep.protocol import step_types as step
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.outbox import Gathers, Outbox
from everstep.protocol.driver.policy import Due
from everstep.protocol.driver.records import (
    AgreePayload,
    GatherPayload,
    StepOutcome,
    conclude,
    decode_record,
    differing,
    encode,
)
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import Key, Record, StepEvent


class Differs(msgspec.Struct, frozen=True):
    """The records of a step show that the states before it differ. sound: the last step at which they were alike.
    generation: in which the step was decided, the same at all."""

    why: Why
    sound: int
    outvoted: bool
    generation: int


class Stepper:
    """What is done for one decision after the other.

    lanes: of the global batch. verify_every: steps between comparisons of states, 0 for none; each is of the state
    before its step. begins_after: the step whose state the job began with.
    """

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
        self._decided(effect.key, effect.here)
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
        return conclude(number, self._lanes, records)

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
        every = self._verify_every
        return max(0, number // every * every - 1 if every else 0, self._begins_after)

    def _decided(self, key: Key, here: bool = True) -> None:
        first = here and self._entered == self._generation
        self._out.put(do.Decided(key, self._generation, first))
        if first:
            self._entered = 0


@dataclass
class _Feed:
    stages: tuple[int, ...]
    position: Key
    steps: deque[do.Seen] = field(default_factory=deque)
    caught_up: bool = False

    def saw(self, one: do.Seen) -> None:
        """A step, or that there is none."""
        self.caught_up = not one.step
        if one.step:
            self.steps.append(one)


class Joiner:
    """From a ticket to the plan."""

    def __init__(self, out: Outbox, stepper: Stepper, gathers: Gathers) -> None:
        self._out = out
        self._stepper = stepper
        self._gathers = gathers
        self._ticket: wire.Heal | None = None
        self._feeds: list[_Feed] = []
        self._at = 0
        self._adopted = self._said = False

    def begin(self, ticket: wire.Heal) -> None:
        """The coordinator says whom to ask."""
        self._ticket, self._feeds, self._at, self._adopted, self._said = ticket, [], 0, False, False

    def stop(self) -> wire.Heal | None:
        """Follow nobody any more. Returns the ticket by which it did."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._out.put(do.CloseFeeds())
        return ticket

    def go_on(self) -> Differs | None:
        """Begin what is to be done now, if there is a ticket. Returns why a step that was fed must not be applied."""
        ticket = self._ticket
        if ticket is None:
            return None
        generation = ticket.plan.generation
        if not self._feeds:
            self._out.start(do.OpenFeeds, generation, ticket.ticket, groups(ticket))
        elif not self._adopted:
            self._level(generation)
        elif all(feed.steps for feed in self._feeds):
            return self._replay(ticket)
        else:
            self._say_healed(ticket)
            self._out.start(do.Watch, generation)
        return None

    def _level(self, generation: int) -> None:
        """All stages at the newest of the positions, as soon as every feed has come so far."""
        newest = max(feed.position for feed in self._feeds)
        missing = [newest.step - feed.position.step for feed in self._feeds]
        if any(len(feed.steps) < n for feed, n in zip(self._feeds, missing, strict=True)):
            self._out.start(do.Watch, generation)
            return
        passed = (list(feed.steps)[:n] for feed, n in zip(self._feeds, missing, strict=True))
        outcomes = tuple(tuple(self._stepper.outcome(s.step, s.records) for s in steps) for steps in passed)
        self._out.start(do.Adopt, generation, newest, self._stages, outcomes)

    def _replay(self, ticket: wire.Heal) -> Differs | None:
        steps = {feed.steps[0].step for feed in self._feeds}
        check(len(steps) == 1, f"feeds are apart: {sorted(steps)}")
        first = self._feeds[0].steps[0]
        outcome = self._stepper.outcome(first.step, first.records)
        differs = self._stepper.compare(outcome)
        if differs is None:
            plan = ticket.plan
            self._out.start(do.Replay, plan.generation, first.step, first.records, outcome, plan)
        return differs

    def _say_healed(self, ticket: wire.Heal) -> None:
        if not self._said and all(feed.caught_up for feed in self._feeds):
            self._said = True
            self._out.tell(wire.WorkerHealed, ticket=ticket.ticket, step=self._at)

    # ---- operations that have ended

    def opened(self, operation: do.OpenFeeds, positions: Sequence[Key]) -> None:
        """Donors have offered their states."""
        groups = zip(operation.groups, positions, strict=True)
        self._feeds = [_Feed(stages, position) for (_, stages), position in groups]

    def saw(self, operation: do.Watch, seen: Sequence[do.Seen]) -> None:
        """Something has come."""
        for one in seen:
            self._feeds[one.feed].saw(one)

    def adopted(self, operation: do.Adopt, result: do.Copied) -> Iterable[StepEvent]:
        """The state is what was offered."""
        self._adopted, self._at = True, operation.position.step
        for feed, passed in zip(self._feeds, operation.passed, strict=True):
            for _ in passed:
                feed.steps.popleft()
        self._gathers.copied(result.gathers)
        return [step.Followed(operation.position, result.records, operation.stages)]

    def replayed(self, operation: do.Replay) -> Iterable[StepEvent]:
        """The state is one step further."""
        self._at = operation.step
        for feed in self._feeds:
            feed.steps.popleft()
        self._gathers.applied(operation.step, operation.records)
        return [step.Followed(Key(operation.step, 0), operation.records, self._stages)]

    @property
    def _stages(self) -> tuple[int, ...]:
        return tuple(sorted(stage for feed in self._feeds for stage in feed.stages))


def groups(ticket: wire.Heal) -> tuple[tuple[tuple[Any, ...], tuple[int, ...]], ...]:
    """The stages to ask for, by whom to ask: one feed each."""
    donors = {m.worker_id: m for m in ticket.donors}
    holders = ticket.holders or [list(donors)] * len(ticket.stages)
    found: dict[tuple[int, ...], list[int]] = {}
    by_stage: Mapping[int, Sequence[int]] = dict(zip(ticket.stages, holders, strict=True))
    for stage in sorted(by_stage):
        found.setdefault(tuple(i for i in by_stage[stage] if i in donors), []).append(stage)
    return tuple((tuple(donors[i] for i in ids), tuple(stages)) for ids, stages in found.items())
