"""Two records of the same lines show where they became different, and by which name."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.base.errors import Restructured
from everstep.exact.structure import Structure
from everstep.script.line_trace import LineTrace, first_divergence, first_write, where_restructured, where_written

_CODE = """
class Net:
    def __init__(self):
        self.last = None
    def __call__(self, x):
        h = x * 2
        if self.last is not None:
            h = h + self.last
        self.last = h
        return h
net = Net()
def batch(x):
    x = net(x)
    return x
def drawn(x):
    x = x + next(source)
    return x
def order(x, names):
    total = 0
    for name in names:
        total = total * 3 + len(name)
    return total
def write(x, weight):
    y = x + 1
    weight.add_(1)
    return y
"""


def module(folder: Path) -> types.ModuleType:
    path = folder / "user_code.py"
    path.write_text(_CODE)
    found = types.ModuleType("user_code")
    found.__file__ = str(path)
    exec(compile(_CODE, str(path), "exec"), vars(found))
    return found


def traced(calls: dict[str, Callable[[], Any]], watched: tuple[torch.Tensor, ...] = ()) -> LineTrace:
    before, trace = sys.gettrace(), LineTrace()
    trace.watch(watched)
    trace.start()
    try:
        for part, call in calls.items():
            trace.mark(part)
            call()
            trace.mark("")
    finally:
        sys.settrace(before)
    return trace


def test_an_attribute_that_is_kept_from_call_to_call(tmp_path: Path) -> None:
    user, x = module(tmp_path), torch.ones(2)
    parts = traced({"first": partial(user.batch, x), "again": partial(user.batch, x)}).parts
    found = first_divergence(parts["first"], parts["again"])
    assert found is not None and (found.object, found.line, found.made) == ("self.last", 7, False)
    assert where_written("self.last", found.file, found.line) in (4, 9)
    parts = traced({"first": partial(user.order, x, "ab"), "again": partial(user.order, x, "ab")}).parts
    assert first_divergence(parts["first"], parts["again"]) is None


def test_a_value_that_comes_from_nowhere(tmp_path: Path) -> None:
    user, x = module(tmp_path), torch.ones(2)
    values = iter((1, 2))
    user.source = types.SimpleNamespace()  # type: ignore[attr-defined]
    vars(user)["next"] = lambda _: next(values)
    parts = traced({"first": partial(user.drawn, x), "again": partial(user.drawn, x)}).parts
    found = first_divergence(parts["first"], parts["again"])
    assert found is not None and (found.object, found.line, found.made) == ("x", 16, True)


def test_the_order_of_a_set(tmp_path: Path) -> None:
    user, x = module(tmp_path), torch.ones(2)
    calls = {"first": partial(user.order, x, ["a", "bb"]), "again": partial(user.order, x, ["bb", "a"])}
    parts = traced(calls).parts
    found = first_divergence(parts["first"], parts["again"])
    assert found is not None and (found.object, found.line) == ("names", 20)


def test_the_line_that_writes_to_a_parameter(tmp_path: Path) -> None:
    user, weight = module(tmp_path), torch.ones(2)
    parts = traced({"first": partial(user.write, torch.ones(2), weight)}, (weight,)).parts
    found = first_write(parts["first"])
    assert found is not None and (found.object, found.line) == ("weight", 25)


_LOOP = """
net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
net.head, net.history, group, batch = nn.Linear(2, 2), [], {"lr": 0.1}, {"x": torch.ones(2)}
optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
run = join(net, optimizer)
for step in run:
    group["lr"] = float(step)
    batch["x"] = batch["x"].to("cpu")
    net.history.append(float(step))
    net.rate = float(step)
    optimizer.param_groups[0]["lr"] = float(step)
    batch["x"].requires_grad_().register_hook(print)
"""
_CHANGES = {
    "an attribute": ("net.head = nn.ReLU()", "net.head"),
    "an attribute in a tuple": ("spare, net.head = net.head, nn.ReLU()", "net.head"),
    "deleted": ("del net.head", "net.head"),
    "a number": ("net[1] = nn.ReLU()", "net[1]"),
    "a number that is not written there": ("net[len(net) - 2] = nn.ReLU()", "net[len(net) - 2]"),
    "a list": ("net.append(nn.ReLU())", "net"),
    "a parameter": ("net.head.bias = nn.Parameter(torch.ones(2))", "net.head.bias"),
    "a module by its name": ("net.add_module('more', nn.ReLU())", "net"),
    "a hook": ("net[0].register_forward_hook(print)", "net[0]"),
    "a hook of a parameter": ("net[0].weight.register_hook(print)", "net[0].weight"),
    "a group": ("optimizer.add_param_group({'params': [net.head.bias]})", "optimizer"),
    "parameters of a group": ("optimizer.param_groups[0]['params'].append(net.head.bias)", "optimizer.param_groups[0]"),
    "by another name": ("other = net; other.head = nn.ReLU()", ""),
    "by a function": ("setattr(net, 'head', nn.ReLU())", ""),
}


@pytest.mark.parametrize("case", _CHANGES)
def test_the_line_that_changes_the_structure_is_named_and_no_other(case: str, tmp_path: Path) -> None:
    change, name = _CHANGES[case]
    path, made = tmp_path / "user_code.py", list[Structure]()
    path.write_text(_LOOP + "    " + change)

    def join(*given: Any) -> list[int]:
        made.append(Structure(*given))
        return [1]

    exec(compile(path.read_text(), str(path), "exec"), {"torch": torch, "nn": torch.nn, "join": join})
    with pytest.raises(Restructured) as refused:
        made[0].check(lanes=False)
    found = where_restructured(str(path), 6, str(refused.value))
    assert (found is not None) == bool(name)
    assert found is None or (found.object.startswith(name) and found.line == 13), found
