"""torch._dynamo, imported when something needs it. Importing this module puts a stand-in in its place.

Every optimizer of torch imports torch._dynamo, in `add_param_group` and in `step`, for two functions that do nothing
unless something is being compiled; `torch.use_deterministic_algorithms` imports it for a setting of its compiler. That
takes about as long as importing torch itself, and a job that compiles nothing needs none of it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_LOCK = threading.RLock()
_disabled: list[Callable[..., Any]] = []


class _Unloaded(ModuleType):
    """The module before it is executed. It is executed, in place, when it is asked for any other name."""

    def graph_break(self, msg: str = "") -> None:
        """Divide what is being compiled: there is nothing."""

    def disable(self, fn: Callable[..., Any], recursive: bool = True, *, wrapping: bool = True) -> Callable[..., Any]:
        """`fn`, which nothing compiles. torch keeps the answer with the function, until the module is loaded."""
        _disabled.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        with _LOCK:
            if type(self) is _Unloaded:
                self._load(name)
        return getattr(self, name)

    def _load(self, name: str) -> None:
        spec = self.__spec__
        if spec is None or spec.loader is None or "__path__" in vars(self):
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r} while it is being loaded")
        self.__path__ = spec.submodule_search_locations or []
        try:
            spec.loader.exec_module(self)
        except BaseException:
            del self.__path__
            raise
        self.__class__ = ModuleType  # type: ignore[assignment]
        for fn in _disabled:
            vars(fn).pop("__dynamo_disable", None)


def use_deterministic_algorithms() -> None:
    """torch's function of that name, with warnings only. Its compiler reads the variable when it is imported."""
    if isinstance(sys.modules[_NAME], _Unloaded):
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
        torch._C._set_deterministic_algorithms(True, warn_only=True)
    else:
        torch.use_deterministic_algorithms(True, warn_only=True)


def _put_off() -> None:
    spec = find_spec(_NAME)
    if _NAME not in sys.modules and spec is not None:
        module = module_from_spec(spec)
        del module.__path__  # asked for by each import of a submodule, which loads the module
        module.__class__ = _Unloaded
        sys.modules[_NAME] = torch._dynamo = module


_put_off()
