"""`everstep.state`: values that a loop keeps from step to step, as attributes of one object that `join` carries."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_OBJECTS = "objects"
_VALUES = "values"
_REPLACED = "replaced"
_FILLED = (torch.Tensor, np.ndarray, list, deque, dict, set, torch.nn.Module)


class LoopValues:
    """An object with attributes that is healed and saved: numbers, strings, tensors, arrays, containers of these,
    random generators, and objects with state_dict and load_state_dict, which are loaded in place. An attribute that the
    loop has set to another object gets another object, too: the script may need the first one as it was."""

    __slots__ = ("__dict__", "_first_objects")

    def __init__(self, /, **values: Any) -> None:
        vars(self).update(values)
        self._first_objects = {name: value for name, value in values.items() if isinstance(value, _FILLED)}

    def __repr__(self) -> str:
        return f"everstep.state({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
        """All attributes; for an object with a state of its own, that state."""
        found: dict[str, Any] = {_VALUES: {}, _OBJECTS: {}}
        for name, value in vars(self).items():
            state = _state_of(value)
            found[_VALUES if state is None else _OBJECTS][name] = value if state is None else state
        first = self._first_objects.items()
        replaced = sorted(name for name, value in first if name in vars(self) and vars(self)[name] is not value)
        return {**found, _REPLACED: replaced} if replaced else found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the attributes; present ones that were not saved are removed."""
        values, objects = dict(state[_VALUES]), dict(state[_OBJECTS])
        own, replaced = vars(self), set(state.get(_REPLACED, ()))
        for name in list(own):
            if name not in values and name not in objects:
                del own[name]
        for name, first in self._first_objects.items():
            if name in values or name in objects:
                own[name] = _another(first) if name in replaced else first
        for name, value in values.items():
            if not _refill(own.get(name), value):
                own[name] = copy.deepcopy(value)
                if name in self._first_objects and name not in replaced:
                    self._first_objects[name] = own[name]
        for name, saved in objects.items():
            _load(own[name], saved)


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


def _another(first: Any) -> Any:
    """An object to load into, which is not the first one; None if the saved value itself serves."""
    return copy.deepcopy(first) if isinstance(first, torch.nn.Module) else None


def _refill(value: Any, saved: Any) -> bool:
    """Put a saved value into the present object, because the loop may have other names for it. False if that fails."""
    if type(value) is not type(saved):
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
    if callable(getattr(type(value), "load_state_dict", None)):
        return value.state_dict()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return value.bit_generator.state if isinstance(value, np.random.Generator) else None


def _load(value: Any, saved: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(saved.clone())
    elif isinstance(value, random.Random):
        value.setstate(saved)
    elif isinstance(value, np.random.RandomState):
        value.set_state(saved)
    elif isinstance(value, np.random.Generator):
        generator: Any = value.bit_generator
        generator.__setstate__(saved)
    else:
        value.load_state_dict(saved)
