"""From a step's lanes to the next state: reduce, contribute, apply; and what is told of it once it cannot be undone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from everstep.protocol.driver import operations as do
from everstep.protocol.driver.records import AgreePayload, StepOutcome, committed_unix_ns
from everstep.protocol.step_types import Discard, Record, Release
from everstep.train.elastic import ElasticOrder
from everstep.train.heal import Donor, StageGradient, pack_state
from everstep.train.keeping import SnapshotKeeper
from everstep.train.saving import LoopState, PartSaver
from everstep.train.ties import exchange_ties
from everstep.train.view import WorkerView

_PROGRESS_NS = 200_000_000


class Updates:
    """One worker's reductions and updates. `outcome`: of the step whose state this worker has, if it is known."""

    def __init__(
        self,
        view: WorkerView,
        donor: Donor,
        keeper: SnapshotKeeper,
        saver: PartSaver,
        loop: LoopState,
    ) -> None:
        self.outcome: StepOutcome | None = None
        self._view = view
        self._donor = donor
        self._keeper = keeper
        self._saver = saver
        self._loop = loop
        self._gradients: dict[int, dict[int, StageGradient]] = {}
        self._generations: dict[int, int] = {}
        self._released = 0
        self._entered = 0
        self._began_ns = 0
        self._told_ns = 0

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        """What it does for the driver."""
        return {
            do.Reduce: self.reduce,
            do.Update: self.update,
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
        """Of all stages held here. Raises: CollectiveAborted."""
        view, plan, number = self._view, operation.plan, operation.step
        me, stages = view.me, view.stages
        view.phase("reduce", number, plan)
        lanes = {stage: plan.lanes_of(me, stage) for stage in plan.stages_of(me)}
        offers = {k: stages[k].lanes.presence(number, lanes[k]) for k in lanes}
        if len(plan.members) > 1:
            view.link.row.sent("reduce", sum(4 * stages[k].layout.numel * len(found) for k, found in offers.items()))
        reduced = {k: view.transport.reduce(k, number, offered) for k, offered in offers.items()}
        received = exchange_ties(me, plan, number, stages, reduced, view.transport)
        found = {k: StageGradient(reduced[k], received.get(k, {})) for k in lanes}
        self._gradients[number] = {**self._gradients.get(number, {}), **found}
        self._generations[number] = plan.generation
        every = view.config.verify_every
        due = bool(every and number % every == 0)
        sections = [
            stages[k].section(g.reduced, lanes[k], stages[k].digest(number - 1) if due else "", g.received, due)
            for k, g in found.items()
        ]
        return AgreePayload(sections)

    def update(self, operation: do.Update) -> int:
        """Apply a decided step; returns the unix time in ns at which that began."""
        began, number = time.time_ns(), operation.step
        self._view.phase("update", number, self._view.plan)
        self._view.stages.keep(operation.stages)
        self.apply(operation.outcome, operation.records, self._gradients[number], self._generations[number])
        return began

    def apply(
        self,
        outcome: StepOutcome,
        records: Mapping[int, Record],
        gradients: Mapping[int, StageGradient],
        generation: int,
    ) -> None:
        """The step's update, with the reduced gradients of all stages that are held; made in this generation."""
        view, number = self._view, outcome.step
        view.link.row.set(phase="stall")
        self.before(number, records, gradients)
        view.link.row.set(phase="update")
        order = view.order
        workers = order.workers if isinstance(order, ElasticOrder) else 0
        extra: dict[str, Any] = {}
        for stage, replica in view.stages.items():
            found = gradients[stage]
            extra = replica.apply(outcome, found.reduced, workers, found.received)
        if isinstance(order, ElasticOrder):
            order.advance(number, outcome.samples, len(set(outcome.workers.values())))
        self.arrive(outcome, number)
        self._gradients = {n: g for n, g in self._gradients.items() if n >= number}
        self._generations = {n: g for n, g in self._generations.items() if n > number}
        self.hold(outcome, generation, extra)
        self._saver.prepare()

    def before(self, number: int, records: Mapping[int, Record], gradients: Mapping[int, StageGradient]) -> None:
        """A step is about to be applied: pass it on, and let what is being copied be copied."""
        stages = self._view.stages
        numel = {k: replica.layout.numel for k, replica in stages.items()}
        held = {k: gradients[k] for k in stages}
        self._donor.feed(number, records, held, numel, lambda: pack_state(stages.any.application))
        self.stand_still()

    def stand_still(self) -> None:
        """Before anything changes the state: whoever reads it is through with that."""
        self._donor.busy_snapshot()
        self._keeper.stand_still()
        self._saver.before_update()

    def arrive(self, outcome: StepOutcome | None, number: int) -> None:
        """The state is that of step `number`."""
        self.outcome = outcome
        self._loop.remember(number)
        self._view.link.log.at(number)

    def hold(self, outcome: StepOutcome, generation: int, extra: dict[str, Any]) -> None:
        """What is to be told of a step, later, unless it was."""
        if outcome.step > self._released:
            self._view.publisher.hold(outcome, generation, extra)

    def forget(self) -> None:
        """The state has jumped: what was reduced for other steps is of no use."""
        self._gradients, self._generations = {}, {}

    # ---- effects

    def decided(self, effect: do.Decided) -> None:
        """A decision was taken."""
        if effect.key.seq == 0:
            self._view.transport.channel.forget(effect.key.step)
        if effect.first and self._view.is_main:
            self._tell_progress(effect.key.step, 0.0)  # now, for it ends a recovery

    def release(self, effect: Release | do.Finish) -> None:
        """All members have gone beyond this step: its effects may leave the process."""
        view, number = self._view, effect.step
        machine = view.driver.machine
        leads = view.is_main and machine.settled  # before that, the leader of before may still tell
        self._released = max(self._released, number)
        key, records = machine.position, machine.records  # of the decision that proves it
        if records:
            view.publisher.committed(number, committed_unix_ns(records, key.seq == 0))
        view.publisher.release(number, leads)
        self._keeper.state()
        now = time.monotonic_ns()
        if leads and self._entered == view.driver.generation and now - self._told_ns > _PROGRESS_NS:
            self._told_ns = now
            self._tell_progress(number, (now - self._began_ns) / 1e6)

    def entered(self, effect: do.EnteredPlan) -> None:
        """A generation goes on: what is told from here on is of it."""
        self._entered = effect.plan.generation

    def drop_lanes(self, effect: do.DropLanes) -> None:
        """The loop has raised: the state stands as after the last update."""
        self._saver.before_update()
        for replica in self._view.stages.values():
            replica.drop_lanes()
            replica.settle_buffers()

    def discard(self, effect: Discard) -> None:
        """Lane results of this step and older are of no use any more."""
        for replica in self._view.stages.values():
            replica.discard()

    def _tell_progress(self, number: int, step_ms: float) -> None:
        self._view.link.tell(self._view.driver.progress(number, step_ms))
