"""What fault tolerance costs: the same epoch with it, without it, and in plain DistributedDataParallel on gloo.

    python bench/cost.py [--model transformer-small] [--workers 2] [--steps 150] [--rounds 3] [--parts | --heal]
                         [--set KEY=VALUE ...] [--out FILE]

Whole runs, one after the other, in turn:
- on: as jobs are by default, with a copy in memory and a checkpoint on disk every 30 steps;
- off: no checkpoints and copies, no comparing of states (`verify_every: 0`), heartbeats a hundred times rarer; the
  gradients are still reduced in the one order;
- ddp: as many micro-batches under `no_sync`, with our allocator settings.

Of each, between the ends of steps 10 and `--steps`, all processes of the job together:
- epoch_s: seconds of an epoch of the model's dataset, at this pace;
- cpu_s: processor time per epoch;
- memory_mb: the most that was held, shared pages divided among those who share them (PSS);
- heartbeat_bytes_per_s: what the coordinator received and sent (`ss`), which is all of the control plane.

`--parts` measures instead, in one job of a plain script (8 lanes, `verify_every` 100), what share of the workers'
processor time single guards take, by the clocks of their threads: how a model is set, digested in every step
(settings); states compared (comparing); the survey of what the loop carries (survey); lanes that are computed a second
time, and digests of them (probe). Whole runs spread by more.

`--heal` measures memory over a fault instead: a worker is killed in the middle, the others settle, and a new one heals.
Of all processes together, in MB (PSS, looked at every 50 ms): before the kill (before_mb), from the kill until five
steps after the healed worker has joined (fault_mb), and the ratio of the two. `--set` gives settings of that job, such
as `zero.stage=2`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from measure import BENCH, EverstepJob, committed, cpu_seconds, descendants, free_port, machine, spread, write_report
from models import MODELS
from turns import Job, ranks_job

FIRST = 10
TOLERANT = {"checkpoint.memory.every_steps": 30, "checkpoint.disk.every_steps": 30}
BARE = {
    "checkpoint.enabled": "false",
    "verify_every": 0,
    "heartbeat.interval_s": 100,
    "heartbeat.floor_s": 300,
    "heartbeat.ceiling_s": 600,
    "hang_limit_s": 600,
}
SAMPLE_S, FAULT_SAMPLE_S = 0.5, 0.05
AFTER_HEALING = 5


class Watch:
    """Looks at all processes of a job every `every_s`, in a thread of its own, until it is closed."""

    def __init__(self, pids: Callable[[], list[int]], every_s: float = SAMPLE_S) -> None:
        self.samples: list[tuple[int, float, float, int, float]] = []
        self._pids, self._every_s = pids, every_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            pids = self._pids()
            control = _control_bytes(pids) if self._every_s == SAMPLE_S else 0
            rows = [_pss_mb(pid) for pid in pids]
            held, of_files = sum(row[0] for row in rows), sum(row[1] for row in rows)
            self.samples.append((time.time_ns(), cpu_seconds(pids), held, control, held - of_files))

    def close(self) -> None:
        """No more samples."""
        self._end.set()
        self._thread.join()

    def between(self, begin_ns: int, end_ns: int, steps: int, epoch: int) -> dict[str, float]:
        """The figures of `steps` steps, an epoch having `epoch` of them."""
        inside = [one for one in self.samples if begin_ns <= one[0] <= end_ns]
        if len(inside) < 2:
            raise SystemExit(f"{steps} steps were over too soon to be looked at: give more --steps")
        seconds = (inside[-1][0] - inside[0][0]) / 1e9
        epoch_s = (end_ns - begin_ns) / 1e9 / steps * epoch
        return {
            "epoch_s": epoch_s,
            "cpu_s": (inside[-1][1] - inside[0][1]) / seconds * epoch_s,
            "memory_mb": max(one[2] for one in inside),
            "heartbeat_bytes_per_s": (inside[-1][3] - inside[0][3]) / seconds,
        }


def _pss_mb(pid: int) -> tuple[float, float]:
    """All that a process holds, and what of it are pages of files."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        found = {
            name: int(rest.split()[0]) / 1024 for name, _, rest in (x.partition(":") for x in lines) if "Pss" in name
        }
        return found.get("Pss", 0.0), found.get("Pss_File", 0.0)
    return 0.0, 0.0


def _control_bytes(pids: list[int]) -> int:
    """What the coordinator among these has received and sent over TCP; 0 without one."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if b"coordinator" in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "):
                told = subprocess.run(["ss", "-Htinp"], capture_output=True, text=True, check=True).stdout
                mine = [b for a, b in zip(*[iter(told.splitlines())] * 2, strict=False) if f"pid={pid}," in a]
                return sum(int(n) for line in mine for n in re.findall(r"bytes_(?:received|sent):(\d+)", line))
    return 0


def measure_ours(model: str, workers: int, steps: int, epoch: int, settings: dict[str, Any]) -> dict[str, float]:
    """One run of ours."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        task = f"{BENCH / 'models.py'}:{MODELS[model].__name__}"
        arguments = ["--workers", str(workers), "--steps", str(steps)]
        job = EverstepJob(task, Path(name) / "run", *arguments, settings=settings)
        watch = Watch(lambda: descendants(job.process.pid))
        job.wait()
        watch.close()
        at = dict(committed(job.events()))
    return watch.between(at[FIRST], at[steps], steps - FIRST, epoch)


