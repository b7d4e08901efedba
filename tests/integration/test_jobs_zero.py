"""Jobs whose members divide the optimizer's state: the bits of one worker that has all of it, through kills, moves,
and resumes that divide it otherwise or not at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from job_harness import Job, Jobs, same

SCRIPT = """
import os, time, torch
from torch import nn
import everstep

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(160, 40), torch.randn(160, 1))
model = nn.Sequential(
    nn.Linear(40, 700), nn.BatchNorm1d(700), nn.Tanh(), nn.Linear(700, 500), nn.Dropout(0.1), nn.Linear(500, 1))
def groups():
    return [{"params": model[:3].parameters()}, {"params": model[3:].parameters(), "weight_decay": 0.1}]
optimizer = torch.optim.{optimizer}
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
run = everstep.join(model, optimizer, data, lanes=6, micro_batch=3, steps=24, scheduler=scheduler, clip_norm=1.0)
for step in run:
    for x, y in step:
        time.sleep(float(os.environ.get("LANE_S", "0")))
        step.backward(nn.functional.mse_loss(model(x), y))
"""
ADAMW = "AdamW(groups(), lr=0.01, amsgrad=True)"
ZERO = {"zero.stage": 1}
PACED = {"LANE_S": "0.03"}


LATE = """
import os, time, torch
from torch import nn
import everstep

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(160, 40), torch.randn(160, 1))

class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(40, 700), nn.Tanh(), nn.Linear(700, 500), nn.Linear(500, 1))
        self.side, self.never = nn.Linear(40, 9000), nn.Linear(40, 5000)

    def forward(self, x, late):
        return self.body(x) + self.side(x).mean(1, keepdim=True) if late else self.body(x)

model = Late()
run = everstep.join(model, torch.optim.AdamW(model.parameters(), lr=0.01), data, lanes=6, micro_batch=3, steps=18)
for step in run:
    for x, y in step:
        time.sleep(float(os.environ.get("LANE_S", "0")))
        step.backward(nn.functional.mse_loss(model(x, step.number > 9), y))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT.replace("{optimizer}", ADAMW))
    return str(path)


def ended_alike(job: Job, reference: Path) -> None:
    assert job.end() == 0, job.account()
    same(reference, job)


@pytest.mark.parametrize("copies", [1, pytest.param(2, marks=pytest.mark.longer)])
@pytest.mark.parametrize(
    "phase",
    [pytest.param("reduce", marks=pytest.mark.longer), "agree", pytest.param("update", marks=pytest.mark.longer)],
)
def test_who_holds_a_part_is_killed_and_comes_back(
    jobs: Jobs, script: str, reference: Path, copies: int, phase: str
) -> None:
    """With one copy what it held is gone, and all go back to the checkpoint; with two nothing is."""
    chaos = f"kill:target=worker:1,at=8,phase={phase}; kill:target=leader:0,at=16,phase={phase}"
    settings = {**ZERO, "zero.copies": copies, "checkpoint.disk.every_steps": 3}
    job = jobs.start(script, workers=3, settings=settings, chaos=chaos, environment=PACED)
    ended_alike(job, reference)
    assert len(job.of_kind("fault_injected")) == 2, job.account()
    assert bool(job.of_kind("fallback")) == (copies == 1), job.account()


@pytest.mark.longer
@pytest.mark.parametrize("copies", [1, 2])
def test_parts_of_gradients_go_over_sockets_too(jobs: Jobs, script: str, reference: Path, copies: int) -> None:
    """Blocks leave while others are computed, perhaps before their taker has come to the step."""
    chaos = "kill:target=worker:1,at=8,phase=reduce; kill:target=leader:0,at=16,phase=agree"
    settings = {**ZERO, "zero.copies": copies, "checkpoint.disk.every_steps": 3, "transport": "sockets"}
    job = jobs.start(script, workers=4, settings=settings, chaos=chaos, environment=PACED)
    ended_alike(job, reference)
    assert len(job.of_kind("fault_injected")) == 2, job.account()


