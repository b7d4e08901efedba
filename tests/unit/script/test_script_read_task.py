"""Tasks whose dataset keeps something between samples: what training depends on is refused, and nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from everstep.script.carried_names import Read, Trained, read_task

TASK = """
from collections import OrderedDict
import torch
from torch import nn
from everstep import Task

class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.cache, self.order, self.lru, self.max_len, self.n = {{}}, [], OrderedDict(), 0, 0
    def __len__(self): return 32
    def load(self, i): return torch.ones(4) * i
    def one(self, x): return x + 1
    def two(self, x): return x + 2
    def __getitem__(self, i):
        {}

class Own(Task):
    def build_model(self): return nn.Linear(4, 2)
    def build_dataset(self, split): return Data()
    def build_optimizer(self, params): return torch.optim.SGD(params, lr=0.1)
    def loss(self, model, batch): return model(batch).square().sum(), torch.tensor(1.0)
"""
FIRST = "self.cache.pop(next(iter(self.cache)))"
LOADED = "x = self.load(i)"
CLEAN = {
    "pop before": (
        "if i not in self.cache:",
        f"    if len(self.cache) > 8: {FIRST}",
        "    self.cache[i] = self.load(i)",
        "return self.cache[i]",
    ),
    "pop after": (
        "x = self.cache.get(i)",
        "if x is None:",
        "    x = self.cache[i] = self.load(i)",
        f"    while len(self.cache) > 8: {FIRST}",
        "return x",
    ),
    "pop smallest": (
        "if i in self.cache: return self.cache[i]",
        LOADED,
        "self.cache[i] = x",
        "if len(self.cache) > 8: self.cache.pop(min(self.cache))",
        "return x",
    ),
    "pop oldest": (
        "if i not in self.cache:",
        "    if len(self.order) >= 8: self.cache.pop(self.order.pop(0))",
        "    self.cache[i] = self.load(i)",
        "    self.order.append(i)",
        "return self.cache[i]",
    ),
    "del": (
        "if i not in self.cache:",
        "    if len(self.cache) > 8: del self.cache[next(iter(self.cache))]",
        "    self.cache[i] = self.load(i)",
        "return self.cache[i]",
    ),
    "least recently used": (
        "if i not in self.lru:",
        "    self.lru[i] = self.load(i)",
        "    if len(self.lru) > 8: self.lru.popitem(last=False)",
        "self.lru.move_to_end(i)",
        "return self.lru[i]",
    ),
    "method by name": ("self.n += 1", "return getattr(self, ('one', 'two')[i % 2])(self.load(i))"),
    "method by name, kept": (
        "if i not in self.cache: self.cache[i] = getattr(self, ('one', 'two')[i % 2])(self.load(i))",
        "return self.cache[i]",
    ),
    "longest": (LOADED, "self.max_len = max(self.max_len, len(x))", "return x"),
    "longest, method by name": (
        "x = getattr(self, 'one' if i % 2 else 'two')(self.load(i))",
        "self.max_len = max(self.max_len, len(x))",
        "return x",
    ),
}
BAD = {
    "popped entry": ("y = self.cache.pop(i - 1, 0)", "self.cache[i] = i", "return self.load(i) + y"),
    "first entry": (f"y = {FIRST} if self.cache else 0", "self.cache[i] = i", "return self.load(i) + y"),
    "popped from a list": ("self.order.append(i)", "return self.load(i) + self.order.pop(0)"),
    "rest of a list": ("self.order.append(i)", "self.order.pop(0)", "return self.load(i) + self.order[0]"),
    "drawn and kept": (
        "if i not in self.cache: self.cache[i] = torch.rand(4)",
        f"if len(self.cache) > 8: {FIRST}",
        "return self.cache[i]",
    ),
    "drawn and kept, del": (
        "if i not in self.cache: self.cache[i] = torch.rand(4)",
        "if len(self.cache) > 8: del self.cache[min(self.cache)]",
        "return self.cache[i]",
    ),
    "sum of the rest": (
        f"if len(self.cache) > 8: {FIRST}",
        "self.cache[i] = i",
        "return self.load(i) + sum(self.cache.values())",
    ),
    "another entry": (
        f"if len(self.cache) > 8: {FIRST}",
        "self.cache[i] = i",
        "return self.load(i) + self.cache.get(i - 1, 0)",
    ),
    "whether there is one": (
        "y = 0",
        "try:",
        "    self.lru.pop(i)",
        "except KeyError:",
        "    y = 1",
        "self.lru[i] = self.max_len = y + self.max_len",
        "return self.load(i) + y",
    ),
    "number of the rest": (
        f"if len(self.cache) > 8: {FIRST}",
        "self.cache[i] = i",
        "return self.load(i) + len(self.cache)",
    ),
    "attribute by name": ("self.n += 1", "return self.load(i) * getattr(self, ('n', 'max_len')[i % 2])"),
    "method by a counted name": ("self.n += 1", "return getattr(self, ('one', 'two')[self.n % 2])(self.load(i))"),
    "function by name": (
        "self.n += 1",
        "n = self.n",
        "self.f0 = lambda x: x + n",
        "return getattr(self, 'f%d' % (i % 1))(self.load(i))",
    ),
    "padded to the longest": (
        LOADED,
        "self.max_len = max(self.max_len, len(x))",
        "return nn.functional.pad(x, (0, self.max_len - len(x)))",
    ),
}


def read(folder: Path, lines: tuple[str, ...]) -> Read:
    path = folder / "own_task.py"
    path.write_text(TASK.format("\n        ".join(lines)))
    spec = importlib.util.spec_from_file_location("own_task", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # by which a class is known as the user's
    spec.loader.exec_module(module)
    task = module.Own()
    model, dataset = task.build_model(), task.build_dataset("train")
    optimizer = task.build_optimizer(model.parameters())
    return read_task(task, Trained(model, optimizer, None, (), dataset, task.collate, lambda thing: False))


@pytest.mark.parametrize("name", CLEAN)
def test_what_cannot_matter_is_accepted(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, CLEAN[name])
    assert not found.carried and not found.notes


@pytest.mark.parametrize("name", BAD)
def test_what_training_depends_on_is_refused(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, BAD[name]).carried
