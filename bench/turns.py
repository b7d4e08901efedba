"""Two jobs that take turns on one machine: while one runs, all processes of the other are stopped.

What a machine can do changes from minute to minute, by more than what is to be measured; between two turns of a few
seconds it changes little. Steps that were under way when a turn ended do not count.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import EverstepJob, committed, cpu_seconds, descendants, environment, spread

PATIENT = {"heartbeat.floor_s": 300, "heartbeat.ceiling_s": 600, "hang_limit_s": 600}
"""Settings for an Everstep job that is stopped now and then: silence is no sign of death."""
_LONG = 1_000_000
_PATIENCE_S = 300.0
_POLL_S = 0.05


@dataclass
class Job:
    """A job under way. roots: its processes, without their children. ends_ns: when each step so far ended (unix)."""

    name: str
    roots: Sequence[subprocess.Popen[bytes]]
    ends_ns: Callable[[], list[int]]

    def pids(self) -> list[int]:
        """All processes there are now."""
        return [pid for root in self.roots for pid in descendants(root.pid)]

    def signal(self, number: signal.Signals) -> None:
        """To all of them."""
        for pid in self.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def check(self) -> None:
        """Raises: SystemExit if it has ended."""
        for root in self.roots:
            if root.poll() is not None:
                raise SystemExit(f"{self.name}: a process ended with {root.returncode} before it was measured")


def everstep_job(name: str, task: str, run_dir: Path, *arguments: str, settings: dict[str, Any]) -> Job:
    """An `everstep run` without an end."""
    job = EverstepJob(task, run_dir, "--steps", str(_LONG), *arguments, settings={**settings, **PATIENT})
    return Job(name, [job.process], lambda: [t for _, t in committed(job.events())])


def ranks_job(name: str, command: Sequence[str], workers: int, port: int, ends: Path) -> Job:
    """One process per rank, as torch.distributed wants them; rank 0 (or the last one) appends to the file `ends`."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}
    full = [sys.executable, *command, "--ends", str(ends)]
    ranks = [
        subprocess.Popen(full, env=environment(**shared, RANK=str(rank)), stdout=subprocess.DEVNULL)
        for rank in range(workers)
    ]
    return Job(name, ranks, lambda: [int(t) for t in ends.read_text().split("\n")[:-1]] if ends.exists() else [])


@dataclass(frozen=True)
class Turn:
    """One job has had the machine from `begin_ns` to `end_ns` (unix); cpu_s: processor time of all its processes."""

    begin_ns: int
    end_ns: int
    cpu_s: float

    def steps_s(self, job: Job) -> list[float]:
        """Of the steps that began and ended in it."""
        inside = [t for t in job.ends_ns() if self.begin_ns < t < self.end_ns]
        return [(b - a) / 1e9 for a, b in itertools.pairwise(inside)]

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


def turns(jobs: Sequence[Job], *, warm_up: int, rounds: int, turn_s: float) -> Iterator[dict[str, Turn]]:
    """One turn of each job per round, by name; who begins changes from round to round.

    The jobs have just been started; they are killed in the end. turn_s: at least; a turn has time for five steps.

    Raises: SystemExit if one of them ends by itself or does nothing for five minutes.
    """
    try:
        longest_s = 0.0
        for job in jobs:
            for other in jobs:
                other.signal(signal.SIGCONT if other is job else signal.SIGSTOP)
            longest_s = max(longest_s, _warm(job, warm_up))
        for number in range(rounds):
            order = jobs if number % 2 == 0 else [*reversed(jobs)]
            yield {job.name: _turn(job, max(turn_s, 5 * longest_s)) for job in order}
    finally:
        for job in jobs:
            job.signal(signal.SIGKILL)
            for root in job.roots:
                root.wait()


def take_turns(ours: Job, theirs: Job, *, warm_up: int, rounds: int, turn_s: float) -> list[dict[str, float]]:
    """What each round gave: `ours_ms`, `theirs_ms` (median steps), processor time per step likewise, and the ratios.

    A round in which the machine stood still, so that a job had no whole step, does not count; it is told.
    """
    found = []
    for had in turns((ours, theirs), warm_up=warm_up, rounds=rounds, turn_s=turn_s):
        took = {job.name: had[job.name].steps_s(job) for job in (ours, theirs)}
        if not all(took.values()):
            print(f"a round does not count: {[f'{name}: {len(s)} steps' for name, s in took.items()]}", file=sys.stderr)
            continue
        figures: dict[str, float] = {}
        for job in (ours, theirs):
            turn, steps_s = had[job.name], took[job.name]
            figures[f"{job.name}_ms"] = 1e3 * statistics.median(steps_s)
            figures[f"{job.name}_cpu_ms"] = 1e3 * turn.cpu_s / turn.seconds * statistics.mean(steps_s)
        figures["ratio"] = figures[f"{ours.name}_ms"] / figures[f"{theirs.name}_ms"]
        figures["cpu_ratio"] = figures[f"{ours.name}_cpu_ms"] / figures[f"{theirs.name}_cpu_ms"]
        found.append({key: round(value, 4) for key, value in figures.items()})
        print(f"{ours.name} and {theirs.name}: {found[-1]}", file=sys.stderr, flush=True)
    return found


def columns(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The spread of every figure over the rounds."""
    return {key: spread([one[key] for one in rounds]) for key in rounds[0]}


def _warm(job: Job, steps: int) -> float:
    """Let it run until so many steps are done; then stop it. The median step so far."""
    end_s = time.monotonic() + _PATIENCE_S
    while len(ends := job.ends_ns()) < steps + 1:
        job.check()
        if time.monotonic() > end_s:
            raise SystemExit(f"{job.name}: {len(ends)} steps in {_PATIENCE_S:.0f} s")
        time.sleep(_POLL_S)
    job.signal(signal.SIGSTOP)
    return statistics.median(b - a for a, b in itertools.pairwise(ends)) / 1e9


def _turn(job: Job, seconds: float) -> Turn:
    pids = job.pids()
    before_s, begin_ns = cpu_seconds(pids), time.time_ns()
    job.signal(signal.SIGCONT)
    time.sleep(seconds)
    job.check()
    job.signal(signal.SIGSTOP)
    return Turn(begin_ns, time.time_ns(), cpu_seconds(pids) - before_s)
