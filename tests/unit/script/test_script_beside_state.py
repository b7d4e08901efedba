"""Modules and optimizers of `state=` come back with their modes, `requires_grad` and numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.exact.image import BESIDE
from everstep.exact.state import ModelState
from everstep.exact.topology import same_state, state_digest
from everstep.script.beside_state import BesideState
from everstep.train.heal import pack_state, unpack_state


class Average(nn.Module):
    """An average that keeps more than parameters and buffers."""

    level = 1

    def __init__(self, trained: nn.Module) -> None:
        super().__init__()
        self.layer, self.trained = nn.Linear(2, 2), trained
        self.n, self.where, self.best, self.ratio = 0, f"on {id(self)}", None, 1.0
        self.mean, self.head = torch.zeros(2), None

    @property
    def double(self) -> int:
        return 2 * self.n

    def go_on(self) -> None:
        self.n, self.level, self.best, self.ratio, self.added = self.n + 1, 2, 0.1, -0.0, True
        self.mean += 1
        self.where = "elsewhere"
        self.layer.eval()
        self.layer.bias.requires_grad_(False)
        self.trained.eval()


class Stated(nn.Module):
    """A module that says itself what its state is."""

    n = 0

    def get_extra_state(self) -> Any:
        return {"n": self.n % 2}

    def set_extra_state(self, state: Any) -> None:
        self.n = state["n"]


class Own(torch.optim.SGD):
    """An optimizer with a count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.k, self.odd = 0, object()


def made() -> tuple[Any, dict[str, Any], ModelState]:
    model = nn.Linear(1, 1)
    average = Average(model)
    kept = everstep.state(average=average, stated=Stated(), best=copy.deepcopy(model))
    things = {"state": kept, "own": Own(average.layer.parameters()), "old": nn.utils.spectral_norm(nn.Linear(2, 2))}
    state = ModelState(nn.Module(), extras={**things, BESIDE: BesideState(model, things)})
    return kept, things, state


def numbers(average: Any) -> str:
    return repr((average.n, average.level, average.best, average.ratio, average.layer.training))


def test_what_is_kept_beside_the_state_comes_back() -> None:
    (here, things, state), (there, others, other) = made(), made()
    where, mean = there.average.where, there.average.mean
    here.average.go_on()
    here.stated.n, things["own"].k = 3, 3
    here.best = copy.deepcopy(here.best).eval()
    unpack_state(other, pack_state(state))
    average = there.average
    assert numbers(average) == numbers(here.average) == "(1, 2, 0.1, -0.0, False)" and average.added is True
    assert average.training and average.trained.training, "the trained model has settings of its own"
    assert not average.layer.bias.requires_grad and average.layer.weight.requires_grad
    assert average.where == where and average.mean is mean and not there.best.training
    assert there.stated.n == 1 and others["own"].k == 3
    assert type(others["old"].weight_orig) is nn.Parameter


def test_a_worker_goes_back_to_the_beginning_and_nothing_is_written_over() -> None:
    kept, _, state = made()
    saved, before = pack_state(state), numbers(kept.average)
    kept.average.go_on()
    state.extras[BESIDE].load_state_dict({"state.average/": {"double": 5, "go_on": 1, "mean": 1, "layer": 0}})
    unpack_state(state, saved)
    average = kept.average
    average.head = nn.Linear(1, 1)
    state.extras[BESIDE].load_state_dict({})
    assert numbers(average) == before and average.added is True and average.layer.bias.requires_grad
    assert isinstance(average.head, nn.Linear) and average.mean.tolist() == [1, 1] and average.double == 0
    assert callable(average.go_on) and isinstance(average.layer, nn.Linear)


def test_the_size_of_a_cache_does_not_come_back_without_the_cache() -> None:
    (here, _, state), (there, _, other) = made(), made()
    here.average.go_on()
    here.average.mean = torch.ones(5)
    unpack_state(other, pack_state(state))
    assert there.average.n == 0 and not there.average.layer.training and len(there.average.mean) == 2


def test_it_is_in_no_digest_and_no_comparison() -> None:
    kept, things, state = made()
    before, manifest = (state.state_digest(1), state.part_digests(1)), state.manifest()
    kept.average.n, things["own"].k = 5, 2
    assert (state.state_digest(1), state.part_digests(1)) == before
    now = state.manifest()
    assert now["values"] != manifest["values"] and now["entries"] == manifest["entries"]
    assert state_digest(now, 1) == state_digest(manifest, 1) == before[0] and same_state(now, manifest)
    assert not same_state(now, {**now, "blocks": []})


def test_older_states_lack_it() -> None:
    kept, things, state = made()
    older = ModelState(nn.Module(), extras=things)
    assert older.state_digest(1) == state.state_digest(1)
    kept.average.n = 4
    unpack_state(state, pack_state(older))
    assert kept.average.n == 0


@pytest.mark.parametrize("number", [True, 1, 1.0, float("nan"), None])
def test_types_of_numbers_come_back(number: Any) -> None:
    (here, _, state), (there, _, other) = made(), made()
    here.average.ratio = number
    unpack_state(other, pack_state(state))
    assert repr(there.average.ratio) == repr(number)
