"""How a parameter is cut into virtual shards: along one axis, evenly, or, as a vocabulary is, by one fixed rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from everstep.base.errors import ConfigError


def bounds(size: int, shards: int) -> list[tuple[int, int]]:
    """(first, stop) of each shard of an axis: the first `size % shards` shards have one more than the others."""
    least, more = divmod(size, shards)
    starts = [shard * least + min(shard, more) for shard in range(shards + 1)]
    return list(pairwise(starts))


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
            raise ConfigError(f"{about}, of {heads} heads: expected a number of heads that {shards} shards divide")
        if size // self.fused % shards:
            raise ConfigError(f"{about}: expected a size that {shards} shards divide, got {size // self.fused}")

    def take(self, whole: Tensor, shard: int, shards: int) -> Tensor:
        """One shard of the whole parameter, as a contiguous tensor of its own."""
        parts = whole.detach().chunk(self.fused, self.axis) if self.fused > 1 else (whole.detach(),)
        first, stop = bounds(parts[0].shape[self.axis], shards)[shard]
        cut = [part.narrow(self.axis, first, stop - first) for part in parts]
        return torch.cat(cut, self.axis).contiguous().clone()

    def join(self, found: Sequence[Tensor]) -> Tensor:
        """Inverse of `take`: the whole parameter. found: one tensor for each shard, in order."""
        fused = [shard.chunk(self.fused, self.axis) if self.fused > 1 else (shard,) for shard in found]
        return torch.cat([shard[part] for part in range(self.fused) for shard in fused], self.axis)
