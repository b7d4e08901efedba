"""A task whose code counts on from batch to batch is refused by name before its first step, and no other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.train.job_parts import assemble_task
from everstep.train.task import Task
from everstep.train.worker_link import LoneLink


class Fading(nn.Module):
    def __init__(self, late: int) -> None:
        super().__init__()
        self.linear, self.late, self.calls, self.shown = nn.Linear(4, 2), late, 0, 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.shown += len(x)
        return self.linear(x) if not self.late or self.calls < self.late else self.linear(x) * 0.5


class Keeping(nn.Module):
    """Its count is in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 2), 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.linear(x) / self.calls

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class Plain(Task):
    def __init__(self) -> None:
        self.seen, self.n, self.pads = 0, 0, random.Random(1)

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def build_dataset(self, split: str) -> Dataset[Any]:
        return TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))

    def build_optimizer(self, params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.seen += 1
        if self.seen % 100 == 0:
            print(self.seen)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Later(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.n += 1
        return super().loss(model, batch) * (1.0 if self.n < 500 else 0.5)


class Padded(Plain):
    def collate(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x + self.pads.random(), y


class Hooked(Plain):
    def build_optimizer(self, params: Any) -> Any:
        optimizer = super().build_optimizer(params)

        def fade(given: Any, *_: Any) -> None:
            self.n += 1
            for group in given.param_groups:
                group["lr"] = 0.1 / self.n

        optimizer.register_step_pre_hook(fade)
        return optimizer


class OfModel(Plain):
    late = 9

    def build_model(self) -> nn.Module:
        return Fading(self.late)


class Drawn(OfModel):
    """A count that is shown, no more."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(Shown(), nn.Linear(4, 2))


class Shown(nn.Module):
    calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x


class Kept(Plain):
    def build_model(self) -> nn.Module:
        return Keeping()


def assembled(task: Task, folder: Path, **given: Any) -> None:
    link = LoneLink(Config(lanes=2, micro_batch=2, steps=2, **given), folder)
    task.config = link.config
    assemble_task(link, task)


LOST = {Later: "task.n", Padded: "task.pads", Hooked: "task.n", OfModel: "model.calls"}


@pytest.mark.parametrize("kind", LOST)
def test_a_count_on_which_the_training_depends_is_refused(kind: type[Plain], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{LOST[kind]} \(.*test_train_task_state.py:\d+\): .* buffer of the model"):
        assembled(kind(), tmp_path)
    assembled(kind(), tmp_path, rehearse=False)


@pytest.mark.parametrize("kind", [Plain, Drawn, Kept])
def test_other_counts_are_not(kind: type[Plain], tmp_path: Path) -> None:
    assembled(kind(), tmp_path)
