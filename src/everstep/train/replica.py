"""One worker's copy of the training state, and what a step does to it: lanes in, agree payload out, update applied.

Apart from the engine because nothing here knows about peers: given the same lanes and records it does the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.base.config import Config
from everstep.base.errors import TaskError, check
from everstep.base.ports import Node, Reduced
from everstep.exact.accumulate import LaneAccumulator
from everstep.exact.buffers import BufferGuard, BufferReport
from everstep.exact.digest import named_digest
from everstep.exact.gradient import GradientHandOver, clip_factor, gradient_norm
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout, align_parameters, untie
from everstep.exact.reduce import block_norms
from everstep.exact.seeding import UnitSeeder, derive, seed_all
from everstep.exact.stage_sums import StageSums
from everstep.exact.state import ModelState
from everstep.exact.ties import Place, stage_terms, tied_out
from everstep.exact.trees import Bundle
from everstep.protocol.driver.records import LaneReport, Outcome, StageSection
from everstep.train.lr_policy import LrPolicy
from everstep.train.model_call import Loss, ModelCall
from everstep.train.part_pass import Lane, PartPass, Scaled
from everstep.train.parts import Parts, StageSpec
from everstep.train.precision import LossScaler, autocast
from everstep.train.update_probe import UpdateProbe

Received = Mapping[Place, torch.Tensor | None]
_UPDATE_SEED = 1 << 33
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StageReplica:
    """Model, optimizer and the rest of one stage's state, with the bookkeeping of a step. An unsplit job has one stage.

    `update_proven`: the optimizer is known to be deterministic (its first update is made twice), or the state comes
    from somebody who knows.
    """

    def __init__(
        self,
        parts: Parts,
        config: Config,
        device: torch.device,
        spec: StageSpec | None = None,
        loss: Loss | None = None,
    ) -> None:
        """parts: of this stage (see `everstep.train.stage`). loss: the task's; needed where the model is split."""
        self.parts = parts
        self.config = config
        self.device = device
        self.n_lanes = config.lanes
        self.spec = spec = StageSpec.whole(len(parts.units)) if spec is None else spec
        align_parameters(parts.model)
        self.layout = GradientLayout.build(parts.model, parts.units)
        self.seeder = UnitSeeder(parts.units, config.seed, spec.units)
        self._loss_of = loss
        self.call = ModelCall(parts.model) if spec.is_split else None
        self._passes = self._make_passes()
        self.sums = StageSums([p.accumulator for p in self._passes.values()], config.lanes)
        self.handover = GradientHandOver(self.layout, parts.model, spec.ties)
        self.scaler = LossScaler(config.precision == "fp16")
        self.lr_policy = LrPolicy(config.lr_rule, config.workers, config.lr_warmup_steps)
        extras = {"everstep.scaler": self.scaler, **parts.extras}
        if config.batch == "per_worker":  # otherwise the number of workers is no part of the state
            extras["everstep.lr_policy"] = self.lr_policy
        self.state = ModelState(parts.model, parts.optimizer, parts.scheduler, extras, parts.units, spec.share)
        self.application = ModelState(nn.Module(), extras=parts.extras)
        self.needs_norms = config.clip_norm is not None or self.scaler.enabled
        self.update_proven = False
        self._reports: dict[int, LaneReport] = {}
        self._step = 0
        self._autocast: Any = None
        self._loss = 0.0
        self._weight = 0.0
        self._spoke = False

    def _make_passes(self) -> dict[int, PartPass]:
        """One per part, by number. Buffers outside all units go with the first one."""
        spec, model = self.spec, self.parts.model
        passes: dict[int, PartPass] = {}
        at = 0
        inside = {id(m) for unit in self.parts.units for m in unit.modules()}
        outside = {id(m) for m in model.modules()} - inside
        for part in spec.parts:
            first, last = spec.cut[part]
            here = range(at, at + last - first)
            units = [self.parts.units[k] for k in here]
            modules = {id(m) for unit in units for m in unit.modules()} | (outside if at == 0 else set())
            passes[part] = PartPass(
                part,
                spec.n_parts,
                units,
                last - 1,
                self.call,
                LaneAccumulator(self.layout, model, here),
                BufferGuard(model, modules),
                self.seeder,
                lambda: autocast(self.config.precision, self.device),
                f"stage {spec.stage}",
            )
            at = here.stop
        return passes

    # ---- lanes

    def expected_bytes(self) -> int:
        """About how large the state is in training: an optimizer fills two values per parameter, if any."""
        model = self.parts.model
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        return parameters * (3 if self.parts.optimizer is not None else 1) + buffers

    def begin(self, step: int, lanes: Sequence[int], buffer: Callable[[Node], torch.Tensor]) -> None:
        """The lanes of a step that are wanted from here; what has been computed of them already counts."""
        if step != self._step:
            self._step, self._reports = step, {}
            for part in self._passes.values():
                part.begin_step(step)
        self.sums.begin(step, lanes, buffer)

    def lacking(self, lanes: Sequence[int]) -> tuple[int, ...]:
        """Lanes that must be computed here before exactly these can be offered to the reduction."""
        return self.sums.lacking(lanes)

    @property
    def missing(self) -> tuple[int, ...]:
        """Lanes of the step's sums that have not been added yet, ascending."""
        return self.sums.missing

    @property
    def _only(self) -> PartPass:
        """The one part of a model that is not split."""
        check(not self.spec.is_split, "lanes of a model that is split go through its parts")
        return self._passes[0]

    def enter_lane(self, step: int, lane: int) -> None:
        """Seed everything, put the step's buffers in place, and begin autocast: the forward pass may run."""
        only = self._only
        only.guard.begin_lane()
        only.accumulator.enter(lane)
        self._lane = lane
        self.seeder.begin_lane(step, lane)
        self._loss = self._weight = 0.0
        self._spoke = False
        self._autocast = autocast(self.config.precision, self.device)
        self._autocast.__enter__()

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None, share: float) -> None:
        """Backward of one lane. weight None: `loss` is a mean, of a micro-batch that is `share` of a full one.

        Raises: TaskError if the loss is not a scalar tensor with a graph, or if the lane called it twice.
        """
        self._end_autocast()
        if self._spoke:
            raise TaskError("step.backward(loss) was called twice for one batch; add the losses up and call it once")
        scaled, self._loss, self._weight = self._measured(loss, weight, share)
        self._only.accumulator.capture(self._lane)
        self._only.guard.end_lane()
        torch.autograd.backward(scaled * self.scaler.scale if self.scaler.enabled else scaled)
        self._spoke = True

    @staticmethod
    def _measured(loss: Any, weight: float | torch.Tensor | None, share: float) -> Scaled:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TaskError(f"the loss must be a tensor with one element, got {got}; return its mean, or (sum, weight)")
        weighed = share if weight is None else float(weight)
        scaled = loss if weight is not None or share == 1.0 else loss * share
        value = float(scaled.detach())
        if not scaled.requires_grad:
            raise TaskError("the loss has no gradient: does it depend on the model's parameters?")
        return scaled, value, weighed

    def leave_lane(self, lane: int, count: int, use: int) -> None:
        """Take the lane's gradient and buffers. Raises: TaskError if the lane never called backward."""
        self._end_autocast()
        self.seeder.end_lane()
        if not self._spoke:
            raise TaskError("a batch was taken without step.backward(loss); call it once for every batch")
        self._only.accumulator.add(lane)
        self._reports[lane] = LaneReport(lane, self._loss, self._weight, count, use)

    def empty_lane(self, lane: int, use: int) -> None:
        """A lane beyond the end of the data: it weighs nothing."""
        self.sums.add_empty(lane)
        self._reports[lane] = LaneReport(lane, 0.0, 0.0, 0, use)

    def idle_lane(self, lane: int, count: int, use: int) -> None:
        """A lane that was only waited for: it counts as `count` samples, and has no gradient and no loss."""
        if lane in self.missing:
            self.sums.add_empty(lane)
        self._reports[lane] = LaneReport(lane, 0.0, 1.0, count, use)

    def lane_digest(self) -> str:
        """Of the gradients and buffers that a lane has left, and its loss; two computations of it must agree."""
        self._end_autocast()
        self.seeder.end_lane()
        named = [(f"grad {n}", p.grad) for n, p in self.parts.model.named_parameters() if p.grad is not None]
        buffers = [(f"buffer {n}", b) for n, b in self.parts.model.named_buffers()]
        return f"{named_digest([*named, *buffers])} {self._loss.hex()}"

    def abandon_lane(self) -> None:
        """Throw away what a lane on trial has left; the next lane puts the buffers back."""
        self._only.guard.forget_lanes()
        for parameter in self.parts.model.parameters():
            parameter.grad = None

    def _end_autocast(self) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
            self._autocast = None

    # ---- lanes of a model that is split

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
            return self._measured(raw[0], raw[1], share) if isinstance(raw, tuple) else self._measured(raw, None, share)

        given = Lane(inputs, self._loss_of, batch, measure, keep, not self.update_proven)  # type: ignore[arg-type]
        result = self._passes[part].forward(step, lane, given)
        if isinstance(result, Bundle):
            return result
        self._reports[lane] = LaneReport(lane, result[1], result[2], count, use)
        return None

    def recompute(self, step: int, part: int, lane: int) -> None:
        """The forward pass again, directly before its backward pass: same bits, and nothing is counted twice."""
        self._passes[part].recompute(step, lane)

    def backward_part(
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
        return self._passes[part].backward(lane, back, self.scaler.scale if self.scaler.enabled else 1.0, give)

    def drop_lanes(self) -> None:
        """Forget lanes between their passes (a generation has ended); what has been added stays."""
        for part in self._passes.values():
            part.drop()

    def evaluate(self, part: int, inputs: Bundle | None, metrics: Loss, batch: Any = None) -> Any:
        """One part of an evaluation, without gradients: what goes to the next part, at the last one the metrics.

        metrics: `Task.metrics`. The model must be in eval mode.
        """
        passes, call = self._passes[part], self.call
        check(call is not None, "a model that is not split is evaluated by calling it")
        with torch.no_grad():
            if passes.is_last:
                tree = None if inputs is None else inputs.tree()
                return call.result(metrics, batch, lambda: passes.through(tree))  # type: ignore[union-attr]
            if passes.is_first:
                args, kwargs = call.arguments(metrics, batch)  # type: ignore[union-attr]
                return passes.bundled(passes.start(*args, **kwargs))
            return passes.bundled(passes.through(inputs.tree()))  # type: ignore[union-attr]

    # ---- the step

    def presence(self, step: int, lanes: Sequence[int]) -> dict[Node, bytes]:
        """What this worker offers to the reduction: the sums that cover exactly these lanes, its own now."""
        if step != self._step:
            self.begin(step, (), _no_buffer)
        return self.sums.offered(lanes)

    def tied_out(self, reduced: Reduced) -> dict[Place, torch.Tensor | None]:
        """What every other stage of `Tied.stages` has to get before its section: flat float32, None where absent.

        Empty where no parameter is used in several stages (`spec.ties` tells).
        """
        return tied_out(self.spec.ties, self.layout, reduced)

    def section(
        self,
        reduced: Reduced,
        lanes: Sequence[int],
        digest: str,
        received: Received | None = None,
        verify: bool = False,
    ) -> StageSection:
        """This stage's part of the agree record: its lanes, and the norms of the blocks that it reduced.

        received: what other stages' `tied_out` gave. verify: state the digests of parameters held by several stages.
        """
        norms, ties = b"", []
        if self.needs_norms:
            first, last = reduced.owned
            norms = block_norms(self.layout, _range(reduced, first, last), first * BLOCK_ELEMENTS).tobytes()
            ties = stage_terms(self.spec.ties, self.layout, reduced, received or {})
        return StageSection(
            stage=self.spec.stage,
            lanes=[self._reports[lane] for lane in lanes] if self.spec.is_last else [],
            owned=reduced.owned,
            norms=norms,
            ties=ties,
            buffers=[part.guard.report().encode() for part in self._passes.values()],
            digest=digest,
            tied=self._tied_digests() if verify else {},
        )

    def _tied_digests(self) -> dict[str, str]:
        """Of each parameter that other stages hold too, with what the optimizer keeps for it."""
        found = {}
        for tied in self.spec.ties:
            kept = self.parts.optimizer.state.get(tied.parameter, {})
            tensors = {str(k): v for k, v in kept.items() if isinstance(v, torch.Tensor)}
            found[tied.name] = named_digest([("", tied.parameter), *tensors.items()])
        return found

    def apply(
        self, outcome: Outcome, reduced: Reduced, workers: int, received: Received | None = None
    ) -> dict[str, Any]:
        """Apply a decided step; returns what is worth telling: whether the optimizer stepped, and the gradient norm.

        received: as for `section`.
        """
        if outcome.step != self._step:
            self.begin(outcome.step, (), _no_buffer)
        scale = 1.0 / (outcome.weight * self.scaler.scale) if outcome.weight else 0.0
        told: dict[str, Any] = {"lr": _rates(self.parts.optimizer)}
        sumsq = outcome.sumsq
        if self.needs_norms:
            told["grad_norm"] = gradient_norm(sumsq, scale)
        reports = outcome.buffers[self.spec.stage]
        for k, part in enumerate(self._passes.values()):
            part.guard.commit([BufferReport.decode(row[k]) for row in reports])
        self.handover.commit_statistics(reduced)
        applied = self.scaler.advance(math.isfinite(sumsq)) and outcome.weight > 0
        told["applied"] = applied
        if applied:
            self.handover.hand_over(reduced, scale * clip_factor(sumsq, scale, self.config.clip_norm), received)
            told["lr"] = self._step_optimizer(outcome.step, workers)
            self.handover.clear()
        return told

    def _step_optimizer(self, step: int, workers: int) -> list[float | None]:
        """Update and move the schedule on; returns the learning rates that were used."""
        optimizer = self.parts.optimizer
        scheduled = [group.get("lr") for group in optimizer.param_groups]
        if self.config.batch == "per_worker":
            factor = self.lr_policy.advance(workers)
            for group, lr in zip(optimizer.param_groups, scheduled, strict=True):
                if lr is not None:
                    group["lr"] = lr * factor
        used = _rates(optimizer)
        seed = derive(self.config.seed, step, _UPDATE_SEED)
        probe = None if self.update_proven else UpdateProbe(optimizer, seed)
        seed_all(seed)
        optimizer.step()
        if probe is not None:
            probe.compare(step)
            self.update_proven = True
        if self.config.batch == "per_worker":
            for group, lr in zip(optimizer.param_groups, scheduled, strict=True):
                if lr is not None:
                    group["lr"] = lr
        if self.parts.scheduler is not None:
            self.parts.scheduler.step()
        return used

    def discard(self) -> None:
        """The step is over: its lane results are of no more use."""
        self.sums.forget()
        self.drop_lanes()
        self._reports = {}
        self._step = 0

    def abandon(self) -> None:
        """The state is about to be replaced: nothing of the step that was under way counts."""
        self.discard()
        for part in self._passes.values():
            part.guard.abandon()

    def prove_update(self) -> None:
        """The state was trained elsewhere: that an update can be done twice alike was seen there."""
        self.update_proven = True

    def settle_buffers(self) -> None:
        """Put the step's buffers back, whatever the last lane left: the state is whole again."""
        for part in self._passes.values():
            part.guard.settle()

    def flip_bit(self) -> None:
        """A scripted fault: one bit of the first parameter changes, unseen by autograd, as in a damaged memory cell."""
        parameter = next(p for p in self.parts.model.parameters() if p.numel())
        memory = parameter.data[(0,) * parameter.dim()].view(_WORDS[parameter.element_size()])
        memory.bitwise_xor_(1 << 4 * parameter.element_size())

    def digest(self, step: int) -> str:
        """Of everything that is trained."""
        self.settle_buffers()
        return self.state.state_digest(step)


def _range(reduced: Reduced, first: int, last: int) -> torch.Tensor:
    """The blocks [first, last) as one flat tensor."""
    start, stop = first * BLOCK_ELEMENTS, last * BLOCK_ELEMENTS
    found = [
        piece.data[max(start, piece.start) - piece.start : min(stop, piece.stop) - piece.start]
        for piece in reduced.pieces
        if piece.start < stop and start < piece.stop
    ]
    return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0)


def _rates(optimizer: Optimizer) -> list[float | None]:
    """The learning rate of each group, None where it has none of its own."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return [None if rate is None else float(rate) for rate in rates]


def _no_buffer(node: Node) -> torch.Tensor:
    check(False, f"no lane was to be computed, but a sum of {node} was asked for")
    return torch.empty(0)


Replica = StageReplica


def make_replica(parts: Parts, config: Config, device: torch.device) -> StageReplica:
    """For a model that is not split: untie shared parameters between units, then build the replica.

    The optimizer must hold the first places only.
    """
    check(len(parts.units) > 0, "a model has at least one unit")
    untie(parts.model, parts.units)
    return StageReplica(parts, config, device)
