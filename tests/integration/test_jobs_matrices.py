"""Jobs whose members divide the state of optimizers of each kind: by elements, by whole parameters, or not at all."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from job_harness import Job, Jobs, same
from sampling import mostly_longer

SCRIPT = """
import os, time, torch
from torch import nn
import everstep

class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group)

class Lion(Own):
    def update(self, p, state, group):
        m = state.setdefault("momentum", torch.zeros_like(p))
        p.sub_(torch.sign(m * 0.9 + p.grad * 0.1), alpha=group["lr"])
        m.lerp_(p.grad, 0.01)

class Lamb(Own):
    def update(self, p, state, group):
        state["step"] = state.get("step", 0) + 1
        m, v = (state.setdefault(key, torch.zeros_like(p)) for key in ("exp_avg", "exp_avg_sq"))
        m.lerp_(p.grad, 0.1)
        v.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        change = m / (1 - 0.9 ** state["step"]) / (v.sqrt() + 1e-6)
        p.sub_(change * (p.norm() / (change.norm() + 1e-6)), alpha=group["lr"])

class Mixed(Lamb):  # as Muon is used: other state for matrices than for the rest
    def update(self, p, state, group):
        if p.dim() != 2:
            return super().update(p, state, group)
        m = state.setdefault("momentum", torch.zeros_like(p))
        m.mul_(0.9).add_(p.grad)
        p.sub_(m / (m.norm() + 1e-6), alpha=group["lr"])

class Global(Own):
    def update(self, p, state, group):
        norm = torch.stack([q.grad.norm() for q in group["params"] if q.grad is not None]).norm()
        p.sub_(p.grad / norm, alpha=group["lr"])

class Noisy(Own):
    def update(self, p, state, group):
        p.sub_(p.grad + 0.01 * torch.randn_like(p), alpha=group["lr"])

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(160, 40), torch.randn(160, 1))
biased = "Muon" not in "{optimizer}"
body = [nn.Linear(40, 700, biased), nn.Tanh(), nn.Linear(700, 300, biased), nn.Linear(300, 410, biased)]
model = nn.Sequential(*body, nn.Dropout(0.1), nn.Linear(410, 1, biased))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.late, self.never = model, nn.Linear(40, 9000, False), nn.Linear(40, 500, False)
    def forward(self, x, late):
        return self.first(x) + self.late(x).mean(1, keepdim=True) if late else self.first(x)
model = Model()
model.first[2].weight.requires_grad_("{frozen}" == "")
def groups():
    return [{"params": model.first.parameters()}, {"params": [*model.late.parameters(), *model.never.parameters()]}]
optimizer = {optimizer}(groups(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
run = everstep.join(model, optimizer, data, lanes=6, micro_batch=3, steps=20, scheduler=scheduler, clip_norm=1.0)
for step in run:
    for x, y in step:
        time.sleep(float(os.environ.get("LANE_S", "0")))
        step.backward(nn.functional.mse_loss(model(x, step.number > 11), y))
"""
ZERO = {"zero.stage": 1, "checkpoint.disk.every_steps": 3, "verify_every": 4}
PACED = {"LANE_S": "0.03"}
DIVIDED = {
    "Lion": "elements",
    "Lamb": "matrices",
    "Mixed": "matrices",
    "torch.optim.Muon": "matrices",
    "torch.optim.Adafactor": "nothing",
}


def script(folder: Path, optimizer: str, frozen: str = "") -> str:
    (folder / "train.py").write_text(SCRIPT.replace("{optimizer}", optimizer).replace("{frozen}", frozen))
    return str(folder / "train.py")


def ended_alike(job: Job, reference: Path) -> None:
    assert job.end() == 0, job.account()
    same(reference, job)


def remembered(job: Job) -> dict[str, str]:
    """How the state of each stage's optimizer is divided."""
    return dict(json.loads((job.run_dir / "job.json").read_text())["divides"])


@pytest.mark.longer
@pytest.mark.parametrize(
    ("optimizer", "copies"),
    mostly_longer([*((name, 1) for name in DIVIDED), ("Lamb", 2)], lambda values: values[0] == "Mixed"),
)
def test_the_bits_are_those_of_one_worker_through_kills(
    jobs: Jobs, tmp_path: Path, optimizer: str, copies: int
) -> None:
    text = script(tmp_path, optimizer, "frozen" if optimizer == "Lamb" else "")
    alone = jobs.start(text, workers=1)
    assert alone.end() == 0, alone.account()
    chaos = "kill:target=worker:1,at=6,phase=update; kill:target=leader:0,at=14,phase=agree"
    job = jobs.start(text, workers=3, settings={**ZERO, "zero.copies": copies}, chaos=chaos, environment=PACED)
    ended_alike(job, alone.run_dir)
    assert len(job.of_kind("fault_injected")) == 2, job.account()
    assert remembered(job) == {"0": DIVIDED[optimizer]}


@pytest.mark.longer
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((1, 3), (0, 2)),
        ((0, 2), (1, 3)),
        ((1, 2), (1, 3)),
    ],
)
def test_whole_parameters_are_resumed_otherwise_divided_or_not_at_all(
    jobs: Jobs, tmp_path: Path, first: tuple[int, int], then: tuple[int, int]
) -> None:
    text = script(tmp_path, "Lamb")
    alone = jobs.start(text, workers=1)
    assert alone.end() == 0, alone.account()
    job = jobs.start(text, workers=first[1], settings={"zero.stage": first[0]}, environment=PACED)
    job.wait_for("step_committed", step=7)
    os.kill(job.launcher_pid(), signal.SIGTERM)
    assert job.end() == 143, job.account()
    settings = {"zero.stage": then[0], "zero.copies": 1}
    again = jobs.start(text, workers=then[1], settings=settings, run_dir=job.run_dir)
    ended_alike(again, alone.run_dir)
    assert remembered(again) == {"0": "matrices"}


@pytest.mark.parametrize("optimizer", ["Global", pytest.param("Noisy", marks=pytest.mark.longer)])
def test_an_optimizer_that_cannot_be_divided_is_refused_by_name(jobs: Jobs, tmp_path: Path, optimizer: str) -> None:
    job = jobs.start(script(tmp_path, optimizer), workers=2, settings=ZERO)
    assert job.end() == 2, job.account()
    (failed,) = job.of_kind("job_failed")
    assert failed["cause"] == "config" and "zero.stage=1 divides the state" in failed["reason"]
    assert optimizer in failed["reason"] and "zero.stage=0" in failed["reason"], json.dumps(failed)


@pytest.mark.longer
@pytest.mark.parametrize(("task", "divides"), [("Text", "elements"), ("MuonText", "matrices")])
def test_stages_divide_what_no_other_stage_holds(jobs: Jobs, task: str, divides: str) -> None:
    """The first and the last unit of `Text` share a matrix."""
    settings = {**ZERO, "stages": 2, "zero.copies": 1, "verify_every": 2}
    job = jobs.run(task, workers=4, settings=settings, chaos="kill:target=worker:3,at=6,phase=update")
    assert remembered(job) == {"0": divides, "1": divides}
