"""Jobs that are stopped, killed or asked for checkpoints, and go on: bitwise the run that was never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.ledger import audit_run
from job_harness import HERE, Event, Job, Jobs, same

TASK = f"{HERE / 'job_tasks.py'}:"
ENDLESS = [{"kind": "job_completed"}]
"""A pace: take time in every lane, until somebody stops the job."""


def step(number: int) -> Callable[[Event], bool]:
    return lambda event: event["step"] is not None and event["step"] >= number


def again(jobs: Jobs, before: Job, task: str, *options: str, workers: int, **how: Any) -> Job:
    """Run the same task in the same directory."""
    return jobs.start(task, *options, workers=workers, run_dir=before.run_dir, **how)


def stop(job: Job, number: int) -> int:
    """Send the launcher a signal; returns the exit code."""
    os.kill(job.launcher_pid(), number)
    return job.end()


def kill_all(job: Job) -> None:
    """SIGKILL launcher, coordinator and workers at once."""
    pids = [job.launcher_pid()]
    pids += [e["pid"] for e in job.of_kind("worker_joined")]
    pids.append(json.loads((job.run_dir / "coordinator.json").read_text())["pid"])
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert job.over(30)


def everstep(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "everstep", *argv], capture_output=True, text=True, timeout=120, check=False
    )


def test_an_interrupted_job_goes_on_with_other_workers_and_stages(jobs: Jobs) -> None:
    job = jobs.start("Pictures", workers=2, pace=ENDLESS)
    job.wait_for("step_committed", step(8))
    assert stop(job, signal.SIGINT) == 130, job.account()
    saved = job.of_kind("checkpoint_completed")[-1]["step"]
    assert saved >= 8 and f"checkpoint of step {saved}" in job.of_kind("job_failed")[0]["reason"], job.account()
    assert job.of_kind("step_committed")[-1]["step"] == saved == audit_run(job.run_dir).steps, job.account()
    job = again(jobs, job, "Pictures", "--stages", "3", workers=3, pace=ENDLESS)
    job.wait_for("step_committed", step(saved + 5))
    assert stop(job, signal.SIGTERM) == 143, job.account()
    job = again(jobs, job, "Pictures", workers=1)
    assert job.end() == 0, job.account()
    same(jobs.reference("Pictures"), job)
    starts = [event["step"] for event in job.of_kind("job_started")]
    assert starts[0] == 0 and starts[1] == saved and starts[2] > saved, job.account()


@pytest.mark.longer
def test_a_job_that_was_killed_as_a_whole_goes_on_from_its_newest_checkpoint(jobs: Jobs) -> None:
    rule = {"checkpoint.disk.every_steps": 4}
    job = jobs.start("Pictures", "--stages", "2", workers=2, settings=rule, pace=ENDLESS)
    job.wait_for("checkpoint_completed", step(8))
    job.wait_for("step_committed", step(10))
    kill_all(job)
    job = again(jobs, job, "Pictures", workers=3, settings=rule)
    assert job.end() == 0, job.account()
    same(jobs.reference("Pictures"), job)
    assert job.of_kind("job_started")[-1]["step"] >= 8


@pytest.mark.longer
def test_all_workers_die_at_once_while_the_launcher_lives(jobs: Jobs) -> None:
    job = jobs.start("PicturesOneCycle", workers=2, settings={"checkpoint.disk.every_steps": 4}, pace=ENDLESS)
    job.wait_for("checkpoint_completed", step(8))
    for event in job.of_kind("worker_joined"):
        os.kill(event["pid"], signal.SIGKILL)
    fallback = job.wait_for("fallback", lambda event: event["step"] is not None)
    assert fallback["step"] >= 8 and "checkpoint of step" in fallback["reason"]
    jobs.check(job, "PicturesOneCycle")


@pytest.mark.longer
def test_the_newest_checkpoint_is_damaged_and_the_next_older_one_is_used(jobs: Jobs) -> None:
    job = jobs.start("Pictures", workers=2, settings={"checkpoint.disk.every_steps": 5}, pace=ENDLESS)
    job.wait_for("checkpoint_completed", step(10))
    job.wait_for("step_committed", step(12))
    assert stop(job, signal.SIGINT) == 130
    newest = max((job.run_dir / "checkpoints").glob("step-*/manifest.json")).parent
    part = next(newest.glob("part-*"))
    data = bytearray(part.read_bytes())
    data[-1000] ^= 4
    part.write_bytes(data)
    job = again(jobs, job, "Pictures", workers=3)
    assert job.end() == 0, job.account()
    same(jobs.reference("Pictures"), job)
    told = [event for event in job.of_kind("fallback") if event.get("what") == "checkpoint"]
    assert [str(event["step"]) in newest.name for event in told] == [True], job.account()
    assert "does not match its digest" in told[0]["reason"] and "set aside" in told[0]["reason"]
    assert list(newest.glob("damaged-*"))


@pytest.mark.longer
def test_a_checkpoint_on_request_starts_another_job(jobs: Jobs) -> None:
    job = jobs.start("Pictures", workers=2, pace=ENDLESS)
    job.wait_for("step_committed", step(3))
    reply = everstep("checkpoint", str(job.run_dir), "--json")
    assert reply.returncode == 0, reply.stderr
    told = json.loads(reply.stdout)
    assert (Path(told["path"]) / "manifest.json").exists()
    copy = jobs.base / "brought"
    shutil.copytree(job.run_dir / "checkpoints", copy)
    assert stop(job, signal.SIGTERM) == 143
    over = everstep("checkpoint", str(job.run_dir))
    assert over.returncode == 2 and "no job is running" in over.stderr and len(over.stderr.splitlines()) == 1
    job = jobs.start("Pictures", "--resume-from", str(copy), workers=1)
    assert job.end() == 0, job.account()
    got, expected = ((d / "final" / "digest.json").read_text() for d in (job.run_dir, jobs.reference("Pictures")))
    assert got == expected and audit_run(job.run_dir).clean
    assert job.of_kind("job_started")[0]["step"] == told["step"]
    other = jobs.start("Pictures", "--resume-from", str(copy), workers=1, numerics={"seed": 5})
    assert other.end() == 2
    assert "seed is 0 there, 5 here" in other.run_dir.with_suffix(".err").read_text()


@pytest.mark.longer
def test_a_model_of_another_kind_is_refused_by_its_tensors(jobs: Jobs) -> None:
    source = jobs.reference("Pictures")
    job = jobs.start("Layers", "--resume-from", str(source), workers=1, settings={"checkpoint.allow_mismatch": "true"})
    assert job.end() == 2, job.account()
    text = job.run_dir.with_suffix(".err").read_text()
    assert "of another model" in text and " is " in text and "missing" in text, text


@pytest.mark.longer
def test_a_loop_that_raises_leaves_its_state(jobs: Jobs) -> None:
    job = jobs.start("Pictures", workers=1, chaos="raise:target=worker:0,at=7", settings={"max_restarts": 3})
    jobs.check(job, "Pictures")
    saved = [event for event in job.of_kind("checkpoint_completed") if "before the end" in event["reason"]]
    assert saved and saved[0]["step"] == 6, job.account()
    assert [e["step"] for e in job.of_kind("fallback") if e["step"] is not None] == [6], job.account()


@pytest.mark.longer
def test_all_loops_raise_at_once_and_leave_their_state(jobs: Jobs, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("3")
    environment = {"EVERSTEP_TEST_BREAK": str(broken)}
    job = jobs.start("BreaksLater", workers=3, environment=environment)
    assert job.end() == 1, job.account()
    ended = job.of_kind("job_failed")[-1]["reason"]
    assert "the data of step 7 cannot be read" in ended and "checkpoint of step 6 in" in ended, job.account()
    saved = [e for e in job.of_kind("checkpoint_completed") if "before the end of worker" in e["reason"]]
    assert [e["step"] for e in saved] == [6], job.account()  # once, at the first time
    assert [e["step"] for e in job.of_kind("fallback") if e["step"] is not None] == [6], job.account()
    broken.unlink()
    resumed = again(jobs, job, "BreaksLater", workers=2, environment=environment)
    jobs.check(resumed, "BreaksLater")
    assert resumed.of_kind("job_started")[-1]["step"] == 6, resumed.account()


@pytest.mark.longer
@pytest.mark.skipif(not Path("/dev/shm").is_dir() or os.geteuid() != 0, reason="mounts a small file system")
def test_training_goes_on_when_the_disk_is_full(jobs: Jobs, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        (small / "ballast").write_bytes(bytes(900_000))
        rule = {"checkpoint.disk.every_steps": 5, "checkpoint.disk.path": str(small)}
        job = jobs.run("Pictures", workers=2, settings=rule)
        failed = job.of_kind("checkpoint_failed")
        assert failed and "No space left" in failed[0]["reason"], job.account()
        assert failed[0]["cause"] == "disk"
    finally:
        subprocess.run(["umount", str(small)], check=False)


SCRIPT = """
import os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
import everstep

