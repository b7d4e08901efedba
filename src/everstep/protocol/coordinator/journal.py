"""How a restarted coordinator becomes what it was, by the journal's entries. Pure.

Entries are JSON-able dicts with a `kind`: target, plan, entered, evict, ticket, slot_lost, ended. Entries of a kind
that is not known are passed over, so that an older program can read a newer journal's common part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.agreement import plan_from_entry
from everstep.protocol.coordinator.job import JobState
from everstep.protocol.messages import JobEnded


def _replay_target(job: JobState, entry: dict[str, Any]) -> None:
    job.slots.take_wish(entry["target"], set(entry["slots"]), Cause.read(entry.get("cause")))


def _replay_plan(job: JobState, entry: dict[str, Any]) -> None:
    plan = plan_from_entry(entry["plan"])
    if not job.agreement.replay_plan(plan, adopted=entry.get("adopted", False)):
        return
    job.speeds.restore(plan)
    job.progress.replay_plan(plan)
    for member in plan.members:
        job.membership.restore(member, entry.get("agents", {}).get(str(member.worker_id)))


def _replay_entered(job: JobState, entry: dict[str, Any]) -> None:
    job.agreement.replay_entered(entry["generation"])


def _replay_evict(job: JobState, entry: dict[str, Any]) -> None:
    key = WorkerKey(entry["worker_id"], entry["incarnation"])
    job.membership.replay_evict(key, Cause.read(entry.get("cause")))


def _replay_ticket(job: JobState, entry: dict[str, Any]) -> None:
    job.healing.replay_ticket(entry["ticket"])


def _replay_slot_lost(job: JobState, entry: dict[str, Any]) -> None:
    job.slots.replay_lost(entry["worker_id"], entry["reason"])


def _replay_ended(job: JobState, entry: dict[str, Any]) -> None:
    cause = Cause.read(entry.get("cause"))
    ended = JobEnded(state=entry["state"], cause=cause, reason=entry["reason"], exit_code=entry["exit_code"])
    job.progress.replay_ended(ended)


_REPLAY: dict[str, Callable[[JobState, dict[str, Any]], None]] = {
    "target": _replay_target,
    "plan": _replay_plan,
    "entered": _replay_entered,
    "evict": _replay_evict,
    "ticket": _replay_ticket,
    "slot_lost": _replay_slot_lost,
    "ended": _replay_ended,
}


def replay(job: JobState, journal: Iterable[dict[str, Any]]) -> bool:
    """Bring the job to where the journal ends. Returns whether there was anything in it."""
    found = False
    for entry in journal:
        found = True
        act = _REPLAY.get(entry.get("kind", ""))
        if act is not None:
            act(job, entry)
    if job.agreement.plan is not None:
        _look_for_members(job)
    return found


def _look_for_members(job: JobState) -> None:
    agreement, membership = job.agreement, job.membership
    wanted = {m.key for p in (agreement.plan, agreement.prepared) if p is not None for m in p.members}
    membership.keep_only(wanted)
    job.slots.restore(key.worker_id for key in wanted)
    lost = sorted(key for key in wanted if membership.alive(key) is None)
    if lost:
        names = ", ".join(str(key) for key in lost)
        why = f"members evicted before the coordinator restarted: {names}"
        agreement.break_off(Why(membership.fenced_for(lost[0].worker_id), why))
