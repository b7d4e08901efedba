"""The lanes of a step at one stage: wanted lanes, the parts that they pass through, and the gradients added so far.

Apart from the replica because nothing here changes the state: the same lanes always give the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from everstep.base.config import Config
from everstep.base.errors import Misused, check
from everstep.base.ports import Node, OnFinal
from everstep.exact.accumulate import LaneAccumulator
from everstep.exact.buffers import BufferGuard, BufferReport
from everstep.exact.digest import digest_bytes, named_digest
from everstep.exact.layout import GradientLayout
from everstep.exact.parameters import ParameterWatch
from everstep.exact.rank_sums import RankSums
from everstep.exact.reduce import StageSums
from everstep.exact.seeding import UnitSeeder
from everstep.exact.trees import Bundle
from everstep.protocol.driver.records import LaneReport
from everstep.protocol.step_types import LaneSaid
from everstep.script.loop_guard import no_gradient
from everstep.train.logged_values import LaneTotals
from everstep.train.model_call import Loss, ModelCall
from everstep.train.part_pass import Lane, PartPass, SplitCall, computed_otherwise, derive, measured
from everstep.train.precision import LossScaler, computing
from everstep.train.stage import Parts, StageSpec


class StageLanes:
    """One stage's lanes within a step. Added gradients stay until `discard`. discarded: how often that was called.
    scaler: of the loss."""

    def __init__(
        self,
        parts: Parts,
        config: Config,
        device: torch.device,
        spec: StageSpec,
        layout: GradientLayout,
        scaler: LossScaler,
        loss: Loss | None,
        probing: Callable[[], bool],
    ) -> None:
        """loss: the task's; needed if the model is split. probing: whether a lane must still be computed twice."""
        self.seeder = UnitSeeder(parts.units, config.seed, spec.units)
        self._call = ModelCall(parts.model) if spec.is_split else None
        self.passes: dict[int, PartPass] = {}
        at = 0
        inside = {id(m) for unit in parts.units for m in unit.modules()}
        for part in spec.parts:
            here = range(at, at + spec.cut[part][1] - spec.cut[part][0])
            at = here.stop
            units = tuple(parts.units[k] for k in here)
            modules = {id(m) for unit in units for m in unit.modules()}
            if not self.passes:  # modules outside all units go with the first part
                modules |= {id(m) for m in parts.model.modules()} - inside
            self.passes[part] = PartPass(
                part,
                spec,
                units,
                SplitCall(self._call, loss),  # type: ignore[arg-type]
                LaneAccumulator(layout, parts.model, here, lets_go=config.zero.stage > 1),
                BufferGuard(parts.model, modules, shared=config.workers + config.spares + config.cell.ranks > 2),
                ParameterWatch(parts.model, units),
                self.seeder,
                partial(computing, config, device, units),
                parts.mesh,
                probing,
            )
        self._sums = StageSums([p.accumulator for p in self.passes.values()], config.lanes)
        self.scaler = scaler
        self._reports: dict[int, LaneReport] = {}
        self._step = self.discarded = 0
        self._entered = False

    def begin(
        self,
        step: int,
        lanes: Sequence[int],
        buffer: Callable[[Node], torch.Tensor],
        offer: OnFinal | None = None,
        *,
        entered: bool = True,
        lost: Collection[Node] = (),
    ) -> None:
        """Begin a step, or change its lanes here; lanes computed already count. offer: as in `StageSums.begin`.
        entered: the loop has come to the step's batches, so that nobody changes the state any more before its lanes are
        computed. lost: nodes of the step whose memory was given back: they are forgotten."""
        if step != self._step:
            self._step, self._reports, self._entered = step, {}, False
        for part in self.passes.values() if lost else ():
            for node in part.accumulator.presence.keys() & lost:
                part.accumulator.drop(node)
        if entered and not self._entered:
            self._entered = True
            for part in self.passes.values():
                part.begin_step(step)
        self._sums.begin(step, lanes, buffer, offer)

    def lacking(self, lanes: Sequence[int]) -> tuple[int, ...]:
        return self._sums.lacking(lanes)

    @property
    def missing(self) -> tuple[int, ...]:
        """Lanes of the step's sums that have not been added yet, ascending."""
        return self._sums.missing

    def add_empty(self, lane: int, use: int) -> None:
        """Add a lane beyond the end of the data: it weighs nothing."""
        self._sums.add_empty(lane)
        self._reports[lane] = LaneReport(lane, 0.0, 0.0, 0, use)

    def add_idle(self, lane: int, count: int, use: int) -> None:
        """Add a lane that was only waited for: it counts as `count` samples, and has no gradient and no loss."""
        if lane in self.missing:
            self._sums.add_empty(lane)
        self._reports[lane] = LaneReport(lane, 0.0, 1.0, count, use)

    def note(self, report: LaneReport) -> None:
        """Note the report of a lane whose loss was computed here."""
        self._reports[report.lane] = report

    # ---- passes of a model that is split

    def forward(self, step: int, part: int, number: int, lane: Lane, count: int = 0, use: int = 0) -> Bundle | None:
        """A lane's forward pass through one part: the output for the next part, None at the last one.

        count, use: at the last part, as in `LaneReport`. Several lanes may be between this and `backward`. A lane
        without samples does not come here.

        Raises: Misused if the task does something that cannot be split.
        """
        check(step == self._step, f"step {step} has not begun")
        result = self.passes[part].forward(step, number, lane)
        if isinstance(result, Bundle):
            return result
        if lane.repeats is None:
            self._reports[number] = LaneReport(number, *result, count, use)
        return None

    def recompute(self, step: int, part: int, lane: int) -> None:
        """Repeat the forward pass, directly before its backward pass: same bits, and nothing is counted twice."""
        self.passes[part].recompute(step, lane)

    def backward(
        self,
        step: int,
        part: int,
        lane: int,
        back: Bundle | None = None,
        give: Callable[[Bundle], None] | None = None,
    ) -> Bundle | None:
        """A lane's backward pass through one part: the gradients for the part before, None at the first one.

        back: from the part behind, None at the last one. The lane's gradients are taken, once; `give` is called with
        the returned ones before that, because another worker waits for them.
        """
        check(step == self._step, f"step {step} has not begun")
        return self.passes[part].backward(lane, back, self.scaler.scale, give)

    def said(self, part: int) -> LaneSaid | None:
        """Digests of the last lane in `backward`, if they are to be reported."""
        return self.passes[part].said

    def drop(self) -> None:
        """Forget lanes between their passes (a generation has ended); added gradients stay."""
        for part in self.passes.values():
            part.drop()

    def evaluate(self, part: int, inputs: Bundle | None, metrics: Loss, batch: Any = None) -> Any:
        """Evaluate one part, without gradients: returns the input of the next part, or the metrics after the last
        one.

        metrics: `Task.metrics`. The model must be in eval mode.
        """
        with torch.no_grad(), self.passes[part].guard.shielded():
            return self.passes[part].evaluate(inputs, metrics, batch)

    # ---- results for the step

    def presence(self, step: int, lanes: Sequence[int]) -> dict[Node, bytes]:
        """This worker's offer to the reduction: the sums that cover exactly these lanes, which are its own now."""
        if step != self._step:
            self.begin(step, (), _no_buffer)
        return self._sums.offered(lanes)

    def reports(self, lanes: Sequence[int]) -> list[LaneReport]:
        return [self._reports[lane] for lane in lanes]

    # ---- buffers

    def buffer_reports(self) -> list[bytes]:
        """Reports of the lanes' changes to buffers, by part."""
        return [part.guard.report().encode() for part in self.passes.values()]

    def commit_buffers(self, step: int, reports: Sequence[Sequence[bytes]]) -> None:
        """A step was decided: the buffers take the outcome of all lanes together. reports: by worker, by part."""
        if step != self._step:
            self.begin(step, (), _no_buffer)
        for k, part in enumerate(self.passes.values()):
            part.guard.commit([BufferReport.decode(row[k]) for row in reports])

    def settle_buffers(self) -> None:
        """Put the step's buffers back after the last lane: the state is whole again."""
        for part in self.passes.values():
            part.guard.settle()

    # ---- the end

    def discard(self) -> None:
        self._sums.forget()
        self.drop()
        self._reports = {}
        self._step = 0
        self.discarded += 1

    def abandon(self) -> None:
        """The state is about to be replaced: drop everything of the step under way."""
        self.discard()
        for part in self.passes.values():
            part.guard.abandon()


