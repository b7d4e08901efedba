"""Tasks without randomness, so that a loop in plain PyTorch can do what a job of them does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from everstep import Task

SIZE = 192


class Points(Dataset[tuple[torch.Tensor, int]]):
    """SIZE points of 12 numbers, of 3 kinds that overlap."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.labels = torch.randint(3, (SIZE,), generator=generator)
        middles = torch.randn(3, 12, generator=generator)
        self.points = middles[self.labels] + torch.randn(SIZE, 12, generator=generator)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.points[index], int(self.labels[index])


class Plain(Task):
    """Two matrices, SGD with momentum."""

    defaults: ClassVar[Mapping[str, Any]] = {"lanes": 1, "micro_batch": 8, "steps": 30}

    def build_model(self) -> nn.Module:
        return fixed(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3)))

    def build_dataset(self, split: str) -> Dataset[Any]:
        return Points()

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return functional.cross_entropy(model(batch[0]), batch[1])


class Adam(Plain):
    """The optimizer that most use."""

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-3)


class Normed(Plain):
    """Running statistics."""

    def build_model(self) -> nn.Module:
        return fixed(nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3)))


class Accumulated(Plain):
    """The global batch in two parts."""

    defaults: ClassVar[Mapping[str, Any]] = {**Plain.defaults, "lanes": 2}


class Clipped(Accumulated):
    """A gradient that is cut to length in about every second step."""

    defaults: ClassVar[Mapping[str, Any]] = {**Accumulated.defaults, "clip_norm": 0.5}


class Weighted(Plain):
    """Sums of losses, divided by how many samples count: those of kind 0 do not."""

    defaults: ClassVar[Mapping[str, Any]] = {**Plain.defaults, "lanes": 4}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = functional.cross_entropy(model(batch[0]), batch[1], ignore_index=0, reduction="sum")
        return loss, (batch[1] != 0).sum()


def fixed(model: nn.Module) -> nn.Module:
    """The same numbers wherever it is built."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model
