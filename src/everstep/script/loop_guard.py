"""Calls that belong to a plain training loop and not to this one: each is refused where it is made, with a remedy.

Apart from `run` because it reaches into torch: while the loop runs, backward passes, uses of the parameters' `.grad`
and the optimizer's `step` ask here first. Otherwise they would do nothing, or spoil a sum of gradients that waits in
`.grad`, or give what depends on the worker.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from everstep.base.errors import Misused
from everstep.exact.accumulate import GRADIENT_SLOT
from everstep.exact.several import before_each_step, optimizers_of, with_inner

_EVERSTEP, _TORCH = f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parent}/"
_REMEDIES = {
    "loss.backward()": "write step.backward(loss) instead, once for every batch; for the gradient of an input alone, "
    "as for adversarial examples, loss.backward(inputs=[x])",
    "loss.backward(inputs=[...]), of trained parameters,": "write step.backward(loss) instead (optimizer=... for some "
    "of them), once for every batch; torch.autograd.grad(loss, parameters) leaves .grad alone, as for a penalty",
    "optimizer.step()": "remove it: the update is made when the step's batches are used up",
    "scheduler.step()": "remove it: a scheduler that join was given is stepped once per update; if it is yours, do not "
    "pass it to join but as state={'scheduler': scheduler}",
    "zero_grad()": "remove it: gradients are cleared automatically",
    "a GradScaler": "remove it, and give join(precision='fp16'), which scales the loss, or precision='bf16', which "
    "needs no scaling",
    "gradient clipping": "remove it, and give join(clip_norm=...) or clip_value: .grad holds no gradient of the global "
    "batch in the loop",
}


def refused(what: str) -> Misused:
    """Error for a call that must not be made in the loop."""
    verb = "used" if what.startswith("a ") else "called"
    return Misused(f"{what} was {verb} in the loop: {_REMEDIES[what]}")


_own_passes: list[bool] = []


@contextlib.contextmanager
def own_pass() -> Iterator[None]:
    """A backward pass of Everstep's own: a mode of torch's, or a class of tensors, may call it from elsewhere."""
    _own_passes.append(True)
    try:
        yield
    finally:
        _own_passes.pop()


def no_gradient() -> Misused:
    """Error for a use of `.grad` where it holds nothing."""
    return Misused(
        ".grad of a trained parameter was used outside the step's batches, where it is None: to clip, give "
        "join(clip_norm=...) or clip_value; to read or change the global batch's gradient, "
        "optimizer.register_step_pre_hook(function)"
    )


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
        except ValueError as error:
            if "Tried to step" not in str(error):  # as OneCycleLR says that it is over
                raise
            raise Misused(f"the scheduler has ended before the job: {error}") from None
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
        self,
        model: nn.Module,
        optimizer: Optimizer,
        updating: Callable[[], bool],
        schedule: OwnSteps,
        use: Callable[[bool], None],
    ) -> None:
        """updating: whether the optimizer is being stepped for the loop. use: told of each use of a trained parameter's
        `.grad` by code that is neither Everstep's nor torch's, and whether None was set to None."""
        self._model = model
        self._optimizer = optimizer
        self._updating = updating
        self._schedule, self._use = schedule, use
        self._trained: frozenset[int] = frozenset()
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> None:
        optimizers = optimizers_of(self._optimizer).values()
        for optimizer in optimizers:
            self._undo.callback(optimizer.register_step_pre_hook(self._before_step).remove)
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        self._trained = frozenset(map(id, [*self._model.parameters(), *(p for group in groups for p in group)]))
        for kind in dict.fromkeys(type(one) for one in with_inner(self._schedule.scheduler)):
            self._undo.callback(before_each_step(kind, self._before_schedule))
        calls = {name: getattr(torch.amp.GradScaler, name) for name in ("scale", "unscale_", "step", "update")}
        for name, call in calls.items():
            self._undo.callback(setattr, torch.amp.GradScaler, name, call)
        guarded = {name: _refusing_if_enabled(name, call) for name, call in calls.items()}
        torch.amp.GradScaler.scale = guarded["scale"]  # type: ignore[method-assign]
        torch.amp.GradScaler.unscale_ = guarded["unscale_"]  # type: ignore[method-assign]
        torch.amp.GradScaler.step = guarded["step"]  # type: ignore[method-assign]
        torch.amp.GradScaler.update = guarded["update"]  # type: ignore[method-assign]
        autograd = vars(torch.autograd)
        self._undo.callback(autograd.update, _engine_run_backward=autograd["_engine_run_backward"])
        autograd["_engine_run_backward"] = self._guarded(autograd["_engine_run_backward"])
        nn.Parameter.grad = self._gradient()  # type: ignore[assignment]
        self._undo.callback(delattr, nn.Parameter, "grad")

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _before_step(self, *_: Any) -> None:
        if not self._updating():
            raise refused("optimizer.step()")

    def _before_schedule(self, scheduler: Any, place: bool) -> None:
        if not (place or self._schedule.under_way) and self._schedule.has(scheduler):
            raise refused("scheduler.step()")

    def _guarded(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Torch's function that runs a backward pass, for `Tensor.backward` and `torch.autograd`'s functions."""

        def guarded(roots: Any, gradients: Any, keeps: Any, creates: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            within = torch._C._current_graph_task_id() != -1  # activation checkpointing of the old kind
            if more.get("accumulate_grad") and not _own_passes and not within:
                if not inputs:
                    raise refused("loss.backward()")
                if not self._trained.isdisjoint(map(id, inputs)):
                    raise refused("loss.backward(inputs=[...]), of trained parameters,")
            return run(roots, gradients, keeps, creates, inputs, *rest, **more)

        return guarded

    def _gradient(self) -> property:
        """`.grad` of parameters, which says who uses it: also a helper in another module, or `getattr`."""

        def read(parameter: nn.Parameter) -> Any:
            self._ask(parameter, sys._getframe(1).f_code, False)
            return GRADIENT_SLOT.__get__(parameter)

        def write(parameter: nn.Parameter, gradient: Any) -> None:
            none = gradient is None and GRADIENT_SLOT.__get__(parameter) is None
            self._ask(parameter, sys._getframe(1).f_code, none)
            GRADIENT_SLOT.__set__(parameter, gradient)

        return property(read, write, GRADIENT_SLOT.__delete__)

    def _ask(self, parameter: nn.Parameter, code: types.CodeType, none: bool) -> None:
        """An optimizer may do anything in its own step, and in hooks before it."""
        file = code.co_filename
        if file.startswith(_EVERSTEP) or id(parameter) not in self._trained or self._updating():
            return
        if code.co_name == "zero_grad":
            raise refused("zero_grad()")
        if file == clip_grad.__file__:
            raise refused("gradient clipping")
        if not file.startswith(_TORCH):
            self._use(none)


def _refusing_if_enabled(name: str, scaling: Callable[..., Any]) -> Callable[..., Any]:
    """A scaler's method that refuses, unless the scaler is switched off or scales a tensor without a gradient."""

    def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = [*args, *kwargs.values()][:1] if name == "scale" else []
        if scaler.is_enabled() and not (scaled and getattr(scaled[0], "requires_grad", True) is False):
            raise refused("a GradScaler")
        return scaling(scaler, *args, **kwargs)

    return call
