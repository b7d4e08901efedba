"""The agents, who supervise the workers of a host; and which slots are wanted, and whose they are. Pure.

A slot's worker id is its number. Agents that start slots of their own are told nothing about them until somebody wants
others; what else a job begins with (`CoordinatorConfig.slots`) is shared out among its agents.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from everstep.base.cause import Cause, Why
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.desk import MILLISECOND_NS, SECOND_NS, Alarm, Desk
from everstep.protocol.coordinator.membership import Membership, Worker
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
        """A sign of life. fixed_interval_ns: how often one is to come; None: every 10 median round trips, within 0.2 to
        5 s."""
        if rtt_ms > 0:
            self._rtts_ms.append(rtt_ms)
        self.detector.heartbeat(now_ns)
        wanted = int(10 * median(self._rtts_ms) * MILLISECOND_NS) if self._rtts_ms else SECOND_NS
        clamped = min(max(wanted, HEARTBEAT_LEAST_NS), HEARTBEAT_MOST_NS)
        self.detector.expect(clamped if fixed_interval_ns is None else fixed_interval_ns)
        self.suspected = False

    def suspect(self) -> bool:
        """It may be silent for good. Returns whether that is new."""
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
        self.known: dict[str, Agent] = {}
        self._desk = desk

    def watch(self, agent_id: str, host: str) -> Agent:
        """The agent of this id; if it was not known, begin to expect its heartbeats."""
        if agent_id in self.known:
            return self.known[agent_id]
        config, now = self._desk.config, self._desk.now
        detector = PhiDetector(
            floor_ns=config.heartbeat_floor_ns,
            ceiling_ns=config.heartbeat_ceiling_ns,
            interval_ns=config.heartbeat_interval_ns or HEARTBEAT_MOST_NS,
            now_ns=now,
        )
        self._desk.alarms.set(Alarm.AGENT, detector.next_change_ns(now), agent_id)
        agent = self.known[agent_id] = Agent(agent_id, host, detector)
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
        del self.known[agent_id]

    def of(self, worker: Worker) -> Agent | None:
        """Who speaks for the worker: the agent that started it, else the only agent of its host."""
        if worker.agent_id is not None:
            return self.known.get(worker.agent_id)
        same_host = [a for a in self.known.values() if worker.host and a.host == worker.host]
        return same_host[0] if len(same_host) == 1 else None

    def run(self, key: WorkerKey) -> bool:
        """Whether any agent runs this process."""
        return any(key in agent.lives for agent in self.known.values())


class Slots:
    """What was asked for, and what came of it.

    target: how many members are wanted. lost: the slots given up for good, with the reason.
    """

    def __init__(self, desk: Desk, membership: Membership, agents: Agents) -> None:
        self.version = 0
        self.target = desk.config.workers
        self.lost: dict[int, str] = {}
        self._desk, self._membership, self._agents = desk, membership, agents
        self._asked: set[int] | None = None  # None: as the agents started them
        self._retiring: set[int] = set()  # not wanted any more, but the worker has not left yet
        self._unwanted: dict[int, Cause] = {}
        self._owners: dict[int, str] = {}

    # ---- what is wanted

    @property
    def as_started(self) -> bool:
        """Whether nobody has ever asked for other slots than those that the agents started with."""
        return self._asked is None

    @property
    def shared_out(self) -> bool:
        """Whether it is said here which agent keeps which slots filled."""
        return self._asked is not None or self._desk.config.slots > 0

    @property
    def least(self) -> int:
        """With how many members the job may run at least."""
        return max(1, self._desk.config.min_workers)

    def ids(self) -> set[int]:
        """The slots that are to be kept filled, those given up included."""
        if self._asked is not None:
            return self._asked
        announced = sum(agent.slots for agent in self._agents.known.values())
        config = self._desk.config
        return set(range(max(config.workers, config.slots, announced))) | set(self._membership.workers)

    def wanted(self, worker_id: int) -> bool:
        return self._asked is None or worker_id in self._asked

    def left(self) -> int:
        """How many slots were not given up."""
        return len(self.ids() - set(self.lost))

    def expected(self) -> int:
        """How many members there can be: the target, less what was given up for good."""
        return min(self.target, self.left())

    def unwanted_for(self, worker_id: int) -> Cause:
        """How it was asked that this slot be no more."""
        return self._unwanted.get(worker_id, Cause.SCALED)

    def want(self, target: int, ids: set[int], why: Why) -> None:
        """Change how many members, and which slots, are wanted."""
        running = {key.worker_id for agent in self._agents.known.values() for key in agent.lives}
        running |= {i for i, worker in self._membership.workers.items() if worker.connection is not None}
        self._retiring = (self._retiring | (self.ids() & running)) - ids
        self.take_wish(target, ids, why.cause)
        self._desk.persist("target", target=target, slots=sorted(ids), cause=why.cause, reason=why.reason)

    def take_wish(self, target: int, ids: set[int], cause: Cause) -> None:
        """What is asked for from now on, or was by a former life of the coordinator."""
        self.version += 1
        self._unwanted |= dict.fromkeys(self.ids() - ids, cause)
        self.target, self._asked = target, set(ids)

    # ---- what became of them

    def runs(self, worker_id: int, agent_id: str) -> None:
        """This agent runs a life of the slot."""
        self._owners[worker_id] = agent_id

    def revive(self, worker_id: int) -> None:
        """The slot has a new life, though it may have been given up."""
        self.version += 1
        self.lost.pop(worker_id, None)

    def empty(self, worker_id: int) -> None:
        """The slot's worker has left."""
        self.version += 1
        self._retiring.discard(worker_id)

    def not_run(self, agent_id: str, running: Iterable[int] = ()) -> None:
        """This agent runs these slots alone, so the workers of its other slots that were to retire have left."""
        left = self._retiring - set(running)
        self._retiring -= {i for i in left if self._owners.get(i) == agent_id}

    def lose(self, worker_id: int, agent_id: str, why: Why) -> bool:
        """An agent gives a slot up. Returns False where that says nothing: it is another's, or given up before."""
        if worker_id in self.lost or self._owners.get(worker_id) not in (None, agent_id):
            return False
        self.version += 1
        self.lost[worker_id] = why.reason
        self._desk.persist("slot_lost", worker_id=worker_id, cause=why.cause, reason=why.reason)
        return True

    def share_out(self, ending: str) -> None:
        """Tell each agent which slots to keep filled, where that is not for the agents themselves to say.

        A slot that is not wanted any more stays in the list until its process has left. After a restart of the
        coordinator the agents come back one by one: what the others run must not be started again at the first.
        ending: the state in which the job is about to end, "" if it is not; where somebody asked for that, nothing is
        started any more.
        """
        if not self.shared_out or self._membership.in_grace:
            return
        agents = [a for _, a in sorted(self._agents.known.items()) if a.connection is not None]
        goes_on = self._asked is None and not ending and all(agent.told_slots for agent in agents)
        owners = [self._owners.get(i) for i in range(self._desk.config.slots)]
        if not agents or (goes_on and all(owner in self._agents.known for owner in owners)):
            return  # a thousand hellos need not share out a thousand slots each
        asked = set(range(self._desk.config.slots)) if self._asked is None else self._asked
        wanted = set() if ending == "interrupted" else (asked | self._retiring) - set(self.lost)
        self._find_owners(wanted, agents)
        for agent in agents:
            ids = sorted(i for i in wanted if self._owners.get(i) == agent.agent_id)
            message = agent.new_slots(ids, [self._membership.next_incarnation(i) for i in ids])
            if message is not None:
                self._desk.send(agent.connection, message)

    def _find_owners(self, wanted: Iterable[int], agents: Sequence[Agent]) -> None:
        """Slots that are no known agent's go to the agent that has the fewest, if it has room."""
        counts = Counter(owner for i in wanted if (owner := self._owners.get(i)) is not None)
        for worker_id in sorted(i for i in wanted if self._owners.get(i) not in self._agents.known):
            free = [a for a in agents if not a.room or counts[a.agent_id] < a.room]
            if not free:
                break
            self._owners[worker_id] = min((counts[a.agent_id], a.agent_id) for a in free)[1]
            counts[self._owners[worker_id]] += 1

    # ---- from the journal

    def replay_lost(self, worker_id: int, reason: str) -> None:
        """A slot that a former life of the coordinator has given up."""
        self.lost[worker_id] = reason

    def restore(self, worker_ids: Iterable[int]) -> None:
        """The slots of all members of the plans in the journal."""
        self._retiring = {i for i in worker_ids if not self.wanted(i)}
