"""One worker's driver: from messages, asks and what operations gave to the next operation. Pure.

It wraps the step machine, which says when a step is decided and how a generation settles; here is what a worker makes
of that: one operation after the other, what is left when a plan comes, what the application is told. Whoever carries it
out keeps to this:

- `handle` is called by one thread. Effects are carried out in order; an operation is the last one, and is answered
  exactly once before the application asks anything else.
- What arrives while an operation is outstanding, or while the application has the turn, waits (`Heard` may be handed in
  at any time; it is taken in when nothing is outstanding). Only `interrupts` is asked at once, by whoever receives: the
  transfers of the generations that it names are cut, so that the operation comes back as `Aborted`.
- `Update`, `Adopt` and `Replay` are interrupted by nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.errors import check
from everstep.base.plan import Plan, WorkerKey
from everstep.placement.probes import ProbeRule
from everstep.protocol import messages as wire
from everstep.protocol import step_types as step
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.application import Application
from everstep.protocol.driver.comparing import Comparing, Names
from everstep.protocol.driver.nonfinite import NonfiniteRule
from everstep.protocol.driver.outbox import Gathers, Outbox, Standing
from everstep.protocol.driver.probing import Probing
from everstep.protocol.driver.records import AgreePayload, StepOutcome, conclude
from everstep.protocol.driver.saver import Keeper, Saver, SavingRules
from everstep.protocol.driver.settler import SETTLE, Settler
from everstep.protocol.driver.stepper import Differs, Joiner, Stepper
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_phases import Phase
from everstep.protocol.step_types import Key

FOREVER = 1 << 62
_INTERRUPTED = 130
_DECIDED = step.StepDecided | step.Gathered | step.Release | step.Discard
_READING = do.Compute | do.Update | do.Fetch | do.Restore | do.Adopt | do.Replay | do.Evaluate | do.SaveLast | do.Finish


def interrupts(message: wire.AnyMessage) -> int | None:
    """The newest generation whose operations are over by this message; None if it can wait."""
    if isinstance(message, wire.PlanNow | wire.Heal):
        return message.plan.generation - 1
    if isinstance(message, wire.JobEnded | wire.Dismissed):
        return FOREVER
    return None


@dataclass(frozen=True)
class DriverConfig:
    """What a driver goes by. lanes: of the global batch. rewindable: the application can go on from an earlier step;
    else this worker starts anew for that. verify_every, begins_after, repeats, names: as for `Comparing`. saving: of
    checkpoints. probes: of lanes. nonfinite: what to do about a step that is not finite."""

    lanes: int
    rewindable: bool = True
    verify_every: int = 0
    begins_after: int = 0
    saving: SavingRules = field(default_factory=SavingRules)
    repeats: bool = True
    names: Names = lambda stage: ()
    probes: ProbeRule = field(default_factory=ProbeRule)
    nonfinite: NonfiniteRule = field(default_factory=NonfiniteRule)

    def outcome(self, number: int, records: do.Records) -> StepOutcome:
        """What everybody concludes from the records of a step."""
        return conclude(number, self.lanes, records, self.nonfinite)


class Driver:
    """Drives one worker's part in a job."""

    def __init__(self, me: WorkerKey, config: DriverConfig, machine: StepMachine) -> None:
        self.me = me
        self.config = config
        self.machine = machine
        self.standing = Standing()
        self._out = out = Outbox(me)
        self._gathers = Gathers()
        every, after = config.verify_every, config.begins_after
        self._comparing = Comparing(every, after, repeats=config.repeats, names=config.names)
        self._probing = probing = Probing(config.probes, after)
        self._stepper = Stepper(machine, out, self._gathers, config.outcome, self._comparing, probing)
        self._keeper = Keeper(machine, out, self.proven)
        settling = config.rewindable, self._comparing, probing
        self._settler = Settler(machine, out, self._gathers, self._keeper, *settling)
        self._saver = Saver(machine, out, self._gathers, config.saving)
        ends = self._saver, self._stepper.last, config.rewindable, self._settler.bring_together
        self._application = Application(machine, out, self._gathers, *ends)
        self._joiner = Joiner(out, self._stepper, self._gathers)
        self._queue: deque[step.StepEffect] = deque()
        self._news: deque[do.Heard] = deque()
        self._events, self._messages = self._heard_of(), self._told()
        self._effects, self._ended = self._means(), self._made()

    # ---- what others may look at

    @property
    def plan(self) -> Plan | None:
        """Of the present generation."""
        return self.machine.plan

    @property
    def position(self) -> Key:
        """Of the last decision."""
        return self.machine.position

    @property
    def generation(self) -> int:
        """Of the plan."""
        return self.machine.generation

    @property
    def ended(self) -> wire.JobEnded | None:
        """How the job has ended, if it has."""
        return self._application.ended

    @property
    def gathered(self) -> do.GatheredRecords:
        """Records of the decisions of the present step, by key."""
        return self._gathers.known

    @property
    def still(self) -> bool:
        """Whether nothing reads or changes the state now, so that blocks may be reported lost."""
        busy = isinstance(self._out.operation, _READING)
        return not busy and self.machine.phase not in (Phase.UPDATING, Phase.FETCHING)

    def in_memory(self, number: int) -> bool:
        """Whether a member stated, when this generation settled, that it has state of this step in memory."""
        return self._settler.in_memory(number)

    def proven(self, number: int) -> int:
        """After so many steps: the newest one whose state has been compared among the workers, and was alike, as was
        what they made of it."""
        return self._probing.proven(self._comparing.proven(number))

    @property
    def fresh(self) -> bool:
        """Whether this worker was healed or resumed since all states were alike."""
        return self._comparing.fresh

    def progress(self, number: int, step_ms: float, committed_unix_ns: int = 0) -> wire.AnyMessage:
        """How far the job is, as told of this generation."""
        at = {"step": number, "step_ms": step_ms, "committed_unix_ns": committed_unix_ns}
        return self._out.signed(wire.Progress, generation=self.generation, **at)

    # ---- events

    def handle(self, now_ns: int, event: object) -> list[do.Effect]:
        """Take in one event; the effects are to be carried out in order."""
        self._out.times.tick(now_ns)
        self._events.get(type(event), self._asked)(event)
        self._advance()
        machine = self.machine
        self.standing = Standing(machine.step, machine.stages, machine.plan, machine.prepared, self._out.standing)
        return self._out.drain()

    def _heard_of(self) -> dict[type, Callable[[Any], object]]:
        """The table of what each event means that is no ask."""
        out, keeper, saver = self._out, self._keeper, self._saver
        return {
            do.Heard: self._news.append,
            do.Done: lambda e: self._done(out.answered(e.op), e.result),
            do.Aborted: lambda e: self._aborted(out.answered(e.op), e),
            do.Tainted: lambda e: self._unusable(out.answered(e.op), e),
            step.LaneDone: self._feed,
            step.BlocksLost: self._lost,
            do.InMemory: lambda e: self._feed(*keeper.there(e)),
            do.OthersKept: keeper.others_kept,
            do.NotKept: keeper.refused,
            do.PartsThere: saver.parts_there,
            do.SaveEnded: saver.ended,
            do.FollowerAsked: lambda e: self._application.follower_asked(),
            do.EndOrdered: lambda e: saver.ending.ask(e.why),
            do.TimePassed: lambda e: None,
        }

    def _asked(self, event: do.Ask) -> None:
        if isinstance(event, do.EndAsked) and isinstance(self._application.ask, do.StepAsked):
            self._out.put(do.DropLanes())
            self._feed(step.StepLeft())
        data = self._application.take(event)
        if data is not None:
            self._gather(data)
        elif isinstance(self._application.ask, do.StepAsked) and self.ended is None:
            self._feed(step.StepWanted())

    def _gather(self, data: bytes) -> None:
        ask, at = self._application.ask, self.machine.position.step
        ends = isinstance(ask, do.EndAsked)
        states = ask.states if isinstance(ask, do.EndAsked) and ask.at == at else ()
        self._feed(self._stepper.gather(data, ends, states))

    def _advance(self) -> None:
        """Whatever can be done before the next operation's end, the application's next ask, or the next message."""
        while self._application.ask is not None and self._out.operation is None:
            if self._news:
                self._take(self._news.popleft())
            elif self._queue:
                effect = self._queue.popleft()
                self._effects[type(effect)](effect)
            else:
                self._go_on()
                return

    def _go_on(self) -> None:
        late = None if self.ended else self._joiner.go_on()
        if late is not None:
            self._feeds_lost(late.why)
        ending = self._saver.ending
        if self.ended is not None or self._out.operation is not None:
            self._application.go_on()
        elif self.machine.plan is None and ending.asked is not None:
            self._leave_alone(ending.asked)
        elif ending.agreed is None:
            end = self._application.finishing
            differs = None if end is None else self._stepper.ends(*end)
            if differs is None:
                self._application.go_on()
            else:
                self._refuse(differs)
        elif self._application.settled and ending.begin(self.machine.generation):
            self._save_alone(ending.agreed)

    def _save_alone(self, why: Why) -> None:
        """The job ends here without its coordinator, and the application is not told of any step before that."""
        machine, save = self.machine, self._saver.boundary(why, past=self._application.past)
        self._out.start(do.SaveLast, machine.generation, machine.current_plan(), machine.position.step, save)

    def _leave_alone(self, why: Why) -> None:
        over = wire.JobEnded(state="interrupted", cause=why.cause, reason=why.reason, exit_code=_INTERRUPTED)
        self._application.end(over)

    def _lost(self, event: step.BlocksLost) -> None:
        """Blocks of the state are gone: they are repaired when all settle, or with what else a joiner copies."""
        check(self.still, f"{event} during {self._out.operation}, {self.machine.phase}")
        self._feed(event)
        if self.machine.plan is not None:
            self._drop_transfers()
            self._settler.lacks(event)
        else:
            self._feeds_lost(Why(Cause.CORRUPT, f"blocks of stage {event.stage} are lost ({event.extents})"))

    def _feed(self, *events: step.StepEvent) -> None:
        """Give the machine events; its effects are carried out in turn."""
        for event in events:
            effects = self.machine.handle(event)
            if any(isinstance(e, step.Leave | step.Regroup) for e in effects):
                self._drop_transfers()
            if any(isinstance(e, step.StepDecided | step.Gathered) for e in effects):
                self._stepper.decision(self.machine.generation)  # a plan may come before it is carried out
            self._queue.extend(effects)

    def _drop_transfers(self) -> None:
        """What has been decided is still carried out; everything that needs the old generation is not."""
        self._queue = deque(e for e in self._queue if isinstance(e, _DECIDED))

    # ---- messages

    def _told(self) -> dict[type, Callable[[Any], object]]:
        """The table of what each message means; others are for somebody else."""
        application = self._application
        return {
            wire.PlanNow: lambda m: self._feed(step.PlanArrived(m.plan)),
            wire.PlanPrepared: lambda m: self._feed(step.PreparedArrived(m.plan)),
            wire.Heal: self._heal,
            wire.SaveNow: lambda m: self._saver.request(Why(m.cause, m.reason)),
            wire.Dismissed: lambda m: application.answer(do.Exit(m.reason, drained=m.drained)),
            wire.JobEnded: application.end,
        }

    def _take(self, heard: do.Heard) -> None:
        message = heard.message
        if isinstance(message, wire.PlanNow):
            self._out.times.plan_arrived(message.plan.generation, heard.arrived_ns)
        if type(message) in self._messages:
            self._messages[type(message)](message)

    def _heal(self, ticket: wire.Heal) -> None:
        plan = self.machine.plan
        if plan is None:
            self._joiner.stop()
            self._out.nothing_stands()
            self._joiner.begin(ticket)
        elif ticket.plan.generation > plan.generation:
            reason = (
                f"it followed a switch to generation {plan.generation}, but the others went on without it as "
                f"generation {ticket.plan.generation}; it has to start anew"
            )
            self._application.answer(do.Exit(reason))

    # ---- the machine's effects

    def _means(self) -> dict[type, Callable[[Any], object]]:
        """The table of what each effect of the machine means."""
        settler, stepper = self._settler, self._stepper
        return {
            step.Leave: lambda e: settler.leave(e.generation),
            step.Regroup: lambda e: self._open(e.plan),
            step.SendHolding: lambda e: settler.state_holding(),
            step.SettleAnew: lambda e: settler.anew(Why(Cause.CORRUPT, e.reason)),
            step.ServeState: settler.serve,
            step.FetchState: settler.fetch,
            step.GoBack: self._go_back,
            step.Entered: self._entered,
            step.LanesNeeded: self._compute,
            step.ReductionDue: stepper.reduce,
            step.SendRecord: stepper.contribute,
            step.StepDecided: self._update,
            step.Gathered: self._gathered,
            step.Release: self._release,
            step.Discard: self._out.put,
            step.LeftPlan: lambda e: self._application.answer(do.Exit("the plan goes on without it", drained=True)),
        }

    def _open(self, plan: Plan) -> None:
        self._joiner.stop()
        self._saver.regroup(plan)
        if self._probing.void(plan):
            self._out.put(self.machine.void())
        self._settler.open(plan)

    def _go_back(self, effect: step.GoBack) -> None:
        leaves = self._settler.go_back(effect)
        if leaves is not None:
            self._application.answer(leaves)

    def _entered(self, effect: step.Entered) -> None:
        self._stepper.entered(effect.generation)
        self._settler.entered(effect, self._application.loop)
        again = self._application.again()
        if again is not None:
            self._gather(again)
        self._saver.entered(self._settler.positions)
        plan = self.machine.current_plan()
        why = Why(plan.cause, plan.save)
        if plan.save and self._saver.on:
            save = None if self.ended else self._saver.boundary(why, past=self._application.past)
            self._out.start(do.SaveLast, plan.generation, plan, effect.step, save)
        elif plan.save:
            self._out.start(do.Linger, plan.generation)

    def _compute(self, effect: step.LanesNeeded) -> None:
        if not self._application.holds:
            self._stepper.compute(effect)

    def _release(self, effect: step.Release) -> None:
        self._out.put(effect)
        self._feed(*self._keeper.released(effect.step))

    def _gathered(self, effect: step.Gathered) -> None:
        if effect.here:  # else others may still be copying the state
            self._settler.unshelve()
        self._refuse(self._stepper.gathered(effect))

    def _update(self, effect: step.StepDecided) -> None:
        self._settler.unshelve()
        self._refuse(self._stepper.update(effect))

    def _refuse(self, differs: Differs | None) -> None:
        """If a decision's records show that states differ all go back, but for the outvoted; or the job ends."""
        if differs is None:
            return
        probe = differs.probe
        if probe is None or probe.ends:
            self._saver.invalidated()
        tainted = differs.tainted, differs.generation
        if differs.outvoted and probe is not None:  # its state is right, what it makes of it is not
            self._application.answer(do.Exit(differs.why.reason))
            return
        if differs.outvoted:
            self._application.answer(do.Outvoted(differs.why.reason, *tainted, differs.sound))
            return
        self._queue = deque(e for e in self._queue if not isinstance(e, step.SendHolding))
        self._feed(step.UpdateRefused(differs.sound, probe is not None and not probe.ends))
        self._settler.anew(differs.why, *tainted, drift=differs.drift, probe=probe)

    # ---- operations that have ended

    def _made(self) -> dict[type, Callable[[Any, Any], Iterable[step.StepEvent] | None]]:
        """The table of what follows when an operation has been done, from its result."""
        settler, joiner = self._settler, self._joiner
        return {
            do.Open: settler.opened,
            do.Exchange: self._exchanged,
            do.Reduce: self._reduced,
            do.Update: self._updated,
            do.Fetch: settler.fetched,
            do.Restore: self._restored,
            do.OpenFeeds: joiner.opened,
            do.Watch: joiner.saw,
            do.Adopt: self._adopted,
            do.Replay: self._replayed,
            do.Evaluate: lambda operation, result: self._application.answer(do.Evaluated()),
            do.SaveLast: self._saved_last,
            do.Finish: self._finished,
            do.Compute: lambda operation, result: self._stepper.computed(operation),
            do.Linger: self._lingered,
        }

    def _done(self, operation: do.Operation, result: Any) -> None:
        self._feed(*(self._ended[type(operation)](operation, result) or ()))

    def _exchanged(self, operation: do.Exchange, payloads: Mapping[int, bytes]) -> Iterable[step.StepEvent]:
        if operation.tag == SETTLE:
            return self._unless_refused(self._settler.all_stated(operation, payloads))
        return self._stepper.all_contributed(operation, payloads)

    def _reduced(self, operation: do.Reduce, payload: AgreePayload) -> Iterable[step.StepEvent]:
        kept, due, saved = self._keeper.complete, self._saver.due(operation.step), self._saver.newest
        return self._stepper.reduced(operation, payload, kept, due, saved)

    def _updated(self, operation: do.Update, began_unix_ns: int) -> Iterable[step.StepEvent]:
        self._saver.updated(operation.outcome, operation.records)
        self._keeper.updated(operation.outcome, operation.records)
        return self._stepper.updated(operation, began_unix_ns)

    def _adopted(self, operation: do.Adopt, result: do.Copied) -> Iterable[step.StepEvent]:
        self._comparing.copied()
        return self._joiner.adopted(operation, result)

    def _replayed(self, operation: do.Replay, result: None) -> Iterable[step.StepEvent]:
        self._saver.ending.decided(operation.outcome)
        self._keeper.updated(operation.outcome, operation.records)
        self._stepper.concluded(operation.outcome)
        return self._joiner.replayed(operation)

    def _saved_last(self, operation: do.SaveLast, where: str) -> None:
        for effect in self.machine.handle(step.StepSaved(operation.step)) if where else ():
            self._effects[type(effect)](effect)  # at once: nothing is carried out any more when this worker leaves
        self._saver.last(operation, where)
        ending = self._saver.ending
        if ending.agreed is not None:
            self._leave_alone(ending.agreed)
        else:
            self._out.start(do.Linger, operation.generation)

    def _lingered(self, operation: do.Linger, result: None) -> None:
        """The coordinator that has had all save may be gone before it could end the job."""
        asked = self._saver.ending.asked
        if asked is not None and self.ended is None:
            self._leave_alone(asked)

    def _finished(self, operation: do.Finish, written: bool) -> None:
        at = operation.step
        self._out.tell(wire.WorkerDone, generation=operation.generation, step=at, final_written=bool(written))

    def _restored(self, operation: do.Restore, result: do.Copied) -> Iterable[step.StepEvent]:
        moved = self.machine.position != operation.position  # else the application is where it should be
        if moved:
            self._application.went_back()
        return self._unless_refused(self._settler.restored(operation, result))

    def _unless_refused(self, events: Iterable[step.StepEvent]) -> Iterable[step.StepEvent]:
        """The same; none if this worker is to go no further."""
        refused = self._settler.refused
        if refused:
            self._application.answer(do.Refused(refused))
        return () if refused else events

    def _aborted(self, operation: do.Operation, event: do.Aborted) -> None:
        """A transfer was left: somebody decides, and a plan comes. Tell who is accused."""
        if isinstance(operation, do.OpenFeeds | do.Watch):
            self._feeds_lost(event.why)
            return
        if event.accused:
            accused, generation = sorted(event.accused), operation.generation
            cause, reason = event.why.cause, event.why.reason
            self._out.tell(wire.PeerFault, generation=generation, accused=accused, cause=cause, reason=reason)
        self._drop_transfers()
        if isinstance(operation, do.Evaluate):
            self._application.answer(do.Evaluated())

    def _feeds_lost(self, why: Why) -> None:
        """A feed has ended: somebody else is asked, unless something else was told meanwhile."""
        ticket = self._joiner.stop()
        if ticket is not None and all(interrupts(heard.message) is None for heard in self._news):
            reason = f"healing stopped: {why.reason}"
            self._out.tell(wire.HealFailed, ticket=ticket.ticket, cause=why.cause, reason=reason)

    def _unusable(self, operation: do.Operation, event: do.Tainted) -> None:
        """All settle anew, with what is left; whoever cannot mend its state starts anew."""
        if event.torn:
            self._application.answer(do.Exit(f"{event.why.reason}; this worker starts anew"))
        else:
            self._settler.anew(event.why)
