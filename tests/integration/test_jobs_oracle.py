"""Jobs against loops in plain PyTorch, which know nothing of lanes, trees or blocks.

All other comparisons are of jobs with jobs. Of Everstep the loops here know only in which order an epoch goes through
the samples (that the job did so is what its ledger says). Where the order of additions is theirs too, the weights are
the same bit by bit. Digests are kept for each kind of machine, to find a release that computes something else.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

import plain_tasks
from everstep.cli.ledger import audit_run
from everstep.order.permutation import permutation
from job_harness import Jobs
from plain_tasks import SIZE
from sampling import mostly_longer

GOLDEN = Path(__file__).with_name("golden_digests.json")
Batch = tuple[Tensor, Tensor]
Loop = Callable[[nn.Module, torch.optim.Optimizer, list[Batch]], None]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As workers have it: the order of additions within an operation depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> None:
    """The loop of every tutorial; with several batches, gradient accumulation."""
    optimizer.zero_grad()
    for x, y in batches:
        (functional.cross_entropy(model(x), y) / len(batches)).backward()
    optimizer.step()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> None:
    """By torch's own function, with norms in double precision."""
    optimizer.zero_grad()
    for x, y in batches:
        functional.cross_entropy(model(x), y).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    norm = sum(float(g.double().square().sum()) for g in found) ** 0.5 / len(batches)
    factor = min(1.0, 0.5 / (norm + 1e-6)) / len(batches)
    for gradient in found:
        gradient.mul_(factor)
    optimizer.step()


def weighted(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> None:
    """Four micro-batches, added in pairs; the sum is divided by the number of samples that count."""
    parts: list[list[Tensor]] = []
    for x, y in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y, ignore_index=0, reduction="sum").backward()
        parts.append([p.grad for p in model.parameters() if p.grad is not None])
    weight = sum(int((y != 0).sum()) for _, y in batches)
    for parameter, a, b, c, d in zip(model.parameters(), *parts, strict=True):
        parameter.grad = ((a + b) + (c + d)) * (1.0 / weight)
    optimizer.step()


LOOPS: dict[str, Loop] = {
    "Plain": plain,
    "Adam": plain,
    "Normed": plain,
    "Accumulated": plain,
    "Clipped": clipped,
    "Weighted": weighted,
}


def run_plainly(task: plain_tasks.Plain, loop: Loop) -> dict[str, Tensor]:
    """The weights and buffers at the end."""
    lanes, size, steps = (task.defaults[key] for key in ("lanes", "micro_batch", "steps"))
    dataset = task.build_dataset("train")
    model = task.build_model()
    optimizer = task.build_optimizer(model.parameters())
    model.train()
    order = [i for epoch in range(steps) for i in permutation(0, epoch, SIZE).run(0, SIZE)]
    for start in range(0, steps * lanes * size, lanes * size):
        micro_batches = [order[start + lane * size :][:size] for lane in range(lanes)]
        loop(model, optimizer, [default_collate([dataset[i] for i in one]) for one in micro_batches])
    return model.state_dict()


@pytest.mark.parametrize("kind", mostly_longer(LOOPS, lambda kind: kind == "Clipped"))
@pytest.mark.usefixtures("one_thread")
def test_a_job_is_what_a_plain_loop_does(jobs: Jobs, kind: str) -> None:
    task: plain_tasks.Plain = getattr(plain_tasks, kind)()
    run_dir = jobs.base / kind
    workers = min(2, task.defaults["lanes"])
    what = ["run", f"{plain_tasks.__file__}:{kind}", "--run-dir", str(run_dir), "--workers", str(workers), "--json"]
    job = jobs.command(what, run_dir)
    assert job.end() == 0, job.account()
    assert audit_run(run_dir).clean
    expected = run_plainly(task, LOOPS[kind])
    got = load_file(run_dir / "final" / "model.safetensors")
    assert set(got) == set(expected)
    different = [name for name in sorted(got) if not torch.equal(got[name], expected[name])]
    assert not different, [(n, float((got[n] - expected[n]).abs().max())) for n in different]
    known = json.loads(GOLDEN.read_text()).get(machine(), {})  # of another kind of machine nothing is known
    digest = json.loads((run_dir / "final" / "digest.json").read_text())
    assert known.get(kind, digest) == digest, f"{machine()} gave other bits before: a decision, or a bug"


def machine() -> str:
    """What the bits of a processor's results depend on."""
    with open("/proc/cpuinfo") as file:
        told = dict(line.split(":", 1) for line in file.read().partition("\n\n")[0].splitlines())
    fields = {key.strip(): value.strip() for key, value in told.items()}
    parts = [platform.machine(), *(fields.get(key, "?") for key in ("vendor_id", "cpu family", "model"))]
    return " ".join([*parts, torch.backends.cpu.get_cpu_capability(), "torch", torch.__version__.partition("+")[0]])
