"""Everything that a user's loop can reach beside the state that `join` carries: a digest of each, by name.

Apart from the rehearsal, which compares two of these, because this only looks. It follows variables of the loop's
frames, closures, globals of the user's own files, attributes, containers and iterators, nearest first, and runs no code
of the user's but `state_dict()`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import random
import sys
import sysconfig
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from everstep.exact.digest import digest_bytes, tensor_digest
from everstep.exact.several import OptimizerSet, SchedulerSet

_MOST_PLACES = 50_000
_MOST_ITEMS = 1_000
_DEEPEST = 12
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, set, frozenset, deque)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
_ITERATORS: tuple[type, ...] = (
    *(type(iter(kind())) for kind in (list, tuple, dict, set, str)),
    *(enumerate, zip, map, filter, reversed, itertools.cycle, itertools.count, itertools.chain, itertools.islice),
    *(itertools.repeat, type(iter(range(0)))),
)
SEED = "seed_sequence"
_FOREIGN_FOLDERS = tuple(
    {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).resolve().parents[1])}
)
_SHOWS = ("torch.profiler", "torch.utils.tensorboard", "logging", "tqdm", "rich", "wandb", "mlflow")
"""Packages whose objects count steps only to show them."""
_WALKED = ("collections", "queue", "types", "dataclasses", "torch.utils.data", "argparse")
"""Modules that are not the user's, whose objects may hold the user's."""
CARRIED_NAMES = "__everstep_carried__"
"""Attribute of a class: names of its objects' attributes that another object, which is given to `join`, carries."""


@dataclass(frozen=True)
class Fact:
    """Fact of one place. owner: the name of the object that it belongs to. hard: it is certainly state. kind:
    optimizer, scheduler, module, generator, object, meter, iterator, tensor, list, value. shape: of a floating point
    tensor, else None. type_name: of the owner."""

    digest: str
    kind: str
    owner: str
    type_name: str
    hard: bool = False
    shape: tuple[int, ...] | None = None


