"""One worker's copy of the training state, and what a step does to it: lanes in, agree payload out, update applied.

Apart from the engine because nothing here knows about peers: given the same lanes and records it does the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from everstep.exact.reduce import block_norms, tied_sumsq
from everstep.exact.seeding import UnitSeeder, derive, seed_all
from everstep.exact.state import ModelState
from everstep.placement.tree import cover
from everstep.train.lr_policy import LrPolicy
from everstep.train.precision import LossScaler, autocast
from everstep.train.record import AgreePayload, LaneReport, Outcome
from everstep.train.update_probe import UpdateProbe

_UPDATE_SEED = 1 << 33


@dataclass
class Parts:
    """What the user brings: everything that is trained, and what goes with it. `extras`: more state to keep."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    units: Sequence[nn.Module]
    extras: Mapping[str, Any] = field(default_factory=dict)


class Replica:
    """Model, optimizer and the rest of the state, with the bookkeeping of one step.

    `update_proven`: the optimizer is known to be deterministic (its first update is made twice), or the state comes
    from somebody who knows.
    """

    def __init__(self, parts: Parts, config: Config, device: torch.device) -> None:
        self.parts = parts
        self.config = config
        self.device = device
        self.n_lanes = config.lanes
        align_parameters(parts.model)
        self.layout = GradientLayout.build(parts.model, parts.units)
        self.accumulator = LaneAccumulator(self.layout, parts.model)
        self.guard = BufferGuard(parts.model)
        self.seeder = UnitSeeder(parts.units, config.seed)
        self.handover = GradientHandOver(self.layout, parts.model)
        self.scaler = LossScaler(config.precision == "fp16")
        self.lr_policy = LrPolicy(config.lr_rule, config.workers, config.lr_warmup_steps)
        extras = {"everstep.scaler": self.scaler, **parts.extras}
        if config.batch == "per_worker":  # otherwise the number of workers is no part of the state
            extras["everstep.lr_policy"] = self.lr_policy
        self.state = ModelState(parts.model, parts.optimizer, parts.scheduler, extras, parts.units)
        self.application = ModelState(nn.Module(), extras=parts.extras)
        self.needs_norms = config.clip_norm is not None or self.scaler.enabled
        self.update_proven = False
        self._reports: dict[int, LaneReport] = {}
        self._step = 0
        self._autocast: Any = None
        self._loss = 0.0
        self._weight = 0.0
        self._spoke = False

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
            self.guard.begin_step(step)
        mine = set(lanes)
        for node in [n for n in self.accumulator.presence if 0 < len(mine.intersection(range(*n))) < n.hi - n.lo]:
            self.accumulator.drop(node)  # its sum has lanes that are another worker's now
        held = {lane for node in self.accumulator.presence for lane in range(*node)}
        self.accumulator.begin(step, cover([x for x in lanes if x not in held], self.n_lanes), buffer)

    def lacking(self, lanes: Sequence[int]) -> tuple[int, ...]:
        """Lanes that must be computed here before exactly these can be offered to the reduction."""
        mine = set(lanes)
        whole = {lane for node in self.accumulator.presence if mine.issuperset(range(*node)) for lane in range(*node)}
        return tuple(sorted(mine - whole))

    def enter_lane(self, step: int, lane: int) -> None:
        """Seed everything, put the step's buffers in place, and begin autocast: the forward pass may run."""
        self.guard.begin_lane()
        self.accumulator.enter(lane)
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
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TaskError(f"the loss must be a tensor with one element, got {got}; return its mean, or (sum, weight)")
        self._weight = share if weight is None else float(weight)
        scaled = loss if weight is not None or share == 1.0 else loss * share
        self._loss = float(scaled.detach())
        if not scaled.requires_grad:
            raise TaskError("the loss has no gradient: does it depend on the model's parameters?")
        torch.autograd.backward(scaled * self.scaler.scale if self.scaler.enabled else scaled)
        self._spoke = True

    def leave_lane(self, lane: int, count: int, use: int) -> None:
        """Take the lane's gradient and buffers. Raises: TaskError if the lane never called backward."""
        self._end_autocast()
        self.seeder.end_lane()
        if not self._spoke:
            raise TaskError("a batch was taken without step.backward(loss); call it once for every batch")
        self.accumulator.add(lane)
        self.guard.end_lane()
        self._reports[lane] = LaneReport(lane, self._loss, self._weight, count, use)

    def empty_lane(self, lane: int, use: int) -> None:
        """A lane beyond the end of the data: it weighs nothing."""
        self.accumulator.add_empty(lane)
        self._reports[lane] = LaneReport(lane, 0.0, 0.0, 0, use)

    def lane_digest(self) -> str:
        """Of the gradients and buffers that a lane has left, and its loss; two computations of it must agree."""
        self._end_autocast()
        self.seeder.end_lane()
        named = [(f"grad {n}", p.grad) for n, p in self.parts.model.named_parameters() if p.grad is not None]
        buffers = [(f"buffer {n}", b) for n, b in self.parts.model.named_buffers()]
        return f"{named_digest([*named, *buffers])} {self._loss.hex()}"

    def abandon_lane(self) -> None:
        """Throw away what a lane has left in .grad; the next lane puts the buffers back."""
        for parameter in self.parts.model.parameters():
            parameter.grad = None

    def _end_autocast(self) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
            self._autocast = None

    # ---- the step

    def presence(self, step: int, lanes: Sequence[int]) -> dict[Node, bytes]:
        """What this worker offers to the reduction: the sums that cover exactly these lanes, its own now."""
        if step != self._step:
            self.begin(step, (), _no_buffer)
        mine = set(lanes)
        offered = {n: p for n, p in self.accumulator.presence.items() if mine.issuperset(range(n.lo, n.hi))}
        covered = sorted(lane for n in offered for lane in range(n.lo, n.hi))
        check(covered == sorted(mine), f"sums of lanes {covered} are held, the plan gives {sorted(mine)}")
        return offered

    def agree_payload(
        self, reduced: Reduced, lanes: Sequence[int], digest: str, committed_unix_ns: int
    ) -> AgreePayload:
        """This worker's part of the agree record: its lanes, and the norms of the blocks that it reduced."""
        norms = b""
        if self.needs_norms:
            first, last = reduced.owned
            norms = block_norms(self.layout, _range(reduced, first, last), first * BLOCK_ELEMENTS).tobytes()
        return AgreePayload(
            lanes=[self._reports[lane] for lane in lanes],
            owned=reduced.owned,
            norms=norms,
            buffers=self.guard.report().encode(),
            digest=digest,
            committed_unix_ns=committed_unix_ns,
        )

    def apply(self, outcome: Outcome, reduced: Reduced, workers: int) -> dict[str, Any]:
        """Apply a decided step; returns what is worth telling: whether the optimizer stepped, and the gradient norm."""
        if outcome.step != self._step:
            self.begin(outcome.step, (), _no_buffer)
        scale = 1.0 / (outcome.weight * self.scaler.scale) if outcome.weight else 0.0
        told: dict[str, Any] = {"lr": _rates(self.parts.optimizer)}
        sumsq = outcome.sumsq
        if self.needs_norms:
            sumsq += tied_sumsq(self.layout, reduced)
            told["grad_norm"] = gradient_norm(sumsq, scale)
        self.guard.commit([BufferReport.decode(data) for data in outcome.buffers])
        self.handover.commit_statistics(reduced)
        applied = self.scaler.advance(math.isfinite(sumsq)) and outcome.weight > 0
        told["applied"] = applied
        if applied:
            self.handover.hand_over(reduced, scale * clip_factor(sumsq, scale, self.config.clip_norm))
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
        self.accumulator.forget()
        self._reports = {}
        self._step = 0

    def settle_buffers(self) -> None:
        """Put the step's buffers back, whatever the last lane left: the state is whole again."""
        if self._step:
            self.guard.begin_lane()

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


def make_replica(parts: Parts, config: Config, device: torch.device) -> Replica:
    """Untie shared parameters between units, then build the replica. The optimizer must hold the first places only."""
    check(len(parts.units) > 0, "a model has at least one unit")
    untie(parts.model, parts.units)
    return Replica(parts, config, device)
