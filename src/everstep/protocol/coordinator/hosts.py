"""Hosts of the job, and slots that move to another host while training goes on. Pure.

A slot moves by leaving one host and starting again, under another number, on another: the new worker heals first,
and the members switch to it, away from the old one, in one prepared change. So a host that joins (again) is used
without a pause, and one that leaves hands over at a step boundary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, islice
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.domains import Domains
from everstep.placement.domain_spread import Crowd
from everstep.protocol.coordinator.environment import SECOND_NS, Alarm, listed
from everstep.protocol.coordinator.job_state import JobState
from everstep.protocol.coordinator.membership import Agent
from everstep.protocol.messages import AgentHello, HostDismissed, HostEmptied, HostKept, HostLeaving, HostRefused


def came(job: JobState, agent: Agent) -> None:
    """An agent is here: if it stays, other hosts may have too many slots."""
    delay_ns = job.env.config.hosts.return_ns
    if delay_ns is not None:
        job.env.alarms.set(Alarm.SPREAD, job.env.now + delay_ns)


def spread_due(job: JobState, about: Any) -> None:
    """Move slots to hosts that have too few, if nothing else is under way; else check again later."""
    agreement, slots = job.agreement, job.slots
    if job.progress.ended is not None or job.saving.ending is not None or not slots.shared_out:
        return
    if job.env.config.stages > 1 and job.env.config.wish.named:  # the map names the workers of each pool by number
        return
    busy = agreement.prepared is not None or job.healing.joins or job.membership.in_grace
    busy = busy or any(agent.sent_slots is None for agent in _usable(job))
    if busy or not agreement.running or len(agreement.survivors()) < slots.target:
        job.env.alarms.set(Alarm.SPREAD, job.env.now + SECOND_NS)
        return
    moves, ids = _uneven(job), slots.ids()
    if not moves:
        return
    text = f"workers move to a host with room: {len(moves)} start there, and as many end elsewhere"
    slots.want(slots.target, ids - set(moves) | set(_fresh(job, len(moves))), Why(Cause.REBALANCED, text))


def _uneven(job: JobState) -> list[int]:
    """Slots that would have to leave their hosts so that all hosts have as many, as far as they have room: first
    those that would die together with others of their pool."""
    agents, leader = _usable(job), job.agreement.plan.leader(0)
    own = {a.agent_id: [i for i in _slots_of(job, a) if i != leader] for a in agents}
    where = job.speeds.domains(job.agreement.plan.worker_ids)
    counts = Counter({a.agent_id: len(_slots_of(job, a)) for a in agents})
    moves: list[int] = []
    while True:
        most = max((a for a in agents if own[a.agent_id]), key=lambda a: (counts[a.agent_id], a.agent_id), default=None)
        free = [a for a in agents if not a.room or counts[a.agent_id] < a.room]
        least = min(free, key=lambda a: (counts[a.agent_id], a.agent_id), default=None)
        if most is None or least is None or counts[most.agent_id] - counts[least.agent_id] < 2:
            return moves
        chosen = max(own[most.agent_id], key=lambda i: (_crowded(job, i, where), i))
        own[most.agent_id].remove(chosen)
        where[chosen] = job.agents.whereabouts.of_host(least.agent_id, least.host)
        moves.append(chosen)
        counts[most.agent_id] -= 1
        counts[least.agent_id] += 1


def _crowded(job: JobState, worker_id: int, where: Mapping[int, Domains]) -> tuple[int, ...]:
    """How many members of its pools would die together with this worker, by domain, the widest first."""
    plan = job.agreement.plan
    others = {s.worker_id for stage in plan.stages_of(worker_id) for s in plan.pool(stage)} - {worker_id}
    return Crowd(others, where).near(where.get(worker_id, ()))


def _usable(job: JobState) -> list[Agent]:
    known = job.agents.known.items()
    return [agent for _, agent in sorted(known) if agent.connection is not None and not agent.draining]


def _slots_of(job: JobState, agent: Agent) -> list[int]:
    """Wanted slots that the agent was told to keep filled, ascending."""
    return sorted(set(agent.sent_slots or ()) & (job.slots.ids() - set(job.slots.lost)))


def _fresh(job: JobState, size: int) -> list[int]:
    """Numbers of slots that are unused, and of which no agent may still run a life: it starts a slot's next life by
    itself, and may have before it heard that the slot is not wanted any more."""
    agents = job.agents.known
    used = job.slots.ids() | set(job.slots.lost) | set(job.membership.workers)
    used |= {key.worker_id for agent in agents.values() for key in agent.believed}
    used |= {i for i, agent_id in job.slots.grants.agents() if agent_id in agents}
    return list(islice((i for i in count() if i not in used), size))


# ---- what people ask

SPANNED = "with cell.hosts above 1 the number of workers is fixed, and a host is replaced only once it is lost"


def drain(job: JobState, name: str, because: Why | None = None) -> tuple[str, dict[str, Any]]:
    """Drain a host: its workers leave at a step boundary, and others start on hosts with room. When all have left,
    its agent leaves, too. Returns an error, "" if there is none, and the result."""
    agent, slots = named(job).get(name), job.slots
    if agent is None or agent.connection is None:
        there = ", ".join(job.agents.shown_name(a) for a in _usable(job)) or "none"
        return f"no host {name!r}: the hosts are {there}", {}
    if job.env.config.hosts.span > 1:
        return f"cannot drain host {name}: {SPANNED}", {}
    if not slots.shared_out:
        return f"cannot drain host {name}: its agent has slots of its own", {}
    if agent.sent_slots is None:
        return f"cannot drain host {name} yet: it has only just connected; try again", {}
    leaving, others = _slots_of(job, agent), [a for a in _usable(job) if a is not agent]
    room = sum(max(0, a.room - len(_slots_of(job, a))) if a.room else len(slots.ids()) for a in others)
    wanted = slots.ids() - set(leaving) - set(slots.lost)
    free = sorted(i for i in wanted if (slots.owners.of(i) or "") not in job.agents.known)
    nobodys = free[room:]  # no host has room for them: they are wanted, but start nobody
    moving = min(len(leaving), room - len(free) + len(nobodys))
    ids = (slots.ids() - set(leaving)) | set(_fresh(job, moving))
    target = min(slots.target, len(ids - set(slots.lost)))
    least = max(slots.least, min(job.env.config.stages, len(job.agreement.newest.members)))
    staying = ids - {*slots.lost, *nobodys}
    if (left := min(target, len(staying))) < least:
        return f"cannot drain host {name}: {left} workers would be left of {least} that the job needs at least", {}
    if (alone := stages_without(job, leaving, staying)) and staying <= set(job.agreement.newest.worker_ids):
        return f"cannot drain host {name}: {refused_for(alone)}", {}
    why = because or Why(Cause.DRAINED, f"host {name} drained by request")
    slots.want(target, ids, why)  # journaled first: a host that counts as drained is asked no more for its slots
    job.agents.drain(agent, why)
    return "", {"workers": target, "moved": moving, "left": leaving}


def stages_without(job: JobState, leaving: Iterable[int], staying: set[int]) -> list[int]:
    """Stages that the workers who leave hold, and none of those who stay."""
    plan = job.agreement.newest
    pools = {k: {seat.worker_id for seat in plan.pool(k)} for k in range(plan.stages) if plan.stages > 1}
    return [k for k, pool in pools.items() if pool & set(leaving) and not pool & staying]


def refused_for(alone: Sequence[int]) -> str:
    """Why nobody who holds these stages alone may leave."""
    return f"nobody else holds stage {listed(alone)}; let a backup join it first"


def slots_of_drained(job: JobState) -> set[int]:
    """Slots that still run on hosts that were drained: to want one of them again would keep its host."""
    return {key.worker_id for agent in job.agents.known.values() if agent.draining for key in agent.believed}


def leaving(job: JobState, agent: Agent, message: HostLeaving | AgentHello) -> None:
    """A host wants to leave, for example because it was told to give itself back."""
    job.agents.wish(agent)


def emptied(job: JobState, agent: Agent, message: HostEmptied) -> None:
    """Nothing runs on a drained host, and nothing will be started there."""
    if agent.drained == "asked":
        job.env.change()
        agent.drain("emptied")


def stays_out(job: JobState, agent: Agent, message: HostRefused) -> None:
    """A host does not fit the job, as it found before it started anything."""
    why = Why(message.cause, f"host {job.agents.shown_name(agent)} stays out: {message.reason}")
    job.env.report("warning", why)
    job.agents.refuse(agent)
    job.slots.not_run(agent.agent_id)
    job.env.close(agent.connection, why.reason)


def let_go(job: JobState) -> None:
    """Drain hosts that wish to leave; let drained hosts leave whose workers are gone."""
    for agent_id in sorted(job.agents.leaving):
        agent = job.agents.known.get(agent_id)
        if agent is None:
            continue
        if agent.drained == "wished" and (agent.sent_slots is not None or not job.slots.shared_out):
            _drain_as_wished(job, agent)
        if agent.drained == "emptied":
            agent.drain("told")
            text = f"host {job.agents.shown_name(agent)} was drained: its workers have left, and so does its agent"
            job.env.send(agent.connection, HostDismissed(cause=Cause.DRAINED, reason=text))


def _drain_as_wished(job: JobState, agent: Agent) -> None:
    why = Why(Cause.PREEMPTED, f"host {job.agents.shown_name(agent)} asks to leave in order")
    refused, _ = drain(job, agent.agent_id, why)
    if refused:
        agent.drain("no")
        job.env.send(agent.connection, HostKept(cause=Cause.CONFIG, reason=refused))
        job.env.report("warning", Why(Cause.CONFIG, f"{why.reason}: {refused}"))


def listed_hosts(job: JobState) -> list[dict[str, Any]]:
    """All hosts of the job, past ones included, with the facts that each has given. The host of a lost head, which a
    new head knows by its address only, may come back under its own name: it is listed once."""
    there = {agent.about.get("address") for agent in job.agents.known.values()}
    gone = {name: agent for name, agent in job.agents.gone.items() if agent.about or name not in there}
    return [_said(job, agent) for _, agent in sorted({**gone, **job.agents.known}.items())]


def named(job: JobState) -> dict[str, Agent]:
    """Agents by each of their names: address, shown name, own name."""
    known = [agent for _, agent in sorted(job.agents.known.items())]
    found = {agent.about["address"]: agent for agent in known if agent.about.get("address")}
    return found | {job.agents.shown_name(agent): agent for agent in known} | {agent.agent_id: agent for agent in known}


def _said(job: JobState, agent: Agent) -> dict[str, Any]:
    return {
        "name": job.agents.shown_name(agent),
        "id": agent.agent_id,
        "address": agent.about.get("address", ""),
        "state": _state(job, agent),
        "slots": agent.room or None,
        "workers": sorted(key.worker_id for key in agent.lives) if agent.agent_id in job.agents.known else [],
        "rtt_ms": agent.rtt_ms,
        "unheard_s": round(agent.detector.silence_ns(job.env.now) / 1e9, 3),
        "domains": dict(job.agents.whereabouts.of_host(agent.agent_id, agent.host)),
        "versions": {name: text for name, text in sorted(agent.about.items()) if name not in ("address", "node")},
    }


def _state(job: JobState, agent: Agent) -> str:
    """The agent's state: joining, live, suspected, silent, draining, gone or refused."""
    workers: Sequence[bool] = [w.ready for w in job.membership.living(sorted(agent.lives))]
    if agent.agent_id not in job.agents.known:
        return "refused" if agent.drained == "refused" else "gone"
    if agent.connection is None:
        return "gone" if agent.draining and not agent.lives else "silent"
    if agent.detector.suspicion(job.env.now).suspect:
        return "suspected"
    if agent.draining:
        return "draining" if agent.lives else "gone"
    return "live" if any(workers) or not _slots_of(job, agent) else "joining"
