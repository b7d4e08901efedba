"""Drives one driver as its executor, its application, its coordinator and its peers would. Shared by several tests.

Nothing is answered by itself: a test hears what the driver asks for, and says what became of it. What it need not say
is short: `enter` settles, `step` goes through a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.extents import WHOLE
from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.driver import Driver
from everstep.protocol.driver.driver_parts import DriverConfig
from everstep.protocol.driver.records import (
    AgreePayload,
    GatherPayload,
    LaneReport,
    StageSection,
    decode_holding,
    decode_record,
    encode,
    encode_holding,
)
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import Holding, Key, LaneDone, Record

LANES = 4
ME = WorkerKey(0, 0)
MS = 1_000_000


def member(worker_id: int, incarnation: int = 0) -> Member:
    return Member(worker_id, incarnation, "host", address=f"host:{worker_id}")


def plan(generation: int, *pools: Sequence[int], idle: Sequence[int] = (), lanes: int = LANES, **more: Any) -> Plan:
    """A pool of worker ids per stage, its lanes dealt out in turn; idle: those that get none."""
    seats = []
    for stage, pool in enumerate(pools):
        busy = [i for i in pool if i not in idle]
        for i in pool:
            own = tuple(lane for lane in range(lanes) if i in busy and lane % len(busy) == busy.index(i))
            seats.append(Seat(i, stage, "active" if own else "standby", own))
    ids = sorted({i for pool in pools for i in pool})
    return Plan(generation, "because", tuple(map(member, ids)), tuple(seats), lanes, stages=len(pools) or 1, **more)


def section(given: Plan, worker_id: int, stage: int, digest: str = "", tied: Mapping[str, str] | None = None) -> Any:
    """What an agree record says of one stage."""
    lanes = given.lanes_of(worker_id, stage) if stage == given.stages - 1 else ()
    reports = [LaneReport(lane, 1.0, 1.0, 1, 0) for lane in lanes]
    return StageSection(stage, reports, (), b"", [], [b""], digest, dict(tied or {}))


def payload(given: Plan, worker_id: int, digest: str | Mapping[int, str] = "", **more: Any) -> AgreePayload:
    """A worker's agree payload; digest: of its state before the step, or one by stage."""
    stages = given.stages_of(worker_id)
    digests = digest if isinstance(digest, Mapping) else dict.fromkeys(stages, digest)
    more.setdefault("save_cause", Cause.SCHEDULED)
    return AgreePayload([section(given, worker_id, k, digests[k]) for k in stages], **more)


def records_of(
    given: Plan, digests: Mapping[int, Any] | None = None, prepared: int = 0, but: int | None = None
) -> dict[int, Record]:
    """The records of an agree of all members (`but` one)."""
    found = digests or {}
    return {i: Record(prepared, encode(payload(given, i, found.get(i, "")))) for i in given.worker_ids if i != but}


def heard_alike(mine: Holding, theirs: Holding) -> Holding:
    """A peer's statement that has gathered the same on its way, if it does not say what."""
    if theirs.gathered[0] or theirs.position.step != mine.position.step:
        return theirs
    up_to, before = mine.gathered
    match theirs.position.seq - mine.position.seq:
        case 0:
            return replace(theirs, gathered=mine.gathered)
        case 1:
            return replace(theirs, gathered=("one more", up_to))
        case -1:
            return replace(theirs, gathered=(before, ""))
    return theirs


def gather_records(given: Plan, ends: bool = False, **data: bytes) -> dict[int, Record]:
    """The records of a gather; data: w0=b"...", by worker. ends: the loops of all are over."""
    return {i: Record(0, encode(GatherPayload(data.get(f"w{i}", b""), 0, ends))) for i in given.worker_ids}


def at(step: int, seq: int = 0, stages: tuple[int, ...] = (0,), **more: Any) -> Holding:
    """What a peer states."""
    given = {
        "records": {9: Record(0, b"")} if step else {},
        "gradient_step": 0,
        "gradients": dict.fromkeys(stages, WHOLE),
        "stages": dict.fromkeys(stages, WHOLE),
    }
    return Holding(Key(step, seq), **{**given, **more})


def ticket(number: int, given: Plan, stages: Sequence[int] = (0,), **more: Any) -> wire.Heal:
    return wire.Heal(ticket=number, plan=given, donors=list(given.members), stages=list(stages), **more)


