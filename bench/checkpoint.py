"""What checkpoints cost, and how fast a job is back, beside torch.distributed.checkpoint (DCP) in the same run.

    python bench/checkpoint.py [--parts stall,sizes,restore,incremental,lost,restart] [--size-mb 400] [--workers 4]
                               [--repeats 10] [--sizes 10,100,1000] [--folder DIR] [--out FILE]

- stall: seconds that training stands still per snapshot (start, and before the update), while all workers compute;
  throughput and processor time of a save with nothing beside it; memory beyond the state while saving.
- sizes: the stall over state sizes. restore: with 1, 2, 3 and 5 workers, hashes verified. incremental: 90 % frozen.
- lost: a real job with a checkpoint every 10 steps of about 2 s against the same without.
- restart: a real job with everything killed, until its next step is committed.

The state is parameters and AdamW, replicated in all workers: each writes its share, as DCP does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from checkpoint_ranks import work
from measure import BENCH, EverstepJob, descendants, environment, free_port, machine, spread, step_times, write_report

PARTS = ("stall", "sizes", "restore", "incremental", "lost", "restart")
TASK = f"{BENCH / 'checkpoint_task.py'}:Wide"
TARGETS = {
    "stall_ms": 5.0,
    "lost_percent": 2.0,
    "incremental_percent": 15.0,
    "restart_s": 10.0,
    "restore": "not slower than dcp.load",
}


def on_ranks(duty: str, workers: int, folder: Path, *args: Any) -> list[dict[str, Any]]:
    """What every rank found, by rank."""
    port = free_port()
    context = multiprocessing.get_context("spawn")
    reports, results = context.Queue(), context.Queue()
    ranks = [
        context.Process(target=work, args=(rank, workers, port, folder, reports, results, duty, args), daemon=True)
        for rank in range(workers)
    ]
    for process in ranks:
        process.start()
    found = {}
    while len(found) < workers:
        rank, result = results.get(timeout=300)
        if result is None:
            for process in ranks:
                process.kill()
            raise SystemExit(f"rank {rank} failed in {duty}")
        found[rank] = result
    for process in ranks:
        process.join(60)
    return [found[rank] for rank in range(workers)]


def stalls_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst worker of each snapshot counts; the first snapshot apart."""
    worst = [max(values) for values in zip(*(f["stalls_s"] for f in found), strict=True)]
    later = sorted(worst[1:])
    every = sorted(s for f in found for s in f["stalls_s"][1:])
    return {
        "first_ms": round(1e3 * worst[0], 2),
        "worst_worker_p50_ms": round(1e3 * statistics.median(later), 2),
        "worst_worker_p90_ms": round(1e3 * later[int(0.9 * (len(later) - 1))], 2),
        "p50_ms": round(1e3 * statistics.median(every), 2),
        "p90_ms": round(1e3 * every[int(0.9 * (len(every) - 1))], 2),
    }


def throughput(found: list[dict[str, Any]], size_mb: float) -> dict[str, Any]:
    """Of a save with nothing beside it; processor time of all workers together."""
    seconds = statistics.median(found[0]["quiet_s"])
    return {
        "save_s": round(seconds, 3),
        "mb_per_s": round(size_mb / seconds),
        "cpu_s_per_gb": round(sum(f["cpu_s"] for f in found) / (size_mb / 1e3), 3),
    }


