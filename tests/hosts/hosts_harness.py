"""Jobs on several hosts: the head on the first, agents on the others, bits compared with one worker on one host."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from net import HIDE, Host, Net

from everstep.base.doors import at_port
from job_harness import HERE, LIMIT_S, Job, Jobs

PORT = 29400
SLOTS = 2
STEPS = 40
EVERSTEP = (sys.executable, "-P", "-m", "everstep")


class HostJobs:
    """Starts jobs whose workers run on `net`'s hosts, two on each.

    apart: only the first host sees the job's directory; each of the others has one of its own.
    """

    def __init__(self, net: Net, jobs: Jobs, base: Path, *, apart: bool = False) -> None:
        self.net = net
        self.jobs = jobs
        self.apart = apart
        self._base = base
        self._environment: dict[str, str] = {}
        self._steps = STEPS
        self._task = "Text"

    def head(
        self,
        *options: str,
        workers: int = 6,
        steps: int = STEPS,
        until: Sequence[Mapping[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
        task: str = "Text",
        environment: Mapping[str, str] | None = None,
    ) -> _Head:
        """Start the job on the first host. until: what it takes its time for. environment: more, on all hosts."""
        self._task = task
        run_dir = self._base / "head" / "job"
        host = self.net.hosts[0]
        seen = self._base / "seen.jsonl"  # the same file, where tasks see it on all hosts
        if not seen.exists():
            run_dir.mkdir(parents=True)
            (run_dir / "events.jsonl").touch()
            os.link(run_dir / "events.jsonl", seen)
        paced = {"events": str(seen), "until": list(until), "lane_s": 0.06}
        self._environment = {"EVERSTEP_TOKEN": secrets.token_hex(32), **(environment or {})}
        if until:
            self._environment["EVERSTEP_TEST_PACE"] = json.dumps(paced)
        command = [*EVERSTEP, "run", f"{HERE / 'job_tasks.py'}:{task}", "--run-dir", str(run_dir), "--json"]
        command += ["--workers", str(workers), "--listen", at_port(host.address, PORT), "--slots", str(SLOTS)]
        self._steps = steps
        for key, value in {"steps": steps, **(settings or {})}.items():
            command += ["--set", f"{key}={value}"]
        process = host.start([*command, *options], run_dir.with_suffix(".err"), self._environment)
        return _Head(run_dir, " ".join(command), process)

    def agent(self, number: int, *options: str) -> subprocess.Popen[bytes]:
        """Start an agent on this host (from 1)."""
        host = self.net.hosts[number - 1]
        command = [*EVERSTEP, "agent", "--join", at_port(self.net.hosts[0].address, PORT), "--slots", str(SLOTS)]
        hidden = {HIDE: str(self._base / "head")} if self.apart else {}
        command += ["--run-dir", str(self.own(number))] if self.apart else []
        return host.start([*command, *options], self.log(host), {**self._environment, **hidden})

    def own(self, number: int) -> Path:
        """The directory of a host that does not see the job's."""
        return self._base / f"own{number}"

    def interrupt(self, job: Job) -> None:
        """SIGTERM to the job, which takes a checkpoint; waits for its end."""
        host = self.net.hosts[0]
        for pid in host.pids():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[0] == sys.executable.encode() and b"run" in words and b"everstep" in words:
                os.kill(int(pid), signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM, job.account()

    def log(self, host: Host) -> Path:
        """What its agents say."""
        return self._base / f"{host.name}.log"

    def check(self, job: Job) -> None:
        """Wait for the end: done, and bitwise equal to one worker on one host."""
        self.jobs.check(job, self._task, {"steps": self._steps})


class _Head(Job):
    """`everstep run` on a host of its own; its pid here is that of what started it."""

    def __init__(self, run_dir: Path, what: str, process: subprocess.Popen[bytes]) -> None:
        super().__init__(run_dir, what, process.pid)
        self._process = process

    def end(self) -> int:
        assert self.over(LIMIT_S), self.account()
        return self._process.wait()

    def kill(self) -> None:
        """SIGKILL to it and to all that it has started; what else its host runs goes on."""
        self._process.kill()
        self._process.wait()


def gap_s(job: Job, after_ns: int) -> float:
    """The longest time without a step from this moment on."""
    times = [e["time_unix_ns"] for e in job.of_kind("step_committed")]
    before = max((t for t in times if t <= after_ns), default=after_ns)
    later = [before, *(t for t in times if t > after_ns)]
    return max((b - a for a, b in itertools.pairwise(later)), default=0) / 1e9


def now_ns() -> int:
    """As events say it."""
    return time.time_ns()
