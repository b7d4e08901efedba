"""Forward and backward passes of one part of the model, with several lanes in flight.

Between the passes a lane keeps its graph, its buffers (`BufferGuard`) and its place in the seeding; or, with
recomputation, only its input. The very first lane is computed twice, to check that it gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from msgspec import structs
from torch import Tensor, nn

from everstep.base.errors import ConfigError, DeterminismError, EverstepError, InvariantViolation, TaskError, check
from everstep.exact.accumulate import LaneAccumulator
from everstep.exact.buffers import BufferGuard
from everstep.exact.digest import digest_bytes, named_digest
from everstep.exact.extra_state import keepers, packed
from everstep.exact.parameters import ParameterWatch
from everstep.exact.rank_sums import RankSums
from everstep.exact.seeding import UnitSeeder, drawn_from
from everstep.exact.shard_sums import ShardMesh
from everstep.exact.trees import Bundle, bundle, faithful_clone, gradients, open_gradients
from everstep.protocol.step_types import LaneSaid
from everstep.script.loop_guard import own_pass
from everstep.train.model_call import EntryHolder, Loss, ModelCall, tensors_in
from everstep.train.stage import StageSpec
from everstep.train.task import where

Scaled = tuple[Tensor, float, float]
"""(start of backward, loss as a sum in units of the weight, weight)."""

NOT_DETERMINISTIC = (
    "the model or the loss uses an operation or a random source that is not deterministic (for example one seeded by "
    "time or os.urandom): use torch's, numpy's or random's global generators"
)

_DRAWS = (
    "stage {stage} draws random numbers in its backward pass (a hook of a gradient, or an autograd function, does), "
    "which go by the cut of the model: draw them in the forward pass and keep them, or set stages=1 and chunks=1"
)


def computed_otherwise(step: int, lane: int, what: str, where: str = "") -> DeterminismError:
    """Error for a lane that a worker has computed twice, with different results."""
    return DeterminismError(
        f"lane {lane} of step {step} was computed twice{where} and gave different {what}: {NOT_DETERMINISTIC}"
    )


@dataclass(frozen=True)
class Lane:
    """A lane in one part, from its forward to its backward pass. inputs: from the part before, None at the first one.

    batch: used at the first and at the last part; `share`: how full it is. keep: hold the graph; otherwise only the
    input, and `recompute` comes before `backward`. probe: set if it is computed twice, the second time in its backward
    pass. repeats: lane that a trial repeats; nothing of the trial counts. said: digests of its results so far, if they
    are to be reported. The other fields are made by its forward pass: the graph begins at `entry` (None: nothing wants
    a gradient), and ends with the outputs for the next part, or with the loss.
    """

    inputs: Bundle | None
    batch: Any
    share: float = 1.0
    keep: bool = True
    probe: LaneProbe | None = None
    repeats: int | None = None
    said: LaneSaid | None = None
    entry: EntryHolder | None = None
    outputs: Bundle | None = None
    scaled: Scaled | None = None


class LaneProbe:
    """Results of the first of two computations. where: the stage, for the error. inputs: of the lane; copied, because
    the first computation may change them."""

    def __init__(self, where: str, step: int, lane: int, inputs: Bundle | None) -> None:
        self.step = step
        self._lane = lane
        self._where = f" in {where}"
        self.inputs = None if inputs is None else _copied(inputs)
        self._seen: dict[str, str] = {}

    def forward(self, units: Sequence[nn.Module], lane: Lane) -> None:
        """Compare a forward pass. Raises: DeterminismError if the second one gave something else."""
        self._compare("outputs or buffers", _forward_digest(units, lane))

    def backward(self, units: Sequence[nn.Module], lane: Lane) -> None:
        """Compare a backward pass. Raises: as `forward`."""
        self._compare("gradients", _gradient_digest(units, lane))

    def _compare(self, what: str, digest: str) -> None:
        if self._seen.setdefault(what, digest) != digest:
            raise computed_otherwise(self.step, self._lane, what, self._where)


class SplitCall(NamedTuple):
    """How a split model is run; not used if the model is not split."""

    call: ModelCall
    loss: Loss


def derive(mesh: ShardMesh | None, roots: Any, gradients: Any = None, **how: Any) -> None:
    """A lane's own backward pass. mesh: of a model that is cut; others: as of `torch.autograd.backward`."""
    with nullcontext() if mesh is None else mesh.deriving(), own_pass():
        torch.autograd.backward(roots, gradients, **how)


