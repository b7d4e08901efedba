"""The journal's entries, and how a restarted coordinator becomes what it was. Pure.

Entries are JSON-able dicts with a `kind`: target, plan, entered, evict, ticket, slot_lost, ended. Entries of a kind
that is not known are passed over, so that an older program can read a newer journal's common part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from everstep.base.cause import Cause, Why
from everstep.base.errors import ProtocolError
from everstep.base.plan import Member, Plan, WorkerKey
from everstep.protocol.coordinator.state import State, Worker
from everstep.protocol.messages import JobEnded


def plan_to_entry(plan: Plan) -> dict[str, Any]:
    """A plan as JSON-able data."""
    entry: dict[str, Any] = msgspec.to_builtins(plan)
    return entry


def plan_from_entry(entry: dict[str, Any]) -> Plan:
    """Raises: ProtocolError if it is not a plan."""
    try:
        return msgspec.convert(entry, Plan)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"expected a plan in the coordinator's journal: {error}") from None


def record_plan(state: State, plan: Plan) -> None:
    """Journal a plan, with the agents that run its members."""
    agents = {}
    for member in plan.members:
        worker = state.alive(member.key)
        if worker is not None and worker.agent_id is not None:
            agents[str(member.worker_id)] = worker.agent_id
    state.persist("plan", plan=plan_to_entry(plan), agents=agents)


def _replay_target(state: State, entry: dict[str, Any]) -> None:
    state.unwanted |= dict.fromkeys(state.slot_ids() - set(entry["slots"]), Cause.read(entry.get("cause")))
    state.target = entry["target"]
    state.slots = set(entry["slots"])


def _replay_plan(state: State, entry: dict[str, Any]) -> None:
    plan = plan_from_entry(entry["plan"])
    if plan.generation <= state.generation:
        return
    state.generation = plan.generation
    state.speeds, state.sound = dict(plan.speeds), plan.sound
    if plan.prepared and state.plan is not None and not entry.get("adopted", False):
        state.prepared = plan
    else:
        state.plan, state.prepared = plan, None
    for member in plan.members:
        restore_member(state, member, entry.get("agents", {}).get(str(member.worker_id)))


def _replay_entered(state: State, entry: dict[str, Any]) -> None:
    if state.prepared is not None and state.prepared.generation == entry["generation"]:
        state.plan, state.prepared = state.prepared, None


def _replay_evict(state: State, entry: dict[str, Any]) -> None:
    key = WorkerKey(entry["worker_id"], entry["incarnation"])
    state.fenced[key.worker_id] = max(key.incarnation, state.fenced.get(key.worker_id, -1))
    state.fenced_for[key.worker_id] = Cause.read(entry.get("cause"))
    worker = state.workers.get(key.worker_id)
    if worker is not None and state.is_fenced(worker.key):
        del state.workers[key.worker_id]


def _replay_ticket(state: State, entry: dict[str, Any]) -> None:
    state.ticket = max(state.ticket, entry["ticket"])


def _replay_slot_lost(state: State, entry: dict[str, Any]) -> None:
    state.lost_slots[entry["worker_id"]] = entry["reason"]


def _replay_ended(state: State, entry: dict[str, Any]) -> None:
    cause = Cause.read(entry.get("cause"))
    state.ended = JobEnded(state=entry["state"], cause=cause, reason=entry["reason"], exit_code=entry["exit_code"])


_REPLAY: dict[str, Callable[[State, dict[str, Any]], None]] = {
    "target": _replay_target,
    "plan": _replay_plan,
    "entered": _replay_entered,
    "evict": _replay_evict,
    "ticket": _replay_ticket,
    "slot_lost": _replay_slot_lost,
    "ended": _replay_ended,
}


def restore_member(state: State, member: Member, agent_id: str | None) -> None:
    """Believe that a member of a plan lives, until a grace period has passed without a hello."""
    known = state.workers.get(member.worker_id)
    if state.is_fenced(member.key) or (known is not None and known.key.incarnation > member.incarnation):
        return
    if known is None or known.key != member.key:
        known = state.workers[member.worker_id] = Worker(member.key)
    known.member = known.member or member
    known.pid, known.host = member.pid, member.host
    known.agent_id = known.agent_id or agent_id


def replay(state: State, journal: Iterable[dict[str, Any]]) -> bool:
    """Bring the state to where the journal ends. Returns whether there was anything in it."""
    found = False
    for entry in journal:
        found = True
        act = _REPLAY.get(entry.get("kind", ""))
        if act is not None:
            act(state, entry)
    if state.plan is not None:
        wanted = {m.key for p in (state.plan, state.prepared) if p is not None for m in p.members}
        state.workers = {i: w for i, w in state.workers.items() if w.key in wanted}
        state.retiring = {key.worker_id for key in wanted if not state.slot_wanted(key.worker_id)}
        lost = [m.key for m in state.plan.members if state.alive(m.key) is None]
        if state.prepared is not None:
            lost += [m.key for m in state.prepared.members if state.alive(m.key) is None]
        if lost:
            cause = state.fenced_for.get(min(lost).worker_id, Cause.UNKNOWN)
            names = ", ".join(str(k) for k in sorted(set(lost)))
            state.broken.append(Why(cause, f"members evicted before the coordinator restarted: {names}"))
    return found
