"""A model that several processes make together has the values of one that one process makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep.train.blank_model import Skeleton, blank_parameters
from everstep.train.stage import build_by_module

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
