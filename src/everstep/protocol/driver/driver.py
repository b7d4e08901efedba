"""One worker's driver: from messages, asks and what operations gave to the next operation. Pure.

It wraps the step machine, which says when a step is decided and how a generation settles; here is what a worker makes
of that: one operation after the other, what is left when a plan comes, what the application is told. Whoever carries it
out keeps to this:

- `handle` is called by one thread. Effects are carried out in order; an operation is answered exactly once before
  anything else but `Heard`, `LaneDone` and notes is handed in.
- What arrives while an operation is outstanding, or while the application has the turn, waits (`Heard` may be handed in
  at any time; it is taken in when nothing is outstanding). Only `interrupts` is asked at once, by whoever receives: the
  transfers of the generations that it names are cut, so that the operation comes back as `Aborted`.
- `Update`, `Adopt` and `Replay` are interrupted by nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from everstep.base.errors import InvariantViolation, check
from everstep.base.plan import Plan, WorkerKey
from everstep.base.ports import Tag
from everstep.protocol import messages as wire
from everstep.protocol import step_types as step
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.comparing import differing, proven_step
from everstep.protocol.driver.joiner import Joiner
from everstep.protocol.driver.records import (
    AgreePayload,
    GatherPayload,
    Outcome,
    conclude,
    decode_holding,
    decode_record,
    encode_holding,
    encode_payload,
    encode_record,
    stages_in,
)
from everstep.protocol.step_machine import Phase, StepMachine
from everstep.protocol.step_types import Key, Record

FOREVER = 1 << 62
_SETTLE = Tag("settle", 0, 0)
_UNSETTLED = frozenset({Phase.WAITING, Phase.SETTLING, Phase.FETCHING, Phase.UPDATING, Phase.LEFT})
_DECIDED = step.Update | step.Gathered | step.Release | step.Discard


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
    else this worker starts anew for that. verify_every, begins_after: as for `proven_step`."""

    lanes: int
    rewindable: bool = True
    verify_every: int = 0
    begins_after: int = 0


@dataclass(frozen=True)
class Standing:
    """What a coordinator that has missed something is to hear again: position and plan for the hello, and messages."""

    step: int = 0
    plan: Plan | None = None
    messages: tuple[wire.AnyMessage, ...] = ()


