"""A model that several processes make together has the values of one that one process makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep.base.config import load_config
from everstep.base.errors import ConfigError
from everstep.train import job_parts
from everstep.train.blank_model import Skeleton, are_blank, blank_parameters
from everstep.train.job_parts import BuiltTask
from everstep.train.stage import build_by_module
from everstep.train.task import Task

CPU = torch.device("cpu")


class Block(nn.Module):
    """A linear layer with statistics, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)


class Model(nn.Module):
    """Three units of which two share a matrix, and a module outside of all units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(5, 8), Block(), nn.Linear(8, 5, bias=False)
        self.head.weight = self.embed.weight
        self.outside = nn.Linear(2, 2)


def units_of(model: Any) -> list[nn.Module]:
    return [model.embed, model.block, model.head]


def made(there: Any = None) -> nn.Module:
    return build_by_module(Model, units_of, 7, CPU, there=there)[0]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_each_makes_some_of_the_modules(step: int) -> None:
    skeleton, found = Skeleton(Model, units_of), list[tuple[str, Tensor]]()
    for first in range(step):
        skeleton.fill(7, CPU, None, lambda name, tensor: found.append((name, tensor.clone())), first, step)
    wanted = dict(made().named_parameters())
    assert sorted(name for name, _ in found) == sorted(wanted)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found)
    assert all(t.is_meta for t in (*skeleton.model.parameters(), *skeleton.model.buffers()))


def test_those_of_a_stage_alone_are_made() -> None:
    found: dict[str, Tensor] = {}
    Skeleton(Model, units_of).fill(7, CPU, (2,), found.__setitem__, 0, 1)
    assert found.keys() == {"embed.weight", "outside.weight", "outside.bias"}


def test_places_have_no_values_and_buffers_do() -> None:
    model, wanted = made(blank_parameters()), made()
    assert model.head.weight is model.embed.weight and not any(p.any() for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), wanted.buffers(), strict=True))
    starts = {p.data_ptr() for p in model.parameters()}
    assert len(starts) == len(list(model.parameters())) and not any(start % 64 for start in starts)


def test_parameters_of_other_stages_have_no_places_and_count_for_nothing() -> None:
    model, _ = build_by_module(Model, units_of, 7, CPU, (2,), there=blank_parameters())
    assert 0 < sum(p.is_meta for p in model.parameters()) < len(list(model.parameters()))
    assert are_blank(model.parameters())


def changes(parameter: nn.Parameter) -> None:
    parameter.data = torch.zeros_like(parameter)


@pytest.mark.parametrize(
    ("act", "alone"),
    [
        (lambda model: torch.optim.AdamW(model.parameters()), True),
        (lambda model: torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters()), lambda n: 1), True),
        (lambda model: [p.norm() for p in model.parameters()], False),
        (lambda model: [p.detach().clone() for p in model.parameters()], False),
        (lambda model: next(model.parameters()).data.mul_(0.5), False),
        (lambda model: next(model.parameters())[0].detach().t().fill_(1), False),
        (lambda model: next(model.parameters()).detach().numpy(), False),
        (lambda model: changes(next(model.parameters())), False),
        (lambda model: setattr(model, "more", nn.Parameter(torch.empty(1))), False),
    ],
)
def test_who_reads_or_writes_values_is_noticed(act: Callable[[nn.Module], Any], *, alone: bool) -> None:
    assert Skeleton(Model, units_of).is_left_alone(act) == alone


class Follower(nn.Module):
    """Has values that depend on those of another module, which it hides from torch."""

    def __init__(self, other: nn.Module, *, buffer: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(other.weight))
        if buffer:
            self.register_buffer("scale", torch.empty_like(other.weight))
        self.other = (other,)

    def reset_parameters(self) -> None:
        self.weight.copy_(self.other[0].weight)
        if hasattr(self, "scale"):
            self.scale.copy_(self.other[0].weight)


def children(model: Any) -> list[nn.Module]:
    return list(model.children())


def test_an_initialiser_that_takes_what_another_process_makes_is_refused() -> None:
    def build() -> nn.Module:
        first = nn.Linear(8, 8)
        return nn.Sequential(first, Writer(first, buffer=True))

    with pytest.raises(ConfigError, match=r"module 1 \(Writer\) reads or writes parameters or buffers of another"):
        Skeleton(build, children).fill(7, CPU, None, lambda name, tensor: None, 1, 2)


def test_an_initialiser_that_takes_places_is_noticed() -> None:
    def build(*, buffer: bool) -> nn.Module:
        first = nn.Linear(64, 64)
        return nn.Sequential(first, Follower(first, buffer=buffer))

    for buffer in (False, True):
        model, _ = build_by_module(partial(build, buffer=buffer), children, 7, CPU, there=blank_parameters())
        assert are_blank(model.parameters()) != buffer


def test_a_later_module_has_no_values_either_way() -> None:
    def build() -> nn.Module:
        last = nn.Linear(8, 8)
        return nn.Sequential(Writer(last, buffer=True), last)

    wanted = build_by_module(build, children, 7, CPU)[0].state_dict()
    model, _ = build_by_module(build, children, 7, CPU, there=blank_parameters())
    assert torch.equal(model.state_dict()["0.scale"], wanted["0.scale"])
    found: dict[str, Tensor] = {}
    Skeleton(build, children).fill(7, CPU, None, lambda name, tensor: found.update({name: tensor.clone()}), 0, 1)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items()) and len(found) == 3


class Writer(Follower):
    """Sets the other's values, too."""

    def reset_parameters(self) -> None:
        for parameter in (self.weight, self.scale, self.other[0].weight):
            nn.init.normal_(parameter)


