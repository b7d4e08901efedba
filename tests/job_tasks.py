"""The tasks of the tests that compare whole jobs: every kind of state, a few milliseconds per lane.

`Paced` lets a job take its time until something has been reported (a worker has healed, say), so that tests need
neither long jobs nor luck: what it waits for is in the environment, and changes no number.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from everstep import Task
from everstep.exact.shard_plan import shard_model
from everstep.exact.shard_sums import ShardMesh
from everstep.observe.events import parse_events
from everstep.parallel.socket_mesh import BlockNote, SocketMesh
from everstep.zoo.digits import ResNet50Digits
from everstep.zoo.recipe import token_loss
from everstep.zoo.shard_plans import transformer_plan
from everstep.zoo.transformer import Attention, Transformer, TransformerConfig

PACE = "EVERSTEP_TEST_PACE"
STRIKE = "EVERSTEP_TEST_STRIKE"
SIZE = 203


class Pace:
    """Each lane takes `lane_s` seconds longer, until the events satisfy all conditions. Given as JSON by `PACE`.

    A condition is what an event must bear, `count`: of how many events, and `lane_s`: what lanes take until then.
    """

    def __init__(self, text: str) -> None:
        given = json.loads(text) if text else {"until": []}
        self.until: list[dict[str, Any]] = given["until"]
        self.lane_s: float = given.get("lane_s", 0.0)
        self.path = Path(given.get("events", ""))
        self.over = not self.until
        self._seen = [0] * len(self.until)
        self._position = 0

    def lane(self) -> None:
        """A lane is being computed."""
        begin = time.monotonic()
        while not self.over and not self._satisfied() and time.monotonic() < begin + self._longest_s():
            time.sleep(0.01)

    def _longest_s(self) -> float:
        """What a lane takes now."""
        asked = zip(self._seen, self.until, strict=True)
        return max(w.get("lane_s", self.lane_s) for seen, w in asked if seen < w.get("count", 1))

    def _satisfied(self) -> bool:
        """Whether what has come since the last look is the last that was waited for."""
        with open(self.path, "rb") as file:
            file.seek(self._position)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._position += len(data)
        for event in parse_events(data):
            for n, wanted in enumerate(self.until):
                self._seen[n] += all(event.get(k) == v for k, v in wanted.items() if k not in ("count", "lane_s"))
        self.over = all(seen >= wanted.get("count", 1) for seen, wanted in zip(self._seen, self.until, strict=True))
        return self.over


class _Task(Task):
    """What these tasks share."""

    defaults: ClassVar[Mapping[str, Any]] = {"lanes": 8, "micro_batch": 4, "steps": 30, "backoff.initial_s": 0.05}

    def __init__(self) -> None:
        self.pace = Pace(os.environ.get(PACE, ""))

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.pace.lane()
        return self.lane_loss(model, batch)

    def lane_loss(self, model: nn.Module, batch: Any) -> Any:
        """The loss proper."""
        return functional.cross_entropy(model(batch[0]), batch[1])


class Glyphs(Dataset[tuple[torch.Tensor, int]]):
    """SIZE pictures 8 x 8 of 4 kinds; in training each look shifts, flips (numpy) and blurs it anew."""

    def __init__(self, augmented: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        kinds = torch.rand(4, 1, 8, 8, generator=generator)
        self.labels = torch.randint(4, (SIZE,), generator=generator)
        self.pictures = kinds[self.labels] + 0.3 * torch.randn(SIZE, 1, 8, 8, generator=generator)
        self.augmented = augmented

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import random

        import numpy

        picture = self.pictures[index]
        if self.augmented:
            picture = picture.roll(int(torch.randint(-1, 2, ())), dims=2) + 0.05 * torch.randn(1, 8, 8)
            picture = picture.flip(2) if numpy.random.rand() < 0.5 else picture
            picture = picture * random.uniform(0.9, 1.1)
        return picture, int(self.labels[index])


class Pictures(_Task):
    """Convolutions, BatchNorm, dropout, augmentation; SGD with momentum."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 4)),
        )

    def build_dataset(self, split: str) -> Dataset[Any]:
        return Glyphs(augmented=split == "train")

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        right = (model(batch[0]).argmax(1) == batch[1]).sum()
        return {"accuracy": torch.stack([right.double(), torch.tensor(float(len(batch[1])), dtype=torch.float64)])}


class Matrices(Pictures):
    """Matrices, one in each unit: parameters and what AdamW keeps for them take most of the memory."""

    def build_model(self) -> nn.Module:
        inner = [nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(12)]
        return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 512)), *inner, nn.Linear(512, 4))

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4)


