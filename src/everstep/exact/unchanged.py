"""Trained tensors that a loop changes beside the updates: before the batches of a round, where that is refused, and
after them, where it has to be told.

A worker that is resumed or healed enters the loop's body again for a step that is done. Settings that the loop sets
before the batches are put back; tensors are not, so a change of one is refused by name. After the batches a loop may
change tensors (it clips weights, say). A worker that follows others does not run their loop: it is given what that has
changed. Writes behind the version counter (`.data.mul_`) are looked for in parameters, up to 256 MiB of them, in rounds
1, 2, 4, 8 and so on, and while others follow. They are the loop's if its code may make such, or if they are seen twice:
a bit that flips in damaged memory looks the same, and must not be told to others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.base.errors import ProtocolError, Uncarried
from everstep.exact.digest import tensor_digest

_MOST_BYTES = 256 << 20
_Looked = tuple[list[Any], list[tuple[int, int]]]
"""Things, and the marks of the tensors among them."""
_PARAMETER, BUFFER = "parameter ", "buffer "


class UnchangedTensors:
    """Tensors of a model and its optimizer: `begin`, and, if nothing else has changed them meanwhile, `check`.
    `updated` after each update, then `moved`, for what the loop has changed since."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, hides: bool = False) -> None:
        """hides: the loop's code may write behind the version counter."""
        self._least = 1 if hides else 2
        self._model, self._optimizer = model, optimizer
        self._own = [table for m in model.modules() for table in (m._parameters, m._buffers) if table]
        self._seen: _Looked | None = None
        self._updated: _Looked | None = None
        self._bits: dict[int, str] = {}
        self._rounds, self._hidden = 0, set[int]()

    def updated(self, *, followed: bool = False) -> None:
        """An update has been made, or another state been loaded: from here on the loop changes tensors. followed: by
        others, who are given what it changes."""
        self.put_back()
        self._rounds += 1
        thorough = len(self._hidden) >= self._least or not self._rounds & (self._rounds - 1)
        thorough |= followed and self._least == 1
        self._bits = {id(p): tensor_digest(p.detach()) for p in self._looked_into()} if thorough else {}

    def put_back(self) -> None:
        """Tensors have been written, and have the values again that they had at `updated`."""
        self._updated = self._look()

    def moved(self, *, midway: bool = False) -> dict[str, torch.Tensor]:
        """Tensors that have been changed since `updated`, by name. midway: also those that the loop may put back."""
        if self._updated is None or (not self._bits and _alike(self._updated, self._look())):
            return {}
        things, counts = iter(self._updated[0]), iter(self._updated[1])
        found = dict[str, torch.Tensor]()
        for name, thing in self._named():
            was = next(things, None)
            alike = thing is was
            if isinstance(was, torch.Tensor) and not was.is_inference():
                alike &= next(counts) == _mark(was)
            if alike and id(thing) in self._bits and tensor_digest(thing.detach()) != self._bits[id(thing)]:
                self._hidden |= set() if midway else {self._rounds}
                alike = len(self._hidden) < self._least and not midway
            if not alike and isinstance(thing, torch.Tensor):
                found[name] = thing
        return found

    @property
    def hides(self) -> bool:
        """Whether the loop may have written parameters since `updated` in a way that `moved` does not find."""
        written = self._updated is not None and self._least == 1
        return written and any(id(p) not in self._bits for p in self._model.parameters())

    def give(self, told: Mapping[str, torch.Tensor]) -> None:
        """Give tensors the values that another worker's loop has given them. Raises: ProtocolError for one that is not
        here."""
        here = {name: thing for name, thing in self._named() if name in told}
        for name, value in told.items():
            tensor = here.get(name)
            if not isinstance(tensor, torch.Tensor) or (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
                raise ProtocolError(f"expected a tensor of this model, got {name[:100]!a}, {value.dtype}")
            with torch.no_grad():
                tensor.copy_(value)

    def begin(self) -> None:
        self._seen = self._look()

    def release(self) -> bool:
        """Let the tensors change; returns whether they had to stand still."""
        stood, self._seen = self._seen is not None, None
        return stood

    def check(self) -> None:
        """Check that none has changed. Raises: Uncarried naming one that has changed since `begin`."""
        if self._seen is None:
            return
        if not _alike(self._seen, self._look()):
            raise Uncarried(
                f"{self._changed(self._seen)} was changed by the loop before the batches of the step; a worker that is "
                "resumed or healed would change it twice: change it after the batches"
            )

    def _looked_into(self) -> Iterator[torch.Tensor]:
        """Parameters, as far as it is cheap to look at their bits."""
        left = _MOST_BYTES
        for parameter in self._model.parameters():
            left -= parameter.numel() * parameter.element_size()
            if left < 0:
                return
            yield parameter

    def _look(self) -> _Looked:
        found = [*chain.from_iterable(one.values() for one in (*self._own, *self._optimizer.state.values()))]
        return found, [_mark(t) for t in found if isinstance(t, torch.Tensor) and not t.is_inference()]

    def _changed(self, before: _Looked) -> str:
        things, counts = iter(before[0]), iter(before[1])
        for name, thing in self._named():
            was = next(things, None)
            counted = isinstance(was, torch.Tensor) and not was.is_inference()
            if thing is not was or (counted and was is not None and next(counts) != _mark(was)):
                return name
        return "the optimizer's state"

    def _named(self) -> Iterator[tuple[str, Any]]:
        """All tensors by name, in the order of `_look`."""
        names = {id(p): n for n, p in self._model.named_parameters(remove_duplicate=False)}
        for prefix, module in self._model.named_modules():
            path = f"{prefix}." if prefix else ""
            yield from ((f"{_PARAMETER}{path}{name}", p) for name, p in module._parameters.items())
            yield from ((f"{BUFFER}{path}{name}", b) for name, b in module._buffers.items())
        for parameter, state in self._optimizer.state.items():
            yield from ((f"the optimizer's {key} of {names.get(id(parameter), '?')}", v) for key, v in state.items())


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    """What changes when a tensor is written, or given other memory."""
    return tensor._version, tensor.data_ptr() if tensor.layout is torch.strided else 0


def _alike(before: _Looked, now: _Looked) -> bool:
    same = before[1] == now[1] and len(before[0]) == len(now[0])
    return same and all(a is b for a, b in zip(before[0], now[0], strict=True))