def test_places_are_laid_out_as_parameters_that_are_made() -> None:
    def build() -> nn.Module:
        model = nn.Linear(6, 4)
        model.weight = nn.Parameter(torch.empty(4, 12)[:, ::2])
        return model

    wanted = build_by_module(build, lambda model: [model], 7, CPU)[0].weight
    place = build_by_module(build, lambda model: [model], 7, CPU, there=blank_parameters())[0].weight
    assert place.stride() == wanted.stride() == (6, 1)  # type: ignore[union-attr, operator]


class ReadingTask(Task):
    """Its data depend on the model that it has made."""

    def __init__(self, *, reads: bool) -> None:
        self.reads, self.data = reads, list[float]()

    def build_model(self) -> nn.Module:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return self.model

    def units(self, model: nn.Module) -> list[nn.Module]:
        return children(model)

    def build_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def build_dataset(self, split: str) -> Any:
        self.data.append(float(self.model[0].weight.detach().numpy().sum()) if self.reads else 1.0)
        return self.data[-1:]

    def loss(self, model: Any, batch: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("reads", [True, False])
def test_data_made_of_the_model_are_made_of_its_values(monkeypatch: pytest.MonkeyPatch, *, reads: bool) -> None:
    monkeypatch.setattr(job_parts, "prepare_torch", lambda *_: CPU)
    alone, task = ReadingTask(reads=reads), ReadingTask(reads=reads)
    single = BuiltTask(alone, load_config([("test", {"meta_init": True})]), 0)
    built = BuiltTask(task, load_config([("test", {"meta_init": True, "cell.fsdp": 2})]), 0)
    single.make()
    parts = built.make()
    assert built.dataset == single.dataset != [0.0] and len(task.data) == 1 + reads
    assert (parts.fill is None) == reads


def test_a_process_that_was_given_places_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_parts, "prepare_torch", lambda *_: CPU)
    config = load_config([("test", {"meta_init": True, "cell.fsdp": 2})])
    limb, given = BuiltTask(ReadingTask(reads=False), config, 0, cell_rank=1), dict[str, Tensor]()
    limb.take(lambda name, like: given.setdefault(name, torch.ones(like.shape)))
    for _ in range(2):
        model = limb.make().model
        assert given and all(p.data_ptr() == given[name].data_ptr() for name, p in model.named_parameters())
