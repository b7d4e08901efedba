"""The command line as a subprocess: run to the end, or start and wait for what it prints."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LIMIT_S = 180.0
COMMAND = [sys.executable, "-m", "everstep"]

TASK_FILE = '''
"""A small task that gives tests time to interfere: a lane takes E2E_LANE_S seconds longer; with E2E_EVENTS (a file)
only while a worker that was evicted has not been replaced, so that no two faults meet; with E2E_HOLD (another) only
while that is there."""
import os
import time
import torch
from torch import nn
from torch.utils.data import Dataset
import everstep


class Numbers(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = torch.sin(torch.arange(8.0) * (index + 1))
        return x + 0.01 * torch.randn(8), x.sum()


class Small(everstep.Task):
    defaults = {"steps": 12, "lanes": 4, "micro_batch": 2}

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def build_dataset(self, split):
        return Numbers(50)

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=0.01)

    def loss(self, model, batch):
        end = time.monotonic() + float(os.environ.get("E2E_LANE_S", 0))
        while time.monotonic() < end and not self.complete():
            time.sleep(0.01)
        return nn.functional.mse_loss(model(batch[0])[:, 0], batch[1])

    def complete(self):
        hold = os.environ.get("E2E_HOLD")
        if hold is not None:
            return not os.path.exists(hold)
        path = os.environ.get("E2E_EVENTS")
        if path is None:
            return False
        with open(path) as file:
            text = file.read()
        return text.count('"worker_healed"') >= text.count('"worker_evicted"')
'''


def everstep(*argv: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [*COMMAND, *(str(a) for a in argv)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, cwd=cwd, env=environment(**variables)
    )


def together(*commands: Sequence[str | Path], cwd: Path | None = None) -> list[subprocess.CompletedProcess[str]]:
    """Run several commands at the same time, each to its end: most of a short one is the import of torch."""
    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(lambda argv: everstep(*argv, cwd=cwd), commands))


def environment(**variables: str) -> dict[str, str]:
    """No terminal width, no colours: as in a pipe."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", **variables}


def one_error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error; fails on tracebacks and on errors of several lines."""
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of events.jsonl; every one must be whole JSON."""
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def digest_of(run_dir: Path) -> dict[str, Any]:
    """final/digest.json."""
    loaded: dict[str, Any] = json.loads((run_dir / "final" / "digest.json").read_text())
    return loaded


class Running:
    """`everstep run --json` in the background. `wait_for` returns the first event, seen or coming, that satisfies."""

    def __init__(self, *argv: str | Path, cwd: Path | None = None, **variables: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "run", *(str(a) for a in argv), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=environment(**variables),
            start_new_session=True,
        )
        self.events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line)

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Raises: AssertionError if the job ends first."""
        for event in self.events:
            if wanted(event):
                return event
        while (line := self._lines.get(timeout=LIMIT_S)) is not None:
            event = json.loads(line)
            self.events.append(event)
            if wanted(event):
                return event
        raise AssertionError(f"ended with {self.process.wait()} before that: {self.events[-3:]} {self.errors}")

    def wait_for_step(self, step: int) -> dict[str, Any]:
        """Until so many updates are committed."""
        return self.wait_for(lambda e: e["kind"] == "step_committed" and e["step"] >= step)

    def signal(self, number: int) -> None:
        """As a terminal or a scheduler would."""
        self.process.send_signal(number)

    def end(self) -> tuple[int, list[dict[str, Any]], str]:
        """Wait for the end: exit code, all that was printed, stderr."""
        code = self.process.wait(LIMIT_S)
        for thread in self._threads:
            thread.join(LIMIT_S)
        while (line := self._lines.get(timeout=LIMIT_S)) is not None:
            self.events.append(json.loads(line))
        return code, self.events, "".join(self.errors)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
