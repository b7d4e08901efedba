"""Jobs that divide the optimizer's state, or keep it in files, and use something else beside it: the bits of one worker
that does neither, through kills; what cannot be had together is refused by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from job_harness import Job, Jobs, healed, same

SCRIPT = """
import os, time, torch
from torch import nn
import everstep

torch.manual_seed(0)
x, y = torch.randn(160, 40), torch.randn(160, 40)
x[5] = torch.nan
data = torch.utils.data.TensorDataset(x, y)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(40, 700), nn.BatchNorm1d(700)
        self.body, self.late = nn.Sequential(nn.Linear(700, 600), nn.Dropout(0.1)), nn.Linear(600, 450)
        self.back, self.again, self.down = nn.Linear(450, 700), nn.Linear(40, 700), nn.Linear(700, 40)
        self.again.weight = self.up.weight

    def forward(self, x):
        x = self.back(self.late(self.body(self.norm(self.up(x)).tanh())).tanh())
        return self.down(x + self.again(self.down(x)))

model = Model()
flat = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": flat, "weight_decay": 0.1, "lr": 0.02}]
optimizer = torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
S = torch.optim.lr_scheduler
steps = [S.LinearLR(optimizer, total_iters=4), S.CosineAnnealingLR(optimizer, 12)]
scheduler = S.SequentialLR(optimizer, steps, [4])
run = everstep.join(model, optimizer, data, lanes=6, micro_batch=3, steps=16, scheduler=scheduler)
for step in run:
    if step.number > 7:
        {late}
    for x, y in step:
        time.sleep(float(os.environ.get("LANE_S", "0")))
        step.backward(nn.functional.mse_loss(model(x), y))
"""
ODD = {"on_nonfinite": "skip", "precision": "fp16", "clip_norm": 1.0}
"""The numerics of all of them."""
OFTEN = {"checkpoint.disk.every_steps": 3, "verify_every": 4, "backoff.initial_s": 0.05}
CHAOS = "kill:target=worker:1,at=5,phase=update; kill:target=leader:0,at=10,phase=agree"
PACED = {"LANE_S": "0.03"}
FAR = {"zero.offload": "{far}", "zero.offload_params": "true"}


def written(folder: Path, late: str = "model.late.requires_grad_(False)") -> str:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("{late}", late))
    return str(path)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="module")
def undisturbed(jobs: Jobs, script: str) -> Path:
    job = jobs.start(script, workers=1, numerics=ODD)
    assert job.end() == 0, job.account()
    return job.run_dir


def placed(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    return OFTEN | {key: str(value).replace("{far}", str(folder / "far")) for key, value in settings.items()}


@pytest.mark.longer
@pytest.mark.parametrize(
    "settings",
    [
        {"zero.stage": 2, "zero.copies": 1, "spares": 1},
        {"zero.stage": 1, "on_failure": "wait"},
        {"zero.stage": 2, "spares": 1, "on_failure": "shrink", "transport": "sockets"},
        {"zero.offload": "cpu"},
        {"zero.stage": 2, "zero.copies": 1, "zero.offload": "{far}"},
        FAR,
    ],
    ids=str,
)
def test_it_keeps_the_bits_beside_everything_that_changes_an_update(
    jobs: Jobs, script: str, undisturbed: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """A scaler, steps that are left out, clipping, a scheduler, groups, tied weights, a layer that is frozen late."""
    how = {"settings": placed(settings, tmp_path), "numerics": ODD, "environment": PACED}
    job = jobs.start(script, workers=3, chaos=CHAOS, **how)
    assert job.end() == 0, job.account()
    same(undisturbed, job)
    assert len(job.of_kind("fault_injected")) == 2, job.account()


@pytest.mark.longer
def test_it_is_resumed_wherever_the_state_lay_before(
    jobs: Jobs, script: str, undisturbed: Path, tmp_path: Path
) -> None:
    job: Job | None = None
    lives = [
        ({"zero.stage": 2, "zero.offload": "{far}"}, 3),
        (FAR, 1),
        ({"zero.stage": 1, "zero.copies": 1}, 5),
        ({"zero.offload": "cpu"}, 2),
    ]
    for number, (settings, workers) in enumerate(lives):
        how = {"settings": placed(settings, tmp_path), "numerics": ODD, "environment": {"LANE_S": "0.3"}}
        job = jobs.start(script, workers=workers, run_dir=job and job.run_dir, **how)
        job.wait_for("step_committed", step=3 + 3 * number)
        os.kill(job.launcher_pid(), signal.SIGTERM)
        assert job.end() == 143, job.account()
    assert job is not None
    last = jobs.start(
        script, workers=4, run_dir=job.run_dir, numerics=ODD, settings=placed({"zero.stage": 2}, tmp_path)
    )
    assert last.end() == 0, last.account()
    same(undisturbed, last)


@pytest.mark.longer
@pytest.mark.parametrize("stage", [1, 2])
def test_a_batch_that_follows_the_workers_is_that_of_undivided_ones(
    jobs: Jobs, script: str, tmp_path: Path, stage: int
) -> None:
    """While a member is waited for the batch stays as it is."""
    follows = {"batch": "per_worker", "lr_rule": "linear", "lr_warmup_steps": 4, "on_failure": "wait"}
    alone = jobs.start(script, workers=3, settings=OFTEN | follows, numerics=ODD)
    assert alone.end() == 0, alone.account()
    settings = OFTEN | follows | {"zero.stage": stage, "zero.copies": 1}
    job = jobs.start(script, workers=3, settings=settings, numerics=ODD, chaos=CHAOS, environment=PACED)
    assert job.end() == 0, job.account()
    for name in ("digest.json", "model.safetensors"):
        assert (job.run_dir / "final" / name).read_bytes() == (alone.run_dir / "final" / name).read_bytes(), (
            job.account()
        )


@pytest.mark.longer
@pytest.mark.parametrize("task", ["Text", "PicturesNonFinite"])
def test_standbys_hold_parts_too(jobs: Jobs, task: str) -> None:
    """They have no lanes, but update as others do, and take the place of a leader that died."""
    numerics = {"precision": "fp16"} if task == "Text" else {"on_nonfinite": "skip"}
    settings = OFTEN | {"stages": 2, "redundancy": 1, "zero.stage": 2, "zero.copies": 1}
    jobs.run(task, workers=4, settings=settings, numerics=numerics, chaos=CHAOS, pace=[healed(1), healed(0)])


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (
            "len(groups) > 2 or groups.append(optimizer.add_param_group({'params': [nn.Parameter(torch.ones(3))]}))",
            "the optimizer's groups held [5, 8] parameters and hold [5, 8, 1] since the loop began",
        ),
        pytest.param(
            "x = [p.requires_grad_(True) for p in model.late.parameters()]",
            "parameter late.weight was frozen when training began and now requires a gradient",
            marks=pytest.mark.longer,
        ),
    ],
)
@pytest.mark.parametrize("settings", [{"zero.stage": 2}, pytest.param(FAR, marks=pytest.mark.longer)], ids=str)
def test_parameters_that_are_added_later_are_refused_by_name(
    jobs: Jobs, tmp_path: Path, late: str, said: str, settings: dict[str, Any]
) -> None:
    path = Path(written(tmp_path, late))
    if "late.weight" in said:
        path.write_text(
            path.read_text().replace("model = Model()", "model = Model()\nmodel.late.requires_grad_(False)")
        )
    job = jobs.start(str(path), workers=2, settings=placed(settings, tmp_path), numerics=ODD)
    assert job.end() == 2, job.account()
    errors = [line for line in job.run_dir.with_suffix(".err").read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and said in errors[0], job.account()
