"""How long a recovery took, phase by phase. Pure.

Times are durations on the coordinator's clock; the phases between are what the members measured themselves, of which
the slowest counts. A recovery ends with the first step that is committed after all have settled. The wall-clock time of
a death is passed through: `noticed` is for the runtime, which knows the time of day.
"""

from __future__ import annotations

from typing import Any

from everstep.base.cause import Why
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.state import Recovery, State

PHASES = ("notice", "decide", "unblock", "regroup", "settle", "redo", "heal")


def begin(
    state: State, why: Why, *, key: WorkerKey | None = None, notice_ns: int = 0, died_unix_ns: int | None = None
) -> None:
    """A fault has been noticed, `notice_ns` after it happened. A fault during a recovery belongs to it."""
    if state.recovery is None:
        state.recovery = Recovery(state.now, notice_ns / 1e9, why, key, died_unix_ns)


def decided(state: State, generation: int) -> None:
    """The plan that answers the fault is out; if another fault followed, this is the newer one."""
    if state.recovery is not None:
        state.recovery.decided_ns = state.now
        state.recovery.settled_ns = None
        state.recovery.generation = generation
        state.recovery.phases_ms.clear()


def entered(state: State, generation: int, phases_ms: dict[str, float]) -> None:
    """A member has settled. When all have, the lost work is done again."""
    recovery = state.recovery
    if recovery is None or recovery.decided_ns is None or generation < recovery.generation:
        return
    for phase, duration in phases_ms.items():
        recovery.phases_ms[phase] = max(duration, recovery.phases_ms.get(phase, 0.0))
    if state.plan is not None and state.entered >= set(state.plan.worker_ids):
        recovery.settled_ns = state.now


def complete(state: State) -> None:
    """A step was committed in the new generation: training goes on. Say how long it took."""
    recovery = state.recovery
    if recovery is None or recovery.decided_ns is None or state.plan is None or state.broken:
        return
    phases = {phase: recovery.phases_ms.get(phase, 0.0) / 1e3 for phase in PHASES}
    phases["notice"] = recovery.notice_s
    phases["decide"] = (recovery.decided_ns - recovery.noticed_ns) / 1e9
    phases["redo"] = (state.now - recovery.settled_ns) / 1e9 if recovery.settled_ns is not None else 0.0
    state.report(
        "recovery_completed",
        recovery.why,
        generation=state.plan.generation,
        step=state.step,
        worker_id=recovery.key.worker_id if recovery.key is not None else None,
        incarnation=recovery.key.incarnation if recovery.key is not None else None,
        duration_s=recovery.notice_s + (state.now - recovery.noticed_ns) / 1e9,
        phases_s=phases,
        died_unix_ns=recovery.died_unix_ns,
    )
    state.recovery = None


def noticed(fields: dict[str, Any], now_unix_ns: int) -> dict[str, Any]:
    """The report of a recovery, with the notice of a death whose time of day is known. now_unix_ns: of the report."""
    died_ns = fields.get("died_unix_ns")
    if died_ns is None:
        return fields
    phases = fields["phases_s"]
    known_s = fields["duration_s"] - phases["notice"]
    notice_s = max(0.0, (now_unix_ns - died_ns) / 1e9 - known_s)
    return {**fields, "duration_s": known_s + notice_s, "phases_s": {**phases, "notice": notice_s}}
