"""What a failure costs: Everstep, and in the same run on the same model torchrun and torchft.

    python bench/recovery.py [--jobs 5] [--stops 3] [--peer-kills 5] [--torchft DIR] [--out FILE]

- next_step: from SIGKILL of one of 4 workers to the next committed step of the survivors, all of that step included.
  Every job kills each worker once (the leader too), in changing phases of a step: 5 jobs are 20 kills.
- owner_next_step: the same where the workers have divided the optimizer's state (`zero.stage=1`, two copies): each of
  them holds parts of it.
- replacement: from SIGKILL to the first committed step to which again as many workers contributed; with and without a
  spare. The workers of a step are those of its ledger row.
- stop: from SIGSTOP, with `hang_limit_s=2`, to the next committed step.
- lost_steps: committed steps that are missing, or not in the ledger. `bits`: whether the final digests of all jobs are
  that of an undisturbed job.

Nothing is taken off: what an ordinary step takes (the median of the same job's steps with all workers present) stands
beside it. torchft is measured with as many replicas and with one fewer, and with gloo's timeout of 5 s and of 1 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import BENCH, Event, EverstepJob, committed, machine, spread, write_report
from models import MODELS
from recovery_peers import measure_torchft, measure_torchrun, torchft_absent

MODEL, WORKERS, LANES, MICRO_BATCH = "transformer-small", 4, 8, 1
HANG_LIMIT_S = 2.0
FIRST_FAULT, EVERY = 12, 25
PHASES = ("forward", "backward", "reduce", "agree", "load", "update")
TARGETS = {
    "next_step_s": {"median": 0.3, "max": 1.0},
    "replacement_with_spare_s": {"median": 0.5},
    "replacement_without_spare_s": {"median": 1.0},
    "stop_s": {"max": HANG_LIMIT_S + 1.0},
}
"""Beyond an ordinary step."""
DIVIDED = {"zero.stage": 1, "zero.copies": 2}
OWNER_TIMES, OWNER_MORE_S = 1.5, 0.1
"""Most that the death of a holder of that state may cost, beside that of a worker that shares it with all."""
TORCHFT = {  # replicas, tuned, gloo's timeout in seconds
    "torchft_defaults": (4, False, 5),
    "torchft_tuned": (4, True, 5),
    "torchft_tuned_short_timeout": (4, True, 1),
    "torchft_tuned_short_timeout_3": (3, True, 1),
}


class Disturbed:
    """One job that was disturbed by scripted faults, and what its events and ledger say."""

    def __init__(self, folder: Path, name: str, faults: list[str], spares: int, settings: dict[str, Any]) -> None:
        self.run_dir = folder / name
        steps = FIRST_FAULT + EVERY * max(1, len(faults))
        if not faults:
            steps = settings.pop("steps")
        every = {"lanes": LANES, "micro_batch": MICRO_BATCH, "max_restarts": 1000, **settings}
        task = f"{BENCH / 'models.py'}:{MODELS[MODEL].__name__}"
        arguments = ["--workers", str(WORKERS), "--spares", str(spares), "--steps", str(steps)]
        if faults:
            arguments += ["--chaos", "; ".join(faults)]
        job = EverstepJob(task, self.run_dir, *arguments, settings=every)
        job.wait()
        self.steps = steps
        self.events = job.events()
        self.at = dict(committed(self.events))
        self.workers = ledger_workers(self.run_dir)
        self.digest = json.loads((self.run_dir / "final" / "digest.json").read_text())["state"]

    @property
    def faults(self) -> list[Event]:
        return [e for e in self.events if e["kind"] == "fault_injected"]

    @property
    def ordinary_s(self) -> float:
        """Median step while all workers took part."""
        whole = [s for s in self.at if s > 4 and len(self.workers.get(s, ())) == WORKERS and s - 1 in self.at]
        return statistics.median((self.at[s] - self.at[s - 1]) / 1e9 for s in whole)

    @property
    def lost(self) -> int:
        """Steps that were not reported as committed, or have no ledger row."""
        return sum(step not in self.at or step not in self.workers for step in range(1, self.steps + 1))

    def next_step_s(self, fault: Event) -> float:
        """To the first step that could not be decided without the survivors' recovery."""
        first = fault["step"] + (fault["phase"] == "update")
        after = [t for step, t in self.at.items() if step >= first and t > fault["time_unix_ns"]]
        return float(min(after) - fault["time_unix_ns"]) / 1e9

    def replacement_s(self, fault: Event) -> float | None:
        """To the first committed step that again had all workers; None if the job ended before."""
        short = [s for s in sorted(self.at) if s >= fault["step"] and len(self.workers[s]) < WORKERS]
        if not short:  # the replacement contributed to the very step in which the fault struck
            return self.next_step_s(fault)
        whole = [s for s in sorted(self.at) if s > short[0] and len(self.workers[s]) == WORKERS]
        return (self.at[whole[0]] - fault["time_unix_ns"]) / 1e9 if whole else None


