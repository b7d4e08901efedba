"""Forward and backward passes of one part of the model, with several lanes in flight.

Between the passes a lane keeps its graph, its buffers (`BufferGuard`) and its place in the seeding; or, with
recomputation, only what went in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from everstep.base.errors import EverstepError, InvariantViolation, TaskError, check
from everstep.exact.accumulate import LaneAccumulator
from everstep.exact.buffers import BufferGuard
from everstep.exact.seeding import UnitSeeder
from everstep.exact.trees import Bundle, bundle, faithful_clone, gradients, open_gradients
from everstep.train.calling import where
from everstep.train.lane_probe import LaneProbe, copied
from everstep.train.model_call import EntryHolder, Loss, ModelCall, tensors_in

Scaled = tuple[Tensor, float, float]
"""(what backward starts from, loss as a sum in units of the weight, weight)."""


@dataclass
class Lane:
    """What a part needs for one lane's forward pass. inputs: of the part before, None at the first one.

    loss, batch: used at the first and at the last part. measure: makes what `loss` returned comparable. keep: hold the
    graph; else only what goes in, and `recompute` comes before `backward`. probe: compute the first lane twice, the
    second time in its backward pass.
    """

    inputs: Bundle | None
    loss: Loss
    batch: Any
    measure: Callable[[Any], Scaled]
    keep: bool = True
    probe: bool = False


@dataclass
class _Flight:
    """A lane between its forward and its backward pass."""

    lane: Lane
    outputs: Bundle | None = None
    entry: EntryHolder | None = None
    scaled: Scaled | None = None
    probe: LaneProbe | None = None

    def on_trial(self, probe: LaneProbe) -> None:
        """It is computed twice."""
        self.probe = probe

    def enter(self, entry: EntryHolder | None) -> None:
        """Its graph begins here; None: with nothing that wants a gradient."""
        self.entry = entry

    def end(self, outputs: Bundle | None = None, scaled: Scaled | None = None) -> None:
        """Its graph ends with what goes to the next part, or with the loss."""
        self.outputs, self.scaled = outputs, scaled

    def forget(self) -> None:
        """Without its graph: it will be computed again."""
        self.outputs = self.entry = self.scaled = None


class PartPass:
    """One part of the model, in one worker."""

    def __init__(
        self,
        part: int,
        n_parts: int,
        units: Sequence[nn.Module],
        last_unit: int,
        call: ModelCall | None,
        accumulator: LaneAccumulator,
        guard: BufferGuard,
        seeder: UnitSeeder,
        autocast: Callable[[], Any],
        where: str = "this part",
    ) -> None:
        """units: the part's own, in order; last_unit: the last one's number. seeder: of the whole stage. where: the
        stage, for errors."""
        self.part = part
        self.is_first, self.is_last = part == 0, part == n_parts - 1
        self.units = tuple(units)
        self.last_unit = last_unit
        self.accumulator = accumulator
        self.guard = guard
        self._call: ModelCall = call  # type: ignore[assignment]  # None where nothing is split
        self._seeder = seeder
        self._autocast = autocast
        self._where = where
        self._probed = False
        self._flights: dict[int, _Flight] = {}
        self._writes_inputs: bool | None = None

    def begin_step(self, step: int) -> None:
        """A step begins: nothing of another one is in flight."""
        self.guard.begin_step(step)
        self._flights = {}

    def drop(self) -> None:
        """Nothing is in flight any more."""
        for lane in self._flights:
            self.guard.drop_lane(lane)
        self._flights = {}

    # ---- passes

    def forward(self, step: int, number: int, lane: Lane) -> Bundle | Scaled:
        """The forward pass of lane `number`; its output, or at the last part the loss.

        Raises: TaskError if the task does what cannot be split.
        """
        flight = _Flight(lane)
        self._flights.pop(number, None)
        fresh = self.accumulator.is_missing(number)
        if lane.probe and fresh and not self._probed:
            self._probed = True
            flight.on_trial(LaneProbe(self._where, step, number, lane.inputs))
        self._pass(step, number, flight)
        if flight.probe is not None:
            flight.probe.forward(self.units, *_outcome(flight))
        if fresh:
            self.accumulator.capture(number)
            self.guard.end_lane()
        result: Bundle | Scaled
        if flight.scaled is not None:
            result = (flight.scaled[0].detach(), *flight.scaled[1:])
        else:
            result = _detached(flight.outputs)
        self._flights[number] = flight
        if not lane.keep:
            flight.forget()
            self.guard.drop_lane(number)
        return result

    def recompute(self, step: int, number: int) -> None:
        """The forward pass once more, from what was kept: same seeds, same buffers, same bits."""
        self._pass(step, number, self._flights[number])

    def backward(
        self, number: int, back: Bundle | None, scale: float, give: Callable[[Bundle], None] | None = None
    ) -> Bundle | None:
        """The backward pass; returns the gradients of what came in, None at the first part.

        back: from the part behind, None at the last one. scale: of the loss. give: called with what is returned before
        the lane's own gradients are added up. A lane that had been added before gives the same gradients, and is not
        counted again.
        """
        flight = self._flights.pop(number)
        fresh = self.accumulator.is_missing(number)
        if fresh and flight.probe is not None:
            flight = self._try(flight.probe, number, flight, back, scale)
        if fresh:
            self.accumulator.enter(number)
        self._backward_of(number, flight, back, scale)
        if fresh and flight.probe is not None:
            flight.probe.compare_backward(self.units, _found(flight))
        result = None if flight.entry is None else gradients(_spread(flight))
        try:
            if result is not None and give is not None:
                give(result)
        finally:  # what was computed counts, whether or not it could be sent
            if fresh:
                self.accumulator.add(number)
            else:
                self.accumulator.dismiss()
        return result

    def _try(self, probe: LaneProbe, number: int, flight: _Flight, back: Bundle | None, scale: float) -> _Flight:
        """The first backward pass of a lane that is computed twice, and its second forward pass; returns that."""
        self.accumulator.enter(number)
        self._backward_of(number, flight, None if back is None else copied(back), scale)
        probe.backward(self.units, _found(flight))
        self.accumulator.dismiss()
        again = _Flight(replace(flight.lane, inputs=probe.inputs), probe=probe)
        self._pass(probe.step, number, again)
        probe.compare_forward(self.units, *_outcome(again))
        return again

    def _backward_of(self, number: int, flight: _Flight, back: Bundle | None, scale: float) -> None:
        self.guard.resume_lane(number)
        self._seeder.resume(number, self.part)
        try:
            self._run_backward(flight, back, scale)
        finally:
            self._seeder.end_lane()

    def _run_backward(self, flight: _Flight, back: Bundle | None, scale: float) -> None:
        if flight.scaled is not None:
            loss = flight.scaled[0]
            torch.autograd.backward(loss if scale == 1.0 else loss * scale)
            return
        check(back is not None and flight.outputs is not None, "a part before the last one needs gradients")
        found = open_gradients(back)  # type: ignore[arg-type]
        roots = [(t, g) for t, g in zip(flight.outputs.tensors, found, strict=True) if g is not None]  # type: ignore[union-attr]
        if roots:
            torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])

    def _pass(self, step: int, number: int, flight: _Flight) -> None:
        self.guard.begin_lane_apart()
        self._seeder.begin_lane(step, number, self.part)
        try:
            with self._autocast():
                self._run_forward(flight)
        finally:
            self._seeder.pause()
        self.guard.leave_lane(number)

    def _run_forward(self, flight: _Flight) -> None:
        lane = flight.lane
        x, used = self._enter(flight)
        before = [t._version for t in used]
        if self.is_last:
            raw = self._call.result(lane.loss, lane.batch, lambda: self.through(x))
            flight.end(scaled=lane.measure(raw))
        else:
            if self.is_first:
                args, kwargs = self._call.arguments(lane.loss, lane.batch)
                used = [t for t in tensors_in((args, kwargs)) if not t.is_inference()]
                before = [t._version for t in used]
            x = self.start(*args, **kwargs) if self.is_first else self.through(x)
            flight.end(outputs=self.bundled(x))
        self._note_writes(any(t._version != v for t, v in zip(used, before, strict=True)), lane)

    def _enter(self, flight: _Flight) -> tuple[Any, list[Tensor]]:
        """The inputs as the beginning of a graph, and the tensors to watch for changes."""
        lane = flight.lane
        if lane.inputs is None:
            flight.enter(None)
            return None, []
        tensors = list(lane.inputs.tensors)
        if not lane.keep and self._writes_inputs is not False:
            tensors = [faithful_clone(t) for t in tensors]
        wanted = lane.inputs.wants_gradient
        entry = EntryHolder([t for t, w in zip(tensors, wanted, strict=True) if w])
        flight.enter(entry)
        entered = iter(entry.enter())
        return lane.inputs.tree([next(entered) if w else t for t, w in zip(tensors, wanted, strict=True)]), tensors

    def _note_writes(self, wrote: bool, lane: Lane) -> None:
        """With recomputation, what goes in must still be there afterwards."""
        if lane.keep:
            return
        if wrote and (self.is_first or self._writes_inputs is False):
            raise TaskError(
                f"part {self.part} of the model changes what goes into it in place; with recompute it must not: "
                "let its first unit make a new tensor, or set recompute to false"
            )
        self._writes_inputs = bool(self._writes_inputs) or wrote

    # ---- units

    def start(self, *args: Any, **kwargs: Any) -> Any:
        """The first part's output for the model's own arguments. Raises: TaskError naming the unit that raises."""
        try:
            x = self.units[0](*args, **kwargs)
        except (EverstepError, InvariantViolation):
            raise
        except Exception as error:
            raise self._named(0, error) from error
        return self._follow(x, 1)

    def through(self, x: Any) -> Any:
        """The part's output for that of the part before. Raises: TaskError naming the unit that raises."""
        return self._follow(x, 0)

    def _follow(self, x: Any, first: int) -> Any:
        at = first
        try:
            for at in range(first, len(self.units)):
                x = self.units[at](x)
        except (EverstepError, InvariantViolation):
            raise
        except Exception as error:
            raise self._named(at, error) from error
        return x

    def _named(self, at: int, error: Exception) -> TaskError:
        """What a unit raised, with its name."""
        number = self.last_unit - len(self.units) + 1 + at
        name = f"unit {number} ({type(self.units[at]).__name__}) of {self._where}"
        return TaskError(f"{name} raised {type(error).__name__}: {error}{where(error)}")

    def bundled(self, x: Any) -> Bundle:
        """The part's output taken apart. Raises: TaskError naming the last unit if it cannot be handed on."""
        return bundle(x, lambda: f"the output of unit {self.last_unit} ({type(self.units[-1]).__name__})")


