"""Small tasks for tests of whole jobs: `tests/tasks.py:Mixed` and so on, a few milliseconds per lane."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from everstep import Task

SIZE = 203


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """SIZE fixed points with a noisy look: each use draws from torch's generator (augmentation)."""

    def __init__(self, noise: float = 0.1, size: int = SIZE) -> None:
        generator = torch.Generator().manual_seed(1)
        self.points = torch.randn(size, 12, generator=generator)
        self.labels = (self.points[:, :4].sum(1) > 0).long() + (self.points[:, 4:8].sum(1) > 0).long()
        self.noise = noise

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = self.noise * torch.randn(12) if self.noise else torch.zeros(12)
        return self.points[index] + noise, self.labels[index]


class _PointsTask(Task):
    defaults: ClassVar[Mapping[str, Any]] = {"lanes": 8, "micro_batch": 4, "steps": 20}

    def build_dataset(self, split: str) -> Dataset[Any]:
        return Points(noise=0.1 if split == "train" else 0.0)

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return functional.cross_entropy(model(batch[0]), batch[1])


class Mixed(_PointsTask):
    """BatchNorm, dropout and augmentation in one."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU()),
            nn.Sequential(nn.Dropout(0.2), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()),
            nn.Linear(32, 3),
        )

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        right = (model(batch[0]).argmax(1) == batch[1]).sum()
        return {"accuracy": torch.tensor([float(right), float(len(batch[1]))], dtype=torch.float64)}


class MixedAdamW(Mixed):
    """`Mixed` with an optimizer that keeps scalars beside tensors."""

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-3)


class _Spare(nn.Module):
    """A layer of which one half is never used, and the other only for some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(12, 12)
        self.sometimes = nn.Linear(12, 12)
        self.always = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x[0, 0]) > 0.3:
            x = x + self.sometimes(x)
        return self.always(x)


class PartlyUsed(_PointsTask):
    """One parameter never gets a gradient, another one in some lanes only."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(_Spare())


class Weighted(_PointsTask):
    """`loss` returns (sum, weight), and weights differ from lane to lane."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        weights = batch[1] + 1.0
        return (losses * weights).sum(), weights.sum()


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12, bias=False)
        self.middle = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.1), nn.Tanh())
        self.last = nn.Linear(12, 12, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))[:, :3]


class Tied(_PointsTask):
    """One parameter in two units."""

    def build_model(self) -> nn.Module:
        return _Tied()


class Unsteady(Mixed):
    """Not deterministic: a random source of its own that nobody seeds."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        import os

        noise = int.from_bytes(os.urandom(2), "little") / 65536
        return super().loss(model, batch) * (1 + noise)


class BadSample(Mixed):
    """Sample 17 cannot be read."""

    def build_dataset(self, split: str) -> Dataset[Any]:
        class Bad(Points):
            def __getitem__(self, index: int) -> Any:
                if index == 17:
                    raise OSError("sector not found")
                return super().__getitem__(index)

        return Bad()


class BadLoss(Mixed):
    """`loss` raises."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        raise ValueError("no loss today")


class BadModel(Mixed):
    """`build_model` raises."""

    def build_model(self) -> nn.Module:
        raise ValueError("no model today")


class TooSmall(Mixed):
    """Fewer samples than a global batch."""

    def build_dataset(self, split: str) -> Dataset[Any]:
        return Points(size=7)
