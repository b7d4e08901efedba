"""The agents: who supervises the workers of a host, and what each has said. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.alarms import AgentDue
from everstep.protocol.coordinator.desk import MILLISECOND_NS, SECOND_NS, Desk
from everstep.protocol.coordinator.membership import Worker
from everstep.protocol.detector import PhiDetector
from everstep.protocol.messages import AgentHello, SetSlots

HEARTBEAT_LEAST_NS = SECOND_NS // 5
HEARTBEAT_MOST_NS = 5 * SECOND_NS


@dataclass
class Agent:
    """The supervisor of one host's workers.

    lives: the processes it runs, as it last said; restored: those that it ran according to the journal, until it says
    hello to this life of the coordinator. slots: how many it started by itself; room: for how many there is room, 0 if
    that does not matter. process: which one it is, so that a new one is told apart. killed_ns: when it was last asked
    to kill whom.
    """

    agent_id: str
    host: str
    detector: PhiDetector
    connection: str | None = None
    lives: set[WorkerKey] = field(default_factory=set)
    restored: set[WorkerKey] = field(default_factory=set)
    slots: int = 0
    room: int = 0
    process: str = ""
    suspected: bool = False
    _sent_slots: list[int] | None = None
    _rtts_ms: deque[float] = field(default_factory=lambda: deque(maxlen=31))
    _killed_ns: dict[WorkerKey, int] = field(default_factory=dict)

    def greet(self, connection: str, hello: AgentHello, now_ns: int) -> None:
        """The agent has connected (again) and said hello."""
        self.connection, self.host, self.slots = connection, hello.host, hello.slots
        self.room, self.process = hello.room, hello.process
        self._sent_slots, self.suspected = None, False
        self._killed_ns.clear()
        self.detector.resume(now_ns)

    def relist(self) -> set[WorkerKey]:
        """Empty the list of its processes, which it is about to give anew. Returns whom it was known to run."""
        before = self.lives | self.restored
        self.lives, self.restored = set(), set()
        return before

    def leave(self) -> None:
        """The agent's connection has ended."""
        self.connection = None

    def restore(self, key: WorkerKey, *, first: bool) -> None:
        """According to the journal it ran this process; `first`: the first of which that is known."""
        self.restored.add(key)
        if first:
            self.lives.add(key)

    def runs(self, key: WorkerKey) -> None:
        """It says that it runs this process."""
        self.lives.add(key)

    def exited(self, key: WorkerKey) -> None:
        """It says that this process is dead."""
        self.lives.discard(key)
        self._killed_ns.pop(key, None)

    def heartbeat(self, now_ns: int, rtt_ms: float, fixed_interval_ns: int | None) -> None:
        """A sign of life. fixed_interval_ns: how often one is to come; None: that goes by the round trips."""
        if rtt_ms > 0:
            self._rtts_ms.append(rtt_ms)
        self.detector.heartbeat(now_ns)
        self.detector.expect(fixed_interval_ns if fixed_interval_ns is not None else self._expected_interval_ns())
        self.suspected = False

    def _expected_interval_ns(self) -> int:
        """Heartbeats come every 10 median round trips, within 0.2 to 5 s."""
        if not self._rtts_ms:
            return SECOND_NS
        wanted = int(10 * median(self._rtts_ms) * MILLISECOND_NS)
        return min(max(wanted, HEARTBEAT_LEAST_NS), HEARTBEAT_MOST_NS)

    def suspect(self) -> bool:
        """The agent may be silent for good. Returns whether that is new."""
        known, self.suspected = self.suspected, True
        return not known

    def may_kill(self, key: WorkerKey, now_ns: int, again_ns: int) -> bool:
        """Whether to ask it to kill a process: not again before `again_ns` have passed. Notes that it is asked now."""
        last = self._killed_ns.get(key)
        if self.connection is None or (last is not None and now_ns - last < again_ns):
            return False
        self._killed_ns[key] = now_ns
        return True

    def lets_go(self, key: WorkerKey, now_ns: int) -> bool:
        """Whether a process that is over gets time to leave by itself: the first time that it is seen to run still."""
        first = key not in self._killed_ns
        self._killed_ns.setdefault(key, now_ns)
        return first

    @property
    def told_slots(self) -> bool:
        """Whether it knows which slots to keep filled."""
        return self._sent_slots is not None

    def new_slots(self, ids: list[int], first: list[int]) -> SetSlots | None:
        """The message about the slots that it is to keep filled, with the least incarnation that a next life of each
        may have; None if it knows these slots."""
        if self._sent_slots == ids:
            return None
        self._sent_slots = ids
        return SetSlots(worker_ids=ids, first=first)

    def repeat_slots(self) -> None:
        """Tell it its slots again: a worker may have left as once asked, and its slot be wanted by now."""
        self._sent_slots = None


class Agents:
    """All agents whose heartbeats are expected, by id."""

    def __init__(self, desk: Desk) -> None:
        self.version = 0
        self._desk = desk
        self._agents: dict[str, Agent] = {}

    @property
    def known(self) -> Mapping[str, Agent]:
        """All agents, by id."""
        return self._agents

    def watch(self, agent_id: str, host: str) -> Agent:
        """The agent of this id; if it was not known, begin to expect its heartbeats."""
        known = self._agents.get(agent_id)
        if known is not None:
            return known
        config, now = self._desk.config, self._desk.now
        detector = PhiDetector(
            floor_ns=config.heartbeat_floor_ns,
            ceiling_ns=config.heartbeat_ceiling_ns,
            interval_ns=config.heartbeat_interval_ns or HEARTBEAT_MOST_NS,
            now_ns=now,
        )
        self._desk.alarms.set(AgentDue(agent_id), detector.next_change_ns(now))
        agent = self._agents[agent_id] = Agent(agent_id, host, detector)
        return agent

    def greet(self, agent: Agent, connection: str, hello: AgentHello) -> None:
        """An agent has said hello."""
        self.version += 1
        agent.greet(connection, hello, self._desk.now)

    def exited(self, agent: Agent, key: WorkerKey) -> None:
        """An agent says that this process is dead."""
        self.version += 1
        agent.exited(key)

    def remove(self, agent_id: str) -> None:
        """An agent is given up."""
        self.version += 1
        del self._agents[agent_id]

    def of(self, worker: Worker) -> Agent | None:
        """Who speaks for the worker: the agent that started it, else the only agent of its host."""
        if worker.agent_id is not None:
            return self._agents.get(worker.agent_id)
        same_host = [a for a in self._agents.values() if worker.host and a.host == worker.host]
        return same_host[0] if len(same_host) == 1 else None

    def run(self, key: WorkerKey) -> bool:
        """Whether any agent runs this process."""
        return any(key in agent.lives for agent in self._agents.values())
