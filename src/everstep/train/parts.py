"""What is trained, and which part of it one stage holds.

Apart from the replica because cutting a model up and training a piece of it are different things.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from everstep.exact.reduce import Tied
from everstep.exact.state import Share
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
