"""The most memory that a whole job holds, beside DistributedDataParallel: a causal transformer of 25M, AdamW, one host.

    python bench/memory.py [--model transformer-25m] [--workers 2 4] [--steps 12] [--rounds 5]
        [--rows ROW ...] [--out FILE]

All processes of a job together, shared pages divided among those who share them (PSS), looked at every 50 ms from the
start to the end of step `--steps`. Rows, for each number of workers, whole runs in turn; those of `--rows` alone, so
that it can be run in parts, each with `ddp` if it is to be compared with that:
- replicated: a job as it is by default, without checkpoints and copies in memory;
- divided: the same with the optimizer's state divided among the workers, one copy of each part (`zero.stage=1`);
- divided-one, gradients-one: with one lane per worker, the state divided so, and the gradients, too (`zero.stage=2`);
- gradients: as divided, and the gradients, too, with all lanes (`zero.stage=2`);
- cell: one worker of as many processes, which divide parameters and state (`cell.fsdp`);
- cells, cells-divided, cells-gradients: as many workers of two processes each, which divide parameters and state, and
  whose workers divide the state, or the gradients, too (`zero.stage`, one copy);
- offloaded: replicated, with that state in a file (`zero.offload`, in a temporary folder);
- gradients-offloaded: `gradients`, with what each worker holds of that state in a file;
- in-files: parameters and gradients there, too (`zero.offload_params`);
- ddp, ddp-views: the peer with as many micro-batches under `no_sync` and our allocator settings, its
  `gradient_as_bucket_view` off and on;
- zero-redundancy, fsdp2: the peer with torch's ZeroRedundancyOptimizer, and with FSDP2 by unit in its place.

Of each the most that was held before the end of the second step (start_mb: the first update is made twice), and after
it (steps_mb), the greater of both (peak_mb), the most of it that is no page of a file (kept_mb: the system takes those
back when memory is short, an offload's and programs' alike), the ratio of peak_mb to that of `ddp` in the same round
(to_ddp, to_ddp_at_most), of both to what `everstep plan memory` says for all workers (planned_mb; to_plan, 0.9 to 1.1;
kept_to_plan), the median time between the ends of two steps (step_ms), and the bytes that went over loopback per step
(loopback_mb; workers of ours on one host exchange through shared memory). Rows `kill-PEER`, once each: what is left of
a peer after the SIGKILL of a rank (after_kill).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from cost import FAULT_SAMPLE_S, Watch, ddp_job, watched_ddp
from measure import BENCH, EverstepJob, committed, descendants, environment, machine, spread, write_report
from models import MODELS

ALONE = {"checkpoint.enabled": "false"}


DIVIDED = {"zero.stage": "1", "zero.copies": "1"}
GRADIENTS = {"zero.stage": "2", "zero.copies": "1"}
FILE = {"zero.offload": "{name}/offload"}
CELL = {"cell.fsdp": "{workers}", "cell.wrap": "200000"}
CELLS = {"cell.fsdp": "2", "cell.wrap": "200000"}
_CELLS = ("--set", "cell.fsdp=2", "--set", "cell.wrap=200000")
ONE = {"lanes": "{workers}"}
_ONE = ("--copies", "1")
_LANES = ("--lanes", "{workers}")
MODES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "replicated": ({}, ()),
    "divided": (DIVIDED, (*_ONE, "--zero", "1")),
    "divided-one": (DIVIDED | ONE, (*_ONE, "--zero", "1", *_LANES)),
    "gradients": (GRADIENTS, (*_ONE, "--zero", "2")),
    "gradients-one": (GRADIENTS | ONE, (*_ONE, "--zero", "2", *_LANES)),
    "offloaded": (FILE, ("--offload", "./disk")),
    "gradients-offloaded": (GRADIENTS | FILE, (*_ONE, "--zero", "2", "--offload", "./disk")),
    "in-files": (FILE | {"zero.offload_params": "true"}, ("--offload", "./disk", "--offload-params")),
    "cell": (CELL, ("--set", "cell.fsdp={workers}", "--set", "cell.wrap=200000")),
    "cells": (CELLS, _CELLS),
    "cells-divided": (CELLS | DIVIDED, (*_CELLS, *_ONE, "--zero", "1")),
    "cells-gradients": (CELLS | GRADIENTS, (*_CELLS, *_ONE, "--zero", "2")),
}
"""Settings of a job, and options of `plan memory` for it."""
TO_DDP = {"replicated": {2: 1.15, 4: 1.0}, "divided-one": {4: 0.75}, "gradients-one": {4: 0.6}}
"""The most that a mode may hold with so many workers, as a part of what `ddp` holds."""
PEERS = {
    "ddp": (),
    "ddp-views": ("--bucket-views",),
    "zero-redundancy": ("--divide", "optimizer"),
    "fsdp2": ("--divide", "all"),
}
"""Options of the peer."""
KILLS = {f"kill-{peer}": peer for peer in PEERS}
KILL_S = 30.0
"""A peer that has gone on, or ended, by then is said to have."""


class Loopback:
    """Bytes that have gone over loopback, looked at every 50 ms, while this is entered."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int]] = []
        self._end = threading.Event()

    def _run(self) -> None:
        while not self._end.wait(FAULT_SAMPLE_S):
            for row in Path("/proc/net/dev").read_text().splitlines():
                name, _, rest = row.partition(":")
                if name.strip() == "lo":
                    self._seen.append((time.time_ns(), int(rest.split()[0])))

    @contextlib.contextmanager
    def counts(self) -> Iterator[None]:
        """While this is entered."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def mb_between(self, begin_ns: int, end_ns: int) -> float:
        """MiB from then to then."""
        inside = [count for at_ns, count in self._seen if begin_ns <= at_ns <= end_ns]
        return (inside[-1] - inside[0]) / 2**20 if inside else 0.0


def measure_ours(model: str, workers: int, steps: int, settings: Mapping[str, str]) -> dict[str, float]:
    """One run of ours. settings: more of them; {name} is a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        task = f"{BENCH / 'models.py'}:{MODELS[model].__name__}"
        options = "--workers", str(workers), "--steps", str(steps)
        more = {key: value.format(name=name) for key, value in settings.items()}
        job = EverstepJob(task, Path(name) / "run", *options, settings=ALONE | more)
        watch, sent = Watch(lambda: descendants(job.process.pid), FAULT_SAMPLE_S), Loopback()
        with sent.counts():
            job.wait()
        watch.close()
        ends_ns = [at for _, at in committed(job.events())]
    return _most(watch, sent, ends_ns, steps)


