"""`everstep plan --from DIR`: what a job was predicted to need beside what it did, and what a change would give.

It reads the run directory alone: events, samples of workers, checkpoints. The task is not loaded.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.cli.job import JobFile, read_job
from everstep.cli.plan_inputs import recovery_times, say, snapshots_of, table
from everstep.cli.task_loading import is_script
from everstep.cost import online
from everstep.cost.failures import LLAMA3
from everstep.cost.goodput import Cluster, closed_form, recovery_policies
from everstep.cost.memory import Model, Split, most_nodes, of_running
from everstep.cost.quantities import time_words
from everstep.cost.save_interval import automatic_interval, daly_s, expected_mtbf_s, young_s
from everstep.report.history import History
from everstep.report.words import as_dict, number, size_text

LEAST_STEPS = 10
_MOST = 1e15
"""Seconds, bytes, passes: more than that are no measurement."""
_ADAM = 3
"""State of a model with Adam, in sizes of its parameters."""
_INTERVAL = "jobs and their coordinators go by the same formula (checkpoint.interval=auto: Daly's first order)"
_SOURCES = dict.fromkeys(("workers", "stages", "lanes"), "job.json and events.jsonl of the run directory")
_STEP = (*(one.name for one in fields(online.StepParts)), "step_s", "samples_per_s", "speed_up")
_SOURCES |= dict.fromkeys(("lane_s", "time", "parts", *_STEP), online.SOURCE)
_SOURCES |= {"intervals": "Young 1974: cost / interval + interval / (2 x time between failures)"}
_POLICY = "closed form for the policy ours (everstep plan goodput), with this job's rate of failures"
_SOURCES |= {"spares": _POLICY}


@dataclass(frozen=True)
class _Run:
    """A run directory that was read, and what its samples were calibrated to."""

    job: JobFile
    history: History
    found: online.Calibrated
    elapsed_s: float

    @property
    def failures(self) -> int:
        return self.history.faults(False)

    @property
    def steps(self) -> int:
        return int(sum(one[2] for one in self.history.facts.course.rates.values()))

    @property
    def failure_mtbf_s(self) -> float:
        """Seconds between failures: as configured, else as jobs estimate them."""
        minutes = self.job.config.checkpoint.mtbf_minutes
        return minutes * 60 if minutes is not None else expected_mtbf_s(self.failures, self.elapsed_s)

    def cluster(self, workers: int, spares: int, step_s: float) -> Cluster:
        """This job's workers as a cluster. mtbf of each: that of the job, times their number."""
        config = self.job.config
        return Cluster(
            workers,
            self.failure_mtbf_s * workers,
            per_node=max(1, workers // max(1, config.hosts.min)),
            spares=spares,
            step_s=step_s,
            state_bytes=_state_bytes(self.history),
            checkpoint_s=_stall_s(self.history),
            shares=self.harms,
        )

    @property
    def harms(self) -> tuple[float, float, float]:
        """Shares of failures that harm a process, a device, a host: on one host, processes alone."""
        if self.job.config.hosts.min == 1:
            return 1.0, 0.0, 0.0
        return LLAMA3.shares


def show_run(run_dir: Path, as_json: bool) -> int:
    """Print `plan_of_run`."""
    result = plan_of_run(run_dir)
    say(result, as_json, _lines(result))
    return 0


def plan_of_run(run_dir: Path) -> dict[str, Any]:
    """Predictions for the job in a run directory beside what it measured, and what a change would give.

    Raises: ConfigError, one line: no run directory, or one without samples.
    """
    run = _read(run_dir)
    found, config = run.found, run.job.config
    times, worst = _times(run)
    return {
        "kind": "online",
        "run_dir": str(run_dir),
        "task": run.job.task,
        "running": run.history.running(),
        "workers": found.workers,
        "stages": found.shape.stages,
        "lanes": found.shape.lanes,
        "lane_s": found.lane_s,
        "exchange_s": found.exchange_s,
        "alone_s": found.alone_s,
        "lane_source": "emulate_compute_ms" if config.emulate_compute_ms else "measured: load, forward, backward",
        "time": times,
        "parts": _parts(run),
        "errs": worst,
        "memory": _memory(run),
        "recoveries": _recoveries(run),
        "checkpoints": _checkpoints(run),
        "goodput": _goodput(run),
        "what_if": _what_if(run),
        "fits": None,
        "source": online.SOURCE,
        "sources": _SOURCES,
        "assumed": [
            "with another number of workers the exchange of gradients grows as a ring's",
            "what the parts take beyond an undisturbed step belongs to the start and the first, slow steps",
            *(["of one worker's exchange nothing is known: with more it is taken as it was"] * (found.workers == 1)),
            "not cut into stages: a script runs its model's forward pass itself"
            if is_script(run.job.task)
            else "stages of equal length, nothing for messages between them, a task that can be cut so",
            _shared_words(found.processors),
            *(
                ["emulated devices: a lane takes each stage as long, whatever its size"]
                * bool(config.emulate_compute_ms)
            ),
            "failures end processes, devices and hosts stay" if run.harms[0] == 1 else f"harms as in {LLAMA3.source}",
        ],
    }


def _shared_words(shared: online.Processors | None) -> str:
    if shared is None:
        return "processors and devices enough for all workers"
    return f"the workers of a host share its {_plural(shared.each, 'processor')}, and take turns where they are more"


def _read(run_dir: Path) -> _Run:
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    job, history = read_job(run_dir), History(run_dir).load()
    if history.absurd:
        raise ConfigError(history.absurd)
    config, rates = job.config, history.facts.course.rates
    measured = {n: one for n, one in rates.items() if n > 0 and one[1] > 0 and one[2] >= LEAST_STEPS}
    if not measured:
        most = max((int(one[2]) for one in rates.values()), default=0)
        raise ConfigError(
            f"{run_dir}: expected at least {LEAST_STEPS} undisturbed steps with one number of workers, found {most}: "
            "let the job run longer"
        )
    workers = max(measured, key=lambda n: (measured[n][2], n))
    chunks = config.chunks if config.stages > 1 else 1
    shape = online.JobShape(config.lanes, config.micro_batch, config.stages, chunks, config.cell.fsdp)
    lives = [
        online.WorkerTimes(_amount(one.row.get("passes")), {k: _amount(v) for k, v in _seconds(one.row).items()})
        for one in history.usage.workers.values()
    ]
    known_s = 3 * config.emulate_compute_ms / 1e3 or None
    step_s, shared = measured[workers][1] / measured[workers][2], _processors(config, history.usage.cpus)
    found = online.calibrated(shape, workers, lives, known_s, shared, step_s)
    if found is None or found.lane_s <= 0:
        raise ConfigError(
            f"{run_dir}: expected samples of its workers in metrics/, found none: run the job with "
            "metrics.interval_s above 0, for some seconds at least"
        )
    return _Run(job, history, found, max(1e-9, sum(history.seconds(history.running()).values())))


def _processors(config: Config, cpus: Mapping[str, int]) -> online.Processors | None:
    """Processors that workers share, None where their devices compute, or no sample names them. cpus: by host."""
    if config.device != "cpu" or not cpus:
        return None
    used = config.cell.ranks * config.threads
    return online.Processors(min(cpus.values()), len(cpus), used, lanes=not config.emulate_compute_ms)


def _amount(value: Any) -> float:
    """A number from a file, 0 for what no job can have told."""
    found = number(value)
    return found if 0 <= found <= _MOST else 0.0


def _seconds(row: Any) -> dict[str, Any]:
    return as_dict(row.get("seconds"))


def _times(run: _Run) -> tuple[list[dict[str, Any]], str]:
    """Each measured number of workers with its predicted step; where the prediction errs most, in words."""
    rows: list[dict[str, Any]] = []
    for workers, (samples, seconds, steps, _) in sorted(run.history.facts.course.rates.items()):
        if workers <= 0 or steps < LEAST_STEPS or seconds <= 0:
            continue
        predicted, measured = run.found.parts(workers).step_s, seconds / steps
        rows.append(
            {
                "workers": workers,
                "steps": int(steps),
                "measured_s": measured,
                "predicted_s": predicted,
                "error": online.off(predicted, measured),
                "samples_per_s": samples / seconds,
                "calibrated": workers == run.found.workers,
            }
        )
    worst = max(rows, key=lambda row: abs(row["error"] or 0.0))
    if abs(worst["error"]) < 0.005:
        return rows, "nowhere by more than half a percent of a step"
    long = "too long" if worst["error"] > 0 else "too short"
    words = f"with {_plural(worst['workers'], 'worker')} the predicted step is {abs(worst['error']):.1%} {long}"
    return rows, words + f"; most of the difference is in: {_largest(run)}"


def _parts(run: _Run) -> list[dict[str, Any]]:
    """Parts of a step of the calibrated number of workers: predicted, and the mean of what the workers spent."""
    lives = [one for one in run.history.usage.workers.values() if _amount(one.row.get("passes")) > 0]
    each, predicted = run.found.shape.most_lanes(run.found.workers), run.found.parts(run.found.workers)
    passes = sum(_amount(one.row.get("passes")) for one in lives)

    def mean(phases: Sequence[str]) -> float:
        return sum(_amount(_seconds(one.row).get(name)) for one in lives for name in phases) * each / passes

    pairs = (
        ("compute", predicted.compute_s, mean(online.COMPUTING)),
        ("exchange and waits for others", predicted.exchange_s + predicted.bubble_s, mean(online.EXCHANGE)),
        ("update and the rest", predicted.alone_s, mean(online.ALONE)),
    )
    return [{"part": name, "predicted_s": a, "measured_s": b, "error": online.off(a, b)} for name, a, b in pairs]


def _largest(run: _Run) -> str:
    return str(max(_parts(run), key=lambda part: abs(part["predicted_s"] - part["measured_s"]))["part"])


def _state_bytes(history: History) -> float:
    return max((_amount(one.size_bytes) for one in history.facts.checkpoints.newest if one.ok), default=0.0)


def _stall_s(history: History) -> float:
    """Training time that a checkpoint on disk takes, at least a millisecond."""
    stalls = [_amount(one.stall_s) for one in history.facts.checkpoints.newest if one.ok and one.tier == "disk"]
    return max(1e-3, statistics.median(stalls)) if stalls else 1e-3


def _memory(run: _Run) -> dict[str, Any]:
    """Memory of a worker by formula, and the most that one has; None if no checkpoint or sample has told. Of a worker
    of several processes there is no formula here."""
    config, state = run.job.config, _state_bytes(run.history)

    def most(name: str) -> int | None:
        return round(max((_amount(one.row.get(name)) for one in run.history.usage.workers.values()), default=0)) or None

    predicted, measured, kinds = None, most("pss_bytes"), {}
    if state and config.cell.ranks == 1:
        held = state / run.found.shape.stages
        model = Model(round(held / _ADAM / 4), held / _ADAM, held - held / _ADAM)
        workers, stages, copies = run.found.workers, run.found.shape.stages, config.zero.copies
        pool, offload = max(1, workers // stages), config.zero.offload is not None
        nodes, hosts = most_nodes(pool, config.lanes), max(1, config.hosts.min)
        kept = snapshots_of(config, run.steps)
        split = Split(pool, config.lanes, nodes, min(copies, pool), offload, min(hosts, pool), snapshots=kept)
        use = of_running(model, split, config.zero.stage, workers)
        kinds = {kind: round(size) for kind, size in use.device.items()}
        predicted = sum(kinds.values())
    return {
        "state_bytes": round(state),
        "predicted_bytes": predicted,
        "per_worker_bytes": kinds,
        "measured_bytes": measured,
        "error": None if predicted is None or measured is None else online.off(predicted, measured),
        "resident_bytes": most("rss_bytes") or 0,
        "device_reserved_bytes": most("device_reserved_bytes"),
        "source": "layout of this product's memory for a state as large as its checkpoint, with Adam; activations "
        "and a checkpoint under way are left out. Both are a worker's own pages and its part of those that it shares "
        "(PSS, looked at every 10 s)",
    }


def _recoveries(run: _Run) -> dict[str, Any]:
    took = sorted(_amount(one.duration_s) for one in run.history.facts.recoveries)
    step_s = run.found.parts(run.found.workers).step_s
    policy = recovery_policies(recovery_times(())[0], run.cluster(run.found.workers, 0, step_s))[0]
    measured = statistics.median(took) if took else None
    return {
        "count": len(took),
        "predicted_s": policy.stall_s[0],
        "measured_s": measured,
        "worst_s": took[-1] if took else None,
        "error": None if measured is None else online.off(policy.stall_s[0], measured),
        "source": f"{policy.source}; at most a whole step is computed again",
    }


def _checkpoints(run: _Run) -> dict[str, Any]:
    """Interval between checkpoints on disk as it was, and as formulas have it."""
    done = [one for one in run.history.facts.checkpoints.newest if one.ok and one.tier == "disk"]
    gaps = [(b.time_ns - a.time_ns) / 1e9 for a, b in pairwise(done) if b.time_ns > a.time_ns]
    cost_s, minutes = _stall_s(run.history), run.job.config.checkpoint.mtbf_minutes
    chosen = automatic_interval(
        cost_s if done else None, run.failures, run.elapsed_s, None if minutes is None else minutes * 60
    )
    return {
        "count": len(done),
        "cost_s": statistics.median(_amount(one.stall_s) for one in done) if done else None,
        "duration_s": statistics.median(_amount(one.duration_s) for one in done) if done else None,
        "interval_s": statistics.median(gaps) if gaps else None,
        "configured": run.job.config.checkpoint.interval,
        "mtbf_s": run.failure_mtbf_s,
        "failures": run.failures,
        "young_s": young_s(cost_s, run.failure_mtbf_s),
        "daly_s": daly_s(cost_s, run.failure_mtbf_s),
        "ours_s": chosen.seconds,
        "ours_reason": chosen.reason,
        "source": _INTERVAL,
    }


def _of_policy(run: _Run, workers: int, spares: int) -> tuple[float, float]:
    """Goodput, and seconds from a failure until a worker is back in place."""
    cluster = run.cluster(workers, spares, run.found.parts(workers).step_s)
    policy = recovery_policies(recovery_times(())[0], cluster)[0]
    return closed_form(policy, cluster), policy.back_s


def _goodput(run: _Run) -> dict[str, Any]:
    predicted, _ = _of_policy(run, run.found.workers, run.job.config.spares)
    measured = run.history.goodput(run.history.running())
    return {
        "predicted": predicted,
        "measured": measured,
        "error": None if measured is None else online.off(predicted, measured),
        "source": f"{_POLICY}; start-up, evaluation and the end are in the measured one alone",
    }


def _what_if(run: _Run) -> dict[str, Any]:
    found, spares = run.found, run.job.config.spares
    now_s, batch = found.parts(found.workers).step_s, found.shape.lanes * found.shape.micro_batch
    cost_s, mtbf_s = _stall_s(run.history), run.failure_mtbf_s

    def changed(workers: int, stages: int) -> dict[str, Any]:
        waits = stages / found.shape.stages if run.job.config.emulate_compute_ms else 1.0
        parts = replace(found, lane_s=found.lane_s * waits).parts(workers, stages)
        speed_up = now_s / parts.step_s
        row = {"workers": workers, "stages": stages, **asdict(parts), "step_s": parts.step_s}
        return {**row, "samples_per_s": batch / parts.step_s, "speed_up": speed_up}

    counts = [
        count
        for count in online.worth_trying(found.workers, found.shape.lanes * found.shape.stages)
        if count % found.shape.stages == 0
    ]
    stages = [found.shape.stages] if is_script(run.job.task) else online.stages_to_try(found.workers)
    asked = _checkpoints(run)
    now = asked["interval_s"] or asked["ours_s"]
    every = {"half": now / 2, "now": now, "double": 2 * now}
    every |= {"ours": asked["ours_s"], "young": asked["young_s"], "daly": asked["daly_s"]}
    return {
        "workers": [changed(count, found.shape.stages) for count in counts],
        "splits": [changed(found.workers, count) for count in stages],
        "spares": [
            {"spares": count, "goodput": goodput, "back_s": back_s}
            for count in (spares, spares + 1)
            for goodput, back_s in [_of_policy(run, found.workers, count)]
        ],
        "intervals": [
            {"name": name, "interval_s": seconds, "lost": online.interval_loss(seconds, cost_s, mtbf_s)}
            for name, seconds in every.items()
        ],
    }


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


def _seconds_text(value: float | None) -> str:
    return "-" if value is None else time_words(value)


def _lines(result: dict[str, Any]) -> list[str]:
    steps = [["workers", "steps", "measured", "predicted", "off", ""]] + [
        [
            *(str(one["workers"]), str(one["steps"]), time_words(one["measured_s"]), time_words(one["predicted_s"])),
            *(_percent(one["error"]), "calibrated" * one["calibrated"]),
        ]
        for one in result["time"]
    ]
    parts = [["part of a step", "measured", "predicted", "off"]] + [
        [one["part"], time_words(one["measured_s"]), time_words(one["predicted_s"]), _percent(one["error"])]
        for one in result["parts"]
    ]
    return [
        f"{result['run_dir']}: {result['task']}, {_plural(result['workers'], 'worker')}, "
        f"{_plural(result['stages'], 'stage')}, {result['lanes']} lanes of {time_words(result['lane_s'])} each",
        "",
        "A step",
        *table(steps),
        *table(parts),
        f"where it errs: {result['errs']}",
        *_other_lines(result),
        *_change_lines(result["what_if"]),
        *(f"assumed: {one}" for one in result["assumed"]),
        f"source: {result['source']}",
    ]


def _other_lines(result: dict[str, Any]) -> list[str]:
    memory, again, saved = result["memory"], result["recoveries"], result["checkpoints"]
    goodput, predicted = result["goodput"], memory["predicted_bytes"]
    told = "-" if goodput["measured"] is None else f"{goodput['measured']:.1%}"
    rows = [
        ["", "measured", "predicted"],
        ["recovery, a fault to the next step", _seconds_text(again["measured_s"]), time_words(again["predicted_s"])],
        ["time between checkpoints", _seconds_text(saved["interval_s"]), time_words(saved["ours_s"])],
        ["training that stood still for one", _seconds_text(saved["cost_s"]), "-"],
        ["goodput", told, f"{goodput['predicted']:.1%}"],
        [
            "memory of a worker",
            *("-" if size is None else size_text(size) for size in (memory["measured_bytes"], predicted)),
        ],
    ]
    return [
        "",
        *table(rows),
        f"checkpoints: {saved['ours_reason']}. {_INTERVAL}",
        f"goodput: {goodput['source']}",
        f"memory: {memory['source']}",
    ]


def _change_lines(changes: dict[str, Any]) -> list[str]:
    def steps(rows: Sequence[dict[str, Any]], key: str) -> list[str]:
        head = [key, "step", "samples/s", "speed-up"]
        return table(
            [
                head,
                *(
                    [str(r[key]), time_words(r["step_s"]), f"{r['samples_per_s']:.1f}", f"{r['speed_up']:.2f}"]
                    for r in rows
                ),
            ]
        )

    spares = [["spares", "goodput", "a worker is back after"]]
    spares += [[str(one["spares"]), f"{one['goodput']:.3%}", time_words(one["back_s"])] for one in changes["spares"]]
    every = [["checkpoints", "every", "time lost, if each failure loses everything"]]
    every += [[one["name"], time_words(one["interval_s"]), f"{one['lost']:.3%}"] for one in changes["intervals"]]
    return [
        "",
        "What a change would give",
        *steps(changes["workers"], "workers"),
        *(steps(changes["splits"], "stages") if len(changes["splits"]) > 1 else ()),
        *table(spares),
        *table(every),
    ]
