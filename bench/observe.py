"""What looking on costs: everything that observes a job switched on, against everything off, turn by turn.

    python bench/observe.py [--workers 2] [--step-ms 20] [--rounds 30] [--seconds 2] [--out FILE]

A step is a timed wait, so that what a worker's processor does is Everstep's own work and little else. On: samples of
time, bytes and memory, events and the log; a dashboard beside the job with a page open; every sink that is installed.
Off: no samples, dashboard or sinks; and what workers count and tell for others to look at is replaced by nothing.
Workers note their processor time (the whole process, all threads) at each step. The jobs take turns on the machine;
reported is what "on" takes more per step, as median and spread over the rounds; and, since the noise of a machine may
be larger than that, `told_us`: how long the calls themselves take by which a worker counts and tells, per step of the
busiest one, reading the clock included (an upper bound, from a third job).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import statistics
import struct
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
from turns import PATIENT, Job, Turn, turns

WARM_UP = 60
TARGET_US = 50.0
_FOLDER, _STEP_MS, _HOW = "BENCH_FOLDER", "BENCH_STEP_MS", "BENCH_HOW"
_NOTE = struct.Struct("<QQQ")
ON, OFF, TIMED = "on", "off", "timed"
_spent_ns = [0]


class Waiting(everstep.Task):
    """One lane per worker and step: a wait, and next to nothing to compute. Writes down what the worker has taken."""

    def __init__(self) -> None:
        self._file = -1

    def build_model(self) -> nn.Module:
        return nn.Linear(8, 1)

    def build_dataset(self, split: str) -> TensorDataset:
        return TensorDataset(torch.ones(64, 8))

    def build_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self._file < 0:
            self._file = os.open(
                Path(os.environ[_FOLDER]) / f"worker-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND
            )
        os.write(self._file, _NOTE.pack(time.time_ns(), time.process_time_ns(), _spent_ns[0]))
        time.sleep(float(os.environ[_STEP_MS]) / 1e3)
        return model(batch[0]).square().mean()


def observe_nothing() -> None:
    """In a worker: what it counts and tells for others to look at costs nothing from here on."""
    from everstep.observe.events import EventLog
    from everstep.runtime.host.board import Row

    EventLog.write = lambda self, kind, **fields: True  # type: ignore[method-assign, assignment]
    Row.sent = lambda self, operation, n_bytes: None  # type: ignore[method-assign]
    Row.set = _set_without_times  # type: ignore[method-assign]


def _set_without_times(
    self: Any, *, step: Any = None, phase: Any = None, samples: Any = None, generation: Any = None
) -> None:
    """`Row.set` as far as the failure detector needs it."""
    from everstep.runtime.host import board

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
    from everstep.runtime.host.board import Row

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


def start(options: argparse.Namespace, how: str, folder: Path) -> tuple[Job, EverstepJob]:
    """A job without an end, everything on or off, or on and timed; its workers write into `folder`."""
    folder.mkdir()
    os.environ.update({_FOLDER: str(folder), _STEP_MS: str(options.step_ms), _HOW: how})
    settings = {"lanes": options.workers, "micro_batch": 1, "checkpoint.enabled": "false", **PATIENT}
    settings |= {"metrics.interval_s": 0} if how == OFF else switched_on()
    arguments = ["--workers", str(options.workers), "--steps", "1000000", *([] if how == OFF else ["--dashboard"])]
    job = EverstepJob(f"{__file__}:Waiting", folder / "run", *arguments, settings=settings)

    def ends_ns() -> list[int]:
        notes = workers(folder)
        return [note[0] for note in notes[0]] if len(notes) == options.workers else []

    return Job(how, [job.process], ends_ns), job


def workers(folder: Path) -> list[list[tuple[int, int, int]]]:
    """For each worker of a job: (unix ns, processor time ns, told ns) at each step so far."""
    found = []
    for path in sorted(folder.glob("worker-*")):
        data = path.read_bytes()
        found.append(list(_NOTE.iter_unpack(data[: len(data) // _NOTE.size * _NOTE.size])))
    return found


def per_step(folder: Path, turn: Turn) -> dict[str, float]:
    """Medians over the steps of a turn, means over the workers; of the busiest one where it says so."""
    cpu_us, told_us, step_ms = [], [], []
    for notes in workers(folder):
        pairs = list(itertools.pairwise(note for note in notes if turn.begin_ns < note[0] < turn.end_ns))
        step_ms.append(statistics.median(b[0] - a[0] for a, b in pairs) / 1e6)
        cpu_us.append(statistics.median(b[1] - a[1] for a, b in pairs) / 1e3)
        told_us.append(statistics.median(b[2] - a[2] for a, b in pairs) / 1e3)
    return {
        "cpu_us": statistics.mean(cpu_us),
        "busiest_us": max(cpu_us),
        "told_us": max(told_us),
        "step_ms": statistics.median(step_ms),
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
            address = next((word for word in said if word.startswith("http://") and "/?token=" in word), "")
        with contextlib.suppress(OSError):
            base, _, token = address.partition("?token=")
            request = urllib.request.Request(base + "api/stream", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=30) as stream:
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
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--out", help="also write the JSON here")
    options = parser.parse_args()
    hows = (ON, OFF, TIMED)
    rounds = []
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name, contextlib.ExitStack() as pages:
        folders = {how: Path(name) / how for how in hows}
        started = {how: start(options, how, folders[how]) for how in hows}
        for how in (ON, TIMED):
            pages.enter_context(page_open(started[how][1]))
        jobs = [started[how][0] for how in hows]
        for had in turns(jobs, warm_up=WARM_UP, rounds=options.rounds, turn_s=options.seconds):
            found = {how: per_step(folders[how], had[how]) for how in hows}
            one = {f"{key}_{how}": found[how][key] for key in ("cpu_us", "busiest_us", "step_ms") for how in (ON, OFF)}
            one |= {f"{key}_more": found[ON][key] - found[OFF][key] for key in ("cpu_us", "busiest_us", "step_ms")}
            one["told_us"] = found[TIMED]["told_us"]
            rounds.append({key: round(value, 3) for key, value in one.items()})
            print(rounds[-1], file=sys.stderr, flush=True)
    figures = {key: spread([one[key] for one in rounds], digits=3) for key in rounds[0]}
    report = {
        "bench": "observe",
        **machine(),
        "workers": options.workers,
        "switched_on": switched_on(),
        "target_us": TARGET_US,
        "met": figures["cpu_us_more"]["median"] <= TARGET_US,
        **figures,
        "rounds": rounds,
    }
    write_report(report, options.out)


if __name__ == "__main__":
    main()
