"""Values that a dataset and its collate keep or read: a loader process has them as they were when it was forked.

Apart from the loader because this looks into the user's objects and knows nothing of batches.
"""

from __future__ import annotations

import dis
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_DEEP, _WIDE, _MOST = 5, 64, 1000
_MOST_BYTES = 4096
_INSTALLED = ("site-packages", "dist-packages")


class _Same:
    """An object that equals itself alone. It is kept alive, so that no other gets its address."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._thing is other._thing

    __hash__ = None  # type: ignore[assignment]


def kept_values(dataset: Any, collate: Any) -> dict[str, Any]:
    """Values by name: attributes, contents of containers, and globals that the user's code reads. Equal to those of
    another time unless something was assigned or changed meanwhile. Not looked at: contents of large arrays and lists,
    models, modules of Python, slots, and properties."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    layer = [("dataset", dataset), ("collate", collate)]
    for _ in range(_DEEP):
        inner: list[tuple[str, Any]] = []
        for name, thing in layer:
            if len(found) >= _MOST:
                return found
            if isinstance(thing, _SCALARS):
                found[name] = thing
            elif isinstance(thing, types.ModuleType) or id(thing) in seen:
                continue
            else:
                seen.add(id(thing))
                try:
                    found[name], parts = _mark(thing), list(_parts(thing))
                except Exception:  # another thread changes it, or it is an odd object of the user's
                    found[name], parts = (_Same(thing),), []
                inner += [(f"{name}{part}", value) for part, value in parts]
        layer = inner
    return found


def _mark(thing: Any) -> tuple[Any, ...]:
    """What tells this object from another one, and from itself after a change in place."""
    if isinstance(thing, Tensor) and not (thing.requires_grad or thing.is_inference()):
        return _Same(thing), thing._version
    if isinstance(thing, np.ndarray):
        return _Same(thing), thing.tobytes() if thing.nbytes <= _MOST_BYTES and not thing.dtype.hasobject else b""
    if isinstance(thing, list | tuple | dict | set | frozenset | deque):
        return _Same(thing), len(thing)
    return (_Same(thing),)


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict):
        items = islice(dict.items(thing), _WIDE)
        yield from ((f"[{key!r}]" if isinstance(key, _SCALARS) else "[...]", value) for key, value in items)
    elif isinstance(thing, list | tuple | deque):
        yield from ((f"[{k}]", value) for k, value in enumerate(islice(thing, _WIDE)))
    elif isinstance(thing, partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif isinstance(thing, types.FunctionType):
        yield from _read_by(thing)
    elif isinstance(thing, types.MethodType):
        yield from ((".__self__", thing.__self__), (".__func__", thing.__func__))
    elif isinstance(thing, type):
        if thing.__module__ != "builtins":
            yield from ((f".{name}", value) for name, value in list(vars(thing).items())[:_WIDE] if _counts(value))
    elif not isinstance(thing, Tensor | np.ndarray | nn.Module | Optimizer) and not _pythons(type(thing)):
        own = getattr(thing, "__dict__", None)
        if isinstance(own, dict):
            yield from ((f".{name}", own[name]) for name in list(own)[:_WIDE])
        yield from ((f".{kind.__name__}", kind) for kind in type(thing).__mro__[:-1])


def _counts(value: Any) -> bool:
    """Whether an attribute of a class is a value, or the user's code."""
    return isinstance(value, _SCALARS) or (isinstance(value, types.FunctionType) and not _installed(value))


def _pythons(thing: Any) -> bool:
    """Whether a class or function comes with Python."""
    return str(thing.__module__).partition(".")[0] in sys.stdlib_module_names


def _installed(function: types.FunctionType) -> bool:
    return _pythons(function) or any(word in function.__code__.co_filename for word in _INSTALLED)


def _read_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Globals, enclosed variables and defaults that a function of the user's reads."""
    if _installed(function):
        return
    outer: Mapping[str, Any] = function.__globals__
    yield from ((f": {name}", outer[name]) for name in _globals_of(function.__code__) if name in outer)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f": {name}", cell.cell_contents
        except ValueError:  # it is not set yet
            continue
    yield from ((f".default{k}", value) for k, value in enumerate(function.__defaults__ or ()))


@lru_cache(maxsize=4096)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals that a function reads, itself or in functions that it makes."""
    own = [str(one.argval) for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for one in code.co_consts if isinstance(one, types.CodeType) for name in _globals_of(one)]
    return tuple(dict.fromkeys([*own, *inner]))
