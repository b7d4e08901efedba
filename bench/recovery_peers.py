"""The peers' side of `recovery.py`: the same model under torchrun and under torchft, killed in the same way."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import BENCH, descendants, environment, spread

_SETTLED_STEPS = 8
_PATIENCE_S = 120.0
Commits = list[tuple[int, int]]


def commits(paths: list[Path]) -> Commits:
    """(step, unix ns) of all files, by time."""
    found = []
    for path in paths:
        if path.exists():
            lines = path.read_text().splitlines()
            found += [(int(step), int(ns)) for step, ns in (line.split() for line in lines if " " in line)]
    return sorted(found, key=lambda commit: commit[1])


def until(ready: Any, what: str) -> Any:
    """Poll until `ready()` is true. Raises: TimeoutError."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        found = ready()
        if found:
            return found
        time.sleep(0.02)
    raise TimeoutError(f"{what} did not come within {_PATIENCE_S:.0f} s")


def ordinary_step_s(history: Commits, before_ns: int) -> float:
    """Median time between commits before a fault."""
    times = [ns for _, ns in history if ns < before_ns][-30:]
    return statistics.median((b - a) / 1e9 for a, b in itertools.pairwise(times))


def gap_end(history: Commits, killed_ns: int) -> int | None:
    """When the first step was committed after the longest pause among the next commits: one may slip through."""
    times = [killed_ns, *[ns for _, ns in history if ns > killed_ns][:3]]
    if len(times) < 4:
        return None
    return max(itertools.pairwise(times), key=lambda pair: pair[1] - pair[0])[1]


def stop_tree(processes: list[subprocess.Popen[Any]]) -> None:
    """Kill these processes and all that they started; torchrun's workers live in sessions of their own."""
    pids = [pid for process in processes for pid in descendants(process.pid)]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for process in processes:
        process.wait()


def measure_torchrun(model: str, workers: int, batch: int, kills: int) -> dict[str, Any]:
    """Seconds from the SIGKILL of a worker to the next committed step of the restarted job."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        (folder / "pids").mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--max-restarts", str(kills + 1)]
        command += [str(BENCH / "torchrun_peer.py"), str(folder), model, str(batch), "1000000"]
        fair = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        with open(folder / "log", "wb") as log:
            agent = subprocess.Popen(command, env=fair, stdout=log, stderr=log)
        try:
            times, ordinary = [], []
            for number in range(kills):
                start = len(commits([folder / "commits"]))
                until(lambda at=start: len(commits([folder / "commits"])) >= at + _SETTLED_STEPS, "torchrun's steps")
                victim = int((folder / "pids" / str(1 + number % (workers - 1))).read_text())
                killed = time.time_ns()
                os.kill(victim, signal.SIGKILL)
                end = until(lambda t=killed: gap_end(commits([folder / "commits"]), t), "torchrun's restart")
                ordinary.append(ordinary_step_s(commits([folder / "commits"]), killed))
                times.append((end - killed) / 1e9)
        except (TimeoutError, OSError, ValueError) as error:
            return {"failed": str(error), "log": (folder / "log").read_text(errors="replace")[-1500:]}
        finally:
            stop_tree([agent])
    return {
        "settings": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, --max-restarts, checkpoint by rank 0 after every step",
        "kill_to_next_step_s": spread(times),
        "ordinary_step_s": spread(ordinary),
    }


class TorchftJob:
    """A lighthouse and its replicas, restarted by this process as soon as they die."""

    def __init__(
        self, folder: Path, site: str, model: str, replicas: int, batch: int, tuned: bool, timeout_s: int
    ) -> None:
        self.folder, self.model, self.replicas, self.batch = folder, model, replicas, batch
        self.retries, self.timeout_s = 5 if tuned else 0, timeout_s
        self.environment = environment(PYTHONPATH=os.pathsep.join([str(BENCH), site]))
        heartbeat, join = ("500", "10000") if tuned else ("0", "0")
        script = [sys.executable, str(BENCH / "torchft_peer.py")]
        self.log = open(folder / "log", "wb")  # noqa: SIM115
        self.lighthouse = subprocess.Popen(
            [*script, "lighthouse", heartbeat, join, str(replicas - 1)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        assert self.lighthouse.stdout is not None
        self.environment["TORCHFT_LIGHTHOUSE"] = self.lighthouse.stdout.readline().strip()
        self.processes = [self.start(number) for number in range(replicas)]

    def start(self, number: int) -> subprocess.Popen[Any]:
        arguments = [str(self.folder), str(number), str(self.replicas), self.model, str(self.batch), "1000000"]
        arguments += [str(self.retries), str(self.timeout_s)]
        return subprocess.Popen(
            [sys.executable, str(BENCH / "torchft_peer.py"), "replica", *arguments],
            env=self.environment,
            stdout=self.log,
            stderr=self.log,
        )

    def commits(self, number: int) -> Commits:
        return commits([self.folder / f"commits-{number}"])

    def settled(self, after_ns: int) -> bool:
        """Whether every replica has committed enough steps since."""
        return all(
            sum(ns > after_ns for _, ns in self.commits(number)) >= _SETTLED_STEPS for number in range(self.replicas)
        )

    def close(self) -> None:
        stop_tree([*self.processes, self.lighthouse])
        self.log.close()


def measure_torchft(
    site: str, model: str, batch: int, kills: int, workers: int, tuned: bool, timeout_s: int
) -> dict[str, Any]:
    """SIGKILL of a replica to the survivors' next commit, and to the replacement's first. timeout_s: gloo's."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        job = TorchftJob(folder, site, model, workers, batch, tuned, timeout_s)
        try:
            times, replaced, ordinary = [], [], []
            since = 0
            for number in range(kills):
                until(lambda at=since: job.settled(at), "torchft's steps")
                victim = 1 + number % (workers - 1)
                killed = time.time_ns()
                job.processes[victim].kill()
                job.processes[victim].wait()
                job.processes[victim] = job.start(victim)
                end = until(lambda t=killed: gap_end(job.commits(0), t), "torchft's next commit")
                ordinary.append(ordinary_step_s(job.commits(0), killed))
                times.append((end - killed) / 1e9)
                first = until(lambda v=victim, t=killed: [ns for _, ns in job.commits(v) if ns > t], "the replacement")
                replaced.append((first[0] - killed) / 1e9)
                since = time.time_ns()
        except (TimeoutError, OSError, ValueError) as error:
            return {"failed": str(error), "log": (folder / "log").read_text(errors="replace")[-1500:]}
        finally:
            job.close()
    settings = "heartbeat_timeout_ms=500, quorum_retries=5, join_timeout_ms=10000" if tuned else "defaults"
    return {
        "settings": f"{settings}; {workers} replicas, gloo's timeout {timeout_s} s",
        "kill_to_next_step_s": spread(times),
        "kill_to_replacement_s": spread(replaced),
        "ordinary_step_s": spread(ordinary),
    }


def torchft_absent(site: str | None) -> str:
    """Why torchft cannot be measured; "" if it can."""
    if site is None:
        return "not asked for: give --torchft DIR, see bench/README.md"
    found = subprocess.run(
        [sys.executable, "-c", "import torchft"],
        env=environment(PYTHONPATH=site),
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if found.returncode == 0 else f"import torchft failed: {found.stderr.strip().splitlines()[-1:]}"
