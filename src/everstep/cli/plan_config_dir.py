"""The shape of a model from a Hugging Face config directory: its config.json is read, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from everstep.base.errors import ConfigError
from everstep.base.given import read_json
from everstep.cost.models import ModelShape

GATED = ("llama", "mistral", "mixtral", "phi3", "qwen2")
PLAIN = ("gpt2", "gpt_neox", "opt")
_SEQUENCE = 8192
"""Most tokens of a sequence that are taken from a config, whose limit is often far above what training uses."""
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def is_config(text: str) -> bool:
    """Whether --model names a place rather than a published model."""
    return "/" in text or Path(text).exists()


def is_config_dir(text: str) -> bool:
    """Whether it is a directory with a config.json."""
    return (Path(text) / "config.json").is_file()


def shape_of_config(text: str) -> tuple[ModelShape, list[str]]:
    """The shape that a directory with config.json, or such a file, describes; what was assumed.

    Raises: ConfigError, one line: not readable, a model of another kind.
    """
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    found, kind = _read(path)
    sizes = {name: _size(found, keys, path) for name, keys in _NAMES.items()}
    gated, sequence = kind in GATED, min(sizes["positions"], _SEQUENCE)
    shape = ModelShape(
        sizes["layers"],
        sizes["hidden"],
        sizes["heads"],
        sizes["vocab"],
        sequence,
        _shared_heads(found, sizes, path),
        _optional(found, ("intermediate_size", "n_inner", "ffn_dim"), path),
        gated,
        found.get("tie_word_embeddings", not gated) is not False,
    )
    if kind == "mixtral":
        experts = _optional(found, _EXPERTS[:1], path) or 0
        shape = replace(shape, experts=experts, experts_per_token=_optional(found, ("num_experts_per_tok",), path) or 1)
    return shape, [f"sequences of {sequence} ({path} allows {sizes['positions']})"]


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """A config and its kind of model. Raises: ConfigError for a file that is missing, or an unknown kind."""
    try:
        found = read_json(path, links=True)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"--model: cannot read {path}: {said}") from None
    if not isinstance(found, dict) or not isinstance(kind := found.get("model_type"), str):
        raise ConfigError(f"--model: {path}: expected a model's config with model_type, found none")
    if kind != "mixtral" and any(isinstance(found.get(name), int) and found[name] > 1 for name in _EXPERTS):
        raise ConfigError(f"--model: {path}: of mixtures of experts mixtral is planned: give --layers and --experts")
    if kind not in (*GATED, *PLAIN) or found.get("is_encoder_decoder"):
        raise ConfigError(
            f"--model: {path}: expected a model_type of {', '.join((*GATED, *PLAIN))}, got {kind[:40]!r}: "
            "give --layers, --hidden and --heads"
        )
    return found, kind


def _shared_heads(found: Mapping[str, Any], sizes: Mapping[str, int], path: Path) -> int | None:
    """Heads of keys and values, None: as many as of queries. Raises: ConfigError for heads of a width of their own."""
    shared = _optional(found, ("num_key_value_heads",), path)
    if shared is not None and sizes["heads"] % shared:
        raise ConfigError(f"--model: {path}: num_key_value_heads: expected a divisor of {sizes['heads']}, got {shared}")
    whole = _optional(found, ("head_dim",), path)
    if whole is not None and whole * sizes["heads"] != sizes["hidden"]:
        raise ConfigError(
            f"--model: {path}: expected a hidden size of heads x head_dim ({whole * sizes['heads']}), got "
            f"{sizes['hidden']}: give --layers, --hidden and --heads"
        )
    return shared


def _size(found: Mapping[str, Any], keys: tuple[str, ...], path: Path) -> int:
    value = _optional(found, keys, path)
    if value is None:
        raise ConfigError(f"--model: {path}: expected {' or '.join(keys)}, found none")
    return value


def _optional(found: Mapping[str, Any], keys: tuple[str, ...], path: Path) -> int | None:
    for key in keys:
        value = found.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**7:
            raise ConfigError(f"--model: {path}: {key}: expected a whole number from 1 to 1e+07, got {str(value)[:40]}")
        return value
    return None
