"""The coordinator's parts, each with a state of its own, and how a journal makes them what they were. Pure.

What is said to one part alone is a method of it. What concerns several (a death, a plan, a hello) is a function over
`JobState`, which looks at all parts it needs and tells each what has happened; nobody writes into a part.

Entries of the journal are JSON-able dicts with a `kind`: target, plan, entered, evict, ticket, slot_lost, ended.
Entries of a kind that is not known are passed over, so that an older program can read a newer journal's common part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from everstep.base.cause import Cause, Why
from everstep.base.errors import ProtocolError
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol.coordinator.agreement import NO_PLAN, Agreement, JobProgress, Recovery
from everstep.protocol.coordinator.arrivals import Healing, Quorum
from everstep.protocol.coordinator.desk import Desk
from everstep.protocol.coordinator.links import Links
from everstep.protocol.coordinator.membership import Agents, Membership, Slots
from everstep.protocol.coordinator.profiling import Profiling
from everstep.protocol.coordinator.saving import Saving
from everstep.protocol.coordinator.speeds import Speeds
from everstep.protocol.coordinator.store import RendezvousStore
from everstep.protocol.coordinator.types import CoordinatorConfig
from everstep.protocol.messages import JobEnded


class JobState:
    """All that the coordinator knows of its job; at first nothing."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.desk = desk = Desk(config)
        self.membership = membership = Membership(desk)
        self.agents = Agents(desk)
        self.slots = Slots(desk, membership, self.agents)
        self.agreement = agreement = Agreement(desk, membership)
        self.progress = progress = JobProgress(desk, agreement)
        self.recovery = Recovery(desk, agreement)
        self.quorum = Quorum(desk)
        self.healing = Healing(desk)
        self.speeds = Speeds(desk, membership)
        self.links = Links(desk, membership, agreement, self.recovery)
        self.saving = Saving(desk, membership, agreement, progress, self.quorum)
        self.profiling = Profiling(desk, membership, agreement, progress)
        self.store = RendezvousStore(desk)

    @property
    def version(self) -> tuple[int, ...]:
        """Changes as soon as anything changes that a decision looks at.

        While members train in slots that are their agents' own, none looks at agents: a thousand that come back one by
        one cost no decision each.
        """
        trains = self.agreement.plan is not NO_PLAN and not self.agreement.broken
        agents = 0 if trains and not self.slots.shared_out else self.agents.version
        return agents, self.desk.version, int(self.saving.ending is not None)


def replay(job: JobState, journal: Iterable[dict[str, Any]]) -> bool:
    """Bring the job to where the journal ends. Returns whether there was anything in it.

    Raises: ProtocolError if the journal holds what no coordinator writes.
    """
    found = False
    for entry in journal:
        found = True
        try:
            _replay(job, entry)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ProtocolError(f"expected what a coordinator's journal says, found {entry!r:.100}: {error}") from None
    if job.agreement.plan is not NO_PLAN:
        _look_for_members(job)
    return found


def _replay(job: JobState, entry: dict[str, Any]) -> None:
    cause = Cause.read(entry.get("cause"))
    match entry.get("kind"):
        case "target":
            job.slots.take_wish(entry["target"], set(entry["slots"]), cause)
        case "plan":
            _replay_plan(job, entry)
        case "entered":
            job.agreement.replay_entered(entry["generation"])
        case "evict":
            job.membership.replay_evict(WorkerKey(entry["worker_id"], entry["incarnation"]), cause)
        case "ticket":
            job.healing.replay_ticket(entry["ticket"])
        case "slot_lost":
            job.slots.replay_lost(entry["worker_id"], entry["reason"])
        case "ended":
            state, reason, exit_code = entry["state"], entry["reason"], entry["exit_code"]
            job.progress.replay_ended(JobEnded(state=state, cause=cause, reason=reason, exit_code=exit_code))


def _replay_plan(job: JobState, entry: dict[str, Any]) -> None:
    try:
        plan = msgspec.convert(entry["plan"], Plan)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"expected a plan in the coordinator's journal: {error}") from None
    if job.agreement.replay_plan(plan, adopted=entry.get("adopted", False)):
        job.speeds.replay_plan(plan)
        job.progress.replay_plan(plan)
        for member in plan.members:
            job.membership.restore(member, entry.get("agents", {}).get(str(member.worker_id)))


def _look_for_members(job: JobState) -> None:
    agreement, membership = job.agreement, job.membership
    wanted = {m.key for plan in (agreement.plan, agreement.prepared) if plan is not None for m in plan.members}
    membership.keep_only(wanted)
    job.slots.restore(key.worker_id for key in wanted)
    lost = sorted(key for key in wanted if membership.alive(key) is None)
    if lost:
        names = ", ".join(str(key) for key in lost)
        why = f"members evicted before the coordinator restarted: {names}"
        agreement.break_off(Why(membership.fenced_for(lost[0].worker_id), why))
