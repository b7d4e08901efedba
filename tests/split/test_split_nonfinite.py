"""A step whose loss or gradient is not finite: what is concluded from its records, and what becomes of it, on any
number of workers and stages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from split_run import SplitRun, config_of, run_split
from torch import Tensor, nn
from torch.nn import functional

import everstep
from everstep import Task
from everstep.base.errors import NonFinite
from everstep.protocol.driver.nonfinite import Nonfinite, NonfiniteRule, judged

STEPS = 3
VALUES: dict[str, Any] = {"lanes": 4, "micro_batch": 2}


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """One sample is not finite."""

    def __init__(self, odd: float) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(4.0) * (index % 5 + 1) / 4
        return (row + self.odd if index == 3 else row), torch.tensor(index % 2)


class Strange(Task):
    """BatchNorm, momentum and a schedule. odd: added to one sample. root: a square root with no derivative at zero."""

    def __init__(self, odd: float, root: bool = False) -> None:
        self.odd, self.root = odd, root

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def build_dataset(self, split: str) -> Rows:
        return Rows(self.odd)

    def build_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        loss = functional.cross_entropy(out, batch[1])
        return loss + ((out - out.detach()).abs().sum() ** 0.5 * 0 if self.root else 0)


@pytest.mark.parametrize("policy", ["skip", "stop"])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_step_that_is_left_out_changes_nothing_anywhere(policy: str, odd: float) -> None:
    values = {**VALUES, "on_nonfinite": policy}
    one = run_split(Strange(odd), ((0, 3),), 1, STEPS, values=values)
    bad = [k for k, loss in enumerate(one.losses, 1) if not math.isfinite(loss)]
    assert len(bad) == 1
    assert run_split(Strange(odd), ((0, 3),), 1, STEPS, values=values, pools=3).digests(STEPS) == one.digests(STEPS)
    split = run_split(Strange(odd), ((0, 1), (1, 3)), 2, STEPS, values=values)
    assert split.digests(STEPS) == one.digests(STEPS)
    assert all(t.isfinite().all() for t in one.workers[0][0].parts.model.state_dict().values())
    task = Strange(odd)
    run = SplitRun(task, config_of(task, {"steps": STEPS, **values}), ((0, 3),), 1)
    for step in range(1, STEPS + 1):
        before = run.digests(0)
        run.step(step)
        assert (run.digests(0) == before) == (step in bad)


def test_by_default_it_is_applied() -> None:
    task = Strange(math.nan)
    run = run_split(task, ((0, 3),), 1, STEPS, values=VALUES)
    assert not all(t.isfinite().all() for t in run.workers[0][0].parts.model.state_dict().values())


def test_a_gradient_that_is_not_finite_alone_is_left_out_too() -> None:
    values = {**VALUES, "on_nonfinite": "skip"}
    task = Strange(0.0, root=True)
    run = SplitRun(task, config_of(task, {"steps": STEPS, **values}), ((0, 3),), 1, pools=2)
    before = run.digests(0)
    run.step(1)
    assert run.digests(0) == before and math.isfinite(run.losses[0])


def of_step_20(rule: NonfiniteRule, *lanes: int, gradient: bool = True, before: int = 0) -> Nonfinite:
    return judged(20, lanes, before, rule, gradient=gradient)


def test_words() -> None:
    plain, scaled = NonfiniteRule("warn", 10, False), NonfiniteRule("warn", 10, True)
    assert of_step_20(plain, before=9) == of_step_20(scaled, gradient=False, before=9)  # it halves its scale
    assert not of_step_20(plain, before=9).words
    assert of_step_20(scaled, 3).words == "the loss of lane 3 is not finite"
    assert of_step_20(plain, 0, 3, gradient=False).words == "the loss of lanes 0, 3 is not finite"
    assert "the gradient is not finite" in of_step_20(plain, gradient=False).words


def test_so_many_in_a_row_end_the_job() -> None:
    for policy in ("warn", "skip"):
        found = of_step_20(NonfiniteRule(policy, 10, False), 3, before=9)
        assert (found.in_a_row, found.left_out) == (10, policy == "skip")
        assert "as in all steps since 11 (nonfinite_limit is 10)" in found.ends
        assert not of_step_20(NonfiniteRule(policy, 11, False), 3, before=9).ends
        assert not of_step_20(NonfiniteRule(policy, 0, False), 3, before=9).ends
    assert "on_nonfinite: stop" in of_step_20(NonfiniteRule("stop", 0, False), 3).ends


def test_a_script_by_itself_stops_with_a_checkpoint_and_goes_on_from_it(tmp_path: Any) -> None:
    def train(policy: str, run_dir: Any) -> nn.Module:
        torch.manual_seed(0)
        task = Strange(math.nan)
        model = task.build_model()
        optimizer = task.build_optimizer(model.parameters())
        run = everstep.join(
            model, optimizer, Rows(math.nan), lanes=4, micro_batch=2, steps=STEPS, run_dir=run_dir, on_nonfinite=policy
        )
        for step in run:
            for batch in step:
                step.backward(task.loss(model, batch))
        return model

    undisturbed = train("skip", tmp_path / "skip").state_dict()
    with pytest.raises(NonFinite, match=r"step \d: the loss of lane \d is not finite; its update is left out"):
        train("stop", tmp_path / "stop")
    assert list((tmp_path / "stop" / "checkpoints").glob("step-*"))
    found = train("skip", tmp_path / "stop").state_dict()
    assert all(torch.equal(found[name], undisturbed[name]) for name in found)
