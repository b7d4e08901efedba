"""How a driver takes steps (lanes, reduction, decisions, update), and how a joiner follows the steps of others.
Pure.

A joiner copies the state that donors offer, and follows their steps until a plan includes it. Each group of stages
has a donor. The donors may offer different steps; the steps that they feed bring the older offers to the newest,
before anything is loaded. Then all stages go on together. Where no member has all of a stage, see `joint_feeds`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from everstep.base.cause import Cause, Why
from everstep.base.errors import check
from everstep.base.extents import Extents
from everstep.base.plan import Plan
from everstep.base.ports import Tag
from everstep.placement.probes import owed
from everstep.placement.shards import share
from everstep.protocol import messages as wire
from everstep.protocol import step_types as step
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.comparing import Comparing, Statements
from everstep.protocol.driver.joint_feeds import coming, groups, joint_asks
from everstep.protocol.driver.last_step import LastStep
from everstep.protocol.driver.outbox import Gathers, Outbox
from everstep.protocol.driver.policy import Due
from everstep.protocol.driver.probing import ProbeVerdict, Probing
from everstep.protocol.driver.records import (
    AgreePayload,
    GatherPayload,
    StageSection,
    StepOutcome,
    decode_record,
    encode,
    last_states,
)
from everstep.protocol.following import StatesAlike
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import Key, Record, StepEvent


class Differs(msgspec.Struct, frozen=True):
    """The records of a decision show that states differ; or, with `probe`, that results computed from them differ.

    tainted: the step that cannot be done with these states. sound: the last step at which states were alike.
    generation: in which this was decided, the same at all members. odd: the workers whose state or lane is wrong.
    drift: see `Disagreement`.
    """

    why: Why
    tainted: int
    sound: int
    odd: frozenset[int]
    drift: bool
    generation: int
    probe: ProbeVerdict | None = None


class Stepper:
    """Carries out one decision after the other.

    conclude: turns the records of a step into its outcome. comparing, probing: when states and lanes are compared,
        and the results. last: the step whose state this worker has.
    """

    def __init__(
        self,
        machine: StepMachine,
        out: Outbox,
        gathers: Gathers,
        conclude: Callable[[int, do.Records], StepOutcome],
        comparing: Comparing,
        probing: Probing,
    ) -> None:
        self._machine = machine
        self._out = out
        self._gathers = gathers
        self.outcome = conclude
        self._comparing = comparing
        self._probing = probing
        self._committed_ns = 0
        self._entered = self._generation = 0
        self._tried = (0, 0)  # generation and step
        self._after: step.ReductionDue | None = None
        self.last = LastStep(machine, gathers, conclude)

    def entered(self, generation: int) -> None:
        """A generation is entered: its next decision is its first one."""
        self._entered = generation

    # ---- towards a decision

    def compute(self, effect: step.LanesNeeded) -> None:
        """Start to compute missing lanes. For a split model the trials, which every member computes, come with them."""
        machine, plan, lanes = self._machine, self._machine.current_plan(), effect.lanes
        trials, rerun = self._probing.trials(effect.step, plan), machine.rerun
        if plan.stages > 1:
            lanes = tuple(range(plan.lanes)) if rerun is None else tuple(sorted(rerun))
            trials = trials if len(lanes) == plan.lanes else ()
        if trials:
            self._tried = machine.generation, effect.step
        self._out.start(do.Compute, machine.generation, plan, effect.step, lanes, trials)

    def computed(self, operation: do.Compute) -> Iterable[step.StepEvent]:
        """The lanes are computed: what waited for them goes on."""
        effect, self._after = self._after, None
        if effect is not None and effect.generation == operation.generation:
            self.reduce(effect)
        return ()

    def reduce(self, effect: step.ReductionDue) -> None:
        """All own lanes are computed: start to reduce. Trials may still be due, if lanes were computed in an older
        generation."""
        machine, plan = self._machine, self._machine.current_plan()
        trials, split = self._probing.trials(effect.step, plan), plan.stages > 1
        at = effect.generation, effect.step
        if self._tried != at and (trials if split else owed(trials, plan, machine.me.worker_id)):
            self._tried, self._after = at, effect
            lanes = tuple(sorted({trial.lane for trial in trials})) if split else ()
            self._out.start(do.Compute, effect.generation, plan, effect.step, lanes, trials)
            return
        compare = self._comparing.due(effect.step, plan) or self._probing.doubt.step == effect.step
        self._out.start(do.Reduce, effect.generation, machine.plan, effect.step, compare)

    def reduced(
        self,
        operation: do.Reduce,
        payload: AgreePayload,
        kept: int,
        due: Due,
        saved: int,
        asked: tuple[int, ...] = (),
    ) -> Iterable[step.StepEvent]:
        """This worker has its part of the reduced gradient. kept: the newest step whose snapshots are in place.
        due: the tiers that save this step. saved: the newest step whose checkpoint counts. asked: tickets of joiners
        that wait for this worker and others."""
        data = encode(payload.stamped(self._committed_ns, kept, due, saved, self.last.nonfinite.in_a_row, asked))
        return [step.GradientReduced(operation.generation, operation.step, data)]

    def gather(self, data: bytes, ends: bool, states: Sequence[StageSection] = ()) -> step.GatherWanted:
        """The application's contribution to a gather, as a record. ends: its loop is over, with these last states."""
        return step.GatherWanted(encode(GatherPayload(data, self._committed_ns, ends, list(states))))

    def contribute(self, effect: step.SendRecord) -> None:
        tag = Tag("decide", effect.key.step, effect.key.seq)
        self._out.start(do.Exchange, effect.generation, tag, encode(effect.record))

    def all_contributed(self, operation: do.Exchange, payloads: Mapping[int, bytes]) -> Iterable[step.StepEvent]:
        key, generation = Key(operation.tag.step, operation.tag.seq), operation.generation
        return [step.RecordArrived(generation, key, w, decode_record(payloads[w])) for w in sorted(payloads)]

    # ---- from a decision

    def decision(self, generation: int) -> None:
        """A decision was taken in this generation, and is to be carried out."""
        self._generation = generation

    def gathered(self, effect: step.Gathered) -> Differs | None:
        """A gather is decided. Returns the difference if its records show that the last states differ."""
        states = last_states(effect.records) if effect.here else {}  # else the member that hands it over has compared
        said = Statements.last(effect.key.step, states)
        found = self._compare(said)
        if found is None and states:
            _alike(self._machine, self._comparing, self._out, said)
        if found is None:
            self._decided(effect.key, effect.here)
            self._gathers.decided(effect.key, effect.records)
        return found

    def ends(self, ask: do.EndAsked, records: Mapping[int, Record]) -> Differs | None:
        """None if the last state of this worker is the one in these records. The members that wrote them have
        compared theirs, but this worker may have copied its state from one that has changed since."""
        states, mine = last_states(records), self._machine.me.worker_id
        if not states or ask.at != self._machine.step or states.get(mine) == list(ask.states):
            return None
        said = Statements.last(ask.at, {**states, mine: ask.states})
        found = self._compare(said)
        if found is None:
            _alike(self._machine, self._comparing, self._out, said)
        return found

    def update(self, effect: step.StepDecided) -> Differs | None:
        """Apply a step. Returns the difference, and applies nothing, if its records show one."""
        outcome = self.outcome(effect.step, effect.records)
        found = self.compare(outcome)
        if found is not None:
            self._probing.forget()
        found = found or self._probed(outcome)
        if found is None:
            self.concluded(outcome)
            self._decided(Key(effect.step, 0))
            generation, stages = self._machine.generation, self._machine.updating
            self._out.start(do.Update, generation, effect.step, effect.records, outcome, stages)
        return found

    def spreads(self, outcome: StepOutcome) -> bool:
        """Whether members have to send each other the parameters that each has updated; starts that. If the plan is
        about to change, or was not entered yet, they send them when they settle."""
        machine = self._machine
        if not machine.settled or machine.switch is not None or outcome.nonfinite.left_out:
            return False
        plan = machine.current_plan()
        if plan.divided_stages.isdisjoint(plan.stages_of(machine.me.worker_id)):
            return False
        self._out.start(do.Spread, machine.generation, plan, machine.step)
        return True

    def updated(self, operation: do.Update, began_unix_ns: int) -> Iterable[step.StepEvent]:
        self._committed_ns = began_unix_ns
        self.last.did(operation.outcome, operation.records)
        self._gathers.applied(operation.step, operation.records)
        return [step.Updated(operation.step)]

    def concluded(self, outcome: StepOutcome) -> None:
        """Note what the records of a step that counts say about comparisons and checkpoints."""
        _alike(self._machine, self._comparing, self._out, Statements.before(outcome))
        if outcome.compares:
            self._comparing.ask(outcome.step + 1)
        self._comparing.saved(outcome.saved)

    def compare(self, outcome: StepOutcome) -> Differs | None:
        """None if all copies of the state were alike before the step."""
        return self._compare(Statements.before(outcome))

    def _probed(self, outcome: StepOutcome) -> Differs | None:
        """None if all members that computed a lane got the same result."""
        mine = self._machine.me.worker_id
        found = self._probing.judge(outcome, mine)
        if found is None:
            return None
        if found.changed:
            sound = self._comparing.proven(outcome.step - 1)
            self._out.put(do.Invalidate(sound, first=mine == min(found.workers)))
            why = Why(Cause.CORRUPT, found.reason + _tainted(sound))
            return Differs(why, outcome.step, sound, frozenset(), False, self._generation)
        if found.ends:  # all that was computed since the last probe may be wrong
            self._out.put(do.Invalidate(found.sound, first=mine == min(found.workers)))
        why = Why(Cause.NONDETERMINISTIC, found.reason)
        return Differs(why, outcome.step, found.sound, frozenset(found.odd), False, self._generation, found)

    def _compare(self, said: Statements) -> Differs | None:
        machine, fresh = self._machine, self._comparing.fresh
        mine, plan = machine.me.worker_id, machine.plan
        found = self._comparing.judge(said)
        if found is None:
            return None
        sound = self._comparing.proven(said.step)
        everybody = {who for digests in said.digests.values() for who in digests}
        knows = plan is not None and not (fresh and found.drift and self._comparing.any_stayed(everybody))
        if knows:  # else other members know better, and delete the shared checkpoints
            self._out.put(do.Invalidate(sound, first=mine == min(everybody - found.outvoted, default=mine)))
        reason = found.reason + ("" if found.drift else _tainted(sound))
        cause = Cause.NONDETERMINISTIC if found.drift else Cause.CORRUPT
        return Differs(Why(cause, reason), said.step + 1, sound, found.outvoted, found.drift, self._generation)

    def _decided(self, key: Key, here: bool = True) -> None:
        first = here and self._entered == self._generation
        self._out.put(do.Decided(key, self._generation, first))
        if first:
            self._entered = 0