def measure_stall(folder: Path, workers: int, size_mb: float, repeats: int) -> dict[str, Any]:
    ours = on_ranks("stalls_everstep", workers, folder, size_mb, repeats)
    dcp = on_ranks("save_dcp", workers, folder, size_mb, 3)
    result = {
        "everstep": {
            **stalls_of(ours),
            **throughput(ours, size_mb),
            "extra_memory_mb_per_worker": round(max(f["extra_mb"] for f in ours), 1),
        },
        "dcp.save": throughput(dcp, size_mb),
    }
    for kind in ("default", "staged"):
        found = on_ranks("stalls_dcp", workers, folder, size_mb, max(4, repeats // 2), kind)
        result[f"dcp.async_save {kind}"] = stalls_of(found)
    return result


def measure_sizes(folder: Path, workers: int, sizes: list[float], repeats: int) -> dict[str, Any]:
    found = {}
    for size in sizes:
        ranks = on_ranks("stalls_everstep", workers, folder, size, repeats)
        found[f"{size:g} MB"] = {**stalls_of(ranks), "save_s": throughput(ranks, size)["save_s"]}
    return found


def measure_restore(folder: Path, size_mb: float, repeats: int) -> dict[str, Any]:
    on_ranks("save_once", 4, folder, size_mb)
    result = {}
    for workers in (1, 2, 3, 5):
        found = on_ranks("restores", workers, folder, size_mb, repeats)[0]
        ours, theirs = (statistics.median(found[k]) for k in ("ours_s", "dcp_s"))
        result[f"{workers} workers"] = {"everstep_s": round(ours, 3), "dcp.load_s": round(theirs, 3)}
    return result


def measure_incremental(folder: Path, workers: int, size_mb: float) -> dict[str, Any]:
    full, second = on_ranks("incremental", workers, folder, size_mb)[0]["written"]
    return {"full_bytes": full, "second_bytes": second, "percent": round(100 * second / full, 1)}


def measure_lost(folder: Path, size_mb: float) -> dict[str, Any]:
    """Medians of the mean step time over whole tens of steps, with a checkpoint in each ten and without any."""
    steps, found = 32, {}
    for name, settings in (("without", {"checkpoint.enabled": "false"}), ("with", {"checkpoint.disk.every_steps": 10})):
        job = EverstepJob(
            TASK,
            folder / f"lost-{name}",
            *("--workers", "2", "--steps", str(steps)),
            settings={**settings, "task.size_mb": size_mb, "task.lane_s": 0.9},
        )
        job.wait()
        times = step_times(job.events(), 10)[:20]
        found[name] = statistics.mean(times)
        found[f"{name}_steps_s"] = spread(times)
    return {**found, "lost_percent": round(100 * (found["with"] / found["without"] - 1), 2)}


def measure_restart(folder: Path, size_mb: float, workers: int) -> dict[str, Any]:
    """From the start of the command to the first new step, after everything was killed."""
    run_dir = folder / "restart"
    settings = {"checkpoint.disk.every_steps": 2, "task.size_mb": size_mb}
    job = EverstepJob(TASK, run_dir, "--workers", str(workers), "--steps", "100000", settings=settings)
    _until(job, lambda: any(e["kind"] == "checkpoint_completed" and e["step"] >= 4 for e in job.events()))
    for pid in descendants(job.process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.process.wait()
    reached = max(e["step"] for e in job.events() if e["kind"] == "step_committed")
    began_ns = time.time_ns()
    job = EverstepJob(TASK, run_dir, "--workers", str(workers), "--steps", "100000", settings=settings)
    try:
        _until(
            job, lambda: any(e["kind"] == "generation_started" and e["time_unix_ns"] > began_ns for e in job.events())
        )
        _until(
            job,
            lambda: any(
                e["kind"] == "step_committed" and e["step"] > reached and e["time_unix_ns"] > began_ns
                for e in job.events()
            ),
        )
        new = [e for e in job.events() if e["time_unix_ns"] > began_ns]
    finally:
        for pid in descendants(job.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    at = {kind: next(e["time_unix_ns"] for e in new if e["kind"] == kind) for kind in ("generation_started",)}
    first = next(e for e in new if e["kind"] == "step_committed" and e["step"] > reached)
    return {
        "workers": workers,
        "to_first_plan_s": round((at["generation_started"] - began_ns) / 1e9, 2),
        "to_next_step_s": round((first["time_unix_ns"] - began_ns) / 1e9, 2),
        "steps_done_again": reached - next(e["step"] for e in new if e["kind"] == "job_started"),
    }


def _until(job: EverstepJob, true: Any, limit_s: float = 180.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end or job.process.poll() is not None:
            job.kill()
            job.wait(1.0)
            raise SystemExit("the job did not get there")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--size-mb", type=float, default=400.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--sizes", default="10,100,1000")
    parser.add_argument("--folder", help="where to write (a temporary directory)")
    parser.add_argument("--out")
    options = parser.parse_args()
    parts = options.parts.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}: expected some of {', '.join(PARTS)}")
    os.environ.update(environment())
    sizes = [float(text) for text in options.sizes.split(",")]
    report: dict[str, Any] = {"targets": TARGETS, "size_mb": options.size_mb, **machine()}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=options.folder) as name:
        folder, size, workers = Path(name), options.size_mb, options.workers
        for part in parts:
            began = time.monotonic()
            match part:
                case "stall":
                    report[part] = measure_stall(folder, workers, size, options.repeats)
                case "sizes":
                    report[part] = measure_sizes(folder, workers, sizes, max(4, options.repeats // 2))
                case "restore":
                    report[part] = measure_restore(folder, size, 3)
                case "incremental":
                    report[part] = measure_incremental(folder, workers, size)
                case "lost":
                    report[part] = measure_lost(folder, size)
                case "restart":
                    report[part] = measure_restart(folder, size, workers)
            print(f"{part} ({time.monotonic() - began:.0f} s): {json.dumps(report[part])}", flush=True)
    write_report(report, options.out)


if __name__ == "__main__":
    main()
