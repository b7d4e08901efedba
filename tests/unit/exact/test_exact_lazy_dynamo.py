"""torch._dynamo is not imported for an optimizer, and is itself as soon as something else asks for it."""

from __future__ import annotations

import subprocess
import sys

LIVES = """
import os, sys, threading
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

def loaded():
    return type(sys.modules["torch._dynamo"]).__name__ == "module" and "torch._dynamo.eval_frame" in sys.modules

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
lazy_dynamo.use_deterministic_algorithms()
model(torch.ones(3, 4)).sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert torch.are_deterministic_algorithms_enabled() and not loaded()
kept = torch.optim.Optimizer.state_dict.__wrapped__
assert "__dynamo_disable" in vars(kept)

def in_threads():
    threads = [threading.Thread(target=lambda: torch._dynamo.config.verbose) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

def check(way):
    global torch
    if way == "a submodule":
        import torch._dynamo.testing
        assert torch._dynamo.testing.CompileCounter
    if way == "the compiler":
        import torch._inductor
    if way == "threads":
        in_threads()
    if way == "compiling":
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(torch.ones(3, 4)), model(torch.ones(3, 4)))
    assert loaded()
    assert "__dynamo_disable" not in vars(kept)
    from torch._inductor import config
    assert config.deterministic
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert optimizer.state_dict()["state"] and vars(kept)["__dynamo_disable"] is not kept
    optimizer.step()

for way in ("a submodule", "the compiler", "threads", "compiling"):
    if os.fork() == 0:
        check(way)
        os._exit(0)
    assert os.wait()[1] == 0, way
"""


def test_dynamo_is_loaded_when_something_needs_it() -> None:
    done = subprocess.run([sys.executable, "-c", LIVES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
