"""Planes: what goes where, which blocks a share has, and how those of stages become those of the whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from everstep.exact.image import FOREIGN, OUTSIDE, VALUES, planes_of
from everstep.exact.layout import untie
from everstep.exact.state import ModelState, Share
from everstep.exact.topology import merge, merge_with_sources, select

Found = dict[str, tuple[int, list[list[int]]]]


class Layer(nn.Module):
    """`big` takes up an odd number of element blocks, and shares its unit with two other types and a buffer."""

    def __init__(self, size: int = 140_000) -> None:
        super().__init__()
        self.big = nn.Parameter(torch.randn(size))
        self.low = nn.Parameter(torch.randn(40_000).bfloat16())
        self.norm = nn.BatchNorm1d(4)


def trained(units: int = 3, seed: int = 1) -> tuple[nn.Sequential, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Layer(140_000 if k % 2 == 0 else 60_000) for k in range(units)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def stage(seed: int, units: tuple[int, ...], n_units: int = 3) -> ModelState:
    """The state of some units."""
    model, optimizer = copy.deepcopy(trained(n_units, seed))
    group = optimizer.param_groups[0]
    own = [k for k, p in enumerate(group["params"]) if any(p is q for u in units for q in model[u].parameters())]
    group["params"] = [group["params"][k] for k in own]
    optimizer.state = {p: state for p, state in optimizer.state.items() if any(p is q for q in group["params"])}
    mine = [model[u] for u in units]
    for u in set(range(n_units)) - set(units):
        del model._modules[str(u)]
    return ModelState(model, optimizer, units=mine, share=Share(units, n_units, {}, (tuple(own),)))


def planes_in(manifest: dict[str, Any]) -> Found:
    return {name: (size, runs) for name, size, runs in manifest["planes"]}


def test_one_plane_per_kind_and_type() -> None:
    model, optimizer = trained()
    state = ModelState(model, optimizer, units=list(model))
    manifest = state.manifest()
    found = planes_in(manifest)
    kinds = ["model", "optimizer/exp_avg", "optimizer/exp_avg_sq"]
    assert list(found) == [*(name for kind in kinds for name in (kind, f"{kind}:bfloat16")), "rest"]
    assert found["model"] == (4, [[0, 0, 8]]), "units of 3, 2 and 3 blocks"
    assert found["model:bfloat16"] == (2, [[2, 8, 1], [3, 9, 1], [7, 10, 1]]), "a block ends where its unit does"
    by_name = {row[0]: row for row in manifest["entries"]}
    rest = planes_of(manifest)[-1]
    for name in ("model/1.norm.running_mean", "optimizer/2.big/step", "optimizer/2.low/step"):
        assert rest.start <= by_name[name][3] // (1 << 18) < rest.stop
    assert [label for label, _ in manifest["groups"]] == [0, 1, 2] * 7


@pytest.mark.parametrize("cuts", [((0,), (1, 2)), ((0, 2), (1,)), ((2,), (0,), (1,))], ids=str)
def test_stages_make_up_the_whole(cuts: tuple[tuple[int, ...], ...]) -> None:
    model, optimizer = trained()
    state = ModelState(model, optimizer, units=list(model))
    whole = state.manifest()
    stages = [stage(1, units) for units in cuts]
    manifests = [s.manifest() for s in stages]
    merged, sources = merge_with_sources(manifests)
    assert merged == whole
    assert [bytes(stages[k].read_block(i)) for k, i in sources] == [
        bytes(state.read_block(i)) for i in range(state.n_blocks)
    ]
    others = [stage(7, units) for units in cuts]
    for other in others:
        needed, blocks = select(whole, other.names)
        assert {name for name, _, _ in needed["planes"]} == {name for name, _, _ in whole["planes"]}
        assert [block for plane in planes_of(needed) for block in plane.grid()] == list(range(len(needed["blocks"])))
        other.load(needed, lambda i, blocks=blocks: state.read_block(blocks[i]))  # type: ignore[misc]
    assert merge([other.manifest() for other in others]) == whole


class Turned(nn.Module):
    """The module with the second use of a parameter is registered first, so the parameter bears its name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(300, 250, bias=False)
        self.first = nn.Linear(300, 250)
        self.first.weight = self.head.weight


def test_a_tied_parameter_lies_where_it_is_used_first() -> None:
    model = Turned()
    units = [model.first, model.head]
    untie(model, units)
    state = ModelState(model, units=units)
    manifest = state.manifest()
    assert [row[0] for row in manifest["entries"]] == ["model/head.weight", "model/first.bias"]
    assert manifest["planes"] == [["model", 4, [[0, 0, 2]]]] and manifest["groups"] == [[0, 2]]
    fresh = Turned()
    ModelState(fresh).load(manifest, state.read_block)
    assert torch.equal(fresh.head.weight, model.head.weight)


class Odd(nn.Module):
    """What has no place on the grid, or not all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))


def test_what_is_not_element_wise_is_in_the_rest() -> None:
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    optimizer.state[model.weight] = {
        "row": torch.ones(6, 1),
        "wide": torch.ones(6, 5, dtype=torch.float64),
        "quantised": torch.ones(6, 5, dtype=torch.uint8),
        "a:b": torch.ones(6, 5),
        "nested": {"deep": torch.ones(6, 5)},
    }
    state = ModelState(model, optimizer, units=[model])
    manifest = state.manifest()
    assert manifest["groups"] == [[0, 2], [0, 1], [0, 7], [VALUES, 1]]
    assert [plane.name for plane in planes_of(manifest)] == ["model", "optimizer/quantised:uint8", "rest"]
    assert [row[0] for row in manifest["entries"][:2]] == ["model/weight", "model/scale"]
    before = {row[0]: row[3] for row in manifest["entries"]}
    model.frozen.requires_grad_(True)
    model.weight.requires_grad_(False)
    assert {row[0]: row[3] for row in state.manifest()["entries"]} == before, "a place is for good"
    fresh = Odd()
    other = ModelState(fresh, torch.optim.SGD(fresh.parameters(), lr=torch.tensor(0.3)))
    other.load(manifest, state.read_block)
    assert other.state_digest(1) == state.state_digest(1)
    assert {label for label, _ in other.manifest()["groups"]} == {OUTSIDE, VALUES} and FOREIGN == -3
