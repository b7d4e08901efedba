"""A task whose code counts on from batch to batch is refused by name before its first step, and no other."""

from __future__ import annotations

import random
import re
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.runtime.link.address import JOB_FILE
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


class Rows(Dataset[Any]):
    """Opened late, a shard at a time; it can be iterated, too."""

    def __init__(self) -> None:
        self.env: Any = None
        self.txn: Any = None
        self.cur, self.pos = -1, 0
        self.shards: dict[int, Any] = {}
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return 8

    def __next__(self) -> Any:
        self.pos += 1
        return self[self.pos - 1]

    def __getitem__(self, index: int) -> Any:
        if self.env is None:
            self.env = sqlite3.connect(":memory:")
            self.txn = self.env.cursor()
        shard = index // 4
        if self.cur != shard:
            self.cur, self.data = shard, torch.full((4, 4), float(shard))
        if shard not in self.shards:
            self.shards[shard] = torch.full((4, 4), float(shard))
        self.txn.execute("select 1")
        self.generator.manual_seed(index)
        noise = torch.rand(4, generator=self.generator)
        return self.data[index % 4] + self.shards[shard][index % 4] + noise, torch.tensor(index % 2)


class Read(Plain):
    """Its samples and batches keep what gives the same."""

    def __init__(self) -> None:
        super().__init__()
        self.tok: Any = None
        self.pad = 0

    def build_dataset(self, split: str) -> Dataset[Any]:
        return Rows()

    def collate(self, samples: list[Any]) -> Any:
        if self.tok is None:
            self.tok = {"pad": 1}
            self.pad = self.tok["pad"]
        x, y = default_collate(samples)
        return x + self.pad, y


class Compiled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.compiled: Any = None
        self.weight = torch.ones(2)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if self.compiled is None:
            self.compiled = torch.jit.trace(model, batch[0])
        if self.weight.device != batch[0].device:
            self.weight = self.weight.to(batch[0].device)
        return nn.functional.cross_entropy(self.compiled(batch[0]), batch[1], weight=self.weight)


class Saved(Plain):
    """It writes a file as it has read it."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        words = np.load("words.npy")
        np.save("words.npy", words)
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) + words.sum()


class Featured(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.feats: dict[str, Any] = {}
        self.losses: list[Any] = []

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))
        for name, module in model.named_modules():
            if name == "1.0":
                module.register_forward_hook(self.keep)
        return model

    def keep(self, module: Any, given: Any, out: Any) -> None:
        self.feats["l4"] = out

    def loss(self, model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        self.losses.append(self.feats["l4"].square().mean())
        found = nn.functional.cross_entropy(out, batch[1]) + sum(self.losses)
        self.losses.clear()
        return found


class Logged(Plain):
    def build_optimizer(self, params: Any) -> Any:
        optimizer = super().build_optimizer(params)

        def show(*_: Any) -> None:
            self.n += 1
            if self.n % 100:
                return
            print(self.n)

        optimizer.register_step_post_hook(show)
        return optimizer


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Expert() for _ in range(10))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x[:, :2]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.aux = nn.Linear(4, 4), torch.zeros(())

    def forward(self, x: Any) -> Any:
        out = self.linear(x)
        self.aux = self.aux + out.square().mean()
        return out


class Summed(Plain):
    def build_model(self) -> nn.Module:
        return Experts()

    def loss(self, model: Any, batch: Any) -> Any:
        found = nn.functional.cross_entropy(model(batch[0]), batch[1]) + sum(m.aux for m in model.blocks)
        for block in model.blocks:
            block.aux = torch.zeros((), device=found.device)
        return found


class Going(Summed):
    """Its sum goes on."""

    def loss(self, model: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) + sum(m.aux for m in model.blocks)


class Shuffled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(4))

    def collate(self, samples: list[Any]) -> Any:
        random.shuffle(self.order)
        x, y = default_collate(samples)
        return x[:, self.order], y


class Averaged(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(())

    def loss(self, model: nn.Module, batch: Any) -> Any:
        found = nn.functional.cross_entropy(model(batch[0]), batch[1])
        self.mean = 0.9 * self.mean + 0.1 * found.detach()
        self.mean = self.mean.to(found.device)
        return found - self.mean


def assembled(task: Task, folder: Path, **given: Any) -> None:
    link = LoneLink(Config(lanes=2, micro_batch=2, steps=2, **given), folder)
    task.config = link.config
    assemble_task(link, task)


LOST = {
    Later: "task.n",
    Padded: "task.pads",
    Hooked: "task.n",
    OfModel: "model.calls",
    Going: "model.blocks[0].aux",
    Shuffled: "task.order",
    Averaged: "task.mean",
}


@pytest.mark.parametrize("kind", LOST)
def test_a_count_on_which_the_training_depends_is_refused(kind: type[Plain], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{re.escape(LOST[kind])} \(.*test_train_task_state.py:\d+\): .* buffer of the model"
    ):
        assembled(kind(), tmp_path)
    assembled(kind(), tmp_path, rehearse=False)


@pytest.mark.parametrize("kind", [Plain, Drawn, Kept, Read, Compiled, Saved, Featured, Logged, Summed])
def test_other_counts_are_not(kind: type[Plain], tmp_path: Path) -> None:
    assembled(kind(), tmp_path)


def test_a_job_that_goes_on_from_a_checkpoint_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / JOB_FILE).write_text('{"resumes_at": 5}')
    assembled(Later(), tmp_path)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["task.n"]


def test_nothing_is_refused_where_the_loss_cannot_be_read(tmp_path: Path) -> None:
    counts = "def loss(self, model, batch):\n    self.n += 1\n    return model(batch[0]).sum() / self.n"
    names: dict[str, Any] = {}
    exec(compile(counts, str(tmp_path / "gone.py"), "exec"), names)
    assembled(type("Gone", (Padded,), {"__module__": __name__, "loss": names["loss"]})(), tmp_path)
