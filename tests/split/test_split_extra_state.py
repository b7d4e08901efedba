"""Extra state of every shape, of the root module and of nested ones: a job that is stopped and resumed, one whose
worker was healed and one in two stages give the bits of the undisturbed one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from split_run import CPU, SplitRun, config_of, maker, run_split
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import everstep
from everstep import Task
from everstep.exact.extra_state import pack
from everstep.exact.topology import select
from everstep.train.replica import StageReplica
from sampling import mostly_longer

VALUES: dict[str, Any] = {"lanes": 4, "micro_batch": 2}
SAVES = {"checkpoint": {"disk": {"every_steps": 2}}}
STEPS = 4
SHAPES: dict[str, Any] = {
    "none": None,
    "number": 3,
    "text": "é",
    "bytes": b"\0x",
    "empty dict": {},
    "list": [1, [2.5, None]],
    "tuple": (1, (True,)),
    "dict": {"a": 1, 2: torch.ones(2), "inner": {"t": torch.zeros(0)}},
    "tensor": torch.arange(3.0),
    "scalar tensor": torch.tensor(2, dtype=torch.int64),
    "bytes in a tensor": torch.arange(5, dtype=torch.uint8),
}


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.arange(4.0) * (index % 5 + 1) / 4, torch.tensor(index % 2)


class Keeper(nn.Sequential):
    """Its extra state is whatever it was given first, and, where `counts`, how many training passes it has seen."""

    def __init__(self, value: Any, counts: bool, *children: nn.Module) -> None:
        super().__init__(*children)
        self.value, self.counts, self.calls = value, counts, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.counts and self.training
        return super().forward(x) * (1 + 0.01 * self.calls)  # type: ignore[no-any-return]

    def get_extra_state(self) -> Any:
        return (self.value, self.calls) if self.counts else self.value

    def set_extra_state(self, state: Any) -> None:
        if self.counts:
            self.value, self.calls = state
        else:
            self.value = state


def make_model(shape: str, root_counts: bool) -> Keeper:
    inner = Keeper(SHAPES[shape], True, nn.Linear(4, 4), nn.Tanh())
    return Keeper(SHAPES[shape], root_counts, inner, nn.Linear(4, 2))


class Interrupted(Exception):
    """The script ends in the middle of its loop."""


def train(shape: str, run_dir: Path | None, interrupted_in: int | None = None) -> Keeper:
    torch.manual_seed(0)
    model = make_model(shape, True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = everstep.join(model, optimizer, Points(), steps=STEPS, run_dir=run_dir, rehearse=False, **VALUES, **SAVES)
    for step in run:
        for batch in step:
            if step.number == interrupted_in:
                raise Interrupted
            step.backward(functional.cross_entropy(model(batch[0]), batch[1]))
    return model


def facts(model: Keeper) -> list[bytes]:
    named = [*model.named_parameters(), ("root", pack("x", model.get_extra_state()))]
    named += [("inner", pack("x", model[0].get_extra_state()))]  # type: ignore[operator]
    return [f"{name} {t.detach().numpy().tobytes()!r}".encode() for name, t in named]


@pytest.mark.parametrize("shape", mostly_longer(SHAPES, lambda shape: shape in ("none", "bytes", "dict", "tensor")))
def test_a_job_goes_on_from_a_checkpoint_with_the_extra_state_of_root_and_nested_modules(
    shape: str, tmp_path: Path
) -> None:
    undisturbed = train(shape, None)
    with pytest.raises(Interrupted):
        train(shape, tmp_path / "run", interrupted_in=3)
    resumed = train(shape, tmp_path / "run")
    assert resumed.calls == 4 and type(resumed.value) is type(SHAPES[shape])
    assert facts(resumed) == facts(undisturbed)


class Whole(Task):
    defaults: ClassVar[Mapping[str, Any]] = VALUES

    def __init__(self, shape: str) -> None:
        self.shape = shape

    def build_model(self) -> nn.Module:
        return make_model(self.shape, False)  # outside all units: it may not change where there are stages

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def build_dataset(self, split: str) -> Points:
        return Points()

    def build_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("shape", ["none", "dict", "scalar tensor", "bytes in a tensor"])
def test_it_is_healed_and_split(shape: str) -> None:
    task = Whole(shape)
    config = config_of(task, {"steps": STEPS, **VALUES})
    one = run_split(task, ((0, 2),), 1, STEPS, values=VALUES)
    healed = SplitRun(task, config, ((0, 2),), 1, pools=2)
    for step in range(1, STEPS + 1):
        healed.step(step)
        if step == 2:
            donor = healed.workers[0][0].state
            fresh = StageReplica(maker(task, config)(), config, CPU)
            fresh.state.load(donor.manifest(), donor.read_block)
            fresh.prove_update()
            healed.workers[1] = {0: fresh}
    assert healed.digests(STEPS) == one.digests(STEPS)
    split = run_split(task, ((0, 1), (1, 2)), 2, STEPS, values=VALUES)
    assert split.digests(STEPS) == one.digests(STEPS)
    state, whole = one.workers[0][0].state, split.whole()
    assert state.names >= {"_extra_state", "0._extra_state"}
    blocks = [bytes(state.read_block(i)) for i in range(len(whole["blocks"]))]
    fresh_run = SplitRun(task, config, ((0, 1), (1, 2)), 2)
    for stage in fresh_run.workers[0].values():
        needed, where = select(whole, stage.state.names)
        stage.state.load(needed, lambda i, where=where: blocks[where[i]])  # type: ignore[misc]
    assert fresh_run.whole() == whole
