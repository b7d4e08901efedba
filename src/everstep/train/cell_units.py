"""A unit's parameters are there while the unit computes: in its forward pass, and again in its backward pass.

For workers that span hosts, which have no other host's parameters for longer. Passes of units are numbered as they
begin. When the gradient of a pass's output is there, autograd is done with all later passes: it takes operations in the
opposite order of that in which they were made. What is left is let go at the end of the lane.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from everstep.train.cell_elsewhere import OtherParts

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class UnitsHere:
    """Has parameters come and go with the passes of the units. Those outside all units are there for whole steps."""

    def __init__(
        self, model: nn.Module, units: Sequence[nn.Module], numbers: Mapping[int, int], elsewhere: OtherParts
    ) -> None:
        """numbers: of parameters, by their addresses."""
        self._elsewhere = elsewhere
        self._calls = count()
        self._forward: dict[int, list[int]] = {}
        self._there: dict[int, Collection[int]] = {}
        own = [sorted({numbers[p.data_ptr()] for p in unit.parameters() if p.numel()}) for unit in units]
        elsewhere.follow(self, sorted(set(numbers.values()).difference(*own)))
        model.register_forward_pre_hook(lambda *_: self._always())
        for unit, mine in zip(units, own, strict=True):
            unit.register_forward_pre_hook(partial(self._enter, mine))
            unit.register_forward_hook(partial(self._leave, mine), always_call=True)

    def end(self) -> None:
        """No pass is under way: nothing of any unit has to be here."""
        for call in list(self._there):
            self._elsewhere.leave(self._there.pop(call))

    def _always(self) -> None:
        self._elsewhere.hold(self._elsewhere.version)

    def _enter(self, mine: Collection[int], unit: nn.Module, *_: Any) -> None:
        self._always()
        self._elsewhere.use(mine)
        self._forward.setdefault(id(unit), []).append(next(self._calls))

    def _leave(self, mine: Collection[int], unit: nn.Module, given: Any, output: Any) -> None:
        call = self._forward[id(unit)].pop()
        leaves = tree_leaves(output)
        if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves) and torch.is_grad_enabled():
            self._there[call] = mine  # who knows how its backward pass begins
            return
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._back, call, mine))  # type: ignore[no-untyped-call]
        self._elsewhere.leave(mine)

    def _back(self, call: int, mine: Collection[int], gradient: Tensor) -> None:
        """The gradient of a pass's output is there: its backward pass comes next."""
        for later in [other for other in self._there if other > call]:
            self._elsewhere.leave(self._there.pop(later))
        if call not in self._there:
            self._elsewhere.use(mine)
            self._there[call] = mine
