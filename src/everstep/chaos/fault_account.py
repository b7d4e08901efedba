"""Outcome of the faults of a job, from its events: who was struck, what the job did, how long it took. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from everstep.base.cause import Cause
from everstep.chaos.fault_kinds import KINDS
from everstep.chaos.scenarios import Scenario

JobEvent = Mapping[str, Any]
_PLACES = ("host:", "link:")
_SET_BACK_NS = 10_000_000_000  # hosts may differ by less
_LOST_BY_PLACES = (Cause.HOST_LOST, Cause.LINK, Cause.SILENT, Cause.KILLED, Cause.EXITED)


@dataclass(frozen=True)
class HitTarget:
    """One strike. `outcome`: the job's reaction; `recovery_s`: from the fault to the next committed step.

    recovery_s is None if nobody had to recover (a short pause, a lost connection).
    """

    fault: str
    target: str
    worker_id: int | None
    step: int
    phase: str
    outcome: str
    recovery_s: float | None = None


@dataclass
class FaultAccount:
    """A job's faults. `told`: by kind, the events that give a cause. `steps_redone`: because a whole pool was lost.
    `state`: completed, failed, or not over."""

    hits: list[HitTarget] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    told: dict[str, list[JobEvent]] = field(default_factory=dict)
    recoveries_s: list[float] = field(default_factory=list)
    steps_redone: int = 0
    steps: int = 0
    state: str = "not over"
    cause: Cause | None = None
    reason: str = ""

    @property
    def median_s(self) -> float | None:
        """Median of the recoveries in seconds; None if there are none."""
        return statistics.median(self.recoveries_s) if self.recoveries_s else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "faults": [vars(one) for one in self.hits],
            "evicted": self.counts.get("worker_evicted", 0),
            "healed": self.counts.get("worker_healed", 0),
            "recoveries": len(self.recoveries_s),
            "recovery_s": {"median": self.median_s, "max": max(self.recoveries_s, default=None)},
            "steps": self.steps,
            "steps_redone": self.steps_redone,
            "state": self.state,
            "cause": self.cause,
            "reason": self.reason or None,
        }


def account(events: Iterable[JobEvent]) -> FaultAccount:
    """Account of the faults, from the events of one job."""
    told = list(filter(_is_ours, events))
    found = FaultAccount()
    for event in told:
        kind = str(event["kind"])
        found.counts[kind] = found.counts.get(kind, 0) + 1
        if event.get("cause"):
            found.told.setdefault(kind, []).append(event)
        if kind == "recovery_completed":
            found.recoveries_s.append(float(event.get("duration_s") or 0.0))
        elif kind == "fallback":
            found.steps_redone += int(event.get("steps_redone") or 0)
        elif kind == "step_committed":
            found.steps = max(found.steps, int(event.get("step") or 0))
        elif kind == "job_started":  # it goes on
            found.state, found.cause, found.reason = "not over", None, ""
        elif kind in ("job_completed", "job_failed"):
            found.steps = max(found.steps, int(event.get("step") or 0))  # the last one may have no event of its own
            found.state = str(event.get("state") or kind.removeprefix("job_"))
            if found.state != "completed":
                found.cause, found.reason = Cause.read(event.get("cause")), str(event.get("reason") or "")
    listed = _in_order(told)
    for k, event in enumerate(listed):
        if event["kind"] == "fault_injected":  # lives are counted from 0 again in each start
            later = takewhile(lambda e: e["kind"] != "job_started", listed[k + 1 :])
            found.hits.append(_hit(event, list(later)))
    return found


def _in_order(told: Sequence[JobEvent]) -> list[JobEvent]:
    """Events in the order of time, as some are told late; but starts, and clocks that were set back, one after another:
    a later step has an earlier time then."""
    kept: list[tuple[int, int, JobEvent]] = []
    clock = step = newest_ns = 0
    for event in told:
        time_ns, done = int(event["time_unix_ns"] or 0), int(event.get("step") or 0)
        if event["kind"] == "job_started":
            clock, step, newest_ns = clock + 1, done, 0
        elif event["kind"] == "step_committed" and done > step:
            clock += newest_ns - time_ns > _SET_BACK_NS
            step, newest_ns = done, time_ns
        kept.append((clock, time_ns, event))
    return [event for _, _, event in sorted(kept, key=lambda one: one[:2])]


def _is_ours(event: JobEvent) -> bool:
    """Whether the event's numeric fields hold numbers."""
    numbers = [event.get(name) or 0 for name in ("time_unix_ns", "step", "steps_redone")]
    times = "time_unix_ns" in event and isinstance(event.get("duration_s") or 0.0, int | float)
    return times and all(isinstance(number, int) and abs(number) < 1 << 63 for number in numbers)


