"""Values that a dataset and its collate keep or read: a loader process has them as they were when it was forked.

Apart from the loader because this looks into the user's objects and knows nothing of batches.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import mmap
import sys
import types
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import chain, islice
from operator import is_
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_DEEP, _WIDE, _MOST = 5, 64, 1000
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_MOST_BYTES, _MOST_ITEMS = 2 << 20, 1 << 13
"""Looked at in all arrays together, and in all containers; beyond that elements of each are picked."""
_SAMPLE, _SAMPLE_COSTS, _FEW = 512, 1 << 18, 16
"""Elements that are picked, the bytes that could be looked at instead, and elements once there is no room."""
_ALWAYS = 4096
"""Bytes of an array that is looked at in any case."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_INSTALLED = ("site-packages", "dist-packages")


class _Same:
    """An object that equals itself alone. It is kept alive, so that no other gets its address."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._thing is other._thing

    __hash__ = None  # type: ignore[assignment]


class _Items:
    """Items of a container. They equal the same ones, and plain values that are alike."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = tuple(items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Items) or len(self._items) != len(other._items):
            return False
        pairs = zip(self._items, other._items, strict=True)
        return all(map(is_, self._items, other._items)) or all(a is b or _alike(a, b) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]


def _alike(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, _SCALARS) and bool(one == other)


class _Room:
    """Room that is left in one look: bytes of arrays, and items of containers."""

    def __init__(self) -> None:
        self._bytes, self._items = _MOST_BYTES, _MOST_ITEMS

    def elements(self, of: np.ndarray[Any, Any]) -> bytes:
        """Digest of an array, or of a sample of one that is large."""
        step = self.step(of.size, of.nbytes)
        return _digest(of.ravel("K") if step == 1 else of.flat[::step])

    def step(self, size: int, size_bytes: int) -> int:
        """Which elements are looked at: each, or each so many."""
        whole = size_bytes <= max(self._bytes, _ALWAYS)
        picked = size // (_SAMPLE if self._bytes > 0 else _FEW) | 1  # odd: it meets all columns of most tables
        self._bytes -= size_bytes if whole else _SAMPLE_COSTS
        return 1 if whole else picked

    def items(self, of: Any, kind: type) -> _Items:
        """Items of a container, or of a large one a sample, or the first. kind: of container, as Python knows it."""
        whole = len(of) <= self._items
        few = _SAMPLE if self._items > _SAMPLE else _FEW
        self._items -= len(of) if whole else few
        if kind in (list, tuple) and not whole:
            return _Items(kind.__getitem__(of, slice(None, None, len(of) // few | 1)))  # type: ignore[attr-defined]
        each = chain.from_iterable(dict.items(of)) if kind is dict else kind.__iter__(of)  # type: ignore[attr-defined]
        return _Items(each if whole else islice(each, few))


def _digest(elements: np.ndarray[Any, Any]) -> bytes:
    return xxhash.xxh3_128_digest(elements.view(np.uint8).data)


def kept_values(dataset: Any, collate: Any) -> dict[str, Any]:
    """Values by name: attributes, contents of containers, and globals that the user's code reads. Equal to those of
    another time unless something was assigned or changed meanwhile. Not looked at: elements of large arrays and lists
    beyond samples, large ones in shared memory and mapped files, models, modules of Python, slots, and properties."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    room = _Room()
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
                    found[name], parts = _mark(thing, room), list(_parts(thing))
                except Exception:  # another thread changes it, or it is an odd object of the user's
                    found[name], parts = (_Same(thing),), []
                inner += [(f"{name}{part}", value) for part, value in parts]
        layer = inner
    return found


def _mark(thing: Any, room: _Room) -> tuple[Any, ...]:
    """What tells this object from another one, and from itself after a change in place."""
    if isinstance(thing, Tensor) and not (thing.requires_grad or thing.is_inference()):
        return _Same(thing), thing._version, _shared(thing, room)
    if isinstance(thing, np.ndarray):
        return _Same(thing), _written(thing, room)
    if isinstance(thing, bytearray | array):
        return _Same(thing), room.elements(np.frombuffer(thing, np.uint8))
    kind = next((kind for kind in _CONTAINERS if isinstance(thing, kind)), None)
    return (_Same(thing),) if kind is None else (_Same(thing), len(thing), room.items(thing, kind))


def _shared(tensor: Tensor, room: _Room) -> bytes:
    """Elements of a tensor on the CPU: who has an array that shares them can change them behind its version. Copied,
    because torch resizes no tensor that an array has shared."""
    with contextlib.suppress(RuntimeError, TypeError, KeyError):  # sparse, or of an odd kind
        if tensor.device.type == "cpu" and not tensor.is_shared():  # type: ignore[no-untyped-call]
            step = room.step(tensor.numel(), tensor.nbytes)
            found = tensor if step == 1 else tensor.view(-1)[::step]
            return _digest(found.view(_INTEGERS[tensor.element_size()]).clone().numpy().ravel("K"))
    return b""


def _written(thing: np.ndarray[Any, Any], room: _Room) -> Any:
    if thing.dtype == object:
        return room.items(thing.flat[:: thing.size // _MOST_ITEMS | 1].tolist(), list)
    if thing.dtype.hasobject or (thing.nbytes > _ALWAYS and _of_all(thing)):
        return b""
    return room.elements(thing)


def _of_all(thing: np.ndarray[Any, Any]) -> bool:
    """Whether it lies in memory, or a file, that other processes share: loader processes see its changes, and may fill
    it themselves."""
    base: Any = thing
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return isinstance(base, mmap.mmap | memoryview | ctypes.Array)


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
