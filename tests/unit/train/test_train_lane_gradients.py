"""`.grad` in the batches is the gradient of that batch, whoever else's a worker adds up; this file does not name it."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep
from everstep.base.errors import TaskError

DATA = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 2)) for i in range(64)]
Wanted = Callable[[int, int], bool]
gradient_of = attrgetter("grad")


def train(wanted: Wanted) -> tuple[nn.Module, list[bool]]:
    """The trained model, and whether each gradient was that of its batch. wanted: of a step, and a count of batches."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    parameters, found = list(model.parameters()), []
    for step in everstep.join(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DATA, lanes=8, micro_batch=2, steps=3
    ):
        for number, (x, y) in enumerate(step):
            loss = nn.functional.cross_entropy(model(x), y)
            own = torch.autograd.grad(loss, parameters, retain_graph=True)
            step.backward(loss)
            if wanted(step.number, number):
                found += [torch.equal(gradient_of(p), g) for p, g in zip(parameters, own, strict=True)]
    return model, found


def test_gradients_of_each_batch_lie_apart_once_the_loop_uses_them() -> None:
    unread, none = train(lambda step, number: False)
    model, found = train(lambda step, number: True)
    assert not none and len(found) >= 3 * 8 * 4 and all(found)
    for one, other in zip(unread.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("first", [(1, 3), (2, 0)])
def test_gradients_that_are_not_used_from_the_first_batch_on_are_refused(first: tuple[int, int]) -> None:
    with pytest.raises(TaskError, match=rf"used .grad of a parameter in step {first[0]}, and not for its first batch"):
        train(lambda step, number: (step, number) >= first)


SCRIPT = """
import torch, everstep

model, same = torch.nn.Linear(4, 2), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.randn(4), torch.tensor(i % 2)) for i in range(64)]
for step in everstep.join(model, optimizer, data, lanes=8, micro_batch=2, steps=3):
    for number, (x, y) in enumerate(step):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        own = torch.autograd.grad(loss, model.weight, retain_graph=True)[0]
        step.backward(loss)
        if step.number == 2 and number % 2:
            same.append(torch.equal(model.weight.grad, own))
"""


def test_a_file_that_names_gradients_may_use_them_in_any_batch(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)
    assert runpy.run_path(str(tmp_path / "loop.py"))["same"] == 4 * [True]


def test_a_helper_in_another_file_may_use_them_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever computes a step for the first time in its life: files that the script can call are looked at, too."""
    (tmp_path / "helper_of_gradients.py").write_text("def norm(model):\n    return model.weight.grad.norm().item()\n")
    text = SCRIPT.replace("import torch, everstep", "import torch, everstep, helper_of_gradients as helper")
    lines = [line for line in text.splitlines() if "grad" not in line or "helper" in line]
    late = "            same += [helper.norm(model)] if (step.number, number) == (2, 3) else []"
    (tmp_path / "train.py").write_text("\n".join([*lines, late]))
    monkeypatch.syspath_prepend(tmp_path)
    assert runpy.run_path(str(tmp_path / "train.py"))["same"]
