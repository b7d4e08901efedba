"""A state that is recalled is the state that would be collected anew, whatever changed in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from everstep.exact.recollect import Recollection
from everstep.exact.state import ModelState


class Counter:
    """State of a user's loop."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"seen": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


def make() -> ModelState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = ModelState(model, optimizer, scheduler, {"loop": Counter()}, list(model))
    step(state)
    return state


def step(state: ModelState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.randn(4, 6)).sum().backward()
    state.optimizer.step()
    state.scheduler.step()
    state.extras["loop"].values["seen"] += 1


def snapshot_manifest(state: ModelState) -> dict[str, Any]:
    snapshot = state.clone_snapshot()
    snapshot.start()
    found = snapshot.manifest()
    snapshot.release()
    return found


def swap_parameter(state: ModelState) -> None:
    with torch.no_grad():
        state.model[0].weight.data = state.model[0].weight.data + 1


def swap_buffer(state: ModelState) -> None:
    state.model[1].running_mean = torch.ones(5)


def swap_moment(state: ModelState) -> None:
    state.optimizer.state[state.model[0].weight]["exp_avg"] = torch.ones(5, 6)


def swap_moment_memory(state: ModelState) -> None:
    state.optimizer.state[state.model[0].weight]["exp_avg"].data = torch.ones(5, 6)


def more_state(state: ModelState) -> None:
    state.optimizer.state[state.model[0].weight]["more"] = 3


def tensor_in_the_loop(state: ModelState) -> None:
    state.extras["loop"].values["running"] = torch.arange(3)


def other_tensor_in_the_loop(state: ModelState) -> None:
    tensor_in_the_loop(state)
    snapshot_manifest(state)
    state.extras["loop"].values["running"] = torch.arange(4.0)


def load(state: ModelState) -> None:
    other = make()
    step(other)
    manifest = other.manifest()
    state.load(manifest, other.read_block)


@pytest.mark.parametrize(
    "change",
    [
        step,
        swap_parameter,
        swap_buffer,
        swap_moment,
        swap_moment_memory,
        more_state,
        tensor_in_the_loop,
        other_tensor_in_the_loop,
        load,
        lambda state: state.optimizer.state.clear(),
        lambda state: state.optimizer.param_groups[0].update(lr=0.5),
        lambda state: state.model.append(nn.Linear(2, 2)),
        lambda state: state.model[1].running_var.add_(1),
    ],
)
def test_whatever_changes_is_seen(change: Callable[[ModelState], object]) -> None:
    state = make()
    assert snapshot_manifest(state) == state.manifest()
    change(state)
    assert snapshot_manifest(state) == state.manifest()
    assert snapshot_manifest(state) == state.manifest()


def test_it_is_recalled_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make()
    snapshot_manifest(state)
    found = []
    recall = Recollection.recall
    monkeypatch.setattr(Recollection, "recall", lambda self: found.append(recall(self)) or found[-1])
    for _ in range(3):
        step(state)
        assert snapshot_manifest(state) == state.manifest()
    assert all(item is not None for item in found)
