"""Parameters that are there only while a unit computes with them: the gradients are those of a model that has all."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from everstep.train.cell_units import UnitsHere


class Block(nn.Module):
    """Gives a dictionary; its first matrix is frozen, and one use of it comes after that of what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.trained = nn.Linear(8, 8)

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        x = given["x"]
        return {"x": x + torch.tanh(self.trained(self.frozen(x))), "skip": x}


class Opaque:
    """What no tree of tensors is."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Wraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, given: dict[str, Tensor]) -> Opaque:
        return Opaque(self.inner(given["x"]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.again, self.wraps = Block(), Block(), Wraps()
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.trained.weight
        self.outside = nn.Parameter(torch.randn(8))

    def units(self) -> list[nn.Module]:
        return [self.first, self.again, self.wraps, self.last]

    def forward(self, x: Tensor) -> Tensor:
        y = self.first({"x": x * self.outside})
        y = self.again(y)
        y = checkpoint(self.again, y, use_reentrant=False)
        y = self.first(y)
        return self.last(self.wraps(y).x).square().mean()


class Comes:
    """Parameters that are not used have no values."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.version = 1
        self._always: Collection[int] = ()
        self._parameters, self._values = parameters, [p.detach().clone() for p in parameters]
        self.uses = [0] * len(parameters)
        self._holds = False
        for parameter in parameters:
            parameter.data.fill_(torch.nan)

    def follow(self, passes: UnitsHere, always: Collection[int]) -> None:
        self._always = always

    def hold(self, version: int) -> None:
        if not self._holds:
            self._holds = True
            self.use(self._always)

    def use(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self.uses[number] += 1
            self._parameters[number].data.copy_(self._values[number])

    def leave(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self.uses[number] -= 1
            if not self.uses[number]:
                self._parameters[number].data.fill_(torch.nan)


def test_gradients_are_those_of_a_model_that_has_all() -> None:
    plain, model = Model(), Model()
    unique = list({p.data_ptr(): p for p in model.parameters()}.values())
    elsewhere: Any = Comes(unique)
    here = UnitsHere(model, model.units(), {p.data_ptr(): n for n, p in enumerate(unique)}, elsewhere)
    outside = next(n for n, p in enumerate(unique) if p is model.outside)
    for seed in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        losses = [one(x) for one in (plain, model)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        here.end()
        assert elsewhere.uses == [int(n == outside) for n in range(len(unique))]
    found = {name: p.grad for name, p in model.named_parameters()}
    for name, p in plain.named_parameters():
        assert (p.grad is None) == (found[name] is None) and (p.grad is None or torch.equal(p.grad, found[name])), name


def test_evaluation_leaves_nothing_behind() -> None:
    model = Model()
    unique = list({p.data_ptr(): p for p in model.parameters()}.values())
    elsewhere: Any = Comes(unique)
    UnitsHere(model, model.units(), {p.data_ptr(): n for n, p in enumerate(unique)}, elsewhere)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 8)), Model()(torch.ones(2, 8)))
    assert sum(elsewhere.uses) == 1
