"""Hyperparameters of an optimizer's groups, by what they hold: a loop may change a learning rate in place (a tensor),
or set one that is no plain number (numpy's).

Apart from `settings` because this knows values alone: how two moments of one are compared, told and put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, dtype

from everstep.exact.jsonable import decode, encode

SCALARS = frozenset({bool, int, float, str, bytes, type(None), dtype})
_NAMES = frozenset({"params", "param_names"})


class HeldValue(NamedTuple):
    """A value that may change in place, as JSON text."""

    text: str


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a group at this moment; == compares them. Raises: ConfigError for one that no state takes."""
    return {k: v if type(v) in SCALARS else _held(k, v) for k, v in group.items() if k not in _NAMES}


def _held(key: str, value: Any) -> Any:
    if type(value) is tuple and SCALARS.issuperset(map(type, value)):
        return value
    return HeldValue(msgspec.json.encode(encode(value, key, None)).decode())


def told_value(key: str, value: Any) -> Any:
    """A value from `hyperparameters` as JSON."""
    return msgspec.json.decode(value.text) if type(value) is HeldValue else encode(value, key, None)


def put_value(group: dict[str, Any], key: str, told: Any) -> None:
    """Set a value of a group to one from `told_value`. Raises: CheckpointCorrupt for another form."""
    group[key] = _in_place(group[key], decode(told, {}))


def _in_place(present: Any, value: Any) -> Any:
    """The value, in the tensors that are there: schedulers and the script hold on to them."""
    if isinstance(value, Tensor) and isinstance(present, Tensor):
        if (present.shape, present.dtype) != (value.shape, value.dtype):
            return value.to(present.device)
        with torch.no_grad():
            return present.copy_(value)
    if type(value) in (list, tuple) and type(present) is type(value) and len(present) == len(value):
        return type(value)(map(_in_place, present, value))
    return value
