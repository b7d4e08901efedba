"""Whether a client may send a message: by its role, its name, and the lives that the message is about. Pure."""

from __future__ import annotations

from everstep.base.plan import WorkerKey
from everstep.protocol import messages as m
from everstep.protocol import roles
from everstep.protocol.coordinator.job_state import JobState


def refusal(job: JobState, name: str, message: m.AnyMessage) -> str:
    """Why this message may not come over this connection, "" if it may."""
    connection = job.env.connections.get(name)
    if connection is None:
        return ""
    refused = roles.refusal(connection.role, connection.who, message)
    if refused or not isinstance(message, m.FromAgent):
        return refused
    kind, speaker = type(message).__name__, message.agent_id
    match message:
        case m.AgentHello(host=host) if host != speaker:
            return f"expected {kind} from an agent that has its host's name, {speaker!r} named host {host!r}"
        case m.WorkerStarted(worker=life):
            key = WorkerKey(life.worker_id, life.incarnation)
        case m.WorkerExited():
            key = WorkerKey(message.worker_id, message.incarnation)
        case _:
            return ""
    if job.foreign(key, speaker):
        return ""  # it says nothing about the life of that number on another host: its own is to end
    another = spoken_for(job, key, speaker)
    return f"expected {kind} about worker {key} from {another}" if another else ""


def spoken_for(job: JobState, key: WorkerKey, agent_id: str) -> str:
    """Which agent but this one speaks for a life, in words; "" if this one may."""
    worker = job.membership.alive(key)
    if worker is None or worker.agent_id == agent_id:
        return ""
    if worker.agent_id is not None:
        return f"its own agent {worker.agent_id!r}"
    return f"the agent of its host {worker.host!r}" if worker.host not in ("", agent_id) else ""
