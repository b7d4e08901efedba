"""A script's loop changes how its model is set: after kills, a stop and a resume the bits are the undisturbed ones."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from job_harness import Jobs, healed, same

SCRIPT = """
import os, time, numpy as np, torch
from torch import nn
import everstep

class Counts(nn.Module):
    calls, table = 0, None
    def __init__(self):
        super().__init__()
        self.cache = {}
    def forward(self, x):
        self.calls += 1
        n = x.shape[1]
        if n not in self.cache:
            self.cache[n] = torch.arange(n).float().cos()
        x = x + self.cache[n]
        if self.table is None or len(self.table) < len(x):
            self.table = torch.ones(len(x), 1)
        return x * self.table[: len(x)]

generator = torch.Generator().manual_seed(1)
data = [(torch.randn(6, generator=generator), torch.randn(1, generator=generator)) for _ in range(160)]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Counts(), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 1))
model[4].register_forward_hook(lambda module, args, out: 2 * out)
nn.utils.parametrizations.weight_norm(model[5])
optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.05), momentum=0.9)
class Loss(nn.Module):
    calls = 0
    def forward(self, given, wanted):
        self.calls += 1
        return nn.functional.mse_loss(given, wanted)

criterion, shown, start = Loss(), {}, time.time()
model[0].register_forward_hook(lambda module, args, out: shown.__setitem__("mean", out.detach().mean()))
warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 21)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [4])
kept = everstep.state(rounds=0, rng=torch.Generator().manual_seed(3), rate=1.0)
run = everstep.join(model, optimizer, data, lanes=8, micro_batch=2, steps=24, scheduler=scheduler, state=kept)
for step in run:
    scale = 1.0
    {before}
    for x, y in step:
        time.sleep(float(os.environ.get("LANE_S", "0")))
        step.backward(criterion(model(x * scale), y))
    print(shown.get("mean"), (time.time() - start) / step.number)
    if step.number == 5:
        model[1].eval()
    if step.number == 7:
        model[0].requires_grad_(False)
        torch.set_float32_matmul_precision("medium")
    {more}
"""
BEFORE = """
    kept.rounds += 1
    scale = 0.5 + torch.rand(1, generator=kept.rng)
    model[3].p *= 0.99
    if step.number > 3:
        optimizer.param_groups[0]["lr"] *= 0.97
"""
AFTER = """
    kept.rate *= float(scale)
    optimizer.param_groups[0]["weight_decay"] = np.float64(0.001 * kept.rate / kept.rounds)
    with torch.no_grad():
        model[5].bias.mul_(0.99)
        model[1].running_mean.mul_(0.9)
    model[3].p *= 0.95
    optimizer.param_groups[0]["momentum"] *= 0.97
"""
PACE = {"LANE_S": "0.03"}


def write(folder: Path, more: str = "pass", before: str = "pass") -> str:
    script = folder / "sets.py"
    script.write_text(SCRIPT.replace("{more}", more.strip()).replace("{before}", before.strip()))
    return str(script)


def test_a_killed_worker_and_a_resumed_job_are_set_as_the_loop_has_set_them(jobs: Jobs, tmp_path: Path) -> None:
    script = write(tmp_path, AFTER, BEFORE)
    undisturbed = jobs.start(script, workers=1)
    chaos = "kill:target=worker:1,at=4; kill:target=worker:0,at=9"
    job = jobs.start(script, workers=2, chaos=chaos, pace=[healed(1), healed(0)], environment=PACE)
    job.wait_for("worker_healed", worker_id=0)
    job.wait_for("step_committed", step=job.of_kind("step_committed")[-1]["step"] + 2)
    signal.pidfd_send_signal(job._pidfd, signal.SIGTERM)
    assert job.end() == 143, job.account()
    again = jobs.start(script, workers=3, run_dir=job.run_dir)
    assert undisturbed.end() == 0, undisturbed.account()
    assert again.end() == 0, again.account()
    same(undisturbed.run_dir, again)
    assert not [e for e in again.of_kind("warning") if "differ" in str(e["reason"])], again.account()


@pytest.mark.longer
@pytest.mark.parametrize(
    ("lines", "says", "remedy"),
    [
        (
            ("if step.number == 9: model[4] = nn.ReLU()",),
            "module 4 (Tanh) was made a ReLU in the loop",
            "before the loop",
        ),
        pytest.param(
            ("if step.number == 9: model[5].bias.register_hook(lambda g: 2 * g)",),
            *("was registered on 5.bias in the loop", "before the loop"),
            marks=pytest.mark.longer,
        ),
        pytest.param(
            ("if step.number == 9: optimizer.best = step.loss",),
            *("set the optimizer's attribute best", "everstep.state(best=...)"),
            marks=pytest.mark.longer,
        ),
        pytest.param(
            ("if step.number == 9: run.best = step.loss",),
            "set run.best",
            "everstep.state(best=...)",
            marks=pytest.mark.longer,
        ),
    ],
)
def test_what_cannot_be_carried_ends_the_job_before_anything_is_lost(
    jobs: Jobs, tmp_path: Path, lines: tuple[str, ...], says: str, remedy: str
) -> None:
    job = jobs.start(write(tmp_path, *lines), workers=2)
    assert job.end() == 2, job.account()
    failed = job.of_kind("job_failed")[-1]["reason"]
    assert says in failed and "checkpoint of step 9" in failed and remedy in failed, job.account()
    assert "Traceback" not in failed
    assert job.of_kind("checkpoint_completed")[-1]["step"] == 9
    again = jobs.start(job.what.split()[1], workers=1, run_dir=job.run_dir)  # from there, as if nothing had been said
    assert again.end() == 2 and says in again.of_kind("job_failed")[-1]["reason"], again.account()


def test_a_state_that_the_loop_has_changed_before_the_batches_is_not_saved(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start(write(tmp_path, "pass", "if step.number == 10: model[5].bias.detach().mul_(2)"), workers=2)
    assert job.end() == 2, job.account()
    failed = job.of_kind("job_failed")[-1]["reason"]
    assert "parameter 5.bias was changed by the loop before the batches" in failed, job.account()
    assert "change it after the batches" in failed and "no checkpoint" in failed, job.account()
    assert 9 not in [c["step"] for c in job.of_kind("checkpoint_completed")], job.account()