def _alike(machine: StepMachine, comparing: Comparing, out: Outbox, said: Statements) -> None:
    """All copies were alike, and so are states computed from them: note it, and tell the coordinator, which keeps
    it."""
    plan = machine.plan
    comparing.alike(said, member=plan is not None)
    digests = comparing.told(said.step)
    if digests and plan is not None and plan.leader(0) == machine.me.worker_id:
        out.tell(StatesAlike, lasting=False, step=said.step, digests=digests)


def _tainted(sound: int) -> str:
    """The end of a reason: which steps are tainted."""
    return f"; all steps after {sound} are tainted" if sound else "; all steps are tainted"


@dataclass
class _Feed:
    stages: tuple[int, ...]
    position: Key
    steps: deque[do.Seen] = field(default_factory=deque)
    caught_up: bool = False

    def saw(self, one: do.Seen) -> None:
        """The feed has sent a step, or says that there is none."""
        self.caught_up = not one.step
        if one.step:
            self.steps.append(one)


class Joiner:
    """Follows the members, from the ticket to the plan that includes this worker."""

    def __init__(self, out: Outbox, stepper: Stepper, gathers: Gathers) -> None:
        self._out = out
        self._stepper = stepper
        self._gathers = gathers
        self._ticket: wire.Heal | None = None
        self._feeds: list[_Feed] = []
        self._at = 0
        self._adopted = self._said = False
        self._coming: Plan | None = None  # in which it has its parts, if it gets parts

    def begin(self, ticket: wire.Heal) -> None:
        """The coordinator names the donors."""
        self._ticket, self._feeds, self._at, self._adopted, self._said = ticket, [], 0, False, False
        self._coming = coming(ticket, self._out.me.worker_id)

    def stop(self) -> wire.Heal | None:
        """Stop following. Returns the ticket."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._out.put(do.CloseFeeds())
        return ticket

    def go_on(self) -> Differs | None:
        """Start the next operation, if there is a ticket. Returns the difference if a fed step must not be applied."""
        ticket = self._ticket
        if ticket is None:
            return None
        generation = ticket.plan.generation
        if not self._feeds:
            joint = joint_asks(ticket, self._out.me.worker_id)
            self._out.start(do.OpenFeeds, generation, ticket.ticket, groups(ticket), self._coming, joint)
        elif not self._adopted:
            self._level(generation)
        elif all(feed.steps for feed in self._feeds):
            return self._replay(ticket)
        else:
            self._say_healed(ticket)
            self._out.start(do.Watch, generation)
        return None

    def _level(self, generation: int) -> None:
        """Bring all stages to the newest of the offered positions, once every feed has come that far."""
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
            plan = self._coming or ticket.plan
            self._out.start(do.Replay, plan.generation, first.step, first.records, outcome, plan)
        return differs

    def _say_healed(self, ticket: wire.Heal) -> None:
        if not self._said and all(feed.caught_up for feed in self._feeds):
            self._said = True
            self._out.tell(wire.WorkerHealed, ticket=ticket.ticket, step=self._at)

    # ---- operations that have ended

    def opened(self, operation: do.OpenFeeds, positions: Sequence[Key]) -> None:
        groups = zip(operation.groups, positions, strict=True)
        self._feeds = [_Feed(stages, position) for (_, stages), position in groups]

    def saw(self, operation: do.Watch, seen: Sequence[do.Seen]) -> None:
        for one in seen:
            self._feeds[one.feed].saw(one)

    def adopted(self, operation: do.Adopt, result: do.Copied) -> Iterable[StepEvent]:
        self._adopted, self._at = True, operation.position.step
        for feed, passed in zip(self._feeds, operation.passed, strict=True):
            for _ in passed:
                feed.steps.popleft()
        self._gathers.copied(result.gathers)
        mine, plan = self._out.me.worker_id, self._coming
        held = {} if plan is None else {k: share(plan.shard(mine, k), of) for k, of in result.sizes.items()}
        return [step.Followed(operation.position, result.records, operation.stages, operation.generation, held)]

    def replayed(self, operation: do.Replay, held: Mapping[int, Extents] | None) -> Iterable[StepEvent]:
        """The next step is replayed. held: blocks of stages of which this worker has a part."""
        self._at = operation.step
        self._stepper.last.did(operation.outcome, operation.records)
        for feed in self._feeds:
            feed.steps.popleft()
        self._gathers.applied(operation.step, operation.records)
        at = Key(operation.step, 0)
        return [step.Followed(at, operation.records, self._stages, operation.generation, held or {})]

    @property
    def _stages(self) -> tuple[int, ...]:
        return tuple(sorted(stage for feed in self._feeds for stage in feed.stages))
