"""Plans that cut known architectures into virtual shards: the zoo's transformer, and some of transformers."""

from __future__ import annotations

from typing import Any

from everstep.base.errors import ConfigError
from everstep.exact.shard_plan import SequenceRule, ShardPlan
from everstep.exact.shard_region import Column, RegionRule
from everstep.zoo.transformer import TransformerConfig


def transformer_plan(config: TransformerConfig) -> ShardPlan:
    """The plan of the zoo's transformer."""
    columns = {"qkv": Column(3, config.heads)}
    attention = RegionRule("blocks.*.attention", columns, ["out"], divided=["heads"], rates=["dropout"])
    perceptron = RegionRule("blocks.*", {"up": Column()}, ["down"], method="perceptron", rates=[])
    between = ["blocks.*.norm1", "blocks.*.norm2", "blocks.*.dropout"]
    sequence = SequenceRule("blocks.0", "head.norm", between)
    return ShardPlan([attention, perceptron], sequence, "embedding.tokens", "head", "logits")


def _rotary(config: Any) -> ShardPlan:
    """Plan for models like Llama, with biases or without: attention of grouped heads, then a gated perceptron."""
    own, grouped = Column(heads=config.num_attention_heads), Column(heads=config.num_key_value_heads)
    columns = {"q_proj": own, "k_proj": grouped, "v_proj": grouped}
    attention = RegionRule("model.layers.*.self_attn", columns, ["o_proj"], rates=["attention_dropout"])
    gated = {"gate_proj": Column(), "up_proj": Column()}
    perceptron = RegionRule("model.layers.*.mlp", gated, ["down_proj"], rates=[])
    between = ["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm"]
    sequence = SequenceRule("model.layers.0", "model.norm", between)
    return ShardPlan([attention, perceptron], sequence, "model.embed_tokens", "lm_head")


def _gpt2(config: Any) -> ShardPlan:
    attention = RegionRule(
        "transformer.h.*.attn",
        {"c_attn": Column(3, config.n_head)},
        ["c_proj"],
        after=["resid_dropout"],
        divided=["num_heads", "embed_dim", "split_size"],
    )
    perceptron = RegionRule("transformer.h.*.mlp", {"c_fc": Column()}, ["c_proj"], after=["dropout"], rates=[])
    between = ["transformer.h.*.ln_1", "transformer.h.*.ln_2"]
    sequence = SequenceRule("transformer.h.0", "transformer.ln_f", between)
    return ShardPlan([attention, perceptron], sequence, "transformer.wte", "lm_head")


PLANS = {**dict.fromkeys(("llama", "mistral", "qwen2", "gemma"), _rotary), "gpt2": _gpt2}
"""Plans of architectures of transformers, by model_type."""


def hub_plan(config: Any) -> ShardPlan:
    """The plan of a model of `transformers`. Raises: ConfigError for an architecture without one."""
    if config.model_type not in PLANS:
        raise ConfigError(
            f"cell.tp: expected an architecture with a plan ({', '.join(PLANS)}), got {config.model_type}: set "
            "cell.tp=1, or cell.fsdp to cut it otherwise"
        )
    return PLANS[config.model_type](config)
