"""What a lane may read beside the model's tensors, and what an update takes from there: hyperparameters, the scheduler
and settings of the model. The head's change from step to step, and those of its limbs have to be the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from everstep.base.errors import ConfigError, check
from everstep.exact.jsonable import decode, encode
from everstep.train.replica import StageReplica


def groups_of(optimizer: Optimizer) -> list[Any]:
    """Values of the optimizer's groups, as JSON. Raises: ConfigError for tensors."""
    groups = optimizer.param_groups
    return [_plain({k: v for k, v in group.items() if k != "params"}, f"group {n}") for n, group in enumerate(groups)]


def take_groups(optimizer: Optimizer, groups: list[Any]) -> None:
    """Take on what `groups_of` has given for another such optimizer."""
    check(len(groups) == len(optimizer.param_groups), f"{len(groups)} groups for {len(optimizer.param_groups)}")
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group |= decode(values, {})


def beside_lanes(replica: StageReplica) -> dict[str, Any]:
    """At the head, once a step's lanes are asked for: all that they may read beside tensors, as JSON."""
    parts = replica.parts
    scheduler = None if parts.scheduler is None else _plain(parts.scheduler.state_dict(), "scheduler")
    return {"groups": groups_of(parts.optimizer), "scheduler": scheduler, "settings": replica.state.settings.now()}


def take_beside(replica: StageReplica, said: Mapping[str, Any]) -> None:
    """At a limb: take that on, before the lanes. Raises: ConfigError if this model has no such settings."""
    parts, settings = replica.parts, replica.state.settings
    settings.restore(said["settings"])
    if parts.scheduler is not None:
        parts.scheduler.load_state_dict(decode(said["scheduler"], {}))
    take_groups(parts.optimizer, said["groups"])
    settings.before_lanes()


def _plain(value: Any, name: str) -> Any:
    tensors: dict[str, Tensor] = {}
    found = encode(value, name, tensors)
    if tensors:
        raise ConfigError(
            f"cell.fsdp: expected plain values in groups and scheduler, got a tensor in {next(iter(tensors))}: use "
            "numbers, or set cell.fsdp=1"
        )
    return found
