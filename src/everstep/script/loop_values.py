"""`everstep.state`: values that a loop keeps from step to step, as attributes of one object that `join` carries."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_leaves_with_path

from everstep.base.errors import ConfigError
from everstep.exact.jsonable import TypedValues, Undigested
from everstep.script.reachable import SEED, generator_state, storage_of

_OBJECTS = "objects"
_VALUES = "values"
_HELD = "held"
_FILLED = (torch.Tensor, np.ndarray, list, deque, dict, set)
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


class LoopValues:
    """An object with attributes that is healed and saved: numbers, strings, tensors, arrays, containers of these,
    random generators, and objects with state_dict and load_state_dict, which are loaded in place. An attribute that the
    loop has set to another object gets another object, too: the script may need the first one as it was."""

    __slots__ = ("__dict__", "__weakref__", "_first_objects")

    def __init__(self, /, **values: Any) -> None:
        self.__setstate__(values)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)
        self._first_objects = {name: v for name, v in values.items() if isinstance(v, _FILLED) or has_state(v)}

    def __repr__(self) -> str:
        return f"everstep.state({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
        """All attributes; for an object with a state of its own, that state. And which objects they are, which digests
        leave out: a first object may come back out of a list, where a resumed worker has only its copy."""
        found: dict[str, Any] = {_VALUES: TypedValues(), _OBJECTS: {}}
        for name, value in vars(self).items():
            if has_state(value):
                found[_OBJECTS][name] = _state_of(value)
            else:
                found[_VALUES][name] = value
        held = self._exchanged()
        return {**found, _HELD: Undigested(held)} if held else found

    def _exchanged(self) -> dict[str, Any]:
        """For each attribute that has not its first object: whose first object it has, as text; or, in a list, the
        first attribute that has the same object, which is nobody's first one."""
        found: dict[str, Any] = {}
        others: dict[int, str] = {}
        for name, value in sorted(vars(self).items()):
            if self._first_objects.get(name) is value or not (isinstance(value, _FILLED) or has_state(value)):
                continue
            owner = next((other for other, first in self._first_objects.items() if first is value), None)
            same = others.setdefault(id(value), name) if owner is None else name
            if owner is not None or same != name or name in self._first_objects:
                found[name] = owner if owner is not None else [same]
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the attributes; present ones that were not saved are removed. Raises: ConfigError for the state of an
        object that the loop has made, and that is not here."""
        saved, held = {**state[_VALUES], **state[_OBJECTS]}, state.get(_HELD, {})
        own, present, firsts = vars(self), dict(vars(self)), self._first_objects
        for name in own.keys() - saved.keys():
            del own[name]
        others = []
        for name, value in saved.items():
            owner = held.get(name, name)
            first = firsts.get(owner) if isinstance(owner, str) else None
            if first is None or has_state(first) != (name in state[_OBJECTS]):
                others.append(name)
            elif has_state(first):
                _load(first, value)
                own[name] = first
            elif isinstance(value, _FILLED):
                if not _refill(first, value):
                    new = copy.deepcopy(value)
                    firsts.update({key: new for key, thing in firsts.items() if thing is first})
                own[name] = firsts[owner]
            else:
                others.append(name)
        self._load_others(sorted(others), state, present)

    def _load_others(self, names: list[str], state: dict[str, Any], present: dict[str, Any]) -> None:
        """Restore attributes that have no first object: into the present ones, unless another attribute has these."""
        own, taken = vars(self), {id(first) for first in self._first_objects.values()}
        for name in names:
            same = state.get(_HELD, {}).get(name)
            if isinstance(same, list) and same[0] != name and same[0] in names:
                own[name] = own[same[0]]
                continue
            now = None if id(present.get(name)) in taken else present.get(name)
            if name in state[_OBJECTS]:
                own[name] = now if has_state(now) else _another(name, self._first_objects.get(name))
                _load(own[name], state[_OBJECTS][name])
            else:
                value = state[_VALUES][name]
                own[name] = now if _refill(now, value) else copy.deepcopy(value)
            taken.add(id(own[name]))


def state(**values: Any) -> LoopValues:
    """Values that your loop keeps from step to step: give the result to join as `state=`, and read and write its
    attributes.

    It is saved with every checkpoint, and a worker that is resumed or healed goes on with it.
    """
    return LoopValues(**values)


def held(extras: Mapping[str, Any]) -> list[Any]:
    """All objects that are carried beside the model: those given to `join`, and their contents."""
    found = list(extras.values())
    return [*found, *(v for thing in found if isinstance(thing, LoopValues) for v in vars(thing).values())]


def shared(things: Iterable[Any], model: torch.nn.Module, optimizer: Any) -> str:
    """Objection to a tensor of an everstep.state in memory of the trained model or the optimizer's state, or ""."""
    states = (one.values() for one in optimizer.state.values() if isinstance(one, dict))
    trained = (*model.parameters(), *model.buffers(), *chain.from_iterable(states))
    known = {storage_of(tensor) for tensor in trained if isinstance(tensor, torch.Tensor)}
    values = ((name, v) for thing in things if isinstance(thing, LoopValues) for name, v in vars(thing).items())
    for name, (path, tensor) in ((name, leaf) for name, value in values for leaf in tree_leaves_with_path(value)):
        if isinstance(tensor, torch.Tensor) and storage_of(tensor) in known:
            return f"everstep.state: {name}{keystr(path)} shares memory with what is trained: store a clone (x.clone())"
    return ""


