"""Lightning's modules as jobs: the weights of Lightning's own Trainer on one process, and the bits of an undisturbed
worker whatever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from job_harness import Jobs, healed, same
from sampling import needs

pytestmark = needs("lightning")

MODULE = """
import os, sys, time

sys.path.insert(0, {tests!r})
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{front}
from job_tasks import PACE, Pace

pace = Pace(os.environ.get(PACE, ""))


class Net(L.LightningModule):
    def __init__(self, rule, hidden=16, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 3))
        self.tau = 1.0

    def on_train_epoch_start(self):
        self.tau = 1.0 / (1 + self.current_epoch)
        self.log("tau", self.tau)

    def training_step(self, batch, batch_idx):
        pace.lane()
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1]) * self.tau
        self.log("train_loss", loss, on_epoch=True)
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        self.log("last_rate", self.lr_schedulers().get_last_lr()[0])
        return loss

    @torch.no_grad()
    def validation_step(self, batch, batch_idx):
        out = self.net(batch[0])
        hits = (out.argmax(1) == batch[1]).float().mean()
        self.log_dict({{"val_loss": nn.functional.cross_entropy(out, batch[1]), "val_acc": hits}})

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        rates = torch.optim.lr_scheduler
        if self.hparams.rule == "plateau":
            plateau = rates.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {{"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}}
        if self.hparams.rule == "step":
            cycle = rates.OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)
            return [optimizer], [{{"scheduler": cycle, "interval": "step"}}]
        return [optimizer], [rates.StepLR(optimizer, 1, 0.5)]


class Data(L.LightningDataModule):
    def prepare_data(self):
        if "EVERSTEP_REHEARSAL" in os.environ:
            return  # it runs when a worker has prepared the data
        os.mkdir(f"{{sys.argv[2]}}.preparing")
        time.sleep(0.1)
        os.rmdir(f"{{sys.argv[2]}}.preparing")

    def setup(self, stage):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(192, 8, generator=generator)
        y = (x.sum(1) > 0).long() + (x[:, 0] > 0).long()
        self.train, self.val = TensorDataset(x[:128], y[:128]), TensorDataset(x[128:], y[128:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=16)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=24)


for rule in sys.argv[1].split(","):
    torch.manual_seed(1)
    net = Net(rule)
    stopping = [L.pytorch.callbacks.EarlyStopping("val_loss", min_delta=1.0, patience=2)] if rule == "plateau" else []
    quiet = {{"enable_progress_bar": False, "enable_model_summary": False, "logger": False}}
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=4, gradient_clip_val=0.5, accumulate_grad_batches=2, callbacks=stopping,
        enable_checkpointing=False, val_check_interval=4, **quiet
    )
    trainer.fit(net, datamodule=Data())
    trainer.save_checkpoint(f"{{sys.argv[2]}}-{{rule}}.ckpt")
    trainer.validate(net, datamodule=Data(), verbose=False)
"""
OURS, THEIRS = "import everstep.integrations.lightning as L", "import lightning as L"


def written(folder: Path, front: str, name: str) -> str:
    script = folder / name
    script.write_text(MODULE.format(tests=str(Path(__file__).parents[1]), front=front))
    return str(script)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lightning")
    written(folder, OURS, "ours.py")
    written(folder, THEIRS, "theirs.py")
    return folder


@pytest.fixture(scope="module")
def trained(scripts: Path) -> Path:
    """The folder with the checkpoints that `python ours.py` and `python theirs.py` write."""
    for name, rules in (("theirs", "epoch,step,plateau"), ("ours", "epoch"), ("ours", "step"), ("ours", "plateau")):
        argv = [sys.executable, str(scripts / f"{name}.py"), rules, name]  # a script of ours is one job
        done = subprocess.run(argv, cwd=scripts, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return scripts


def close(ours: Any, theirs: Any) -> bool:
    """Whether two trees are alike, numbers to 1e-6."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(close(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    if isinstance(ours, torch.Tensor):
        return bool(torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6))
    return bool(ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)) if isinstance(ours, float) else ours == theirs


