"""LoRA by `peft`: small matrices beside frozen weights. Without torch until one is added, as the job's own process
writes the adapter's config, too."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.base.config import dotted
from everstep.base.errors import ConfigError
from everstep.base.package_versions import refuse_versions

if TYPE_CHECKING:
    from torch import nn


def has_adapter(task: Mapping[str, Any]) -> bool:
    """Whether the job's `task.lora.rank` asks for an adapter."""
    return str(dotted(task).get("lora.rank", 0)) not in ("0", "0.0")


def adapter_content(named: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """Content of adapter_config.json by the job's `task.lora.*`. named: directory of the model.

    Raises: ConfigError for values that make no adapter.
    """
    task = dotted(task)
    try:
        rank, alpha = int(task["lora.rank"]), float(task.get("lora.alpha", 16.0))
    except (TypeError, ValueError):
        raise ConfigError("task.lora: expected a whole number as rank, a number as alpha") from None
    if rank < 1 or alpha <= 0:
        raise ConfigError(f"task.lora: expected a rank of 1 or more and an alpha above 0, got {rank} and {alpha:g}")
    given = task.get("lora.modules", "")
    names = [str(n) for n in given] if isinstance(given, list | tuple) else [n for n in str(given).split(",") if n]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(named).resolve()),
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": "all-linear" if names == ["all-linear"] else sorted(names) or None,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }


def add_adapter(model: nn.Module, content: Mapping[str, Any]) -> None:
    """Put LoRA's matrices beside the modules that the config names; all else is frozen.

    Raises: ConfigError if peft is missing, or the model has no such modules.
    """
    refuse_versions("peft")
    try:
        import peft
    except ImportError:
        raise ConfigError("task.lora needs peft: pip install 'everstep[lora]'") from None
    names = {**content, "inference_mode": False}
    del names["peft_type"], names["base_model_name_or_path"]
    asked = content["target_modules"] or "none"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that GPT-2's layers are transposed, which peft goes by
            peft.inject_adapter_in_model(peft.LoraConfig(**names), model, adapter_name="default")
    except ValueError as error:
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"task.lora.modules: expected names of the model's layers, got {asked}: {said}") from None
    changed = [path for path, module in model.named_modules() if hasattr(module, "lora_A")]
    lacking = (
        [n for n in asked if not any(f".{p}".endswith(f".{n}") for p in changed)] if isinstance(asked, list) else []
    )
    if lacking:
        raise ConfigError(f"task.lora.modules: the model has no layer {lacking[0][:100]!a}")
