"""A task whose state has a given size and whose lanes take a given time: what checkpoints cost in real jobs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import Dataset

import everstep
from checkpoint_ranks import WIDTH
from models import RandomImages


class Wide(everstep.Task):
    """`task.size_mb`: parameters and AdamW together. `task.lane_s`: processor time of a lane's forward pass."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "lanes": 4,
        "micro_batch": 1,
        "eval_every": 0,
        "task": {"size_mb": 400.0, "lane_s": 0.05},
    }

    def build_model(self) -> nn.Module:
        layers = max(1, round(float(self.config.task["size_mb"]) * 1e6 / (12 * WIDTH * WIDTH)))
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def build_dataset(self, split: str) -> Dataset[Any]:
        return RandomImages()

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4)

    def collate(self, samples: list[Any]) -> torch.Tensor:
        return torch.ones(len(samples), WIDTH)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        end = time.thread_time() + float(self.config.task["lane_s"])
        busy = torch.ones(256, 256)
        while time.thread_time() < end:
            busy = torch.tanh(busy @ busy)
        return model(batch).square().mean()