def ledger_workers(run_dir: Path) -> dict[int, set[int]]:
    """Step -> the workers that contributed to it."""
    found: dict[int, set[int]] = {}
    for path in (run_dir / "ledger").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # torn by a kill
            found[row["step"]] = {lane[1] for lane in row["lanes"]}
    return found


def kill_faults(job: int) -> list[str]:
    """Each worker once."""
    return [
        f"kill:target=worker:{(k + job) % WORKERS},at={FIRST_FAULT + EVERY * k},"
        f"phase={PHASES[(k + WORKERS * job) % len(PHASES)]}"
        for k in range(WORKERS)
    ]


def measure_ours(options: argparse.Namespace) -> dict[str, Any]:
    """All of our figures."""
    found: dict[str, list[float]] = {name: [] for name in TARGETS}
    ordinary: list[float] = []
    lost = 0
    digests: set[tuple[int, str]] = set()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)

        def run(name: str, faults: list[str], spares: int = 0, **settings: Any) -> Disturbed:
            nonlocal lost
            job = Disturbed(folder, name, faults, spares, settings)
            lost += job.lost
            digests.add((job.steps, job.digest))
            ordinary.append(job.ordinary_s)
            print(f"{name}: ordinary step {job.ordinary_s:.3f} s", file=sys.stderr, flush=True)
            return job

        owners: list[float] = []
        for number in range(options.jobs):
            job = run(f"owner-{number}", kill_faults(number), **DIVIDED)
            owners += map(job.next_step_s, job.faults)
            for spares, key in ((0, "replacement_without_spare_s"), (1, "replacement_with_spare_s")):
                job = run(f"kill-{number}-{spares}", kill_faults(number), spares)
                found[key] += [s for s in map(job.replacement_s, job.faults) if s is not None]
                if not spares:
                    found["next_step_s"] += map(job.next_step_s, job.faults)
        stops = [f"stop:target=worker:{k % WORKERS},at={FIRST_FAULT + EVERY * k}" for k in range(options.stops)]
        if stops:
            job = run("stop", stops, hang_limit_s=HANG_LIMIT_S)
            found["stop_s"] += map(job.next_step_s, job.faults)
        for steps in {steps for steps, _ in digests}:
            run(f"calm-{steps}", [], steps=steps)
    figures: dict[str, Any] = {name: spread(values) for name, values in found.items()}
    step_s = statistics.median(ordinary)
    for name, limits in TARGETS.items():
        met = all(figures[name].get(key, 0.0) <= limit + step_s for key, limit in limits.items())
        figures[name] |= {"target": limits, "met": met, "values": [round(v, 3) for v in found[name]]}
    figures["owner_next_step_s"] = of_owners(owners, found["next_step_s"])
    figures["ordinary_step_s"] = spread(ordinary)
    figures["lost_steps"] = lost
    figures["bits"] = "equal" if len(digests) == len({steps for steps, _ in digests}) else "DIFFERENT"
    return figures


def of_owners(owners: list[float], others: list[float]) -> dict[str, Any]:
    """The figure of jobs that divide the optimizer's state, beside that of those that do not."""
    if not owners:
        return spread(owners)
    limit = OWNER_TIMES * statistics.median(others) + OWNER_MORE_S
    figure = {"target": {"median": round(limit, 3)}, "met": statistics.median(owners) <= limit}
    return spread(owners) | figure | {"values": [round(value, 3) for value in owners]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5, help="each with 4 kills, once without and once with a spare")
    parser.add_argument("--stops", type=int, default=3)
    parser.add_argument("--peer-kills", type=int, default=5, help="of each peer; 0 leaves the peers out")
    parser.add_argument("--torchft", metavar="DIR", help="where torchft was installed (pip install --target DIR)")
    parser.add_argument("--out", help="also write the JSON here")
    options = parser.parse_args()
    batch = LANES * MICRO_BATCH
    report: dict[str, Any] = {"bench": "recovery", **machine(), "model": MODEL, "workers": WORKERS}
    report["everstep"] = ours = measure_ours(options)
    if options.peer_kills:
        report["torchrun"] = measure_torchrun(MODEL, WORKERS, batch, options.peer_kills)
        absent = torchft_absent(options.torchft)
        for name, how in TORCHFT.items():
            report[name] = (
                {"not measured": absent}
                if absent
                else measure_torchft(options.torchft, MODEL, batch, options.peer_kills, *how)
            )
        for name in ("torchrun", *TORCHFT):
            peer = report[name].get("kill_to_next_step_s")
            if peer and ours["next_step_s"]["n"]:
                report[name]["times_ours"] = round(peer["median"] / max(1e-3, ours["next_step_s"]["median"]), 1)
    write_report(report, options.out)


if __name__ == "__main__":
    main()