@dataclass
class Carried:
    """Objects given to `join`. objects: by id, with all their parts; shapes: of the model's parameters."""

    model: nn.Module
    objects: dict[int, Any]
    storages: set[int]
    shapes: list[tuple[int, ...]]

    @staticmethod
    def of(model: nn.Module, *others: Any) -> Carried:
        """others: the optimizer, the scheduler and other objects with a state; None where there is none."""
        given = [inner for other in others if other is not None for inner in _with_schedulers(other)]
        objects = {id(thing): thing for thing in (*model.modules(), *given)}
        tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
        for other in others:
            if isinstance(other, nn.Module):
                tensors += [*other.parameters(), *other.buffers()]
                objects |= {id(module): module for module in other.modules()}
            elif isinstance(other, Tensor):
                tensors.append(other)
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        return Carried(model, objects, {storage_of(t) for t in tensors}, [tuple(p.shape) for p in model.parameters()])

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor shares memory with a carried one."""
        return storage_of(tensor) in self.storages


def _with_schedulers(thing: Any) -> Iterator[Any]:
    """The object, and the schedulers, optimizers and groups that it consists of: its state has theirs
    (`SequentialLR`)."""
    yield thing
    if isinstance(thing, Optimizer):
        yield from (thing.param_groups, *thing.param_groups)
    inner = getattr(thing, "_schedulers", ()) if isinstance(thing, LRScheduler) else ()
    if isinstance(thing, SchedulerSet):
        inner = thing.members
    elif isinstance(thing, OptimizerSet):
        inner = thing.members.values()
    for one in inner:
        yield from _with_schedulers(one)


@dataclass(frozen=True)
class _Place:
    """A value under its name. owner: the object with a state of its own whose attribute it is."""

    name: str
    value: Any
    depth: int = 0
    owner: Fact | None = None


def loop_frames(frame: types.FrameType | None) -> list[types.FrameType]:
    """Frames of the user's files among this one and its callers, innermost first."""
    found = []
    while frame is not None:
        if of_user(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found


@functools.cache
def of_user(filename: str | None) -> bool:
    """Whether a source file is neither Everstep's, nor the standard library's, nor of an installed package."""
    if not filename or filename.startswith("<") or "site-packages" in filename or "dist-packages" in filename:
        return False
    whole = os.path.realpath(filename)
    return not any(whole.startswith(f"{folder}/") for folder in _FOREIGN_FOLDERS)


def files_behind(frame: types.FrameType) -> set[str]:
    """Source files of the user's that the code of this frame can call by its names, its own included."""
    found, seen, left = {frame.f_code.co_filename}, set[str](), [frame.f_globals, frame.f_locals]
    while left:
        for value in list(left.pop().values()):
            with contextlib.suppress(Exception):  # what is made when it is looked at, and cannot be
                kind = type(value)
                if issubclass(kind, types.ModuleType):
                    name = object.__getattribute__(value, "__dict__")["__name__"]
                else:
                    name = value.__module__ if issubclass(kind, (type, types.FunctionType)) else kind.__module__
                if name in seen:
                    continue
                seen.add(name)
                names = object.__getattribute__(sys.modules[name], "__dict__")
                file = names.get("__file__")
                if of_user(file) or (file is None and "__path__" in names):  # a folder without a file of its own
                    found |= set() if file is None else {file}
                    left.append(names)
    return found


def variables(frames: Iterable[types.FrameType]) -> Iterator[tuple[str, Any]]:
    """Names that the code of these frames sees, with their values: locals first, then globals."""
    frames = list(frames)
    known: set[str] = set()
    for names in (*(frame.f_locals for frame in frames), *(frame.f_globals for frame in frames)):
        for name, value in list(names.items()):
            if not name.startswith("__") and name not in known:
                known.add(name)
                yield name, value


@dataclass
class Survey:
    """Survey of one moment. `facts` by name; `unseen`: names, with the type, of things that were not looked into."""

    carried: Carried
    ignored: Iterable[Any] = ()
    scopes: Iterable[Any] = ()
    """Objects whose methods are on the frames, so that their attributes are variables of the loop."""
    globals: Iterable[dict[str, Any]] = ()
    """Globals of the frames' files, whose names are among the roots."""
    until_s: float = math.inf
    """Limit in processor time of this thread, which does not depend on how busy the machine is; the rest is not looked
    at."""
    most_bytes: int = 1 << 62
    """Limit of a tensor's size: a larger one is known by its memory and its number of writes."""
    trusting: bool = False
    """Whether values in the `state_dict` of a carried object count as carried; otherwise they are looked at like the
    rest."""
    facts: dict[str, Fact] = field(default_factory=dict)
    unseen: dict[str, str] = field(default_factory=dict)
    _seen: dict[int, Any] = field(default_factory=dict)
    _queue: deque[_Place] = field(default_factory=deque)
    _tensors: list[_Place] = field(default_factory=list)
    _known: set[int] = field(default_factory=set)

    def look(self, roots: Iterable[tuple[str, Any]]) -> None:
        """Find everything that can be reached from these names."""
        self._queue.extend(_Place(name, value) for name, value in roots)
        self._seen.update((id(names), names) for names in self.globals)
        self._model()
        while self._queue and len(self._seen) < _MOST_PLACES and time.thread_time() < self.until_s:
            place = self._queue.popleft()
            if not self._is_ignored(place):
                self._visit(place)
            elif not isinstance(place.value, _SCALARS):
                self._seen[id(place.value)] = place.value
        for place in self._tensors:  # now that tensors of other objects are known
            self._tensor(place)
        if self._queue:
            self.unseen["..."] = f"more than {len(self._seen)} values"

    def _is_ignored(self, place: _Place) -> bool:
        for given in self.ignored:
            if given is place.value and not isinstance(given, str):
                return True
            if isinstance(given, str) and (place.name == given or place.name.startswith((f"{given}.", f"{given}["))):
                return True
        return False

    def _visit(self, place: _Place) -> None:
        value = place.value
        if isinstance(value, (*_SCALARS, np.generic)):
            self._note(place, _digest(value), "value", hard=_is_hard(place.owner))
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        try:
            next(visit for test, visit in _VISITS if test(self, value))(self, place)
        except Exception as error:  # the user's state_dict, a tensor without memory, ...
            self.unseen[place.name] = f"{_type_name(value)} ({type(error).__name__})"

    def _note(self, place: _Place, digest: str, kind: str, *, hard: bool = False, shape: Any = None) -> None:
        owner = place.owner
        if owner is not None:
            kind = owner.kind if kind != "generator" or owner.kind == "iterator" else kind
        name = owner.owner if owner is not None else place.name
        type_name = owner.type_name if owner is not None else _type_name(place.value)
        self.facts.setdefault(place.name, Fact(digest, kind, name, type_name, hard, shape))

    def _push(self, place: _Place, items: Iterable[tuple[str, Any]], owner: Fact | None = None) -> None:
        if place.depth < _DEEPEST:
            self._queue.extend(_Place(place.name + part, value, place.depth + 1, owner) for part, value in items)

    # ---- kinds of values

    def _model(self) -> None:
        """Visit attributes of the model's modules that are neither parameters nor buffers. Plain values among them that
        the loop changes are carried (`exact.settings`), and those that forward passes change belong to their lanes."""
        for name, module in self.carried.model.named_modules():
            path = f"model.{name}" if name else "model"
            owner = Fact("", "module", path, type(module).__name__)
            if users_class(type(module)):
                found = [pair for pair in _attributes(module) if not isinstance(pair[1], _SCALARS)]
                self._push(_Place(path, module), found, owner)

    def _given(self, place: _Place) -> None:
        """Visit an object given to `join`: it defines its own state, but other objects may be attached to it."""
        if users_class(type(place.value)) and not isinstance(place.value, nn.Module | Optimizer):
            found = dict(_defaults(type(place.value))) | dict(_attributes(place.value))
            stated = _stated(place.value) if self.trusting else {}
            self._push(place, [(name, v) for name, v in found.items() if not _is_stated(name, v, stated)])

    def _module_of_user(self, place: _Place) -> None:
        names = vars(place.value).items()
        self._push(place, [(f".{name}", value) for name, value in list(names) if not name.startswith("__")])

    def _class(self, place: _Place) -> None:
        if not users_class(place.value):
            return
        for name, value in list(vars(place.value).items()):
            if not name.startswith("__") and not isinstance(value, property | classmethod | staticmethod):
                self._push(place, [(f".{name}", value)])

    def _function(self, place: _Place) -> None:
        function = place.value
        if not of_user(function.__code__.co_filename):
            return
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        found = [(f".{name}", cell.cell_contents) for name, cell in cells if _filled(cell)]
        found += [(f".{name}", value) for name, value in vars(function).items()]
        found += [(f".default{k}", value) for k, value in enumerate(function.__defaults__ or ())]
        found += [(f".{name}", value) for name, value in (function.__kwdefaults__ or {}).items()]
        self._push(place, found)
        home = Path(function.__code__.co_filename).stem
        names = function.__globals__
        if id(names) not in self._seen:
            self._seen[id(names)] = names
            self._push(_Place(home, names), [(f".{n}", v) for n, v in list(names.items()) if not n.startswith("__")])

    def _bound(self, place: _Place) -> None:
        """Visit a method, or a function with bound arguments."""
        value = place.value
        if isinstance(value, types.MethodType):
            self._push(place, [("", value.__self__), ("", value.__func__)])
        else:
            self._push(place, [(".func", value.func), (".args", value.args), (".keywords", value.keywords)])

    def _tensor(self, place: _Place) -> None:
        tensor = place.value.detach()
        if not self.carried.has(tensor) and storage_of(tensor) not in self._known:
            shape = tuple(tensor.shape) if tensor.is_floating_point() else None
            if time.thread_time() > self.until_s:
                self.unseen[place.name] = f"{_type_name(tensor)} (no time left)"
                return
            try:
                large = tensor.nbytes > self.most_bytes
                digest = f"{storage_of(tensor)} {place.value._version}" if large else tensor_digest(tensor)
                self._note(place, digest, "tensor", hard=_is_hard(place.owner), shape=shape)
            except Exception as error:  # without memory, sparse, ...
                self.unseen[place.name] = f"{_type_name(tensor)} ({type(error).__name__})"

    def _array(self, place: _Place) -> None:
        shape = place.value.shape if place.value.dtype.kind == "f" else None
        self._note(place, _digest(place.value), "tensor", shape=shape)

    def _generator(self, place: _Place) -> None:
        hard = place.owner is None or place.owner.kind != "iterator"
        self._note(place, _digest(generator_state(place.value)), "generator", hard=hard)

    def _stateful(self, place: _Place) -> None:
        """Visit an object with a state of its own: its `state_dict`, and the values among its attributes."""
        value, kind = place.value, kind_of(place.value)
        in_scope = any(value is scope for scope in self.scopes)
        owner: Fact | None = Fact("", kind, place.name, _type_name(value))
        if isinstance(value, nn.Module):
            self._known.update(storage_of(t) for t in (*value.parameters(), *value.buffers()))
        if _has(value, "state_dict"):
            said = _Place(f"{place.name}.state_dict()", None, owner=owner)
            self._note(said, _digest(value.state_dict()), "value", hard=_is_hard(owner))
        elif in_scope:
            owner = None  # `self` of a loop that is a method
        if users_class(type(value)) or kind == "meter":
            self._push(place, _attributes(value), owner)

    def _mapping(self, place: _Place) -> None:
        keys = [key if isinstance(key, _SCALARS) else f"{type(key).__name__} {k}" for k, key in enumerate(place.value)]
        self._note(_Place(f"{place.name}[...]", place.value), _digest(sorted(map(repr, keys))), "list")
        items = zip(keys, list(place.value.values()), strict=True)
        self._push(place, ((f"[{key!r}]", v) for key, v in itertools.islice(items, _MOST_ITEMS)), _inside(place))

    def _container(self, place: _Place) -> None:
        value = place.value
        if isinstance(value, set | frozenset):
            self._note(place, _digest(value), "list")
            return
        self._note(_Place(f"{place.name}[...]", value), str(len(value)), "list")
        last = max(0, len(value) - _MOST_ITEMS)
        self._push(place, ((f"[{k}]", value[k]) for k in range(last, len(value))), _inside(place))

    def _iterator(self, place: _Place) -> None:
        value, owner = place.value, place.owner
        if owner is None or owner.kind != "iterator":
            owner = Fact("", "iterator", place.name, _type_name(value))
        if isinstance(value, types.GeneratorType):
            frame, source = value.gi_frame, value.gi_code.co_filename
            if not of_user(source) and "torch/utils/data" not in source:
                return
            at: Any = -1 if frame is None else frame.f_lasti
            parts = {} if frame is None else frame.f_locals
        elif type(value).__module__.startswith("torch.utils.data"):
            at, parts = value._num_yielded, {"_sampler_iter": value._sampler_iter}
        else:
            found = value.__reduce__()
            at = [v for v in found[2:] if isinstance(v, _SCALARS)]
            parts = {f"part{k}": v for k, v in enumerate(found[1])}
        self._note(_Place(place.name, value, owner=owner), _digest(at), "iterator")
        self._push(place, [(f".{name}", v) for name, v in parts.items()], owner)

    def _object(self, place: _Place) -> None:
        kept = getattr(type(place.value), CARRIED_NAMES, ()) if self.trusting else ()
        self._push(place, [(name, value) for name, value in _attributes(place.value) if name[1:] not in kept])
        self._push(place, [("", type(place.value))])

    def _foreign(self, place: _Place) -> None:
        if not isinstance(place.value, types.BuiltinFunctionType | types.ModuleType) and not _ours(type(place.value)):
            self.unseen[place.name] = _type_name(place.value)


def _inside(place: _Place) -> Fact | None:
    """Owner of a container's elements: everything in an iterator tells its position."""
    return place.owner if place.owner is not None and place.owner.kind == "iterator" else None


def _is_hard(owner: Fact | None) -> bool:
    """Whether a direct part of this owner is certainly state."""
    return owner is not None and owner.kind not in ("meter", "iterator")


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def storage_of(tensor: Tensor) -> int:
    """Number that is equal for tensors which share memory."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _type_name(value: Any) -> str:
    return type(value).__name__


def _has(value: Any, method: str) -> bool:
    """Whether the class has such a method; instances are not asked, because they may answer to any name."""
    return callable(getattr(type(value), method, None))


def _ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "everstep"


def users_class(kind: type) -> bool:
    """Whether a class is the user's."""
    module = sys.modules.get(kind.__module__)
    return of_user(getattr(module, "__file__", None)) or kind.__module__ in ("__main__", "<run_path>")


def kind_of(value: Any) -> str:
    """Kind of an object with a state of its own, "" if it has none."""
    if _has(value, "update") and _has(value, "reset") and not _has(value, "step"):
        return "meter"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, LRScheduler):
        return "scheduler"
    if isinstance(value, nn.Module):
        return "module"
    return "object" if _has(value, "state_dict") or _has(value, "step") else ""


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Attributes as (name with a dot, value); for a module without those of its `state_dict` and its children."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if isinstance(name, str) and hasattr(value, name):
                found.setdefault(name, getattr(value, name))
    if isinstance(value, nn.Module):
        of_module = vars(nn.Module())
        found = {name: v for name, v in found.items() if name not in of_module and not name.startswith("_forward_")}
    return [(f".{name}", v) for name, v in found.items()]


