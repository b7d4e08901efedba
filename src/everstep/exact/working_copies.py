"""Narrow copies of parameters and buffers, with which a lane's passes are made while the state stays float32.

A unit's copies are made when its forward pass begins, and its gradients come back through them when its backward pass
ends. No unit shares a copy with another one, so a cut of the model changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from everstep.exact.parameters import changed_in_lane
from everstep.exact.shard_guard import OwnHook


class _Swapped(NamedTuple):
    name: str
    table: Any
    key: str
    own: Tensor
    copy: Tensor
    version: int


class WorkingCopies:
    """A context: inside, units that are called have copies. Modules that normalise by running statistics keep their
    own, which torch wants in float32."""

    def __init__(self, units: Iterable[nn.Module], parameters: torch.dtype, buffers: torch.dtype) -> None:
        """parameters: type of the copies, and of what goes into each unit. `entered`: whether any has been called."""
        self._units, self._parameters, self._buffers = units, parameters, buffers
        self.entered = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._swapped: list[_Swapped] = []

    def __enter__(self) -> None:
        self._hooks = [unit.register_forward_pre_hook(EntersUnit(self), with_kwargs=True) for unit in self._units]

    def __exit__(self, kind: object, *_: object) -> None:
        """Raises: Misused naming a parameter whose copy was written to."""
        for hook in self._hooks:
            hook.remove()
        swapped, self._swapped = self._swapped, []
        for one in swapped:
            left = one.table[one.key]
            one.table[one.key] = one.own
            if left is one.copy and left._version == one.version:
                continue
            if isinstance(one.own, nn.Parameter):
                if kind is None:
                    raise changed_in_lane(one.name)
            elif left is one.copy:
                with torch.no_grad():
                    one.own.copy_(left)
            else:
                one.table[one.key] = left if left is None else left.to(one.own.dtype)

    def enter(self, unit: nn.Module, given: Any) -> Any:
        """A unit's forward pass begins, with these arguments: returns those that it is to have."""
        copies: dict[int, Tensor] = {}
        before, self.entered = len(self._swapped), True
        for name, module in unit.named_modules():
            if isinstance(module, _NormBase):
                continue
            for table, dtype in ((module._parameters, self._parameters), (module._buffers, self._buffers)):
                for key, own in table.items():
                    if own is not None and own.dtype == torch.float32 != dtype:
                        with torch.inference_mode(False), torch.enable_grad():  # a later call may want gradients
                            copy = copies.setdefault(id(own), own.to(dtype))
                        full = f"{name}.{key}".removeprefix(".")
                        self._swapped.append(_Swapped(full, table, key, own, copy, copy._version))
        for one in self._swapped[before:]:
            one.table[one.key] = one.copy
        return tree_map_only(Tensor, self._narrow, given)

    def _narrow(self, given: Tensor) -> Tensor:
        return given.to(self._parameters) if given.is_floating_point() else given


class EntersUnit(OwnHook):
    """The hook that has a unit get its copies."""

    def __init__(self, copies: WorkingCopies) -> None:
        self._copies = copies

    def __call__(self, unit: nn.Module, args: Any, named: Any) -> Any:
        """What takes the place of the arguments."""
        return self._copies.enter(unit, (args, named))
