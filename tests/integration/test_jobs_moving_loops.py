"""A loop that changes trained tensors after the batches of a step (it clips weights, say): workers that follow others
get what it has changed, and no copy of a state has some of before that and some of after."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from everstep.checkpoint.names import BEST, LATEST
from everstep.checkpoint.pointers import read_pointer
from everstep.checkpoint.store import DirectoryStore
from job_harness import Jobs, same

SCRIPT = """
import glob, os, signal, time, torch
from torch import nn
import everstep

torch.manual_seed(0)
width, steps = int(os.environ.get("WIDTH", "64")), int(os.environ.get("STEPS", "48"))
model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(64, width), torch.randn(64, width))
run = everstep.join(model, optimizer, data, lanes=6, micro_batch=2, steps=steps)
for step in run:
    {before}
    for x, y in step:
        time.sleep(float(os.environ.get("LANE_S", "0")))
        step.backward(nn.functional.mse_loss(model(x), y))
    with torch.no_grad():
        {after}
"""
AFTER = {
    "always": "for p in model.parameters(): p.mul_(0.99)",
    "hidden": "for p in model.parameters(): p.data.mul_(0.99)",
    "late": """
        if step.number % 7 == 6:
            model[0].weight.mul_(0.9)
            model[1].running_mean.add_(0.1)
            model[2].bias.data = model[2].bias.data * 0.9
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
    """,
    "seldom": """
        if step.number % 2 and step.number > 1:  # in no round in which all look
            for p in model.parameters(): p.data.mul_(0.9)
    """,
    "swapped": """
        if step.number == 3:
            trained = [p.clone() for p in model.parameters()]
            for p in model.parameters():
                p.data.mul_(0.5)
            run.evaluate(lambda batch: {"tried": torch.tensor([0.5, 1.0])}, data, batch_size=64)
            left = int(os.environ.get("LOOKS", "0"))
            fallen = os.environ.get("FALLS", "")
            if fallen and not run.is_main and not os.path.exists(fallen):
                open(fallen, "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
            run.barrier()
            while left and not glob.glob(os.environ["MANIFEST"]):
                left -= 1
                time.sleep(0.01)
            for p, old in zip(model.parameters(), trained):
                p.data.copy_(old)
        while step.number == 4 and "MANIFEST" in os.environ and not glob.glob(os.environ["MANIFEST"]):
            time.sleep(0.01)
    """,
    "ended": """
        fallen = os.environ.get("FALLS", "")
        if step.number == run.total_steps and fallen and not run.is_main and not os.path.exists(fallen):
            open(fallen, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        for p in model.parameters(): p.mul_(0.9)
    """,
    "left": """
        for p in model.parameters(): p.mul_(0.9)
        run.evaluate(lambda batch: {"tried": torch.tensor([0.5 * step.number, 1.0])}, data, batch_size=64)
        if step.number == 3:
            break
    """,
    "read": """
        fallen = os.environ.get("FALLS", "")
        if step.number == 3 and fallen and not run.is_main and not os.path.exists(fallen):
            open(fallen, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        run.evaluate(lambda batch: {"most": (model(batch[0]).data.max(1)[0].sum(), 64)}, data, batch_size=32)
    """,
}


def write(folder: Path, after: str, before: str = "pass") -> str:
    script = folder / "moves.py"
    script.write_text(SCRIPT.replace("{after}", AFTER.get(after, after).strip()).replace("{before}", before))
    return str(script)


@pytest.mark.parametrize(
    ("after", "before"),
    [
        pytest.param("always", "pass", marks=pytest.mark.longer),
        ("late", "seen = step.number"),
        pytest.param("hidden", "pass", marks=pytest.mark.longer),
    ],
)
def test_workers_that_heal_follow_it(jobs: Jobs, tmp_path: Path, after: str, before: str) -> None:
    """They apply several steps of others before they run the loop themselves: it is not held up for them."""
    script = write(tmp_path, after, before)
    alone = jobs.start(script, workers=1)
    chaos = "kill:target=worker:1,at=8; kill:target=worker:0,at=28"
    job = jobs.start(script, workers=3, chaos=chaos, environment={"LANE_S": "0.02"})
    assert alone.end() == 0, alone.account()
    assert job.end() == 0, job.account()
    same(alone.run_dir, job)


def test_a_worker_that_follows_gets_what_is_written_now_and_then_behind_the_version_counter(
    jobs: Jobs, tmp_path: Path
) -> None:
    script, quick = write(tmp_path, "seldom"), {"WIDTH": "900", "STEPS": "60"}
    alone = jobs.start(script, workers=1, environment=quick)
    job = jobs.start(script, workers=3, chaos="kill:target=worker:1,at=8", environment=quick)
    assert alone.end() == 0, alone.account()
    assert job.end() == 0, job.account()
    same(alone.run_dir, job)


@pytest.mark.longer
def test_a_checkpoint_is_of_one_moment_though_the_loop_changes_all_of_it(jobs: Jobs, tmp_path: Path) -> None:
    """A large state is written while the loop goes on; a job of one worker has nobody who would notice."""
    script, large = write(tmp_path, "always"), {"WIDTH": "1500", "STEPS": "16"}
    alone = jobs.start(script, workers=1, environment=large)
    job = jobs.start(script, workers=1, environment=large, settings={"checkpoint.disk.every_steps": 3})
    job.wait_for("checkpoint_completed")
    signal.pidfd_send_signal(job._pidfd, signal.SIGKILL)
    job.end()
    again = jobs.start(script, workers=2, run_dir=job.run_dir, environment=large)
    assert alone.end() == 0, alone.account()
    assert again.end() == 0, again.account()
    assert again.of_kind("job_started")[-1]["step"] > 0
    same(alone.run_dir, again)


@pytest.mark.parametrize(
    ("saves", "looks"),
    [
        (("disk.every_steps=3",), 1 << 30),
        (("disk.every_steps=100", "best_metric=tried", "disk.keep_best=1"), 30),  # it is taken after the round
    ],
)
def test_a_checkpoint_has_nothing_of_what_the_loop_puts_back(
    jobs: Jobs, tmp_path: Path, saves: tuple[str, ...], looks: int
) -> None:
    """It evaluates other weights, say, written behind the version counter, until the checkpoint is on disk."""
    script, large, run_dir = write(tmp_path, "swapped"), {"WIDTH": "700", "STEPS": "6"}, tmp_path / "killed"
    alone = jobs.start(script, workers=1, environment=large, settings={"rehearse": "false"})
    job = jobs.start(
        *(script, "--set", "rehearse=false", *(f"--set=checkpoint.{rule}" for rule in saves)),
        workers=1,
        chaos="kill:target=worker:0,at=5",
        run_dir=run_dir,
        environment={**large, "LOOKS": str(looks), "MANIFEST": f"{run_dir}/checkpoints/*3/manifest*"},
    )
    assert alone.end() == 0, alone.account()
    assert job.end() == 0, job.account()
    assert [event["step"] for event in job.of_kind("fallback")] == [3]
    same(alone.run_dir, job)


@pytest.mark.parametrize("saves", [{}, {"checkpoint.disk.every_steps": 2}])
def test_a_newcomer_does_not_get_what_the_loop_puts_back(jobs: Jobs, tmp_path: Path, saves: dict[str, int]) -> None:
    """A worker dies while all evaluate other weights, and no job goes on without its successor."""
    script = write(tmp_path, "swapped")
    alone = jobs.start(script, workers=1, settings={"rehearse": "false"}, environment={"STEPS": "6"})
    job = jobs.start(
        script,
        workers=2,
        settings={"rehearse": "false", "min_workers": 2, **saves},
        environment={"STEPS": "6", "FALLS": str(tmp_path / "fallen")},
    )
    assert alone.end() == 0, alone.account()
    assert job.end() == 0, job.account()
    assert len(job.of_kind("job_started")) == 1
    same(alone.run_dir, job)


def test_a_newcomer_after_the_last_step_does_not_make_the_loops_change_again(jobs: Jobs, tmp_path: Path) -> None:
    """The others have changed weights for good, and wait for the end."""
    script = write(tmp_path, "ended")
    alone = jobs.start(script, workers=1, settings={"rehearse": "false"}, environment={"STEPS": "4"})
    job = jobs.start(
        script,
        workers=2,
        settings={"rehearse": "false", "min_workers": 2, "checkpoint.disk.every_steps": 2},
        environment={"STEPS": "4", "FALLS": str(tmp_path / "fallen")},
    )
    assert alone.end() == 0, alone.account()
    assert job.end() == 0, job.account()
    assert (tmp_path / "fallen").exists()
    same(alone.run_dir, job)


def test_a_loop_left_after_its_best_evaluation_has_a_checkpoint_of_it(jobs: Jobs, tmp_path: Path) -> None:
    best = {"checkpoint.best_metric": "tried", "checkpoint.disk.keep_best": 1, "checkpoint.disk.every_steps": 100}
    job = jobs.start(write(tmp_path, "left"), workers=1, settings={"rehearse": "false", **best})
    assert job.end() == 0, job.account()
    store = DirectoryStore(job.run_dir / "checkpoints")
    assert read_pointer(store, LATEST) == read_pointer(store, BEST) == 3, job.account()


def test_a_newcomer_gets_the_live_state_of_a_loop_that_only_reads_data(jobs: Jobs, tmp_path: Path) -> None:
    """A worker dies while the other evaluates: no step is lost."""
    script = write(tmp_path, "read")
    alone = jobs.start(script, workers=1, settings={"rehearse": "false"}, environment={"STEPS": "5"})
    job = jobs.start(
        script,
        workers=2,
        settings={"rehearse": "false", "min_workers": 2},
        environment={"STEPS": "5", "FALLS": str(tmp_path / "fallen")},
    )
    assert alone.end() == 0, alone.account()
    assert job.end() == 0, job.account()
    assert (tmp_path / "fallen").exists() and not job.of_kind("fallback")
    same(alone.run_dir, job)


@pytest.mark.longer
def test_a_job_whose_state_is_divided_refuses_it_by_name(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start(write(tmp_path, "always"), workers=2, settings={"zero.stage": 1, "rehearse": "false"})
    assert job.end() != 0
    assert "parameter 0.weight was changed by the loop after the batches" in job.account()
