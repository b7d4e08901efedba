"""What `join` takes beside one model, one optimizer and a dataset: each job ends with the bits of an undisturbed run on
one worker, after a kill, a heal, and a resume on another number of workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from job_harness import Jobs, healed, same
from sampling import mostly_longer

HEAD = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, {tests!r})
import everstep
from job_tasks import PACE, Pace

pace = Pace(os.environ.get(PACE, ""))
torch.manual_seed(7)
data = TensorDataset(torch.randn(96, 4), torch.arange(96) % 2)
where = {{"run_dir": sys.argv[1]}} if len(sys.argv) > 1 else {{}}
"""
LOADER = """
def collate(samples):
    return torch.stack([x for x, _ in samples]) + torch.rand(()), torch.stack([y for _, y in samples])

class Slower:
    def __init__(self):
        self.seen = 0
    def __call__(self, step):
        self.seen += step.loss > 0.5
        if self.seen % 5 == 4:
            optimizer.param_groups[0]["weight_decay"] += 0.001
    def state_dict(self):
        return {{"seen": self.seen}}
    def load_state_dict(self, state):
        self.seen = state["seen"]

model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=1)
schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 5), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
callbacks = [Slower()]
loader = DataLoader(data, batch_size=8, collate_fn=collate, num_workers=1)
run = everstep.join(model, optimizer, loader, lanes=4, accumulate=2, clip_value=0.05, epochs=3,
                    scheduler=[*schedulers, plateau], state={{"slower": callbacks[0]}}, **where)
for step in run:
    for x, y in step:
        pace.lane()
        out = model(x)
        step.backward(nn.functional.cross_entropy(out, y))
        step.backward(0.1 * model(x).square().mean())
        step.log(accuracy=((out.argmax(1) == y).sum(), len(y)))
    plateau.step(-step.metrics["accuracy"])
    for callback in callbacks:
        callback(step)
    run.log(rate=optimizer.param_groups[0]["lr"])
"""
GAN = """
class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4))
        self.d = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

gan = Gan()
optimizers = {{"d": torch.optim.Adam(gan.d.parameters(), lr=0.01), "g": torch.optim.AdamW(gan.g.parameters(), lr=0.02)}}
schedulers = {{name: torch.optim.lr_scheduler.StepLR(one, 4) for name, one in optimizers.items()}}
loader = DataLoader(data, batch_size=8, sampler=list(range(95, -1, -1)))
loss = nn.functional.binary_cross_entropy_with_logits
for step in everstep.join(gan, optimizers, loader, lanes=4, steps=18, scheduler=schedulers, **where):
    for x, _ in step:
        pace.lane()
        fake = gan.g(torch.randn_like(x))
        real, made = gan.d(x), gan.d(fake.detach())
        step.backward(loss(real, torch.ones_like(real)) + loss(made, torch.zeros_like(made)), optimizer="d")
        if step.number % 3:
            out = gan.d(fake)
            step.backward(loss(out, torch.ones_like(out)), optimizer=optimizers["g"])
"""
AVERAGED = """
model = nn.Sequential(nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
average, slow = torch.optim.swa_utils.AveragedModel(model), torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01)
kept = {{"average": average, "slow": slow}}
for step in everstep.join(model, optimizer, data, lanes=4, micro_batch=2, steps=18, state=kept, **where):
    for x, y in step:
        pace.lane()
        x = x.view(-1, 1, 2, 2).contiguous(memory_format=torch.channels_last)
        step.backward(nn.functional.cross_entropy(model(x), y))
    if step.number > 6:
        average.update_parameters(model)
        slow.step()
        if step.number == 17:
            model.load_state_dict(average.module.state_dict())
"""
COMPILED = """
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
model[0] = torch.compile(model[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for step in everstep.join(model, optimizer, data, lanes=4, micro_batch=2, steps=12, rehearse=False, **where):
    for x, y in step:
        pace.lane()
        step.backward(nn.functional.cross_entropy(model(x), y))
"""
SCRIPTS = {"loader": LOADER, "gan": GAN, "averaged": AVERAGED}


def written(folder: Path, text: str) -> str:
    script = folder / "train.py"
    script.write_text((HEAD + text).format(tests=str(Path(__file__).parents[1])))
    return str(script)


@pytest.mark.longer
@pytest.mark.parametrize("name", mostly_longer(SCRIPTS, lambda name: name == "gan"))
def test_kills_healing_and_a_resume(jobs: Jobs, tmp_path: Path, name: str) -> None:
    script = written(tmp_path, SCRIPTS[name])
    plain = jobs.plainly(script)
    chaos = "kill:target=worker:1,at=4; kill:target=leader:0,at=8,phase=agree"
    job = jobs.start(script, workers=3, chaos=chaos, pace=[healed(1), healed(0)])
    assert plain.end() == 0, plain.account()
    assert job.end() == 0, job.account()
    same(plain.run_dir, job)
    stopped = jobs.start(script, workers=2, pace=[{"kind": "never"}])
    stopped.wait_for("step_committed", step=5)
    os.kill(stopped.launcher_pid(), signal.SIGINT)
    assert stopped.end() == 130, stopped.account()
    resumed = jobs.start(script, workers=1, run_dir=stopped.run_dir)
    assert resumed.end() == 0, resumed.account()
    same(plain.run_dir, resumed)
    told = [[(e["step"], e.get("metrics")) for e in one.of_kind("step_committed")] for one in (plain, job, resumed)]
    assert told[0] == told[1] == told[2] and bool(told[0][0][1]) == (name == "loader")


@pytest.mark.longer
def test_a_compiled_part_of_the_model(jobs: Jobs, tmp_path: Path) -> None:
    script = written(tmp_path, COMPILED)
    plain = jobs.plainly(script)
    assert plain.end() == 0, plain.account()
    job = jobs.start(script, workers=2, chaos="kill:target=worker:1,at=4", pace=[healed(1)])
    assert job.end() == 0, job.account()
    same(plain.run_dir, job)
