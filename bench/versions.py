"""Two versions of Everstep side by side: step time of the same job, turn by turn, and what a kill costs in each.

    python bench/versions.py --other /path/to/other/.venv/bin/python [--cases resnet18:2,transformer-small:2:2]
                             [--rounds 15] [--seconds 2] [--kills 8] [--out FILE]

`--other` is the interpreter of an environment in which the other version is installed. A case is
model:workers[:stages].

- step: the two jobs take turns on the machine (`turns.py`); the ratio of a round is that of the medians of its steps.
- kill: jobs of 4 workers alternate between the versions; SIGKILL hits one worker after the other, by the same schedule.
  The figure is from the kill to the survivors' next committed step, as it is (an ordinary step is given beside it).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import committed, environment, machine, read_events, spread, step_times, write_report
from models import MODELS
from turns import PATIENT, Job, columns, take_turns

BENCH = Path(__file__).parent
WARM_UP = 4
KILLED_EVERY = 12


def job(name: str, python: str, task: str, run_dir: Path, *arguments: str, **settings: Any) -> Job:
    """An `everstep run` of the version that this interpreter has."""
    command = [python, "-P", "-m", "everstep", "run", task, "--run-dir", str(run_dir), *arguments]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(), start_new_session=True
    )
    return Job(name, [process], lambda: [t for _, t in committed(read_events(run_dir))])


def steps(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case: both versions, turn by turn."""
    model, workers, *rest = case.split(":")
    stages = ["--stages", rest[0]] if rest else []
    task = f"{BENCH / 'models.py'}:{MODELS[model].__name__}"
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        pair = [
            job(name, python, task, Path(folder) / name, "--steps", "1000000", "--workers", workers, *stages, **PATIENT)
            for name, python in (("this", sys.executable), ("other", options.other))
        ]
        print(case, file=sys.stderr, flush=True)
        rounds = take_turns(*pair, warm_up=WARM_UP, rounds=options.rounds, turn_s=options.seconds)
    return {"case": case, **columns(rounds), "rounds": rounds}


def kills(options: argparse.Namespace) -> dict[str, Any]:
    """What kills cost in each version: ms to the next committed step, and an ordinary step."""
    task = f"{BENCH / 'models.py'}:{MODELS['transformer-small'].__name__}"
    count = 4
    script = ";".join(f"kill:target=worker:{n},at={KILLED_EVERY * (n + 1)}" for n in range(count))
    found: dict[str, list[float]] = {"this": [], "other": []}
    ordinary: dict[str, list[float]] = {"this": [], "other": []}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        for number in range(options.kills // count):
            for name, python in (("this", sys.executable), ("other", options.other)):
                run_dir = Path(folder) / f"{name}-{number}"
                last = str(KILLED_EVERY * (count + 2))
                one = job(name, python, task, run_dir, "--steps", last, "--workers", "4", "--chaos", script)
                if one.roots[0].wait():
                    raise SystemExit(f"{name}: everstep run ended with {one.roots[0].returncode}")
                events = read_events(run_dir)
                struck = [e["time_unix_ns"] for e in events if e["kind"] == "fault_injected"]
                ends = [t for _, t in committed(events)]
                found[name] += [1e-6 * (min(t for t in ends if t > at) - at) for at in struck]
                ordinary[name].append(1e3 * statistics.median(step_times(events)))
    return {name: {"next_step_ms": spread(found[name]), "step_ms": spread(ordinary[name])} for name in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", required=True)
    parser.add_argument("--cases", default="resnet18:2,transformer-small:2,transformer-small:2:2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, at least")
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--out", help="also write the JSON here")
    options = parser.parse_args()
    cases = [steps(case, options) for case in options.cases.split(",") if case]
    write_report({"bench": "versions", **machine(), "cases": cases, "kills": kills(options)}, options.out)


if __name__ == "__main__":
    main()