def _hit(event: JobEvent, later: Sequence[JobEvent]) -> HitTarget:
    outcome, recovery_s = _outcome(event, later)
    return HitTarget(
        str(event.get("fault")),
        str(event.get("target")),
        event.get("worker_id"),
        int(event.get("step") or 0),
        str(event.get("phase") or ""),
        outcome,
        recovery_s,
    )


def _outcome(event: JobEvent, later: Sequence[JobEvent]) -> tuple[str, float | None]:
    struck_ns, who = int(event["time_unix_ns"] or 0), event.get("worker_id")
    kind = KINDS.get(str(event.get("fault")))
    if kind is not None and kind.outcome is not None:
        return kind.outcome, None
    if str(event.get("target", "")).startswith(_PLACES):
        return _outcome_of_place(struck_ns, later)
    if who is None:
        back = any(e["kind"] == "coordinator_restarted" for e in later)
        return "the coordinator was restarted" if back else "nothing was reported", None
    life = _life(event)
    end = next((k for k, e in enumerate(later) if e["kind"] == "worker_evicted" and _life(e) == life), None)
    if end is None:
        return "went on", None
    back = any(e["kind"] == "worker_healed" and e.get("worker_id") == who for e in later)
    return "evicted, healed and back" if back else "evicted", _until_step(struck_ns, later[end:])


def _life(event: JobEvent) -> tuple[Any, Any]:
    return event.get("worker_id"), event.get("incarnation")


def _until_step(struck_ns: int, later: Sequence[JobEvent]) -> float | None:
    """Seconds to the next committed step; None if there is none, or the clock was set back meanwhile."""
    done = next((e for e in later if e["kind"] == "step_committed"), None)
    passed_s = -1.0 if done is None else (int(done["time_unix_ns"]) - struck_ns) / 1e9
    return passed_s if passed_s >= 0 else None


def _outcome_of_place(struck_ns: int, later: Sequence[JobEvent]) -> tuple[str, float | None]:
    """Outcome for a host or a link: workers that were lost by it, up to the next fault."""
    until = next((k for k, e in enumerate(later) if e["kind"] == "fault_injected"), len(later))
    evicted = (k for k, e in enumerate(later[:until]) if e["kind"] == "worker_evicted")
    lost = [k for k in evicted if later[k].get("cause") in _LOST_BY_PLACES]
    if not lost:
        return "went on", None
    ids = ", ".join(str(later[k].get("worker_id")) for k in lost)
    return f"evicted worker {ids}", _until_step(struck_ns, later[lost[0] :])


def missing(scenario: Scenario, found: FaultAccount) -> list[str]:
    """Effects that the scenario should have had and did not; empty if all is as expected."""
    lines = [
        f"expected at least {count} {kind}, got {found.counts.get(kind, 0)}"
        for kind, count in scenario.expects.items()
        if found.counts.get(kind, 0) < count
    ]
    lines += [
        f"expected a {kind} with {_shown(fields)}, got {_said(found, kind) or 'none'}"
        for kind, fields in scenario.bears.items()
        if not any(fields.items() <= event.items() for event in found.told.get(kind, ()))
    ]
    lines += [
        f"expected no {kind}, got {_said(found, kind) or 'one'}" for kind in scenario.never if found.counts.get(kind, 0)
    ]
    return lines


def _shown(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def _said(found: FaultAccount, kind: str) -> str:
    """Events of a kind, for people."""
    return "; ".join(f"{event['cause']}: {event.get('reason')}" for event in found.told.get(kind, ()))