def _another(name: str, first: Any) -> Any:
    """An object to load into, beside the first one if that can be copied. Raises: ConfigError if there is none."""
    if not has_state(first):
        raise ConfigError(
            f"everstep.state: the loop has set {name} to an object with a state, which a resumed worker does not have: "
            f"write everstep.state({name}=...) with such an object, and load the other one's state into it"
        )
    return copy.deepcopy(first) if isinstance(first, torch.nn.Module) else first


def has_state(value: Any) -> bool:
    """Whether a value is carried by its state, which is loaded in place."""
    return isinstance(value, _GENERATORS) or callable(getattr(type(value), "load_state_dict", None))


def _refill(value: Any, saved: Any) -> bool:
    """Put a saved value into the present object, because the loop may have other names for it. False if that fails."""
    if type(value) is not type(saved) or getattr(value, "default_factory", 0) != getattr(saved, "default_factory", 0):
        return False
    if isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (saved.shape, saved.dtype):
        with torch.no_grad():
            value.copy_(saved)
    elif isinstance(value, np.ndarray) and (value.shape, value.dtype) == (saved.shape, saved.dtype):
        value[...] = saved
    elif isinstance(value, list | deque) and getattr(value, "maxlen", None) == getattr(saved, "maxlen", None):
        value.clear()
        value.extend(copy.deepcopy(saved))
    elif isinstance(value, dict | set):
        value.clear()
        value.update(copy.deepcopy(saved))
    else:
        return False
    return True


def _state_of(value: Any) -> Any:
    """State of the value; None if the value is its own state."""
    return generator_state(value) if isinstance(value, _GENERATORS) else value.state_dict()


def _load(value: Any, saved: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(saved.clone())
    elif isinstance(value, random.Random):
        value.setstate(saved)
    elif isinstance(value, np.random.RandomState):
        value.set_state(saved)
    elif isinstance(value, np.random.Generator):
        generator: Any = value.bit_generator
        seed, saved = saved.get(SEED), {key: part for key, part in saved.items() if key != SEED}
        generator.__setstate__(saved)
        if seed is not None and repr(seed) != repr(getattr(generator.seed_seq, "state", None)):
            generator.__setstate__((saved, np.random.SeedSequence(**seed)))  # of numpy 2 on
    else:
        value.load_state_dict(saved)
