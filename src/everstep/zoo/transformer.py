"""A causal transformer language model: pre-norm, GELU, learned positions, tied embeddings; a plain chain of units.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), for the arrangement of the blocks;
Press and Wolf, "Using the Output Embedding" (2017), for the tied embeddings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from everstep.base.errors import ConfigError


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of the model. width: of the residual stream, a multiple of heads; context: most tokens seen at once."""

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    width: int = 128
    heads: int = 4
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError(f"expected a width that {self.heads} heads divide, got {self.width}")


class Embedding(nn.Module):
    """Tokens and positions. A unit."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (N, T) int64 -> (N, T, width)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return cast(torch.Tensor, self.dropout(self.tokens(tokens) + self.positions(places)))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, T, width) -> the same shape."""
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return cast(torch.Tensor, self.out(mixed.transpose(1, 2).reshape(n, t, -1)))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and inside a shortcut. A unit."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, T, width) -> the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return cast(torch.Tensor, x + self.dropout(self.perceptron(self.norm2(x))))

    def perceptron(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, T, width) -> the same shape. Apart because it may be computed shard by shard."""
        return cast(torch.Tensor, self.down(functional.gelu(self.up(x))))


class TransformerHead(nn.Module):
    """The last norm, and logits by the token embedding's weight. A unit.

    `weight` is the embedding's own Parameter, registered here a second time: each of the two units has it, and a job
    reduces its gradient once per place of use.
    """

    def __init__(self, config: TransformerConfig, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, T, width) -> logits (N, T, vocabulary)."""
        return self.logits(self.norm(x))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, T, width), normed -> (N, T, vocabulary). Apart because it may be computed shard by shard."""
        return functional.linear(x, self.weight)


class Transformer(nn.Module):
    """A causal language model. `units()` applied one after the other are the whole forward pass."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = TransformerHead(config, cast(nn.Parameter, self.embedding.tokens.weight))
        for module in self.modules():
            self._init_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        """Normal with 1 / sqrt(3 width); 1 / sqrt(2 layers) of that if a branch ends in the residual stream.

        GPT-2's constant 0.02 is that of a width of 833, and slows small models down (measured with a width of 128, 60
        steps: loss 3.01, against 2.53).
        """
        scale = 1 / math.sqrt(3 * self.config.width)
        if isinstance(module, nn.Linear | nn.Embedding):
            branch = any(module in (b.attention.out, b.down) for b in self.blocks)  # type: ignore[union-attr]
            nn.init.normal_(module.weight, std=scale / (math.sqrt(2 * self.config.layers) if branch else 1.0))
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def units(self) -> list[nn.Module]:
        """Units: embedding, each block, head."""
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (N, T) int64, T at most the context -> logits (N, T, vocabulary)."""
        x = tokens
        for unit in self.units():
            x = unit(x)
        return x