class Worker:
    """One driver under test. `out`: effects of the last event; `seen`: of all; `op`: the outstanding operation."""

    def __init__(
        self, first: Plan | None = None, *, me: WorkerKey = ME, digest: str = "", lanes: int = LANES, **config: Any
    ) -> None:
        self.me = me
        self.driver = Driver(DriverConfig(lanes, **config), StepMachine(me, digest))
        self.out: list[Any] = []
        self.seen: list[Any] = []
        self.op: Any = None
        self.now = 0
        if first is not None:
            self.ask(do.JoinAsked())
            self.hear(first)
            self.settle()

    # ---- events

    def keeps(self, snapshots):
        """These snapshots, (stage, step), are in memory here, with the records of their steps."""
        self.knows(*(number for _, number in snapshots))
        return self.on(do.InMemory(dict.fromkeys(snapshots, WHOLE)))

    def knows(self, *steps: int) -> None:
        """It has taken snapshots of these steps."""
        self.driver._parts.keeper._records |= {number: {0: Record(0, b"kept")} for number in steps}

    def on(self, event: object) -> list[Any]:
        self.now += MS
        self.out = self.driver.handle(self.now, event)
        self.seen += self.out
        for effect in self.out:
            if isinstance(effect, do.Operation):
                assert self.op is None, f"{effect} while {self.op} is outstanding"
                self.op = effect
        return self.out

    def ask(self, event: do.Ask) -> list[Any]:
        return self.on(event)

    def hear(self, message: wire.AnyMessage | Plan) -> list[Any]:
        """A message of the coordinator, right after what was before; a plan comes as it is meant."""
        if isinstance(message, Plan):
            message = wire.PlanPrepared(plan=message) if message.prepared else wire.PlanNow(plan=message)
        return self.on(do.Heard(message=message, arrived_ns=self.now))

    def _end(self) -> Any:
        operation, self.op = self.op, None
        assert operation is not None, "nothing is outstanding"
        return operation

    def done(self, result: object = None) -> list[Any]:
        return self.on(do.Done(op=self._end().op, result=result))

    def abort(self, *accused: int, reason: str = "") -> list[Any]:
        return self.on(do.Aborted(op=self._end().op, accused=accused, why=Why(Cause.SILENT, reason)))

    def taint(self, reason: str = "broken", torn: bool = False, odd: tuple[int, ...] = ()) -> list[Any]:
        return self.on(do.Tainted(op=self._end().op, why=Why(Cause.DISK, reason), torn=torn, odd=odd))

    # ---- what is short

    @property
    def kinds(self) -> list[str]:
        """Names of the last effects."""
        return [type(e).__name__ for e in self.out]

    @property
    def plan(self) -> Plan:
        found = self.driver.machine.plan
        assert found is not None
        return found

    def told(self, kind: type | None = None) -> list[Any]:
        """Messages to the coordinator, of all events so far."""
        return [e.message for e in self.seen if isinstance(e, do.Tell) and isinstance(e.message, kind or object)]

    def last(self, kind: type) -> Any:
        return [e for e in self.seen if isinstance(e, kind)][-1]

    def count(self, kind: type) -> int:
        return sum(isinstance(e, kind) for e in self.seen)

    def stated(self) -> Holding:
        """What this worker states in the outstanding settle."""
        assert self.op.tag.kind == "settle"
        return decode_holding(self.op.payload)

    def settle(self, opened: do.Opened | None = None, **others: Holding | None) -> list[Any]:
        """Open, and state what is held. others: w1=... what a peer states; else the same as this worker."""
        assert isinstance(self.op, do.Open)
        self.done(opened or do.Opened())
        mine = self.stated()
        held = {i: others.get(f"w{i}") or self._like(mine, i) for i in self.plan.worker_ids}
        held = {i: heard_alike(mine, h) for i, h in held.items()}
        return self.done({i: encode_holding(mine if i == self.me.worker_id else h) for i, h in held.items()})

    def _like(self, mine: Holding, worker_id: int) -> Holding:
        stages = self.plan.stages_of(worker_id)
        own = {lane for stage in stages for lane in self.plan.lanes_of(worker_id, stage)}
        return replace(
            mine,
            stages=dict.fromkeys(stages, WHOLE),
            gradients=dict.fromkeys(stages, WHOLE),
            lacking=tuple(sorted(own)) if mine.lacking else (),
        )

    def enter(self, given: Plan, opened: do.Opened | None = None, **others: Holding | None) -> list[Any]:
        """Another generation: leave what is outstanding, and settle."""
        self.hear(given)
        if self.op is not None:
            self.abort()
        return self.settle(opened, **others)

    def lanes(self) -> list[Any]:
        """All lanes that are to be computed, at all own seats."""
        assert isinstance(self.op, do.Compute)
        for stage in self.plan.stages_of(self.me.worker_id):
            for lane in set(self.op.lanes) & set(self.plan.lanes_of(self.me.worker_id, stage)):
                self.on(LaneDone(self.op.step, stage, lane))
        return self.done()

    def reduce(self, digest: str | Mapping[int, str] = "", **more: Any) -> list[Any]:
        assert isinstance(self.op, do.Reduce)
        return self.done(payload(self.plan, self.me.worker_id, digest, **more))

    def exchange(self, others: Mapping[int, Record]) -> list[Any]:
        """Everybody's records for the decision that this worker contributes to."""
        assert isinstance(self.op, do.Exchange) and self.op.tag.kind == "decide"
        return self.done({**{i: encode(r) for i, r in others.items()}, self.me.worker_id: self.op.payload})

    def sent(self) -> Record:
        """What this worker contributes to the outstanding decision."""
        return decode_record(self.op.payload)

    def agree(self, digests: Mapping[int, Any] | None = None, prepared: int = 0) -> list[Any]:
        return self.exchange(records_of(self.plan, digests, prepared, but=self.me.worker_id))

    def to_reduce(self, number: int) -> list[Any]:
        """Ask for a step, and compute what is to be computed."""
        self.ask(do.StepAsked(number))
        return self.lanes() if isinstance(self.op, do.Compute) else self.out

    def to_agree(self, number: int, digest: str | Mapping[int, str] = "") -> list[Any]:
        """As far as contributing to the decision."""
        self.to_reduce(number)
        return self.reduce(digest)

    def step(self, number: int, prepared: int = 0) -> list[Any]:
        """A whole step, up to the answer."""
        self.to_agree(number)
        self.agree(prepared=prepared)
        assert isinstance(self.op, do.Update)
        return self.done(1000 + number)

    def gather(self, data: bytes = b"", **others: bytes) -> list[Any]:
        """A whole gather, up to the answer."""
        self.ask(do.GatherAsked(data))
        return self.exchange(gather_records(self.plan, **others))


def member_worker(*ids: int, **config: Any) -> Worker:
    """Worker 0 as a settled member of generation 1, where all are at step 0; its application has the turn."""
    return Worker(plan(1, ids or (0, 1)), **config)


def joiner(**config: Any) -> Worker:
    """A worker that waits to be taken in."""
    w = Worker(**config)
    w.ask(do.JoinAsked())
    return w
