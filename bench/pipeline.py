"""What splitting a model costs, and what a failure costs a split model.

    python bench/pipeline.py [--only peer,bubble,backups,death,recovery] [--rounds 15] [--seconds 2] [--jobs 4]
                             [--out FILE]

- peer: throughput against torch.distributed.pipelining on gloo, same model, cut, micro-batches and schedule, one thread
  per worker; the two jobs take turns on the machine. The ratio of a round is that of its medians of step times.
- bubble: compute is a timed wait (`emulate_compute_ms`), so that few cores stand for many devices. The bubble is the
  part of a step's time in which a stage does not wait on purpose, against (K - 1) / (M + K - 1).
- backups: the same with pools of 2, active against standby.
- death: active pools of 2, one worker dies and is not replaced: how far throughput falls, against its share of the
  pool.
- recovery: SIGKILL of leaders in 3 stages x 2, in changing phases: to the survivors' next committed step, less one
  ordinary step; and with standby backups, which are promoted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import BENCH, Event, EverstepJob, committed, free_port, machine, spread, step_times, write_report
from models import MODELS
from turns import columns, everstep_job, ranks_job, take_turns

WARM_UP = 4
RATIO, BUBBLE_ERROR, ACTIVE_GAIN, DEATH_MARGIN = 0.95, 0.05, 1.8, 0.10
NEXT_STEP_S, PROMOTION_S = 0.5, 1.0
PEER_CASES = (
    ("transformer-small", 2, "1f1b", 1),
    ("transformer-small", 2, "gpipe", 1),
    ("transformer-small", 2, "interleaved", 2),
    ("resnet18", 2, "1f1b", 1),
    ("transformer-small", 4, "1f1b", 1),
)
PHASES = ("forward", "backward", "reduce", "agree", "update", "load")


def even_cut(units: int, parts: int) -> list[tuple[int, int]]:
    """Contiguous runs of units whose numbers differ by at most one."""
    size, larger = divmod(units, parts)
    firsts = [p * size + min(p, larger) for p in range(parts + 1)]
    return [(firsts[p], firsts[p + 1]) for p in range(parts)]


def run_ours(
    folder: Path, name: str, model: str, steps: int, settings: dict[str, Any], structured: dict[str, Any] | None = None
) -> EverstepJob:
    """One `everstep run`, to its end. structured: config that is more than a word."""
    task = f"{BENCH / 'models.py'}:{MODELS[model].__name__}"
    arguments = ["--steps", str(steps)]
    if structured:
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps(structured))
        arguments += ["--config", str(path)]
    job = EverstepJob(task, folder / name, *arguments, settings=settings)
    job.wait()
    return job


# ---- against torch.distributed.pipelining


def peer_case(model: str, stages: int, schedule: str, chunks: int, options: argparse.Namespace) -> dict[str, Any]:
    """One case: both jobs, turn by turn."""
    task = MODELS[model]()
    defaults = task.defaults
    cut = even_cut(len(task.units(task.build_model())), stages * chunks)
    parts = [[cut[p] for p in range(len(cut)) if p % stages == s] for s in range(stages)]
    structured = {"map": [{"units": [[a, b - 1] for a, b in own]} for own in parts]}
    settings = {"stages": stages, "workers": stages, "schedule": schedule, "chunks": chunks}
    peer = [str(BENCH / "pipeline_peer.py"), "--model", model, "--schedule", schedule]
    peer += ["--cut", ",".join(f"{a}:{b}" for a, b in cut)]
    peer += ["--lanes", str(defaults["lanes"]), "--micro-batch", str(defaults["micro_batch"])]
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        (folder / "map.yaml").write_text(json.dumps(structured))
        name = f"{BENCH / 'models.py'}:{MODELS[model].__name__}"
        ours = everstep_job("ours", name, folder / "run", "--config", str(folder / "map.yaml"), settings=settings)
        theirs = ranks_job("theirs", peer, stages, free_port(), folder / "ends")
        print(f"{model}, {stages} stages, {schedule}", file=sys.stderr, flush=True)
        rounds = take_turns(ours, theirs, warm_up=WARM_UP, rounds=options.rounds, turn_s=options.seconds)
    ratios = [1 / one["ratio"] for one in rounds]
    return {
        "model": model,
        "stages": stages,
        "schedule": schedule,
        "chunks": chunks,
        "cut": cut,
        "target": RATIO,
        "met": statistics.median(ratios) >= RATIO,
        "throughput_ratio": spread(ratios),
        **columns(rounds),
    }


# ---- compute that is a timed wait


def emulated_step_s(folder: Path, name: str, steps: int, settings: dict[str, Any]) -> list[float]:
    """Times of the steps after the first two."""
    job = run_ours(folder, name, "transformer-deep", steps, settings)
    return step_times(job.events(), 2)


def bubbles(folder: Path, wait_ms: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """4 and 8 stages; a forward pass waits `wait_ms`, a backward pass twice as long."""
    found = []
    for stages, lanes in ((4, 8), (4, 16), (8, 16)):
        for schedule in options.schedules.split(","):
            settings = {"stages": stages, "workers": stages, "lanes": lanes, "schedule": schedule}
            settings["emulate_compute_ms"] = wait_ms
            times = emulated_step_s(folder, f"bubble-{stages}-{lanes}-{schedule}", options.steps, settings)
            formula = (stages - 1) / (lanes + stages - 1)
            busy_s = 3 * lanes * wait_ms / 1e3
            measured = [1 - busy_s / t for t in times]
            error = statistics.median(measured) / formula - 1
            case = {"stages": stages, "lanes": lanes, "schedule": schedule, "formula": round(formula, 4)}
            case |= {"measured": spread(measured), "error": round(error, 4), "met": abs(error) <= BUBBLE_ERROR}
            case["step_s"] = spread(times)
            found.append(case)
            print(case, file=sys.stderr, flush=True)
    return found


def active_backups(folder: Path, wait_ms: int, options: argparse.Namespace) -> dict[str, Any]:
    """3 stages x 2: two lanes at a time through each stage, or one."""
    common = {"stages": 3, "lanes": 24, "emulate_compute_ms": wait_ms}
    active = emulated_step_s(folder, "active", options.steps, {**common, "pool": 2})
    standby = emulated_step_s(folder, "standby", options.steps, {**common, "redundancy": 1})
    gain = statistics.median(standby) / statistics.median(active)
    ideal = (24 + 2) / (12 + 2)
    return {
        "stages": 3,
        "pool": 2,
        "lanes": 24,
        "active_step_s": spread(active),
        "standby_step_s": spread(standby),
        "gain": round(gain, 3),
        "ideal": round(ideal, 3),
        "target": ACTIVE_GAIN,
        "met": gain >= ACTIVE_GAIN,
    }


def after_a_death(folder: Path, wait_ms: int, options: argparse.Namespace) -> dict[str, Any]:
    """3 stages x 2 active: one of them dies for good."""
    at = 3 + options.steps
    settings = {"stages": 3, "pool": 2, "lanes": 24, "emulate_compute_ms": wait_ms, "on_failure": "shrink"}
    settings["chaos"] = f"kill:target=worker:3,at={at},phase=forward"
    job = run_ours(folder, "death", "transformer-deep", at + options.steps, settings)
    times = dict(committed(job.events()))
    each = {s: (times[s] - times[s - 1]) / 1e9 for s in times if s - 1 in times}
    before = statistics.median(t for s, t in each.items() if 2 < s < at)
    after = statistics.median(t for s, t in each.items() if s > at)
    fall = 1 - before / after
    return {
        "stages": 3,
        "pool": 2,
        "lanes": 24,
        "before_step_s": round(before, 3),
        "after_step_s": round(after, 3),
        "throughput_falls_by": round(fall, 4),
        "lost_share_of_the_pool": 0.5,
        "lost_share_of_all_workers": round(1 / 6, 4),
        "target": 0.5 + DEATH_MARGIN,
        "met": fall <= 0.5 + DEATH_MARGIN,
    }


# ---- recovery


def recoveries(folder: Path, options: argparse.Namespace, *, standby: bool) -> dict[str, Any]:
    """Leaders of all stages are killed, one at a time, with time to heal in between."""
    first, every = 12, 25
    over_ordinary: list[float] = []
    whole: list[float] = []
    ordinary: list[float] = []
    digests = set()
    for number in range(options.jobs):
        phases = [PHASES[(k + 3 * number) % len(PHASES)] for k in range(3)]
        faults = [f"kill:target=leader:{(k + number) % 3},at={first + every * k},phase={phases[k]}" for k in range(3)]
        settings = {"stages": 3, "micro_batch": 1, "max_restarts": 1000, "chaos": "; ".join(faults)}
        settings |= {"redundancy": 1} if standby else {"pool": 2}
        job = run_ours(folder, f"recovery-{standby}-{number}", "transformer-small", first + every * 3, settings)
        events = job.events()
        digests.add(json.loads((job.run_dir / "final" / "digest.json").read_text())["state"])
        struck = [e for e in events if e["kind"] == "fault_injected"]
        one = ordinary_s(events, struck)
        ordinary.append(one)
        for fault in struck:
            took = next_step_s(events, fault)
            whole.append(took)
            over_ordinary.append(max(0.0, took - one))
        print(f"recovery, standby {standby}: {whole[-3:]}", file=sys.stderr, flush=True)
    limit = PROMOTION_S if standby else NEXT_STEP_S
    return {
        "backups": "standby" if standby else "active",
        "next_step_over_an_ordinary_one_s": spread(over_ordinary),
        "next_step_s": spread(whole),
        "ordinary_step_s": spread(ordinary),
        "target_median": limit,
        "met": statistics.median(over_ordinary) <= limit,
        "bits": "equal" if len(digests) == 1 else "DIFFERENT",
    }


def ordinary_s(events: list[Event], struck: list[Event]) -> float:
    """The median step in which nothing happened."""
    times = dict(committed(events))
    near = {e["step"] + d for e in struck for d in range(-1, 12)}
    return statistics.median(
        (times[s] - times[s - 1]) / 1e9 for s in times if s > 4 and s not in near and s - 1 in times
    )


def next_step_s(events: list[Event], fault: Event) -> float:
    """From the fault to the first step that could not be decided without the survivors' recovery."""
    first = fault["step"] + (fault["phase"] == "update")
    after = [t for step, t in committed(events) if step >= first and t > fault["time_unix_ns"]]
    return (min(after) - fault["time_unix_ns"]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="peer,bubble,backups,death,recovery")
    parser.add_argument("--rounds", type=int, default=15, help="against the peer")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, at least")
    parser.add_argument("--steps", type=int, default=6, help="of each emulated run")
    parser.add_argument("--wait-ms", type=int, default=100, help="of an emulated forward pass")
    parser.add_argument("--schedules", default="1f1b,gpipe", help="of the emulated runs")
    parser.add_argument("--jobs", type=int, default=4, help="with 3 kills each")
    parser.add_argument("--cases", default="", help="numbers of the peer's cases, from 0; all by default")
    parser.add_argument("--out", help="also write the JSON here")
    options = parser.parse_args()
    wanted = options.only.split(",")
    report: dict[str, Any] = {"bench": "pipeline", **machine()}
    if "peer" in wanted:
        chosen = [int(n) for n in options.cases.split(",") if n] or range(len(PEER_CASES))
        report["against_torch_pipelining"] = [peer_case(*PEER_CASES[n], options) for n in chosen]
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        if "bubble" in wanted:
            report["bubble"] = bubbles(folder, options.wait_ms, options)
        if "backups" in wanted:
            report["active_against_standby"] = active_backups(folder, options.wait_ms, options)
        if "death" in wanted:
            report["after_a_death"] = after_a_death(folder, options.wait_ms, options)
        if "recovery" in wanted:
            report["recovery"] = [recoveries(folder, options, standby=standby) for standby in (False, True)]
    write_report(report, options.out)


if __name__ == "__main__":
    main()
