"""Whether code reads or writes the values of some tensors, which have none."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_HARMLESS = {_aten.detach.default, _aten.empty_like.default, _aten.zeros_like.default}


def memory_in(tensors: Iterable[Tensor]) -> set[int]:
    """The memory of these tensors, which they keep while they are watched."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


class Touched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether operations of this thread take tensors in this memory."""

    def __init__(self, memory: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self.touched = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if func not in _HARMLESS and any(one.untyped_storage()._cdata in self._memory for one in given):
            self.touched = True
        return func(*args, **(kwargs or {}))
