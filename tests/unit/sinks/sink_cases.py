"""A run directory for tests of sinks: 3 workers, 10 steps of a second each, worker 0 dies during step 6."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from everstep.base.config import load_config
from everstep.cli.job import JobFile, write_job
from everstep.observe.events import format_event
from everstep.sinks.publication import Publication
from everstep.sinks.sink import Sink, SinkJob

T0 = 1_800_000_000_000_000_000
S = 1_000_000_000
PHASES = {"notice": 0.125, "decide": 0.125, "unblock": 0.125, "regroup": 0.125, "settle": 0.0, "redo": 0.5, "heal": 0.0}


def at(seconds: float) -> int:
    """ns since 1970."""
    return T0 + round(seconds * S)


def event(kind: str, at_s: float, **fields: Any) -> bytes:
    return format_event(kind, at(at_s), fields)


def generation(at_s: float, number: int, lanes: dict[int, list[int]], reason: str) -> bytes:
    seats = [[i, 0, "active", taken] for i, taken in lanes.items()]
    ids = sorted(lanes)
    return event("generation_started", at_s, generation=number, step=0, reason=reason, workers=ids, seats=seats)


def step(number: int, at_s: float, generation: int) -> bytes:
    fields = {"loss": 1 / number, "samples": 8, "lr": [0.1 / number], "grad_norm": 2.0 + number, "applied": True}
    return event("step_committed", at_s, step=number, generation=generation, worker_id=0, **fields)


def killed_run() -> list[bytes]:
    lines = [event("job_started", 0, step=0, workers=3, reason="mine with 3 workers")]
    lines += [event("worker_joined", 2 + i / 4, worker_id=i, incarnation=0, pid=10 + i, host="h") for i in range(3)]
    lines.append(generation(3, 1, {0: [0, 1], 1: [2], 2: [3]}, "all workers are there"))
    lines += [step(n, 3 + n, 1) for n in range(1, 6)]
    died = {"worker_id": 0, "incarnation": 0, "pid": 10, "reason": "killed by SIGKILL", "died_unix_ns": at(8.5)}
    lines.append(event("worker_evicted", 8.625, step=5, **died))
    lines.append(generation(8.75, 2, {1: [0, 1, 2], 2: [3]}, "worker 0 is dead"))
    recovered = {"worker_id": 0, "duration_s": 1.0, "phases_s": PHASES, "generation": 2, "step": 5, "reason": "SIGKILL"}
    lines.append(event("recovery_completed", 9.5, **recovered))
    lines += [step(n, 3.5 + n, 2) for n in range(6, 11)]
    lines.append(event("evaluated", 13.75, step=10, metrics={"accuracy": 0.75}))
    lines.append(event("checkpoint_completed", 14, step=10, tier="disk", duration_s=0.5, size_bytes=77, reason="end"))
    lines.append(event("job_completed", 14.5, step=10, state="completed", exit_code=0, reason="step 10 was the last"))
    return lines


def samples() -> bytes:
    """What the three workers spent, each second: half of the time in backward passes."""
    lines = []
    for second in range(3, 15):
        rows = [
            {"worker_id": i, "incarnation": 0, "step": second - 3, "seconds": {"backward": second / 2, "other": second}}
            for i in range(3)
        ]
        lines.append(json.dumps({"t": at(second + 0.5), "host": "h", "workers": rows}) + "\n")
    return "".join(lines).encode()


def run_dir_of(folder: Path, lines: list[bytes], metrics: bytes = b"") -> Path:
    """A run directory with these events."""
    folder.mkdir(exist_ok=True)
    config = load_config([("test", {"steps": 10, "lanes": 4, "task.note": "<b>"})])
    write_job(folder, JobFile("mine", (), config, created_unix_ns=T0 - S))
    (folder / "events.jsonl").write_bytes(b"".join(lines))
    (folder / "metrics").mkdir(exist_ok=True)
    (folder / "metrics" / "h.jsonl").write_bytes(metrics)
    return folder


def publish(run_dir: Path, name: str, sink: Sink, over: bool = True) -> Publication:
    """All there is, as `everstep publish` does."""
    publication = Publication(run_dir, name, sink)
    while publication.advance(over) and over:
        pass
    publication.end(running=not over)
    return publication


class Recorder:
    """Remembers what it was told."""

    remembers: ClassVar[bool] = False

    def __init__(self) -> None:
        self.points: dict[tuple[str, int], list[tuple[int, float]]] = {}
        self.said: list[tuple[str, int, str]] = []
        self.begun: list[SinkJob] = []
        self.ended: list[str] = []
        self.flushed = 0

    def begin(self, run: SinkJob, config: Mapping[str, Any]) -> None:
        self.begun.append(run)
        assert config["lanes"] == 4

    def scalars(self, step: int, time_ns: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.points.setdefault((name, step), []).append((time_ns, value))

    def event(self, step: int, text: str, event: Mapping[str, Any]) -> None:
        self.said.append((event["kind"], step, text))

    def flush(self) -> None:
        self.flushed += 1

    def end(self, state: str) -> None:
        self.ended.append(state)

    def series(self, name: str) -> dict[int, float]:
        """step -> value; fails if a step was told twice."""
        assert all(len(told) == 1 for told in self.points.values())
        return {step: told[0][1] for (tag, step), told in self.points.items() if tag == name}
