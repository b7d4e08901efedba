"""The most memory that a whole job holds, beside DistributedDataParallel: a causal transformer of 25M, AdamW, one host.

    python bench/memory.py [--model transformer-25m] [--workers 2 4] [--steps 12] [--rounds 5] [--out FILE]

All processes of a job together, shared pages divided among those who share them (PSS), looked at every 50 ms from the
start to the end of step `--steps`. Rows, for each number of workers, whole runs in turn:
- replicated: a job as it is by default, without checkpoints and copies in memory;
- divided: the same with the optimizer's state divided among the workers, one copy of each part (`zero.stage=1`);
- divided-one, gradients-one: with one lane per worker, the state divided so, and the gradients, too (`zero.stage=2`);
- cell: one worker of as many processes, which divide parameters and state (`cell.fsdp`);
- offloaded: the same with that state in a file (`zero.offload`, in a temporary folder);
- ddp, ddp-views: the peer with as many micro-batches under `no_sync` and our allocator settings, its
  `gradient_as_bucket_view` off and on.

Of each the most that was held before the end of the second step (start_mb: the first update is made twice), and after
it (steps_mb), the greater of both (peak_mb), and its ratio to that of `ddp` in the same round (to_ddp); and the median
time between the ends of two steps (step_ms). planned_mb, planned_divided_mb and so on are
what `everstep plan memory` says for all workers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median

from cost import FAULT_SAMPLE_S, Watch, watched_ddp
from measure import BENCH, EverstepJob, committed, descendants, environment, machine, spread, write_report
from models import MODELS

ALONE = {"checkpoint.enabled": "false"}


DIVIDED = {"zero.stage": "1", "zero.copies": "1"}
GRADIENTS = {"zero.stage": "2", "zero.copies": "1"}
ONE = ("--copies", "1")
WRAP = "200000"


def measure_ours(model: str, workers: int, steps: int, settings: Mapping[str, str]) -> dict[str, float]:
    """One run of ours. settings: more of them; {name} is a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        task = f"{BENCH / 'models.py'}:{MODELS[model].__name__}"
        options = "--workers", str(workers), "--steps", str(steps)
        more = {key: value.format(name=name) for key, value in settings.items()}
        job = EverstepJob(task, Path(name) / "run", *options, settings=ALONE | more)
        watch = Watch(lambda: descendants(job.process.pid), FAULT_SAMPLE_S)
        job.wait()
        watch.close()
        ends_ns = [at for _, at in committed(job.events())]
    return _most(watch, ends_ns, steps)


def measure_ddp(model: str, workers: int, steps: int, *options: str) -> dict[str, float]:
    """One run of the peer, until it has come as far."""
    return _most(*watched_ddp(model, workers, steps, *options, every_s=FAULT_SAMPLE_S), steps)


def _most(watch: Watch, ends_ns: list[int], steps: int) -> dict[str, float]:
    start = max(one[2] for one in watch.samples if one[0] <= ends_ns[1])
    after = max(one[2] for one in watch.samples if ends_ns[1] < one[0] <= ends_ns[steps - 1])
    step_ms = median(after - before for before, after in pairwise(ends_ns[1:steps])) / 1e6
    return {"start_mb": start, "steps_mb": after, "peak_mb": max(start, after), "step_ms": step_ms}


def plan(model: str, workers: int, *options: str) -> float:
    """What a replicated job of so many workers is said to need, in MiB."""
    task = f"{BENCH / 'models.py'}:{MODELS[model].__name__}"
    command = [sys.executable, "-m", "everstep", "plan", "memory", task, "--workers", str(workers), "--json", *options]
    said = json.loads(subprocess.run(command, capture_output=True, check=True, env=environment()).stdout)
    if said["cell"] is not None:  # one worker of several processes
        return workers * said["cell"]["ranks"] * sum(said["cell"]["per_rank_bytes"].values()) / 2**20
    return workers * sum(said["per_worker_bytes"].values()) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="transformer-25m", choices=MODELS)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="also write the JSON here")
    options = parser.parse_args()
    report = {"bench": "memory", **machine(), "model": options.model}
    for workers in options.workers:
        case = (options.model, workers, options.steps)
        runs: dict[str, Callable[[], dict[str, float]]] = {
            "replicated": lambda case=case: measure_ours(*case, {}),  # type: ignore[misc]
            "divided": lambda case=case: measure_ours(*case, DIVIDED),  # type: ignore[misc]
            "divided-one": lambda case=case: measure_ours(*case, DIVIDED | {"lanes": str(case[1])}),  # type: ignore[misc]
            "gradients-one": lambda case=case: measure_ours(*case, GRADIENTS | {"lanes": str(case[1])}),  # type: ignore[misc]
            "offloaded": lambda case=case: measure_ours(*case, {"zero.offload": "{name}/offload"}),  # type: ignore[misc]
            "cell": lambda case=case: measure_ours(case[0], 1, case[2], {"cell.fsdp": str(case[1]), "cell.wrap": WRAP}),  # type: ignore[misc]
            "ddp": lambda case=case: measure_ddp(*case),  # type: ignore[misc]
            "ddp-views": lambda case=case: measure_ddp(*case, "--bucket-views"),  # type: ignore[misc]
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
        for number in range(options.rounds):
            for name in runs if number % 2 == 0 else reversed(runs):
                found[name].append(runs[name]())
            for rows in found.values():
                rows[-1]["to_ddp"] = rows[-1]["peak_mb"] / found["ddp"][-1]["peak_mb"]
            print({name: rows[-1] for name, rows in found.items()}, file=sys.stderr, flush=True)
        planned = {
            "planned_mb": round(plan(options.model, workers), 1),
            "planned_divided_mb": round(plan(options.model, workers, "--zero", "1", "--copies", "1"), 1),
            "planned_divided_one_mb": round(plan(*case[:2], *ONE, "--zero", "1", "--lanes", str(workers)), 1),
            "planned_gradients_one_mb": round(plan(*case[:2], *ONE, "--zero", "2", "--lanes", str(workers)), 1),
            "planned_cell_mb": round(
                plan(options.model, 1, "--set", f"cell.fsdp={workers}", "--set", f"cell.wrap={WRAP}"), 1
            ),
            "planned_offloaded_mb": round(plan(options.model, workers, "--offload", "./disk"), 1),
        }
        print(planned, file=sys.stderr, flush=True)
        report[f"workers_{workers}"] = planned | {
            name: {key: spread([one[key] for one in rows], digits=3) for key in rows[0]} for name, rows in found.items()
        }
    write_report(report, options.out)


if __name__ == "__main__":
    main()
