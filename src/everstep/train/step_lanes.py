"""The lanes of a step on this worker: wanted lanes, their batches, and the passes of a split model.

Apart from updates because nothing here changes the state: the stages keep all results until a step is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from everstep.base.cause import Cause
from everstep.base.config import inexact
from everstep.base.errors import CollectiveAborted, ConfigError
from everstep.base.plan import Plan
from everstep.base.ports import Hop
from everstep.data.batch import to_device
from everstep.data.loader import LaneLoader, Recipe
from everstep.exact.trees import Bundle, from_wire, to_wire
from everstep.order.ledger import use_digest
from everstep.placement import routes
from everstep.placement.probes import Trial, with_trials
from everstep.placement.schedules import PipeOp
from everstep.protocol.driver.operations import Compute, Open, Opened
from everstep.protocol.driver.probing import LanesGiven
from everstep.protocol.step_types import LaneSaid
from everstep.train.part_pass import Lane, computed_otherwise
from everstep.train.saving import Restorer
from everstep.train.shapes import Shapes, compiling
from everstep.train.stage_lanes import batch_digest
from everstep.train.view import WorkerView

_AHEAD = 8
"""Passes ahead of the present one for which the channel is told of awaited messages."""
_SLICE_S = 0.01
_INEXACTLY = "go on inexactly with --set numerics.changed=warn"
_DIFFERS = "so the result would differ from an undisturbed run"
_OTHERS = (
    f"(__getstate__ may leave out of an object what differs in each life), {_DIFFERS}: put them back, {_INEXACTLY}, or "
    "begin again with --fresh"
)
_UNSTEADY = (
    f"(a transform may draw from a generator of its own, or change in place what is stored), {_DIFFERS} once a worker "
    "is resumed or healed: draw from the generators of torch, NumPy and Python, which are seeded for each sample, "
    f"leave out what differs whenever it is read, or {_INEXACTLY}"
)


class Lanes:
    """One worker's lanes. done: called with step, stage and lane of each, at each stage. given: results here of
    lanes that several workers compute. divide: says in a plan who takes which part of a step's gradient, of a stage.
    passes: makes those of a step, with the arguments of `Passes`."""

    def __init__(
        self,
        view: WorkerView,
        restorer: Restorer,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        device: torch.device,
        done: Callable[[int, int, int], None],
        given: LanesGiven,
        divide: Callable[[Plan, int, int], None],
        passes: Callable[..., Passes],
    ) -> None:
        self.device = device
        self.done = done
        self._given, self._divide, self._passes = given, divide, passes
        self._view = view
        self._restorer = restorer
        self._samples = 0
        self.at_work: tuple[int, int, Sequence[Any]] | None = None
        """Step, lane and samples of the batch that the user's loop has, None if it has none."""
        self._shapes = Shapes()
        self._entered = False
        self._loader = LaneLoader(Recipe(dataset, view.order, collate, view.config.seed), view.config.loader)

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        """Operations that this carries out; lanes of a model that is not split are computed by the user's loop."""
        return {Open: self.open} | ({Compute: self.compute} if self._view.stages.split else {})

    def close(self) -> None:
        """Release the loader's processes."""
        self._loader.close()

    # ---- operations

    def open(self, operation: Open) -> Opened:
        """Make the stages of the plan's seats ready, and meet the members."""
        view, plan = self._view, operation.plan
        seats = plan.stages_of(view.me)
        view.stages.want(seats)
        view.transport.open(plan, {stage: view.stages[stage].layout for stage in seats})
        machine = view.driver.machine
        held = [stage for stage in seats if stage in machine.stages]
        lost = [(stage, lane) for stage in held for lane in self.begin(operation.step, plan, stage, settled=False)]
        disk = self._restorer.restorable(operation.limit) if operation.disk else ()
        return Opened(tuple(lost), disk, {} if view.step else {k: view.stages.first(k) for k in machine.held})

    def compute(self, operation: Compute) -> None:
        """Compute the lanes of a split model, wherever they pass through this worker.

        Raises: CollectiveAborted. ConfigError, Unusable if the job would start over beside checkpoints.
        """
        view, plan, number = self._view, operation.plan, operation.step
        if number == 1:
            self._restorer.refuse_to_start_over()
        ends: set[int] = set()
        for stage in plan.stages_of(view.me):
            self.begin(number, plan, stage)
            if stage in (0, plan.stages - 1):
                ends.update(plan.lanes_of(view.me, stage))
        if ends:
            self.schedule(number, sorted(ends))
        full = [lane for lane in operation.lanes if not self._empty(number, plan, lane)]
        self._passes(self, view, operation, full, [t for t in operation.trials if self.samples(number, t.lane)]).run()

    def _empty(self, number: int, plan: Plan, lane: int) -> bool:
        """Whether the lane has no samples; then it is finished at once, at all stages."""
        if self.samples(number, lane):
            return False
        for stage in plan.stages_of(self._view.me):
            if lane in plan.lanes_of(self._view.me, stage):
                self.pass_empty(number, stage, lane)
        return True

    # ---- acts on single lanes

    def begin(self, number: int, plan: Plan, stage: int, *, settled: bool = True) -> tuple[int, ...]:
        """Begin the plan's lanes of the step at this stage; returns those that are still to be computed. settled: this
        is the step that comes next, so final blocks of it may leave."""
        lanes, mine = self._view.stages[stage].lanes, plan.lanes_of(self._view.me, stage)
        transport = self._view.transport
        if settled:
            self._divide(plan, number, stage)
        offer = transport.offering(stage, number) if settled else None
        lost = transport.given_back(stage, number)
        lanes.begin(number, mine, lambda node: transport.node(stage, number, node), offer, entered=settled, lost=lost)
        missing = lanes.missing
        return tuple(lane for lane in lanes.lacking(mine) if lane in missing)

    def schedule(self, number: int, lanes: Sequence[int]) -> None:
        """Have these lanes loaded, soon. Raises: ConfigError if the data are not those of the step before, or no
        checkpoint could be read."""
        self._enter(number - 1)
        self._loader.schedule(number, lanes)

    def _enter(self, after: int) -> None:
        """Before this worker reads its first sample: go by what checkpoints say of the data."""
        if self._entered:
            return
        self._entered, view = True, self._view
        if not after:
            self._restorer.refuse_to_start_over()
        unsteady = view.position.settle()
        said = self._restorer.data_position(after) if after else None
        others = view.position.accept(said[1], said[0]) if said is not None else ""
        # What one life reads otherwise twice may be one failed read: that does not end a job that has trained.
        for line, remedy, warns in ((unsteady, _UNSTEADY, after > 0), (others, _OTHERS, False)):
            if line and not (warns or inexact(view.config)):
                raise ConfigError(f"{line} {remedy}")
            if line:
                view.publisher.emit("warning", step=after, cause=Cause.NONDETERMINISTIC, reason=line)
        if cost := view.position.cost(after):
            view.publisher.emit("warning", step=after, cause=Cause.SLOW, reason=cost)

    def batch(self, number: int, lane: int) -> tuple[Any, Any]:
        """A lane's batch on the device, and its samples (none: the lane is empty)."""
        self._enter(number - 1)
        batch, samples = self._loader.batch(number, lane)
        if compiling() and self._shapes.new(batch):
            self._view.link.row.chill()
        return to_device(batch, self.device), samples

    def hand_out(self, at_work: tuple[int, int, Sequence[Any]] | None) -> None:
        """Note step, lane and samples of the batch that the user's loop gets; None: it is done with it."""
        self.at_work = at_work

    def emulated(self) -> Callable[[], None]:
        """Begin a lane of a model that is not split; the function that is returned ends it: it waits until a forward
        and a backward pass of `emulate_compute_ms` would be over."""
        view, end = self._view, time.monotonic() + 3 * self._view.config.emulate_compute_ms / 1e3
        return lambda: wait_until(end, view.tick)

    def samples(self, number: int, lane: int) -> Any:
        """Samples of a lane, without loading them."""
        return self._view.order.samples(number, lane)

    def note(self, number: int, lane: int, part: int, said: LaneSaid) -> None:
        """Note the results of a lane that several workers compute. Raises: DeterminismError if it was computed here
        before, with other results."""
        differs = self._given.note(number, lane, part, said)
        if differs:
            raise computed_otherwise(number, lane, differs)

    def has_given(self, number: int, lane: int) -> bool:
        return self._given.has(number, lane)

    def pass_empty(self, number: int, stage: int, lane: int) -> None:
        """Finish a stage of a lane without samples."""
        lanes = self._view.stages[stage].lanes
        if lane in lanes.missing:
            lanes.add_empty(lane, use_digest(()))
        self.done(number, stage, lane)

    def count(self, samples: int) -> None:
        """Count samples that were trained on."""
        self._samples += samples
        self._view.link.row.set(samples=self._samples)
        if self.device.type == "cuda":
            allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
            self._view.link.row.device_memory(allocated, reserved)