def _defaults(kind: type) -> list[tuple[str, Any]]:
    """Values that objects of this class have until they set them themselves."""
    found: dict[str, Any] = {}
    for parent in kind.__mro__:
        if users_class(parent):
            values = {f".{n}": v for n, v in vars(parent).items() if not n.startswith("__")}
            found = {n: v for n, v in values.items() if not callable(v) and not hasattr(type(v), "__get__")} | found
    return list(found.items())


def _stated(value: Any) -> dict[str, Any]:
    """Content of an object's `state_dict`, inner containers too, by key."""
    found: dict[str, Any] = {}
    layer = [("", value.state_dict())] if _has(value, "state_dict") else []
    while layer and len(found) < _MOST_ITEMS:
        name, inner = layer.pop()
        found[name.lstrip("_") or f"{len(found)}"] = inner
        if isinstance(inner, Mapping):
            layer += [(str(key), v) for key, v in inner.items()]
        elif isinstance(inner, list | tuple):
            layer += [(f"{name}[{k}]", v) for k, v in enumerate(inner[:_MOST_ITEMS])]
    return found


def _is_stated(name: str, value: Any, stated: Mapping[str, Any]) -> bool:
    """Whether an attribute is in its object's state, under its name or another."""
    plain = isinstance(value, _SCALARS)
    return name.lstrip("._") in stated or any(
        type(v) is type(value) and v == value if plain else v is value for v in stated.values()
    )


