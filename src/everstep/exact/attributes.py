"""Attributes of a user's own optimizer beside `state` and `param_groups`: plain values are carried with the state;
anything else that an update changes is refused by name.

Apart from `state` because it closes one hole: a counter in `self.k` that would start over in a worker that was healed
or resumed. Optimizers of torch keep nothing there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everstep.base.errors import ConfigError
from everstep.exact.digest import tensor_digest
from everstep.exact.jsonable import encode
from everstep.exact.several import optimizers_of

_MAX_DEPTH = 8
_OF = "/"
_OF_OTHERS = frozenset({"step", "zero_grad", "_opt_called"})


def plain(optimizer: Optimizer) -> dict[str, Any]:
    """Attributes that can be carried, by name: those that `jsonable.encode` takes, without memory of parameters or
    state."""
    known = _storages(optimizer)
    found: dict[str, Any] = {}
    for name, value in _own(optimizer):
        tensors: dict[str, Tensor] = {}
        try:
            encode(value, name, tensors)
        except ConfigError:
            continue
        if not any(_storage(tensor) in known for tensor in tensors.values()):
            found[name] = value
    return found


def assign(optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    """Set carried attributes. An existing tensor is written in place, because other objects may refer to it."""
    members = list(optimizers_of(optimizer).values())
    for title, value in values.items():
        number, _, name = title.rpartition(_OF)
        optimizer = members[int(number or 0)]
        present = getattr(optimizer, name, None)
        if isinstance(value, Tensor) and isinstance(present, Tensor) and present.shape == value.shape:
            with torch.no_grad():
                present.copy_(value)
        else:
            setattr(optimizer, name, value)


def added(optimizer: Optimizer) -> dict[str, Any]:
    """Public attributes that a script has added to an optimizer of torch's own, by name: they are not carried."""
    members = [member for member in optimizers_of(optimizer).values() if of_torch(member)]
    known = _every_optimizers() | _OF_OTHERS
    return {n: v for member in members for n, v in vars(member).items() if n not in known and not n.startswith("_")}


def looked_up(optimizer: Optimizer) -> str:
    """Name of an attribute by which the optimizer tells some of its parameters from others: one of them, a collection
    of some, or what is kept by parameter or its id; "" if there is none."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def tells(value: Any, depth: int = 2) -> bool:
        if isinstance(value, Mapping):
            by = any(id(key) in known or (type(key) is int and key in known) for key in value)
            return by or (depth > 0 and any(tells(one, depth - 1) for one in value.values()))
        if isinstance(value, list | tuple | set | frozenset):
            own = {one if type(one) is int else id(one) for one in value} & known
            return 0 < len(own) < len(known) or (depth > 0 and any(tells(one, depth - 1) for one in value))
        return id(value) in known and len(known) > 1

    return next((name for name, value in _own(optimizer) if tells(value)), "")


class Watched:
    """The attributes that cannot be carried, before an update; `changed` names those that differ afterwards."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = self._look()

    def changed(self) -> list[str]:
        """Names of changed attributes, sorted."""
        now = self._look()
        return [name for name in sorted(now.keys() | self._before.keys()) if now.get(name) != self._before.get(name)]

    def _look(self) -> dict[str, str]:
        optimizer = self._optimizer
        carried, known = plain(optimizer), _storages(optimizer)
        seen = {id(optimizer), id(optimizer.state), id(optimizer.param_groups), *map(id, optimizer.param_groups)}
        return {
            name: repr(_facts(value, known, seen, _MAX_DEPTH)) for name, value in _own(optimizer) if name not in carried
        }


def _own(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Attributes that the user's own class has added; of the second one of a set "1/name", and so on."""
    for number, member in enumerate(optimizers_of(optimizer).values()):
        for name, value in sorted(vars(member).items()) if not of_torch(member) else ():
            if name not in _every_optimizers() | _OF_OTHERS and not name.endswith("_hooks"):
                yield f"{number}{_OF}{name}" if number else name, value


@cache
def _every_optimizers() -> frozenset[str]:
    """Attributes that each optimizer of torch has. Found when asked for."""
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)))


def of_torch(optimizer: Optimizer) -> bool:
    """Whether it is of a class of torch's own."""
    return type(optimizer).__module__.startswith("torch.optim")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _storages(optimizer: Optimizer) -> set[int]:
    """Storages of the parameters, their gradients, and the state kept for them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return {_storage(tensor) for tensor in (*parameters, *gradients, *kept)}


def _facts(value: Any, known: set[int], seen: set[int], depth: int) -> Any:
    """A comparable form of the value in which every number counts; tensors of the parameters are left out."""
    if isinstance(value, Tensor):
        return None if _storage(value) in known else tensor_digest(value)
    if value is None or isinstance(value, bool | int | float | str | bytes | complex):
        return value
    if id(value) in seen or depth == 0 or callable(value):
        return type(value).__name__
    seen = seen | {id(value)}
    if isinstance(value, Mapping):
        return [(str(key)[:80], _facts(v, known, seen, depth - 1)) for key, v in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [_facts(v, known, seen, depth - 1) for v in value]
    fields = getattr(value, "__dict__", None)
    return repr(value) if fields is None else _facts(fields, known, seen, depth - 1)