class PicturesStruck(Pictures):
    """In the steps that `STRIKE` names ("PATH 3 9": PATH-3 is there once somebody was struck in step 3), the first
    worker that sends blocks of a sum while autograd computes is killed, right after the first of them; where several of
    a host reduce together, the first that sends blocks before it is known what all have."""

    def build_model(self) -> nn.Module:
        path, *steps = os.environ.get(STRIKE, "").split() or [""]
        send = SocketMesh.push

        def push(mesh: SocketMesh, w: int, note: BlockNote, tensor: torch.Tensor) -> None:
            send(mesh, w, note, tensor)
            apart = threading.current_thread().name == "everstep-reduce" and note.whole
            early = apart or torch._C._current_graph_task_id() >= 0
            if note.of_node and str(note.step) in steps and early:
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(f"{path}-{note.step}", os.O_CREAT | os.O_EXCL))
                    os.kill(os.getpid(), signal.SIGKILL)

        SocketMesh.push = push  # type: ignore[method-assign]
        return super().build_model()


class PicturesOneCycle(Pictures):
    """A scheduler that moves the momentum too."""

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=60)


class PicturesEpochs(PicturesOneCycle):
    """Ends in the middle of a global batch: the last step lacks samples, and some lanes have none."""

    defaults: ClassVar[Mapping[str, Any]] = {**_Task.defaults, "steps": None, "epochs": 5}


class BreaksLater(PicturesOneCycle):
    """While the file that `EVERSTEP_TEST_BREAK` names is there, the loss raises from step 7 on, in every lane; for the
    first time when as many processes are about to as it says."""

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        self.scheduler = super().build_scheduler(optimizer)
        return self.scheduler

    def lane_loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().lane_loss(model, batch)  # BatchNorm has moved its statistics by then
        broken = Path(os.environ.get("EVERSTEP_TEST_BREAK", "/nowhere"))
        if self.scheduler.last_epoch >= 6 and broken.exists():
            broken.with_name(f"{broken.name}-{os.getpid()}").touch()
            end_s = time.monotonic() + 60.0
            while len(list(broken.parent.glob(f"{broken.name}-*"))) < int(broken.read_text()):
                if time.monotonic() > end_s:
                    break
                time.sleep(0.01)
            raise ValueError("the data of step 7 cannot be read: caf\udce9.jpg")
        return loss


class Wide(Pictures):
    """8 MB of state, with AdamW; memory that was freed goes back at each lane, so that what is held can be measured."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Flatten(), nn.Linear(64, 640), nn.ReLU()),
            nn.Sequential(nn.Linear(640, 1000), nn.ReLU()),
            nn.Linear(1000, 4),
        )

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-3)

    def lane_loss(self, model: nn.Module, batch: Any) -> Any:
        ctypes.CDLL(None).malloc_trim(0)
        return super().lane_loss(model, batch)


class PicturesAdafactor(Pictures):
    """State whose shapes are not those of the parameters."""

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(params, lr=1e-2)


class _Counting(nn.Module):
    """Computes with how often it was called, which is its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.trace = 0, torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls, self.trace = self.calls + 1, 0.5 * self.trace + self.calls
        return x * (1 + 0.01 * float(self.trace[0]))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "trace": self.trace}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.trace = state["calls"], state["trace"]


class PicturesCounting(Pictures):
    """Modules with extra state, in two units."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        return nn.Sequential(*(nn.Sequential(_Counting(), unit) for unit in model.children()))


class PicturesNonFinite(PicturesOneCycle):
    """The loss of whatever batch holds the odd sample is NaN, in every epoch."""

    odd: ClassVar[int] = 5

    def build_dataset(self, split: str) -> Dataset[Any]:
        data = Glyphs(augmented=False)
        data.pictures[self.odd] = torch.nan
        return data


class PicturesNonFiniteLater(PicturesNonFinite):
    """The same, from step 6 on."""

    odd: ClassVar[int] = 118


class Sentences(Dataset[torch.Tensor]):
    """SIZE sequences of 9 tokens out of 32; a token is dropped (0) now and then, differently at each look."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        first = torch.randint(1, 32, (SIZE, 1), generator=generator)
        self.tokens = (first + 3 * torch.arange(9)) % 31 + 1

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.where(torch.rand(9) < 0.15, 0, self.tokens[index])


class _Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 16)
        self.place = nn.Parameter(0.1 * torch.randn(8, 16))
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.drop(self.token(tokens) + self.place)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=2))
        dropout = 0.1 if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class _Head(nn.Module):
    def __init__(self, embed: _Embed) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.project = nn.Linear(16, 32, bias=False)
        self.project.weight = embed.token.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(self.norm(x))


