"""Streams in jobs: any topology reads every sample once and ends with the same bits; a changed stream is refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from everstep.base.given import read_json
from job_harness import Job, Jobs, healed, same

SCRIPT = """
import os, sys
import torch
from torch import nn
from torch.utils.data import IterableDataset

sys.path.insert(0, {tests!r})
import everstep
from job_tasks import PACE, Pace

N, FIRST = int(os.environ.get("STREAM_N", 50)), int(os.environ.get("STREAM_FIRST", 0))


class Numbers(IterableDataset):
    at, resumed = 0, False

    def __init__(self, tells):
        self.tells, self.epoch = tells, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.at, self.resumed = self.at if self.resumed else 0, False
        while self.at < N:
            i, self.at = FIRST + self.at, self.at + 1
            drawn = torch.Generator().manual_seed(1000 * self.epoch + i)
            yield torch.randn(4, generator=drawn) + 0.1 * torch.rand(4), torch.tensor(i % 2)


class Placed(Numbers):
    def state_dict(self):
        return {{"at": self.at}}

    def load_state_dict(self, state):
        self.at, self.resumed = state["at"], True


pace = Pace(os.environ.get(PACE, ""))
torch.manual_seed(7)
data = {kind}(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
run = everstep.join(
    model, optimizer, data, lanes=4, micro_batch=2, epochs=3,
    run_dir=sys.argv[1] if len(sys.argv) > 1 else None,
)
for step in run:
    for x, y in step:
        pace.lane()
        step.backward(nn.functional.cross_entropy(model(x), y))
"""
SAVED = {"lanes": 4, "checkpoint.disk.every_steps": 4}


def written(folder: Path, kind: str) -> str:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), kind=kind))
    return str(script)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("placed"), "Placed")


@pytest.fixture(scope="module")
def plain(jobs: Jobs, script: str) -> Path:
    """The directory of the script's run by itself."""
    job = jobs.plainly(script)
    assert job.end() == 0, job.account()
    assert read_json(job.run_dir / "dataset.json")["size"] == 50
    return job.run_dir


def stopped(jobs: Jobs, script: str, workers: int, step: int, run_dir: Path | None = None) -> Path:
    """The directory of a job that was interrupted after this step, or went on from there and was again."""
    job = jobs.start(script, workers=workers, settings=SAVED, pace=[{"kind": "never"}], run_dir=run_dir)
    job.wait_for("step_committed", step=step)
    os.kill(job.launcher_pid(), signal.SIGINT)
    assert job.end() == 130, job.account()
    return job.run_dir


def test_a_stream_is_read_once_by_workers_that_die_and_heal(jobs: Jobs, script: str, plain: Path) -> None:
    settings = {**SAVED, "loader.workers": 1}
    chaos = "kill:target=worker:1,at=9; kill:target=leader:0,at=12,phase=load"
    job = jobs.start(script, workers=3, settings=settings, chaos=chaos, pace=[healed(1)])
    assert job.end() == 0, job.account()
    same(plain, job)


@pytest.mark.longer
def test_a_loader_of_a_stream_gives_the_same_samples(jobs: Jobs, tmp_path: Path, plain: Path) -> None:
    """The processes of the loader are the job's own, so that a stream which shares itself out among them by
    get_worker_info is read whole."""
    loader = "torch.utils.data.DataLoader(Placed(0), batch_size=8, num_workers=2, pin_memory=True)"
    text = SCRIPT.replace("data = {kind}(0)", f"data = {loader}").replace("lanes=4, micro_batch=2", "lanes=4")
    script = tmp_path / "train.py"
    script.write_text(text.format(tests=str(Path(__file__).parents[1])))
    job = jobs.start(str(script), workers=3, chaos="kill:target=worker:1,at=9", pace=[healed(1)])
    assert job.end() == 0, job.account()
    same(plain, job)


@pytest.mark.longer
def test_a_stream_without_a_place_is_skipped_by_count(jobs: Jobs, tmp_path: Path, plain: Path) -> None:
    """It gives the same samples, so it ends with the same bits; the cost is said."""
    script = written(tmp_path, "Numbers")
    run_dir = stopped(jobs, script, 2, 3)
    job = jobs.start(script, workers=1, settings=SAVED, run_dir=run_dir)
    assert job.end() == 0, job.account()
    same(plain, job)
    assert "samples of the stream Numbers are read again, and skipped" in job.of_kind("warning")[0]["reason"]


@pytest.mark.longer
def test_a_stream_is_resumed_twice_on_other_sizes(jobs: Jobs, script: str, plain: Path) -> None:
    run_dir = stopped(jobs, script, 3, 5)
    stopped(jobs, script, 1, 12, run_dir)
    last = jobs.start(script, workers=2, settings=SAVED, run_dir=run_dir)
    assert last.end() == 0, last.account()
    same(plain, last)
    assert not last.of_kind("warning"), last.account()


@pytest.mark.longer
def test_a_stream_that_changed_is_refused(jobs: Jobs, script: str) -> None:
    run_dir = stopped(jobs, script, 1, 3)

    def resumed(**environment: str) -> Job:
        return jobs.start(script, workers=1, settings=SAVED, run_dir=run_dir, environment=environment)

    again = resumed(STREAM_FIRST="1")
    assert again.end() == 2, again.account()
    assert "begins with other samples than before" in again.of_kind("job_failed")[-1]["reason"]
    shorter = resumed(STREAM_N="40")
    assert shorter.end() == 2, shorter.account()
    assert "ended after 40 of its 50 samples" in shorter.of_kind("job_failed")[-1]["reason"]
