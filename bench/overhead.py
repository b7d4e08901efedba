"""Step time of Everstep against DistributedDataParallel on gloo, in alternating pairs of short runs.

    python bench/overhead.py [--models resnet18,transformer-small,transformer-25m] [--workers 2,4] [--pairs 5]
                             [--baselines micro,large] [--seconds 6] [--out FILE]

Same model, same global batch, one intra-op thread per worker. Two baselines:
- micro: DDP with the same micro-batches under `no_sync`, against the default lanes;
- large: DDP with one big pass, against as many lanes as there are workers.
Ours are the times between `step_committed` events of a real `everstep run`. The ratio of a pair is that of the two
medians; reported is the median over the pairs, and likewise of processor time (ours: of the whole process tree,
launcher and coordinator included). A quick look: `--models resnet18 --workers 2 --pairs 3 --seconds 3`.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import BENCH, EverstepJob, cpu_seconds, descendants, environment, machine, spread, step_times, write_report
from models import MODELS

WARM_UP = 4
TARGETS = {"micro": 1.00, "large": 1.10}
_POLL_S = 0.1


def run_ddp(model: str, workers: int, passes: int, batch: int, steps: int) -> dict[str, Any]:
    """All ranks of one job; what rank 0 printed."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    command = [sys.executable, str(BENCH / "ddp_peer.py"), "--model", model, "--passes", str(passes)]
    command += ["--global-batch", str(batch), "--steps", str(steps), "--warm-up", str(WARM_UP)]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}
    ranks = [
        subprocess.Popen(command, env=environment(**shared, RANK=str(rank)), stdout=subprocess.PIPE)
        for rank in range(workers)
    ]
    said, _ = ranks[0].communicate(timeout=600)
    if any(rank.wait(60) for rank in ranks):
        raise SystemExit(f"a rank of the DDP peer failed: {[rank.returncode for rank in ranks]}")
    found: dict[str, Any] = json.loads(said)
    return found


def run_ours(model: str, workers: int, lanes: int, batch: int, steps: int, more: dict[str, Any]) -> dict[str, Any]:
    """One `everstep run`; steps_s and cpu_s as `ddp_peer.py` gives them."""
    settings = {"lanes": lanes, "micro_batch": batch // lanes, "verify_every": 0, **more}
    task = f"{BENCH / 'models.py'}:{MODELS[model].__name__}"
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        run_dir = Path(folder) / "run"
        job = EverstepJob(task, run_dir, "--workers", str(workers), "--steps", str(steps), settings=settings)
        samples: list[tuple[int, float]] = []
        while job.process.poll() is None:
            time.sleep(_POLL_S)
            step = last_step(run_dir / "events.jsonl")
            if step >= WARM_UP:
                samples.append((step, cpu_seconds(descendants(job.process.pid))))
        job.wait()
        inside = [s for s in samples if s[0] < steps]
        cpu = None
        if len(inside) > 1 and inside[-1][0] > inside[0][0]:
            cpu = (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])
        return {"steps_s": step_times(job.events(), WARM_UP), "cpu_s": cpu}


def last_step(path: Path) -> int:
    """Of the newest step_committed line; 0 if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["kind"] == "step_committed":
            return int(event["step"])
    return 0


def measure(model: str, workers: int, baseline: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case: alternating pairs after a trial run that says how many steps fill the time."""
    defaults = MODELS[model].defaults
    batch = defaults["lanes"] * defaults["micro_batch"]
    lanes = defaults["lanes"] if baseline == "micro" else workers
    more = dict(pair.split("=", 1) for pair in options.set)
    trial = run_ddp(model, workers, lanes // workers, batch, WARM_UP + 4)
    steps = WARM_UP + max(8, min(400, round(options.seconds / statistics.median(trial["steps_s"]))))
    pairs = []
    for number in range(options.pairs):
        found = {}
        for who in ("ours", "ddp") if number % 2 == 0 else ("ddp", "ours"):
            if who == "ours":
                found[who] = run_ours(model, workers, lanes, batch, steps, more)
            else:
                found[who] = run_ddp(model, workers, lanes // workers, batch, steps)
        ours, ddp = statistics.median(found["ours"]["steps_s"]), statistics.median(found["ddp"]["steps_s"])
        pair: dict[str, Any] = {"ours_ms": 1e3 * ours, "ddp_ms": 1e3 * ddp, "ratio": ours / ddp}
        if found["ours"]["cpu_s"] is not None:
            pair["ours_cpu_ms"], pair["ddp_cpu_ms"] = 1e3 * found["ours"]["cpu_s"], 1e3 * found["ddp"]["cpu_s"]
            pair["cpu_ratio"] = pair["ours_cpu_ms"] / pair["ddp_cpu_ms"]
        pairs.append({k: round(v, 4) for k, v in pair.items()})
        print(f"{model} {workers} workers {baseline}: {pairs[-1]}", file=sys.stderr, flush=True)
    columns = {key: [p[key] for p in pairs if key in p] for key in pairs[0]}
    return {
        "model": model,
        "workers": workers,
        "baseline": baseline,
        "lanes": lanes,
        "global_batch": batch,
        "steps_per_run": steps - WARM_UP,
        "target_ratio": TARGETS[baseline],
        "met": statistics.median(columns["ratio"]) <= TARGETS[baseline],
        **{key: spread(values) for key, values in columns.items()},
        "pairs": pairs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet18,transformer-small,transformer-25m")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--baselines", default="micro,large")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of timed steps per run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="config of our side")
    parser.add_argument("--out", help="also write the JSON here")
    options = parser.parse_args()
    cases = [
        measure(model, int(workers), baseline, options)
        for model in options.models.split(",")
        for workers in options.workers.split(",")
        for baseline in options.baselines.split(",")
    ]
    write_report({"bench": "overhead", **machine(), "cases": cases}, options.out)


if __name__ == "__main__":
    main()
