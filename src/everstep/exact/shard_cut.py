"""How a parameter is cut into virtual shards: along one axis, evenly, or, as a vocabulary is, by one fixed rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from everstep.base.errors import ConfigError


def bounds(size: int, shards: int) -> list[tuple[int, int]]:
    """(first, stop) of each shard of an axis: the first `size % shards` shards have one more than the others."""
    least, more = divmod(size, shards)
    starts = [shard * least + min(shard, more) for shard in range(shards + 1)]
    return list(pairwise(starts))


_ALIGNED_BYTES = {"cpu": 64, "cuda": 512}
"""Alignment of tensors that torch makes."""


@lru_cache(maxsize=4096)  # asked for at every layer of every lane
def _runs(size: int, fused: int, shard: int, shards: int) -> list[tuple[int, int]]:
    """(first, length) of a shard in each of the equal parts of an axis of this size."""
    part = size // fused
    first, stop = bounds(part, shards)[shard]
    return [(k * part + first, stop - first) for k in range(fused)]


@dataclass(frozen=True)
class ShardCut:
    """One parameter's cut. axis: that is cut; fused: equal parts of the axis that are cut each, such as 3 where query,
    key and value lie in one matrix."""

    axis: int
    fused: int = 1

    def require(self, name: str, shape: Sequence[int], shards: int, heads: int = 0) -> None:
        """Refuse what cannot be cut evenly. name: of the parameter; heads: along the axis of one fused part, 0: none.

        Raises: ConfigError naming the parameter and its size.
        """
        size = shape[self.axis]
        about = f"cell.shards: {name} is {list(shape)}"
        if size % self.fused:
            raise ConfigError(f"{about}: expected an axis of {self.fused} equal parts, got {size}")
        if heads and heads % shards:
            raise ConfigError(
                f"{about}, of {heads} heads: expected a number of heads that {shards} shards divide; set cell.shards "
                f"to a divisor of {heads}"
            )
        if size // self.fused % shards:
            raise ConfigError(
                f"{about}: expected a size that {shards} shards divide, got {size // self.fused}; set cell.shards to "
                "a divisor of it"
            )

    def views(self, whole: Tensor, shard: int, shards: int) -> list[Tensor]:
        """Views of the whole parameter that make up a shard, one for each fused part."""
        runs = _runs(whole.shape[self.axis], self.fused, shard, shards)
        return [whole.narrow(self.axis, first, length) for first, length in runs]

    def lend(self, whole: Tensor, wanted: range, shards: int) -> list[Tensor]:
        """`take`, without a copy if the shards lie in the whole parameter as tensors of their own would."""
        aligned = _ALIGNED_BYTES.get(whole.device.type, 512)
        apart = self.axis > 0 or self.fused > 1 or whole.shape[0] % shards or whole.nbytes // shards % aligned
        if apart or whole.data_ptr() % aligned or not whole.is_contiguous():
            return self.take(whole, wanted, shards)
        parts = whole.detach().chunk(shards)
        return [*parts[wanted.start : wanted.stop]]

    def take(self, whole: Tensor, wanted: range, shards: int) -> list[Tensor]:
        """Some shards of the whole parameter, copied. Kernels choose their ways by strides and alignment, so each lies
        as a tensor of its own would."""
        whole = whole.detach()
        part, more = divmod(whole.shape[self.axis], self.fused * shards)
        if more or whole.nbytes // shards % _ALIGNED_BYTES.get(whole.device.type, 512):
            return [self._copied(self.views(whole, shard, shards)) for shard in wanted]
        before, after = whole.shape[: self.axis], whole.shape[self.axis + 1 :]
        by_shard = whole.reshape(*before, self.fused, shards, part, *after).movedim(self.axis + 1, 0)
        copied = by_shard[wanted.start : wanted.stop].clone(memory_format=torch.contiguous_format)
        return [one.flatten(self.axis, self.axis + 1) for one in copied.unbind()]

    def _copied(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, self.axis) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    def put(self, mine: Tensor, whole: Tensor, shard: int, shards: int) -> None:
        """Inverse of `take`: copy a shard to its place in the whole tensor."""
        for view, part in zip(self.views(whole, shard, shards), mine.chunk(self.fused, self.axis), strict=True):
            view.copy_(part)

    def join(self, found: Sequence[Tensor]) -> Tensor:
        if self.fused == 1:
            return torch.cat([*found], self.axis)
        parts = [one.chunk(self.fused, self.axis) for one in found]
        return torch.cat([part[k] for k in range(self.fused) for part in parts], self.axis)
