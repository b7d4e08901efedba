"""Step time of Everstep against DistributedDataParallel on gloo: two jobs that take turns on the machine.

    python bench/overhead.py [--models resnet18,transformer-small,transformer-25m] [--workers 2,4] [--rounds 15]
                             [--baselines micro,large] [--seconds 2] [--out FILE]

Same model, same global batch, one intra-op thread per worker. Two baselines:
- micro: DDP with the same micro-batches under `no_sync`, against the default lanes;
- large: DDP with one big pass, against as many lanes as there are workers.
Ours are the times between `step_committed` events of a real `everstep run`. The ratio of a round is that of the two
medians of its turns; reported is the median over the rounds, and likewise of processor time (ours: of the whole process
tree, launcher and coordinator included). A quick look: `--models resnet18 --workers 2 --rounds 5`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import BENCH, free_port, machine, write_report
from models import MODELS
from turns import columns, everstep_job, ranks_job, take_turns

WARM_UP = 4
TARGETS = {"micro": 1.00, "large": 1.10}


def measure(model: str, workers: int, baseline: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case: both jobs, turn by turn."""
    defaults = MODELS[model].defaults
    batch = defaults["lanes"] * defaults["micro_batch"]
    lanes = defaults["lanes"] if baseline == "micro" else workers
    more = dict(pair.split("=", 1) for pair in options.set)
    settings = {"lanes": lanes, "micro_batch": batch // lanes, **more}
    task = f"{BENCH / 'models.py'}:{MODELS[model].__name__}"
    peer = [str(BENCH / "ddp_peer.py"), "--model", model, "--passes", str(lanes // workers)]
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        ours = everstep_job("ours", task, folder / "run", "--workers", str(workers), settings=settings)
        ddp = ranks_job("ddp", [*peer, "--global-batch", str(batch)], workers, free_port(), folder / "ends")
        print(f"{model}, {workers} workers, {baseline}", file=sys.stderr, flush=True)
        rounds = take_turns(ours, ddp, warm_up=WARM_UP, rounds=options.rounds, turn_s=options.seconds)
    figures = columns(rounds)
    return {
        "model": model,
        "workers": workers,
        "baseline": baseline,
        "lanes": lanes,
        "global_batch": batch,
        "target_ratio": TARGETS[baseline],
        "met": figures["ratio"]["median"] <= TARGETS[baseline],
        **figures,
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet18,transformer-small,transformer-25m")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--baselines", default="micro,large")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, at least")
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
