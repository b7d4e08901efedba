"""What shares memory in `everstep.state` is refused by name before it is saved; harmless sharing is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.base.errors import ConfigError
from everstep.exact.beside_state import known_storages


def kept(layer: nn.Module, **values: Any) -> Any:
    found = everstep.state(**values)
    found.begin(lambda: known_storages([layer]))
    return found


WRONG = {
    "best['weight']": lambda layer: {"best": {"weight": layer.state_dict()["weight"]}},
    "best[0]": lambda layer: {"best": [layer.weight.data]},
    "best": lambda layer: {"best": layer.weight.detach()[0]},
    "net.0.weight": lambda layer: {"net": nn.Sequential(layer)},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_shares_memory_with_what_is_trained_is_refused(name: str) -> None:
    layer = nn.Linear(3, 3, bias=False)
    state = kept(layer)
    state.state_dict()
    vars(state).update(WRONG[name](layer))
    with pytest.raises(ConfigError) as refused:
        state.state_dict()
    assert f"everstep.state: {name} shares memory with what is trained" in str(refused.value)
    assert "tensor.clone()" in str(refused.value)


def test_a_parameter_that_is_put_onto_the_state_s_memory_is_seen() -> None:
    layer = nn.Linear(3, 3)
    state = kept(layer, best=[torch.zeros(3, 3)])
    state.state_dict()
    layer.weight.data = state.best[0]
    with pytest.raises(ConfigError, match=r"best\[0\] shares memory"):
        state.state_dict()


def test_parts_of_a_tensor_are_refused_once_it_is_written() -> None:
    matrix = torch.zeros(3, 3)
    state = kept(nn.Linear(1, 1), matrix=matrix, rows=[matrix[1]], columns=torch.zeros(2, 2).unbind(1))
    state.state_dict()
    matrix.add_(1)
    with pytest.raises(ConfigError, match="shares memory with") as refused:
        state.state_dict()
    assert "matrix" in str(refused.value) and "rows[0]" in str(refused.value)


def test_harmless_sharing_is_none_of_it() -> None:
    layer, data = nn.Linear(3, 3), torch.arange(9.0)
    state = kept(layer, weight=layer.weight, flat=layer.weight.data, rows=list(torch.zeros(2, 2)))
    state.columns = torch.zeros(2, 2).unbind(1)
    state.best = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for k in range(5):
        with torch.no_grad():
            layer.weight.add_(1)
        state.rows[0].add_(1)
        state.columns[0].add_(1)
        state.windows = [data[k : k + 3], data[k + 1 : k + 4]]
        state.empty = torch.zeros(0)
        state.last, state.seen = state.windows[0], [state.windows[0]]
        assert state.state_dict()["values"]["last"] is state.last