def measure_ddp(model: str, workers: int, steps: int, *options: str) -> dict[str, float]:
    """One run of the peer, until it has come as far."""
    sent = Loopback()
    with sent.counts():
        watch, ends_ns = watched_ddp(model, workers, steps, *options, every_s=FAULT_SAMPLE_S)
    return _most(watch, sent, ends_ns, steps)


def after_kill(model: str, workers: int, *options: str) -> str:
    """What is left of the peer after the SIGKILL of its last rank, in its third step."""
    with ddp_job(model, workers, *options) as job:
        while len(job.ends_ns()) < 2:
            job.check()
            time.sleep(0.05)
        job.roots[-1].kill()
        begin_s, before = time.monotonic(), len(job.ends_ns())
        while (took_s := time.monotonic() - begin_s) < KILL_S:
            if all(rank.poll() is not None for rank in job.roots):
                codes = sorted({rank.returncode for rank in job.roots[:-1]})
                return f"all ranks ended, with {codes}, after {took_s:.1f} s"
            if len(job.ends_ns()) > before + 1:  # one step may have been at its end
                return f"went on after {took_s:.1f} s"
            time.sleep(0.05)
    return f"stood still for {KILL_S:.0f} s"


def _most(watch: Watch, sent: Loopback, ends_ns: list[int], steps: int) -> dict[str, float]:
    kept = max(one[4] for one in watch.samples if one[0] <= ends_ns[steps - 1])
    start = max(one[2] for one in watch.samples if one[0] <= ends_ns[1])
    after = max(one[2] for one in watch.samples if ends_ns[1] < one[0] <= ends_ns[steps - 1])
    step_ms = median(after - before for before, after in pairwise(ends_ns[1:steps])) / 1e6
    loopback_mb = sent.mb_between(ends_ns[1], ends_ns[steps - 1]) / (steps - 2)
    most = {"start_mb": start, "steps_mb": after, "peak_mb": max(start, after), "kept_mb": kept}
    return most | {"step_ms": step_ms, "loopback_mb": loopback_mb}