generator = torch.Generator().manual_seed(1)
train = TensorDataset(torch.randn(160, 6, generator=generator), torch.randn(160, 1, generator=generator))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

class History:
    losses = torch.zeros(0, dtype=torch.float64)
    best = 9.0
    def state_dict(self): return {"losses": self.losses, "best": self.best}
    def load_state_dict(self, state): self.losses, self.best = state["losses"], state["best"]

history = History()
run = everstep.join(model, torch.optim.SGD(model.parameters(), lr=0.1), train, lanes=8, micro_batch=2, steps=24,
                    state={"history": history})
for step in run:
    for x, y in step:
        time.sleep(float(os.environ.get("LANE_S", "0")))
        step.backward(nn.functional.mse_loss(model(x), y))
    history.losses = torch.cat([history.losses, torch.tensor([step.loss], dtype=torch.float64)])
    if step.number % 4 == 0:
        def errors(batch):
            squares = ((model(batch[0]) - batch[1]) ** 2).sum().double()
            return {"mse": torch.stack([squares, torch.tensor(float(len(batch[1])), dtype=torch.float64)])}
        found = run.evaluate(errors, train)
        history.best = min(history.best, found["mse"])
if run.is_main:
    print("history", len(history.losses), history.losses.sum().item().hex(), history.best.hex())
