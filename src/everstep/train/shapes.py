"""Batches of a shape that is new to this life: under torch.compile their first step may take minutes."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from everstep.data.batch import map_tensors

_MOST = 4096


def compiling() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(counters and counters.get("frames"))


class Shapes:
    """Shapes that were seen."""

    def __init__(self) -> None:
        self._seen: set[tuple[object, ...]] = set()

    def new(self, batch: Any) -> bool:
        """Whether none like this has come before."""
        found: list[object] = []

        def note(tensor: Tensor) -> Tensor:
            found.append((tuple(tensor.shape), tensor.dtype))
            return tensor

        map_tensors(note, batch)
        shape = tuple(found)
        if shape in self._seen or len(self._seen) >= _MOST:
            return False
        self._seen.add(shape)
        return True
