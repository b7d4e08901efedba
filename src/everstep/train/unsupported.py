"""What cannot be trained exactly, seen before anything is: each is named, with what to write instead."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from everstep.base.errors import ConfigError


def refuse_unsupported(model: Any, optimizer: Any, scheduler: Any) -> None:
    """Raises: ConfigError for what a job cannot have."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module as the model, got {_named(model)}")
    if not isinstance(optimizer, Optimizer):
        several = isinstance(optimizer, list | tuple | dict)
        remedy = "give one optimizer with several parameter groups" if several else "give a torch.optim.Optimizer"
        raise ConfigError(f"expected one optimizer, got {_named(optimizer)}: {remedy}")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric at each step, which the update does not have: pass it as "
            "state={'scheduler': scheduler} and call scheduler.step(metric) after run.evaluate, or use one that counts "
            "steps"
        )
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise ConfigError(f"expected a scheduler with step() and state_dict(), got {_named(scheduler)}")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _refuse_embedding(name or "the model", module)


def _refuse_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    kind = type(module).__name__
    if module.sparse:
        raise ConfigError(f"{name} ({kind}) has sparse gradients, which are not summed exactly: use sparse=False")
    if module.max_norm is not None:
        raise ConfigError(
            f"{name} ({kind}) has max_norm={module.max_norm:g}: it changes its weight in every forward pass, so that "
            "lanes would see each other: leave max_norm out, and scale what it returns in the model"
        )


def _named(value: Any) -> str:
    return type(value).__name__ if value is not None else "nothing"
