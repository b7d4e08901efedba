"""A job and the agent of its host as two processes that nobody has started together, under every fault in turn."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from everstep.runtime.commands import ask
from everstep.runtime.link.address import read_address
from job_harness import HERE, LIMIT_S, Job, Jobs

NUMERICS = {"steps": 150}
"""More than there is time for while faults are struck; what is left then takes no time."""
SETTINGS = {"hang_limit_s": 2, "heartbeat.interval_s": 0.2, "checkpoint.disk.every_steps": 3}
UNTIL = [{"kind": "fault_injected"}]
APART = ("--listen", "127.0.0.1:0", "--no-local-workers")


class Agent:
    """An `everstep agent` that is nobody's child here: the shell that has started it is gone."""

    def __init__(self, job: Job, *options: str, folder: Path | None = None, **environment: str) -> None:
        job.wait_for("job_started")
        address = None
        while address is None:
            assert not job.over(0.01), job.account()
            with contextlib.suppress(OSError):
                address = read_address(job.run_dir / "coordinator.json")
        self.log = job.run_dir.with_suffix(".agent")
        command = [sys.executable, "-m", "everstep", "agent", "--join", f"{address.host}:{address.port}"]
        command += ["--token-file", str(job.run_dir / "token"), "--slots", "8", *options]
        paced = {"events": str(job.run_dir / "events.jsonl"), "until": UNTIL, "lane_s": 0.1}
        shell = f"setsid {shlex.join(command)} </dev/null >>{self.log} 2>&1 & echo $!"
        environment = {**os.environ, "EVERSTEP_TEST_PACE": json.dumps(paced), "PYTHONPATH": str(HERE), **environment}
        how: Any = {"env": environment, "cwd": folder, "capture_output": True}
        said = subprocess.run(["sh", "-c", shell], text=True, check=True, **how)
        self.pid = int(said.stdout)
        self._pidfd = os.pidfd_open(self.pid)

    def over(self, timeout_s: float = 0.0) -> bool:
        return bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def words(self) -> str:
        return self.log.read_text()


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    started: list[Agent] = []
    yield started
    for agent in started:
        agent.kill()


def parent(pid: int) -> int:
    """Who has started it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def whole_again(job: Job, after_ns: int, workers: int) -> dict[str, Any]:
    """All are members again after this moment, and have committed a step."""
    again = job.wait_for("generation_started", lambda e: e["time_unix_ns"] >= after_ns and len(e["workers"]) == workers)
    return job.wait_for("step_committed", lambda e: e["generation"] >= again["generation"])


def evicted(job: Job, after_ns: int, **fields: Any) -> dict[str, Any]:
    return job.wait_for("worker_evicted", lambda e: e["time_unix_ns"] >= after_ns, **fields)


@pytest.mark.longer
def test_every_fault_ends_with_the_bits_of_the_undisturbed_run(jobs: Jobs, agents: list[Agent]) -> None:
    job = jobs.start("Text", *APART, workers=3, numerics=NUMERICS, settings=SETTINGS)
    agents.append(Agent(job, "--host-name", "other"))
    assert parent(agents[0].pid) not in (job.launcher_pid(), os.getpid())
    job.wait_for("step_committed", step=2)

    os.kill(job.pid_of(1), signal.SIGKILL)
    gone = evicted(job, 0, worker_id=1, cause="killed")
    whole_again(job, gone["time_unix_ns"], 3)

    os.kill(job.pid_of(2), signal.SIGSTOP)
    gone = evicted(job, gone["time_unix_ns"], worker_id=2, cause="hung")
    whole_again(job, gone["time_unix_ns"], 3)

    os.kill(read_address(job.run_dir / "coordinator.json").pid, signal.SIGKILL)
    restarted = job.wait_for("coordinator_restarted")
    assert parent(job.pid_of(0)) != 1, "workers go on while the coordinator is away"

    os.kill(parent(job.pid_of(0)), signal.SIGKILL)  # the fork server: its workers go on
    job.wait_for_words("the fork server died (killed by SIGKILL) and is started again; its workers go on")
    assert parent(job.pid_of(0)) == agents[0].pid
    os.kill(job.pid_of(2), signal.SIGKILL)
    gone = evicted(job, restarted["time_unix_ns"], worker_id=2, cause="killed")
    whole_again(job, gone["time_unix_ns"], 3)
    others = [e for e in job.of_kind("worker_evicted") if e["time_unix_ns"] >= restarted["time_unix_ns"]]
    assert [e["worker_id"] for e in others] == [2] and "nothing saw its end" not in others[0]["reason"], job.account()
    assert parent(job.pid_of(2)) not in (1, agents[0].pid), "another fork server has made it"

    agents[0].kill()
    agents.append(Agent(job, "--host-name", "other"))
    for worker_id in range(3):
        gone = evicted(job, gone["time_unix_ns"], worker_id=worker_id, cause="host_lost")
    whole_again(job, gone["time_unix_ns"], 3)

    ask(job.run_dir, "chaos", {"fault": "raise:target=worker:1"})
    evicted(job, gone["time_unix_ns"], worker_id=1, cause="exception")
    jobs.check(job, "Text", NUMERICS)
    assert agents[1].over(LIMIT_S)
    words = agents[1].words().splitlines()
    assert words[-1] == "the job is over: completed" and all("takes part in" in word for word in words[:-1]), words
    assert {e["host"] for e in job.of_kind("worker_joined")} == {"other"}


@pytest.mark.longer
def test_with_the_jobs_process_all_of_it_ends(jobs: Jobs, agents: list[Agent]) -> None:
    job = jobs.start("Text", *APART, workers=2, numerics={"steps": 10_000})
    agents.append(Agent(job, "--slots", "1", "--host-name", "one"))
    job.wait_for("worker_joined", worker_id=0, host="one")
    agents.append(Agent(job, "--host-name", "two"))
    job.wait_for("worker_joined", worker_id=1, host="two")
    job.wait_for("step_committed")
    workers = [os.pidfd_open(job.pid_of(i)) for i in range(2)]
    twin = Agent(job, "--host-name", "two")
    assert twin.over(LIMIT_S) and "another agent of this job is called 'two'" in twin.words()
    os.kill(job.launcher_pid(), signal.SIGKILL)
    for agent in agents:
        assert agent.over(LIMIT_S)
    for fd in workers:
        assert select.select([fd], [], [], LIMIT_S)[0]
        os.close(fd)
    assert agents[0].words().count("error: the job's process is gone") == 2
    assert "Traceback" not in agents[0].words()


def test_who_has_another_token_is_refused(jobs: Jobs, agents: list[Agent], tmp_path: Path) -> None:
    job = jobs.start("Text", *APART, workers=1)
    (tmp_path / "token").write_text(sha256(b"ab").hexdigest())
    agents.append(Agent(job, "--token-file", str(tmp_path / "token")))
    assert agents[0].over(LIMIT_S)
    assert "it serves another job" in agents[0].words() and "Traceback" not in agents[0].words()
    os.kill(job.launcher_pid(), signal.SIGINT)
    assert job.end() == 130