def measured(loss: Any, weight: float | Tensor | None, share: float) -> Scaled:
    """A lane's loss, comparable. weight None: `loss` is a mean, of a micro-batch that is `share` of a full one.

    Raises: TaskError if the loss is not a scalar tensor with a graph.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TaskError(f"the loss must be a tensor with one element, got {got}; return its mean, or (sum, weight)")
    weighed = share if weight is None else float(weight)
    scaled = loss if weight is not None or share == 1.0 else loss * share
    value = float(scaled.detach())
    if not scaled.requires_grad:
        raise TaskError("the loss has no gradient: does it depend on the model's parameters?")
    return scaled, value, weighed


def _detached(outputs: Bundle | None) -> Bundle:
    check(outputs is not None, "a part before the last one has an output")
    return Bundle([t.detach() for t in outputs.tensors], outputs.meta)  # type: ignore[union-attr]


def _outcome(flight: _Flight) -> tuple[list[Tensor], str]:
    """What a forward pass gave: the output's tensors; at the last part the loss as text."""
    outputs = [] if flight.outputs is None else flight.outputs.tensors
    return outputs, "" if flight.scaled is None else f"{flight.scaled[1].hex()} {flight.scaled[2].hex()}"


def _found(flight: _Flight) -> list[Tensor | None]:
    return [] if flight.entry is None else flight.entry.found


def _spread(flight: _Flight) -> list[Tensor | None]:
    """The gradients found, one for each tensor that came in."""
    check(flight.lane.inputs is not None and flight.entry is not None, "only what came in has gradients")
    found = iter(flight.entry.found)  # type: ignore[union-attr]
    return [next(found) if wanted else None for wanted in flight.lane.inputs.wants_gradient]  # type: ignore[union-attr]