class Driver:
    """Drives one worker's part in a job. `digest`: of the initial state."""

    def __init__(self, me: WorkerKey, config: DriverConfig, machine: StepMachine) -> None:
        self.me = me
        self.config = config
        self.machine = machine
        self.joiner = Joiner(config.lanes)
        self.gathered: dict[Key, Mapping[int, Record]] = {}
        self.ended: wire.JobEnded | None = None
        self.standing = Standing()
        self._queue: deque[step.StepEffect] = deque()
        self._news: deque[do.Heard] = deque()
        self._out: list[do.Effect] = []
        self._op: do.Operation | None = None
        self._ask: do.Ask | None = None
        self._turn = _Turn()
        self._stated: dict[int, step.Holding] = {}
        self._payloads = _Payloads()
        self._times = _Times()

    # ---- what others may look at

    @property
    def plan(self) -> Plan | None:
        return self.machine.plan

    @property
    def position(self) -> Key:
        return self.machine.position

    @property
    def generation(self) -> int:
        return self.machine.generation

    @property
    def settled(self) -> bool:
        """Whether this worker is a member that may go on."""
        return self.machine.phase not in _UNSETTLED and not self._queue

    @property
    def asked(self) -> int:
        """The step that the application has asked for last; one beyond the last once it is through with that."""
        return self._turn.asked

    def in_memory(self, number: int) -> bool:
        """Whether a member stated, when this generation settled, that it has state of this step in memory."""
        holdings = self._stated.values()
        return any(h.position.step == number or any(s == number for _, s in h.snapshots) for h in holdings)

    # ---- events

    def handle(self, now_ns: int, event: object) -> list[do.Effect]:
        """Take in one event; the effects are to be carried out in order."""
        self._times.now_ns = now_ns
        match event:
            case do.Heard():
                self._news.append(event)
            case do.Done():
                self._done(self._answered(event.op), event.result)
            case do.Aborted():
                self._aborted(self._answered(event.op), event)
            case do.Tainted():
                self._unusable(self._answered(event.op), event)
            case step.LaneDone() | step.SnapshotsKept():
                self._feed(event)
            case do.FollowerAsked():
                self._turn.followers = True
            case do.Tick():
                pass
            case _:
                self._asked(event)  # type: ignore[arg-type]
        self._advance()
        self.standing = Standing(self.machine.step, self.machine.plan, self._payloads.standing)
        out, self._out = self._out, []
        return out

    def _answered(self, number: int) -> do.Operation:
        operation, self._op = self._op, None
        if operation is None or operation.op != number:
            raise InvariantViolation(f"operation {number} was answered, outstanding is {operation}")
        return operation

    def _advance(self) -> None:
        """Whatever can be done before the next operation's end, the application's next ask, or the next message."""
        while self._ask is not None and self._op is None:
            if self._news:
                self._take(self._news.popleft())
            elif self._queue:
                self._perform(self._queue.popleft())
            elif not self._go_on():
                return

    def _feed(self, event: step.StepEvent) -> None:
        """Give the machine an event; its effects are carried out in turn."""
        effects = self.machine.handle(self._times.now_ns, event)
        if any(isinstance(e, step.Leave | step.Open) for e in effects):
            self._drop_transfers()
        self._queue.extend(effects)

    def _drop_transfers(self) -> None:
        """What has been decided is still carried out; everything that needs the old generation is not."""
        self._queue = deque(e for e in self._queue if isinstance(e, _DECIDED))

    def _tell(self, message: wire.AnyMessage) -> None:
        """Send, and remember what a coordinator that missed it would have to hear again."""
        self._payloads.remember(message)
        self._out.append(do.Tell(message))

    def _answer(self, answer: do.Answer) -> bool:
        self._ask = None
        self._out.append(answer)
        return True

    # ---- messages

    def _take(self, heard: do.Heard) -> None:
        message = heard.message
        match message:
            case wire.PlanNow():
                self._times.arrived_ns = heard.arrived_ns
                if message.plan.has(self.me):
                    self._feed(step.PlanArrived(message.plan))
            case wire.PlanPrepared():
                self._feed(step.PreparedArrived(message.plan))
            case wire.Heal():
                self._heal(message)
            case wire.Dismissed():
                self._answer(do.Exit(message.reason, drained=message.drained))
            case wire.JobEnded():
                self.ended = message
                if message.state != "completed":
                    self._answer(do.Exit(message.reason, failed=True))

    def _heal(self, ticket: wire.Heal) -> None:
        plan = self.machine.plan
        if plan is None:
            self._close_feeds()
            self._payloads.standing = ()
            self.joiner.begin(ticket)
        elif ticket.plan.generation > plan.generation:
            reason = (
                f"it followed a switch to generation {plan.generation}, but the others went on without it as "
                f"generation {ticket.plan.generation}; it has to start anew"
            )
            self._answer(do.Exit(reason))

    # ---- the machine's effects

    def _start(self, make: type[do.Operation], *args: object, generation: int | None = None) -> None:
        number = self._turn.operations = self._turn.operations + 1
        chosen = self.machine.generation if generation is None else generation
        self._op = make(number, chosen, *args)
        self._times.began_ns = self._times.now_ns
        self._out.append(self._op)

    def _perform(self, effect: step.StepEffect) -> None:
        match effect:
            case step.Leave():
                self._out.append(do.Cut(effect.generation))
                self._unshelve()
            case step.Open():
                self._open(effect.plan)
            case step.SendHolding():
                self._state_holding()
            case step.SettleAnew():
                self._settle_anew(effect.reason)
            case step.Compute():
                self._compute(effect)
            case step.Reduce():
                self._start(do.Reduce, self._plan(), effect.step)
            case step.SendRecord():
                tag = Tag("decide", effect.key.step, effect.key.seq)
                self._start(do.Exchange, tag, encode_record(effect.record))
            case step.Update():
                self._update(effect)
            case step.Gathered():
                self._gathered(effect)
            case step.Release() | step.Discard():
                self._out.append(effect)
            case _:
                self._perform_settled(effect)

    def _perform_settled(self, effect: step.StepEffect) -> None:
        match effect:
            case step.ServeState():
                self._serve(effect)
            case step.FetchState():
                self._start(do.Fetch, self._plan(), effect.position, effect.donors)
            case step.GoBack():
                self._go_back(effect)
            case step.Entered():
                self._entered(effect)
            case step.LeftPlan():
                self._answer(do.Exit("the plan goes on without this worker", drained=True))

    def _plan(self) -> Plan:
        plan = self.machine.plan
        if plan is None:
            raise InvariantViolation(f"no plan while {self.machine.phase}")
        return plan

    def _open(self, plan: Plan) -> None:
        self._close_feeds()
        self._times.opened()
        doubt = self.machine.sound >= 0
        disk = not self.machine.step or doubt or plan.stages > 1  # else what is in memory will do
        limit = self.machine.sound if doubt else None
        self._start(do.Open, plan, self.machine.step + 1, disk, limit)

    def _state_holding(self) -> None:
        holding = replace(self.machine.holding(), disk=self._turn.disk)
        self._start(do.Exchange, _SETTLE, encode_holding(holding))

    def _settle_anew(self, reason: str, tainted: int = 0, decided_in: int = 0) -> None:
        self._tell(
            wire.SettleAgain(
                worker_id=self.me.worker_id,
                incarnation=self.me.incarnation,
                generation=self.machine.generation,
                reason=reason,
                tainted=tainted,
                decided_in=decided_in,
            )
        )

    def _compute(self, effect: step.Compute) -> None:
        if isinstance(self._ask, do.HoldAsked):
            return  # the application has raised: it computes nothing more
        plan, lanes = self._plan(), effect.lanes
        if plan.stages > 1:
            rerun = self.machine.rerun
            lanes = tuple(range(plan.lanes)) if rerun is None else tuple(sorted(rerun))
        self._start(do.Compute, plan, effect.step, lanes)

    def _update(self, effect: step.Update) -> None:
        """Unless the records show that the states before the step differ: then nothing is applied, and all go back."""
        self._unshelve()
        outcome = conclude(effect.step, self.config.lanes, effect.records, stages_in(effect.records))
        found = self._compare(outcome)
        if found is None:
            self._decided(Key(effect.step, 0))
            self._start(do.Update, effect.step, effect.records, outcome, self.machine.stages)
            return
        if self._ask is None:
            return  # outvoted
        text, sound = found
        self._queue = deque(e for e in self._queue if not isinstance(e, step.SendHolding))
        self._feed(step.Tainted(sound))
        self._settle_anew(text, effect.step, self.machine.generation)

    def _compare(self, outcome: Outcome) -> tuple[str, int] | None:
        """What is wrong, and up to which step states count; None if all are alike, or this worker is outvoted."""
        found = differing(outcome)
        if found is None:
            return None
        text, outvoted = found
        sound = self.proven(outcome.step - 1)
        everybody = {who for digests in outcome.digests.values() for who in digests}
        mine = self.me.worker_id
        self._out.append(do.Condemn(sound, mine == min(everybody - outvoted, default=mine)))
        text += f"; all steps after {sound} are tainted" if sound else "; all steps are tainted"
        if mine in outvoted:
            self._answer(do.Outvoted(text, outcome.step, self.machine.generation, sound))
        return text, sound

    def proven(self, number: int) -> int:
        """After so many steps: the newest one whose state has been compared among the workers, and was alike."""
        return proven_step(number, self.config.verify_every, self.config.begins_after)

    def _decided(self, key: Key) -> None:
        first, self._turn.entered = self._turn.entered == self.machine.generation, 0
        self._out.append(do.Decided(key, self.machine.generation, first))

    def _gathered(self, effect: step.Gathered) -> None:
        self._unshelve()
        self._decided(effect.key)
        self.gathered = {k: v for k, v in self.gathered.items() if k.step == effect.key.step}
        self.gathered[effect.key] = effect.records

    def _serve(self, effect: step.ServeState) -> None:
        live = effect.position.step == self.machine.step
        at_start = effect.position.seq == 0 and self.machine.position.seq > 0  # whoever goes back to it learns nothing
        gathers = self.gathered if live and not at_start else {}
        stages = self.machine.stages if live else ()
        self._turn.shelved = True
        self._out.append(do.Shelve(effect.generation, effect.position, self.machine.records, gathers, stages, live))

    def _unshelve(self) -> None:
        if self._turn.shelved:
            self._turn.shelved = False
            self._out.append(do.Unshelve())

    def _go_back(self, effect: step.GoBack) -> None:
        at = self.machine.position
        if at.step and not (self.config.rewindable and (effect.step or self._plan().stages > 1)):
            self._answer(do.Exit(f"the job goes back to step {effect.step}, from where this worker starts anew"))
            return
        stands = at.step == effect.step
        own = self.gathered.get(Key(at.step, 0)) or (self.machine.records if not at.seq else {}) if stands else {}
        held = self.machine.stages if stands else ()
        self._out.append(do.CutFeeds())
        self._start(do.Restore, self._plan(), effect.step, effect.sources, own or {}, held)

    def _entered(self, effect: step.Entered) -> None:
        plan = self._plan()
        self._turn.entered = plan.generation
        self._out.append(do.EnteredPlan(plan, effect.step))
        top = max((h.position.step for h in self._stated.values()), default=0)
        if top > effect.step:  # so that it is known how many steps are done again
            self._out.append(do.Tell(self.progress(top, plan.generation - 1)))
        self._payloads.standing = ()
        self._tell(
            wire.GenerationEntered(
                worker_id=self.me.worker_id,
                incarnation=self.me.incarnation,
                generation=plan.generation,
                step=effect.step + 1,
                phases_ms=self._times.taken(),
            )
        )
        if plan.save:
            self._start(do.SaveLast, plan, effect.step)

    def progress(self, number: int, generation: int, step_ms: float = 0.0) -> wire.AnyMessage:
        """How far the job is."""
        return wire.Progress(
            worker_id=self.me.worker_id,
            incarnation=self.me.incarnation,
            generation=generation,
            step=number,
            step_ms=step_ms,
        )

    # ---- operations that have ended

    def _done(self, operation: do.Operation, result: object) -> None:
        match operation:
            case do.Open():
                self._opened(operation, result)  # type: ignore[arg-type]
            case do.Exchange():
                self._exchanged(operation, result)  # type: ignore[arg-type]
            case do.Reduce():
                payload = self._payloads.agree(result)  # type: ignore[arg-type]
                self._feed(step.GradientReduced(operation.generation, operation.step, payload))
            case do.Update():
                self._payloads.committed_ns = int(result)  # type: ignore[call-overload]
                self.gathered = {Key(operation.step, 0): operation.records}
                self._feed(step.Updated(operation.step))
            case do.Fetch() | do.Restore():
                self._copied(operation, result)  # type: ignore[arg-type]
            case do.OpenFeeds() | do.Watch() | do.Adopt() | do.Replay():
                self._joined_on(operation, result)
            case do.Evaluate():
                self._answer(do.Evaluated())
            case do.SaveLast():
                if result is not None:
                    self._out.append(do.Tell(result))  # type: ignore[arg-type]
            case do.Finish():
                self._finished(operation, bool(result))

    def _opened(self, operation: do.Open, result: do.Opened) -> None:
        self._times.regrouped()
        self._turn.disk = result.disk
        if result.lost:
            self._feed(step.LanesLost(operation.step, result.lost))

    def _exchanged(self, operation: do.Exchange, payloads: Mapping[int, bytes]) -> None:
        if operation.tag != _SETTLE:
            key = Key(operation.tag.step, operation.tag.seq)
            for worker_id in sorted(payloads):
                record = decode_record(payloads[worker_id])
                self._feed(step.RecordArrived(operation.generation, key, worker_id, record))
            return
        self._times.note("settle")
        self._stated = {worker_id: decode_holding(payloads[worker_id]) for worker_id in sorted(payloads)}
        for worker_id, holding in self._stated.items():
            self._feed(step.HoldingArrived(operation.generation, worker_id, holding))

    def _copied(self, operation: do.Fetch | do.Restore, result: do.Copied) -> None:
        self._times.note("heal")
        back = isinstance(operation, do.Restore)
        position = Key(operation.step, 0) if isinstance(operation, do.Restore) else operation.position
        records = result.records if back or operation.sources else self.machine.records
        if back or position != self.machine.position:
            self._out.append(do.CutFeeds())
            self.gathered = dict(result.gathers) or ({Key(position.step, 0): records} if records else {})
        if back and position != self.machine.position:  # else the application is where it should be
            self._turn.jumped, self._turn.gather, self._turn.asked = True, Key(0, 0), 0
        self._feed(step.StateCopied(operation.generation, position, records))

    def _joined_on(self, operation: do.Operation, result: object) -> None:
        """A joiner's operation has ended."""
        match operation:
            case do.OpenFeeds():
                self.joiner.opened(result)  # type: ignore[arg-type]
            case do.Watch():
                self.joiner.saw(result)  # type: ignore[arg-type]
            case do.Adopt():
                copied: do.Copied = result  # type: ignore[assignment]
                self.joiner.adopted(operation)
                self.gathered = dict(copied.gathers)
                self._feed(step.Followed(operation.position, copied.records, operation.stages))
            case do.Replay():
                key = Key(operation.step, 0)
                self.gathered = {key: operation.records}
                self._feed(step.Followed(key, operation.records, self.joiner.replayed()))

    def _finished(self, operation: do.Finish, written: bool) -> None:
        self._tell(
            wire.WorkerDone(
                worker_id=self.me.worker_id,
                incarnation=self.me.incarnation,
                generation=operation.generation,
                step=operation.step,
                final_written=written,
            )
        )

    def _aborted(self, operation: do.Operation, event: do.Aborted) -> None:
        """A transfer was left: somebody decides, and a plan comes. Tell who is accused."""
        if isinstance(operation, do.OpenFeeds | do.Watch):
            self._feeds_lost(event.reason)
            return
        if event.accused:
            self._tell(
                wire.PeerFault(
                    worker_id=self.me.worker_id,
                    incarnation=self.me.incarnation,
                    generation=operation.generation,
                    accused=sorted(event.accused),
                    reason=event.reason,
                )
            )
        self._drop_transfers()
        if isinstance(operation, do.Evaluate):
            self._answer(do.Evaluated())

    def _feeds_lost(self, reason: str) -> None:
        """A feed has ended: somebody else is asked, unless that is what was told meanwhile."""
        ticket = self.joiner.ticket
        self._close_feeds()
        if ticket is None or any(interrupts(heard.message) is not None for heard in self._news):
            return
        self._tell(
            wire.HealFailed(
                worker_id=self.me.worker_id,
                incarnation=self.me.incarnation,
                ticket=ticket.ticket,
                reason=f"healing stopped: {reason}",
            )
        )

    def _close_feeds(self) -> None:
        if self.joiner.stop():
            self._out.append(do.CloseFeeds())

    def _unusable(self, operation: do.Operation, event: do.Tainted) -> None:
        """All settle anew, with what is left; whoever cannot mend its state starts anew."""
        self._drop_transfers()
        if event.torn:
            self._answer(do.Exit(f"{event.reason}; this worker starts anew"))
        else:
            self._settle_anew(event.reason)

    # ---- the application

    def _asked(self, event: do.Ask) -> None:
        held = isinstance(event, do.HoldAsked)
        check(self._ask is None or held, f"{event} before {self._ask} was answered")
        self._ask = event
        match event:
            case do.StepAsked():
                self._turn.asked = event.step
                self._offer_feeds()
                self._feed(step.StepAsked())
            case do.GatherAsked():
                self._ask_gather(event.data)
            case do.EndAsked():
                self._turn.finished, self._turn.asked = 0, self.machine.step + 1
                self._ask_gather(b"")  # proves that all have committed the last step, whatever generations follow
            case do.HoldAsked():
                self._hold(event)

    def _offer_feeds(self) -> None:
        """The state stands still, between two steps: whoever has asked to follow may have it."""
        machine = self.machine
        if self._turn.followers and machine.settled and machine.phase is Phase.IDLE:
            self._turn.followers = False
            self._out.append(do.OfferFeeds(machine.position, machine.records, dict(self.gathered), machine.stages))

    def _ask_gather(self, data: bytes) -> None:
        at, before = self.machine.position.step, self._turn.gather
        self._turn.gather = Key(at, before.seq + 1 if before.step == at else 1)
        if self._turn.gather not in self.gathered:
            self._out.append(do.RememberLoop(at))
            self._feed(step.GatherAsked(encode_payload(GatherPayload(data, self._payloads.committed_ns))))

    def _hold(self, event: do.HoldAsked) -> None:
        if not self.settled or not self.machine.step:
            self._answer(do.Released())
            return
        self._out.append(do.DropLanes())
        self._tell(event.words)

    def _go_on(self) -> bool:
        """Answer the application, or begin what it waits for. Returns whether anything was done."""
        if isinstance(self._ask, do.HoldAsked) and (self.ended or self._times.now_ns >= self._ask.until_ns):
            return self._answer(do.Released())
        if self.machine.plan is None:
            return self._join_on()
        if self.settled and self._turn.jumped and not isinstance(self._ask, do.JoinAsked | do.HoldAsked):
            self._turn.jumped = False
            return self._answer(do.WentBack(self.machine.step))
        match self._ask:
            case do.JoinAsked() if self.settled:
                self._turn.jumped = False
                return self._answer(do.Arrived(self.machine.step))
            case do.StepAsked(number) if self.settled and self.machine.step >= number:
                return self._answer(do.Stepped(number))
            case do.GatherAsked() if self._turn.gather in self.gathered or self.ended:
                return self._answer(do.GatherDone(self.gathered.get(self._turn.gather, {})))
            case do.EndAsked() if self._turn.gather in self.gathered or self.ended:
                return self._finish()
            case do.GatherAsked() | do.EndAsked() if self.machine.step > self._turn.gather.step:
                key = self._turn.gather
                reason = f"the others have decided {key} without this worker; it has to start anew"
                return self._answer(do.Exit(reason))
            case do.EvaluateAsked():
                return self._evaluate()
        return self._left_over()

    def _left_over(self) -> bool:
        """The job is over while this worker waits for a step, or to be taken in."""
        if self.ended and isinstance(self._ask, do.JoinAsked | do.StepAsked):
            return self._answer(do.Exit("the job is over, and this worker was not needed", drained=True))
        return False

    def _evaluate(self) -> bool:
        if self.ended:
            return self._answer(do.Evaluated())
        if self.settled:
            self._start(do.Evaluate, self._plan(), self._turn.gather.seq)
        return self.settled

    def _finish(self) -> bool:
        if self.ended:
            return self._answer(do.JobOver())
        if not self.settled or self._turn.finished == self.machine.generation:
            return False
        self._turn.finished = self.machine.generation
        self._start(do.Finish, self._plan(), self.machine.step)
        return True

    def _join_on(self) -> bool:
        """A worker that is no member yet: heal."""
        ticket, wanted = self.joiner.ticket, None if self.ended else self.joiner.next()
        if wanted is None or ticket is None:
            return self._left_over()
        if wanted == "healed":
            self._tell(
                wire.WorkerHealed(
                    worker_id=self.me.worker_id,
                    incarnation=self.me.incarnation,
                    ticket=ticket.ticket,
                    step=self.machine.step,
                )
            )
            return True
        make, args = wanted
        if make is do.Replay and (found := self._compare(args[2])) is not None:
            self._feeds_lost(found[0])
        else:
            self._start(make, *args, generation=ticket.plan.generation)
        return True


