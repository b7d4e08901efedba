"""`everstep.state`: values that a loop keeps from step to step, as attributes of one object that `join` carries."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from everstep.base.errors import ConfigError
from everstep.exact.attributes import storage_of
from everstep.exact.jsonable import TiedValues, Undigested
from everstep.script.reachable import SEED, generator_state

_OBJECTS = "objects"
_VALUES = "values"
_HELD = "held"
_FILLED = (torch.Tensor, np.ndarray, list, deque, dict, set)
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


class LoopValues:
    """An object with attributes that is healed and saved: numbers, strings, tensors, arrays, containers of these,
    random generators, and objects with state_dict and load_state_dict, which are loaded in place. An attribute that the
    loop has set to another object gets another object, too: the script may need the first one as it was."""

    __slots__ = ("__dict__", "__weakref__", "_first_objects", "_known", "_versions")

    def __init__(self, /, **values: Any) -> None:
        self.__setstate__(values)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)
        self._known: Callable[[], set[int]] = set
        self._versions: dict[tuple[Any, ...], int] = {}
        self._first_objects = {name: v for name, v in values.items() if isinstance(v, _FILLED) or _has_state(v)}

    def __repr__(self) -> str:
        return f"everstep.state({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
        """All attributes; for an object with a state of its own, that state. And which objects they are, which digests
        leave out: a first object may come back out of a list, where a resumed worker has only its copy."""
        found: dict[str, Any] = {_VALUES: TiedValues(), _OBJECTS: {}}
        for name, value in vars(self).items():
            if _has_state(value):
                found[_OBJECTS][name] = _state_of(value)
            else:
                found[_VALUES][name] = value
        self._refuse_shared()
        held = self._exchanged()
        return {**found, _HELD: Undigested(held)} if held else found

    def begin(self, known: Callable[[], set[int]]) -> None:
        """The state is carried from now on. known: storages of what else is, which it must not share."""
        self._known = known

    def _refuse_shared(self) -> None:
        """Raises: ConfigError naming a tensor in memory of others, or of which another has a part that is written. One
        tensor in two places is restored as that, and a first object that is a tensor in place."""
        firsts = {id(first) for first in self._first_objects.values()}
        found = list(_tensors(vars(self), firsts))
        bound = {storage_of(t) for t in vars(self).values() if id(t) in firsts and isinstance(t, torch.Tensor)}
        known = self._known() - bound if found else ()
        lost = next(((name, "what is trained") for name, tensor in found if storage_of(tensor) in known), None)
        before, self._versions = self._versions, {}
        whole = [
            (storage_of(t), t.storage_offset(), -t.numel(), t.shape, n, t._version)
            for n, t in found
            if t.is_contiguous()
        ]
        for one, other in pairwise(sorted(whole)):
            if one[0] == other[0] and one[1] - one[2] > other[1] and one[1:4] != other[1:4]:
                self._versions[one[:5] + other[:5]] = one[5]
                if before.get(one[:5] + other[:5], one[5]) != one[5]:
                    lost = lost or (one[4], other[4])
        if lost is not None:
            raise ConfigError(
                f"everstep.state: {lost[0]} shares memory with {lost[1]}, and a worker that is resumed or healed would "
                "have a copy: store a clone (tensor.clone(), copy.deepcopy(model.state_dict())), or keep it elsewhere"
            )

    def _exchanged(self) -> dict[str, Any]:
        """For each attribute that has not its first object: whose first object it has, as text; or, in a list, the
        first attribute that has the same object, which is nobody's first one."""
        found: dict[str, Any] = {}
        others: dict[int, str] = {}
        for name, value in sorted(vars(self).items()):
            if self._first_objects.get(name) is value or not (isinstance(value, _FILLED) or _has_state(value)):
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
        copies: dict[int, Any] = {}  # what is here for each saved tensor, by its id: one in several places stays one
        for name, value in sorted(saved.items(), key=lambda pair: not isinstance(pair[1], torch.Tensor)):
            owner = held.get(name, name)
            first = firsts.get(owner) if isinstance(owner, str) else None
            if first is None or _has_state(first) != (name in state[_OBJECTS]):
                others.append(name)
            elif _has_state(first):
                _load(first, value)
                own[name] = first
            elif isinstance(value, _FILLED):
                if _refill(first, value, copies):
                    copies.setdefault(id(value), first)
                else:
                    new = copy.deepcopy(value, copies)
                    firsts.update({key: new for key, thing in firsts.items() if thing is first})
                own[name] = firsts[owner]
            else:
                others.append(name)
        self._load_others(sorted(others), state, present, copies)

    def _load_others(
        self, names: list[str], state: dict[str, Any], present: dict[str, Any], copies: dict[int, Any]
    ) -> None:
        """Restore attributes that have no first object: into the present ones, unless another attribute has these."""
        own, taken = vars(self), {id(first) for first in self._first_objects.values()}
        for name in names:
            same = state.get(_HELD, {}).get(name)
            if isinstance(same, list) and same[0] != name and same[0] in names:
                own[name] = own[same[0]]
                continue
            now = None if id(present.get(name)) in taken else present.get(name)
            if name in state[_OBJECTS]:
                own[name] = now if _has_state(now) else _another(name, self._first_objects.get(name))
                _load(own[name], state[_OBJECTS][name])
            else:
                own[name] = _put(now, state[_VALUES][name], copies)
            taken.add(id(own[name]))


