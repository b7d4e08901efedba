"""Jobs on a Slurm of three nodes: an array, a node that dies, an element that is preempted or told to leave; srun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines_harness import Launched, clean, hold, write_script
from job_harness import LIMIT_S, Job, same
from slurm_cluster import Slurm, why_not

pytestmark = [
    pytest.mark.longer,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is Slurm"),
]
THREE = 3


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    found = Slurm(THREE)
    yield found
    found.close()


def until(true: Callable[[], object], what: Callable[[], str]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end_s, what()
        time.sleep(0.1)


class OnSlurm(Job):
    """A job that `everstep launch slurm` has submitted; `end` waits until the queue is empty of it."""

    def __init__(self, slurm: Slurm, run_dir: Path, script: Path) -> None:
        super().__init__(run_dir, f"launch slurm {script}", 0)
        self._slurm = slurm
        words = ["launch", "slurm", str(script), "--hosts", str(THREE), "--slots", "1", "--run-dir", str(run_dir)]
        words += ["--set", "lanes=4", "--", str(run_dir)]
        environment = clean({**slurm.environment, "EVERSTEP_ADDRESS": "127.0.0.1"})
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "everstep", *words], capture_output=True, text=True, env=environment
        )
        assert ended.returncode == 0, ended.stderr
        self.array = ended.stdout.split()[2].rstrip(";")

    def over(self, timeout_s: float = 0.0) -> bool:
        time.sleep(timeout_s)
        return False

    def state(self, index: int) -> str:
        """As squeue says it; "" if the element is gone."""
        return self._slurm.run("squeue", "-h", "-j", f"{self.array}_{index}", "-o", "%t").strip()

    def node(self, index: int) -> int:
        return int(self._slurm.run("squeue", "-h", "-j", f"{self.array}_{index}", "-o", "%N").strip()[1:])

    def full(self, after: int = 0) -> int:
        """Wait for a generation of all three; returns its number."""
        found = self.wait_for("generation_started", lambda e: len(e["workers"]) == THREE and e["generation"] > after)
        return int(found["generation"])

    def finish(self, alone: Path) -> None:
        """Wait for the end: bitwise what one worker makes, and nothing left in the queue."""
        self.wait_for("job_completed")
        until(lambda: all(not self.state(i) or self.state(i) in ("CG", "CD", "PD") for i in range(THREE)), self.account)
        same(alone, self)

    def account(self) -> str:
        logs = [path.read_text(errors="replace")[-2000:] for path in sorted((self.run_dir / "launch").glob("*.log"))]
        return "\n".join([self._slurm.run("squeue"), *logs, super().account()])


def test_a_node_dies_and_an_element_is_preempted(slurm: Slurm, tmp_path: Path, alone: Path, script: Path) -> None:
    run_dir = tmp_path / "run"
    held = hold(run_dir, 4.0)
    job = OnSlurm(slurm, run_dir, script)
    generation = job.full()
    slurm.run("sbatch", "-p", "urgent", "-w", f"n{job.node(1)}", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3")
    gone = job.wait_for("worker_evicted")
    again = job.wait_for("worker_joined", lambda e: e["time_unix_ns"] > gone["time_unix_ns"], host="host-1")
    generation = job.full(max(generation, again["generation"] or 0))
    victim = [e["worker_id"] for e in job.of_kind("worker_joined") if e["host"] == "host-2"][-1]
    slurm.kill(job.node(2))
    job.wait_for("worker_evicted", lambda e: e["time_unix_ns"] > again["time_unix_ns"], worker_id=victim)
    job.wait_for("generation_started", lambda e: e["generation"] > generation and len(e["workers"]) == 2)
    held.unlink()
    job.finish(alone)


def test_an_element_that_is_to_leave_hands_over_and_comes_back(
    slurm: Slurm, tmp_path: Path, alone: Path, script: Path
) -> None:
    run_dir = tmp_path / "run"
    held = hold(run_dir, 4.0)
    job = OnSlurm(slurm, run_dir, script)
    generation = job.full()
    slurm.run("scancel", "--batch", "--signal=USR1", f"{job.array}_2")
    left = job.wait_for("generation_started", lambda e: e["generation"] > generation and len(e["workers"]) == 2)
    assert not job.of_kind("worker_evicted"), "it left in order"
    job.full(left["generation"])
    slurm.run("scancel", "--batch", "--signal=USR1", f"{job.array}_0")
    job.wait_for("checkpoint_completed", lambda e: "SIGUSR1" in e["reason"])
    held.unlink()
    job.finish(alone)


def test_the_jobs_own_element_is_killed(slurm: Slurm, tmp_path: Path, alone: Path, script: Path) -> None:
    """The others wait for the next one, which Slurm starts as the script asks it to, and go on from a checkpoint."""
    run_dir = tmp_path / "run"
    held = hold(run_dir, 4.0)
    job = OnSlurm(slurm, run_dir, script)
    job.full()
    saved = job.wait_for("checkpoint_completed")
    command = f"{sys.executable} -P -m everstep run".encode().replace(b" ", b"\0")
    pids = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _runs(p, command, str(run_dir))]
    assert len(pids) == 1
    os.kill(pids[0], signal.SIGKILL)
    job.wait_for("job_started", lambda e: e["time_unix_ns"] > saved["time_unix_ns"])
    held.unlink()
    job.wait_for("job_completed")
    assert (run_dir / "final" / "digest.json").read_text() == (alone / "final" / "digest.json").read_text()


def _runs(process: Path, command: bytes, run_dir: str) -> bool:
    try:
        words = (process / "cmdline").read_bytes()
    except OSError:
        return False
    return words.startswith(command) and run_dir.encode() in words


def test_srun_of_a_script_is_one_job(slurm: Slurm, tmp_path: Path, alone: Path) -> None:
    """Two tasks of one node."""
    run_dir, script = tmp_path / "run", write_script(tmp_path)
    held = hold(run_dir)
    command = [
        "srun",
        "-n",
        "2",
        "-N",
        "1",
        "-c",
        "1",
        "--kill-on-bad-exit=1",
        sys.executable,
        str(script),
        str(run_dir),
    ]
    job = Launched(run_dir, command, slurm.environment)
    try:
        job.wait_for("generation_started", lambda e: len(e["workers"]) == 2)
        os.kill(job.pid_of(1), signal.SIGKILL)
        job.wait_for("worker_healed", worker_id=1)
        held.unlink()
        assert job.end() == 0, job.account()
        same(alone, job)
    finally:
        job.close()
