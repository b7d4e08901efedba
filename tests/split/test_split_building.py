"""What a stage is made of, what cannot be cut, and how a state comes from one topology into another."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from split_run import CPU, SplitRun, Text, config_of, maker, run_split
from torch import nn, optim

from everstep.base.errors import ConfigError, InvariantViolation, TaskError
from everstep.exact.image import FOREIGN
from everstep.exact.state import ModelState
from everstep.exact.topology import merge, merge_with_sources, select, state_digest
from everstep.train.composition import check_units, measure_costs
from everstep.train.stage import Parts, build_by_module, build_model, cut_out
from everstep.zoo.digits import MLPDigits, ResNet18Digits
from sampling import mostly_longer

SMALL = {"limit_bytes": 60_000, "context": 16, "layers": 4, "width": 32, "heads": 2}
VALUES: dict[str, Any] = {"lanes": 2, "micro_batch": 2, "clip_norm": 0.5, "task": SMALL}


def matrices(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in params if p.ndim == 2]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p[::-1], lr=0.1, momentum=0.9),
    "adamw": lambda p: optim.AdamW([{"params": matrices(p)}, {"params": [x for x in p if x.ndim != 2], "lr": 1e-3}]),
    "adamw-fused": lambda p: optim.AdamW(p, lr=torch.tensor(1e-3), fused=True),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "muon": lambda p: optim.Muon(matrices(p), lr=0.01),
}


def text_with(name: str) -> Text:
    task = Text()
    task.build_optimizer = lambda params: OPTIMIZERS[name](list(params))  # type: ignore[method-assign]
    return task


def random_cut(units: int, parts: int, seed: int) -> tuple[tuple[int, int], ...]:
    ends = [0, *sorted(random.Random(seed).sample(range(1, units), parts - 1)), units]
    return tuple((ends[k], ends[k + 1]) for k in range(parts))


@pytest.mark.parametrize("name", mostly_longer(OPTIMIZERS, lambda name: name not in ("adamw-fused", "adagrad")))
def test_states_go_from_any_topology_to_any_other(name: str) -> None:
    one = run_split(text_with(name), ((0, 6),), 1, 2, values=VALUES)
    whole = one.whole()
    blocks = [bytes(one.workers[0][0].state.read_block(i)) for i in range(len(whole["blocks"]))]
    for parts in (2, 3):
        seed = parts + len(name)
        split = run_split(text_with(name), random_cut(6, parts, seed), parts, 2, values=VALUES)
        merged, sources = merge_with_sources(split.manifests())
        assert merged == whole
        found = [bytes(split.workers[0][k].state.read_block(i)) for k, i in sources]
        assert found == blocks
        task = text_with(name)
        fresh = SplitRun(task, config_of(task, {"steps": 9, **VALUES}), random_cut(6, 3, seed + 7), 3)
        for stage in fresh.workers[0].values():
            needed, where = select(whole, stage.state.names)
            stage.state.load(needed, lambda i, where=where: blocks[where[i]])  # type: ignore[misc]
        assert fresh.whole() == whole


def test_stages_that_differ_are_named() -> None:
    split = run_split(text_with("sgd"), ((0, 3), (3, 6)), 2, 1, values=VALUES)
    assert any(label == FOREIGN for label, _ in split.manifests()[1]["groups"])
    with torch.no_grad():
        split.workers[0][1].parts.model.head.weight[0, 0] += 1  # type: ignore[union-attr, index, operator]
    with pytest.raises(InvariantViolation, match=r"tied model/embedding\.tokens\.weight"):
        split.whole()
    with pytest.raises(InvariantViolation, match="hold units"):
        merge(split.manifests()[:1])


def test_what_other_stages_have_takes_no_memory_here() -> None:
    task = MLPDigits()
    whole = maker(task, config_of(task, {}))()
    first = whole.units[0]
    parts, spec = cut_out(whole, ((0, 1), (1, 2), (2, 3)), 3, 1)
    assert [n for n, _ in parts.model.named_parameters()] == ["1.0.weight", "1.0.bias"]
    assert spec.units == (1,) and not list(first.parameters())
    assert sum(len(g["params"]) for g in parts.optimizer.param_groups) == 2


def parts_of(model: nn.Module, units: list[nn.Module]) -> Parts:
    return Parts(model, optim.SGD(model.parameters(), lr=0.1), None, units)


def test_what_cannot_be_cut() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="use at most 2 parts"):
        cut_out(parts_of(model, list(model)), ((0, 1), (1, 2), (2, 3)), 3, 0)
    model[1].weight = nn.Parameter(model[0].weight.detach())
    with pytest.raises(ConfigError, match=r"0\.weight \(unit 0, stage 0\) and 1\.weight \(unit 1, stage 1\) share"):
        cut_out(parts_of(model, list(model)), ((0, 1), (1, 2)), 2, 0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    with pytest.raises(ConfigError, match="outside all units"):
        cut_out(parts_of(model, list(model)[:2]), ((0, 1), (1, 2)), 2, 0)


class Wrong(MLPDigits):
    how = ""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        images, labels = batch
        if self.how == "never":
            return torch.zeros((), requires_grad=True)
        if self.how == "grad":
            return model(images.requires_grad_()).sum()
        if self.how == "twice":
            return (model(images) + model(images)).sum()
        if self.how == "batch":
            return nn.functional.cross_entropy(model(images.mul_(2)), labels)
        return super().loss(model, batch)

    def units(self, model: nn.Module) -> list[nn.Module]:
        units = super().units(model)
        if self.how == "shape":
            units[2].register_forward_pre_hook(lambda _, args: args[0][:, 1:])
        if self.how == "object":
            units[0].register_forward_hook(lambda *_: object())
        return units


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("never", "never called the model"),
        ("grad", "requires a gradient"),
        ("twice", "called the model twice"),
        ("batch", "changes its batch in place"),
        ("object", r"output of unit 0 \(Sequential\) has a object"),
        ("shape", r"unit 2 \(\w+\) of stage 1 raised RuntimeError: mat1 and mat2"),
    ],
)
def test_tasks_that_cannot_be_split_are_told_in_one_line(how: str, said: str) -> None:
    task = Wrong()
    task.how = how
    with pytest.raises(TaskError, match=said):
        run_split(task, ((0, 1), (1, 3)), 2, 1, values={"lanes": 2})


def test_units_that_are_not_the_model() -> None:
    task = Text()
    config = config_of(task, VALUES)
    whole = maker(task, config)()
    before = ModelState(whole.model).model_digest()
    batch = torch.arange(34).reshape(2, 17)
    check_units(whole, task.loss, batch, config, CPU)
    assert len(measure_costs(whole, task.loss, batch, config, CPU)) == 6
    assert ModelState(whole.model).model_digest() == before
    assert all(p.grad is None for p in whole.model.parameters())
    whole = replace(whole, units=[*whole.units[:2], *whole.units[3:]])
    with pytest.raises(ConfigError, match="output differs"):
        check_units(whole, task.loss, batch, config, CPU)


def test_models_are_made_module_by_module() -> None:
    def build() -> nn.Module:
        shared = nn.Linear(6, 6)
        last = nn.Linear(6, 6)
        last.weight = shared.weight
        return nn.Sequential(shared, nn.BatchNorm1d(6), nn.Sequential(nn.ReLU(), last))

    whole, _ = build_by_module(build, lambda m: list(m.children()), 3, CPU)
    assert whole[2][1].weight is whole[0].weight and whole[0].weight.std() > 0  # type: ignore[index, union-attr]
    for k in range(3):
        _, units = build_by_module(build, lambda m: list(m.children()), 3, CPU, [k])
        mine, theirs = units[k].state_dict(), whole[k].state_dict()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    with pytest.raises(ConfigError, match=r"module 0 \(Bare\)"):
        build_by_module(lambda: nn.Sequential(Bare()), lambda m: [m], 0, CPU)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def test_digest_of_a_manifest_is_that_of_the_state() -> None:
    one = run_split(Text(), ((0, 6),), 1, 1, values=VALUES)
    state = one.workers[0][0].state
    assert state_digest(one.whole(), 1) == state.state_digest(1) != state_digest(one.whole(), 2)


@pytest.mark.parametrize("task", [Text, ResNet18Digits])
def test_ready_models_are_made_module_by_module_in_any_topology(task: Any) -> None:
    it = task()
    config = config_of(it, {"steps": 1, "meta_init": True, **({"task": SMALL} if task is Text else {})})
    whole, units = build_model(it, config, CPU)
    last = len(units) - 1
    _, again = build_model(it, config, CPU, [last])
    theirs = units[last].state_dict()
    assert all(torch.equal(t, theirs[name]) and t.device == CPU for name, t in again[last].state_dict().items())
    optimizer = it.build_optimizer(list(whole.parameters()))
    parts, _ = cut_out(Parts(whole, optimizer, None, units), ((0, last), (last, last + 1)), 2, 1)
    assert all(not p.is_meta for p in parts.model.parameters())


class _Borrows(nn.Module):
    """Uses another module's weight without having it."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 10)
        self._other = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x @ self._other[0].weight)  # type: ignore[no-any-return]


def test_a_use_of_a_parameter_of_another_part_is_seen() -> None:
    class Hidden(MLPDigits):
        def build_model(self) -> nn.Module:
            first = nn.Linear(8, 8)
            return nn.Sequential(first, nn.ReLU(), _Borrows(first))

        def units(self, model: nn.Module) -> list[nn.Module]:
            return list(model.children())

    task = Hidden()
    config = config_of(task, {"lanes": 4, "micro_batch": 4})
    whole, batch = maker(task, config)(), (torch.randn(4, 8), torch.zeros(4, dtype=torch.long))

    def loss(model: nn.Module, given: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(given[0]), given[1])

    check_units(whole, loss, batch, config, CPU, ((0, 3),))
    with pytest.raises(ConfigError, match=r"unit 2 \(_Borrows\) uses parameter 0\.weight of unit 0"):
        check_units(whole, loss, batch, config, CPU, ((0, 2), (2, 3)))