"""


@pytest.mark.longer
def test_a_script_goes_on_with_what_it_had_learned(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "learns.py"
    script.write_text(SCRIPT)
    undisturbed = jobs.start(str(script), workers=1)
    assert undisturbed.end() == 0, undisturbed.account()
    rule = {"checkpoint.best_metric": "mse", "checkpoint.best_mode": "min", "checkpoint.disk.keep_best": 1}
    job = jobs.start(str(script), workers=2, settings=rule, environment={"LANE_S": "0.04"})
    job.wait_for("checkpoint_completed", reason="the best so far")
    job.wait_for("step_committed", step(9))
    assert stop(job, signal.SIGTERM) == 143
    job = again(jobs, job, str(script), workers=3, settings=rule)
    assert job.end() == 0, job.account()
    same(undisturbed.run_dir, job)
    said = [
        (j.run_dir / "logs" / "output.log").read_text().splitlines()[-1].partition(" ")[2] for j in (undisturbed, job)
    ]
    assert said[0].startswith("history 24 ") and said[0] == said[1], job.account()
    best = (job.run_dir / "checkpoints" / "best.json").read_text()
    assert '"metric":"mse"' in best.replace(" ", ""), best


ALONE = (
    SCRIPT.replace("import os, time, torch", "import os, sys, time, torch")
    .replace(
        'state={"history": history})',
        'state={"history": history}, run_dir=sys.argv[1], checkpoint={"disk": {"every_steps": 3}})',
    )
    .replace(
        "for step in run:", "for step in run:\n    if step.number == int(os.environ.get('STOP_AT', '0')): os._exit(9)"
    )
)


@pytest.mark.longer
def test_a_script_by_itself_goes_on_too(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE)

    def run(run_dir: Path, stop_at: int) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "STOP_AT": str(stop_at)}
        command = [sys.executable, str(script), str(run_dir), *more]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    more = 200 * ["x" * 1000]  # more than one argument alone may have
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(whole, 0).returncode == 0 and run(stopped, 17).returncode == 9
    again = run(stopped, 0)
    assert again.returncode == 0 and run(whole, 0).returncode == 0, again.stderr
    assert (whole / "final" / "digest.json").read_text() == (stopped / "final" / "digest.json").read_text()
    assert "history 24 " in again.stdout