@dataclass(eq=False)
class PartPass:
    """One part of the model, in one worker.

    units: the part's own, in order. seeder: of the whole stage.
    probing: whether a lane must still be computed twice for comparison. accumulator: of the worker's sums. mesh: as of
    `Parts`.
    """

    part: int
    _spec: StageSpec
    units: tuple[nn.Module, ...]
    _split: SplitCall
    accumulator: LaneAccumulator
    guard: BufferGuard
    watch: ParameterWatch
    _seeder: UnitSeeder
    _autocast: Callable[[], Any]
    mesh: ShardMesh | None
    _probing: Callable[[], bool] | None
    said: LaneSaid | None = None
    """Digests of the lane whose backward pass was the last, if they are to be reported."""
    _flights: dict[int, Lane] = field(default_factory=dict)
    _writes_inputs: bool | None = None
    _shared: RankSums | None = None

    def share(self, sums: RankSums) -> None:
        """Add lanes up together with the other processes of this worker."""
        self._shared = sums

    def will_probe(self) -> bool:
        """Whether the next lane that counts is computed twice."""
        return self._probing is not None and self._probing()

    def probe_next(self) -> None:
        """Compute the next lane that counts twice, as another process does that computes it, too."""
        self._probing = lambda: True

    @property
    def sums(self) -> LaneAccumulator | RankSums:
        return self.accumulator if self._shared is None else self._shared

    @property
    def is_first(self) -> bool:
        return self.part == 0

    @property
    def is_last(self) -> bool:
        return self.part == self._spec.n_parts - 1

    def begin_step(self, step: int) -> None:
        """Begin a step: nothing of another one is in flight."""
        self.guard.begin_step(step)
        self.watch.begin_step()
        self.accumulator.begin_lanes(step)
        self._flights = {}

    def drop(self) -> None:
        """Forget all lanes in flight."""
        for lane in self._flights:
            self.guard.drop_lane(lane)
        self._flights = {}

    # ---- passes

    def forward(self, step: int, number: int, lane: Lane) -> Bundle | tuple[float, float]:
        """The forward pass of lane `number`; its output, or at the last part its loss and its weight.

        Raises: TaskError if the task does something that cannot be split.
        """
        self._flights.pop(number, None)
        fresh = lane.repeats is None and self.sums.is_missing(number)
        if lane.said is not None:
            lane = replace(lane, said=structs.replace(lane.said, took=_digest(lane.inputs)))
        if fresh and self.will_probe():
            self._probing = None
            lane = replace(lane, probe=LaneProbe(f"stage {self._spec.stage}", step, number, lane.inputs))
        lane = self._pass(step, number, lane)
        if lane.probe is not None:
            lane.probe.forward(self.units, lane)
        if lane.said is not None:
            lane = replace(lane, said=structs.replace(lane.said, made=_forward_digest(self.units, lane)))
        if fresh:
            self.sums.capture(number)
            self.guard.end_lane()
        self._flights[number] = lane if lane.keep else replace(lane, entry=None, outputs=None, scaled=None)
        if not lane.keep:
            self.guard.drop_lane(number)
        if lane.scaled is not None:
            return lane.scaled[1:]
        outputs = _required(lane.outputs)
        return Bundle([t.detach() for t in outputs.tensors], outputs.meta)

    def recompute(self, step: int, number: int) -> None:
        """Repeat the forward pass, from the kept input: same seeds, same buffers, same bits."""
        self._flights[number] = self._pass(step, number, self._flights[number])

    def backward(
        self, number: int, back: Bundle | None, scale: float, give: Callable[[Bundle], None] | None = None
    ) -> Bundle | None:
        """The backward pass; returns the gradients of the part's inputs, None at the first part.

        back: from the part behind, None at the last one. scale: of the loss. give: called with the returned gradients
        before the lane's own are added up. A lane that had been added before, and one that is repeated, gives the same
        gradients, and is not counted again.
        """
        lane = self._flights.pop(number)
        fresh, sums = lane.repeats is None and self.sums.is_missing(number), self.sums
        probe = lane.probe if fresh else None
        if probe is not None:
            lane = self._try(probe, number, lane, back, scale)
        if self._shared is None:
            enters = lane.said is None or sums.watches
        else:
            enters = lane.said is None and probe is None
        if fresh and enters:  # otherwise its gradient lies by itself
            sums.enter(number)
        came = "" if lane.said is None else _digest(back)
        self._run_backward(number, lane, back, scale)
        if probe is not None:
            probe.backward(self.units, lane)
        if lane.said is not None and self._shared is not None:
            self._shared.gather()
        self.said = lane.said and structs.replace(lane.said, back=came, gave=_gradient_digest(self.units, lane))
        result = None
        if lane.entry is not None:
            found = iter(lane.entry.found)
            result = gradients([next(found) if wanted else None for wanted in _required(lane.inputs).wants_gradient])
        try:
            if result is not None and give is not None:
                give(result)
        finally:  # a computed gradient counts, whether or not it could be sent
            if fresh:
                sums.add(number)
            else:
                sums.leave_out(number)
        return result

    def _try(self, probe: LaneProbe, number: int, lane: Lane, back: Bundle | None, scale: float) -> Lane:
        """First backward pass of a lane that is computed twice, and its second forward pass, which is returned."""
        if self._shared is None:
            self.accumulator.enter(number)
        self._run_backward(number, lane, None if back is None else _copied(back), scale, looks=True)
        probe.backward(self.units, lane)
        self.sums.dismiss()
        again = self._pass(probe.step, number, replace(lane, inputs=probe.inputs))
        probe.forward(self.units, again)
        return again

    def _run_backward(self, number: int, lane: Lane, back: Bundle | None, scale: float, *, looks: bool = False) -> None:
        """looks: at random numbers that it draws. Raises: ConfigError for those but of a repeated forward pass."""
        self.guard.resume_lane(number)
        self._seeder.resume(number if lane.repeats is None else lane.repeats, self.part, number)
        before = drawn_from() if looks else []
        try:
            if lane.scaled is not None:
                loss = lane.scaled[0]
                derive(self.mesh, loss if scale == 1.0 else loss * scale)
            else:
                found = open_gradients(_required(back))
                pairs = zip(_required(lane.outputs).tensors, found, strict=True)
                roots = [(t, g) for t, g in pairs if g is not None]
                if roots:
                    derive(self.mesh, [t for t, _ in roots], [g for _, g in roots])
            if before and any(now[0] == was[0] and now != was for now, was in zip(drawn_from(), before, strict=True)):
                raise ConfigError(_DRAWS.format(stage=self._spec.stage))
        finally:
            self._seeder.end_lane()
        self.watch.look()

    def _pass(self, step: int, number: int, lane: Lane) -> Lane:
        self.guard.begin_lane_apart()
        self._seeder.begin_lane(step, number if lane.repeats is None else lane.repeats, self.part, number)
        try:
            with self._autocast():
                lane = self._run_forward(lane)
        finally:
            self._seeder.pause()
        self.watch.look()
        self.guard.leave_lane(number)
        return lane

    def _run_forward(self, lane: Lane) -> Lane:
        entry: EntryHolder | None = None
        args: tuple[Any, ...]
        if self.is_first:
            args, kwargs = self._split.call.arguments(self._split.loss, lane.batch)
            watched = [t for t in tensors_in((args, kwargs)) if not t.is_inference()]
        else:
            entry, tree, watched = self._enter(lane)
            args, kwargs = (tree,), {}
        before = [t._version for t in watched]
        if self.is_last:
            raw = self._split.call.result(self._split.loss, lane.batch, lambda: self._through(*args))
            loss, weight = (raw[0], raw[1]) if isinstance(raw, tuple) else (raw, None)
            lane = replace(lane, entry=entry, scaled=measured(loss, weight, lane.share))
        else:
            lane = replace(lane, entry=entry, outputs=self._bundled(self._through(*args, **kwargs)))
        self._note_writes(any(t._version != v for t, v in zip(watched, before, strict=True)), lane)
        return lane

    def _enter(self, lane: Lane) -> tuple[EntryHolder, Any, list[Tensor]]:
        """Beginning of the graph, the inputs there, and the tensors to watch for changes."""
        inputs = _required(lane.inputs)
        tensors = inputs.tensors
        if not lane.keep and self._writes_inputs is not False:
            tensors = [faithful_clone(t) for t in tensors]
        return *EntryHolder.enter(inputs, tensors), tensors

    def _note_writes(self, wrote: bool, lane: Lane) -> None:
        """Note whether the part changes its input: with recomputation, the input must still be there afterwards."""
        if lane.keep:
            return
        if wrote and (self.is_first or self._writes_inputs is False):
            raise TaskError(
                f"part {self.part} of the model changes its input in place, which recompute does not allow: let its "
                "first unit make a new tensor, or set recompute to false"
            )
        self._writes_inputs = bool(self._writes_inputs) or wrote

    # ---- units

    def _through(self, *args: Any, **kwargs: Any) -> Any:
        """The part's output for the output of the part before; at the first part, for the model's own arguments.

        Raises: TaskError naming the unit that raises.
        """
        at = 0
        try:
            x = self.units[0](*args, **kwargs)
            for at in range(1, len(self.units)):
                x = self.units[at](x)
            return x
        except (EverstepError, InvariantViolation):
            raise
        except Exception as error:
            name = f"unit {self._spec.cut[self.part][0] + at} ({type(self.units[at]).__name__})"
            told = f"{name} of stage {self._spec.stage} raised {type(error).__name__}: {error}{where(error)}"
            raise TaskError(told) from error

    def evaluate(self, inputs: Bundle | None, metrics: Loss, batch: Any) -> Any:
        """Pass without backward: the output for the next part, at the last one the result of `metrics`."""
        if self.is_first:
            args, kwargs = self._split.call.arguments(metrics, batch)
            return self._bundled(self._through(*args, **kwargs))
        tree = _required(inputs).tree()
        if self.is_last:
            return self._split.call.result(metrics, batch, lambda: self._through(tree))
        return self._bundled(self._through(tree))

    def _bundled(self, x: Any) -> Bundle:
        """The part's output taken apart. Raises: TaskError naming the last unit if it cannot be handed on."""
        last = self._spec.cut[self.part][1] - 1
        return bundle(x, lambda: f"the output of unit {last} ({type(self.units[-1]).__name__})")


