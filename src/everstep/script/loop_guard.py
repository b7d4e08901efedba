"""Calls that belong to a plain training loop and not to this one: each is refused where it is made, with a remedy.

Apart from `run` because it reaches into torch: while the loop runs, `Tensor.backward`, gradient clipping, `zero_grad`
and the optimizer's `step` ask here first. Otherwise they would do nothing, or spoil a sum of gradients that waits in
`.grad`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from everstep.base.errors import Misused
from everstep.exact.several import before_each_step, optimizers_of, with_inner

_CLIPPING = ("_get_total_norm", "clip_grad_value_")
_REMEDIES = {
    "loss.backward()": "write step.backward(loss) instead, once for every batch; for the gradient of an input alone, "
    "as for adversarial examples, loss.backward(inputs=[x])",
    "optimizer.step()": "remove it: the update is made when the step's batches are used up (with a GradScaler: remove "
    "that, and set precision='fp16')",
    "scheduler.step()": "remove it: a scheduler that join was given is stepped once per update; if it is yours, do not "
    "pass it to join but as state={'scheduler': scheduler}",
    "zero_grad()": "remove it: gradients are cleared automatically",
    "a GradScaler": "remove it, and give join(precision='fp16'), which scales the loss, or precision='bf16', which "
    "needs no scaling",
    "gradient clipping": "remove it, and give join(clip_norm=...) or clip_value: .grad holds the gradient of "
    "one lane, not of the batch",
}


def refused(what: str) -> Misused:
    """Error for a call that must not be made in the loop."""
    verb = "used" if what.startswith("a ") else "called"
    return Misused(f"{what} was {verb} in the loop: {_REMEDIES[what]}")


class OwnSteps:
    """Steps of the job's scheduler, if it has one, once per update. under_way: it is stepped for the loop."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.under_way = False
        self._counts: list[Any] | None = None

    def make(self) -> None:
        """Raises: Misused if other code has stepped it, as far as torch counts that."""
        if self.scheduler is None:
            return
        if self._counts not in (None, self._counted()):
            raise refused("scheduler.step()")
        self.under_way = True
        try:
            self.scheduler.step()
        finally:
            self.under_way = False
        self._counts = self._counted()

    def forget(self) -> None:
        """The state is about to be another one."""
        self._counts = None

    def has(self, scheduler: Any) -> bool:
        """Whether it is this one, or a part of it."""
        return any(one is scheduler for one in with_inner(self.scheduler))

    def _counted(self) -> list[Any]:
        return [getattr(one, "_step_count", None) for one in with_inner(self.scheduler)]


class LoopGuard:
    """Guard of one model, its optimizer and its scheduler, while the loop runs."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, updating: Callable[[], bool], schedule: OwnSteps
    ) -> None:
        """updating: whether the optimizer is being stepped for the loop."""
        self._model = model
        self._optimizer = optimizer
        self._updating = updating
        self._schedule = schedule
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> None:
        optimizers = optimizers_of(self._optimizer).values()
        for optimizer in optimizers:
            self._undo.callback(optimizer.register_step_pre_hook(self._before_step).remove)
        for thing in (*optimizers, self._model):
            self._replace(vars(thing), "zero_grad", _refusing_call("zero_grad()"))
        for kind in dict.fromkeys(type(one) for one in with_inner(self._schedule.scheduler)):
            self._undo.callback(before_each_step(kind, self._before_schedule))
        backward: Callable[..., Any] = torch.Tensor.backward

        def guarded(tensor: torch.Tensor, *args: Any, **more: Any) -> None:
            if more.get("inputs") is None:
                raise refused("loss.backward()")
            backward(tensor, *args, **more)

        torch.Tensor.backward = guarded  # type: ignore[method-assign,assignment]
        self._undo.callback(setattr, torch.Tensor, "backward", backward)
        scaling: Callable[..., Any] = torch.amp.GradScaler.scale
        torch.amp.GradScaler.scale = _refusing_if_enabled(scaling)  # type: ignore[method-assign]
        self._undo.callback(setattr, torch.amp.GradScaler, "scale", scaling)
        for names, name in [(vars(clip_grad), one) for one in _CLIPPING] + [(vars(torch.nn.utils), _CLIPPING[1])]:
            if name in names:
                self._replace(names, name, self._clipping(names[name]))

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _before_step(self, *_: Any) -> None:
        if not self._updating():
            raise refused("optimizer.step()")

    def _before_schedule(self, scheduler: Any, place: bool) -> None:
        if not (place or self._schedule.under_way) and self._schedule.has(scheduler):
            raise refused("scheduler.step()")

    def _clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        """An optimizer may clip in its own step."""

        def guarded(*args: Any, **more: Any) -> Any:
            if not self._updating():
                raise refused("gradient clipping")
            return clip(*args, **more)

        return guarded

    def _replace(self, names: dict[str, Any], name: str, value: Any) -> None:
        missing = object()
        before = names.get(name, missing)
        names[name] = value
        self._undo.callback(lambda: names.pop(name) if before is missing else names.update({name: before}))


def _refusing_call(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise refused(what)

    return refuse


def _refusing_if_enabled(scaling: Callable[..., Any]) -> Callable[..., Any]:
    def scale(scaler: Any, outputs: Any) -> Any:
        if scaler.is_enabled() and getattr(outputs, "requires_grad", True):
            raise refused("a GradScaler")
        return scaling(scaler, outputs)

    return scale
