"""Whether a client may send a message: by its role, its name, and the lives that the message is about. Pure."""

from __future__ import annotations

from collections.abc import Iterable

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
    if refused or connection.role != roles.AGENT:
        return refused
    speaker = message.agent_id if isinstance(message, m.FromAgent) else None
    for key in _lives(message):
        worker = job.membership.alive(key)
        if speaker is not None and job.foreign(key, speaker):
            continue  # it says nothing about the life of that number on another host: its own is to end
        if worker is None or speaker is None:
            continue
        if worker.agent_id not in (None, speaker):
            return f"expected {type(message).__name__} about worker {key} from its own agent {worker.agent_id!r}"
        if worker.agent_id is None and worker.host and worker.host != _host_of(job, message, speaker):
            return f"expected {type(message).__name__} about worker {key} from an agent of its host {worker.host!r}"
    return ""


def _host_of(job: JobState, message: m.AnyMessage, agent_id: str) -> str:
    """The host of the agent that sends this; "" if it has not said it."""
    known = job.agents.known.get(agent_id)
    return message.host if isinstance(message, m.AgentHello) else known.host if known is not None else ""


def _lives(message: m.AnyMessage) -> Iterable[WorkerKey]:
    """The lives that an agent's message speaks for."""
    match message:
        case m.Heartbeat(workers=said) | m.AgentHello(workers=said):
            return [WorkerKey(life.worker_id, life.incarnation) for life in said]
        case m.WorkerStarted(worker=life):
            return [WorkerKey(life.worker_id, life.incarnation)]
        case m.WorkerExited():
            return [WorkerKey(message.worker_id, message.incarnation)]
    return ()
