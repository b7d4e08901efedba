"""The first update is made twice: what must be found, what must not, and that nothing else changes."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from everstep.base.errors import DeterminismError
from everstep.exact.digest import tensor_digest
from everstep.exact.seeding import seed_all
from everstep.train import update_probe
from everstep.train.update_probe import UpdateProbe

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in ((7, 5), (5, 3))]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


class Noisy(torch.optim.SGD):
    """SGD with noise on its parameters; `draw` gives it."""

    def __init__(self, params: Any, draw: Callable[[], float]) -> None:
        super().__init__(params, lr=0.1)
        self.draw = draw

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(self.draw())


class Counting(torch.optim.SGD):
    """Keeps what it knows beside `state`, where its class's own copying loses it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.calls = [0]

    def step(self, closure: Any = None) -> Any:
        self.calls[0] += 1
        return super().step()


def urandom() -> float:
    return int.from_bytes(os.urandom(4), "little") / 2**32


GOOD: list[Make] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: torch.optim.Adafactor(p, lr=0.1),
    lambda p: torch.optim.Muon(p, lr=0.1),
    lambda p: Noisy(p, lambda: float(torch.rand(()))),
    lambda p: Noisy(p, random.random),
    Counting,
]


@pytest.mark.parametrize("make", GOOD)
def test_a_deterministic_one_passes_and_its_bits_are_as_without(make: Make) -> None:
    digests = []
    for probed in (False, True):
        params = parameters()
        optimizer = make(params)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        probe = UpdateProbe(optimizer, 5) if probed else None
        seed_all(5)
        optimizer.step()
        if probe is not None:
            probe.compare(1)
        scheduler.step()
        optimizer.step()
        digests.append([tensor_digest(p) for p in params] + [str(torch.rand(()))])
        if isinstance(optimizer, Counting):
            assert optimizer.calls == [2]
    assert digests[0] == digests[1]


def test_one_that_is_not_is_named() -> None:
    optimizer = Noisy(parameters(), urandom)
    probe = UpdateProbe(optimizer, 5)
    seed_all(5)
    optimizer.step()
    with pytest.raises(DeterminismError, match="Noisy"):
        probe.compare(1)


def test_state_counts_as_well() -> None:
    class Restless(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["seen"] = urandom()

    optimizer = Restless(parameters(), lr=0.1)
    probe = UpdateProbe(optimizer, 5)
    optimizer.step()
    with pytest.raises(DeterminismError, match="Restless"):
        probe.compare(1)


def test_hooks_run_once() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    ran: list[int] = []
    optimizer.register_step_post_hook(lambda *_: ran.append(1))
    probe = UpdateProbe(optimizer, 5)
    optimizer.step()
    probe.compare(1)
    assert ran == [1]


def test_what_cannot_be_copied_is_not_compared() -> None:
    optimizer = Noisy(parameters(), urandom)
    optimizer.lock = threading.Lock()  # type: ignore[attr-defined]
    probe = UpdateProbe(optimizer, 5)
    assert probe._expected == []
    optimizer.step()
    probe.compare(1)


# ---- a model that is larger than the sample


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of the two parameters is copied, and the first, larger one is not."""
    monkeypatch.setattr(update_probe, "SAMPLE_ELEMENTS", 20)


class Together(torch.optim.SGD):
    """Divides all gradients by the largest of them: its parameters cannot be updated apart."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        largest = max(float(p.grad.abs().max()) for p in parameters)
        for parameter in parameters:
            parameter.sub_(parameter.grad / largest)


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("make", [*GOOD, lambda p: Together(p, lr=0.1)])
def test_of_a_large_model_a_sample_passes_and_nothing_else_is_copied(make: Make) -> None:
    test_a_deterministic_one_passes_and_its_bits_are_as_without(make)
    optimizer = make(parameters())
    probe = UpdateProbe(optimizer, 5)
    assert [[tuple(p.shape) for p in group] for group in probe._sample] == [[(5, 3)]]


@pytest.mark.usefixtures("small_sample")
def test_of_a_large_model_one_that_is_not_deterministic_is_named() -> None:
    optimizer = Noisy(parameters(), urandom)
    probe = UpdateProbe(optimizer, 5)
    optimizer.step()
    with pytest.raises(DeterminismError, match="Noisy"):
        probe.compare(1)


@pytest.mark.usefixtures("small_sample")
def test_the_sample_begins_with_the_state_that_it_has() -> None:
    """The state of what is not in the sample is not copied."""
    first, second = parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1, momentum=0.9)
    optimizer.step()
    probe = UpdateProbe(optimizer, 5)
    twin = update_probe.twin_of(optimizer, probe._sample)
    (copied,) = twin.state
    assert torch.equal(copied, second) and copied is not second
    assert torch.equal(twin.state[copied]["momentum_buffer"], optimizer.state[second]["momentum_buffer"])
    assert [group["lr"] for group in twin.param_groups] == [0.1, 0.5]
    optimizer.step()
    probe.compare(2)
