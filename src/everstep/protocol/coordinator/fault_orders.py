"""Scripted faults of hosts, links and the coordinator: who injects each, exactly once. Pure.

Workers know the step, and agents have the permission to inject. So a worker reports that a fault is due, by its
place in the specification, and the agents concerned are told to inject it. The job's process on the coordinator's
host injects faults of the coordinator, since it started it: all job processes are told, and the right one acts.
"""

from __future__ import annotations

from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.strikes import Strike
from everstep.protocol.coordinator import hosts
from everstep.protocol.coordinator.job_state import JobState
from everstep.protocol.coordinator.membership import Agent, Worker
from everstep.protocol.messages import StrikeDue, StrikeNow
from everstep.protocol.roles import JOB


def strike_due(job: JobState, worker: Worker, message: StrikeDue) -> None:
    """A worker has reached the point of a fault; the first report counts. The worker has claimed a fault of the
    coordinator before."""
    strike = job.earlier_targets.find(message.index)
    if strike is None or not strike.possible or not (strike.coordinator or job.earlier_targets.first(strike.index)):
        return
    where = {"generation": message.generation, "step": message.step, "phase": message.phase}
    refused = _strike(job, strike, f" in phase {message.phase} of step {message.step}", where)
    if refused:
        job.env.report("warning", Why(Cause.INJECTED, f"chaos fault {strike.text!r}: {refused}"))


def strike_asked(job: JobState, strike: Strike) -> str:
    """Inject a requested fault at once. Returns why not, "" if it is on its way."""
    where = {"generation": job.agreement.plan.generation, "step": job.progress.step, "phase": ""}
    return _strike(job, strike, "", where)


def _strike(job: JobState, strike: Strike, moment: str, where: dict[str, Any]) -> str:
    if strike.coordinator:
        return _strike_coordinator(job, strike, moment, where)
    there = {agent.agent_id: agent for agent in job.agents.known.values() if agent.connection is not None}
    by_name = {name: agent for name, agent in hosts.named(job).items() if agent.connection is not None}
    ends = [by_name[name] for name in strike.ends(by_name)]
    if not ends:
        what = "two hosts" if strike.link else "a host"
        known = ", ".join(sorted({job.agents.shown_name(agent) for agent in there.values()})) or "none"
        return f"expected {what} of the job, got {strike.target!r}: the hosts are {known}"
    if strike.link and ends[0] is ends[1]:
        return f"expected a link between two hosts, got {strike.target!r}: both are host {ends[0].agent_id}"
    pairs: list[tuple[Agent, str]] = [(ends[0], "")]
    if strike.link:
        addresses = [end.about.get("address", "") for end in ends]
        pairs = [(ends[0], addresses[1]), *([(ends[1], addresses[0])] if strike.both_act else [])]
    if strike.link and not all(peer for _, peer in pairs):
        return "the address of one of these hosts is not known"
    text = f"chaos fault {strike.text!r} strikes {'link' if strike.link else 'host'} {strike.target}{moment}"
    target = f"{'link' if strike.link else 'host'}:{strike.target}"
    job.env.report("fault_injected", Why(Cause.INJECTED, text), fault=strike.kind, target=target, **where)
    for agent, peer in pairs:
        message = StrikeNow(
            number=job.env.number(),
            kind=strike.kind,
            peer=peer,
            for_s=strike.for_s,
            by_s=strike.by_s,
            mbit=strike.mbit,
            share=strike.share,
        )
        job.env.send(agent.connection, message)
    return ""


def _strike_coordinator(job: JobState, strike: Strike, moment: str, where: dict[str, Any]) -> str:
    jobs = sorted(name for name, connection in job.env.connections.items() if connection.role == JOB)
    if not jobs:
        return "the process of the job that could strike the coordinator is not connected"
    text = f"chaos fault {strike.text!r} strikes coordinator{moment}"
    fields = {"fault": strike.kind, "target": "coordinator", "worker_id": None, **where}
    job.env.report("fault_injected", Why(Cause.INJECTED, text), **fields)
    for name in jobs:
        job.env.send(name, StrikeNow(number=job.env.number(), kind=strike.kind, for_s=strike.for_s))
    return ""
