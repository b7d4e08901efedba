"""The lanes of a step at one stage: what is wanted, which parts they pass through, and what has been added of them.

Apart from the replica because nothing here changes the state: the same lanes give the same sums, whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from everstep.base.config import Config
from everstep.base.errors import check
from everstep.base.ports import Node
from everstep.exact.accumulate import LaneAccumulator
from everstep.exact.buffers import BufferGuard, BufferReport
from everstep.exact.layout import GradientLayout
from everstep.exact.reduce import StageSums
from everstep.exact.seeding import UnitSeeder
from everstep.exact.trees import Bundle
from everstep.protocol.driver.records import LaneReport
from everstep.train.model_call import Loss, ModelCall
from everstep.train.part_pass import Lane, PartPass, Scaled, measured
from everstep.train.parts import Parts, StageSpec
from everstep.train.precision import LossScaler, autocast


class StageLanes:
    """One stage's lanes within a step. What has been added stays until `discard`."""

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
        """loss: the task's; needed where the model is split. probing: whether it has still to be seen that a lane gives
        the same bits twice."""
        self.seeder = UnitSeeder(parts.units, config.seed, spec.units)
        self._call = ModelCall(parts.model) if spec.is_split else None
        self._passes = _passes(parts, config, device, spec, layout, self._call, self.seeder)
        self._sums = StageSums([p.accumulator for p in self._passes.values()], config.lanes)
        self._scaler = scaler
        self._loss_of = loss
        self._probing = probing
        self._reports: dict[int, LaneReport] = {}
        self._step = 0

    @property
    def whole(self) -> PartPass:
        """The one part of a model that is not split."""
        check(self._call is None, "lanes of a model that is split go through its parts")
        return self._passes[0]

    def begin(self, step: int, lanes: Sequence[int], buffer: Callable[[Node], torch.Tensor]) -> None:
        """The lanes of a step that are wanted from here; what has been computed of them already counts."""
        if step != self._step:
            self._step, self._reports = step, {}
            for part in self._passes.values():
                part.begin_step(step)
        self._sums.begin(step, lanes, buffer)

    def lacking(self, lanes: Sequence[int]) -> tuple[int, ...]:
        """Lanes that must be computed here before exactly these can be offered to the reduction."""
        return self._sums.lacking(lanes)

    @property
    def missing(self) -> tuple[int, ...]:
        """Lanes of the step's sums that have not been added yet, ascending."""
        return self._sums.missing

    def add_empty(self, lane: int, use: int) -> None:
        """A lane beyond the end of the data: it weighs nothing."""
        self._sums.add_empty(lane)
        self._reports[lane] = LaneReport(lane, 0.0, 0.0, 0, use)

    def add_idle(self, lane: int, count: int, use: int) -> None:
        """A lane that was only waited for: it counts as `count` samples, and has no gradient and no loss."""
        if lane in self.missing:
            self._sums.add_empty(lane)
        self._reports[lane] = LaneReport(lane, 0.0, 1.0, count, use)

    def note(self, report: LaneReport) -> None:
        """What is to be told of a lane whose loss was computed here."""
        self._reports[report.lane] = report

    # ---- passes of a model that is split

    def forward(
        self,
        step: int,
        part: int,
        lane: int,
        inputs: Bundle | None = None,
        *,
        batch: Any = None,
        share: float = 1.0,
        count: int = 0,
        use: int = 0,
        keep: bool = True,
    ) -> Bundle | None:
        """A lane's forward pass through one part: what goes to the next part, None at the last one.

        inputs: from the part before, None at the first one. batch: needed at the first and at the last part; there
        `share` is how full the micro-batch is, `count` and `use` as in `LaneReport`. keep: False if `recompute` comes
        before `backward`. Several lanes may be between the two. A lane without samples does not come here.

        Raises: TaskError if the task does what cannot be split.
        """
        check(step == self._step, f"step {step} has not begun")
        check(self._loss_of is not None, "a model that is split needs its task's loss")

        def measure(raw: Any) -> Scaled:
            return measured(raw[0], raw[1], share) if isinstance(raw, tuple) else measured(raw, None, share)

        given = Lane(inputs, self._loss_of, batch, measure, keep, self._probing())  # type: ignore[arg-type]
        result = self._passes[part].forward(step, lane, given)
        if isinstance(result, Bundle):
            return result
        self._reports[lane] = LaneReport(lane, result[1], result[2], count, use)
        return None

    def recompute(self, step: int, part: int, lane: int) -> None:
        """The forward pass again, directly before its backward pass: same bits, and nothing is counted twice."""
        self._passes[part].recompute(step, lane)

    def backward(
        self,
        step: int,
        part: int,
        lane: int,
        back: Bundle | None = None,
        give: Callable[[Bundle], None] | None = None,
    ) -> Bundle | None:
        """A lane's backward pass through one part: the gradients for the part before, None at the first one.

        back: what the part behind returned, None at the last one. The lane's gradients are taken, once; `give` is
        called with what is returned before that, since somebody waits for it.
        """
        check(step == self._step, f"step {step} has not begun")
        return self._passes[part].backward(lane, back, self._scaler.scale if self._scaler.enabled else 1.0, give)

    def drop(self) -> None:
        """Forget lanes between their passes (a generation has ended); what has been added stays."""
        for part in self._passes.values():
            part.drop()

    def evaluate(self, part: int, inputs: Bundle | None, metrics: Loss, batch: Any = None) -> Any:
        """One part of an evaluation, without gradients: what goes to the next part, at the last one the metrics.

        metrics: `Task.metrics`. The model must be in eval mode.
        """
        passes, call = self._passes[part], self._call
        check(call is not None, "a model that is not split is evaluated by calling it")
        with torch.no_grad():
            if passes.is_last:
                tree = None if inputs is None else inputs.tree()
                return call.result(metrics, batch, lambda: passes.through(tree))  # type: ignore[union-attr]
            if passes.is_first:
                args, kwargs = call.arguments(metrics, batch)  # type: ignore[union-attr]
                return passes.bundled(passes.start(*args, **kwargs))
            return passes.bundled(passes.through(inputs.tree()))  # type: ignore[union-attr]

    # ---- what the step gets

    def presence(self, step: int, lanes: Sequence[int]) -> dict[Node, bytes]:
        """What this worker offers to the reduction: the sums that cover exactly these lanes, its own now."""
        if step != self._step:
            self.begin(step, (), _no_buffer)
        return self._sums.offered(lanes)

    def reports(self, lanes: Sequence[int]) -> list[LaneReport]:
        """Of these lanes."""
        return [self._reports[lane] for lane in lanes]

    # ---- buffers

    def buffer_reports(self) -> list[bytes]:
        """What the lanes have made of the buffers, by part."""
        return [part.guard.report().encode() for part in self._passes.values()]

    def commit_buffers(self, step: int, reports: Sequence[Sequence[bytes]]) -> None:
        """A step was decided: the buffers become what all lanes together make of them. reports: by worker, by part."""
        if step != self._step:
            self.begin(step, (), _no_buffer)
        for k, part in enumerate(self._passes.values()):
            part.guard.commit([BufferReport.decode(row[k]) for row in reports])

    def settle_buffers(self) -> None:
        """Put the step's buffers back, whatever the last lane left: the state is whole again."""
        for part in self._passes.values():
            part.guard.settle()

    # ---- the end

    def discard(self) -> None:
        """The step is over: its lane results are of no more use."""
        self._sums.forget()
        self.drop()
        self._reports = {}
        self._step = 0

    def abandon(self) -> None:
        """The state is about to be replaced: nothing of the step that was under way counts."""
        self.discard()
        for part in self._passes.values():
            part.guard.abandon()


def _passes(
    parts: Parts,
    config: Config,
    device: torch.device,
    spec: StageSpec,
    layout: GradientLayout,
    call: ModelCall | None,
    seeder: UnitSeeder,
) -> dict[int, PartPass]:
    """One per part, by number. Buffers outside all units go with the first one."""
    model = parts.model
    passes: dict[int, PartPass] = {}
    at = 0
    inside = {id(m) for unit in parts.units for m in unit.modules()}
    outside = {id(m) for m in model.modules()} - inside
    for part in spec.parts:
        first, last = spec.cut[part]
        here = range(at, at + last - first)
        units = [parts.units[k] for k in here]
        modules = {id(m) for unit in units for m in unit.modules()} | (outside if at == 0 else set())
        passes[part] = PartPass(
            part,
            spec.n_parts,
            units,
            last - 1,
            call,
            LaneAccumulator(layout, model, here),
            BufferGuard(model, modules),
            seeder,
            lambda: autocast(config.precision, device),
            f"stage {spec.stage}",
        )
        at = here.stop
    return passes


def _no_buffer(node: Node) -> torch.Tensor:
    check(False, f"no lane was to be computed, but a sum of {node} was asked for")
    return torch.empty(0)
