"""What an optimizer keeps beside `state`: carried where it is plain, named where an update changes it and it is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from everstep.base.errors import ConfigError
from everstep.exact.attributes import Watched, plain
from everstep.exact.state import ModelState
from everstep.train.optimizer_kind import expected_kind
from everstep.train.update_probe import UpdateProbe


class Averaging(torch.optim.SGD):
    """A counter, a slow copy of the parameters, and references to them and to its own groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.calls = 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.mean = torch.zeros(2)
        self.watched = list(self.param_groups[0]["params"])
        self.first = self.param_groups[0]
        self.rule = lambda calls: calls % 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        self.calls += 1
        self.mean += self.calls
        for fast, slow in zip(self.watched, self.slow, strict=True):
            fast.copy_(slow.lerp_(fast, 0.5))


class Inner(torch.optim.SGD):
    """Has another optimizer make its updates."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()


class Averager:
    def __init__(self) -> None:
        self.calls = 0


class Objects(Averaging):
    """Counts in an object."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.averager = Averager()

    def step(self, closure: Any = None) -> Any:
        self.averager.calls += 1
        return super().step()


def trained(kind: type[torch.optim.Optimizer], steps: int) -> tuple[nn.Module, Any]:
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    optimizer: Any = kind(model.parameters())  # type: ignore[call-arg]
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.ones(4, 3)) ** 2).sum().backward()
        optimizer.step()


def carry(model: nn.Module, optimizer: torch.optim.Optimizer, other: tuple[nn.Module, Any]) -> None:
    state = ModelState(model, optimizer)
    manifest = json.loads(json.dumps(state.manifest()))
    ModelState(*other).load(manifest, state.read_block)


def test_plain_attributes_go_on_where_they_were() -> None:
    model, optimizer = trained(Averaging, 3)
    other = trained(Averaging, 1)
    slow, mean = other[1].slow, other[1].mean
    carry(model, optimizer, other)
    assert other[1].calls == 3 and other[1].mean is mean and len(slow) == 2
    assert other[1].watched[0] is other[0].weight, "references stay what they are"
    for each in ((model, optimizer), other):
        train(*each, 2)
    assert ModelState(model, optimizer).state_digest(5) == ModelState(*other).state_digest(5)


def test_a_second_look_sees_what_has_changed() -> None:
    model, optimizer = trained(Averaging, 1)
    state = ModelState(model, optimizer)
    snapshot = state.clone_snapshot()
    train(model, optimizer, 1)
    later = state.clone_snapshot()
    for taken in (snapshot, later):
        taken.start()
    found = [dict(taken.manifest()["values"]["attributes"]["dict"])["calls"] for taken in (snapshot, later)]
    assert found == [1, 2]


def test_what_belongs_to_the_parameters_is_not_carried() -> None:
    _, optimizer = trained(Averaging, 1)
    assert set(plain(optimizer)) == {"calls", "slow", "mean"}


def test_torchs_own_have_nothing_to_carry() -> None:
    model, _ = trained(Averaging, 0)
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor):
        optimizer = kind(model.parameters(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(model, optimizer, 1)
        assert plain(optimizer) == {} and "attributes" not in ModelState(model, optimizer).manifest()["values"]


@pytest.mark.parametrize(("kind", "name"), [(Inner, "inner"), (Objects, "averager")])
def test_what_cannot_be_carried_and_changes_is_named(kind: type[torch.optim.Optimizer], name: str) -> None:
    model, optimizer = trained(kind, 0)
    (model(torch.ones(4, 3)) ** 2).sum().backward()
    probe = UpdateProbe(optimizer, 5)
    optimizer.step()
    with pytest.raises(ConfigError, match=rf"keeps in self\.{name} \(.*\) what its updates change"):
        probe.compare(1)


def test_what_does_not_change_is_let_be() -> None:
    _, optimizer = trained(Objects, 1)
    watched = Watched(optimizer)
    assert watched.changed() == []


class CountsSteps(torch.optim.SGD):
    """Counts under a name that a scheduler has, too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self._step_count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self._step_count += 1
        self.param_groups[0]["lr"] = 0.1 / self._step_count
        return super().step()


def test_a_counter_called_as_a_schedulers_goes_on() -> None:
    model, optimizer = trained(CountsSteps, 3)
    other = trained(CountsSteps, 0)
    carry(model, optimizer, other)
    for each in ((model, optimizer), other):
        train(*each, 2)
    assert torch.equal(model.weight, other[0].weight) and other[1]._step_count == 5
    assert expected_kind(optimizer, 3).at_once, "a part after the other would count twice"
