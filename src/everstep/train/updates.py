"""From a step's lanes to the next state: reduce, contribute, apply; and report steps that cannot be undone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import msgspec
from torch import Tensor

from everstep.base.cause import Cause
from everstep.base.config import inexact
from everstep.base.errors import RepeatedOtherwise
from everstep.base.extents import Extents
from everstep.base.plan import Plan
from everstep.base.ports import Hop, Reduced
from everstep.exact.reduce import TiePlace, tied_out
from everstep.placement.probes import alone
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.probing import LanesGiven
from everstep.protocol.driver.records import AgreePayload, StageSection, StepOutcome, committed_unix_ns
from everstep.protocol.step_types import Discard, Key, Record, Release
from everstep.train.dealing import Dealing
from everstep.train.elastic import ElasticOrder
from everstep.train.heal import Donor, StageGradient
from everstep.train.keeping import SnapshotKeeper
from everstep.train.loop_state import LoopState
from everstep.train.saving import PartSaver
from everstep.train.view import WorkerView

_PROGRESS_NS = 200_000_000
_MOST_SAMPLES = 32


@dataclass
class Updates:
    """One worker's reductions and updates. outcome: of the step whose state this worker has, if it is known. given:
    results of lanes that several workers compute."""

    _view: WorkerView
    _donor: Donor
    _keeper: SnapshotKeeper
    _saver: PartSaver
    _loop: LoopState
    _dealing: Dealing
    outcome: StepOutcome | None = None
    given: LanesGiven = field(default_factory=LanesGiven)
    _reduced: dict[int, tuple[int, dict[int, StageGradient]]] = field(default_factory=dict)
    """By step: the generation, and the gradients by stage."""
    _entered: int = 0
    _began_ns: int = 0
    _told_ns: int = 0
    _compared: bool = False

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {
            do.Update: self.update,
            do.Spread: self._dealing.spread,
            do.Decided: self.decided,
            Release: self.release,
            Discard: self.discard,
            do.EnteredPlan: self.entered,
            do.DropLanes: self.drop_lanes,
        }

    def begin_step(self) -> None:
        """The loop is about to ask for a step."""
        self._began_ns = time.monotonic_ns()

    # ---- operations

    def reduce(self, operation: do.Reduce) -> AgreePayload:
        """Reduce the gradients of all stages held here. Raises: CollectiveAborted."""
        view, plan, number = self._view, operation.plan, operation.step
        me, stages = view.me, view.stages
        view.phase("reduce", number, plan)
        lanes = {stage: plan.lanes_of(me, stage) for stage in plan.stages_of(me)}
        offers = {k: stages[k].lanes.presence(number, lanes[k]) for k in lanes}
        if len(plan.members) > 1:
            view.link.row.sent("reduce", sum(4 * stages[k].layout.numel * len(found) for k, found in offers.items()))
        for stage in offers:
            self._dealing.divide(plan, number, stage)
        reduced = {k: view.transport.reduce(k, number, offered) for k, offered in offers.items()}
        received = exchange_ties(view, plan, number, reduced)
        found = {k: StageGradient(reduced[k], received.get(k, {})) for k in lanes}
        before = self._reduced[number][1] if number in self._reduced else {}
        self._reduced[number] = plan.generation, {**before, **found}
        self._dealing.reduced(
            plan, number, {k: stages[k].handover.present(g.reduced, g.received) for k, g in found.items()}
        )
        settings = [stages[k].how_set() for k in found]  # refused before anything is made of these lanes
        due = operation.compare
        sections = [
            stages[k].section(
                *(g.reduced, lanes[k], stages[k].compared(number - 1) if due else "", g.received, due, how),
                self.given.of(number, stages[k].spec.parts),
            )
            for (k, g), how in zip(found.items(), settings, strict=True)
        ]
        return AgreePayload(sections)

    def last_states(self, left: bool) -> tuple[StageSection, ...]:
        """Digests of the state after the last step; none in a job of one worker. left: a lane of the
        next one may have begun, of which nothing counts."""
        plan, view = self._view.plan, self._view
        held = () if plan is None or len(plan.members) == 1 else plan.stages_of(view.me)
        for stage in held if left else ():
            view.stages[stage].lanes.drop()
        return tuple(view.stages[stage].said(view.step) for stage in held)

    def update(self, operation: do.Update) -> int:
        """Apply a decided step; returns the unix time in ns at which that began."""
        began, number = time.time_ns(), operation.step
        self._view.phase("update", number, self._view.plan)
        self._view.stages.keep(operation.stages)
        generation, gradients = self._reduced[number]
        self.apply(operation.outcome, operation.records, gradients, generation)
        self._view.publisher.committed(number, began)  # until the records of a later decision say who was first
        return began

    def apply(
        self,
        outcome: StepOutcome,
        records: Mapping[int, Record],
        gradients: Mapping[int, StageGradient],
        generation: int,
        joins: Plan | None = None,
    ) -> dict[int, Extents]:
        """The step's update, with the reduced gradients of all stages that are held; made in this generation. joins:
        the plan with a joiner's parts. Returns its blocks of stages of which it has a part."""
        view, number = self._view, outcome.step
        if joins is not None:
            self._dealing.follow(joins, number)
        view.link.row.set(phase="stall")
        self.before(number, records, gradients)
        view.link.row.set(phase="update")
        order = view.order
        workers = order.workers if isinstance(order, ElasticOrder) else 0
        extra: dict[str, Any] = {}
        for stage, replica in view.stages.items():
            found = gradients[stage]
            dealt = partial(self._dealing.of, number, stage)
            extra = replica.apply(outcome, found.reduced, workers, found.received, dealt)
            if slow := extra.pop("slow_offload", ""):
                view.publisher.emit("warning", step=number, cause=Cause.SLOW, reason=slow)
            plan, undivided = view.plan, extra.pop("undivided", "")
            if undivided and generation == 1 and plan is not None and plan.leader(stage) == view.me:
                view.publisher.emit("warning", step=number, cause=Cause.CONFIG, reason=undivided)
        self._dealing.updated(number)
        extra |= self.strange(outcome)
        if isinstance(order, ElasticOrder):
            order.advance(number, outcome.samples, len(set(outcome.workers.values())))
        self.arrive(outcome, number)
        if view.is_main:
            self._tell_probes(outcome, generation)
        self._reduced = {n: found for n, found in self._reduced.items() if n >= number}
        view.publisher.hold(outcome, generation, extra)
        self._saver.prepare()
        return self._dealing.followed(joins, number) if joins is not None else {}

    def _tell_probes(self, outcome: StepOutcome, generation: int) -> None:
        """Events for the lanes that were compared. alone: stages where one worker computes all, twice."""
        plan = self._view.plan
        single = sorted(alone(plan)) if plan is not None else []
        for lane in sorted({lane for lane, _ in outcome.probes}):
            workers = sorted({who for (at, _), of in outcome.probes.items() if at == lane for who in of})
            about: dict[str, Any] = {"lane": lane, "workers": workers, "equal": True, "alone": single}
            self._view.publisher.emit("probe_done", step=outcome.step, generation=generation, **about)

    def strange(self, outcome: StepOutcome) -> dict[str, Any]:
        """Facts to tell of a step that is not finite: in words, how many in a row, lanes, and indices into the
        dataset of their first samples."""
        found = outcome.nonfinite
        if not found.words:
            return {}
        order, lanes = self._view.order, found.lanes
        past = isinstance(order, ElasticOrder) and order.step >= outcome.step  # it knows of coming steps alone
        samples = () if past else (index for lane in lanes for _, index in order.samples(outcome.step, lane))
        more = {"lanes": list(lanes), "samples": list(islice(samples, _MOST_SAMPLES)), "in_a_row": found.in_a_row}
        return {"nonfinite": found.words, "strange": more}

    def before(self, number: int, records: Mapping[int, Record], gradients: Mapping[int, StageGradient]) -> None:
        """A step is about to be applied: feed it to followers, and wait for copies of the present state."""
        stages = self._view.stages
        numel = {k: replica.layout.numel for k, replica in stages.items()}
        held = {k: gradients[k] for k in stages}
        dealing = self._dealing
        self._donor.feed(number, records, held, numel, lambda: self._loop.fed(number), dealing.segments, dealing.fed)
        self.stand_still()

    def stand_still(self, *, stays: bool = False, tick: Callable[[], None] | None = None) -> None:
        """Before the state changes: wait until every reader is done with it. stays: it does not, but for blocks that
        this worker lacks, so who reads it where it lies goes on. tick: as for `Checkpointer.before_update`."""
        self._donor.busy_snapshot(stays=stays)
        self._keeper.stand_still()
        self._saver.before_update(tick)

    def distrust(self) -> None:
        """Discard copies made since the update: the loop has changed trained tensors meanwhile, for the first time, so
        a copy may mix both states."""
        number = self._view.step
        self.stand_still()
        self._keeper.forget(do.ForgetKept(number - 1))
        self._keeper.state()
        self._saver.distrust(number)

    def arrive(self, outcome: StepOutcome | None, number: int) -> None:
        """The state is that of step `number`."""
        self.outcome = outcome
        self._loop.remember(number, followed=self._donor.feeds)
        self._view.link.log.at(number)

    def forget(self) -> None:
        """The state has jumped: drop reduced gradients of other steps, and what was known of the one before."""
        self._reduced = {}
        self._dealing.forget()

    # ---- effects

    def decided(self, effect: do.Decided) -> None:
        if effect.key.seq == 0:
            self._view.transport.channel.forget(effect.key.step)
        if effect.first and self._view.is_main:
            self._tell_progress(effect.key.step, 0.0, time.time_ns())  # now, for it ends a recovery

    def release(self, effect: Release | do.Finish) -> None:
        """All members have gone beyond this step: its effects may leave the process."""
        view, number = self._view, effect.step
        machine = view.driver.machine
        leads = view.is_main and machine.settled  # before that, the leader of before may still tell
        key, records = machine.position, machine.records  # of the decision that proves it
        if records and key > Key(number, 0):
            view.publisher.committed(number, committed_unix_ns(records, key.seq == 0))
        otherwise = view.publisher.release(number, leads)
        if otherwise is not None and not self._compared:
            self._refuse_other_loss(*otherwise)
        self._keeper.state()
        now = time.monotonic_ns()
        if leads and self._entered == view.driver.machine.generation and now - self._told_ns > _PROGRESS_NS:
            self._told_ns = now
            self._tell_progress(number, (now - self._began_ns) / 1e6)

    def _refuse_other_loss(self, step: int, then: float, now: float) -> None:
        """A step that is repeated has another loss than was told. Raises: RepeatedOtherwise, in an exact job."""
        view, self._compared = self._view, True
        if view.config.batch != "constant":
            return
        text = (
            f"step {step} had the loss {then!r} when it was done before, and has {now!r} now that it is repeated from "
            "a checkpoint, so the result would differ from an undisturbed run: its script, data, environment or "
            "device has changed, or its loop carries what join does not (everstep check SCRIPT names it)"
        )
        if not inexact(view.config):
            remedy = "put that back, go on inexactly with --set numerics.changed=warn, or begin again with --fresh"
            raise RepeatedOtherwise(f"{text}; {remedy}")
        view.publisher.emit("warning", step=step, cause=Cause.NONDETERMINISTIC, reason=text)

    def entered(self, effect: do.EnteredPlan) -> None:
        """A generation goes on: later reports belong to it."""
        self._entered = effect.plan.generation
        self._donor.began()

    def drop_lanes(self, effect: do.DropLanes) -> None:
        """The loop has raised: the state stands as after the last update."""
        self._saver.before_update()
        for replica in self._view.stages.values():
            replica.lanes.drop()
            replica.lanes.settle_buffers()

    def discard(self, effect: Discard) -> None:
        """Lane results of this step and older are of no use any more."""
        self.given.drop(effect.step)
        for replica in self._view.stages.values():
            if effect.undone:
                replica.lanes.abandon()
            else:
                replica.lanes.discard()
        if effect.undone:  # it is done again, from the same state
            self._reduced = {}

    def _tell_progress(self, number: int, step_ms: float, committed_unix_ns: int = 0) -> None:
        self._view.link.tell(self._view.driver.progress(number, step_ms, committed_unix_ns))