class _Turn:
    """Small things that are remembered from one event to another."""

    def __init__(self) -> None:
        self.operations = 0
        self.entered = 0
        self.shelved = False
        self.followers = False
        self.jumped = False
        self.asked = 0
        self.gather = Key(0, 0)
        self.finished = 0
        self.disk: tuple[int, ...] = ()


class _Payloads:
    """What this worker's next records say of the last step, and what it has told that may have to be told again."""

    def __init__(self) -> None:
        self.committed_ns = 0
        self.standing: tuple[wire.AnyMessage, ...] = ()

    def agree(self, payload: AgreePayload) -> bytes:
        return encode_payload(payload.at(self.committed_ns))

    def remember(self, message: wire.AnyMessage) -> None:
        others = tuple(m for m in self.standing if type(m) is not type(message))
        self.standing = (*others, message)


class _Times:
    """How long the parts of a recovery took; in ns, monotonic."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.arrived_ns = 0
        self.began_ns = 0
        self._phases_ms: dict[str, float] = {}

    def note(self, phase: str) -> None:
        """The operation that just ended was this phase."""
        self._phases_ms[phase] = (self.now_ns - self.began_ns) / 1e6

    def opened(self) -> None:
        if self.arrived_ns:
            self._phases_ms["unblock"] = (self.now_ns - self.arrived_ns) / 1e6
        self.arrived_ns = 0

    def regrouped(self) -> None:
        self.note("regroup")

    def taken(self) -> dict[str, float]:
        """All since the last generation."""
        taken, self._phases_ms = self._phases_ms, {}
        return taken
