"""How long a recovery took, phase by phase. Pure.

Times are durations on the coordinator's clock; the phases between are what the members measured themselves, of which
the slowest counts. The wall-clock time of a death is passed through, so that the runtime can tell the notice.
"""

from __future__ import annotations

from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator_state import Recovery, State

PHASES = ("notice", "decide", "unblock", "regroup", "settle", "redo", "heal")


def begin(
    state: State, reason: str, *, key: WorkerKey | None = None, notice_ns: int = 0, died_unix_ns: int | None = None
) -> None:
    """A fault has been noticed, `notice_ns` after it happened. A fault during a recovery belongs to it."""
    if state.recovery is None:
        state.recovery = Recovery(state.now, notice_ns / 1e9, reason, key, died_unix_ns)


def decided(state: State, generation: int) -> None:
    """The plan that answers the fault is out; if another fault followed, this is the newer one."""
    if state.recovery is not None:
        state.recovery.decided_ns = state.now
        state.recovery.generation = generation
        state.recovery.phases_ms.clear()


def entered(state: State, generation: int, phases_ms: dict[str, float]) -> None:
    """A member has settled. When all have, the recovery is complete."""
    recovery = state.recovery
    if recovery is None or recovery.decided_ns is None or generation < recovery.generation:
        return
    for phase, duration in phases_ms.items():
        recovery.phases_ms[phase] = max(duration, recovery.phases_ms.get(phase, 0.0))
    if state.plan is not None and state.entered >= set(state.plan.worker_ids):
        complete(state)


def complete(state: State) -> None:
    """Training goes on: say how long it took."""
    recovery = state.recovery
    if recovery is None or recovery.decided_ns is None or state.plan is None or state.broken:
        return
    phases = {phase: recovery.phases_ms.get(phase, 0.0) / 1e3 for phase in PHASES}
    phases["notice"] = recovery.notice_s
    phases["decide"] = (recovery.decided_ns - recovery.noticed_ns) / 1e9
    state.report(
        "recovery_completed",
        generation=state.plan.generation,
        step=state.step,
        worker_id=recovery.key.worker_id if recovery.key is not None else None,
        incarnation=recovery.key.incarnation if recovery.key is not None else None,
        reason=recovery.reason,
        duration_s=recovery.notice_s + (state.now - recovery.noticed_ns) / 1e9,
        phases_s=phases,
        died_unix_ns=recovery.died_unix_ns,
    )
    state.recovery = None
