"""Optimizers and models on the meta device that do not import torch._dynamo. Importing this module changes torch so, in
this process.

Every optimizer imports it when it is made and when it updates, and every initial value on the meta device, for
functions that do nothing unless something is being compiled; `torch.use_deterministic_algorithms` imports it for a
setting of its compiler. That takes about as long as importing torch itself. Once anything else has imported it, all is
as torch made it.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable
from functools import update_wrapper
from types import FunctionType
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

_DYNAMO = "torch._dynamo"
_STEP_USES = {_DYNAMO, "cast", "Optimizer", "is_grad_enabled", "set_grad_enabled", "defaults", "_dynamo", "graph_break"}
"""Names in the wrapper of torch's steps. One with others does something else, and stays."""


def use_deterministic_algorithms() -> None:
    """torch's function of that name, with warnings only. Its compiler reads the variable when it is imported."""
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(True, warn_only=True)
    else:
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
        torch._C._set_deterministic_algorithms(True, warn_only=True)


def _put_off(asking: FunctionType) -> None:
    """Let a function that is never compiled find what it would ask torch._dynamo for: `torch._compile` keeps that with
    the function that it calls."""
    called = inspect.getclosurevars(asking).nonlocals.get("fn")
    if not isinstance(called, FunctionType):
        return

    def until_loaded(*args: Any, **kwargs: Any) -> Any:
        if _DYNAMO not in sys.modules:
            return called(*args, **kwargs)
        vars(called).pop("__dynamo_disable", None)
        return asking(*args, **kwargs)

    vars(called).setdefault("__dynamo_disable", until_loaded)


def _plain(step: Callable[..., Any], update: Callable[..., Any]) -> Callable[..., Any]:
    """A class's `step`, which torch has wrapped around the update, without the import."""

    def until_loaded(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _DYNAMO in sys.modules:
            return step(self, *args, **kwargs)
        enabled = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(self.defaults["differentiable"])
            return update(self, *args, **kwargs)
        finally:
            torch.set_grad_enabled(enabled)

    return update_wrapper(until_loaded, update)


def _without_dynamo() -> None:
    code = getattr(_disable_dynamo(_without_dynamo), "__code__", None)
    for asking in gc.get_referrers(code) if code is not None else ():
        if isinstance(asking, FunctionType):
            _put_off(asking)
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) and issubclass(kind, Optimizer) else None
        if step is not None and set(step.__code__.co_names) == _STEP_USES:
            kind.step = _plain(step, step.__wrapped__)  # type: ignore[attr-defined]


if _DYNAMO not in sys.modules:
    _without_dynamo()