@pytest.mark.longer
def test_both_holders_of_a_part_are_killed_at_once(jobs: Jobs, script: str, reference: Path) -> None:
    job = jobs.start(script, workers=4, settings=ZERO, environment=PACED)
    job.wait_for("step_committed", step=5)
    pids = [job.pid_of(worker_id) for worker_id in (1, 2, 3)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    ended_alike(job, reference)


@pytest.mark.longer
@pytest.mark.parametrize("worker_id", [0, 1])
def test_a_worker_dies_while_the_result_is_brought_together(
    jobs: Jobs, script: str, reference: Path, worker_id: int
) -> None:
    settings = {**ZERO, "zero.copies": 1, "checkpoint.disk.every_steps": 3}
    job = jobs.start(script, workers=3, settings=settings, environment=PACED)
    job.wait_for("step_committed", step=24)
    os.kill(job.pid_of(worker_id), signal.SIGKILL)
    ended_alike(job, reference)


@pytest.mark.longer
def test_a_worker_that_has_just_copied_its_part_is_given_another_before_its_first_update(
    jobs: Jobs, script: str, reference: Path
) -> None:
    """What it has not copied lies in memory that nobody has filled."""
    settings = {**ZERO, "on_failure": "shrink"}  # none comes back before the update
    job = jobs.start(script, workers=2, settings=settings, environment={"LANE_S": "0.1"})
    job.wait_for("step_committed", step=2)
    assert jobs.command(["scale", str(job.run_dir), "--workers", "3"], job.run_dir.with_name("scaled")).end() == 0
    job.wait_for("worker_healed", worker_id=2)  # after which a step takes 0.3 s
    os.kill(job.pid_of(0), signal.SIGKILL)
    ended_alike(job, reference)


@pytest.mark.parametrize("policy", ["shrink", pytest.param("wait", marks=pytest.mark.longer)])
def test_with_one_copy_those_who_are_left_go_back_whatever_becomes_of_who_died(
    jobs: Jobs, script: str, reference: Path, policy: str
) -> None:
    """A script that calls join cannot go back: its workers end, and begin again from the checkpoint."""
    settings = {**ZERO, "zero.copies": 1, "on_failure": policy, "checkpoint.disk.every_steps": 3}
    chaos = "kill:target=worker:1,at=8,phase=reduce; kill:target=worker:0,at=16,phase=update"
    job = jobs.start(script, workers=4, settings=settings, chaos=chaos, environment=PACED)
    ended_alike(job, reference)
    assert job.of_kind("fallback"), job.account()
    last = job.of_kind("generation_started")[-1]
    assert len(last["workers"]) == last["target"] == (2 if policy == "shrink" else 4), job.account()


@pytest.mark.longer
@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param((1, 3), (0, 2), marks=pytest.mark.longer),
        ((0, 2), (1, 4)),
        pytest.param((1, 2), (1, 3), marks=pytest.mark.longer),
        pytest.param((1, 3), (1, 1), marks=pytest.mark.longer),
    ],
)
def test_it_is_resumed_otherwise_divided_or_not_at_all(
    jobs: Jobs, script: str, reference: Path, first: tuple[int, int], then: tuple[int, int]
) -> None:
    job = jobs.start(script, workers=first[1], settings={"zero.stage": first[0]}, environment=PACED)
    job.wait_for("step_committed", step=7)
    os.kill(job.launcher_pid(), signal.SIGTERM)
    assert job.end() == 143, job.account()
    settings = {"zero.stage": then[0], "zero.copies": 1}
    again = jobs.start(script, workers=then[1], settings=settings, run_dir=job.run_dir)
    ended_alike(again, reference)


@pytest.mark.longer
def test_members_come_and_go_and_a_bit_that_flips_in_a_part_is_found(jobs: Jobs, script: str, reference: Path) -> None:
    settings = {**ZERO, "verify_every": 4}
    job = jobs.start(script, workers=2, settings=settings, environment={"LANE_S": "0.05"})
    job.wait_for("step_committed", step=3)
    assert jobs.command(["scale", str(job.run_dir), "--workers", "4"], job.run_dir.with_name("scale")).end() == 0
    job.wait_for("worker_joined", worker_id=3)
    assert jobs.command(["drain", str(job.run_dir), "0"], job.run_dir.with_name("drain")).end() == 0
    ended_alike(job, reference)


@pytest.mark.longer
def test_what_workers_hold_alone_is_copied_before_they_leave(jobs: Jobs, script: str, reference: Path) -> None:
    """With one copy of each part that is so for each worker, with two for two that leave together."""
    job = jobs.start(script, workers=5, settings=ZERO | {"zero.copies": 1}, environment={"LANE_S": "0.05"})
    job.wait_for("step_committed", step=3)
    assert jobs.command(["drain", str(job.run_dir), "0"], job.run_dir.with_name("drained")).end() == 0
    job.wait_for("generation_started", lambda event: len(event["workers"]) == 4)
    assert jobs.command(["scale", str(job.run_dir), "--workers", "2"], job.run_dir.with_name("fewer")).end() == 0
    ended_alike(job, reference)
    assert not job.of_kind("fallback") and len(job.of_kind("generation_started")[-1]["workers"]) == 2, job.account()


