"""Which event, message or alarm leads to which function: everything that can happen to the coordinator. Pure.

Each function takes the state, who it is about, and what came. What is in no table has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.protocol import messages as m
from everstep.protocol.coordinator import (
    alarms,
    commands,
    connections,
    failures,
    health,
    joins,
    links,
    profiling,
    regroup,
    saving,
    speeds,
    switching,
    types,
)
from everstep.protocol.coordinator.state import Agent, State, Worker

# By whoever has just connected, or has done so before: before the end of the job and after it.
FROM_ANYBODY: dict[type, Callable[[State, str, Any], None]] = {
    m.WorkerHello: connections.worker_hello,
    m.AgentHello: health.agent_hello,
    m.Command: commands.command,
}

FROM_AGENTS: dict[type, Callable[[State, Agent, Any], None]] = {
    m.Heartbeat: health.heartbeat,
    m.WorkerStarted: health.worker_started,
    m.WorkerExited: health.worker_exited,
    m.SlotLost: health.slot_lost,
}

# By lives of slots that are the present ones, and not known to be dead.
FROM_WORKERS: dict[type, Callable[[State, Worker, Any], None]] = {
    m.GenerationEntered: switching.entered,
    m.Progress: switching.progressed,
    m.WorkerDone: switching.done,
    m.PeerFault: links.peer_fault,
    m.WorkerHealed: joins.worker_healed,
    m.HealFailed: joins.heal_failed,
    m.WorkerFailed: failures.worker_failed,
    m.SettleAgain: saving.settle_again,
    m.Saved: failures.saved,
    m.Profiled: profiling.profiled,
    m.StoreSet: lambda state, worker, message: state.store.set(message),
}

# By any life, also one that is over: it may be the only one that knows that it was replaced.
FROM_ALL_LIVES: dict[type, Callable[[State, str, Any], None]] = {
    m.StoreGet: lambda state, connection, message: state.store.get(connection, message),
}

BEFORE_A_HELLO: dict[type, Callable[[State, str, Any], None]] = {
    m.WorkerFailed: failures.failed_early,
}

ALARMS: dict[type, Callable[[State, Any], None]] = {
    alarms.AgentDue: health.check_agent,
    alarms.EndDue: saving.ring,
    alarms.FailedDue: failures.ring,
    alarms.GoneDue: health.check_gone,
    alarms.GraceDue: health.end_of_grace,
    alarms.JoinsDue: lambda state, alarm: state.look_again(),
    alarms.LinksDue: links.close_window,
    alarms.QuorumDue: regroup.check_quorum,
    alarms.SpeedsDue: speeds.look,
    alarms.StartDue: lambda state, alarm: state.look_again(),
}


def received(state: State, event: types.Received) -> None:
    """A message came; what it means depends on who sent it."""
    name, message = event.connection, event.message
    connection, kind = state.connections.get(name), type(message)
    if connection is None:
        return
    if kind in FROM_ANYBODY:
        FROM_ANYBODY[kind](state, name, message)
    elif state.ended is not None:
        return
    elif connection.worker is not None and kind in FROM_ALL_LIVES:
        FROM_ALL_LIVES[kind](state, name, message)
    elif connection.worker is not None:
        worker = state.alive(connection.worker)
        if worker is not None and kind in FROM_WORKERS:
            FROM_WORKERS[kind](state, worker, message)
    elif connection.agent_id is not None:
        agent = state.agents.get(connection.agent_id)
        if agent is not None and kind in FROM_AGENTS:
            FROM_AGENTS[kind](state, agent, message)
    elif kind in BEFORE_A_HELLO:
        BEFORE_A_HELLO[kind](state, name, message)
    else:
        state.close(name, f"expected a hello before {kind.__name__}")


EVENTS: dict[type, Callable[[State, Any], None]] = {
    types.Connected: connections.connected,
    types.Received: received,
    types.Disconnected: connections.disconnected,
    types.Tick: lambda state, event: None,
}
