"""What modules and optimizers of `state=` keep beside their `state_dict`: modes, `requires_grad`, and attributes of the
user's own classes that are numbers, where they differ from their values at `join`. Numbers of a module that has made
other attributes since then stay behind: they may be a cache, and its size. All this is in no digest and compared with
nothing, unlike `settings` of the trained model: a count of calls differs between workers, and may."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.exact.attributes import plain
from everstep.script.loop_values import LoopValues
from everstep.script.reachable import users_class

_NUMBERS = (bool, int, float, type(None))  # None is a number that is not there yet
_INTERNAL = frozenset(vars(nn.Module()))


class BesideState:
    """What these objects keep beside their state, by place. model: the trained one; its own modules are left out."""

    __slots__ = ("_extras", "_first", "_others", "_trained")

    def __init__(self, model: nn.Module, extras: Mapping[str, Any]) -> None:
        self._extras, self._trained = dict(extras), {id(module): module for module in model.modules()}
        self._first = {place: _now(part) for place, part in self._parts()}
        self._others = {place: _others(part) for place, part in self._parts()}

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for place, part in self._parts():
            first, others = self._first.get(place, {}), self._others.get(place, {})
            made = any(value is not others.get(key) for key, value in _others(part).items())
            changed = {k: v for k, v in _now(part).items() if repr(v) != repr(first.get(k, ...))}
            if kept := {k: v for k, v in changed.items() if not made or k.startswith(".") or k == "training"}:
                found[place] = kept
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for place, part in self._parts():
            _put(part, self._first.get(place, {}), state.get(place, {}))

    def _parts(self) -> Iterator[tuple[str, nn.Module | Optimizer]]:
        held = {n: vars(t) if isinstance(t, LoopValues) else {"": t} for n, t in self._extras.items()}
        for name, thing in ((f"{n}.{key}", thing) for n, things in held.items() for key, thing in things.items()):
            if isinstance(thing, Optimizer):
                yield name, thing
            for path, module in thing.named_modules() if isinstance(thing, nn.Module) else ():
                if id(module) not in self._trained and not isinstance(module, torch.jit.ScriptModule):
                    yield f"{name}/{path}", module


def _now(part: nn.Module | Optimizer) -> dict[str, Any]:
    """Mode, `requires_grad` by parameter (after a dot), and numbers, unless the class says itself what its state is."""
    kind: Any = type(part)
    if isinstance(part, Optimizer):
        return _numbers(plain(part)) if kind.state_dict is Optimizer.state_dict else {}
    found = {f".{name}": p.requires_grad for name, p in part._parameters.items() if p is not None}
    stated = (kind.get_extra_state, kind.state_dict) != (nn.Module.get_extra_state, nn.Module.state_dict)
    own = _numbers(vars(part)) if users_class(kind) and not stated else {}
    return {**found, "training": part.training, **own}


def _others(part: nn.Module | Optimizer) -> dict[str, Any]:
    """Attributes of a module that are no numbers or texts."""
    own = vars(part) if isinstance(part, nn.Module) else {}
    return {k: v for k, v in own.items() if k not in _INTERNAL and type(v) not in (*_NUMBERS, str)}


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if type(value) in _NUMBERS and key not in _INTERNAL}


def _put(part: nn.Module | Optimizer, first: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Set these where numbers or nothing are now: no property, method, submodule or tensor is written over."""
    own = vars(part)
    for key in {**_now(part), **first, **saved}:
        value = saved.get(key, first.get(key, getattr(type(part), key, ...)))
        if key.startswith("."):
            if (parameter := own["_parameters"].get(key[1:])) is not None and value is not ...:
                parameter.requires_grad_(value)
        else:
            present = own[key] if key in own else getattr(type(part), key, getattr(part, key, None))
            if type(present) in _NUMBERS and type(value) in _NUMBERS:
                own[key] = value