def generator_state(value: Any) -> Any:
    """State of a random generator of Python's, numpy's or torch's; of numpy's new ones with that of their seeds."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    generator = value if isinstance(value, np.random.BitGenerator) else value.bit_generator
    seed = getattr(generator, "seed_seq", None) if int(np.__version__.split(".")[0]) > 1 else None  # numpy 1 sets none
    return {**generator.state, **({SEED: seed.state} if isinstance(seed, np.random.SeedSequence) else {})}


def _digest(value: Any) -> str:
    """Digest of plain values, tensors, arrays and containers of them; for anything else only of its type."""
    return digest_bytes(json.dumps(_picture(value, 0), sort_keys=True).encode())


def _picture(value: Any, depth: int) -> Any:
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return [kind, tensor_digest(value)]
    if isinstance(value, np.ndarray):
        return [kind, str(value.dtype), list(value.shape), digest_bytes(np.ascontiguousarray(value).tobytes())]
    if isinstance(value, (*_SCALARS, np.generic)):
        return [kind, repr(value)]
    if depth > _DEEPEST:
        return kind
    if isinstance(value, Mapping):
        keys = [key if isinstance(key, _SCALARS) else k for k, key in enumerate(value)]
        return [kind, [[repr(k), _picture(v, depth + 1)] for k, v in zip(keys, value.values(), strict=True)]]
    if isinstance(value, set | frozenset):
        return [kind, sorted(json.dumps(_picture(v, depth + 1)) for v in value)]
    return [kind, [_picture(v, depth + 1) for v in value]] if isinstance(value, _CONTAINERS) else kind


def _of_modules(kind: type, names: tuple[str, ...]) -> bool:
    return any(kind.__module__ == name or kind.__module__.startswith(f"{name}.") for name in names)


_Test = Callable[[Survey, Any], bool]
_Visit = Callable[[Survey, _Place], None]
_VISITS: list[tuple[_Test, _Visit]] = [
    (lambda s, v: id(v) in s.carried.objects, Survey._given),
    (lambda s, v: isinstance(v, types.ModuleType) and of_user(getattr(v, "__file__", None)), Survey._module_of_user),
    (lambda s, v: isinstance(v, type), Survey._class),
    (lambda s, v: isinstance(v, types.FunctionType), Survey._function),
    (lambda s, v: isinstance(v, types.MethodType | functools.partial), Survey._bound),
    (lambda s, v: isinstance(v, Tensor), lambda s, place: s._tensors.append(place)),
    (lambda s, v: isinstance(v, np.ndarray), Survey._array),
    (lambda s, v: isinstance(v, GENERATORS), Survey._generator),
    (lambda s, v: _ours(type(v)) or _of_modules(type(v), _SHOWS), Survey._foreign),
    (lambda s, v: kind_of(v) != "", Survey._stateful),
    (lambda s, v: isinstance(v, dict | types.MappingProxyType), Survey._mapping),
    (lambda s, v: isinstance(v, _CONTAINERS), Survey._container),
    (lambda s, v: isinstance(v, (types.GeneratorType, _BaseDataLoaderIter, *_ITERATORS)), Survey._iterator),
    (lambda s, v: users_class(type(v)) or _of_modules(type(v), _WALKED), Survey._object),
    (lambda s, v: True, Survey._foreign),
]
