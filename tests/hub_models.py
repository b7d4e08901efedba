"""Tiny models in the hub's format, made on the spot, and a text to train them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SIZES = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
_ROTARY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_ROTARY |= {"num_key_value_heads": 1, "max_position_embeddings": 16, **_SIZES}
_HEADS = {**_ROTARY, "head_dim": 8}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _ROTARY),
    "llama, tied": (
        "Llama",
        {**_ROTARY, "tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "mistral, sliding": ("Mistral", {**_ROTARY, "sliding_window": 4}),
    "qwen2": ("Qwen2", _ROTARY),
    "qwen2, partly sliding": (
        "Qwen2",
        {**_ROTARY, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", _HEADS),
    "gemma": ("Gemma", _HEADS),
    "gemma2": ("Gemma2", {**_HEADS, "sliding_window": 4}),
    "gpt2": ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, **_SIZES}),
}
_GROUPED = {**_ROTARY, "num_attention_heads": 4, "num_key_value_heads": 2}
SHARDED = {
    "mistral, grouped": ("Mistral", {**_GROUPED, "sliding_window": 4}),
    "qwen2, grouped": ("Qwen2", {**_GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
}
"""Whose heads two shards divide."""
WHOLE = {"gpt_neox": ("GPTNeoX", {k: v for k, v in _ROTARY.items() if k != "num_key_value_heads"})}


def made(folder: Path, name: str) -> Path:
    """The directory of a model with weights of its own."""
    import transformers

    kind, sizes = {**CONFIGS, **SHARDED, **WHOLE}[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def text(folder: Path, size: int = 6000) -> Path:
    """A file of text."""
    path = folder / "text.txt"
    path.write_bytes(bytes(32 + (k * k // 7) % 90 for k in range(size)))
    return path


def with_tokenizer(folder: Path) -> Path:
    """Put a tokenizer of 60 words beside a model."""
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{k}": k for k in range(60)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder
