"""What the checkpoints beside this file are of: every kind of state that a model may have, and as little of it as does.

Never changed: what is kept here was written by a version whose checkpoints nobody can make any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from everstep import Task


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """203 fixed points."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.points = torch.randn(203, 12, generator=generator)
        self.labels = (self.points[:, :4].sum(1) > 0).long() + (self.points[:, 4:8].sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], self.labels[index]


class Low(nn.Module):
    """A layer in bfloat16, a scalar beside it, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.arange(32) % 5 > 0)
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, 32] to the same, float32."""
        return self.linear(x.bfloat16()).float() * self.scale * self.mask


class KeptAdam(Task):
    """Four units: BatchNorm, one that is frozen, one of two types, and the last."""

    defaults: ClassVar[Mapping[str, Any]] = {"lanes": 8, "micro_batch": 4, "steps": 6}

    def build_model(self) -> nn.Module:
        frozen = nn.Linear(32, 32).requires_grad_(False)
        first = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU())
        return nn.Sequential(first, frozen, Low(), nn.Linear(32, 3))

    def build_dataset(self, split: str) -> Dataset[Any]:
        return Points()

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in params if p.requires_grad], lr=3e-3)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return functional.cross_entropy(model(batch[0]), batch[1])


class KeptSGD(KeptAdam):
    """The same with momentum alone."""

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in params if p.requires_grad], lr=0.05, momentum=0.9)
