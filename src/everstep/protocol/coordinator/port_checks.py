"""Lost hosts whose kernels say that their workers' ports are closed. Pure.

A host that has lost all connections may make new ones, so it gets time for that. But the kernel refuses connections
to a port whose process is dead: then there is nothing to wait for. This counts if all workers of a host have closed
ports, neither they nor their agent has a connection, and another host is heard. A port that does not answer may
belong to a living process.
"""

from __future__ import annotations

from typing import Any

from everstep.base.plan import Member
from everstep.protocol.coordinator.environment import MILLISECOND_NS, Alarm
from everstep.protocol.coordinator.job_state import JobState
from everstep.protocol.coordinator.liveness import give_up_host
from everstep.protocol.coordinator.membership import Agent, Worker
from everstep.protocol.coordinator.types import PortProbed

AGAIN_NS = 200 * MILLISECOND_NS
MOST_HOSTS = 16
"""Lost hosts checked at once: of thousands that come back after a restart hardly one is lost."""


def port_probe_due(job: JobState, about: Any) -> None:
    """Check the ports of lost hosts, repeatedly, until they are back or given up."""
    lost = _lost(job)
    job.agents.closed.only({member.key for _, members in lost for member in members})
    for _, members in lost[:MOST_HOSTS]:
        for member in members:
            job.env.probe_port(member.key, member.address)
    if lost or job.membership.in_grace:
        job.env.alarms.set(Alarm.PROBE_PORT, job.env.now + AGAIN_NS)


def port_probed(job: JobState, event: PortProbed) -> None:
    """Take the kernel's answer about a worker's port."""
    if job.progress.ended is not None or not job.agents.closed.answer(event.key, event.listens):
        return
    worker = job.membership.alive(event.key)
    agent = None if worker is None else job.agents.of(worker)
    for lost, members in _lost(job) if agent is not None else []:
        if lost is agent and all(job.agents.closed.has(member.key) for member in members):
            text = "none of its processes has a connection, and the ports of its workers are closed"
            give_up_host(job, lost, text, "is gone")
            return


def _lost(job: JobState) -> list[tuple[Agent, list[Member]]]:
    """Agents without a connection, and their workers, if none of these has one either and all had a port; empty if
    nothing else is heard: then the coordinator is cut off."""
    known = job.agents.known
    if job.progress.ended is not None or not any(agent.connection is not None for agent in known.values()):
        return []
    theirs: dict[str, list[Worker]] = {}
    for _, worker in sorted(job.membership.workers.items()):
        agent = job.agents.of(worker)
        if agent is not None and agent.connection is None:
            theirs.setdefault(agent.agent_id, []).append(worker)
    return [
        (known[name], [w.member for w in workers if w.member is not None])
        for name, workers in sorted(theirs.items())
        if all(w.connection is None and w.member is not None and w.member.address for w in workers)
    ]
