"""A tensor in `everstep.state` that lies in memory of what is trained is refused by name; other sharing is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.script.loop_values import shared

WRONG = {
    "best['weight']": lambda layer: {"best": {"weight": layer.state_dict()["weight"]}},
    "best[0]": lambda layer: {"best": [layer.weight.data]},
    "best": lambda layer: {"best": layer.weight.detach()[0]},
    "weight": lambda layer: {"weight": layer.weight},
    "means": lambda layer: {"means": layer.running_mean},
}


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    layer = nn.BatchNorm1d(3)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize("name", WRONG)
def test_what_shares_memory_with_what_is_trained_is_refused(name: str) -> None:
    layer, optimizer = trained()
    said = shared([everstep.state(**WRONG[name](layer))], layer, optimizer)
    assert said.startswith(f"everstep.state: {name} shares memory with what is trained: store a clone")


def test_so_is_the_optimizer_s_state() -> None:
    layer, optimizer = trained()
    kept = everstep.state(seen=(optimizer.state_dict()["state"][0]["exp_avg"],))
    assert "seen[0] shares memory" in shared([kept], layer, optimizer)


def test_other_sharing_is_none_of_it() -> None:
    layer, optimizer = trained()
    weight: Any = layer.weight
    kept = everstep.state(
        copied=copy.deepcopy(layer), net=nn.Sequential(layer), rows=list(torch.zeros(2, 2)), grad=weight.grad
    )
    kept.best, kept.empty = copy.deepcopy(layer.state_dict()), torch.zeros(0)
    kept.again = kept.best["weight"]
    assert not shared([kept, {"ema": layer}, layer], layer, optimizer)
