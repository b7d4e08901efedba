"""Tensors that a loop changes beside the updates: which they are, and how another worker gets them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from everstep.base.errors import ProtocolError, Uncarried
from everstep.exact.unchanged import UnchangedTensors


class Trained:
    """A model with tied and frozen parameters, buffers and a momentum, after its first update."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.model[2].weight = self.model[0].weight
        self.model[2].bias.requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        self.tensors = UnchangedTensors(self.model, self.optimizer)
        self.update()

    def update(self) -> None:
        self.model(torch.randn(4, 3)).sum().backward()
        self.optimizer.step()
        self.tensors.updated()


def momentum(one: Trained) -> torch.Tensor:
    return one.optimizer.state[one.model[0].weight]["momentum_buffer"]


def given_memory(one: Trained) -> None:
    one.model[0].bias.data = one.model[0].bias.data * 2


def replaced(one: Trained) -> None:
    one.optimizer.state[one.model[0].weight]["momentum_buffer"] = torch.zeros(3, 3)


CHANGES: list[tuple[str, Callable[[Trained], object], set[str]]] = [
    ("in place", lambda one: one.model[0].bias.detach().mul_(2), {"parameter 0.bias"}),
    ("frozen", lambda one: one.model[2].bias.add_(1), {"parameter 2.bias"}),
    ("tied", lambda one: one.model[0].weight.detach().mul_(2), {"parameter 0.weight", "parameter 2.weight"}),
    ("other memory", given_memory, {"parameter 0.bias"}),
    ("buffer", lambda one: one.model[1].running_mean.add_(1), {"buffer 1.running_mean"}),
    ("optimizer", lambda one: momentum(one).zero_(), {"the optimizer's momentum_buffer of 2.weight"}),
    ("replaced", replaced, {"the optimizer's momentum_buffer of 2.weight"}),
    ("nothing", lambda one: None, set()),
]


@pytest.mark.parametrize(("change", "moved"), [one[1:] for one in CHANGES], ids=[one[0] for one in CHANGES])
def test_what_a_loop_changes_after_an_update_is_named_and_can_be_given(
    change: Callable[[Trained], object], moved: set[str]
) -> None:
    here, there = Trained(), Trained()
    assert here.tensors.moved() == {}
    change(here)
    found = here.tensors.moved()
    assert found.keys() == moved
    there.tensors.give({name: tensor.detach().clone() for name, tensor in found.items()})
    for one, other in zip(here.model.state_dict().values(), there.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(momentum(here), momentum(there))
    here.update()
    assert here.tensors.moved() == {}, "the next update begins anew"


@pytest.mark.parametrize(("first", "told"), [(1, 2), (2, 4), (3, 8), (5, 16)])
def test_a_write_behind_the_version_counter_is_the_loops_once_it_was_seen_twice(first: int, told: int) -> None:
    """It is looked for in rounds 1, 2, 4, 8 and so on; from then on in each."""
    one, seen = Trained(), []
    for number in range(1, 19):
        if number >= first:
            one.model[0].bias.data.mul_(2)
        seen += [number] if one.tensors.moved() and one.tensors.moved() else []
        one.update()
    assert seen == [*range(told, 19)]


def test_hidden_writes_of_a_loop_that_may_make_them_are_told_at_once_to_those_that_follow() -> None:
    one = Trained()
    one.tensors = UnchangedTensors(one.model, one.optimizer, hides=True)
    for _ in range(5):
        one.tensors.updated()
    assert one.tensors.moved() == {}
    one.tensors.updated(followed=True)
    one.model[0].bias.data.mul_(2)
    assert one.tensors.moved().keys() == {"parameter 0.bias"}


def test_parameters_whose_bits_were_not_noted_may_hide_writes_of_a_loop_that_may_make_them() -> None:
    one = Trained()
    found = list[bool]()
    for hides in (True, False):
        tensors = UnchangedTensors(one.model, one.optimizer, hides=hides)
        assert not tensors.hides, "nothing has been updated"
        for _ in range(3):
            tensors.updated()
            found.append(tensors.hides)
    assert found == [False, False, True, False, False, False]


def test_what_is_put_back_was_midway_and_is_not_the_loops_change() -> None:
    """An evaluation under other weights writes buffers, too, whose marks count anew then."""
    one = Trained()
    was = one.model[0].bias.detach().clone()
    for _ in range(2):
        one.tensors.updated()
        one.model[0].bias.data.mul_(2)
        assert one.tensors.moved(midway=True).keys() == {"parameter 0.bias"}
        one.model[1].running_mean.add_(0)
        one.tensors.put_back()
        one.model[0].bias.data.copy_(was)
        assert one.tensors.moved() == {}
        one.tensors.updated()


def test_a_bit_that_flips_is_not_the_loops() -> None:
    one = Trained()
    one.model[0].bias.data.mul_(2)
    for _ in range(8):
        assert one.tensors.moved() == one.tensors.moved() == {}
        one.update()


@pytest.mark.parametrize(
    "told",
    [
        {"parameter 0.bias": torch.zeros(4)},
        {"parameter 0.bias": torch.zeros(3, dtype=torch.float64)},
        {"parameter 7.bias": torch.zeros(3)},
    ],
)
def test_what_does_not_fit_is_refused(told: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ProtocolError, match="expected a tensor of this model"):
        Trained().tensors.give(told)


def test_a_change_before_the_batches_is_refused_by_name() -> None:
    one = Trained()
    one.tensors.begin()
    one.tensors.check()
    given_memory(one)
    with pytest.raises(Uncarried, match="parameter 0"):
        one.tensors.check()
