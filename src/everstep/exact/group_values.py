"""Hyperparameters of an optimizer's groups, by what they hold: a loop may change a learning rate in place (a tensor),
or set one that is no plain number (numpy's).

Apart from `settings` because this knows values alone: how two moments of one are compared, told and put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, dtype

from everstep.exact.jsonable import encode

SCALARS = frozenset({bool, int, float, str, bytes, type(None), dtype})
_NAMES = frozenset({"params", "param_names"})
_MOST = 64
"""Elements, or items, of a hyperparameter. What is larger is state of the optimizer alone, and compared as that."""


class HeldValue(NamedTuple):
    """A value that may change in place, as JSON text."""

    text: str


def is_fixed(value: Any) -> bool:
    """Whether no part of it can change, so that a remembered value may be compared."""
    return type(value) is tuple and SCALARS.issuperset(map(type, value))


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a group at this moment; == compares them."""
    return {k: v if type(v) in SCALARS else _held(k, v) for k, v in group.items() if k not in _NAMES and _counts(v)}


def _counts(value: Any) -> bool:
    """Whether a value is a hyperparameter: a number or the like, or a few of them."""
    kind = type(value)
    if kind in SCALARS or isinstance(value, np.generic):
        return True
    if isinstance(value, Tensor):
        return value.numel() <= _MOST
    if kind is np.ndarray:
        return value.size <= _MOST and not value.dtype.hasobject
    if is_fixed(value):
        return True
    items = value.values() if kind is dict else value if kind in (list, tuple) else (value,)
    return len(items) <= _MOST and all(type(v) in SCALARS or isinstance(v, np.generic) or _is_number(v) for v in items)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _held(key: str, value: Any) -> Any:
    return value if is_fixed(value) else HeldValue(msgspec.json.encode(encode(value, key, None)).decode())


def told_value(key: str, value: Any) -> Any:
    """A value from `hyperparameters` as JSON."""
    return msgspec.json.decode(value.text) if type(value) is HeldValue else encode(value, key, None)


def put_values(groups: Sequence[dict[str, Any]], told: Sequence[Mapping[str, Any]]) -> None:
    """Set values of each group, in the objects that are there: schedulers and the script hold on to them. Groups that
    share one, as torch lets them share a default, keep it only where they are told the same."""
    for k, group in enumerate(groups):
        for key, value in told[k].items():
            present = group.get(key)
            if type(present) in SCALARS:
                group[key] = value
                continue
            sharing = [n for n, other in enumerate(groups) if n != k and key in other and other[key] is present]
            if all(_same(value, told[n].get(key, present)) for n in sharing):
                group[key] = _in_place(present, value)
            else:
                group[key] = _beside(present, value)


def _tensors(*values: Any) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _same(one: Any, other: Any) -> bool:
    if _tensors(one, other):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and encode(one, "", None) == encode(other, "", None)


def _in_place(present: Any, value: Any) -> Any:
    """The value, in the object that is there if it can take it."""
    if _tensors(present, value) and (present.shape, present.dtype) == (value.shape, value.dtype):
        with torch.no_grad():
            return present.copy_(value)
    if type(present) is type(value) is np.ndarray and (present.shape, present.dtype) == (value.shape, value.dtype):
        present[...] = value
        return present
    if type(present) is type(value) is list:
        present[:] = value
        return present
    if type(present) is type(value) is dict:
        present.clear()
        present.update(value)
        return present
    return _beside(present, value)


def _beside(present: Any, value: Any) -> Any:
    """The value, on the same device if both are tensors."""
    return value.to(present.device) if _tensors(present, value) else value