@pytest.mark.longer
@pytest.mark.parametrize("rule", ["epoch", "step", "plateau"])
def test_a_module_ends_as_with_lightnings_own_trainer(trained: Path, rule: str) -> None:
    ours, theirs = (torch.load(trained / f"{name}-{rule}.ckpt", weights_only=False) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for key in ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters"):
        assert close(ours[key], theirs[key]), (key, ours[key], theirs[key])


GO_ON = """
import sys
source = open({script!r}).read().partition("for rule in")[0]
exec(source)
Net.load_from_checkpoint({checkpoint!r}, weights_only=True)
net = Net("epoch")
trainer = L.Trainer(
    accelerator="cpu", max_epochs=5, accumulate_grad_batches=2, logger=False, enable_progress_bar=False,
    enable_checkpointing=False,
)
trainer.fit(net, datamodule=Data(), ckpt_path={checkpoint!r})
print(trainer.current_epoch, trainer.global_step, net.tau)
"""


@pytest.mark.longer
def test_lightning_goes_on_from_a_checkpoint(trained: Path) -> None:
    text = GO_ON.format(script=str(trained / "theirs.py"), checkpoint=str(trained / "ours-epoch.ckpt"))
    done = subprocess.run([sys.executable, "-c", text], cwd=trained, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["5", "20", "0.2"]


@pytest.mark.longer
def test_a_module_survives_a_kill_and_a_stop(jobs: Jobs, scripts: Path) -> None:
    script = str(scripts / "ours.py")
    plain = jobs.start(script, "--", "epoch", str(scripts / "plain"), workers=1)
    kill = "kill:target=worker:1,at=5"
    told = ("--", "epoch", str(scripts / "killed"))
    killed = jobs.start(script, *told, workers=3, chaos=kill, pace=[healed(1)])
    assert plain.end() == 0, plain.account()
    assert killed.end() == 0, killed.account()
    same(plain.run_dir, killed)
    found = [torch.load(job.run_dir / "lightning.ckpt", weights_only=True) for job in (plain, killed)]
    for name, tensor in found[0]["state_dict"].items():
        assert torch.equal(tensor, found[1]["state_dict"][name])
    logged = {event["step"]: event["metrics"] for event in killed.of_kind("logged")}  # a step may be told twice
    checks = [{"val_loss", "val_acc"}, {"val_loss", "val_acc", "train_loss_epoch"}]
    assert [set(logged[step]) for step in sorted(logged)] == [{"tau"}, *checks] * 4
    assert [logged[step]["tau"] for step in (1, 5, 9, 13)] == [1.0, 1 / 2, 1 / 3, 1 / 4]
    stopped = jobs.start(script, *told, workers=2, pace=[{"kind": "never"}])
    stopped.wait_for("step_committed", step=6)
    os.kill(stopped.launcher_pid(), signal.SIGINT)
    assert stopped.end() == 130, stopped.account()
    resumed = jobs.start(script, *told, workers=1, run_dir=stopped.run_dir)
    assert resumed.end() == 0, resumed.account()
    same(plain.run_dir, resumed)


@pytest.mark.longer
def test_a_module_that_asks_for_the_number_of_steps_is_checked(scripts: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "everstep", "check", str(scripts / "ours.py"), "--json", "--", "step", "there"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    said = json.loads(done.stdout)
    assert done.returncode == 0 and not said["findings"], done.stdout + done.stderr
    assert any("two workers, one of which is killed and healed: 6 steps" in text for text in said["covered"]), said


@pytest.mark.longer
def test_lightnings_own_trainer_and_accelerate_are_refused(jobs: Jobs, scripts: Path, tmp_path: Path) -> None:
    other = tmp_path / "accelerated.py"
    other.write_text("from accelerate import Accelerator\nAccelerator(gradient_accumulation_steps=4)\n")
    theirs = jobs.start(str(scripts / "theirs.py"), "--", "epoch", "unused", workers=1)
    accelerated = jobs.start(str(other), workers=1)
    for job, words in ((theirs, "from everstep.integrations.lightning import Trainer"), (accelerated, "accumulate=4")):
        assert job.end() == 2, job.account()
        assert words in job.of_kind("job_failed")[-1]["reason"]


@pytest.mark.longer
def test_the_nanogpt_loop(jobs: Jobs, tmp_path: Path) -> None:
    """With a kill it has the bits of one worker, and the losses of the loop as it was before the port."""
    script = Path(__file__).parents[2] / "examples" / "nanogpt_loop.py"
    one = jobs.start(str(script), workers=1, environment={"OUT_DIR": str(tmp_path / "one")})
    kill = "kill:target=worker:1,at=6,phase=backward"
    where = {"OUT_DIR": str(tmp_path / "many")}
    many = jobs.start(str(script), workers=3, chaos=kill, environment=where, settings={"min_workers": 3})
    assert one.end() == 0, one.account()
    assert many.end() == 0, many.account()
    same(one.run_dir, many)
    assert many.of_kind("worker_evicted")
    losses, estimates, best = original_loop(script.read_text().partition("# ---- the training loop")[0])
    told = [event["loss"] for event in many.of_kind("step_committed")]
    assert told == pytest.approx(losses, rel=1e-6)
    logged = [event["metrics"] for event in many.of_kind("logged")]
    assert [(m["train_loss"], m["val_loss"]) for m in logged] == [pytest.approx(e, rel=1e-6) for e in estimates]
    saved = torch.load(tmp_path / "many" / "ckpt.pt", weights_only=True)
    assert saved["best_val_loss"] == pytest.approx(best, rel=1e-6)


def original_loop(head: str) -> tuple[list[float], list[tuple[float, float]], float]:
    """nanoGPT's own loop over the model and the batches of the example: losses, estimates, best_val_loss."""
    names: dict[str, Any] = {"__name__": "original"}
    argv, sys.argv = sys.argv, ["original"]
    try:
        exec(compile(head, "nanogpt_loop.py", "exec"), names)
    finally:
        sys.argv = argv
    model, optimizer, size = names["model"], names["optimizer"], names["batch_size"]
    micro_steps = names["gradient_accumulation_steps"]
    batches = iter(torch.utils.data.DataLoader(names["train"], batch_size=size))
    losses, estimates, best_val_loss = [], [], 1e9

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        model.eval()
        held_out = {k: torch.utils.data.DataLoader(v, batch_size=size) for k, v in names["held_out"].items()}
        out = {k: sum(float(model(X, Y)[1]) for X, Y in v) / len(v) for k, v in held_out.items()}
        model.train()
        return out

    for iter_num in range(names["max_iters"] + 1):
        for param_group in optimizer.param_groups:
            param_group["lr"] = names["get_lr"](iter_num)
        if iter_num and iter_num % names["eval_interval"] == 0:
            found = estimate_loss()
            estimates.append((found["train"], found["val"]))
            best_val_loss = min(best_val_loss, found["val"])
        if iter_num == names["max_iters"]:
            break
        total = 0.0
        for _ in range(micro_steps):
            X, Y = next(batches)
            _, loss = model(X, Y)
            (loss / micro_steps).backward()
            total += float(loss.detach()) / micro_steps
        torch.nn.utils.clip_grad_norm_(model.parameters(), names["grad_clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses, estimates, best_val_loss