_Told = dict[TiePlace, Tensor | None]


def exchange_ties(view: WorkerView, plan: Plan, step: int, reduced: Mapping[int, Reduced]) -> dict[int, _Told]:
    """Give every stage the reduced gradients of the parameters that it shares with others: send those reduced here,
    and receive the others. Returns them by own stage, by place in other stages.

    Between reduction and agree: a worker must hold them before it may contribute.

    Raises: CollectiveAborted.
    """
    channel = view.transport.channel
    tied = {k: view.stages[k] for k in reduced if view.stages[k].spec.ties}
    partners = {k: {s for t in replica.spec.ties for s in t.stages} - {k} for k, replica in tied.items()}
    told: dict[int, _Told] = {}
    for stage, replica in tied.items():
        out = tied_out(replica.spec.ties, replica.layout, reduced[stage])
        told[stage] = {TiePlace(p.name, p.unit, p.stage): t for p, t in out.items()}  # as other stages call them
        places = msgspec.msgpack.encode([[p.name, p.unit, p.stage, t is not None] for p, t in out.items()])
        here = {seat.worker_id for seat in plan.pool(stage)}
        for to in sorted({seat.worker_id for k in partners[stage] for seat in plan.pool(k)} - here):
            if _sender(plan, stage, to) == view.me:
                channel.send(to, Hop(step, "tied", stage, 0), [t for t in out.values() if t is not None], places)
    for stage in sorted({s for near in partners.values() for s in near} - set(told)):
        tensors, meta = channel.recv(_sender(plan, stage, view.me), Hop(step, "tied", stage, 0))
        there = iter(tensors)
        told[stage] = {
            TiePlace(name, unit, at): next(there) if present else None
            for name, unit, at, present in msgspec.msgpack.decode(meta)
        }
    names = {k: {t.name for t in replica.spec.ties} for k, replica in tied.items()}
    return {k: {p: t for near in partners[k] for p, t in told[near].items() if p.name in names[k]} for k in tied}


def _sender(plan: Plan, stage: int, to: int) -> int:
    """The member of a stage's pool that tells this worker: they take turns."""
    pool = plan.pool(stage)
    return pool[plan.worker_ids.index(to) % len(pool)].worker_id
