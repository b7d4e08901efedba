"""Kills of whoever holds a part of a divided optimizer, in each phase of a step: the bits of one worker.

Each job of four workers loses a holder (the owner of some parts, and the buddy of others), then two at once, then the
leader, all in the same phase; and a worker that heals, while it does."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from job_harness import Job, Jobs, same

TASK = """
import json, os, signal, sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, {tests!r})
import everstep
from everstep.parallel.channel import SharedMemoryChannel
from job_tasks import PACE, Pace

exchange, dying = SharedMemoryChannel.spread, json.loads(os.environ.get("DYING", "[]"))

def dies_in_the_middle(self, step, stage, portions, **more):
    me = self._me.worker_id
    for after, of, members in dying:  # when all are members: of fewer each may have all parts
        mark = Path(os.environ["MARKS"], f"{{after}}-{{me}}")
        if me in of and step >= after and len({{*self._inboxes, me}}) == members and not mark.exists():
            mark.touch()
            try:
                exchange(self, step, stage, portions[: len(portions) // 2], **more)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
    exchange(self, step, stage, portions, **more)

SharedMemoryChannel.spread = dies_in_the_middle

class Small(everstep.Task):
    def __init__(self):
        self.pace = Pace(os.environ.get(PACE, ""))

    def build_model(self):
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(40, 700), nn.BatchNorm1d(700), nn.Tanh(), nn.Linear(700, 400))
        return nn.Sequential(first, nn.Sequential(nn.Dropout(0.1), nn.Linear(400, 700)), nn.Linear(700, 1))

    def units(self, model):
        return list(model)

    def build_dataset(self, split):
        g = torch.Generator().manual_seed(1)
        return torch.utils.data.TensorDataset(torch.randn(160, 40, generator=g), torch.randn(160, 1, generator=g))

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=0.01, amsgrad=True)

    def loss(self, model, batch):
        self.pace.lane()
        return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
NUMERICS = {"lanes": 6, "micro_batch": 3, "steps": 36, "clip_norm": 1.0}
SETTINGS = {"checkpoint.disk.every_steps": 3, "backoff.initial_s": 0.05, "max_restarts": 100, "verify_every": 5}
LOST = {4: (1,), 10: (2, 3), 16: (0,)}
"""Who is killed at which step, of pools from worker 0 on and, of two stages, from worker 2 or 3 on."""
AGAIN = "kill:target=worker:2,at=1,phase=heal"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("task") / "small.py"
    path.write_text(TASK.format(tests=str(Path(__file__).parents[1])))
    return f"{path}:Small"


def struck(jobs: Jobs, task: str, phase: str, settings: dict[str, Any], folder: Path) -> tuple[Job, int]:
    """A job that is under way, and how many faults it will report."""
    faults = [AGAIN]
    if phase != "spread":
        faults += [f"kill:target=worker:{who},at={step},phase={phase}" for step, of in LOST.items() for who in of]
    pace = [{"kind": "worker_joined", "count": members(settings) + sum(map(len, LOST.values())) + 1}]
    dying = [(step, of, members(settings)) for step, of in LOST.items()] if phase == "spread" else []
    environment = {"MARKS": str(folder), "DYING": json.dumps(dying)}
    how = {"numerics": NUMERICS, "settings": SETTINGS | settings, "environment": environment}
    workers = members(settings)
    return jobs.start(task, workers=workers, chaos="; ".join(faults), pace=pace, lane_s=0.15, **how), len(faults)


WAYS = [
    {"zero.stage": 1, "zero.copies": 1, "zero.offload": "{far}"},
    {"zero.stage": 1, "zero.copies": 2, "stages": 2},
    {"zero.stage": 1, "zero.copies": 3},
    {"zero.stage": 2, "zero.copies": 1, "stages": 2},
    {"zero.stage": 2, "zero.copies": 2},
    {"zero.stage": 2, "zero.copies": 3, "zero.offload": "{far}"},
    {"zero.stage": 1, "zero.copies": 2, "cell.fsdp": 2},
    {"zero.stage": 2, "zero.copies": 1, "cell.fsdp": 2},
]


def members(settings: dict[str, Any]) -> int:
    """So many that each stage has more than it keeps copies."""
    return 6 if settings.get("stages") == settings["zero.copies"] == 2 else 4


def placed(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {key: str(folder / "far") if value == "{far}" else value for key, value in settings.items()}


@pytest.mark.longer
@pytest.mark.parametrize("settings", WAYS, ids=lambda way: "-".join(map(str, way.values())))
@pytest.mark.parametrize("phase", ["reduce", "agree", "update", "spread"])
def test_holders_one_two_and_the_leader_die_in_a_phase(
    jobs: Jobs, task: str, tmp_path: Path, phase: str, settings: dict[str, Any]
) -> None:
    job, faults = struck(jobs, task, phase, placed(settings, tmp_path), tmp_path)
    assert job.end() == 0, job.account()
    same(jobs.reference(task, NUMERICS), job)
    assert len(job.of_kind("fault_injected")) == faults, job.account()
    died = {f"{step}-{who}" for step, of in LOST.items() for who in of} if phase == "spread" else set()
    assert {path.name for path in tmp_path.iterdir()} - {"far"} == died
    assert settings["zero.copies"] > 1 or job.of_kind("fallback"), job.account()


@pytest.mark.longer
@pytest.mark.parametrize("settings", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_holders_one_two_and_the_leader_die_while_a_worker_gets_its_part(
    jobs: Jobs, task: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """And that worker, at last."""
    lost = {4: (1,), 12: (1, 2), 20: (0, 3)}
    faults = [f"kill:target=worker:3,at={at}; stop:target=worker:3,at={at},phase=heal,for=0.4" for at in lost]
    workers = members(settings)
    pace = [{"kind": "worker_joined", "count": workers + len(lost) + sum(map(len, lost.values()))}]
    how = {"numerics": NUMERICS, "settings": SETTINGS | placed(settings, tmp_path)}
    job = jobs.start(task, workers=workers, chaos="; ".join(faults), pace=pace, lane_s=0.15, **how)
    gone: set[int] = set()
    for number, of in enumerate(lost.values()):
        job.wait_for("fault_injected", lambda event, n=number: healing(job) > n)  # type: ignore[misc]
        lives = {life_of(job, who, gone) for who in of}
        for pid in lives:
            os.kill(pid, signal.SIGKILL)
        gone |= lives
    assert job.end() == 0, job.account()
    same(jobs.reference(task, NUMERICS), job)


def life_of(job: Job, who: int, gone: set[int]) -> int:
    """A worker's process, once it is not one that is gone: one heal may be held up twice, so soon after each other that
    the worker has not come again."""
    job.wait_for("worker_joined", lambda event: job.pid_of(who) not in gone, worker_id=who)
    return job.pid_of(who)


def healing(job: Job) -> int:
    """How often a worker was held up while it healed."""
    return sum(event["phase"] == "heal" for event in job.of_kind("fault_injected"))
