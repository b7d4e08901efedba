"""What stands in the way of computing a module by shards: each shard has kernels of its own, so a hook of a layer, or a
method put in the place of its class's, would be passed over without a word.

Looked at when the model is cut, and again at each call, for what a loop may have changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from everstep.base.errors import ConfigError
from everstep.exact.seeding import UnitSeeder

_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}
_GLOBAL = {f"_global{name}": f"{words} of all modules" for name, words in _HOOKS.items()}
_CLOSE, _NOISE = 1e-3, 1e-5
"""Of a tensor's own largest value, and of the largest of all: rounding of other kernels stays far below."""
_REMEDY = "take it away, or set cell.tp=1 and cell.shards=1"
CORRECT = "correct the plan, or set cell.tp=1 and cell.shards=1"
"""What to do where a plan does not fit its model."""


class OwnHook:
    """A hook of ours on a module, which shards do not pass over."""


@dataclass(frozen=True)
class BorderHook(OwnHook):
    """A forward pre-hook of a unit, or with `after` a forward hook: has the hidden state that it takes, or gives, go
    through `act`. That is a tensor, or a tuple that begins with it."""

    act: Callable[[Tensor], Tensor]
    after: bool = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], gave: Any = None) -> Any:
        """What takes the place of the arguments, or of what the unit gives."""
        if not self.after:
            return self._changed(args[0]), *args[1:]
        return self._changed(gave)

    def _changed(self, given: Any) -> Any:
        return (self.act(given[0]), *given[1:]) if isinstance(given, tuple) else self.act(given)


class CutModules:
    """Modules that are computed by shards, as they were when the model was cut."""

    def __init__(self, named: Iterable[tuple[str, nn.Module]], owner: nn.Module, method: str = "") -> None:
        """named: with their names in the model. owner: whose method, "": forward pass, will be computed by shards.

        Raises: ConfigError naming what the shards would pass over.
        """
        modules = list(named)
        self._owner = owner
        self._seen = [(name, module, self._kind(module)) for name, module in modules]
        named_parameters = [(f"{n}.{key}", p) for n, module in modules for key, p in module._parameters.items()]
        self._own = [(name, p) for name, p in named_parameters if p is not None]
        for name, module in modules:
            tensor = next((key for key, value in vars(module).items() if isinstance(value, Tensor)), None)
            own = {"forward", *((method,) if method and module is owner else ())}.intersection(vars(module))
            if own:
                raise _passed_over(name, f"a method {own.pop()} in the place of its class's")
            if tensor is not None:
                raise _passed_over(name, f"a plain tensor, {tensor}, of which no rule says how it is cut,")
            refuse_tensor_hooks(name, module, "_post_accumulate_grad_hooks")
        self.check()

    def check(self) -> None:
        """Raises: ConfigError naming what has changed since, so that shards would pass over it."""
        for kind, words in _GLOBAL.items():
            if (hooks := getattr(torch_module, kind)) and not all(map(_of_torch, hooks.values())):
                raise _passed_over("torch", words)
        for name, module, seen in self._seen:
            refuse_hooks(name, module)
            if self._kind(module) != seen:
                raise ConfigError(
                    f"cell.shards: {name} was changed after the model was cut: expected the class, forward pass, "
                    "modules and parameters that it had; change it in build_model, or set cell.tp=1 and cell.shards=1"
                )
            refuse_tensor_hooks(name, module)
        for name, parameter in self._own:  # narrow copies may stand in their places
            if parameter._backward_hooks:
                raise _passed_over(name, "a hook on its gradient")

    def _kind(self, module: nn.Module) -> tuple[Any, ...]:
        """What makes a module what it is, apart from values. The owner's own forward pass is ours by the second look,
        or calls it."""
        absent = tuple(name for name, parameter in module._parameters.items() if parameter is None)
        forward = None if module is self._owner else vars(module).get("forward")
        return type(module), forward, tuple(module._parameters), absent, tuple(map(id, module._modules.values()))


def refuse_hooks(name: str, module: nn.Module) -> None:
    """Raises: ConfigError naming a hook of a module, unless it is ours, which shards do not pass over."""
    for kind, words in _HOOKS.items():
        if (hooks := vars(module)[kind]) and not all(map(_own, hooks.values())):
            raise _passed_over(name, words)


def compare_with_whole(
    name: str, owner: nn.Module, whole: Callable[[Tensor], Any], sharded: Callable[[Tensor], Any], x: Tensor
) -> None:
    """Compare what a module gives, and the gradients of `x` and of its parameters, with those by shards.

    Raises: ConfigError naming the module if they differ by more than rounding.
    """
    parameters = [p for p in owner.parameters() if p.requires_grad]

    def outcome(act: Callable[[Tensor], Any]) -> list[Tensor | None]:
        with torch.enable_grad():
            given = x.detach().clone().requires_grad_()
            found = act(given)
            y = found[0] if isinstance(found, tuple) else found
            if not y.requires_grad:
                return [y]
            weights = torch.arange(y.numel(), device=y.device).cos().to(y.dtype).view(y.shape)
            return [y.detach(), *torch.autograd.grad(y, [given, *parameters], weights, allow_unused=True)]

    wanted, found = outcome(whole), outcome(sharded)
    sizes = [0.0 if one is None or not one.numel() else float(one.abs().max()) for one in wanted]
    for one, other, size in zip(wanted, found, sizes, strict=True):
        if one is None or other is None:
            same = one is None and other is None
        else:
            same = one.shape == other.shape
            same = same and not bool(((one - other).abs() > _CLOSE * size + _NOISE * max(sizes)).any())
        if not same:
            raise ConfigError(
                f"cell.shards: what {name} ({type(owner).__name__}) gives is another one by shards than as a whole: "
                f"expected a forward pass that the plan's column and row-parallel layers make up; {CORRECT}"
            )


def refuse_tensor_hooks(name: str, module: nn.Module, *more: str) -> None:
    """A hook of a parameter would have a gradient with zeros for the shards of other processes. more: further kinds.

    Raises: ConfigError naming the parameter.
    """
    for key, parameter in module._parameters.items():
        if parameter is not None and any(getattr(parameter, kind) for kind in ("_backward_hooks", *more)):
            raise _passed_over(f"{name}.{key}", "a hook on its gradient")


def _of_torch(hook: Any) -> bool:
    """Whether torch looks on by itself, as when it counts operations."""
    return str(getattr(hook, "__module__", "")).startswith("torch.")


def _own(hook: Any) -> bool:
    seeds = isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), UnitSeeder)
    return seeds or isinstance(hook, OwnHook)


def _passed_over(name: str, what: str) -> ConfigError:
    return ConfigError(f"cell.shards: {name} has {what} which shards would pass over: {_REMEDY}")
