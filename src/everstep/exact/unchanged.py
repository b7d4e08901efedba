"""Trained tensors stand still between the beginning of a round of the loop and its batches.

A worker that is resumed or healed enters the loop's body again for a step that is done. Settings that the loop sets
there are put back; tensors are not, so a change of one is refused by name. Writes behind the version counter (`.data`)
are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.base.errors import Uncarried


class StandingTensors:
    """Tensors of a model and its optimizer: `begin`, and, if nothing else has changed them meanwhile, `check`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._own = [table for m in model.modules() for table in (m._parameters, m._buffers) if table]
        self._seen: tuple[list[Any], list[int]] | None = None

    def begin(self) -> None:
        """From here on they stand still."""
        self._seen = self._look()

    def release(self) -> bool:
        """Let the tensors change; returns whether they had to stand still."""
        stood, self._seen = self._seen is not None, None
        return stood

    def check(self) -> None:
        """Check that none has changed. Raises: Uncarried naming one that has changed since `begin`."""
        if self._seen is None:
            return
        before, now = self._seen, self._look()
        alike = before[1] == now[1] and len(before[0]) == len(now[0])
        if not alike or any(a is not b for a, b in zip(before[0], now[0], strict=True)):
            raise Uncarried(
                f"{self._changed(before)} was changed by the loop before the batches of the step; a worker that is "
                "resumed or healed would change it twice: change it after the batches"
            )

    def _look(self) -> tuple[list[Any], list[int]]:
        found = [*chain.from_iterable(one.values() for one in (*self._own, *self._optimizer.state.values()))]
        return found, [t._version for t in found if isinstance(t, torch.Tensor) and not t.is_inference()]

    def _changed(self, before: tuple[list[Any], list[int]]) -> str:
        things, counts = iter(before[0]), iter(before[1])
        for name, thing in self._named():
            was = next(things, None)
            counted = isinstance(was, torch.Tensor) and not was.is_inference()
            if thing is not was or (counted and was is not None and next(counts) != was._version):
                return name
        return "the optimizer's state"

    def _named(self) -> Iterator[tuple[str, Any]]:
        """All tensors by name, in the order of `_look`."""
        names = {id(p): n for n, p in self._model.named_parameters(remove_duplicate=False)}
        for prefix, module in self._model.named_modules():
            path = f"{prefix}." if prefix else ""
            yield from ((f"parameter {path}{name}", p) for name, p in module._parameters.items())
            yield from ((f"buffer {path}{name}", b) for name, b in module._buffers.items())
        for parameter, state in self._optimizer.state.items():
            yield from ((f"the optimizer's {key} of {names.get(id(parameter), '?')}", v) for key, v in state.items())
