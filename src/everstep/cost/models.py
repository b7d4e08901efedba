"""Shapes of transformers: parameters, operations and activations; published models, the nearest to a number. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from everstep.base.errors import ConfigError

MOST_LAYERS = 1000
"""Most layers of a scaled shape."""
RECOMPUTE = ("none", "selective", "alternate", "full")
"""What the backward pass computes again: nothing; the attention; every second matrix product and all that is cheap, the
attention aside (torchtitan's selective checkpointing by operation); each layer from its input."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer. ffn: inner width of the feed-forward part, None for 4 x hidden. kv_heads: None: as
    heads. gated: the feed-forward part has three matrices (SwiGLU), no biases, norms without offset; else it is a GPT
    with biases and learnt positions. tied: the output uses the embedding's matrix; None: if it is a GPT. experts: feed-
    forward parts of each layer, 0 for one that is no expert; each token goes through `experts_per_token` of them."""

    layers: int
    hidden: int
    heads: int
    vocab: int = 51200
    sequence: int = 2048
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    tied: bool | None = None
    experts: int = 0
    experts_per_token: int = 1

    @property
    def width(self) -> int:
        """Inner width of the feed-forward part."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def kv_width(self) -> int:
        """Width of the keys of all heads, which is that of the values."""
        return self.hidden * (self.kv_heads or self.heads) // self.heads

    @property
    def expert_weights(self) -> int:
        """Parameters in the matrices of one feed-forward part."""
        return (3 if self.gated else 2) * self.hidden * self.width

    @property
    def layer_weights(self) -> int:
        """Parameters in the matrices of one layer; with experts, in those of all of them and of the router."""
        return self._weights(max(1, self.experts))

    @property
    def expert_parameters(self) -> int:
        """Parameters in the matrices of all experts of all layers."""
        return self.layers * self.experts * self.expert_weights

    def _weights(self, parts: int) -> int:
        return (
            2 * self.hidden**2
            + 2 * self.hidden * self.kv_width
            + self.hidden * self.experts
            + (parts * self.expert_weights)
        )

    @property
    def parameters(self) -> int:
        """All parameters. Of a GPT 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h): arXiv 2104.04473, equation 2."""
        own = self.gated if self.tied is None else not self.tied
        vocabulary = (1 + own) * self.vocab * self.hidden
        if self.gated:
            small = 2 * self.layers * self.hidden + self.hidden
            return self.layers * self.layer_weights + vocabulary + small
        return self.layers * (self.layer_weights + 13 * self.hidden) + vocabulary + self.sequence * self.hidden

    def forward_flops(self) -> tuple[float, float, float]:
        """Operations of a forward pass per token: matrices of all layers, attention of all layers, output.

        Source: arXiv 2104.04473, section 5.1 (24 B s h^2 + 4 B s^2 h for a layer, 2 B s h V for the output).
        """
        attention = 4.0 * self.sequence * self.hidden * self.layers
        return 2.0 * self._weights(self.experts_per_token) * self.layers, attention, 2.0 * self.hidden * self.vocab

    def flops(self, recompute: str = "none") -> float:
        """Operations of a forward and a backward pass per token. With recompute=full 96 l h^2 (1 + s / 6h + V / 16 l
        h), as equation 3 of arXiv 2104.04473."""
        matrices, attention, output = self.forward_flops()
        again = {"none": 0.0, "selective": attention, "alternate": matrices / 2, "full": matrices + attention}[
            recompute
        ]
        return 3 * (matrices + attention + output) + again

    def activation_bytes(self, tp: int = 1, sequence_parallel: bool = False, fused_attention: bool = False) -> float:
        """Bytes that one layer keeps per token, in two-byte numbers, with tensor parallelism over tp devices.

        A GPT: 10 h + 24 h / t + 5 a s / h t; with sequence parallelism the 10 h are divided, too; a fused attention
        keeps no scores. Source: arXiv 2205.05198, equations 1 to 4, in place of whose 16 h a gated layer keeps four
        tensors of its width.
        """
        whole = 10 * self.hidden / (tp if sequence_parallel else 1)
        inner = 8 * self.hidden + (8 if self.gated else 4) * self.width * self.experts_per_token
        scores = 0 if fused_attention else 5 * self.heads * self.sequence
        return whole + (inner + scores) / tp

    def kept_bytes(self, recompute: str, tp: int = 1, sequence_parallel: bool = False, fused: bool = False) -> float:
        """Bytes that one layer keeps per token until its backward pass. alternate: its input, queries, values, the
        attention's result, one inner tensor of the feed-forward part, and the layer's result."""
        if recompute == "alternate":
            whole, inner = 4 * self.hidden, 2 * self.width * self.experts_per_token
            return whole / (tp if sequence_parallel else 1) + (4 * self.hidden + 2 * self.kv_width + inner) / tp
        if recompute == "full":
            return 2 * self.hidden / (tp if sequence_parallel else 1)
        return self.activation_bytes(tp, sequence_parallel, fused or recompute == "selective")


class PublishedModel(NamedTuple):
    """A model whose training was published. batch: sequences of a step."""

    name: str
    shape: ModelShape
    batch: int
    source: str


_GPT3 = "GPT-3 (arXiv 2005.14165, table 2.1; recalled)"
_LLAMA2 = "Llama 2 (arXiv 2307.09288; recalled)"
_LLAMA3 = "Llama 3.1 (arXiv 2407.21783, table 3; recalled)"


def _llama(
    layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int = 128256, sequence: int = 8192
) -> ModelShape:
    return ModelShape(layers, hidden, heads, vocab, sequence, kv, ffn, True)


PUBLISHED = (
    PublishedModel("gpt3-125m", ModelShape(12, 768, 12), 256, _GPT3),
    PublishedModel("gpt3-350m", ModelShape(24, 1024, 16), 256, _GPT3),
    PublishedModel("gpt3-1.3b", ModelShape(24, 2048, 16), 512, _GPT3),
    PublishedModel("gpt3-2.7b", ModelShape(32, 2560, 32), 512, _GPT3),
    PublishedModel("gpt3-6.7b", ModelShape(32, 4096, 32), 1024, _GPT3),
    PublishedModel("gpt3-13b", ModelShape(40, 5120, 40), 1024, _GPT3),
    PublishedModel("gpt3-175b", ModelShape(96, 12288, 96), 1536, _GPT3),
    PublishedModel("llama2-7b", _llama(32, 4096, 32, 32, 11008, 32000, 4096), 1024, _LLAMA2),
    PublishedModel("llama2-13b", _llama(40, 5120, 40, 40, 13824, 32000, 4096), 1024, _LLAMA2),
    PublishedModel("llama2-70b", _llama(80, 8192, 64, 8, 28672, 32000, 4096), 1024, _LLAMA2),
    PublishedModel("llama3-8b", _llama(32, 4096, 32, 8, 14336), 512, _LLAMA3),
    PublishedModel("llama3-70b", _llama(80, 8192, 64, 8, 28672), 2048, _LLAMA3),
    PublishedModel("llama3-405b", _llama(126, 16384, 128, 8, 53248), 2048, _LLAMA3),
    PublishedModel(
        "mixtral-8x7b",
        replace(_llama(32, 4096, 32, 8, 14336, 32000, 4096), experts=8, experts_per_token=2),
        1024,
        "Mixtral (arXiv 2401.04088, table 1; recalled; batch assumed)",
    ),
    *(
        PublishedModel(
            f"megatron-{size}", ModelShape(layers, hidden, heads), batch, "arXiv 2104.04473, table 1"
        )
        for size, layers, hidden, heads, batch in (
            ("18.4b", 40, 6144, 48, 1024),
            ("39.1b", 48, 8192, 64, 1536),
            ("76.1b", 60, 10240, 80, 1792),
            ("310.1b", 96, 16384, 128, 2160),
            ("529.6b", 105, 20480, 128, 2520),
            ("1008b", 128, 25600, 160, 3072),
        )
    ),
)  # fmt: skip


def nearest_model(parameters: int) -> PublishedModel:
    """The published model without experts whose number of parameters is nearest, by its logarithm; of equal ones the
    first."""
    dense = (one for one in PUBLISHED if not one.shape.experts)
    return min(dense, key=lambda one: abs(math.log(one.shape.parameters / parameters)))


def shape_of(parameters: int, near: PublishedModel) -> ModelShape | None:
    """The shape of a model, its layers scaled if it is further than 10 % from so many parameters; None if it is still
    further than 30 % then."""
    shape = near.shape
    if not 0.9 < parameters / shape.parameters < 1.1:
        layers = round(shape.layers + (parameters - shape.parameters) / shape.layer_weights)
        shape = replace(shape, layers=max(1, layers if layers < 8 else 4 * round(layers / 4)))
    return shape if 1 / 1.3 < parameters / shape.parameters < 1.3 and shape.layers <= MOST_LAYERS else None


def check_shape(shape: ModelShape) -> ModelShape:
    """The shape, if there can be such a model. Raises: ConfigError, one line."""
    for name in ("layers", "hidden", "heads", "vocab", "sequence"):
        value = getattr(shape, name)
        if not 1 <= value <= 10**7:
            raise ConfigError(f"--{name}: expected from 1 to 1e+07, got {value}")
    for name, most in (("experts", 4096), ("experts_per_token", max(1, shape.experts))):
        value, least = getattr(shape, name), int(name == "experts_per_token")
        if not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')}: expected from {least} to {most}, got {value}")
    if shape.hidden % shape.heads:
        raise ConfigError(f"--heads: expected a divisor of the hidden size {shape.hidden}, got {shape.heads}")
    return shape
