"""What looking on costs: everything that observes a job switched on, against everything off, in alternating pairs.

    python bench/observe.py [--workers 2] [--steps 600] [--step-ms 20] [--pairs 5] [--out FILE]

A step is a timed wait, so that what a worker's processor does is Everstep's own work and little else. On: samples of
time, bytes and memory, events and the log; a dashboard beside the job with a page open; every sink that is installed.
Off: no samples, dashboard or sinks; and what workers count and tell for others to look at is replaced by nothing.
Workers measure themselves: processor time of the whole process, all threads, over the steps after the warm-up; and the
leader the time between steps. Reported: what "on" takes more per step, as median and spread over the pairs; and, since
the noise of a machine may be larger than that, `told_us`: how long the calls themselves take by which a worker counts
and tells, per step of the busiest one, clock reading included (an upper bound, from jobs of their own).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import everstep
from measure import EverstepJob, machine, spread, write_report

WARM_UP = 60
LAST = 10
TARGET_US = 50.0
_FOLDER, _STEP_MS, _STEPS, _HOW = "BENCH_FOLDER", "BENCH_STEP_MS", "BENCH_STEPS", "BENCH_HOW"
ON, OFF, TIMED = "on", "off", "timed"
_spent_ns = [0]


class Waiting(everstep.Task):
    """One lane per worker and step: a wait, and next to nothing to compute. Writes down what the worker took."""

    def __init__(self) -> None:
        self._times_ns: list[int] = []
        self._cpu_ns = 0

    def build_model(self) -> nn.Module:
        return nn.Linear(8, 1)

    def build_dataset(self, split: str) -> TensorDataset:
        return TensorDataset(torch.ones(64, 8))

    def build_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self._note()
        time.sleep(float(os.environ[_STEP_MS]) / 1e3)
        return model(batch[0]).square().mean()

    def _note(self) -> None:
        self._times_ns.append(time.monotonic_ns())
        passes = len(self._times_ns)
        if passes == WARM_UP:
            self._cpu_ns = time.process_time_ns()
            _spent_ns[0] = 0
        elif passes == int(os.environ[_STEPS]) - LAST:
            cpu_us = (time.process_time_ns() - self._cpu_ns) / 1e3 / (passes - WARM_UP)
            steps_ms = [
                (b - a) / 1e6 for a, b in zip(self._times_ns[WARM_UP:], self._times_ns[WARM_UP + 1 :], strict=False)
            ]
            told_us = _spent_ns[0] / 1e3 / (passes - WARM_UP)
            found = {"cpu_us": cpu_us, "told_us": told_us, "step_ms": statistics.median(steps_ms), "pid": os.getpid()}
            (Path(os.environ[_FOLDER]) / f"worker-{os.getpid()}.json").write_text(json.dumps(found))


def observe_nothing() -> None:
    """In a worker: what it counts and tells for others to look at costs nothing from here on."""
    from everstep.observe.events import EventLog
    from everstep.runtime.board import Row

    EventLog.write = lambda self, kind, **fields: True  # type: ignore[method-assign, assignment]
    Row.sent = lambda self, operation, n_bytes: None  # type: ignore[method-assign]
    Row.set = _set_without_times  # type: ignore[method-assign]


def _set_without_times(
    self: Any, *, step: Any = None, phase: Any = None, samples: Any = None, generation: Any = None
) -> None:
    """`Row.set` as far as the failure detector needs it."""
    from everstep.runtime import board

    words = self._words
    if step is not None:
        words[board._STEP] = step
    if phase is not None:
        words[board._PHASE] = board.PHASE_CODE[phase]
    if samples is not None:
        words[board._SAMPLES] = samples
    if generation is not None:
        words[board._GENERATION] = generation
    words[board._COUNTER] += 1
    words[board._BEAT_NS] = time.monotonic_ns()


def time_what_observes() -> None:
    """In a worker: add up how long the calls take with which it counts and tells, and what times them, too."""
    from everstep.observe.events import EventLog
    from everstep.runtime.board import Row

    for owner, name in ((EventLog, "write"), (Row, "set"), (Row, "sent")):
        setattr(owner, name, _timed(getattr(owner, name)))


def _timed(call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        began_ns = time.perf_counter_ns()
        try:
            return call(*arguments, **named)
        finally:
            _spent_ns[0] += time.perf_counter_ns() - began_ns

    return timed


if os.environ.get(_HOW) == OFF:
    observe_nothing()
elif os.environ.get(_HOW) == TIMED:
    time_what_observes()


def run(options: argparse.Namespace, how: str) -> dict[str, Any]:
    """One job, everything on or off, or on and timed; what its workers wrote down."""
    on = how != OFF
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        os.environ.update({_FOLDER: folder, _STEP_MS: str(options.step_ms), _STEPS: str(options.steps)})
        os.environ[_HOW] = how
        run_dir = Path(folder) / "run"
        settings = {"lanes": options.workers, "micro_batch": 1, "checkpoint.enabled": "false", "verify_every": 0}
        settings |= switched_on() if on else {"metrics.interval_s": 0}
        arguments = ["--workers", str(options.workers), "--steps", str(options.steps)]
        job = EverstepJob(
            f"{__file__}:Waiting", run_dir, *arguments, *(["--dashboard"] if on else []), settings=settings
        )
        with page_open(job) if on else contextlib.nullcontext():
            job.wait()
        found = [json.loads(path.read_text()) for path in Path(folder).glob("worker-*.json")]
        if len(found) != options.workers:
            raise SystemExit(f"expected the figures of {options.workers} workers, got those of {len(found)}")
        return {
            "cpu_us": statistics.mean(one["cpu_us"] for one in found),
            "busiest_us": max(one["cpu_us"] for one in found),
            **({"told_us": max(one["told_us"] for one in found)} if how == TIMED else {}),
            "step_ms": statistics.median(one["step_ms"] for one in found),
        }


def switched_on() -> dict[str, Any]:
    """Config keys that let others look on, as far as they can be had here."""
    sinks = {"sinks": "tensorboard"} if importlib.util.find_spec("tensorboard") else {}
    served = {"metrics.listen": "127.0.0.1:0"} if importlib.util.find_spec("prometheus_client") else {}
    return {**served, **sinks}


@contextlib.contextmanager
def page_open(job: EverstepJob) -> Iterator[None]:
    """Read the dashboard's stream for as long as the block lasts, as a page does."""
    ended = threading.Event()

    def read() -> None:
        address = ""
        while not address and not ended.wait(0.1):
            said = b"".join(list(job._said)).decode(errors="replace").split()
            address = next((word for word in said if word.startswith("http://") and "#token=" in word), "")
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(address.partition("#")[0] + "api/stream", timeout=30) as stream:
                while not ended.is_set() and stream.readline():
                    pass

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def main() -> None:
    """Parse, measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", help="also write the JSON here")
    options = parser.parse_args()
    pairs = []
    for number in range(options.pairs):
        found = {how: run(options, how) for how in ((ON, OFF) if number % 2 == 0 else (OFF, ON))}
        pair = {f"{key}_{how}": found[how][key] for key in found[ON] for how in (ON, OFF)}
        pair |= {f"{key}_more": found[ON][key] - found[OFF][key] for key in found[ON]}
        pairs.append({key: round(value, 3) for key, value in pair.items()})
        print(pairs[-1], file=sys.stderr, flush=True)
    told_us = [run(options, TIMED)["told_us"] for _ in range((options.pairs + 1) // 2)]
    columns = {key: spread([pair[key] for pair in pairs], digits=3) for key in pairs[0]}
    report = {
        "bench": "observe",
        **machine(),
        "workers": options.workers,
        "steps": options.steps - WARM_UP - LAST,
        "switched_on": switched_on(),
        "target_us": TARGET_US,
        "met": columns["cpu_us_more"]["median"] <= TARGET_US,
        "told_us": spread(told_us, digits=3),
        **columns,
        "pairs": pairs,
    }
    write_report(report, options.out)


if __name__ == "__main__":
    main()
