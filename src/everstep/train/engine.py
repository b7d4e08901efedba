"""The engine: executes the step machine's effects, and feeds it what happens.

Apart from `session` so that control flow (plans, settling, exchanges) and work (lanes, updates, state) do not mix: the
engine knows no model, and its `Hands` know no generation. One thread runs all of this; control threads only put plans
into the inbox and abort transfers.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from everstep.base.errors import CollectiveAborted, EverstepError, Evicted, JobFailed, StateTainted, check
from everstep.base.plan import Plan, WorkerKey
from everstep.base.ports import Tag, Tick
from everstep.protocol import messages as wire
from everstep.protocol import step_types as step
from everstep.protocol.driver.records import decode_holding, decode_record, encode_holding, encode_record
from everstep.protocol.step_machine import Phase, StepMachine
from everstep.protocol.step_types import Key, Record

_SETTLE = Tag("settle", 0, 0)
_UNSETTLED = frozenset({Phase.WAITING, Phase.SETTLING, Phase.FETCHING, Phase.UPDATING, Phase.LEFT})
_DECIDED = step.Update | step.Gathered | step.Release | step.Discard


class WentBack(EverstepError):
    """The state has jumped to that of another step: what the application was doing is over, it goes on from there."""


class Exchange(Protocol):
    """What the engine needs of a transport."""

    def exchange(self, tag: Tag, payload: bytes) -> dict[int, bytes]:
        """All-gather of small records."""
        ...

    def abort(self, generation: int) -> None:
        """Thread-safe. Free whoever waits in an operation of this generation or an older one."""
        ...


class Hands(Protocol):
    """What the engine has done by others."""

    def phase(self, name: str, step: int, plan: Plan | None) -> None:
        """A phase begins (progress board, scripted faults)."""
        ...

    def regroup(self, plan: Plan) -> None:
        """Open the transport, and have what the plan's seats need."""
        ...

    def lacking(self, step: int, plan: Plan) -> tuple[int, ...]:
        """Lanes whose results of the step are lacking at one of the own seats at least; for split models."""
        ...

    def prepare(self, step: int, plan: Plan) -> tuple[int, ...]:
        """The plan's lanes of the step are wanted from here; returns those that are still to be computed."""
        ...

    def reduce(self, step: int, plan: Plan) -> bytes:
        """Finish the reduction of the step; returns the payload of the agree record."""
        ...

    def update(self, step: int, records: Mapping[int, Record]) -> None:
        """Apply the decided step. Raises: StateTainted, having changed nothing, if the records forbid it."""
        ...

    def gather_payload(self, data: bytes) -> bytes:
        """Wrap the application's data for a gather."""
        ...

    def decided(self, key: Key, records: Mapping[int, Record]) -> None:
        """A decision was taken here (called before its update)."""
        ...

    def release(self, step: int) -> None:
        """Effects of the step, and of older ones, may leave the process."""
        ...

    def discard(self, step: int) -> None:
        """Lane results of this step and older are no longer needed."""
        ...

    def serve(self, plan: Plan, position: Key, to: tuple[int, ...]) -> None:
        """Give the state to members that lack it."""
        ...

    def fetch(self, plan: Plan, position: Key, donors: Mapping[int, tuple[int, ...]]) -> Mapping[int, Record]:
        """Copy the state from one of the donors of each stage; returns the records of `position`."""
        ...

    def go_back(self, plan: Plan, step: int, sources: Mapping[int, tuple[int, ...]]) -> Mapping[int, Record]:
        """Take on the state of a step; returns its records."""
        ...

    def restorable(self, limit: int | None) -> tuple[int, ...]:
        """The newest steps, up to the limit if there is one, whose checkpoints can be read here."""
        ...

    def entered(self, plan: Plan, step: int, phases_ms: dict[str, float]) -> None:
        """A generation goes on from here."""
        ...