class Text(_Task):
    """A transformer with dropout and tied embeddings in its first and last unit; AdamW, clipping, (sum, weight)."""

    defaults: ClassVar[Mapping[str, Any]] = {**_Task.defaults, "clip_norm": 0.5}

    def build_model(self) -> nn.Module:
        embed = _Embed()
        return nn.Sequential(embed, _Block(), _Head(embed))

    def build_dataset(self, split: str) -> Dataset[Any]:
        return Sentences()

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-3)

    def lane_loss(self, model: nn.Module, batch: Any) -> Any:
        logits, target = model(batch[:, :-1]), batch[:, 1:]
        losses = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
        return losses, (target != 0).sum()


class Sharded(Text):
    """The zoo's transformer, which is cut into virtual shards; a vocabulary that they do not divide."""

    defaults: ClassVar[Mapping[str, Any]] = {**Text.defaults, "lanes": 4, "steps": 10}

    def build_model(self) -> nn.Module:
        return Transformer(TransformerConfig(37, 8, 1, 16, 4, 0.2))

    def units(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Transformer)
        return model.units()

    def parallelize(self, model: nn.Module, mesh: ShardMesh) -> None:
        assert isinstance(model, Transformer)
        shard_model(model, transformer_plan(model.config), mesh)

    def lane_loss(self, model: nn.Module, batch: Any) -> Any:
        return token_loss(model(batch[:, :-1]), batch[:, 1:]), batch[:, 1:].numel()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        loss = token_loss(model(batch[:, :-1]), batch[:, 1:]).double()
        return {"loss": torch.stack([loss, torch.tensor(float(batch[:, 1:].numel()), dtype=torch.float64)])}


class _Bounded(Attention):
    """Shards would be added up after the last function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


class Unfitting(Sharded):
    """A plan that does not fit the model."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.blocks[0].attention.__class__ = _Bounded
        return model


class _Branches(nn.Module):
    """`never` gets no gradient, `sometimes` gets one in some lanes only, and in some steps in none."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.sometimes, self.always = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.squeeze(1)
        if float(x[0, 0, 0]) > 0.75:
            x = x + self.sometimes(x)
        return self.always(x.flatten(1))


class Sparse(Pictures):
    """Absent gradients, an empty optimizer state, and momentum that tells None from zero."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(_Branches())


class SparseStages(Pictures):
    """The last unit lacks gradients, and the first one has BatchNorm."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.BatchNorm2d(1), _Branches())


class FatalEvaluation(PicturesOneCycle):
    """One worker dies in the first evaluation."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        claim = self.pace.path.parent / "died-in-metrics"
        if self.pace.until and self.config.workers > 1 and not claim.exists():
            with contextlib.suppress(FileExistsError):
                claim.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().metrics(model, batch)


class MuonText(Text):
    """An optimizer for matrices only, so the model has nothing else."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 32, bias=False), nn.Tanh()),
            nn.Linear(32, 4, bias=False),
        )

    def build_dataset(self, split: str) -> Dataset[Any]:
        return Glyphs(augmented=split == "train")

    def build_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(params, lr=0.02)

    def lane_loss(self, model: nn.Module, batch: Any) -> Any:
        return functional.cross_entropy(model(batch[0]), batch[1])


class _Shared(nn.Module):
    """Uses one matrix that others use too."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.own = nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.weight = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.own(functional.linear(self.norm(x), self.weight)))


class Layers(Pictures):
    """Six units, a matrix that three of them share, clipping by the norm of all."""

    defaults: ClassVar[Mapping[str, Any]] = {**_Task.defaults, "clip_norm": 0.5}

    def build_model(self) -> nn.Module:
        shared = nn.Parameter(0.2 * torch.randn(16, 16))
        return nn.Sequential(
            nn.Sequential(nn.Flatten(), nn.Linear(64, 16)),
            _Shared(shared),
            nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 16), nn.ReLU(inplace=True)),
            _Shared(shared),
            _Shared(shared),
            nn.Linear(16, 4),
        )


class ThinResNet50(ResNet50Digits):
    """ResNet-50 with a sixteenth of the channels."""

    defaults: ClassVar[Mapping[str, Any]] = {**ResNet50Digits.defaults, "lanes": 4, "micro_batch": 2, "steps": 4}

    def build_model(self) -> nn.Module:
        from everstep.zoo import resnet

        resnet.WIDTHS = (4, 8, 16, 32)  # the process is this job's own
        return super().build_model()
