"""Shards of a parameter: they lie as tensors of their own, and make up the whole."""

from __future__ import annotations

import pytest
import torch

from everstep.exact.shard_cut import ShardCut

LAID = ((96, 256), 0, 1), ((96, 256), 0, 3), ((256, 96), 1, 1), ((256, 96), 1, 3), ((192,), 0, 3), ((4096,), 0, 1)


@pytest.mark.parametrize(("shape", "axis", "fused"), [*LAID, ((97, 64), 0, 1), ((10, 16), 1, 1)])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_shard_lies_alike_whoever_else_is_taken(shape: tuple[int, ...], axis: int, fused: int, shards: int) -> None:
    whole, cut = torch.randn(shape), ShardCut(axis, fused)
    found = cut.take(whole, range(shards), shards)
    assert torch.equal(cut.join(found), whole)
    for shard, one in enumerate(found):
        alone = torch.cat([view.clone() for view in cut.views(whole, shard, shards)], axis)
        (same,) = cut.take(whole, range(shard, shard + 1), shards)
        for taken in (one, same):
            assert torch.equal(taken, alone) and taken.stride() == alone.stride()
            assert taken.data_ptr() % 64 == 0, "as torch's own memory"
            assert taken.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    pieces = torch.zeros(shape)
    for shard, one in enumerate(found):
        cut.put(one, pieces, shard, shards)
    assert torch.equal(pieces, whole)


@pytest.mark.parametrize(
    ("shape", "axis", "fused", "lent"),
    [((96, 256), 0, 1, True), ((96, 256), 0, 3, False), ((256, 96), 1, 1, False), ((97, 64), 0, 1, False)],
)
def test_only_what_lies_as_a_tensor_of_its_own_is_lent(
    shape: tuple[int, ...], axis: int, fused: int, lent: bool
) -> None:
    whole, cut = torch.randn(shape), ShardCut(axis, fused)
    odd = torch.randn(whole.numel() + 1)[1:].view(shape)  # begins between two places where torch's memory begins
    turned = torch.randn(shape[::-1]).t()
    for one, may in ((whole, lent), (odd, False), (turned, False)):
        found, copied = cut.lend(one, range(1, 3), 4), cut.take(one, range(1, 3), 4)
        for mine, other in zip(found, copied, strict=True):
            assert torch.equal(mine, other) and mine.stride() == other.stride() and mine.data_ptr() % 64 == 0
            assert (mine.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()) == may