def _no_buffer(node: Node) -> torch.Tensor:
    check(False, f"no lane was to be computed, but a sum of {node} was asked for")
    return torch.empty(0, dtype=torch.float32)


class LoopLane:
    """The lane that the user's own loop computes, in a model that is not split. Lanes come one after the other, from
    `enter` over `backward` to `leave`, with the right modes and seeds. The first is computed twice (`probes`).

    Apart from the stage's lanes because here the user's code runs between entering a lane and its backward pass.
    """

    def __init__(self, lanes: StageLanes, model: nn.Module, scaler: LossScaler, autocast: Callable[[], Any]) -> None:
        """lanes: of the one stage, which are told of each lane. autocast: makes the context of a forward pass."""
        self._lanes = lanes
        self._pass = lanes.passes[0]
        self._sums: LaneAccumulator | RankSums = self._pass.accumulator
        self._model = model
        self._scaler = scaler
        self._autocast_of = autocast
        self._autocast: Any = None
        self._at = (0, 0)
        self._totals: LaneTotals | None = None
        self._probed = self._apart = self._on_trial = self._several = self._always_apart = False
        self._first = ""

    # ---- in a worker of several processes

    def use(self, sums: RankSums) -> None:
        """Add lanes up together with the other processes of this worker."""
        self._sums = sums

    def take(self, node: Node, row: bytes, flat: torch.Tensor) -> None:
        """Take the sum of a subtree, as `LaneAccumulator.take`."""
        self._pass.accumulator.take(node, row, flat)

    def note_buffers(self, rank: int, report: bytes) -> None:
        """Note what the step's lanes at another process have done to buffers: an encoded `BufferReport`."""
        self._pass.guard.note_elsewhere(rank, BufferReport.decode(report))

    # ---- a lane

    def expect(self, *, several: bool, gradients: bool) -> None:
        """several: the loop may call `backward` several times for one batch: its buffers are final when it is through
        with it, and gradients are added up after that. gradients: it uses `.grad`, where each lane's are to lie by
        themselves."""
        self._several, self._always_apart = several, gradients

    def use_gradients(self, none: bool) -> None:
        """The loop uses `.grad` of a parameter. none: it has set None to None. Raises: Misused if that holds something
        else than the gradient of the present lane."""
        if none:
            self._always_apart |= self._totals is not None
            return
        if self._totals is None:
            raise no_gradient()
        if self._pass.mesh is not None:
            raise Misused("cell.shards: .grad of a parameter was used, which holds a part of it here: leave it alone")
        if not (self._apart or self._sums.watches):
            raise Misused(
                f"the loop used .grad of a parameter in step {self._at[0]}, and not for its first batch: since then "
                "the gradients of several batches are added up there: use it for the first batch, too, or in the "
                "loop's own file"
            )
        self._always_apart = True

    def enter(self, step: int, lane: int, *, apart: bool = False) -> None:
        """Seed everything, put the step's buffers in place, and begin autocast: the forward pass may run. apart: its
        gradient is to lie in `.grad` by itself, for `said`."""
        self._pass.guard.begin_lane()
        apart = apart or self._several or self._always_apart
        if not apart or self._sums.watches:
            self._sums.enter(lane)
        self._apart = apart
        self._at = step, lane
        self._lanes.seeder.begin_lane(step, lane)
        self._totals = LaneTotals()
        self._begin_autocast()

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor | None,
        share: float,
        inputs: Sequence[torch.Tensor] | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Backward of one lane. weight None: `loss` is a mean, of a micro-batch that is `share` of a full one. inputs:
        parameters that get a gradient; None: all. retain_graph: as in torch, for a later call.

        Raises: Misused if the loss is not a scalar tensor with a graph, for several weights, outside a lane, or for a
        second call that no lane had before.
        """
        if self._totals is None:
            raise Misused("step.backward(loss) was called outside `for batch in step:`: call it for each batch there")
        self._end_autocast(looks=not self._totals.calls)
        scaled, value, weighed = measured(loss, weight, share)
        self._totals.add(value, weighed)
        if self._totals.calls == 2 and not self._several:
            self._find_several()
        if not self._on_trial:
            self._sums.capture(self._at[1])
        if not self._several:
            self._pass.guard.end_lane()
        scaled = scaled * self._scaler.scale if self._scaler.enabled else scaled
        derive(self._pass.mesh, scaled, retain_graph=retain_graph, inputs=inputs)
        self._begin_autocast()

    def _find_several(self) -> None:
        """The lane has called `backward` a second time, which was not expected."""
        if self._on_trial:
            return
        if not self._sums.watches:  # the gradient of the first call may be in the sum of several lanes
            raise Misused(
                f"step.backward(loss) was called a second time for one batch in step {self._at[0]}, and never before: "
                "call it as often for the first batch (with a loss times 0, say), or add the losses up and call it once"
            )
        self._several = True
        self._pass.guard.forget_lanes()

    def leave(self, lane: int, count: int, use: int) -> None:
        """Take the lane's gradient and buffers. Raises: Misused if the lane never called backward."""
        self._end_autocast()
        self._lanes.seeder.end_lane()
        totals, self._totals = self._called(), None
        if self._several:
            self._pass.guard.end_lane()
        self._pass.watch.look()
        self._sums.add(lane)
        self._lanes.note(LaneReport(lane, totals.loss, totals.weight or 0.0, count, use, totals.logged))

    def log(self, found: Mapping[str, tuple[float, float]]) -> None:
        """Add sums and counts to those of the lane. Raises: Misused if no lane is being computed, or for too many."""
        if self._totals is None:
            raise Misused("step.log was called outside `for batch in step:`: use run.log for numbers of a whole step")
        self._totals.log(found)

    def _called(self) -> LaneTotals:
        if self._totals is None or not self._totals.calls:
            raise Misused("a batch was taken without step.backward(loss); call it for every batch")
        return self._totals

    # ---- a lane that is computed twice

    def probes(self, due: bool) -> bool:
        """Whether the next lane is computed twice for comparison: the first of this life, and those that are due, if
        they are the first of their step."""
        due = not self._probed or (due and self._pass.guard.untouched)
        self._probed = True
        return due

    def again(self) -> None:
        """Enter the lane again; its results are thrown away, and the guard puts the buffers back."""
        self._end_autocast()
        self._pass.watch.look()
        self._first = self._digest()
        self._pass.guard.forget_lanes()
        for parameter in self._model.parameters():
            parameter.grad = None
        self.enter(*self._at, apart=self._apart)

    def compare(self) -> None:
        """Compare the two computations of a lane. Raises: DeterminismError if they gave different results."""
        if self._first != self._digest():
            raise computed_otherwise(*self._at, "gradients")

    # ---- lanes that several workers compute

    def said(self, batch: Any) -> LaneSaid:
        """Digests of the lane just computed: of its input, and of its results."""
        return LaneSaid(data=batch_digest(batch), gave=digest_bytes(self._digest().encode()))

    @contextmanager
    def trial(self, step: int, lane: int) -> Iterator[None]:
        """Enter a lane that leaves nothing behind. Raises: Misused, after it, if it called no backward."""
        with self._pass.guard.on_trial():
            self._on_trial = True
            self.enter(step, lane, apart=True)
            try:
                yield
                self._called()
            finally:
                self._end_autocast()
                self._lanes.seeder.end_lane()
                self._on_trial, self._totals = False, None
                for parameter in self._model.parameters():
                    parameter.grad = None

    def _digest(self) -> str:
        """Digest of a lane's gradients and buffers, and its loss."""
        self._end_autocast()
        self._lanes.seeder.end_lane()
        named = [(f"grad {n}", p.grad) for n, p in self._model.named_parameters() if p.grad is not None]
        buffers = [(f"buffer {n}", b) for n, b in self._model.named_buffers()]
        loss = self._totals.loss if self._totals is not None else 0.0
        return f"{named_digest([*named, *buffers, *self._pass.guard.extras()])} {loss.hex()}"

    def _begin_autocast(self) -> None:
        context = self._autocast_of()
        self._autocast = context, context.__enter__()

    def _end_autocast(self, *, looks: bool = False) -> None:
        """looks: at whether the forward pass has called any unit, if these are to have copies. Raises: Misused."""
        if self._autocast is not None:
            (context, copies), self._autocast = self._autocast, None
            context.__exit__(None, None, None)
            if looks and copies is not None and not copies.entered:
                raise Misused(
                    "cell.precision: the loop called none of the model's units, which get narrow copies when they are "
                    "called: name those that it calls, as units=[...] of join or in Task.units, or use precision="
                )


def batch_digest(batch: Any) -> str:
    """Digest of everything in a batch that can be compared."""
    return named_digest([(str(k), _as_tensor(leaf)) for k, leaf in enumerate(tree_leaves(batch))])


def _as_tensor(leaf: Any) -> torch.Tensor:
    """Comparable form of a part of a batch; for anything but tensors and plain values, its type."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return leaf
    text = repr(leaf) if isinstance(leaf, bool | int | float | str | bytes | None) else type(leaf).__name__
    data = leaf.tobytes() if isinstance(leaf, np.ndarray) and leaf.dtype != object else text.encode()
    return torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)
