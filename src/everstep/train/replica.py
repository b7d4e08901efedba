"""One worker's copy of a stage's training state, and the effect of a step on it: agree payload out, update applied.

Apart because it does not know of peers: the same lanes (`stage_lanes`) and records give the same state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.base.config import Config
from everstep.base.errors import ConfigError, Misused, check
from everstep.base.plan import Divides
from everstep.base.ports import Reduced
from everstep.exact.dealt import Dealt, digested_planes
from everstep.exact.digest import bytes_of, digest_bytes, named_digest
from everstep.exact.gradient import GradientHandOver, clip_factor, gradient_norm
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout, align_parameters, memory_of, untie
from everstep.exact.pieces import Ranges
from everstep.exact.reduce import TiePlace, block_norms, stage_terms
from everstep.exact.seeding import derive
from everstep.exact.settings import Settings
from everstep.exact.several import OptimizerSet, optimizers_of
from everstep.exact.state import ModelState
from everstep.protocol.driver.comparing import PART
from everstep.protocol.driver.nonfinite import NonfiniteRule
from everstep.protocol.driver.records import SETTING_BYTES, StageSection, StepOutcome, segment_name
from everstep.protocol.step_types import LaneSaid
from everstep.script.loop_guard import OwnSteps
from everstep.train.elastic import LrPolicy
from everstep.train.model_call import Loss
from everstep.train.offload import memory_for
from everstep.train.offload_parameters import ModelFile, parameter_files
from everstep.train.optimizer_kind import NO_GRADIENT, make_up
from everstep.train.optimizer_update import OptimizerUpdate, refuse_undivided
from everstep.train.precision import LossScaler, computing, type_of
from everstep.train.stage import Parts, StageSpec
from everstep.train.stage_lanes import LoopLane, StageLanes

TiedGradients = Mapping[TiePlace, torch.Tensor | None]
_UPDATE_SEED = 1 << 33
_MOST_PARTS = 1 << 14
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class UpdateTogether(Protocol):
    """The processes of one worker, which make its updates together."""

    def begin_update(self, step: int, factor: float, reduced: Reduced, wanted: Ranges | None) -> Ranges:
        """Have the others update their pieces of what is wanted, None: of all; returns those of this process."""

    def end_update(self) -> None:
        """Wait until all pieces are updated."""


class StageReplica:
    """Model, optimizer and the rest of one stage's state, and what a step does to it. An unsplit job has one stage.

    lanes: those of the step under way. handover: of its gradients to the optimizer. update: of that. schedule: steps of
    the scheduler.
    """

    def __init__(
        self,
        parts: Parts,
        config: Config,
        device: torch.device,
        spec: StageSpec | None = None,
        loss: Loss | None = None,
    ) -> None:
        """parts: of this stage (see `everstep.train.stage`). spec: None of a model that is not split, whose optimizer
        must hold the first places of shared parameters only. loss: the task's; needed where the model is split."""
        check(len(parts.units) > 0, "a model has at least one unit")
        if spec is None:
            spec = StageSpec.whole(len(parts.units))
            untie(parts.model, parts.units)
        self.parts = parts
        self.spec = spec
        align_parameters(parts.model)
        files = parameter_files(config)
        if files is not None:
            for parameter in parts.model.parameters():
                files.take(parameter)
            files.watch(parts.units, list(parts.model.parameters()))
        self.layout = GradientLayout.build(parts.model, parts.units, type_of(config.cell.types.reduction))
        self.schedule = OwnSteps(parts.scheduler)
        self._config = config
        self._scaler = scaler = LossScaler(config.scales_loss)
        self.lanes = StageLanes(parts, config, device, spec, self.layout, scaler, loss, lambda: not self.update.proven)
        self._loop: LoopLane | None = None
        if not spec.is_split:
            self._loop = LoopLane(self.lanes, parts.model, scaler, partial(computing, config, device, parts.units))
        self._trained = _leaves_by_optimizer(parts)
        self.handover = GradientHandOver(self.layout, parts.model, spec.ties)
        self._cell: UpdateTogether | None = None
        self._lr_policy = LrPolicy(config.lr_rule, config.workers, config.lr_warmup_steps)
        extras = {"everstep.scaler": scaler, **parts.extras}
        if config.batch == "per_worker":  # otherwise the number of workers is no part of the state
            extras["everstep.lr_policy"] = self._lr_policy
        settings = Settings(parts.model, parts.optimizer)
        memory = memory_for(config.zero.offload, device) if files is None else files.memory
        if isinstance(parts.optimizer, OptimizerSet) and (config.zero.stage or config.zero.offload is not None):
            raise ConfigError(
                "zero: the state of one optimizer alone can be divided or kept elsewhere, and join was given several: "
                "set zero.stage=0 and zero.offload=none, or give one optimizer with several groups"
            )
        stage, unfit = config.zero.stage, NonfiniteRule.of(config).applies
        if stage and parts.fill is not None:
            make_up(parts.optimizer, config.seed)
        kind = refuse_undivided(parts.optimizer, config.seed, stage, unfit=unfit) if stage else None
        self.update = OptimizerUpdate(parts.optimizer, memory, config.verify_every, kind, unfit=unfit)
        everything = (parts.model, parts.optimizer, parts.scheduler, extras, parts.units, spec.share, settings, memory)
        self.state = ModelState(
            *everything, divides=None if kind is None else kind.divides if kind.follows else "nothing"
        )
        self.application = ModelState(nn.Module(), extras=parts.extras, settings=settings)

    @property
    def everything(self) -> list[nn.Parameter]:
        """All parameters here: the model's, and the first places of those that it shares with other stages."""
        share = self.spec.share
        return [*self.parts.model.parameters(), *(() if share is None else share.foreign.values())]

    @property
    def _needs_norms(self) -> bool:
        return self._config.clip_norm is not None or self._scaler.enabled or self._config.on_nonfinite != "warn"

    @property
    def loop(self) -> LoopLane:
        """The lane in the user's loop, of a model that is not split."""
        check(self._loop is not None, "lanes of a model that is split go through its parts")
        return self._loop  # type: ignore[return-value]

    def trained_by(self, wanted: Any) -> list[torch.Tensor]:
        """Leaves of the parameters of one of the optimizers, given itself or by name. Raises: Misused for another, or
        one without any."""
        found = self._trained.get(wanted if isinstance(wanted, str) else id(wanted))
        if found is None:
            names = ", ".join(name for name in self._trained if name and isinstance(name, str)) or "the one of join"
            got = wanted if isinstance(wanted, str) else type(wanted).__name__
            raise Misused(f"step.backward(optimizer=...): expected one that join was given ({names}), got {got}")
        leaves = [p for p in found if p.requires_grad]
        if not leaves:
            raise Misused("step.backward(optimizer=...): none of its parameters requires a gradient")
        return leaves

    def section(
        self,
        reduced: Reduced,
        lanes: Sequence[int],
        digest: str,
        received: TiedGradients | None = None,
        verify: bool = False,
        settings: bytes = b"",
        probes: Mapping[int, Mapping[int, LaneSaid]] | None = None,
    ) -> StageSection:
        """This stage's part of the agree record: its lanes, and the norms of the blocks that it reduced.

        received: what `tied_out` gave in other stages. verify: state the digests of parameters held by several stages.
        settings: as `how_set` says. probes: what lanes that several compute gave here.
        """
        norms, ties = b"", []
        if self._needs_norms:
            runs = [(_range(reduced, *run), run[0] * BLOCK_ELEMENTS) for run in reduced.owned]
            norms = b"".join(block_norms(self.layout, data, start).tobytes() for data, start in runs)
            ties = stage_terms(self.spec.ties, self.layout, reduced, received or {})
        return StageSection(
            stage=self.spec.stage,
            lanes=self.lanes.reports(lanes) if self.spec.is_last else [],
            owned=tuple(chain.from_iterable(reduced.owned)),
            norms=norms,
            ties=ties,
            buffers=self.lanes.buffer_reports(),
            digest=digest,
            tied=self._tied_digests() if verify else {},
            settings=settings,
            probes={lane: dict(parts) for lane, parts in (probes or {}).items()},
        )

    def how_set(self) -> bytes:
        """Digests of how the model is set for the step's lanes, for the agree record. Raises: Uncarried."""
        digests = self.state.settings.digests()
        statistics = [value for part in self.lanes.passes.values() for value in part.guard.start()]
        if not digests or not statistics:
            return digests
        return digests + bytes.fromhex(digest_bytes(bytes_of(torch.cat(statistics))))[:SETTING_BYTES]

    def said(self, step: int) -> StageSection:
        """Digests of the state of a step, as part of a record."""
        return StageSection(self.spec.stage, [], (), b"", [], [], self.compared(step), self._tied_digests())

    def compared(self, step: int) -> str:
        """The digest of everything that is trained, and what tells which part of it differs."""
        self.lanes.settle_buffers()
        planes = digested_planes(self.state.shape) if self._config.zero.stage else None
        digest, parts = self.state.part_digests(step, planes)
        return digest + ("".join(one[:PART] for one in parts.values()) if len(parts) <= _MOST_PARTS else "")

    def _tied_digests(self) -> dict[str, str]:
        """Digests of each parameter that other stages hold too, with the optimizer's state for it."""
        found = {}
        for tied in self.spec.ties:
            kept = self.parts.optimizer.state.get(tied.parameter, {})
            tensors = {str(k): v for k, v in kept.items() if isinstance(v, torch.Tensor)}
            found[tied.name] = named_digest([("", tied.parameter), *tensors.items()])
        segments = self.update.dealt.digests() if self.update.dealt is not None else {}
        return found | {segment_name(self.spec.stage, number): digest for number, digest in segments.items()}

    def apply(
        self,
        outcome: StepOutcome,
        reduced: Reduced,
        workers: int,
        received: TiedGradients | None = None,
        dealt: Callable[[frozenset[nn.Parameter]], Dealt | None] = lambda present: None,
    ) -> dict[str, Any]:
        """Apply a decided step. Returns facts to report: whether the optimizer stepped, the gradient norm, and
        values that are not finite. If a step is left out because of these, buffers and schedule stay as they were,
        too.

        received: as for `section`. dealt: given the parameters that have a gradient, says which parts are updated here,
        None if all are; of others `reduced` may lack the gradient.
        """
        self.update.forget()
        scale = 1.0 / (outcome.weight * self._scaler.scale) if outcome.weight else 0.0
        told: dict[str, Any] = {"lr": _rates(self.parts.optimizer)}
        sumsq = outcome.sumsq
        if self._needs_norms:
            told["grad_norm"] = gradient_norm(sumsq, scale)
        left_out = outcome.nonfinite.left_out
        self.lanes.commit_buffers(outcome.step, () if left_out else outcome.buffers[self.spec.stage])
        if not left_out:
            self.handover.commit_statistics(reduced)
        applied = self._scaler.advance(math.isfinite(sumsq)) and outcome.weight > 0 and not left_out
        told["applied"] = applied
        if applied:
            factor = scale * clip_factor(sumsq, scale, self._config.clip_norm)
            parts = dealt(self.handover.present(reduced, received))
            pieces = None if parts is None else parts.updates()
            if self._cell is not None:
                pieces = self._cell.begin_update(outcome.step, factor, reduced, pieces)
            later = pieces is not None or isinstance(self.state.memory, ModelFile)
            self.handover.hand_over(reduced, factor, received, pieces, self._config.clip_value, later=later)
            told["lr"] = self._step_optimizer(outcome.step, workers, parts, pieces)
            self.handover.clear()
            if self._cell is not None:
                self._cell.end_update()
            told["slow_offload"], told["undivided"] = self.update.complaint(), self.update.undivided()
        return told

    def share_updates(self, cell: UpdateTogether) -> None:
        """From now on, make updates together with the other processes of this worker."""
        self._cell = cell
        self.update.keep_kind()

    def begin_lanes(self, step: int, scale: float) -> None:
        """At a limb: the model's buffers are the step's. scale: of the loss."""
        self._scaler.load_state_dict({"scale": scale, "good_steps": 0})
        self.lanes.begin(step, (), lambda node: torch.empty(0))

    def update_pieces(self, step: int, factor: float, reduced: Reduced, pieces: Ranges) -> None:
        """At a limb: update these pieces with the reduced gradient, times `factor`. Raises: as the optimizer does."""
        nothing: Ranges = {p: () for group in self.parts.optimizer.param_groups for p in group["params"]}
        wanted, limit = {**nothing, **pieces}, self._config.clip_value
        elsewhere = {place: None for tied in self.spec.ties for place in tied.places}  # the head alone updates these
        self.handover.hand_over(reduced, factor, elsewhere, wanted, limit, later=True)
        self.update.make(step, derive(self._config.seed, step, _UPDATE_SEED), None, pieces, self.handover.give)
        self.handover.clear()

    def _step_optimizer(
        self, step: int, workers: int, dealt: Dealt | None, pieces: Ranges | None
    ) -> list[float | None]:
        """Update and move the schedule on; returns the learning rates that were used."""
        optimizer = self.parts.optimizer
        scheduled = [group.get("lr") for group in optimizer.param_groups]
        if self._config.batch == "per_worker":
            factor = self._lr_policy.advance(workers)
            for group, lr in zip(optimizer.param_groups, scheduled, strict=True):
                if lr is not None:
                    group["lr"] = lr * factor
        used = _rates(optimizer)
        seed = derive(self._config.seed, step, _UPDATE_SEED)
        self.update.make(step, seed, dealt, pieces, self.handover.give)
        if self._config.batch == "per_worker":
            for group, lr in zip(optimizer.param_groups, scheduled, strict=True):
                if lr is not None:
                    group["lr"] = lr
        self.schedule.make()
        return used

    def abandon(self) -> None:
        """The state is about to be replaced: nothing of the step that was under way counts."""
        self.lanes.abandon()
        self.schedule.forget()
        self.update.forget()

    def prove_update(self) -> None:
        """The state was trained elsewhere: that an update can be done twice alike was seen there."""
        self.update.prove()

    def flip_bit(self) -> None:
        """A scripted fault: one bit of the first parameter changes, unseen by autograd, as in a damaged memory cell."""
        parameter = next(p for p in self.parts.model.parameters() if p.numel())
        memory = parameter.data[(0,) * parameter.dim()].view(_WORDS[parameter.element_size()])
        memory.bitwise_xor_(1 << 4 * parameter.element_size())

    def digest(self, step: int) -> str:
        """Digest of everything that is trained."""
        self.lanes.settle_buffers()
        return self.state.state_digest(step)


