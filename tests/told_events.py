"""Events of a small job, as dictionaries, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from everstep.observe.events import format_event

S = 1_000_000_000
T0 = 1_800_000_000 * S
KILLED = {"cause": "killed", "reason": "killed by SIGKILL"}


def event(kind: str, at_s: float, **fields: Any) -> dict[str, Any]:
    return {"time_unix_ns": T0 + round(at_s * S), "kind": kind, **fields}


def plan(at_s: float, generation: int, stages: list[list[int]], cause: str = "started", reason: str = "x") -> Any:
    seats = [[i, k, "active", [n]] for k, pool in enumerate(stages) for n, i in enumerate(pool)]
    leaders = [pool[0] for pool in stages]
    more = {"target": 4, "leader": leaders[0], "leaders": leaders, "seats": seats, "cause": cause, "reason": reason}
    return event("generation_started", at_s, generation=generation, **more)


def commit(step: int, at_s: float) -> dict[str, Any]:
    return event("step_committed", at_s, step=step, loss=1.0, samples=8)


def trained(stages: list[list[int]] | None = None) -> list[dict[str, Any]]:
    """4 workers; 10 steps of 0.3 s, the last at 5.7 s."""
    joined = [event("worker_joined", 2, worker_id=i, incarnation=0, pid=i, host="a") for i in range(4)]
    steps = [commit(s, 2.7 + 0.3 * s) for s in range(1, 11)]
    return [event("job_started", 0, step=0, workers=4), *joined, plan(2.5, 1, stages or [[0, 1, 2, 3]]), *steps]


def killed(worker_id: int, at_s: float) -> dict[str, Any]:
    died_ns = T0 + round(at_s * S)
    return event("worker_evicted", at_s + 0.05, worker_id=worker_id, incarnation=0, died_unix_ns=died_ns, **KILLED)


def recovered(worker_id: int, begin_s: float, end_s: float) -> dict[str, Any]:
    spent = {"duration_s": end_s - begin_s, "phases_s": {"redo": 0.2}}
    return event("recovery_completed", end_s, worker_id=worker_id, step=10, **spent, **KILLED)


TWO = [[0, 1], [2, 3]]
LEADS = event("leader_changed", 5.9, worker_id=3, stage=1, **KILLED)
HEALED = event("worker_healed", 6.0, worker_id=4, incarnation=0)


def write_events(run_dir: Path, events: Iterable[dict[str, Any]], earlier_ns: int = 0) -> None:
    """They become the directory's; all of them so much earlier."""
    said = b""
    for one in events:
        fields = {k: v for k, v in one.items() if k not in ("kind", "time_unix_ns")}
        said += format_event(one["kind"], one["time_unix_ns"] - earlier_ns, fields)
    (run_dir / "events.jsonl").write_bytes(said)
