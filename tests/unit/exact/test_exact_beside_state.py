"""Modules and optimizers of `state=` come back with all that they are, not with their `state_dict` alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from everstep.base.errors import ConfigError
from everstep.exact.beside_state import BesideState, known_storages
from everstep.exact.jsonable import BESIDE
from everstep.exact.state import ModelState
from everstep.train.heal import pack_state, unpack_state


class Average(nn.Module):
    """An average that keeps more than parameters and buffers."""

    level = 1

    def __init__(self, trained: nn.Module) -> None:
        super().__init__()
        self.layer, self.trained = nn.Linear(2, 2), trained
        self.n, self.where, self.kernel = 0, f"on {id(self)}", (3, 3)
        self.mean, self.shadow, self.history = torch.zeros(2), {"a": torch.zeros(1)}, [1]
        self.alias = trained.weight
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("late", None, persistent=False)

    def go_on(self) -> None:
        self.n, self.level, self.late, self.added = self.n + 1, 2, torch.ones(1), torch.ones(2)
        self.history.append(2)
        self.mean, self.shadow["b"] = self.mean + 1, torch.ones(3)
        self.cache.add_(1)
        self.layer.eval()
        self.layer.bias.requires_grad_(False)


class Own(torch.optim.SGD):
    """An optimizer with a count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.k, self.odd = 0, object()


def made() -> tuple[dict[str, Any], ModelState]:
    model = nn.Linear(1, 1)
    average = Average(model)
    things = {"average": average, "own": Own(average.layer.parameters())}
    beside = BesideState(model, lambda: things, lambda: known_storages([model, *things.values()]))
    return things, ModelState(nn.Module(), extras={**things, BESIDE: beside})


def test_what_is_kept_beside_the_state_comes_back() -> None:
    (here, state), (there, other) = made(), made()
    where, cache, shadow, alias = (
        there["average"].where,
        *(getattr(there["average"], n) for n in ("cache", "shadow", "alias")),
    )
    here["average"].go_on()
    here["average"].trained.eval()
    here["own"].k = 3
    unpack_state(other, pack_state(state))
    average = there["average"]
    assert (average.n, average.level, average.history, average.kernel) == (1, 2, [1, 2], (3, 3))
    assert average.where == where, "what has not changed is of this machine"
    assert average.mean.tolist() == [1, 1] and average.late.tolist() == [1] and average.added.tolist() == [1, 1]
    assert average.shadow is shadow and {k: v.tolist() for k, v in shadow.items()} == {"a": [0], "b": [1, 1, 1]}
    assert average.cache is cache and cache.tolist() == [1, 1] and average.alias is alias is average.trained.weight
    assert average.training and not average.layer.training and average.trained.training
    assert not average.layer.bias.requires_grad and average.layer.weight.requires_grad
    assert there["own"].k == 3


def test_a_worker_goes_back_to_the_beginning() -> None:
    things, state = made()
    saved = pack_state(state)
    things["average"].go_on()
    unpack_state(state, saved)
    average = things["average"]
    assert (average.n, average.level, average.history, average.late) == (0, 1, [1], None)
    assert not hasattr(average, "added") and average.layer.training and average.layer.bias.requires_grad


def test_no_digest_counts_it_and_older_checkpoints_lack_it() -> None:
    things, state = made()
    before = state.state_digest(1), state.part_digests(1)
    things["average"].go_on()
    assert (state.state_digest(1), state.part_digests(1)) == before
    older = ModelState(nn.Module(), extras={name: thing for name, thing in things.items() if name != BESIDE})
    assert older.state_digest(1) == before[0]
    unpack_state(state, pack_state(older))
    assert things["average"].n == 1


def test_what_is_no_attribute_is_refused() -> None:
    _, state = made()
    for key in ("go_on", "_buffers", "layer", "__class__"):
        saved: Any = {"held": {"average": {"modes": [], "grads": [], "fields": {"": {key: 1}}}}}
        with pytest.raises(ConfigError, match="is no attribute"):
            state.extras[BESIDE].load_state_dict(saved)


def test_what_an_optimizer_changes_and_cannot_be_carried_is_named() -> None:
    things, state = made()
    things["own"].odd = {"a": lambda: 0, "n": 1}
    with pytest.raises(ConfigError, match="odd of the optimizer own has changed"):
        pack_state(state)
