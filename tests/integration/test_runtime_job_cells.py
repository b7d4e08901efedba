"""Workers of several processes in a real job: they start, die, hang and leave as one, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import test_runtime_job as single
from test_runtime_job import HERE, Job, processes_of, runs, until

from everstep.observe.events import read_events
from everstep.runtime.commands import ask

ENTRY = "runtime_fake_worker:in_cells"
start = single.start


def pids_of(job: Job, worker_id: int) -> list[int]:
    found: list[int] = job.members()[worker_id]["pids"]
    return found


@pytest.mark.longer
def test_a_cell_from_start_to_end(start: Callable[..., Job]) -> None:
    job = start(ranks=3, entry=ENTRY)
    job.running({0: 0, 1: 0}, step=5)
    cells = [pids_of(job, i) for i in (0, 1)]
    assert len({pid for cell in cells for pid in cell}) == 6 and all(runs(pid) for cell in cells for pid in cell)
    started = {e["worker_id"]: (e["pid"], e["pids"]) for e in job.kinds("worker_started")}
    assert started == {i: (cell[0], cell) for i, cell in enumerate(cells)}
    assert [job.members()[i]["pid"] for i in (0, 1)] == [cell[0] for cell in cells]
    assert job.finish() == 0
    assert [e["in_order"] for e in job.kinds("worker_exited")] == [True, True]
    assert len(list(job.run_dir.glob("left-*"))) == 4, "limbs left by themselves when their heads let go of them"
    assert processes_of(job.run_dir) == []
    lines = (job.run_dir / "logs" / "worker-1.jsonl").read_text().splitlines()
    said = {(r["message"], r["pid"]) for r in map(json.loads, lines) if r["source"] == "stdout"}
    assert {(f"limb {k} of 1.0 of 3 starts", cells[1][k]) for k in (1, 2)} <= said


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.longer), 2])
def test_the_death_of_a_rank_ends_its_cell(start: Callable[..., Job], rank: int) -> None:
    job = start(ranks=3, entry=ENTRY)
    job.running({0: 0, 1: 0})
    cell = pids_of(job, 1)
    os.kill(cell[rank], signal.SIGKILL)
    job.running({0: 0, 1: 1})
    (exit_event,) = job.kinds("worker_exited")
    assert exit_event["reason"] == f"its rank {rank} was killed by SIGKILL" and exit_event["cause"] == "killed"
    assert exit_event["pid"] == cell[0]
    evicted = next(e for e in read_events(job.run_dir / "events.jsonl") if e["kind"] == "worker_evicted")
    assert (evicted["worker_id"], evicted["pid"], evicted["reason"]) == (1, cell[0], exit_event["reason"])
    assert not any(runs(pid) for pid in cell)
    assert len(pids_of(job, 1)) == 3 and not set(pids_of(job, 1)) & set(cell)
    assert job.finish() == 0


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.longer), 1])
def test_a_rank_that_is_stopped_is_a_worker_that_hangs(start: Callable[..., Job], rank: int) -> None:
    job = start(ranks=2, entry=ENTRY, hang_limit_s=1)
    job.running({0: 0, 1: 0})
    cell = pids_of(job, 1)
    os.kill(cell[rank], signal.SIGSTOP)
    job.running({0: 0, 1: 1})
    evicted = next(e for e in read_events(job.run_dir / "events.jsonl") if e["kind"] == "worker_evicted")
    assert (evicted["worker_id"], evicted["cause"]) == (1, "hung")
    assert evicted["reason"].startswith(f"its rank {rank}: no progress for ")
    assert not any(runs(pid) for pid in cell)
    assert job.finish() == 0


@pytest.mark.longer
def test_a_limb_that_raises_says_what(start: Callable[..., Job]) -> None:
    job = start(ranks=2, entry=ENTRY)
    job.running({0: 0, 1: 0})
    (job.run_dir / "bad-limb-1").touch()
    first = until(lambda: job.kinds("worker_exited"), "a death")[0]
    (job.run_dir / "bad-limb-1").unlink()
    assert first["reason"] == "its rank 1 ended with exit code 1: ValueError: this limb is bad"
    assert (first["worker_id"], first["cause"]) == (1, "exception")
    assert job.finish() == 0


@pytest.mark.longer
def test_cells_outlive_a_killed_fork_server_and_still_end_as_one(start: Callable[..., Job]) -> None:
    job = start(ranks=2, entry=ENTRY)
    job.running({0: 0, 1: 0})
    cells = [pids_of(job, i) for i in (0, 1)]
    os.kill(single.parent(cells[0][0]), signal.SIGKILL)
    until(lambda: len(job.kinds("fork_server_ready")) == 2, "another fork server")
    assert all(runs(pid) for cell in cells for pid in cell)
    os.kill(cells[1][1], signal.SIGKILL)
    job.running({0: 0, 1: 1})
    assert not any(runs(pid) for pid in cells[1]) and all(runs(pid) for pid in cells[0])
    assert job.finish() == 0


@pytest.mark.longer
def test_a_second_signal_ends_all_ranks_at_once(start: Callable[..., Job]) -> None:
    job = start(ranks=2, entry=ENTRY)
    job.running({0: 0, 1: 0})
    (job.run_dir / "stubborn").touch()
    job.process.interrupt(signal.SIGTERM)
    job.process.interrupt(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM
    assert processes_of(job.run_dir) == []


def test_when_the_job_is_killed_all_ranks_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    script = (
        "import sys; from pathlib import Path; from everstep.base.config import load_config;"
        "from everstep.runtime.job import Job; from everstep.runtime.start import Start;"
        "run_dir, config = Path(sys.argv[1]), load_config([('x', {'workers': 2})]);"
        f"Job(Start(config, '{ENTRY}', (), ranks=2, run_dir=run_dir, task='t')).run()"
    )
    run_dir = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", script, str(run_dir)])
    try:
        until(lambda: ask(run_dir, "status")["state"] == "running", "a running job")
        pids = [pid for worker in ask(run_dir, "status")["workers"] for pid in worker["pids"]]
        assert len(pids) == 4 and all(runs(pid) for pid in pids)
        process.kill()
        process.wait()
        until(lambda: not any(runs(pid) for pid in pids) and not processes_of(run_dir), "everything's end")
    finally:
        process.kill()
        process.wait()
