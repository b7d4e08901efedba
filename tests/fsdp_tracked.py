"""The peak of a rank's memory as torch's own tracker has it, for FSDP on a fake mesh: nothing is computed or allocated.

    python fsdp_tracked.py LAYERS HIDDEN HEADS WIDTH none|full

32 ranks, one sequence of 2,048 tokens, a vocabulary of 32,000, bfloat16, AdamW (`foreach=True` is miscounted); full:
each layer is computed again. Prints GiB.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS, VOCAB, SEQUENCE = 32, 32_000, 2048


class Layer(nn.Module):
    """Attention and a gated feed-forward part, without biases."""

    def __init__(self, hidden: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query, self.key, self.value, self.result = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(hidden, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed, (batch, tokens, hidden) = self.before(x), x.shape
        parts = (part(normed).view(batch, tokens, self.heads, -1) for part in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        x = x + self.result(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        normed = self.between(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def peak_gib(layers: int, hidden: int, heads: int, width: int, recompute: str) -> float:
    """Two steps under the tracker."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with FakeTensorMode():
        blocks = [Layer(hidden, heads, width) for _ in range(layers)]
        wrapped = [checkpoint_wrapper(block) if recompute == "full" else block for block in blocks]
        ends = nn.RMSNorm(hidden), nn.Linear(hidden, VOCAB, bias=False)
        model = nn.Sequential(nn.Embedding(VOCAB, hidden), *wrapped, *ends)
        for block in wrapped:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tracker = FSDPMemTracker(model, optimizer)
        tokens = torch.randint(0, VOCAB, (1, SEQUENCE))
        tracker.track_inputs((tokens,))
        with tracker:
            for _ in range(2):
                functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
    return (
        max(
            sum(n for what, n in held.items() if what != "Total")
            for held in tracker.get_tracker_snapshot("peak").values()
        )
        / 2**30
    )


if __name__ == "__main__":
    print(peak_gib(*map(int, sys.argv[1:5]), sys.argv[5]))
