"""The parts of the state rarely change from step to step: keep the list of tensors, and check that it still holds.

Apart from `state` because it is only about time: collecting a model of 300 parameters takes 20 ms, in which training
stands still; checking takes less than one. If anything has changed, everything is collected again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everstep.exact.attributes import plain
from everstep.exact.image import STRIDES, VALUES, Outline, StateEntry
from everstep.exact.jsonable import encode

Collected = tuple[tuple[StateEntry, ...], list[Tensor], dict[str, Any], Outline]
"""Entries, their tensors, JSON values, and the outline."""


class Recollection:
    """Recollection of one model with optimizer, scheduler and extras: `remember` all, then `recall`."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, scheduler: Any, extras: Mapping[str, Any]
    ) -> None:
        self._model, self._optimizer, self._scheduler, self._extras = model, optimizer, scheduler, extras
        self._found: Collected | None = None
        self._held: list[Any] = []
        self._memory: list[tuple[Tensor, int]] = []

    def remember(self, found: Collected) -> None:
        """Remember a collection made just now."""
        self._found, self._held = None, self._look()
        tensors = [thing for thing in self._held if isinstance(thing, Tensor)]
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        nested = any(not _plain(value) for state in states if isinstance(state, dict) for value in state.values())
        if not nested and all(t.layout is torch.strided for t in tensors):  # otherwise it is not worth the trouble
            self._found, self._memory = found, [(t, t.data_ptr()) for t in tensors]

    def recall(self) -> Collected | None:
        """The remembered collection with present values; None if anything else may have changed."""
        held = self._look()
        if self._found is None or len(held) != len(self._held):
            return None
        if any(a is not b for a, b in zip(held, self._held, strict=True)):
            return None
        if any(tensor.data_ptr() != where for tensor, where in self._memory):
            return None
        entries, tensors, old, outline = self._found
        pulled: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        if self._optimizer is not None:
            members = [group["dict"][0][1] for group in old["groups"]]
            values["groups"] = encode_groups(self._optimizer, members, pulled)
        values |= encode_further(self._optimizer, self._scheduler, self._extras, pulled)
        count = dict(outline.groups).get(VALUES, 0)
        if (old.keys() ^ values.keys()) - {"state", "other", STRIDES} or count != len(pulled):
            return None
        if count:
            first = sum(n for _, n in takewhile(lambda group: group[0] != VALUES, outline.groups))
            for entry, (name, tensor) in zip(entries[first : first + count], pulled.items(), strict=True):
                if entry[:3] != (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)):
                    return None
            tensors = [*tensors[:first], *pulled.values(), *tensors[first + count :]]
        return entries, tensors, {**old, **values}, outline

    def _look(self) -> list[Any]:
        """Every object that the state consists of, with `...` between the objects of different places."""
        held: list[Any] = []
        for module in self._model.modules():
            held += (module, *module._modules.values(), ..., *module._parameters.values(), ...)
            held += module._buffers.values()
        if self._optimizer is not None:
            for key, state in self._optimizer.state.items():
                if not isinstance(key, Tensor):
                    return [object()]  # state not keyed by parameter: never equal again
                held += (state, *state.keys(), ..., *state.values())
            for group in self._optimizer.param_groups:
                held += (..., *group["params"])
        return held


def encode_groups(
    optimizer: Optimizer, members: Sequence[Sequence[str]], pulled: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """The optimizer's groups as JSON. members: names of their parameters. pulled: takes the tensors in them."""
    groups = []
    for k, (group, names) in enumerate(zip(optimizer.param_groups, members, strict=True)):
        scalars = {key: value for key, value in group.items() if key != "params"}
        groups.append({"dict": [["params", names], ["values", encode(scalars, f"groups/{k}", pulled)]]})
    return groups


def encode_further(
    optimizer: Optimizer | None, scheduler: Any, extras: Mapping[str, Any], pulled: dict[str, Tensor]
) -> dict[str, Any]:
    """State beside model and optimizer state as JSON: attributes, scheduler, extras."""
    own = plain(optimizer) if optimizer is not None else {}
    values = {"attributes": encode(own, "attributes", pulled)} if own else {}
    if scheduler is not None:
        values["scheduler"] = encode(scheduler.state_dict(), "scheduler", pulled)
    for key, extra in sorted(extras.items()):
        values[f"extras/{key}"] = encode(extra.state_dict(), f"extras/{key}", pulled)
    return values


def _plain(value: Any) -> bool:
    """Whether a part of an optimizer's state is known by its identity: a tensor, a number, text or None."""
    return value is None or isinstance(value, Tensor | bool | int | float | str)
