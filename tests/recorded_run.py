"""A small run directory as a job leaves it: three workers, one of which is killed and comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from everstep.observe.events import format_event

T0_NS = 1_700_000_000 * 10**9
SECOND_NS = 10**9
PHASES_S = {"notice": 0.1, "decide": 0.0, "unblock": 0.1, "regroup": 0.1, "settle": 0.1, "redo": 0.6, "heal": 0.0}
KILLED = "worker 1 (incarnation 0): killed by SIGKILL"


def event(kind: str, at_s: float, **fields: Any) -> bytes:
    """A line of events.jsonl, `at_s` after the start."""
    return format_event(kind, T0_NS + round(at_s * SECOND_NS), fields)


def sample(at_s: float, host: str, *rows: dict[str, Any]) -> bytes:
    """A line of a metrics file."""
    line = {"t": T0_NS + round(at_s * SECOND_NS), "host": host, "workers": rows}
    return json.dumps(line).encode() + b"\n"


def row(
    worker_id: int, incarnation: int, step: int, *, phase: str = "forward", done: int | None = None
) -> dict[str, Any]:
    """A worker in a sample. done: of the steps, how many it has computed itself in this life, at 0.3 s each."""
    mine = step if done is None else done
    return {
        "worker_id": worker_id,
        "incarnation": incarnation,
        "pid": 100 + worker_id,
        "step": step,
        "generation": 1,
        "phase": phase,
        "samples": 8 * mine,
        "passes": mine,
        "rss_bytes": 1000 * (worker_id + 1),
        "cpu_s": 0.25 * mine,
        "seconds": {"forward": 0.1 * mine, "backward": 0.2 * mine, "recover": 1.0},
        "bytes": {"reduce": 100 * mine},
    }


def plan(at_s: float, generation: int, members: list[int]) -> bytes:
    """Generation `generation` with these members, the first of which leads."""
    seats = [[i, 0, "active", [i]] for i in members]
    return event("generation_started", at_s, generation=generation, seats=seats, leaders=members[:1], workers=members)


def commit(step: int, at_s: float) -> bytes:
    """A committed step of 24 samples."""
    return event("step_committed", at_s, step=step, generation=1, loss=1.0 / step, samples=24, lr=[0.1])


def events() -> list[bytes]:
    """10 steps, one a second; worker 1 dies in the sixth, which takes 2 s, and is back at the end."""
    lines = [event("job_started", 0, step=0, workers=3)]
    lines += [event("worker_joined", 1, worker_id=i, incarnation=0, pid=100 + i, host="a") for i in range(3)]
    lines += [plan(2, 1, [0, 1, 2]), *(commit(step, 2 + step) for step in range(1, 6))]
    lines.append(event("worker_evicted", 7.5, worker_id=1, incarnation=0, cause="killed", reason="killed by SIGKILL"))
    lines.append(plan(7.6, 2, [0, 2]))
    recovered = {"worker_id": 1, "duration_s": 1.0, "phases_s": PHASES_S, "cause": "killed", "reason": KILLED}
    lines.append(event("recovery_completed", 9, generation=2, step=6, **recovered))
    lines += [commit(step, 3 + step) for step in range(6, 11)]
    stored = {"step": 5, "duration_s": 0.4, "size_bytes": 4096, "tier": "disk"}
    lines.append(event("checkpoint_completed", 8, **stored))
    lines.append(event("checkpoint_failed", 9, step=6, tier="object", cause="store", reason="no room"))
    restarted = {"cause": "killed", "reason": "continues from its journal"}
    lines.append(event("coordinator_restarted", 9.5, generation=2, pid=7, **restarted))
    lines.append(event("worker_joined", 12, worker_id=1, incarnation=1, pid=109, host="a"))
    return lines


def samples() -> list[bytes]:
    """As the sampler of host `a` writes them; the second life of worker 1 heals and then does two steps."""
    lines = [sample(2 + s, "a", *(row(i, 0, s) for i in range(3))) for s in range(1, 6)]
    lines += [sample(3 + s, "a", row(0, 0, s), row(2, 0, s)) for s in range(6, 9)]
    lines.append(sample(12, "a", row(0, 0, 8), row(1, 1, 0, phase="heal", done=0), row(2, 0, 8)))
    lines.append(sample(13, "a", row(0, 0, 9), row(1, 1, 8, done=0), row(2, 0, 9)))
    lines.append(sample(14, "a", row(0, 0, 10), row(1, 1, 10, done=2), row(2, 0, 10)))
    return lines


def make_run(run_dir: Path) -> Path:
    """The whole directory."""
    (run_dir / "metrics").mkdir(parents=True)
    (run_dir / "events.jsonl").write_bytes(b"".join(events()))
    (run_dir / "metrics" / "a.jsonl").write_bytes(b"".join(samples()))
    (run_dir / "job.json").write_text(json.dumps({"task": "small", "config": {"steps": 12}}))
    return run_dir