def measure_parts(model: str, workers: int, steps: int) -> dict[str, float]:
    """Percent of the workers' processor time, by part."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        told = Path(name) / "parts"
        variables = {"COST_PARTS": str(told), "COST_MODEL": model, "COST_STEPS": str(steps)}
        script = str(BENCH / "cost_script.py")
        settings = {"verify_every": 100}
        run_dir = Path(name) / "run"
        EverstepJob(script, run_dir, "--workers", str(workers), settings=settings, variables=variables).wait()
        lines = [json.loads(line) for line in told.read_text().splitlines()]
    whole = sum(line.pop("process") for line in lines)
    return {part: 100 * sum(line.get(part, 0.0) for line in lines) / whole for part in sorted({*chain(*lines)})}


def measure_heal(model: str, workers: int, steps: int, settings: dict[str, Any]) -> dict[str, float]:
    """The most memory before a kill, and over it and the heal that follows. settings: more than it has anyway."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        task = f"{BENCH / 'models.py'}:{MODELS[model].__name__}"
        arguments = ["--workers", str(workers), "--steps", str(steps)]
        arguments += ["--chaos", f"kill:target=worker:1,at={steps // 2}"]
        job = EverstepJob(task, Path(name) / "run", *arguments, settings=TOLERANT | settings)
        watch = Watch(lambda: descendants(job.process.pid), FAULT_SAMPLE_S)
        job.wait()
        watch.close()
        events = job.events()
    at = dict(committed(events))
    killed, healed = (next(e for e in events if e["kind"] == kind) for kind in ("worker_evicted", "worker_healed"))
    end_ns = at[min(healed["step"] + AFTER_HEALING, steps)]
    before = max(mb for ns, _, mb, _ in watch.samples if at[FIRST] <= ns < killed["time_unix_ns"])
    fault = max(mb for ns, _, mb, _ in watch.samples if killed["time_unix_ns"] <= ns <= end_ns)
    return {"before_mb": before, "fault_mb": fault, "ratio": fault / before}


@contextlib.contextmanager
def ddp_job(model: str, workers: int, *options: str) -> Iterator[Job]:
    """The peer, with as many micro-batches in a step; its processes are killed at the end."""
    defaults = MODELS[model].defaults
    passes, batch = defaults["lanes"] // workers, defaults["lanes"] * defaults["micro_batch"]
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        command = [str(BENCH / "ddp_peer.py"), "--model", model, "--passes", str(passes), "--global-batch", str(batch)]
        job: Job = ranks_job("ddp", [*command, *options], workers, free_port(), Path(name) / "ends")
        try:
            yield job
        finally:
            for rank in job.roots:
                rank.kill()
                rank.wait()


def watched_ddp(
    model: str, workers: int, steps: int, *options: str, every_s: float = SAMPLE_S
) -> tuple[Watch, list[int]]:
    """One run of the peer, until it has come as far: what was seen of it, and when its steps ended (unix, ns)."""
    with ddp_job(model, workers, *options) as job:
        watch = Watch(job.pids, every_s)
        try:
            while len(ends := job.ends_ns()) < steps:
                job.check()
                time.sleep(0.1)
        finally:
            watch.close()
    return watch, ends


def measure_ddp(model: str, workers: int, steps: int, epoch: int) -> dict[str, float]:
    """The figures of one run of the peer."""
    watch, ends = watched_ddp(model, workers, steps)
    return watch.between(ends[FIRST - 1], ends[steps - 1], steps - FIRST, epoch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="transformer-small", choices=MODELS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="also write the JSON here")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with --heal: a setting")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--parts", action="store_true", help="what single guards take, instead")
    instead.add_argument("--heal", action="store_true", help="memory over a kill and the heal that follows, instead")
    options = parser.parse_args()
    if options.parts or options.heal:
        settings = dict(one.split("=", 1) for one in options.set)
        heal = partial(measure_heal, settings=settings)
        measure: Callable[[str, int, int], dict[str, float]] = measure_parts if options.parts else heal
        rows = [measure(options.model, options.workers, options.steps) for _ in range(options.rounds)]
        what = "cost of parts, percent" if options.parts else "memory over a kill and a heal"
        report = {"bench": what, **machine(), "model": options.model, "workers": options.workers}
        report |= {part: spread([row[part] for row in rows], digits=3) for part in rows[0]}
        write_report(report, options.out)
        return
    task = MODELS[options.model]
    dataset: Any = task().build_dataset("train")
    epoch = len(dataset) // (task.defaults["lanes"] * task.defaults["micro_batch"])
    case = (options.model, options.workers, options.steps, epoch)
    runs: dict[str, Callable[[], dict[str, float]]] = {
        "on": lambda: measure_ours(*case, TOLERANT),
        "off": lambda: measure_ours(*case, BARE),
        "ddp": lambda: measure_ddp(*case),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(options.rounds):
        for name in runs if number % 2 == 0 else reversed(runs):
            found[name].append(runs[name]())
            print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
    report = {"bench": "cost", **machine(), "model": options.model, "workers": options.workers}
    report["steps_of_an_epoch"] = epoch
    for name, results in found.items():
        report[name] = {key: spread([one[key] for one in results], digits=2) for key in results[0]}
    write_report(report, options.out)


if __name__ == "__main__":
    main()