def wait_until(end_s: float, tick: Callable[[], None]) -> None:
    """Wait until a moment of the monotonic clock, with a tick now and then."""
    while (left := end_s - time.monotonic()) > 0:
        time.sleep(min(left, _SLICE_S))
        tick()


class Passes:
    """The passes of a step's lanes through this worker, in the order of its list, in one generation.

    A pass has the same results in any list, and the run may be stopped between any two passes. Results are kept
    by the stages; messages on their way belong to the generation.
    """

    def __init__(
        self,
        lanes: Lanes,
        view: WorkerView,
        operation: Compute,
        full: Sequence[int],
        trials: Sequence[Trial],
        at_once: int = 1,
    ) -> None:
        """full: the lanes to compute, equal at every member, none of them empty; trials: equal at every member, too.
        at_once: lanes of each pass."""
        config, plan = view.config, with_trials(operation.plan, trials)
        self._lanes, self._view, self._plan, self._step = lanes, view, plan, operation.step
        self._repeated = {number: trial.lane for number, trial in enumerate(trials, plan.lanes)}
        self._is_told = {trial.lane for trial in operation.trials}
        self._channel = view.transport.channel
        self._parts = plan.stages * config.chunks
        all_lanes = [*full, *self._repeated]
        self._ops = routes.ops(
            *(plan, view.me, all_lanes),
            kind=config.schedule,
            chunks=config.chunks,
            recompute=config.recompute,
            at_once=at_once,
        )
        self._turns = routes.turns(plan, view.me, all_lanes, at_once)
        self._wait_s = config.emulate_compute_ms / 1e3 / max(1, config.chunks)
        self._batches: dict[int, tuple[Any, Sequence[Any]]] = {}
        self._local: dict[Hop, Bundle] = {}

    def run(self) -> None:
        """Do all passes. Raises: CollectiveAborted if the generation ends, or an awaited worker is dead."""
        for replica in self._view.stages.values():
            replica.lanes.drop()
        self._expect(self._ops[:_AHEAD])
        for k, op in enumerate(self._ops):
            if self._view.cutter.over(self._plan.generation):
                raise CollectiveAborted("a newer plan has come")
            self._expect(self._ops[k + _AHEAD : k + _AHEAD + 1])
            self._perform(op, keep=self._keeps(k))

    def _keeps(self, k: int) -> bool:
        """Whether the graph of a forward pass is kept. k: its place in the list."""
        backward_follows = self._ops[k + 1 : k + 2] == (self._ops[k]._replace(kind="backward"),)
        return not self._view.config.recompute or backward_follows

    def _turn(self, op: PipeOp) -> Sequence[int]:
        """The lanes of an operation."""
        return self._turns[op.stage, op.lane]

    def _finish(self, stage: int, lane: int) -> None:
        """A stage is through with a lane."""
        if self._view.stages[stage].spec.is_last:
            self._lanes.count(len(self._lanes.samples(self._step, lane)))
        self._lanes.done(self._step, stage, lane)

    # ---- one pass

    def _perform(self, op: PipeOp, *, keep: bool) -> None:
        stage = self._view.stages[op.stage].lanes
        ends = op.kind == "forward" and op.part in (0, self._parts - 1) and not self._wait_s
        batch, samples = self._batch(op) if ends else (None, ())  # loaded before waiting for the part before
        inputs = self._take(op)
        if op.kind != "recompute":
            self._view.phase(op.kind, self._step, self._plan)
        if self._wait_s:
            self._emulate(op)
        elif op.kind == "forward":
            said = None
            if self._repeated.get(op.lane, op.lane) in self._is_told:
                said = LaneSaid(data="" if batch is None else batch_digest(batch))
            share = len(samples) / self._view.order.micro_batch
            lane = Lane(inputs, batch, share, keep, repeats=self._repeated.get(op.lane), said=said)
            result = stage.forward(self._step, op.part, op.lane, lane, len(samples), use_digest(samples))
            if result is not None:
                self._give(op, result)
        elif op.kind == "recompute":
            stage.recompute(self._step, op.part, op.lane)
        else:
            stage.backward(self._step, op.part, op.lane, inputs, lambda found: self._give(op, found))
            said = stage.said(op.part)
            if said is not None:
                self._lanes.note(self._step, self._repeated.get(op.lane, op.lane), op.part, said)
        if op.lane in self._repeated:
            return
        if op.kind == "backward" and op.part == op.stage:  # the first of the stage's parts is the last to be done
            self._finish(op.stage, op.lane)

    def _emulate(self, op: PipeOp) -> None:
        """Wait instead of computing; gradients are absent."""
        wait_until(time.monotonic() + self._wait_s * (2 if op.kind == "backward" else 1), self._view.tick)
        if (op.kind == "forward" and op.part + 1 < self._parts) or (op.kind == "backward" and op.part):
            self._give(op, Bundle([], b""))
        if op.kind == "backward" and op.part == op.stage:
            samples = self._lanes.samples(self._step, op.lane)
            self._view.stages[op.stage].lanes.add_idle(op.lane, len(samples), use_digest(samples))

    def _batch(self, op: PipeOp) -> tuple[Any, Sequence[Any]]:
        """Batch and samples, loaded once if this worker has both ends of the lane's way."""
        found = self._batches.pop(op.lane, None)
        if found is None:
            self._view.phase("load", self._step, self._plan)
            found = self._lanes.batch(self._step, self._repeated.get(op.lane, op.lane))
            if op.part == 0 and routes.holder(self._plan, self._parts - 1, op.lane) == self._view.me:
                self._batches[op.lane] = found
        return found

    # ---- messages between parts

    def _awaited(self, op: PipeOp) -> tuple[int, Hop] | None:
        """Source and name of the message that a pass needs; None if it needs none."""
        if op.kind == "forward" and op.part:
            source, hop = op.part - 1, Hop(self._step, "act", op.part, op.lane)
        elif op.kind == "backward" and op.part + 1 < self._parts:
            source, hop = op.part + 1, Hop(self._step, "grad", op.part, op.lane)
        else:
            return None
        return routes.holder(self._plan, source, op.lane), hop

    def _expect(self, ops: Sequence[PipeOp]) -> None:
        """Tell the channel which messages these passes will receive."""
        for op in ops:
            awaited = self._awaited(op)
            if awaited is not None and awaited[0] != self._view.me:
                self._channel.expect(*awaited)

    def _take(self, op: PipeOp) -> Bundle | None:
        awaited = self._awaited(op)
        if awaited is None:
            return None
        source, hop = awaited
        if source == self._view.me:
            return self._local.pop(hop)
        self._view.link.row.set(phase="transfer")
        return from_wire(*self._channel.recv(source, hop))

    def _give(self, op: PipeOp, what: Bundle) -> None:
        """Send a forward pass's output to the part behind, a backward pass's to the part before."""
        part = op.part + 1 if op.kind == "forward" else op.part - 1
        hop = Hop(self._step, "act" if op.kind == "forward" else "grad", part, op.lane)
        to = routes.holder(self._plan, part, op.lane)
        if to == self._view.me:
            self._local[hop] = what
        else:
            tensors, meta = to_wire(what)
            self._view.link.row.sent("transfer", sum(t.nbytes for t in tensors) + len(meta))
            self._channel.send(to, hop, tensors, meta)
