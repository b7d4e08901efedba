"""Which event, message or alarm leads to which function: everything that can happen to the coordinator. Pure.

Each function takes the job, who it is about, and what came. What is in no table has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.protocol import messages as m
from everstep.protocol.coordinator import (
    alarms,
    commands,
    connections,
    evictions,
    joins,
    liveness,
    rebalancing,
    regroup,
    switching,
    types,
)
from everstep.protocol.coordinator.agents import Agent
from everstep.protocol.coordinator.job import JobState
from everstep.protocol.coordinator.membership import Worker

# By whoever has just connected, or has done so before: before the end of the job and after it.
FROM_ANYBODY: dict[type, Callable[[JobState, str, Any], None]] = {
    m.WorkerHello: connections.worker_hello,
    m.AgentHello: liveness.agent_hello,
    m.JobHello: connections.job_hello,
    m.Command: commands.command,
}

FROM_AGENTS: dict[type, Callable[[JobState, Agent, Any], None]] = {
    m.Heartbeat: liveness.heartbeat,
    m.WorkerStarted: liveness.worker_started,
    m.WorkerExited: liveness.worker_exited,
    m.SlotLost: liveness.slot_lost,
    m.HostFailed: liveness.host_failed,
}

# By lives of slots that are the present ones, and not known to be dead.
FROM_WORKERS: dict[type, Callable[[JobState, Worker, Any], None]] = {
    m.GenerationEntered: switching.entered,
    m.Progress: switching.progressed,
    m.WorkerDone: switching.done,
    m.PeerFault: switching.peer_fault,
    m.WorkerHealed: joins.worker_healed,
    m.HealFailed: joins.heal_failed,
    m.WorkerFailed: evictions.worker_failed,
    m.SettleAgain: switching.settle_again,
    m.Saved: evictions.saved,
    m.Profiled: lambda job, worker, message: job.profiling.profiled(worker, message),
    m.StoreSet: lambda job, worker, message: job.store.set(message),
}

# By any life, also one that is over: it may be the only one that knows that it was replaced.
FROM_ALL_LIVES: dict[type, Callable[[JobState, str, Any], None]] = {
    m.StoreGet: lambda job, connection, message: job.store.get(connection, message),
}

BEFORE_A_HELLO: dict[type, Callable[[JobState, str, Any], None]] = {
    m.WorkerFailed: evictions.failed_early,
}

ALARMS: dict[type, Callable[[JobState, Any], None]] = {
    alarms.AgentDue: liveness.agent_due,
    alarms.EndDue: lambda job, alarm: job.saving.time_is_up(),
    alarms.FailedDue: evictions.failed_due,
    alarms.GoneDue: liveness.gone_due,
    alarms.GraceDue: liveness.grace_due,
    alarms.JoinsDue: joins.joins_due,
    alarms.LinksDue: evictions.links_due,
    alarms.QuorumDue: regroup.quorum_due,
    alarms.SpeedsDue: rebalancing.speeds_due,
    alarms.StartDue: regroup.start_due,
}


def received(job: JobState, event: types.Received) -> None:
    """A message came; what it means depends on who sent it."""
    name, message = event.connection, event.message
    connection, kind = job.desk.connections.get(name), type(message)
    if connection is None:
        return
    if kind in FROM_ANYBODY:
        FROM_ANYBODY[kind](job, name, message)
    elif job.progress.ended is not None:
        return
    elif connection.worker is not None and kind in FROM_ALL_LIVES:
        FROM_ALL_LIVES[kind](job, name, message)
    elif connection.worker is not None:
        worker = job.membership.alive(connection.worker)
        if worker is not None and kind in FROM_WORKERS:
            FROM_WORKERS[kind](job, worker, message)
    elif connection.agent_id is not None:
        agent = job.agents.known.get(connection.agent_id)
        if agent is not None and kind in FROM_AGENTS:
            FROM_AGENTS[kind](job, agent, message)
    elif kind in BEFORE_A_HELLO:
        BEFORE_A_HELLO[kind](job, name, message)
    else:
        job.desk.close(name, f"expected a hello before {kind.__name__}")


EVENTS: dict[type, Callable[[JobState, Any], None]] = {
    types.Connected: connections.connected,
    types.Received: received,
    types.Disconnected: connections.disconnected,
    types.Tick: lambda job, event: None,
}
