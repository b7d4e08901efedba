"""Whether code reads or writes the values of some tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_HARMLESS = {_aten.detach.default, _aten.empty_like.default, _aten.zeros_like.default}
_PAST_OPERATIONS = {"numpy", "tolist", "data_ptr", "__array__", "__dlpack__"}


def memory_in(tensors: Iterable[Tensor]) -> set[int]:
    """The memory of these tensors, which they keep while they are watched."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


class Touched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether operations take tensors in this memory."""

    def __init__(self, memory: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self.touched = False

    def look(self, given: Any) -> None:
        """Something takes this."""
        tensors = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
        self.touched |= any(one.untyped_storage()._cdata in self._memory for one in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            self.look((args, kwargs))
        return func(*args, **(kwargs or {}))


class _PastOperations(TorchFunctionMode):
    """Has it note who takes the values without any operation, too."""

    def __init__(self, seen: Touched) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _PAST_OPERATIONS:
            self._seen.look(args[:1])
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(memory: Collection[int]) -> Iterator[Touched]:
    """What this thread does inside is noted."""
    seen = Touched(memory)
    with seen, _PastOperations(seen):
        yield seen
