"""How the ranks that compute a lane together learn of each other's shards: by boxes in the memory of their cell.

Each shard has two boxes, which take turns, so that one meeting for each exchange is enough: who writes a box again
knows that all others have met since they read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from everstep.base.errors import check

SHARD_BOX_BYTES = 4 << 20
"""A larger tensor goes in several turns."""
_HEADER_BYTES = 128
_MOST_AXES = 8
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
"""What is exchanged. A tensor's dtype is told by its place in here."""


class BoxExchange:
    """One rank's exchange. The others have the same boxes, and come to the same points."""

    def __init__(self, boxes: Sequence[Sequence[Tensor]], mine: range, meet: Callable[[int], None]) -> None:
        """boxes: two for each shard, flat uint8. mine: this rank's shards. meet: waits until all have come to a
        point."""
        self._boxes, self._mine, self._meet = boxes, mine, meet
        self._room = len(boxes[0][0]) - _HEADER_BYTES
        self._point = 0

    def start(self, point: int) -> None:
        """Go on from this point, which is after those at which any rank has been; no rank is in an exchange."""
        self._point = point

    def gather(self, mine: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of all shards, in order. mine: those of this rank's. Raises: PassBroken if another rank has left."""
        check(len(mine) == len(self._mine), f"{len(mine)} tensors for {len(self._mine)} shards")
        sent = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in mine]
        found: list[Tensor] = []
        at = 0
        while True:
            self._point += 1
            turn = self._point % 2
            for shard, tensor, data in zip(self._mine, mine, sent, strict=True):
                box = self._boxes[shard][turn]
                if not at:
                    box[:_HEADER_BYTES].view(torch.int64)[: _MOST_AXES + 2].copy_(_header(tensor))
                piece = data[at : at + self._room]
                box[_HEADER_BYTES : _HEADER_BYTES + len(piece)].copy_(piece)
            self._meet(self._point)
            if not at:
                found = [_empty(pair[turn]) for pair in self._boxes]
            for tensor, pair in zip(found, self._boxes, strict=True):
                into = tensor.reshape(-1).view(torch.uint8)[at : at + self._room]
                into.copy_(pair[turn][_HEADER_BYTES : _HEADER_BYTES + len(into)])
            at += self._room
            if all(at >= tensor.nbytes for tensor in found):
                return [tensor.to(mine[0].device) for tensor in found]


def _header(tensor: Tensor) -> Tensor:
    check(tensor.ndim <= _MOST_AXES and tensor.dtype in _DTYPES, f"no header for {tensor.dtype} {list(tensor.shape)}")
    axes = [*tensor.shape, *([0] * (_MOST_AXES - tensor.ndim))]
    return torch.tensor([_DTYPES.index(tensor.dtype), tensor.ndim, *axes])


def _empty(box: Tensor) -> Tensor:
    """A tensor like the one that a box holds, or the first piece of."""
    dtype, ndim, *axes = box[:_HEADER_BYTES].view(torch.int64)[: _MOST_AXES + 2].tolist()
    return torch.empty(axes[:ndim], dtype=_DTYPES[dtype])
