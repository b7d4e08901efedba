"""What the state consists of changes rarely from step to step: keep the list of tensors, and check that it still holds.

Apart from `state` because it is only about time: collecting a model of 300 parameters anew takes 20 ms, in which
training stands still; checking takes less than one. When anything is not as it was, everything is collected anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everstep.exact.attributes import plain
from everstep.exact.image import VALUES, Outline, StateEntry
from everstep.exact.jsonable import encode

Collected = tuple[tuple[StateEntry, ...], list[Tensor], dict[str, Any], Outline]
"""Entries, the tensors they are of, JSON values, and the outline."""


class Recollection:
    """Of one model with optimizer, scheduler and extras: `remember` a whole collection, then `recall` it."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, scheduler: Any, extras: Mapping[str, Any]
    ) -> None:
        self._model, self._optimizer, self._scheduler, self._extras = model, optimizer, scheduler, extras
        self._found: Collected | None = None
        self._modules: list[tuple[nn.Module, list[Any], list[Any], list[Any]]] = []
        self._states: list[tuple[dict[str, Any], list[tuple[str, Any]]]] = []
        self._groups: list[list[int]] = []
        self._memory: list[tuple[Tensor, int]] = []

    def remember(self, found: Collected) -> None:
        """What was collected just now."""
        self._found = found
        self._modules = [
            (m, list(m._modules.values()), list(m._parameters.values()), list(m._buffers.values()))
            for m in self._model.modules()
        ]
        held_tensors = [p for _, _, params, _ in self._modules for p in params if p is not None]
        if self._optimizer is not None:
            held = self._optimizer.state
            self._states = [(state, list(state.items())) for key, state in held.items() if isinstance(key, Tensor)]
            self._groups = [[id(p) for p in group["params"]] for group in self._optimizer.param_groups]
            if len(self._states) < len(held) or not all(_plain(v) for _, items in self._states for _, v in items):
                self._found = None  # state that is not by parameter, or nested: not worth the trouble
            held_tensors += [v for _, items in self._states for _, v in items if isinstance(v, Tensor)]
        if all(t.layout is torch.strided for t in held_tensors):
            self._memory = [(t, t.data_ptr()) for t in held_tensors]
        else:
            self._found = None

    def recall(self) -> Collected | None:
        """The same with today's values; None if anything else may have changed."""
        if self._found is None or not self._same_model() or not self._same_optimizer():
            return None
        if any(tensor.data_ptr() != where for tensor, where in self._memory):
            return None
        entries, tensors, old, outline = self._found
        pulled: dict[str, Tensor] = {}
        values = dict(old)
        if self._optimizer is not None:
            values["groups"] = self._values_of_groups(old["groups"], pulled)
            if "attributes" in old:
                values["attributes"] = encode(plain(self._optimizer), "attributes", pulled)
        if self._scheduler is not None:
            values["scheduler"] = encode(self._scheduler.state_dict(), "scheduler", pulled)
        for key, extra in sorted(self._extras.items()):
            values[f"extras/{key}"] = encode(extra.state_dict(), f"extras/{key}", pulled)
        count = dict(outline.groups).get(VALUES, 0)
        if count != len(pulled):
            return None
        if count:
            first = _first_of(VALUES, outline.groups)
            for entry, (name, tensor) in zip(entries[first : first + count], pulled.items(), strict=True):
                kind = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                if (entry.name, entry.dtype, entry.shape) != (name, *kind):
                    return None
            tensors = [*tensors[:first], *pulled.values(), *tensors[first + count :]]
        return entries, tensors, values, outline

    def _same_model(self) -> bool:
        return all(
            _same(m._modules, modules) and _same(m._parameters, params) and _same(m._buffers, buffers)
            for m, modules, params, buffers in self._modules
        )

    def _same_optimizer(self) -> bool:
        if self._optimizer is None:
            return True
        held = self._optimizer.state
        if len(held) != len(self._states) or len(self._optimizer.param_groups) != len(self._groups):
            return False
        for state, (then, items) in zip(held.values(), self._states, strict=True):
            if state is not then or len(state) != len(items):
                return False
            for (key, value), (old_key, old_value) in zip(state.items(), items, strict=True):
                if value is not old_value or key != old_key:
                    return False
        return all(
            [id(p) for p in group["params"]] == ids
            for group, ids in zip(self._optimizer.param_groups, self._groups, strict=True)
        )

    def _values_of_groups(self, old: Sequence[Any], pulled: dict[str, Tensor]) -> list[Any]:
        groups = []
        for k, (group, before) in enumerate(zip(self._optimizer.param_groups, old, strict=True)):  # type: ignore[union-attr]
            scalars = {key: value for key, value in group.items() if key != "params"}
            members = before["dict"][0]
            groups.append({"dict": [members, ["values", encode(scalars, f"groups/{k}", pulled)]]})
        return groups


def _same(now: Mapping[str, Any], then: Sequence[Any]) -> bool:
    return len(now) == len(then) and all(a is b for a, b in zip(now.values(), then, strict=True))


def _plain(value: Any) -> bool:
    """Whether a part of an optimizer's state is the same for as long as it is the same object."""
    return value is None or isinstance(value, Tensor | bool | int | float | str)


def _first_of(label: int, groups: Sequence[tuple[int, int]]) -> int:
    """The number of the first entry of a group."""
    first = 0
    for number, count in groups:
        if number == label:
            return first
        first += count
    return first
