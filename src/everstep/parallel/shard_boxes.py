"""How the ranks of a cell learn of each other's shards: through boxes in the memory that they share.

Each shard has two boxes, which take turns, so that one meeting per exchange is enough: who writes a box again knows
that all others have met since they read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from everstep.base.errors import check
from everstep.exact.layout import ALIGN_BYTES, round_up
from everstep.parallel.cell_memory import CellMemory, SharedPlace
from everstep.parallel.mapping import PAGE

_HEADER_BYTES = 128
_MOST_AXES = 8
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
"""What is exchanged. A tensor's dtype is told by its place in here."""


class ShardBoxes:
    """Where the boxes of all shards lie. box_bytes: of a box; a larger tensor goes in several turns."""

    def __init__(self, shards: int, box_bytes: int, offset: int = PAGE) -> None:
        self.room = round_up(box_bytes, ALIGN_BYTES)
        size = round_up(self.room + _HEADER_BYTES, PAGE)
        self.places = [
            [SharedPlace(offset + (2 * shard + turn) * size, self.room + _HEADER_BYTES) for turn in range(2)]
            for shard in range(shards)
        ]
        self.stop = offset + 2 * shards * size


class MemoryExchange:
    """One rank's exchange. All ranks make it with the same boxes and the same first point, which their cell's other
    meetings are before."""

    def __init__(
        self,
        memory: CellMemory,
        boxes: ShardBoxes,
        mine: range,
        ranks: Sequence[int],
        tick: Callable[[], None],
        first_point: int = 0,
    ) -> None:
        self._memory, self._mine, self._ranks, self._tick = memory, mine, ranks, tick
        self._room = boxes.room
        self._boxes = [[memory.tensor(place, torch.uint8) for place in pair] for pair in boxes.places]
        self.point = first_point

    def gather(self, mine: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of all shards. Raises: PassBroken if another rank has left the pass."""
        check(len(mine) == len(self._mine), f"{len(mine)} tensors for {len(self._mine)} shards")
        sent = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in mine]
        found: list[Tensor] = []
        at = 0
        while True:
            self.point += 1
            turn = self.point % 2
            for shard, tensor, data in zip(self._mine, mine, sent, strict=True):
                box = self._boxes[shard][turn]
                if not at:
                    box[:_HEADER_BYTES].view(torch.int64)[: _MOST_AXES + 2].copy_(_header(tensor))
                piece = data[at : at + self._room]
                box[_HEADER_BYTES : _HEADER_BYTES + len(piece)].copy_(piece)
            self._memory.meet(self.point, self._ranks, self._tick)
            if not at:
                found = [_empty(pair[turn]) for pair in self._boxes]
            for data, pair in zip(found, self._boxes, strict=True):
                into = data.reshape(-1).view(torch.uint8)[at : at + self._room]
                into.copy_(pair[turn][_HEADER_BYTES : _HEADER_BYTES + len(into)])
            at += self._room
            if all(at >= data.nbytes for data in found):
                return [data.to(mine[0].device) for data in found]


def _header(tensor: Tensor) -> Tensor:
    check(tensor.ndim <= _MOST_AXES and tensor.dtype in _DTYPES, f"no header for {tensor.dtype} {list(tensor.shape)}")
    axes = [*tensor.shape, *([0] * (_MOST_AXES - tensor.ndim))]
    return torch.tensor([_DTYPES.index(tensor.dtype), tensor.ndim, *axes])


def _empty(box: Tensor) -> Tensor:
    """A tensor like the one that a box holds, or the first piece of."""
    dtype, ndim, *axes = box[:_HEADER_BYTES].view(torch.int64)[: _MOST_AXES + 2].tolist()
    return torch.empty(axes[:ndim], dtype=_DTYPES[dtype])
