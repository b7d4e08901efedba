"""What the benchmarks of whole jobs share: starting `everstep run`, reading its events, processor time, statistics."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
Event = dict[str, Any]


def environment(**more: str) -> dict[str, str]:
    """One intra-op thread per worker, loopback, and nothing inherited that would make torch's launchers differ."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "EVERSTEP_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(_paths()), **more}


def _paths() -> list[str]:
    """Where processes look for modules: here, and where this one was told to look (another version, say)."""
    return [str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])]


class EverstepJob:
    """A real `everstep run`, its output going to a pipe."""

    def __init__(
        self,
        task: str,
        run_dir: Path,
        *arguments: str,
        settings: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.run_dir = run_dir
        command = [sys.executable, "-m", "everstep", "run", task, "--run-dir", str(run_dir), *arguments]
        for key, value in (settings or {}).items():
            command += ["--set", f"{key}={value}"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(**(variables or {})),
            start_new_session=True,
        )
        self._said: list[bytes] = []
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def _drain(self) -> None:
        assert self.process.stdout is not None
        self._said.extend(self.process.stdout)

    def wait(self, timeout_s: float = 600.0) -> None:
        """Until it is done. Raises: SystemExit with its last words if it failed."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            code = -1
        self._reader.join()
        if code:
            said = b"".join(self._said).decode(errors="replace")
            raise SystemExit(f"everstep run ended with {code}:\n{said[-3000:]}")

    def kill(self) -> None:
        """End the launcher as a user would; twice is at once."""
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                time.sleep(0.3)
        if self.process.poll() is None:
            self.process.kill()

    def events(self) -> list[Event]:
        """All events so far."""
        return read_events(self.run_dir)


def read_events(run_dir: Path) -> list[Event]:
    """The events of a run directory, by time."""
    try:
        lines = (run_dir / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue  # the last line may be being written
    return sorted(events, key=lambda e: e["time_unix_ns"])


def committed(events: Iterable[Event]) -> list[tuple[int, int]]:
    """(step, unix ns of the first worker's commit), ascending by step."""
    return sorted((e["step"], e["time_unix_ns"]) for e in events if e["kind"] == "step_committed")


def step_times(events: Iterable[Event], after_step: int = 0) -> list[float]:
    """Seconds from each committed step after `after_step` to the next."""
    times = [t for step, t in committed(events) if step >= after_step]
    return [(b - a) / 1e9 for a, b in itertools.pairwise(times)]


def free_port() -> int:
    """One of loopback that nobody uses now."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """The process and everything it started that is still there."""
    found, open_ = [], [pid]
    while open_:
        current = open_.pop()
        found.append(current)
        try:
            for task in Path(f"/proc/{current}/task").iterdir():
                open_ += [int(child) for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes, their own."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total / TICKS_PER_S


def spread(values: list[float], scale: float = 1.0, digits: int = 4) -> dict[str, Any]:
    """Median, quartiles, extremes and how many."""
    values = [v * scale for v in values]
    if not values:
        return {"n": 0}
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {
        "median": round(statistics.median(values), digits),
        "quartiles": [round(quartiles[0], digits), round(quartiles[2], digits)],
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "n": len(values),
    }


def machine() -> dict[str, Any]:
    """Where this was measured, and how busy it was."""
    import platform

    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }


def write_report(report: dict[str, Any], out: str | None) -> None:
    """Print it; also write it to `out`."""
    text = json.dumps(report, indent=2)
    print(text)
    if out:
        Path(out).write_text(text + "\n")