def _forward_digest(units: Sequence[nn.Module], lane: Lane) -> str:
    """Digest of a forward pass's results: output or loss, buffers."""
    named = [(f"buffer {k} {n}", b) for k, unit in enumerate(units) for n, b in unit.named_buffers()]
    named += [(f"extra {k} {n}", packed(n, m)) for k, unit in enumerate(units) for n, m in keepers(unit)]
    named += [(f"output {k}", t) for k, t in enumerate(lane.outputs.tensors if lane.outputs is not None else ())]
    loss = "" if lane.scaled is None else f"{lane.scaled[1].hex()} {lane.scaled[2].hex()}"
    return digest_bytes(f"{named_digest(named)} {loss}".encode())


def _gradient_digest(units: Sequence[nn.Module], lane: Lane) -> str:
    """Digest of a backward pass's gradients."""
    parameters = [(f"grad {k} {n}", p.grad) for k, unit in enumerate(units) for n, p in unit.named_parameters()]
    inputs = [(f"input {k}", t) for k, t in enumerate(lane.entry.found if lane.entry is not None else ())]
    return named_digest([(n, t) for n, t in (*parameters, *inputs) if t is not None])


def _digest(parcel: Bundle | None) -> str:
    """Digest of a pass's input; "" if there is none."""
    if parcel is None:
        return ""
    tensors = named_digest([(str(k), t) for k, t in enumerate(parcel.tensors)])
    return digest_bytes(tensors.encode() + parcel.meta)


def measured(loss: Any, weight: float | Tensor | None, share: float) -> Scaled:
    """A lane's loss, comparable. weight None: `loss` is a mean, of a micro-batch that is `share` of a full one.

    Raises: TaskError if the loss is not a scalar tensor with a graph.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TaskError(f"the loss must be a tensor with one element, got {got}; give its mean, or its sum and weight")
    weighed = share if weight is None else float(weight)
    scaled = loss if weight is not None or share == 1.0 else loss * share
    value = float(scaled.detach())
    if not scaled.requires_grad:
        raise TaskError("the loss has no gradient: does it depend on the model's parameters?")
    return scaled, value, weighed


def _required(parcel: Bundle | None) -> Bundle:
    check(parcel is not None, "only the first part gets nothing, and only the last one hands nothing on")
    return parcel  # type: ignore[return-value]


def _copied(parcel: Bundle) -> Bundle:
    """A copy of the bundle in memory of its own."""
    wants = [t.requires_grad for t in parcel.tensors]
    tensors = [faithful_clone(t).requires_grad_(w) for t, w in zip(parcel.tensors, wants, strict=True)]
    return Bundle(tensors, parcel.meta)
