"""torch._dynamo is not imported for an optimizer or a model on the meta device, and is itself as soon as something else
asks for it."""

from __future__ import annotations

import subprocess
import sys

KINDS = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Adafactor",
)
LIVES = f"""
KINDS = {KINDS}
import os, sys
import torch

if os.fork() == 0:
    from torch import _dynamo
    from everstep.exact import lazy_dynamo
    assert torch._dynamo is _dynamo
    lazy_dynamo.use_deterministic_algorithms()
    from torch._inductor import config
    assert config.deterministic
    os._exit(0)
assert os.wait()[1] == 0, "loaded before"

from everstep.exact import lazy_dynamo

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
lazy_dynamo.use_deterministic_algorithms()
kinds = [getattr(torch.optim, name) for name in KINDS]
optimizers = [kind(model.parameters(), lr=0.1) for kind in kinds]

def updates():
    for optimizer in optimizers:
        loss = model(torch.ones(3, 4)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step(lambda: model(torch.ones(3, 4)).sum().backward())
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return [parameter.detach().clone() for parameter in model.parameters()]

before = [parameter.detach().clone() for parameter in model.parameters()]
lazy = updates()
assert torch.are_deterministic_algorithms_enabled()
with torch.device("meta"):
    embedding = torch.nn.Embedding(3, 4)
    torch.nn.Transformer(8, 2, 1, 1, 8), torch.nn.Conv2d(3, 4, 3), torch.nn.LSTM(3, 4)
    torch.nn.init.trunc_normal_(embedding.weight)
    embedding(torch.zeros(2, dtype=torch.long)).sum().backward()
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
kept = torch.optim.Optimizer.state_dict.__wrapped__
assert vars(kept)["__dynamo_disable"].__module__ == lazy_dynamo.__name__

import torch._dynamo.testing
from torch._inductor import config
assert torch._dynamo.config is torch._dynamo.eval_frame.config is sys.modules["torch._dynamo.config"]
assert config.deterministic and torch.is_deterministic_algorithms_warn_only_enabled()
with torch.no_grad():
    for parameter, old in zip(model.parameters(), before):
        parameter.copy_(old)
optimizers = [kind(model.parameters(), lr=0.1) for kind in kinds]
assert all(map(torch.equal, updates(), lazy))
assert "disable" in repr(vars(kept)["__dynamo_disable"]).lower()
compiled = torch.compile(model, backend="eager")
assert torch.equal(compiled(torch.ones(3, 4)), model(torch.ones(3, 4)))
optimizers[0].step()
"""


def test_dynamo_is_loaded_when_something_needs_it() -> None:
    done = subprocess.run([sys.executable, "-c", LIVES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
