"""Strong and weak scaling with emulated devices: how much faster a job is with more workers.

    python bench/scaling.py [--workers 1,2,4,8,16,32] [--only strong,weak,sockets,zero,pipeline,hosts,torch]
                            [--lanes 32] [--wait-ms 20] [--steps 16] [--out FILE] [--plot FOLDER]

Up to 32 workers on a quiet machine of two cores: --only strong --workers 8,16,32 --wait-ms 2500 --steps 6 in 8 min,
and --only weak --wait-ms 1000 --steps 6 in 6 min.

A lane is a timed wait (`emulate_compute_ms`; its passes wait three times that), so that few cores stand for many
devices. All else is real: processes, gradients, transports, updates. Efficiency is the speed-up over the ideal one,
relative to the fewest workers of the case.

- strong: so many lanes, whatever the number of workers; weak: two lanes for each worker.
- sockets: strong, over the transport between hosts; zero: strong, with the optimizer's state divided.
- pipeline: as many stages as workers; its ideal is what the bubble leaves.
- hosts: strong, on two network-namespace hosts (root).
- torch: DistributedDataParallel on gloo with the same model, lanes and waits.

`predicted_s`: the step as `everstep plan --from` predicts it. It is calibrated by a job of its own with short waits and
the fewest workers of the case, at least two where there are two; what a step takes beside its waits is work of the
processors, which workers share. `off`: its error.
`cpu_s`: processor time of all workers per step; `cpu_share`: that by the number of cores, as a share of the waits, by
the lanes and the bubble alone. From 10 % on the processors are measured, not the waits: `waits` is false from there on,
and `waits_up_to` names the most workers of each case with which it is true. `wait_share`: the waits' share of the
measured step; where it is below 90 % while `waits` is true, other programs were measured. `busy`: the share of the
cores' time that was used, by other programs, too. `worst_off`: of the rows with `waits`, by case.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import BENCH, EverstepJob, environment, free_port, machine, read_events, step_times, write_report
from models import MODELS
from turns import ranks_job, turns

sys.path += [str(BENCH.parent / "tests" / "hosts"), str(BENCH.parent / "tests")]
from net import Net, why_not

from everstep.cli.plan_online import plan_of_run
from everstep.cost.online import Calibrated, JobShape, Processors, StepParts
from everstep.cost.step_time import bubble_share
from everstep.report.style import can_draw, write_pictures
from everstep.report.svg import Curve, line_chart

CASES = ("strong", "weak", "sockets", "zero", "pipeline", "hosts", "torch")
PORT, MOST_WORK, WARM_UP, UNITS, FEWEST_STEPS = 29400, 0.1, 2, 10, 5
SHORT_MS, SHORT_STEPS = 20.0, 14
"""Of the job that calibrates the prediction."""
CORES = len(os.sched_getaffinity(0))
EVERSTEP = [sys.executable, "-P", "-m", "everstep"]


def settings_of(case: str, workers: int, options: argparse.Namespace, wait_ms: float) -> dict[str, Any]:
    """Config of a job of ours."""
    found: dict[str, Any] = {"emulate_compute_ms": wait_ms, "workers": workers, "metrics.interval_s": 0.2}
    found |= {"lanes": 2 * workers if case == "weak" else options.lanes, "rehearse": "false"}
    if case == "sockets":
        found["transport"] = "sockets"
    if case == "zero":
        found["zero.stage"] = 1
    if case == "pipeline":
        found |= {"stages": workers, "emulate_compute_ms": wait_ms / workers}
    return found


def idle_and_all() -> tuple[int, int]:
    """Ticks of all cores since the machine's start: idle ones, and all."""
    ticks = [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def busy_since(before: tuple[int, int]) -> float:
    """Share of the cores' time that was used since then, by anybody."""
    idle, ticks = (b - a for a, b in zip(before, idle_and_all(), strict=True))
    return 1 - idle / max(1, ticks)


def model_of(case: str) -> str:
    """The model of a case: one with many units for stages, else one of 0.1M parameters."""
    return "transformer-deep" if case == "pipeline" else "transformer-tiny"


def run_ours(
    case: str, workers: int, run_dir: Path, options: argparse.Namespace, wait_ms: float, steps: int
) -> dict[str, Any]:
    """One job of ours, to its end."""
    task = f"{BENCH / 'models.py'}:{MODELS[model_of(case)].__name__}"
    settings = settings_of(case, workers, options, wait_ms)
    before = idle_and_all()
    if case == "hosts":
        on_two_hosts(task, run_dir, settings, steps)
    else:
        EverstepJob(task, run_dir, "--steps", str(steps), settings=settings).wait(3600.0)
    found = {"workers": workers, "lanes": settings["lanes"], "busy": busy_since(before), "cpu_s": cpu_per_step(run_dir)}
    return {**found, "steps_s": step_times(read_events(run_dir), WARM_UP)}


def cpu_per_step(run_dir: Path) -> float:
    """Processor seconds of all workers in a step, without the first steps, by their samples."""
    seen: dict[int, list[tuple[int, float]]] = {}
    for file in (run_dir / "metrics").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            for row in json.loads(line)["workers"]:
                seen.setdefault(row["worker_id"], []).append((row["step"], row["cpu_s"]))
    after = [[one for one in rows if one[0] >= WARM_UP] for rows in seen.values()]
    return sum((rows[-1][1] - rows[0][1]) / max(1, rows[-1][0] - rows[0][0]) for rows in after if rows)


def calibrated_rest(case: str, counts: Sequence[int], folder: Path, options: argparse.Namespace) -> Calibrated:
    """What a step takes beside its waits, by a job with short ones."""
    few = counts[0] if case == "pipeline" else max(2, counts[0])
    run_dir = folder / f"{case}-short"
    lanes = run_ours(case, few, run_dir, options, SHORT_MS, SHORT_STEPS)["lanes"]
    said, pipeline = plan_of_run(run_dir), case == "pipeline"
    shape = JobShape(lanes, 1, few if pipeline else 1)
    return Calibrated(shape, few, 0.0, said["exchange_s"], said["alone_s"], Processors(CORES, lanes=False))


def on_two_hosts(task: str, run_dir: Path, settings: dict[str, Any], steps: int) -> None:
    """A job whose workers are on two hosts, one half on each."""
    net = Net(2)
    try:
        more = environment(EVERSTEP_TOKEN=secrets.token_hex(32))
        slots = str(max(1, settings["workers"] // 2))
        first, second = net.hosts
        command = [*EVERSTEP, "run", task, "--run-dir", str(run_dir), "--json", "--steps", str(steps)]
        command += ["--listen", f"{first.address}:{PORT}", "--slots", slots]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        log = run_dir.with_suffix(".log")
        job = first.start(command, log, more)
        second.start([*EVERSTEP, "agent", "--join", f"{first.address}:{PORT}", "--slots", slots], log, more)
        if job.wait(600):
            raise SystemExit(f"the job on two hosts failed:\n{log.read_text()[-2000:]}")
    finally:
        net.close()


def run_torch(workers: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """DistributedDataParallel with the same lanes and waits."""
    ends = folder / f"torch-{workers}"
    command = [str(BENCH / "ddp_peer.py"), "--model", model_of("torch"), "--wait-ms", str(options.wait_ms)]
    command += ["--passes", str(options.lanes // workers), "--global-batch", str(options.lanes)]
    job = ranks_job("torch", command, workers, free_port(), ends)
    seconds = options.steps * 3 * options.wait_ms / 1e3 * options.lanes / workers
    before = idle_and_all()
    (turn,) = (had["torch"] for had in turns([job], warm_up=WARM_UP, rounds=1, turn_s=seconds))
    return {"workers": workers, "lanes": options.lanes, "steps_s": turn.steps_s(job), "busy": busy_since(before)}


def ideal_of(case: str, workers: int, fewest: int, lanes: int) -> float:
    """The best speed-up in lanes per second. A pipeline loses its bubble."""
    if case != "pipeline":
        return workers / fewest
    return workers / fewest * (1 - bubble_share(workers, lanes)) / (1 - bubble_share(fewest, lanes))


def plan_of(case: str, one: dict[str, Any], lane_s: float, known: Calibrated) -> StepParts:
    """A step as the plan has it. lane_s: of a lane at all stages."""
    shape = replace(known.shape, lanes=one["lanes"])
    plan = replace(known, shape=shape, lane_s=lane_s / shape.stages)
    return plan.parts(one["workers"], one["workers"] if case == "pipeline" else 1)


def table_of(
    case: str, found: Sequence[dict[str, Any]], wait_ms: float, known: Calibrated | None
) -> list[dict[str, Any]]:
    """A row for each number of workers. known: what the prediction is calibrated with."""
    rows: list[dict[str, Any]] = []
    first, lane_s, waits = found[0], 3 * wait_ms / 1e3, True
    base_s, alone = statistics.median(first["steps_s"]), Calibrated(JobShape(1, 1), 1, 0.0, 0.0, 0.0)
    for one in found:
        step_s = statistics.median(one["steps_s"])
        speed_up = (one["lanes"] / step_s) / (first["lanes"] / base_s)
        ideal = ideal_of(case, one["workers"], first["workers"], one["lanes"])
        waited_s, cpu_s = plan_of(case, one, lane_s, alone).step_s, one.get("cpu_s")
        work = waited_s / step_s if cpu_s is None else cpu_s / CORES / waited_s
        waits = waits and (work > 1 - MOST_WORK if cpu_s is None else work < MOST_WORK)
        row = {"workers": one["workers"], "lanes": one["lanes"], "step_s": round(step_s, 4)}
        row |= {"speed_up": round(speed_up, 3), "ideal": round(ideal, 3), "efficiency": round(speed_up / ideal, 4)}
        row |= {
            "busy": round(one["busy"], 3),
            "wait_share": round(waited_s / step_s, 3),
            "waits": waits,
            "steps": len(one["steps_s"]),
        }
        if cpu_s is not None:
            row |= {"cpu_s": round(cpu_s, 4), "cpu_share": round(work, 3)}
        if known is not None:
            planned_s = plan_of(case, one, lane_s, known).step_s
            row |= {"predicted_s": round(planned_s, 4), "off": round(planned_s / step_s - 1, 4)}
        rows.append(row)
    return rows


def counts_of(case: str, options: argparse.Namespace) -> list[int]:
    """Numbers of workers with which a case can be run."""
    possible = {
        "pipeline": lambda count: count <= UNITS,
        "torch": lambda count: options.lanes % count == 0,
        "hosts": lambda count: count % 2 == 0,
        "zero": lambda count: count > 1,
    }.get(case, lambda count: True)
    return [count for count in options.workers if possible(count)]


def measured_case(case: str, options: argparse.Namespace) -> list[dict[str, Any]] | str:
    """Rows of a case, or why there are none."""
    if case == "hosts" and why_not():
        return f"skipped: {why_not()}"
    counts = counts_of(case, options)
    if not counts:
        return "skipped: none of these numbers of workers is possible"
    found, known = [], None
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        if case != "torch":
            known = calibrated_rest(case, counts, folder, options)
        for workers in counts:
            one = run_torch(workers, folder, options) if case == "torch" else None
            run_dir = folder / f"{case}-{workers}"
            found.append(one or run_ours(case, workers, run_dir, options, options.wait_ms, options.steps))
            print(case, workers, statistics.median(found[-1]["steps_s"]), file=sys.stderr, flush=True)
        return table_of(case, found, options.wait_ms, known)


def draw(cases: dict[str, Any], folder: Path) -> None:
    """Speed-up by number of workers, as a PNG."""
    shown = {case: rows for case, rows in cases.items() if isinstance(rows, list)}
    curves = [
        Curve(case, [row["workers"] for row in rows], [row["speed_up"] for row in rows], k)
        for k, (case, rows) in enumerate(shown.items())
    ]
    widest = max(shown.values(), key=lambda rows: rows[-1]["workers"])
    curves.append(Curve("ideal", [r["workers"] for r in widest], [r["ideal"] for r in widest], len(curves)))
    if can_draw():
        folder.mkdir(parents=True, exist_ok=True)
        write_pictures(folder, {"scaling": line_chart("Speed-up by number of workers", curves, "workers")}, None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Scaling with emulated devices.")
    parser.add_argument("--workers", default="1,2,4,8,16,32", help="numbers of workers, rising")
    parser.add_argument("--only", default=",".join(CASES), help=f"cases: {', '.join(CASES)}")
    parser.add_argument("--lanes", type=int, default=32)
    parser.add_argument("--wait-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out")
    parser.add_argument("--plot", type=Path, help="folder for the plot")
    options = parser.parse_args()
    options.workers = sorted({int(count) for count in options.workers.split(",")})
    wanted = options.only.split(",")
    unknown = set(wanted) - set(CASES)
    if unknown or options.workers[0] < 1 or options.steps < FEWEST_STEPS:
        parser.error(f"expected cases of {', '.join(CASES)}, workers from 1 on and at least {FEWEST_STEPS} steps")
    cases = {case: measured_case(case, options) for case in wanted}
    if options.plot is not None:
        draw(cases, options.plot)
    shown = {key: getattr(options, key) for key in ("lanes", "wait_ms", "steps")}
    held = {
        case: [row["workers"] for row in rows if row["waits"]] for case, rows in cases.items() if type(rows) is list
    }
    up_to = {case: max(workers, default=0) for case, workers in held.items()}
    off = {
        case: max((abs(row["off"]) for row in rows if row["waits"] and "off" in row), default=None)
        for case, rows in cases.items()
        if type(rows) is list
    }
    write_report({"machine": machine(), **shown, "waits_up_to": up_to, "worst_off": off, "cases": cases}, options.out)


if __name__ == "__main__":
    main()
