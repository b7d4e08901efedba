"""Scripts that leave their loop before the last step: in order, or, where workers disagree, with a word about who."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.cli.ledger import audit_run
from job_harness import LIMIT_S, Jobs

SCRIPT = """
import os, sys
import torch
from torch import nn
import everstep

torch.manual_seed(0)
data = [(torch.randn(4), torch.tensor(i % 2)) for i in range(64)]
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = everstep.join(model, optimizer, data, lanes=4, micro_batch=2, steps=12, rehearse=False)


def train():
    for step in run:
        for x, y in step:
            if sys.argv[1] == "inside" and step.number == 6:
                raise LookupError("enough")
            step.backward(nn.functional.cross_entropy(model(x), y))
        if sys.argv[1] == "leader" and step.number == 5 and run.is_main:
            return
        if sys.argv[1] in ("all", "twice") and step.number == 5:
            break
        if sys.argv[1] == "interrupt" and step.number == 5:
            raise KeyboardInterrupt
        if sys.argv[1] == "torn" and step.number == 5:
            os._exit(0)
    print("after the loop")


try:
    train()
except LookupError:
    print("after the loop")
if sys.argv[1] == "twice":
    for step in run:
        print("never")
"""


def script(folder: Path) -> str:
    path = folder / "leaves.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.longer
def test_a_job_whose_loops_are_left_is_complete(jobs: Jobs, tmp_path: Path) -> None:
    """A spare is there, which is not asked; the job is finished, and running it again says so."""
    text = script(tmp_path)
    job = jobs.start(text, "--spares", "1", "--", "all", workers=2)
    assert job.end() == 0, job.account()
    (completed,) = job.of_kind("job_completed")
    assert [e["step"] for e in job.of_kind("step_committed")] == [1, 2, 3, 4, 5] and completed["step"] == 5
    digest = json.loads((job.run_dir / "final" / "digest.json").read_text())
    assert digest["step"] == 5 and (job.run_dir / "checkpoints" / "step-0000000005").is_dir(), job.account()
    report = audit_run(job.run_dir)
    assert report.clean and report.steps == 5, report
    logs = {path.name: path.read_text() for path in (job.run_dir / "logs").iterdir()}
    assert all("after the loop" in logs[f"worker-{i}.jsonl"] for i in range(2)), job.account()
    assert not job.of_kind("worker_evicted") and len(job.of_kind("generation_started")) == 1, job.account()
    inside = jobs.start(text, "--", "inside", workers=2)
    assert inside.end() == 0, inside.account()
    assert json.loads((inside.run_dir / "final" / "digest.json").read_text()) == digest
    again = jobs.start(text, "--spares", "1", "--", "all", workers=2, run_dir=job.run_dir)
    assert again.end() == 0, again.account()
    assert "this job has finished: step 5" in again.run_dir.with_suffix(".out").read_text()


def test_a_script_by_itself_whose_iterator_is_let_go_finishes_though_no_thread_starts_at_exit(
    tmp_path: Path,
) -> None:
    """As from Python 3.12 on."""
    path, no_threads = tmp_path / "sliced.py", "atexit.register(setattr, threading.Thread, 'start', None)"
    head, loop = SCRIPT.split("    for step in run:\n", 1)[0], "    for step in itertools.islice(run, 5):\n"
    body = "        for x, y in step:\n            step.backward(nn.functional.cross_entropy(model(x), y))\n"
    head = head.replace("rehearse=False", "rehearse=False, run_dir=sys.argv[-1]")
    path.write_text(f"import atexit, itertools, threading\n{head}{loop}{body}\n\ntrain()\n{no_threads}\n")
    run_dir = tmp_path / "run"
    subprocess.run([sys.executable, str(path), "all", str(run_dir)], check=True, timeout=LIMIT_S)
    assert json.loads((run_dir / "final" / "digest.json").read_text())["step"] == 5
    assert (run_dir / "checkpoints" / "step-0000000005").is_dir()


def test_where_one_leaves_its_loop_the_job_says_who(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start(script(tmp_path), "--", "leader", workers=2)
    assert job.end() == 1, job.account()
    (failed,) = job.of_kind("job_failed")
    assert failed["cause"] == "left", job.account()
    assert "worker 0 left the loop after step 5, worker 1 went on" in failed["reason"]
    assert (job.run_dir / "checkpoints" / "step-0000000005").is_dir(), job.account()
    assert not (job.run_dir / "final").exists() and not job.of_kind("worker_evicted"), job.account()


@pytest.mark.longer
def test_what_is_no_exception_ends_the_job_as_one_does(jobs: Jobs, tmp_path: Path) -> None:
    """The state is held for a checkpoint; that it comes again in another life is seen."""
    job = jobs.start(script(tmp_path), "--", "interrupt", workers=2, settings={"backoff.initial_s": 0.05})
    assert job.end() == 1, job.account()
    (failed,) = job.of_kind("job_failed")
    assert failed["cause"] == "exception" and "KeyboardInterrupt" in failed["reason"], job.account()
    assert (job.run_dir / "checkpoints" / "step-0000000005").is_dir(), job.account()


@pytest.mark.longer
def test_a_process_that_ends_itself_in_a_step_has_not_left_in_order(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start(script(tmp_path), "--", "torn", workers=2, settings={"backoff.initial_s": 0.05})
    assert job.end() == 1, job.account()
    (failed,) = job.of_kind("job_failed")
    assert failed["cause"] == "crash_loop" and "exit code 0" in failed["reason"], job.account()


@pytest.mark.longer
def test_a_second_loop_and_what_else_fails_after_the_loop_is_told(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start(script(tmp_path), "--", "twice", workers=2)
    assert job.end() == 0, job.account()
    (completed,) = job.of_kind("job_completed")
    told = {event["worker_id"]: event["reason"] for event in job.of_kind("warning")}
    assert completed["step"] == 5 and told.keys() == {0, 1}, job.account()
    assert all("begun again, after step 5" in reason for reason in told.values()), told


def test_a_script_that_joins_twice_is_refused_before_it_trains(jobs: Jobs, tmp_path: Path) -> None:
    path = tmp_path / "twice.py"
    path.write_text(SCRIPT + "\nfor step in everstep.join(model, optimizer, data, lanes=4, steps=12):\n    pass\n")
    job = jobs.start(str(path), "--", "all", workers=2)
    assert job.end() == 2, job.account()
    (failed,) = job.of_kind("job_failed")
    line = 2 + SCRIPT.count("\n")
    assert f"everstep.join is called again, in line {line} of this script" in failed["reason"]
    assert not job.of_kind("step_committed"), job.account()
