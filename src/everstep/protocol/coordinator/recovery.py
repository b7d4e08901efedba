"""How long a recovery took, phase by phase. Pure.

Times are durations on the coordinator's clock; the phases between are what the members measured themselves, of which
the slowest counts. A recovery ends with the first step that is committed after all have settled. The wall-clock time of
a death is passed through: `noticed` is for the runtime, which knows the time of day.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.agreement import Agreement
from everstep.protocol.coordinator.desk import Desk

PHASES = ("notice", "decide", "unblock", "regroup", "settle", "redo", "heal")


@dataclass(frozen=True)
class _Fault:
    """noticed_ns: on the coordinator's clock; notice_s: how long that took."""

    noticed_ns: int
    notice_s: float
    why: Why
    key: WorkerKey | None
    died_unix_ns: int | None


@dataclass
class _Answer:
    """The plan that answers it. phases_ms: of the slowest member."""

    generation: int
    decided_ns: int
    settled_ns: int | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)

    def settle(self, now_ns: int) -> None:
        self.settled_ns = now_ns


class Recovery:
    """From a fault until training goes on; faults meanwhile belong to it."""

    def __init__(self, desk: Desk, agreement: Agreement) -> None:
        self._desk, self._agreement = desk, agreement
        self._fault: _Fault | None = None
        self._answer: _Answer | None = None

    def begin(
        self, why: Why, *, key: WorkerKey | None = None, notice_ns: int = 0, died_unix_ns: int | None = None
    ) -> None:
        """A fault has been noticed, `notice_ns` after it happened."""
        if self._fault is None:
            self._fault = _Fault(self._desk.now, notice_ns / 1e9, why, key, died_unix_ns)

    def cause(self, otherwise: Cause) -> Cause:
        """Cause of the fault from which the job recovers, if it does."""
        return self._fault.why.cause if self._fault is not None else otherwise

    def decided(self, generation: int) -> None:
        """The plan that answers the fault is out; if another fault followed, this is the newer one."""
        if self._fault is not None:
            self._answer = _Answer(generation, self._desk.now)

    def entered(self, generation: int, phases_ms: dict[str, float]) -> None:
        """A member has settled. When all have, the lost work is done again."""
        answer, plan = self._answer, self._agreement.plan
        if answer is None or generation < answer.generation:
            return
        for phase, duration in phases_ms.items():
            answer.phases_ms[phase] = max(duration, answer.phases_ms.get(phase, 0.0))
        if plan is not None and self._agreement.entered >= set(plan.worker_ids):
            answer.settle(self._desk.now)

    def complete(self, step: int) -> None:
        """A step was committed in the new generation: training goes on. Say how long it took."""
        fault, answer, plan, now = self._fault, self._answer, self._agreement.plan, self._desk.now
        if fault is None or answer is None or plan is None or self._agreement.broken:
            return
        phases = {phase: answer.phases_ms.get(phase, 0.0) / 1e3 for phase in PHASES}
        phases["notice"] = fault.notice_s
        phases["decide"] = (answer.decided_ns - fault.noticed_ns) / 1e9
        phases["redo"] = (now - answer.settled_ns) / 1e9 if answer.settled_ns is not None else 0.0
        self._desk.report(
            "recovery_completed",
            fault.why,
            generation=plan.generation,
            step=step,
            worker_id=fault.key.worker_id if fault.key is not None else None,
            incarnation=fault.key.incarnation if fault.key is not None else None,
            duration_s=fault.notice_s + (now - fault.noticed_ns) / 1e9,
            phases_s=phases,
            died_unix_ns=fault.died_unix_ns,
        )
        self._fault = self._answer = None


def noticed(fields: dict[str, Any], now_unix_ns: int) -> dict[str, Any]:
    """The report of a recovery, with the notice of a death whose time of day is known. now_unix_ns: of the report."""
    died_ns = fields.get("died_unix_ns")
    if died_ns is None:
        return fields
    phases = fields["phases_s"]
    known_s = fields["duration_s"] - phases["notice"]
    notice_s = max(0.0, (now_unix_ns - died_ns) / 1e9 - known_s)
    return {**fields, "duration_s": known_s + notice_s, "phases_s": {**phases, "notice": notice_s}}
