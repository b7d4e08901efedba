"""What is trained, what of it cannot be, and which part of it one stage holds.

Apart from the replica because cutting a model up and training a piece of it are different things.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from everstep.base.errors import ConfigError
from everstep.exact.state import Share
from everstep.exact.ties import Tied
from everstep.placement.cuts import ModelCut


@dataclass(frozen=True)
class Parts:
    """What the user brings: everything that is trained, and what goes with it. `extras`: more state to keep."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    units: Sequence[nn.Module]
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageSpec:
    """One stage of a job. cut: of the whole model; part p belongs to stage p % stages.

    ties: parameters that are used in this stage and in others. share: None where there is one stage.
    """

    stage: int
    stages: int
    cut: ModelCut
    ties: tuple[Tied, ...] = ()
    share: Share | None = None

    @staticmethod
    def whole(n_units: int) -> StageSpec:
        """Of a model that is not split."""
        return StageSpec(0, 1, ((0, n_units),))

    @property
    def n_parts(self) -> int:
        return len(self.cut)

    @property
    def parts(self) -> tuple[int, ...]:
        """The numbers of the stage's parts."""
        return tuple(range(self.stage, self.n_parts, self.stages))

    @property
    def units(self) -> tuple[int, ...]:
        """The numbers of the stage's units in the whole model, in order."""
        return tuple(unit for part in self.parts for unit in range(*self.cut[part]))

    @property
    def is_split(self) -> bool:
        """Whether lanes are handed from part to part."""
        return self.n_parts > 1

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return (self.n_parts - 1) % self.stages == self.stage


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
