"""What passes between the job's process and its agents without the coordinator deciding anything.

Apart from `coordinator_main`, which has the sockets. Pure but for that: what came in, what goes out.
"""

from __future__ import annotations

from everstep.base.cause import Cause
from everstep.protocol.messages import (
    AgentCount,
    AgentHello,
    AgentNotice,
    AgentRefused,
    AnyMessage,
    JobFacts,
    JobHello,
    Ping,
    Pong,
)

Sends = list[tuple[str, AnyMessage]]


class Switchboard:
    """Knows which connections are agents' and which the job's. facts: what agents are told."""

    def __init__(self, facts: JobFacts) -> None:
        self._facts = facts
        self._jobs: set[str] = set()
        self._agents: dict[str, AgentHello] = {}

    def take(self, connection: str, message: AnyMessage) -> tuple[Sends, bool]:
        """A message came. Returns what to send to which connections, and whether it is for the coordinator too."""
        match message:
            case Ping(seq=seq):
                return [(connection, Pong(seq=seq))], False
            case AgentNotice():
                return [(job, message) for job in sorted(self._jobs)], False
            case JobHello():
                self._jobs.add(connection)
                return [(connection, self._present())], True
            case AgentHello():
                return self._agent_hello(connection, message)
        return [], True

    def gone(self, connection: str) -> Sends:
        """A connection has ended."""
        self._jobs.discard(connection)
        return self._tell() if self._agents.pop(connection, None) is not None else []

    def _agent_hello(self, connection: str, hello: AgentHello) -> tuple[Sends, bool]:
        for other in self._agents.values():
            if other.agent_id == hello.agent_id and other.process != hello.process:
                text = (
                    f"another agent of this job is called {hello.agent_id!r} (process {other.process.partition('-')[0]}"
                    " of its host): give one of them another --host-name"
                )
                return [(connection, AgentRefused(cause=Cause.CONFIG, reason=text))], False
        self._agents[connection] = hello
        return [(connection, self._facts), *self._tell()], True

    def _tell(self) -> Sends:
        return [(job, self._present()) for job in sorted(self._jobs)]

    def _present(self) -> AgentCount:
        return AgentCount(agent_ids=sorted({hello.agent_id for hello in self._agents.values()}))