class Engine:
    """Drives one worker's step machine.

    `tell` sends a message to the coordinator. Plans and other news arrive through `deliver`, from any thread.
    """

    def __init__(
        self, me: WorkerKey, transport: Exchange, hands: Hands, tell: Callable[[wire.AnyMessage], None], tick: Tick
    ) -> None:
        self.me = me
        self.machine = StepMachine(me)
        self.transport = transport
        self.hands = hands
        self.tell = tell
        self.tick = tick
        self.lanes: deque[int] = deque()
        self.lanes_step = 0
        self.jumps = 0
        self._stated: dict[int, step.Holding] = {}
        self.gathered: dict[Key, Mapping[int, Record]] = {}
        self.ended: wire.JobEnded | None = None
        self.heal: wire.Heal | None = None
        self._inbox: queue.SimpleQueue[wire.AnyMessage] = queue.SimpleQueue()
        self._effects: deque[step.StepEffect] = deque()
        self._after_lanes: step.Reduce | None = None
        self._arrived_ns = 0
        self._phases_ms: dict[str, float] = {}
        self._asked_gather = Key(0, 0)
        self._jumps_seen = 0

    # ---- from other threads

    def deliver(self, message: wire.AnyMessage) -> None:
        """Thread-safe. An immediate plan frees this worker from whatever transfer it waits in."""
        self._inbox.put(message)
        if isinstance(message, wire.PlanNow):
            self._arrived_ns = time.monotonic_ns()
            self.transport.abort(message.plan.generation - 1)
        elif isinstance(message, wire.JobEnded | wire.Dismissed):
            self.transport.abort(1 << 31)

    # ---- what the session asks

    @property
    def plan(self) -> Plan | None:
        return self.machine.plan

    @property
    def position(self) -> Key:
        return self.machine.position

    def ask_step(self) -> None:
        self.handle(step.StepAsked())

    def next_lane(self, number: int) -> int | None:
        """The next lane to compute for the step, or None once the step is applied here (or the state is beyond it).

        Raises: WentBack if the step was left for another one.
        """
        return self.lanes.popleft() if self._await_lanes(number) else None

    def next_lanes(self, number: int) -> tuple[int, ...] | None:
        """All lanes that are to be computed now, for a model that is split; else as `next_lane`."""
        if not self._await_lanes(number):
            return None
        lanes = tuple(self.lanes)
        self.lanes.clear()
        return lanes

    def _await_lanes(self, number: int) -> bool:
        while True:
            self.news()
            while self._effects:
                self._execute(self._effects.popleft())
                self.news()
            if self.settled:
                self._check_jumps()
                if self.machine.position.step >= number:
                    return False
            if self.lanes and self.lanes_step == number:
                return True
            if self._after_lanes is not None:
                self._effects.append(self._after_lanes)
                self._after_lanes = None
            else:
                self._wait_news()

    def lane_done(self, number: int, lane: int, stage: int = 0) -> None:
        self.handle(step.LaneDone(number, stage, lane))

    def superseded(self, generation: int) -> bool:
        """Take in news; whether what is done for this generation is not wanted any more."""
        self.news()
        return self.machine.generation != generation

    def left(self, fault: CollectiveAborted, generation: int) -> None:
        """A transfer of this generation was left: somebody decides, and a plan comes."""
        if self.machine.generation == generation:
            self._aborted(fault)

    @property
    def top_stated(self) -> int:
        """The newest step that a member was at when this generation settled."""
        return max((h.position.step for h in self._stated.values()), default=0)

    def in_memory(self, number: int) -> bool:
        """Whether a member stated, when this generation settled, that it has state of this step in memory."""
        holdings = self._stated.values()
        return any(h.position.step == number or any(s == number for _, s in h.snapshots) for h in holdings)

    def arrived(self) -> bool:
        """Whether the state has jumped since this was asked last (true the first time): go on from there."""
        jumped = self._jumps_seen < self.jumps or self._jumps_seen == 0
        self._jumps_seen = max(1, self.jumps)
        return jumped

    def _check_jumps(self) -> None:
        if self._jumps_seen < self.jumps:
            raise WentBack(f"the state is that of step {self.machine.position.step} now")

    @property
    def last_gather(self) -> Key:
        """Of the gather that was asked for last."""
        return self._asked_gather

    def gather(self, data: bytes) -> Mapping[int, Record]:
        """One decision beyond the step: all members' data, the same at all. Survives changes of the membership.

        Raises: Evicted if the others have gone on without this worker's application; WentBack.
        """
        at = self.machine.position.step
        self._asked_gather = Key(at, self._asked_gather.seq + 1 if self._asked_gather.step == at else 1)
        key = self._asked_gather
        if key not in self.gathered:
            self.handle(step.GatherAsked(self.hands.gather_payload(data)))
        while key not in self.gathered and self.ended is None:
            if self.machine.position.step > at:
                raise Evicted(f"the others have decided {key} without this worker; it has to start anew")
            self.turn()
            if self.settled:
                self._check_jumps()
        return self.gathered.get(key, {})

    def wait_end(self, generation: int) -> bool:
        """After the last decision: True when the job has ended, False when this generation was followed by another.

        Raises: WentBack.
        """
        while self.ended is None:
            if self.settled:
                self._check_jumps()
                if self.machine.generation != generation:
                    return False
            self.turn(raise_end=False)
        return True

    def note_phase(self, name: str, begin_ns: int) -> None:
        """Time since `begin_ns` (monotonic) went into this phase of the present recovery."""
        self._phases_ms[name] = (time.monotonic_ns() - begin_ns) / 1e6

    # ---- turning the wheel

    @property
    def busy(self) -> bool:
        """Whether effects wait to be carried out."""
        return bool(self._effects)

    @property
    def settled(self) -> bool:
        """Whether this worker is a member that may go on."""
        return self.machine.phase not in _UNSETTLED and not self.busy

    def turn(self, raise_end: bool = True) -> None:
        """One effect, or a short wait for news."""
        self.news(raise_end)
        if self._effects:
            self._execute(self._effects.popleft())
        elif not (self.ended and not raise_end):
            self._wait_news(raise_end)

    def _wait_news(self, raise_end: bool = True) -> None:
        self.tick()
        try:
            message = self._inbox.get(timeout=0.02)
        except queue.Empty:
            return
        self._take(message, raise_end)

    def news(self, raise_end: bool = True) -> None:
        """Take in what has come from the coordinator."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._take(message, raise_end)

    def _take(self, message: wire.AnyMessage, raise_end: bool) -> None:
        if isinstance(message, wire.PlanNow):
            if message.plan.has(self.me):
                self.handle(step.PlanArrived(message.plan))
        elif isinstance(message, wire.PlanPrepared):
            self.handle(step.PreparedArrived(message.plan))
        elif isinstance(message, wire.Heal):
            plan = self.machine.plan
            if plan is not None and message.plan.generation > plan.generation:
                raise Evicted(
                    f"it followed a switch to generation {plan.generation}, but the others went on without it as "
                    f"generation {message.plan.generation}; it has to start anew"
                )
            self.heal = message
        elif isinstance(message, wire.Dismissed):
            raise Evicted(message.reason, message.drained)
        elif isinstance(message, wire.JobEnded):
            self.ended = message
            if raise_end and message.state != "completed":
                raise JobFailed(message.reason)

    def handle(self, event: step.StepEvent) -> None:
        """Feed the machine; its effects are carried out in turn."""
        effects = self.machine.handle(time.monotonic_ns(), event)
        if any(isinstance(e, step.Leave | step.Open) for e in effects):
            self._drop_transfers()
        self._effects.extend(effects)

    def _drop_transfers(self) -> None:
        """What has been decided is still carried out; everything that needs the old generation is not."""
        self._effects = deque(e for e in self._effects if isinstance(e, _DECIDED))
        self._after_lanes = None
        self.lanes.clear()

    # ---- effects

    def _execute(self, effect: step.StepEffect) -> None:
        generation = self.machine.generation
        try:
            self._perform(effect)
        except CollectiveAborted as fault:
            if self.machine.generation == generation:
                self._aborted(fault)

    def _aborted(self, fault: CollectiveAborted) -> None:
        """A transfer was left: somebody decides, and a plan comes. Tell who is accused."""
        if fault.accused:
            accusation = wire.PeerFault(
                worker_id=self.me.worker_id,
                incarnation=self.me.incarnation,
                generation=self.machine.generation,
                accused=sorted(fault.accused),
                reason=str(fault),
            )
            self.tell(accusation)
        self._drop_transfers()

    def _perform(self, effect: step.StepEffect) -> None:  # one line per effect: the table of what each one means
        plan = self.machine.plan
        match effect:
            case step.Leave(generation=generation):
                self.transport.abort(generation)
            case step.Open():
                self._open(effect.plan)
            case step.SendHolding():
                self._settle(effect)
            case step.SettleAnew():
                self._settle_anew(effect.generation, effect.reason)
            case step.Compute():
                self._want_lanes(effect.step)
                if plan is not None and plan.stages > 1:
                    self.lanes = deque(range(plan.lanes) if self.machine.rerun is None else sorted(self.machine.rerun))
            case step.Reduce():
                self._reduce(effect)
            case step.SendRecord():
                self._decide(effect)
            case step.Update():
                self.hands.phase("update", effect.step, plan)
                try:
                    self.hands.update(effect.step, effect.records)
                except StateTainted as found:
                    self._tainted(found)
                else:
                    self.handle(step.Updated(effect.step))
            case step.Gathered():
                self.hands.decided(effect.key, effect.records)
                self.gathered = {k: v for k, v in self.gathered.items() if k.step == effect.key.step}
                self.gathered[effect.key] = effect.records
            case step.Release():
                self.hands.release(effect.step)
            case step.Discard():
                self.hands.discard(effect.step)
            case step.ServeState():
                self.hands.serve(plan, effect.position, effect.to)  # type: ignore[arg-type]
            case step.FetchState():
                self.hands.phase("heal", effect.position.step, plan)
                records = self.hands.fetch(plan, effect.position, effect.donors)  # type: ignore[arg-type]
                self.handle(step.StateCopied(effect.generation, effect.position, records))
            case step.GoBack():
                self.hands.phase("heal", effect.step, plan)
                records = self.hands.go_back(plan, effect.step, effect.sources)  # type: ignore[arg-type]
                if self.machine.position != Key(effect.step, 0):  # else the application is where it should be
                    self.jumps = max(1, self.jumps, self._jumps_seen) + 1
                    self._asked_gather = Key(0, 0)
                self.handle(step.StateCopied(effect.generation, Key(effect.step, 0), records))
            case step.Entered():
                self.hands.entered(plan, effect.step, self._phases_ms)  # type: ignore[arg-type]
                self._phases_ms = {}
            case step.LeftPlan():
                raise Evicted("the plan goes on without this worker", drained=True)

    def _tainted(self, found: StateTainted) -> None:
        """All go back; whoever is outvoted leaves, and comes back as a new life."""
        if found.outvoted:
            raise found
        self._effects = deque(e for e in self._effects if not isinstance(e, step.SendHolding))
        self.handle(step.Tainted(found.sound))
        self._settle_anew(self.machine.generation, str(found), found.step, found.generation)

    def _settle_anew(self, generation: int, reason: str, tainted: int = 0, decided_in: int = 0) -> None:
        self.tell(
            wire.SettleAgain(
                worker_id=self.me.worker_id,
                incarnation=self.me.incarnation,
                generation=generation,
                reason=reason,
                tainted=tainted,
                decided_in=decided_in,
            )
        )

    def _want_lanes(self, number: int) -> None:
        plan = self.machine.plan
        check(plan is not None, "lanes without a plan")
        self.lanes, self.lanes_step = deque(self.hands.prepare(number, plan)), number  # type: ignore[arg-type]

    def _reduce(self, effect: step.Reduce) -> None:
        """Offer the lanes, unless a sum has to be made anew first because a plan took some of its lanes away."""
        plan = self.machine.plan
        self._want_lanes(effect.step)
        if self.lanes:
            self._after_lanes = effect
            return
        self.hands.phase("reduce", effect.step, plan)
        payload = self.hands.reduce(effect.step, plan)  # type: ignore[arg-type]
        self.handle(step.GradientReduced(effect.generation, effect.step, payload))

    def _open(self, plan: Plan) -> None:
        now = time.monotonic_ns()
        if self._arrived_ns:
            self._phases_ms["unblock"] = (now - self._arrived_ns) / 1e6
        self._arrived_ns = 0
        self.hands.regroup(plan)
        self._phases_ms["regroup"] = (time.monotonic_ns() - now) / 1e6

    def _settle(self, effect: step.SendHolding) -> None:
        begin = time.monotonic_ns()
        plan, holding = self.machine.plan, effect.holding
        self.hands.phase("settle", holding.position.step, plan)
        if plan is not None and plan.stages > 1:  # the plan may have taken lanes out of sums that were held
            holding = replace(holding, lacking=self.hands.lacking(holding.position.step + 1, plan))
        doubt = holding.sound >= 0
        if not holding.position.step or doubt or (plan is not None and plan.stages > 1):  # else memory will do
            holding = replace(holding, disk=self.hands.restorable(holding.sound if doubt else None))
        held = self.transport.exchange(_SETTLE, encode_holding(holding))
        self._phases_ms["settle"] = (time.monotonic_ns() - begin) / 1e6
        stated = {worker_id: decode_holding(held[worker_id]) for worker_id in sorted(held)}
        self._stated = stated
        for worker_id, one in stated.items():
            self.handle(step.HoldingArrived(effect.generation, worker_id, one))

    def _decide(self, effect: step.SendRecord) -> None:
        key = effect.key
        if key.seq == 0:
            self.hands.phase("agree", key.step, self.machine.plan)
        records = self.transport.exchange(Tag("decide", key.step, key.seq), encode_record(effect.record))
        for worker_id in sorted(records):
            self.handle(step.RecordArrived(effect.generation, key, worker_id, decode_record(records[worker_id])))