@pytest.mark.longer
@pytest.mark.parametrize("copies", [1, 2])
def test_parameters_that_are_used_late_or_never(jobs: Jobs, tmp_path: Path, copies: int) -> None:
    (tmp_path / "train.py").write_text(LATE)
    alone = jobs.start(str(tmp_path / "train.py"), workers=1)
    assert alone.end() == 0, alone.account()
    settings = {**ZERO, "zero.copies": copies, "verify_every": 3, "checkpoint.disk.every_steps": 2}
    chaos = "kill:target=worker:1,at=10,phase=update; kill:target=worker:2,at=14,phase=agree"
    job = jobs.start(str(tmp_path / "train.py"), workers=3, settings=settings, chaos=chaos, environment=PACED)
    ended_alike(job, alone.run_dir)


def test_a_checkpoint_after_the_step_in_which_parameters_get_their_state_is_that_state(
    jobs: Jobs, tmp_path: Path
) -> None:
    """That moves the borders of all segments, so members hold other blocks than the plan gives them."""
    body, side = "        self.body = ", "        self.side, "
    first = LATE.replace(side, "        self.last, ").replace(body, f"        self.side = nn.Linear(40, 9000)\n{body}")
    (tmp_path / "train.py").write_text(first.replace("nn.Linear(40, 9000), nn.Linear(40, 5000)", "None, None"))
    alone = jobs.start(str(tmp_path / "train.py"), workers=1)
    assert alone.end() == 0, alone.account()
    settings = {**ZERO, "zero.copies": 1, "checkpoint.disk.every_steps": 10}
    environment = {"LANE_S": "0.08"}
    job = jobs.start(str(tmp_path / "train.py"), workers=2, settings=settings, environment=environment)
    taken = job.wait_for("checkpoint_completed", lambda event: event["step"] >= 10)["step"]
    os.kill(job.pid_of(1), signal.SIGKILL)
    ended_alike(job, alone.run_dir)
    assert job.of_kind("fallback")[0]["step"] == taken == 11, job.account()


@pytest.mark.longer
def test_stages_divide_the_state_of_each_pool(jobs: Jobs) -> None:
    settings = {"stages": 2, **ZERO, "zero.copies": 1, "checkpoint.disk.every_steps": 4}
    chaos = "kill:target=worker:3,at=6,phase=update"
    jobs.run("Pictures", workers=4, settings=settings, chaos=chaos)


@pytest.mark.longer
def test_as_many_copies_as_workers_are_all_of_it_and_said(jobs: Jobs, script: str, reference: Path) -> None:
    job = jobs.start(script, workers=1, settings=ZERO)
    ended_alike(job, reference)
    assert "saves no memory where a stage has no more workers (1) than zero.copies (2)" in job.account()


def test_a_new_job_is_not_told_to_keep_more_copies_than_it_has_workers(jobs: Jobs, script: str) -> None:
    job = jobs.start(script, workers=2, settings=ZERO | {"zero.copies": 3})
    assert job.end() == 2
    assert "error: zero.copies: expected at most 2, the workers in all, got 3: set zero.copies=2" in job.account()
    assert not job.run_dir.exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("optimizer.register_step_post_hook(lambda *_: None)", "expected no step post-hooks of AdamW"),
        pytest.param(
            "optimizer.register_step_pre_hook(lambda *_: None)",
            "expected no step pre-hooks of AdamW",
            marks=pytest.mark.longer,
        ),
        pytest.param("optimizer.state_dict()", "no worker has all of the state of AdamW", marks=pytest.mark.longer),
        pytest.param(
            "next(iter(optimizer.state.values()), {}).get('exp_avg')",
            "the loop cannot read optimizer.state",
            marks=pytest.mark.longer,
        ),
        ("optimizer.state[next(model.parameters())]", "the loop cannot read optimizer.state"),
    ],
)
def test_what_would_see_a_part_as_the_whole_is_refused_by_name(
    jobs: Jobs, tmp_path: Path, line: str, said: str
) -> None:
    text = SCRIPT.replace("{optimizer}", ADAMW)
    at = "scheduler = " if "hook" in line else "        time.sleep"
    indent = "        " if "hook" not in line else ""
    (tmp_path / "train.py").write_text(text.replace(at, f"{indent}{line}\n{at}", 1))
    job = jobs.start(str(tmp_path / "train.py"), workers=2, settings=ZERO | {"zero.copies": 1})
    assert job.end() == 2, job.account()
    assert said in job.of_kind("job_failed")[0]["reason"], job.account()
