"""The summary at the end of a job, as one object and as lines. Pure: facts in, words out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.report.facts import Facts


def summary(
    facts: Facts,
    exit_code: int,
    run_dir: str,
    digest: Mapping[str, Any] | None,
    why: Why | None = None,
    missing_rows: str = "",
) -> dict[str, Any]:
    """The object that `run --json` ends with. why: it ended badly. Of many recoveries the newest give the times.

    missing_rows: what the ledger lacks. A job that was done in order is completed, but without the proof not in order.
    """
    states = {0: "completed", 130: "interrupted", 143: "interrupted"}
    times = sorted(recovery.duration_s for recovery in facts.recoveries)
    begin_ns = facts.account.begin_ns or 0
    return {
        "kind": "summary",
        "state": states.get(exit_code, "failed"),
        "exit_code": exit_code or int(bool(missing_rows)),
        "cause": why.cause if why is not None else Cause.DISK if missing_rows else None,
        "reason": "; ".join(text for text in (why.reason if why is not None else "", missing_rows) if text) or None,
        "steps": int(digest["step"]) if digest is not None else facts.step,
        "faults_survived": facts.faults,
        "steps_lost": facts.steps_lost,
        "recoveries": facts.counts.get("recovery_completed", 0),
        "recovery_s": {"median": statistics.median(times) if times else None, "max": times[-1] if times else None},
        "generations": facts.generation,
        "checkpoints": {
            "completed": facts.counts.get("checkpoint_completed", 0),
            "failed": facts.counts.get("checkpoint_failed", 0),
            "newest": facts.checkpoint_step or None,
        },
        "ledger_complete": not missing_rows,
        "digest": dict(digest) if digest is not None else None,
        "loss": facts.loss,
        "metrics": facts.metrics or None,
        "wall_s": round((facts.account.end_ns - begin_ns) / 1e9, 3),
        "run_dir": run_dir,
    }
