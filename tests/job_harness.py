"""Runs jobs and compares them: any run under any faults with the undisturbed run on one worker, byte by byte."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from everstep.base.readable import readable
from everstep.cli.ledger import audit_run
from everstep.observe.events import parse_events, read_events
from everstep.runtime.process import pinned_environment
from held_memory import ControlGroup

LIMIT_S = 240.0
HERE = Path(__file__).parent
Event = dict[str, Any]


def healed(worker_id: int, count: int = 1) -> Event:
    """A pace: take time until this worker has healed so often."""
    return {"kind": "worker_healed", "worker_id": worker_id, "count": count}


class Job:
    """One `everstep run` that is under way, or over."""

    def __init__(self, run_dir: Path, what: str, pid: int) -> None:
        self.run_dir = run_dir
        self.what = what
        self._pidfd = -1
        if pid:
            with contextlib.suppress(ProcessLookupError):  # bad input ends a job before this is reached
                self._pidfd = os.pidfd_open(pid)

    @property
    def events(self) -> list[Event]:
        """All that has been reported so far."""
        return read_events(self.run_dir / "events.jsonl")

    def of_kind(self, kind: str) -> list[Event]:
        """The events of this kind so far."""
        return [event for event in self.events if event["kind"] == kind]

    def over(self, timeout_s: float = 0.0) -> bool:
        """Whether the command has ended."""
        return self._pidfd < 0 or bool(readable([self._pidfd], timeout_s))

    def wait_for(self, kind: str, wanted: Callable[[Event], bool] = lambda event: True, **fields: Any) -> Event:
        """The first event like this, seen or coming. Raises: AssertionError if the job ends without it."""
        path, position, rest = self.run_dir / "events.jsonl", 0, b""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            last = self.over()
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(position)
                rest += file.read()
                position = file.tell()
            cut = rest.rfind(b"\n") + 1
            whole, rest = rest[:cut], rest[cut:]
            for event in parse_events(whole):
                if event["kind"] == kind and all(event.get(k) == v for k, v in fields.items()) and wanted(event):
                    return event
            if last:
                raise AssertionError(f"ended without {kind} {fields}\n{self.account()}")
            self.over(0.003)
        raise AssertionError(f"no {kind} {fields} within {LIMIT_S:g} s\n{self.account()}")

    def wait_for_words(self, text: str) -> None:
        """Until the command says this. Raises: AssertionError if it ends without it."""
        errors, over = self.run_dir.with_suffix(".err"), False
        while text not in errors.read_text(errors="replace"):
            assert not over, f"ended without saying {text!r}\n{self.account()}"
            over = self.over(0.01)

    def end(self) -> int:
        """Wait for the end; returns the exit code."""
        if not self.over(LIMIT_S):
            os.kill(self.launcher_pid(), signal.SIGQUIT)
            raise AssertionError(f"not over within {LIMIT_S:g} s\n{self.account()}")
        path = self.run_dir.with_suffix(".code")
        return int(path.read_text()) if path.exists() else -1

    def launcher_pid(self) -> int:
        """Of `everstep run` itself; 0 if it was over before it could be looked at."""
        if self._pidfd < 0:
            return 0
        for line in Path(f"/proc/self/fdinfo/{self._pidfd}").read_text().splitlines():
            if line.startswith("Pid:"):
                return int(line.split()[1])
        return 0

    def pid_of(self, worker_id: int) -> int:
        """Of the newest life of a worker."""
        return int([e for e in self.of_kind("worker_joined") if e["worker_id"] == worker_id][-1]["pid"])

    def account(self) -> str:
        """What is needed to understand what went wrong."""
        lines = [self.what, f"in {self.run_dir}"]
        skipped = ("time_unix_ns", "kind", "phases_s")
        for event in self.events[-60:]:
            if event["kind"] == "step_committed":
                lines.append(f"  step {event['step']}")
                continue
            fields = {k: v for k, v in event.items() if k not in skipped and v is not None}
            lines.append(f"  {event['time_unix_ns'] / 1e9 % 1000:.3f} {event['kind']} {fields}")
        lines.append(self._tail(self.run_dir.with_suffix(".err")))
        for path in sorted((self.run_dir / "logs").glob("*.[jl]*")):
            lines.append(f"--- {path.name}\n{self._tail(path)}")
        return "\n".join(lines)

    @staticmethod
    def _tail(path: Path) -> str:
        return path.read_text(errors="replace")[-1200:] if path.exists() else ""

    def close(self) -> None:
        """End it if it still runs."""
        if not self.over():
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)
                if self.over(5.0):
                    break
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pidfd = -1


class Jobs:
    """Starts jobs under `base`; undisturbed runs are kept for comparison, in `shared` for other processes too."""

    def __init__(self, base: Path, shared: Path | None = None) -> None:
        self.base = base
        self._shared = shared or base
        self._names = itertools.count()
        self._references: dict[str, Path] = {}
        self._jobs: list[Job] = []
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "warm_server.py"), " " * 8192],  # room for the commands that its forks become
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=pinned_environment(1),
            text=True,
        )
        self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        reply: dict[str, Any] = json.loads(self._server.stdout.readline())
        return reply

    def start(
        self,
        task: str,
        *options: str,
        workers: int = 3,
        chaos: str = "",
        numerics: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        pace: Iterable[Mapping[str, Any]] = (),
        lane_s: float = 0.06,
        run_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        """Start a job. task: a class of job_tasks, or of a file (FILE.py:NAME), or a script's path. pace: what it takes
        its time for. run_dir: that of a job that was stopped."""
        run_dir = run_dir or self.base / f"{next(self._names):02d}-{Path(task).stem}"
        argv = ["run", task if ".py" in task else f"{HERE / 'job_tasks.py'}:{task}", "--run-dir", str(run_dir)]
        argv += ["--workers", str(workers), "--json"]
        for key, value in {**(numerics or {}), **(settings or {})}.items():
            argv += ["--set", f"{key}={value}"]
        argv += ["--chaos", chaos] if chaos else []
        argv += list(options)
        paced = {"events": str(run_dir / "events.jsonl"), "until": list(pace), "lane_s": lane_s}
        more = {"EVERSTEP_TEST_PACE": json.dumps(paced)} if pace else {}
        return self._request(run_dir, argv, {**more, **(environment or {})})

    def command(
        self, argv: list[str], run_dir: Path, environment: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Job:
        """Start `everstep ARGV`, whose run directory is this one."""
        return self._request(run_dir, argv, {**(environment or {})}, cwd)

    def plainly(self, script: str, *argv: str) -> Job:
        """Run a script by itself; it is given a run directory as its last argument."""
        run_dir = self.base / f"{next(self._names):02d}-{Path(script).stem}-plainly"
        return self._request(run_dir, [script, *argv, str(run_dir)], {})

    def _request(self, run_dir: Path, argv: list[str], environment: dict[str, str], cwd: Path | None = None) -> Job:
        request = {
            "argv": argv,
            "cwd": str(cwd or self.base),
            "environment": environment,
            **{name: str(run_dir.with_suffix(f".{name}")) for name in ("out", "err", "code")},
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        what = f"{' '.join(repr(a) if ' ' in a else a for a in argv)}"
        job = Job(run_dir, what, self._reply()["pid"])
        self._jobs.append(job)
        return job

    def reference(self, task: str, numerics: Mapping[str, Any] | None = None) -> Path:
        """The directory of the undisturbed run on one worker."""
        key = json.dumps([task, dict(numerics or {})], sort_keys=True)
        if key not in self._references:
            run_dir = self._shared / f"reference-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
            with open(run_dir.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not (run_dir / "final" / "digest.json").exists():
                    job = self.start(task, workers=1, numerics=numerics, run_dir=run_dir)
                    code = job.end()
                    assert code == 0, job.account()
            self._references[key] = run_dir
        return self._references[key]

    def check(self, job: Job, task: str, numerics: Mapping[str, Any] | None = None) -> Job:
        """Wait for the end: done, bitwise equal to the undisturbed run, and every sample counted once."""
        code = job.end()
        assert code == 0, f"exit code {code}\n{job.account()}"
        same(self.reference(task, numerics), job)
        return job

    def run(self, task: str, *options: str, **how: Any) -> Job:
        """`start` and `check`."""
        return self.check(self.start(task, *options, **how), task, how.get("numerics"))

    def close(self) -> None:
        """End everything."""
        for job in self._jobs:
            job.close()
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


def under_limit(
    group: ControlGroup, run_dir: Path, task: str, *options: str, settings: Mapping[str, Any]
) -> tuple[int, Job]:
    """Run a job whose processes all belong to this group, to its end. Returns its exit code, too."""
    argv = ["run", task, "--run-dir", str(run_dir), "--json", *options]
    for key, value in settings.items():
        argv += ["--set", f"{key}={value}"]
    with run_dir.with_suffix(".err").open("wb") as errors:
        command = group.start([sys.executable, "-P", "-m", "everstep", *argv], stdout=subprocess.DEVNULL, stderr=errors)
        job = Job(run_dir, " ".join(argv), command.pid)
        try:
            return command.wait(LIMIT_S), job
        finally:
            job.close()


def same(reference: Path, job: Job) -> None:
    """Raises: AssertionError unless the bits, the digests, the steps and the samples are those of `reference`."""
    ours, theirs = ((d / "final" / "digest.json") for d in (job.run_dir, reference))
    got, expected = json.loads(ours.read_text()), json.loads(theirs.read_text())
    assert got == expected, f"digest {got}, undisturbed {expected}\n{job.account()}"
    weights = [(d / "final" / "model.safetensors").read_bytes() for d in (job.run_dir, reference)]
    assert weights[0] == weights[1], f"the weights differ\n{job.account()}"
    report = audit_run(job.run_dir)
    assert report.clean and report.steps == expected["step"], f"{report}\n{job.account()}"
    committed: list[int] = []
    for event in job.events:
        if event["kind"] == "job_started" and not event["step"]:  # what was before was given up
            committed = []
        elif event["kind"] == "step_committed":
            committed.append(event["step"])
    assert committed == list(range(1, expected["step"] + 1)), f"steps told: {committed}\n{job.account()}"
