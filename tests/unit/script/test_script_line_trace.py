"""Two records of the same lines show where they became different, and by which name."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from everstep.script.line_trace import LineTrace, first_divergence, first_write, where_written

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