def state(**values: Any) -> LoopValues:
    """Values that your loop keeps from step to step: give the result to join as `state=`, and read and write its
    attributes.

    It is saved with every checkpoint, and a worker that is resumed or healed goes on with it.
    """
    return LoopValues(**values)


def held(extras: Mapping[str, Any]) -> list[Any]:
    """All objects that are carried beside the model: those given to `join`, and their contents."""
    return [*extras.values(), *inner(extras).values()]


def inner(extras: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of the everstep.state objects among these, by name."""
    states = {name: vars(thing) for name, thing in extras.items() if isinstance(thing, LoopValues)}
    return {f"{name}.{key}": value for name, values in states.items() for key, value in values.items()}


def _tensors(values: Mapping[Any, Any], firsts: Set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in these values, by name, and parameters of modules that are none of the first objects."""
    layer = [(str(name), value) for name, value in values.items()]
    while layer:
        name, value = layer.pop()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_inference():
            yield name, value
        elif isinstance(value, torch.nn.Module) and id(value) not in firsts:
            layer += [(f"{name}.{key}", inner) for key, inner in value.named_parameters()]
        elif isinstance(value, dict):
            layer += [(f"{name}[{key!r}]", inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple | deque):
            layer += [(f"{name}[{k}]", inner) for k, inner in enumerate(value)]


def _another(name: str, first: Any) -> Any:
    """An object to load into, beside the first one if that can be copied. Raises: ConfigError if there is none."""
    if not _has_state(first):
        raise ConfigError(
            f"everstep.state: the loop has set {name} to an object with a state, which a resumed worker does not have: "
            f"write everstep.state({name}=...) with such an object, and load the other one's state into it"
        )
    return copy.deepcopy(first) if isinstance(first, torch.nn.Module) else first


def _has_state(value: Any) -> bool:
    return isinstance(value, _GENERATORS) or callable(getattr(type(value), "load_state_dict", None))


def _put(value: Any, saved: Any, copies: dict[int, Any]) -> Any:
    """The saved value, in the present object if that can take it. copies: of saved objects, as for `deepcopy`."""
    if id(saved) not in copies and _refill(value, saved, copies):
        copies[id(saved)] = value
    return copy.deepcopy(saved, copies)


def _refill(value: Any, saved: Any, copies: dict[int, Any]) -> bool:
    """Put a saved value into the present object, because the loop may have other names for it. False if that fails."""
    if isinstance(value, torch.Tensor) and isinstance(saved, torch.Tensor):  # a parameter is saved as a tensor
        if (value.shape, value.dtype) != (saved.shape, saved.dtype):
            return False
        with torch.no_grad():
            value.copy_(saved)
        return True
    same = getattr(value, "default_factory", None) is getattr(saved, "default_factory", None)
    if type(value) is not type(saved) or not same:
        return False
    if isinstance(value, np.ndarray) and (value.shape, value.dtype) == (saved.shape, saved.dtype):
        value[...] = saved
    elif isinstance(value, list | deque) and getattr(value, "maxlen", None) == getattr(saved, "maxlen", None):
        value.clear()
        value.extend(copy.deepcopy(saved, copies))
    elif isinstance(value, dict | set):
        value.clear()
        value.update(copy.deepcopy(saved, copies))
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
        _load_numpy(value.bit_generator, dict(saved))
    else:
        value.load_state_dict(saved)


def _load_numpy(generator: Any, saved: dict[str, Any]) -> None:
    seed = saved.pop(SEED, None)
    generator.__setstate__(saved)
    if seed is not None and repr(seed) != repr(getattr(generator.seed_seq, "state", None)):
        try:
            generator.__setstate__((saved, np.random.SeedSequence(**seed)))
        except TypeError:
            raise ConfigError(
                "everstep.state: a numpy generator whose spawn() is called is restored by numpy 2 and later: update "
                "numpy, or spawn before the loop"
            ) from None