def plan(model: str, workers: int, *options: str) -> float:
    """What a job of so many workers is said to need, in MiB."""
    task = f"{BENCH / 'models.py'}:{MODELS[model].__name__}"
    command = [sys.executable, "-m", "everstep", "plan", "memory", task, "--workers", str(workers), "--json", *options]
    said = json.loads(subprocess.run(command, capture_output=True, check=True, env=environment()).stdout)
    if said["cell"] is not None:  # one worker of several processes
        return workers * said["cell"]["ranks"] * sum(said["cell"]["per_rank_bytes"].values()) / 2**20
    return workers * sum(said["per_worker_bytes"].values()) / 2**20


def compare(model: str, workers: int, steps: int, rounds: int, rows: list[str]) -> dict[str, dict[str, object]]:
    """These rows for so many workers."""
    runs: dict[str, Callable[[], dict[str, float]]] = {}
    planned: dict[str, float] = {}
    for mode in (row for row in rows if row in MODES):
        settings, options = MODES[mode]
        there = {key: value.replace("{workers}", str(workers)) for key, value in settings.items()}
        members = 1 if mode == "cell" else workers
        runs[mode] = partial(measure_ours, model, members, steps, there)
        planned[mode] = round(plan(model, members, *(one.format(workers=workers) for one in options)), 1)
    peers = {peer: options for peer, options in PEERS.items() if peer in rows}
    runs |= {peer: partial(measure_ddp, model, workers, steps, *options) for peer, options in peers.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in runs if number % 2 == 0 else reversed(runs):
            found[name].append(runs[name]())
        for name, turns in found.items():
            if "ddp" in found:
                turns[-1]["to_ddp"] = turns[-1]["peak_mb"] / found["ddp"][-1]["peak_mb"]
            if name in planned:
                turns[-1]["to_plan"] = turns[-1]["peak_mb"] / planned[name]
                turns[-1]["kept_to_plan"] = turns[-1]["kept_mb"] / planned[name]
        print({name: turns[-1] for name, turns in found.items()}, file=sys.stderr, flush=True)
    report: dict[str, dict[str, object]] = {}
    for name, turns in found.items():
        report[name] = {key: spread([one[key] for one in turns], digits=3) for key in turns[0]}
        limits = {"planned_mb": planned.get(name), "to_ddp_at_most": TO_DDP.get(name, {}).get(workers)}
        report[name] |= {key: value for key, value in limits.items() if value is not None}
    for row, peer in KILLS.items():
        if row in rows:
            report[row] = {"after_kill": after_kill(model, workers, *PEERS[peer])}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="transformer-25m", choices=MODELS)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    rows = [*MODES, *PEERS, *KILLS]
    parser.add_argument("--rows", nargs="+", default=rows, choices=rows)
    parser.add_argument("--out", help="also write the JSON here")
    options = parser.parse_args()
    report: dict[str, object] = {"bench": "memory", **machine(), "model": options.model}
    for workers in options.workers:
        report[f"workers_{workers}"] = compare(options.model, workers, options.steps, options.rounds, options.rows)
    write_report(report, options.out)


if __name__ == "__main__":
    main()