def _leaves_by_optimizer(parts: Parts) -> dict[Any, list[torch.Tensor]]:
    """Leaves of the model that each optimizer updates, those of tied parameters included, by its id and its name."""
    found: dict[Any, list[torch.Tensor]] = {}
    for name, optimizer in optimizers_of(parts.optimizer).items():
        own = {memory_of(p) for group in optimizer.param_groups for p in group["params"]}
        leaves = [p for _, p in parts.model.named_parameters(remove_duplicate=False) if memory_of(p) in own]
        found[name or parts.named] = found[id(optimizer)] = list({id(p): p for p in leaves}.values())
    return found


def _range(reduced: Reduced, first: int, last: int) -> torch.Tensor:
    """The blocks [first, last) as one flat tensor."""
    start, stop = first * BLOCK_ELEMENTS, last * BLOCK_ELEMENTS
    found = [
        piece.data[max(start, piece.start) - piece.start : min(stop, piece.stop) - piece.start]
        for piece in reduced.pieces
        if piece.start < stop and start < piece.stop
    ]
    return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0, dtype=torch.float32)


def how_divided(replica: StageReplica) -> Divides | None:
    """How members divide the optimizer's state; None if they do not, or nothing is trained in this stage, which says
    nothing of the optimizer."""
    kind = replica.update.kind
    return None if kind is None or kind.why == NO_GRADIENT else replica.state.divides


def _rates(optimizer: Optimizer) -> list[float | None]:
    """The learning rate of each group, None where it has none of its own."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return [None if rate is None else float(rate) for rate in rates]
