"""Who may see the state of an optimizer that is divided."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from everstep.base.errors import ConfigError
from everstep.train.divided_state import DividedState


class Own(Optimizer):
    """Momentum, with a class of the user's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                kept = self.state[parameter]
                kept["sum"] = kept.get("sum", 0) + parameter.grad
                parameter -= kept["sum"]


def divided(kind: Callable[[Any], Optimizer], *, stepping: bool = False) -> tuple[nn.Parameter, Optimizer]:
    """A parameter and an optimizer of it that has made a step, and whose state is divided since."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = kind([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.state = DividedState(optimizer, lambda: stepping)
    return parameter, optimizer


@pytest.mark.parametrize(
    "read",
    [
        lambda parameter, optimizer: optimizer.state[parameter],
        lambda parameter, optimizer: optimizer.state.get(parameter),
        lambda parameter, optimizer: optimizer.state.setdefault(parameter, {}),
        lambda parameter, optimizer: optimizer.state.pop(parameter, None),
        lambda _, optimizer: optimizer.state.clear(),
        lambda _, optimizer: dict(optimizer.state),
        lambda _, optimizer: list(optimizer.state),
        lambda _, optimizer: list(optimizer.state.values()),
        lambda _, optimizer: [kept for _, kept in optimizer.state.items()],
        lambda _, optimizer: copy.deepcopy(optimizer),
        lambda _, optimizer: torch.save(optimizer.state, io.BytesIO()),
    ],
)
def test_a_loop_that_reads_it_is_refused(read: Callable[[nn.Parameter, Optimizer], Any]) -> None:
    parameter, optimizer = divided(lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
    with pytest.raises(ConfigError, match=r"AdamW.*zero\.stage=0"):
        read(parameter, optimizer)


@pytest.mark.parametrize(
    "read",
    [
        lambda parameter, before: before[parameter]["exp_avg"],
        lambda parameter, before: before[parameter].get("exp_avg"),
        lambda _, before: [kept["exp_avg"] for kept in before.values() if "exp_avg" in kept],
        lambda _, before: [value for kept in before.values() for value in kept.values()],
    ],
)
def test_so_is_one_that_has_the_state_of_before_under_a_name_of_its_own(
    read: Callable[[nn.Parameter, Any], Any],
) -> None:
    """An undivided optimizer goes on filling that: here the loop would read what nobody fills."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    before = optimizer.state
    optimizer.state = DividedState(optimizer, lambda: True)
    parameter.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(ConfigError, match=r"AdamW.*zero\.stage=0"):
        read(parameter, before)


def test_the_optimizer_goes_on_with_it() -> None:
    parameter, optimizer = divided(lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
    plain = nn.Parameter(torch.ones(3))
    other = torch.optim.AdamW([plain], lr=0.1)
    plain.grad = torch.ones(3)
    other.step(), other.step(), optimizer.step()
    assert torch.equal(parameter, plain)


def test_an_own_optimizer_reads_it_in_an_update_alone() -> None:
    parameter, optimizer = divided(Own, stepping=True)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.full((3,), -2.0))
    _, optimizer = divided(Own)
    with pytest.raises(ConfigError, match="Own"):
        optimizer.step()
