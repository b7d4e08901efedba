"""Which uses of `.data` only read, and which may write."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.script.hidden_writes import _NEW, may_hide_writes

IMPORTS = """
import math, mine
import numpy as np
import torch
import torch.nn.functional as F
from torch import stack
from mine import norm, eq
from . import ops
"""
READS = """
_, pred = torch.max(outputs.data, 1)
pred = out.data.max(1)[1]
total += loss.data
total += loss.data[0]
loss.data.item()
p.data.norm()
print(loss.data, f"{loss.data:.3f}", "{} {l}".format(loss.data, l=loss.data), "%f %d" % (loss.data[0], 3))
pred = np.argmax(out.data.cpu().numpy(), axis=1)
correct += pred.eq(target.data.view_as(pred)).cpu().sum()
right = (pred == y.data).sum()
value = float(loss.data) + math.sqrt(loss.data)
norm = torch.cat([p.data.view(-1) for p in model.parameters()]).norm()
norm = stack([a.data, b.data]).sum()
total = sum((p.data ** 2).sum() for p in model.parameters())
total = sum(p.data.sum() for p in model.parameters())
held[name] = p.data.clone()
average = 0.9 * average + 0.1 * p.data
average.mul_(0.9).add_(p.data, alpha=0.1)
writer.add_histogram("weights", p.data.cpu().numpy(), 3)
size = p.data.shape[0], p.data.size(0), p.data.T.dtype
small = -p.data, p.data[0, :3].mean(), x[p.data]
loss = F.cross_entropy(out.data, target=y.data)
best = max(loss.data, 3.0) * 2
loss.data
""".strip().splitlines()
WRITES = """
p.data = x
p.data[...] = x
p.data[0][1] = x
p.data += x
p.data[0] += x
p.data, q = x, y
del p.data
for p.data in x: pass
p.data.copy_(x)
p.data.clamp_(-1, 1)
p.data.view(-1)[0].mul_(2)
p.data.cpu().numpy()[:] = 0
p.data.numpy().sort()
p.data.grad.zero_()
p.data.max.something
write = p.data.mul_
x = p.data
x = p.data[0]
x = p.data.detach().T
x = +p.data
(x := p.data)
x = [p.data for p in model.parameters()]
x += [p.data]
x += p.data, q.data
x = [p.data] + [q.data]
x = max(p.data, q.data)
x = a or p.data
x = {"a": p.data}
x.append(p.data)
x.update(p.data)
clip(p.data)
clip(x=p.data)
mine.norm(p.data)
norm(p.data)
mine.copy_(p.data)
ops.copy_(p.data)
eq(p.data)
self.norm(p.data)
torch.nn.init.zeros_(p.data)
torch.Tensor.mul_(p.data, 2)
torch.nn.Parameter(p.data)
torch.add(x, 1, out=p.data)
np.abs(x, p.data.numpy())
torch._foreach_mul_([p.data for p in x], 2)
x.set_(p.data)
f(*p.data)
for row in p.data: row.mul_(2)
give = lambda p: p.data
def give(p): return p.data
def give(p): yield p.data
with p.data as x: pass
x = p.data if x else q
""".strip().splitlines()


@pytest.mark.parametrize(("line", "may"), [*((line, False) for line in READS), *((line, True) for line in WRITES)])
def test_code_that_may_write_by_data(tmp_path: Path, line: str, may: bool) -> None:
    file = tmp_path / "script.py"
    file.write_text(IMPORTS + line)
    assert may_hide_writes([str(file)]) is may


def test_code_of_several_files_may_write_if_one_may(tmp_path: Path) -> None:
    lines = {"none.py": "x = 3", "reads.py": READS[1], "writes.py": f"{READS[1]}\n{WRITES[0]}"}
    for name, text in lines.items():
        (tmp_path / name).write_text(text)
    assert may_hide_writes(str(tmp_path / name) for name in lines)
    assert not may_hide_writes(str(tmp_path / name) for name in [*lines][:2])


NEEDS: dict[str, Sequence[Any]] = {
    "clamp": (0, 1), "diff": (1, -1), "index_select": (0, torch.tensor([0])), "masked_select": (torch.tensor(True),),
    "new_zeros": (2,), "pow": (1,), "quantile": (0.5,), "repeat": (1, 1), "topk": (1,),
    "where": (torch.tensor(True), 0),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", sorted(name for name in _NEW if hasattr(torch.Tensor, name)))
def test_what_counts_as_new_shares_no_memory_and_writes_none(name: str) -> None:
    results: list[Any] = []
    for form, kind in itertools.product([(1, 1), ()], [torch.float32, torch.int64, torch.bool]):
        tensor = torch.ones(form, dtype=kind)
        flat = tensor.reshape(-1)
        for of, given in itertools.product((tensor, flat), (NEEDS.get(name, ()), (tensor,), (flat,), (0,))):
            with contextlib.suppress(RuntimeError, TypeError, IndexError):  # not for such a tensor, or such arguments
                found = getattr(of, name)(*given)
                found = found if isinstance(found, tuple) else (found,)
                assert tensor.data_ptr() not in [one.data_ptr() for one in found if isinstance(one, torch.Tensor)]
                results.append(found)
        assert torch.equal(tensor, torch.ones(form, dtype=kind))
    assert results
