"""The dashboard's page with 1,000 simulated workers over an events file of 1,000,000 lines.

    python bench/dashboard.py [--workers 1000] [--lines 1000000] [--seconds 15] [--out FILE]

Reported: how long the server takes to read the file (processor time, and until the page says so), its memory, and how
long an update takes in headless Chromium while every worker moves, once a second.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from everstep.observe.events import format_event

STEP_NS = 20_000_000


def main() -> None:
    """Parse, measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        result = measure(Path(base), options.workers, options.lines, options.seconds)
    text = json.dumps({"workers": options.workers, "lines": options.lines, **result}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


class Job:
    """A simulated job in 4 stages: a long past, and a present in which all workers move once a second."""

    def __init__(self, run_dir: Path, workers: int, lines: int) -> None:
        self._workers = workers
        self._events = open(run_dir / "events.jsonl", "wb")  # noqa: SIM115
        (run_dir / "metrics").mkdir()
        self._metrics = open(run_dir / "metrics" / "host.jsonl", "w")  # noqa: SIM115
        (run_dir / "job.json").write_text(json.dumps({"task": "simulated", "config": {"steps": 2 * lines}}))
        self._step = 0
        begin_ns = time.time_ns() - lines * STEP_NS
        self._write("job_started", begin_ns, workers=workers)
        self._plan(begin_ns + STEP_NS, 1, "all workers are there")
        for self._step in range(1, lines + 1):
            self._commit(begin_ns + self._step * STEP_NS)
            if self._step % (lines // 50) == 0:
                self._kill(begin_ns + self._step * STEP_NS, self._step // (lines // 50))
        self._events.flush()

    def second(self) -> None:
        """50 steps more, and a sample of every worker."""
        for _ in range(50):
            self._step += 1
            self._commit(time.time_ns())
        self._events.flush()
        step = self._step
        seconds = {"forward": step * 0.006, "backward": step * 0.009, "reduce": step * 0.003}
        row = {"incarnation": 0, "step": step, "samples": 8 * step, "rss_bytes": 10**9 + step, "cpu_s": step * 0.02}
        row |= {"seconds": seconds, "bytes": {"reduce": step * 10**6}}
        rows = [{"worker_id": i, **row} for i in range(self._workers)]
        self._metrics.write(json.dumps({"t": time.time_ns(), "host": "h", "workers": rows}) + "\n")
        self._metrics.flush()

    def close(self) -> None:
        """Close the files."""
        self._events.close()
        self._metrics.close()

    def _write(self, kind: str, time_ns: int, **fields: Any) -> None:
        self._events.write(format_event(kind, time_ns, fields))

    def _commit(self, time_ns: int) -> None:
        self._write("step_committed", time_ns, step=self._step, generation=1, loss=1.0, samples=8000, lr=[0.1])

    def _kill(self, time_ns: int, number: int) -> None:
        who = 7 * number % self._workers
        why = {"cause": "killed", "reason": "killed"}
        self._write("worker_evicted", time_ns, worker_id=who, incarnation=0, step=self._step, **why)
        self._plan(time_ns, number + 1, f"worker {who} is dead", {who})
        phases = {"unblock": 0.004, "settle": 0.003, "redo": 0.002}
        self._write("recovery_completed", time_ns, worker_id=who, duration_s=0.01, phases_s=phases, step=self._step)

    def _plan(self, time_ns: int, generation: int, reason: str, without: set[int] | None = None) -> None:
        size = -(-self._workers // 4)
        there = [i for i in range(self._workers) if i not in (without or set())]
        seats = [[i, i // size, "active", [i % size]] for i in there]
        why = {"cause": "killed", "reason": reason}
        self._write("generation_started", time_ns, generation=generation, seats=seats, leaders=[there[0]], **why)


def measure(base: Path, workers: int, lines: int, seconds: float) -> dict[str, Any]:
    """Make the job, serve it, look at it."""
    job = Job(base, workers, lines)
    command = [sys.executable, "-m", "everstep", "dashboard", str(base)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    over = threading.Event()

    def live() -> None:
        while not over.wait(1.0):
            job.second()

    thread = threading.Thread(target=live)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        thread.start()
        return look(address, server.pid, workers, seconds)
    finally:
        over.set()
        thread.join()
        job.close()
        server.terminate()
        server.wait()


def look(address: str, pid: int, workers: int, seconds: float) -> dict[str, Any]:
    """In headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.set_default_timeout(600_000)
        begin = time.monotonic()
        page.goto(address)
        page.wait_for_function("n => document.querySelectorAll('.worker').length >= n", arg=workers)
        grid_s = time.monotonic() - begin
        page.wait_for_function("() => !document.getElementById('sentence').textContent.startsWith('reading')")
        loaded_s = time.monotonic() - begin
        cpu_s = _cpu_s(pid)
        page.evaluate(
            "() => { window.updates = []; new MutationObserver(() => updates.push(+document.documentElement.dataset"
            ".updateMs)).observe(document.documentElement, {attributes: true, attributeFilter: ['data-update-ms']}) }"
        )
        page.wait_for_timeout(1000 * seconds)
        updates = sorted(page.evaluate("() => window.updates"))
        heap_mb = page.evaluate("() => performance.memory.usedJSHeapSize / 1e6")
        browser.close()
    return {
        "grid_shown_s": round(grid_s, 2),
        "all_read_s": round(loaded_s, 2),
        "server_cpu_until_read_s": round(cpu_s, 2),
        "server_memory_mb": round(_memory_mb(pid), 1),
        "page_heap_mb": round(heap_mb, 1),
        "updates": len(updates),
        "update_median_ms": statistics.median(updates) if updates else None,
        "update_worst_ms": updates[-1] if updates else None,
    }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000


if __name__ == "__main__":
    main()
