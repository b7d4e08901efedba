"""Lives of slots and the agents that supervise them. Pure.

A slot's worker id is its number. Agents that start their own slots are told nothing about them until a user asks
for others. The slots that a job begins with (`CoordinatorConfig.slots`) are shared out among its agents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Literal

from everstep.base.cause import Cause, Why
from everstep.base.domains import Domains, ordered
from everstep.base.errors import check
from everstep.base.plan import Member, WorkerKey
from everstep.protocol.coordinator.closed import ClosedDoors
from everstep.protocol.coordinator.environment import MILLISECOND_NS, SECOND_NS, Alarm, Environment
from everstep.protocol.coordinator.likeness import Likeness
from everstep.protocol.coordinator.whereabouts import Whereabouts
from everstep.protocol.detector import PhiDetector
from everstep.protocol.messages import AgentHello, SetSlots, WorkerHello, WorkerLife, WorkerPulse

GRACE_MOST = 30
"""Longest time for all workers to come back, in multiples of the grace period, while some keep coming."""

Draining = Literal["no", "wished", "asked", "emptied", "told", "refused"]


@dataclass
class Worker:
    """The newest life of a slot.

    pids: of its cell, the head's first. member: from its hello (or the journal), None before; greeted: it said hello
    to this coordinator. gone_ns: when its connection ended, None while connected or before the first hello.
    ordered_ns: when it last got a plan or a ticket. state_bytes: size of the state that it would have to copy, -1 if
    unknown. seen_ns: when its agent last saw it, 0 if never.
    """

    key: WorkerKey
    pids: tuple[int, ...] = (0,)
    host: str = ""
    agent_id: str | None = None
    member: Member | None = None
    connection: str | None = None
    greeted: bool = False
    gone_ns: int | None = None
    ordered_ns: int = 0
    suspected: bool = False
    step: int = 0
    samples_per_s: float = 0.0
    state_bytes: int = -1
    seen_ns: int = 0

    @property
    def pid(self) -> int:
        return self.pids[0]

    @property
    def named(self) -> dict[str, int]:
        """Fields of events that name this life and its process."""
        return {"worker_id": self.key.worker_id, "incarnation": self.key.incarnation, "pid": self.pid}

    @property
    def ready(self) -> bool:
        return self.member is not None and self.connection is not None

    def greet(self, connection: str, hello: WorkerHello) -> None:
        """The worker has said hello over this connection: it is ready, or back."""
        known = () if self.member is None else self.member.domains  # as a journal says: it is not for workers to say
        said = hello.member
        self.member = said if said.domains == known else replace(said, domains=known)
        self.connection = connection
        self.gone_ns, self.greeted = None, True
        self.pids, self.host = said.pids, said.host
        self.state_bytes = hello.state_bytes
        self.reached(hello.step)

    def leave(self, now_ns: int) -> None:
        """Its connection has ended, or is overdue."""
        self.connection, self.gone_ns = None, now_ns

    def restore(self, member: Member, agent_id: str | None) -> None:
        """Take facts about the worker from a plan, as far as it has not told them itself."""
        self.member = self.member or member
        self.pids, self.host = member.pids, member.host
        self.agent_id = self.agent_id or agent_id

    def started(self, agent_id: str, life: WorkerLife, now_ns: int) -> None:
        """An agent says that it runs the worker; only the next pulses show whether it also sees it."""
        self.agent_id, self.pids = agent_id, (life.pid, *life.limbs)
        self.seen_ns = now_ns if self.seen_ns else 0

    def pulse(self, pulse: WorkerPulse, now_ns: int) -> None:
        """Its agent has seen the worker and reports its progress."""
        self.seen_ns, self.step, self.samples_per_s = now_ns, pulse.step, pulse.samples_per_s

    def reached(self, step: int) -> None:
        """The worker has committed this step; a late report changes nothing."""
        self.step = max(self.step, step)

    def healed(self, step: int) -> None:
        """The worker follows the members from this step on."""
        self.step = step

    def ordered(self, now_ns: int) -> None:
        self.ordered_ns = now_ns

    def suspect(self, in_trouble: bool = True) -> bool:
        """Note whether the worker may be in trouble. Returns whether that is news."""
        known, self.suspected = self.suspected, in_trouble
        return in_trouble and not known

    def pardon(self, gap_ns: int) -> None:
        """The coordinator was away for this long: that was no silence of the worker."""
        self.gone_ns = None if self.gone_ns is None else self.gone_ns + gap_ns
        self.seen_ns += gap_ns if self.seen_ns else 0


class Grace:
    """Time in which the workers of a journal may come back. until_ns: its end, 0 if there is none."""

    def __init__(self, env: Environment) -> None:
        self.until_ns = 0
        self._env = env
        self._since_ns = 0
        self._absent_since_ns: int | None = None  # it goes on: all who hold the state have yet to come back

    def begin(self) -> None:
        self._since_ns = self._env.now
        self.until_ns = self._env.now + self._env.config.hosts.grace_ns
        self._env.alarms.set(Alarm.GRACE, self.until_ns)

    def go_on(self) -> None:
        """Another worker has come back: thousands cannot do so at once, so the others get the same time again, up to
        `GRACE_MOST` grace periods in total."""
        if self._env.now < self.until_ns:
            grace_ns = self._env.config.hosts.grace_ns
            self.until_ns = max(self.until_ns, min(self._env.now + grace_ns, self._since_ns + GRACE_MOST * grace_ns))

    def waited_ns(self) -> int:
        """Time by which grace has been prolonged; the first call starts the count."""
        if self._absent_since_ns is None:
            self._absent_since_ns = self._env.now
        return self._env.now - self._absent_since_ns

    def pardon(self, gap_ns: int) -> None:
        """The coordinator was away for this long: nobody could come back."""
        if self.until_ns:
            self.until_ns, self._since_ns = self.until_ns + gap_ns, self._since_ns + gap_ns
        if self._absent_since_ns is not None:
            self._absent_since_ns += gap_ns

    def end(self) -> None:
        self._env.change()
        self.until_ns, self._absent_since_ns = 0, None


class Membership:
    """The newest lives; and fences, so that messages of older lives have no effect.

    workers: the newest life of each slot that has one, by worker id. came: the slots that have said hello to this
    life of the coordinator, living or not. likeness: the numerics and code that all of them must share.
    """

    def __init__(self, env: Environment) -> None:
        self.grace = Grace(env)
        self.workers: dict[int, Worker] = {}
        self._env = env
        self._fenced: dict[int, int] = {}  # worker id -> newest incarnation that is over
        self._fenced_for: dict[int, Cause] = {}
        self._fenced_again: dict[int, bool] = {}
        self.came: set[int] = set()
        self._to_come: dict[int, Worker] = {}  # at least all who live and have not said hello
        self.likeness = Likeness(env)

    def alive(self, key: WorkerKey) -> Worker | None:
        """The worker of this life, if the life is its slot's present one and not known to be dead."""
        worker = self.workers.get(key.worker_id)
        return worker if worker is not None and worker.key == key else None

    def living(self, keys: Iterable[WorkerKey]) -> list[Worker]:
        """The workers of those of these lives that are present, in this order."""
        return [worker for key in keys if (worker := self.alive(key)) is not None]

    def newer(self, key: WorkerKey) -> bool:
        """Whether a newer life of the same slot is known."""
        known = self.workers.get(key.worker_id)
        return known is not None and known.key.incarnation > key.incarnation

    def next_incarnation(self, worker_id: int) -> int:
        """The least incarnation that this slot's next life may have, by the lives known here."""
        known, fenced = self.workers.get(worker_id), self._fenced.get(worker_id, -1)
        return 1 + (fenced if known is None else max(fenced, known.key.incarnation))

    def add(self, key: WorkerKey, host: str = "") -> Worker:
        """Add a new life of a slot that had none, or whose last one is over."""
        self._env.change()
        worker = self.workers[key.worker_id] = Worker(key, host=host)
        self._to_come[key.worker_id] = worker
        return worker

    def greet(self, worker: Worker, connection: str, hello: WorkerHello, *, awaited: bool) -> None:
        """A worker has said hello. awaited: a decision may wait for it."""
        if awaited:
            self._env.change()
        if not worker.greeted:
            self.grace.go_on()
            self._to_come.pop(worker.key.worker_id, None)
        self.came.add(worker.key.worker_id)
        worker.greet(connection, hello)

    def left(self, worker: Worker, *, awaited: bool) -> None:
        """A worker's connection has ended. awaited: a decision may depend on its presence."""
        if awaited:
            self._env.change()
        worker.leave(self._env.now)

    def remove(self, key: WorkerKey, why: Why, *, again: bool = False) -> None:
        """This life is over. Messages of it, or of an older life of its slot, have no effect from here on. again: as of
        `KillWorker`."""
        self._env.change()
        del self.workers[key.worker_id]
        self._to_come.pop(key.worker_id, None)
        check(not self.is_fenced(key), f"worker {key} is fenced twice")
        self._fenced[key.worker_id], self._fenced_for[key.worker_id] = key.incarnation, why.cause
        self._fenced_again[key.worker_id] = again
        more = {"again": True} if again else {}
        self._env.persist("evict", **asdict(key), cause=why.cause, reason=why.reason, **more)

    def is_fenced(self, key: WorkerKey) -> bool:
        """Whether this life, or a newer one of its slot, was declared over."""
        return key.incarnation <= self._fenced.get(key.worker_id, -1)

    def fenced_for(self, worker_id: int) -> Cause:
        """Cause with which the newest finished life of this slot was declared over."""
        return self._fenced_for.get(worker_id, Cause.UNKNOWN)

    def fenced_again(self, worker_id: int) -> bool:
        """Whether the newest finished life of this slot ended with another part of its worker."""
        return self._fenced_again.get(worker_id, False)

    # ---- from the journal

    def restore(self, member: Member, agent_id: str | None) -> None:
        """Assume that a member of a plan lives, until a grace period has passed without a hello."""
        if not self.is_fenced(member.key) and not self.newer(member.key):
            (self.alive(member.key) or self.add(member.key)).restore(member, agent_id)

    def replay_evict(self, key: WorkerKey, cause: Cause, *, again: bool) -> None:
        """An earlier life of the coordinator declared this life over."""
        self._fenced[key.worker_id] = max(key.incarnation, self._fenced.get(key.worker_id, -1))
        self._fenced_for[key.worker_id], self._fenced_again[key.worker_id] = cause, again
        worker = self.workers.get(key.worker_id)
        if worker is not None and self.is_fenced(worker.key):
            del self.workers[key.worker_id]

    def keep_only(self, keys: Container[WorkerKey]) -> None:
        self.workers = {i: worker for i, worker in self.workers.items() if worker.key in keys}

    # ---- time to come back

    @property
    def in_grace(self) -> bool:
        return self._env.now < self.grace.until_ns

    def to_come(self) -> Iterator[Worker]:
        """Workers that presumably live, and have not said hello to this life of the coordinator."""
        return (w for w in self._to_come.values() if not w.greeted and self.workers.get(w.key.worker_id) is w)


HEARTBEAT_LEAST_NS = SECOND_NS // 5
HEARTBEAT_MOST_NS = 5 * SECOND_NS
GONE_MOST = 100


@dataclass
class Agent:
    """The supervisor of one host's workers.

    lives: the processes that it runs, as it last said; restored: those that it ran according to the journal, until
    it says hello to this life of the coordinator. slots: how many it started by itself; room: how many it has room
    for, 0: no limit. process: id of its process, so that a new one is told apart. left_ns: when its connection
    ended, None while it has one or before its first. about: facts about its host, as it said. drained: whether it
    wishes to leave, has to leave when its workers have, has none any more, or was told to leave. sent_slots: the slots
    that it was told to keep filled, None: none was sent.
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
    left_ns: int | None = None
    about: dict[str, str] = field(default_factory=dict)
    drained: Draining = "no"
    sent_slots: list[int] | None = None
    _rtts_ms: deque[float] = field(default_factory=lambda: deque(maxlen=31))
    _killed_ns: dict[WorkerKey, int] = field(default_factory=dict)

    def greet(self, connection: str, hello: AgentHello, now_ns: int) -> None:
        self.connection, self.left_ns = connection, None
        self.host, self.slots = hello.host, hello.slots
        self.room, self.process, self.about = hello.room, hello.process, hello.about
        self.sent_slots = None
        self._killed_ns.clear()
        self.detector.resume(now_ns)

    def relist(self) -> set[WorkerKey]:
        """Empty the list of its processes, which the agent is about to send again. Returns the processes it was
        known to run."""
        before = self.believed
        self.lives, self.restored = set(), set()
        return before

    def leave(self, now_ns: int) -> None:
        self.connection, self.left_ns = None, now_ns

    def drain(self, state: Draining) -> None:
        """Set whether the agent has to give up its slots, or may have some (again)."""
        self.drained = state

    @property
    def draining(self) -> bool:
        """Whether the agent has to give up its slots."""
        return self.drained in ("asked", "emptied", "told")

    @property
    def rtt_ms(self) -> float:
        """Median of its last round trips in ms, 0 if none is known."""
        return round(median(self._rtts_ms), 3) if self._rtts_ms else 0.0

    def away_ns(self, now_ns: int) -> int | None:
        """Time since its connection ended; None if it has one, or never had."""
        return None if self.left_ns is None else now_ns - self.left_ns

    def pardon(self, gap_ns: int, now_ns: int) -> None:
        """The coordinator was away for this long: that was no silence of the agent. The agent may have sent
        heartbeats meanwhile that were not read yet."""
        self.detector.pardon(gap_ns)
        self.left_ns = None if self.left_ns is None else now_ns

    def restore(self, key: WorkerKey) -> None:
        """According to the journal the agent ran this process."""
        self.restored.add(key)

    @property
    def believed(self) -> set[WorkerKey]:
        """Lives that the agent presumably runs."""
        return self.lives | self.restored

    def runs(self, key: WorkerKey) -> None:
        self.lives.add(key)

    def exited(self, key: WorkerKey) -> None:
        self.lives.discard(key)
        self.restored.discard(key)
        self._killed_ns.pop(key, None)

    def heartbeat(self, now_ns: int, rtt_ms: float, fixed_interval_ns: int | None, waited_ns: int = 0) -> None:
        """A heartbeat. fixed_interval_ns: time between heartbeats; None: 10 median round trips, within 0.2 to 5 s.
        waited_ns: time that the agent has waited for a processor since the last one."""
        if rtt_ms > 0:
            self._rtts_ms.append(rtt_ms)
        self.detector.heartbeat(now_ns, waited_ns)
        wanted = int(10 * median(self._rtts_ms) * MILLISECOND_NS) if self._rtts_ms else SECOND_NS
        clamped = min(max(wanted, HEARTBEAT_LEAST_NS), HEARTBEAT_MOST_NS)
        self.detector.expect(clamped if fixed_interval_ns is None else fixed_interval_ns)

    def may_kill(self, key: WorkerKey, now_ns: int, again_ns: int) -> bool:
        """Whether to ask the agent to kill a process: not again within `again_ns`. Notes the request."""
        last = self._killed_ns.get(key)
        if self.connection is None or (last is not None and now_ns - last < again_ns):
            return False
        self._killed_ns[key] = now_ns
        return True

    def lets_go(self, key: WorkerKey, now_ns: int) -> bool:
        """Whether a process of a life that is over gets time to leave by itself: only the first time that it is seen
        to run."""
        first = key not in self._killed_ns
        self._killed_ns.setdefault(key, now_ns)
        return first

    def new_slots(self, ids: list[int], first: list[int], ranks: Iterable[int] = ()) -> SetSlots:
        """The message with the slots to keep filled, and the least incarnation of each slot's next life. ranks: as the
        message has them."""
        self.sent_slots = ids
        return SetSlots(worker_ids=ids, first=first, ranks=list(ranks), drained=self.draining)

    def repeat_slots(self) -> None:
        """Send the agent its slots again: a worker may have left as once asked while its slot is wanted again, or no
        other one is to be started."""
        self.sent_slots = None


class Agents:
    """All agents whose heartbeats are expected, by id. leaving: those that wish to leave, or were drained. gone: the
    last of those that were given up and have not come back."""

    def __init__(self, env: Environment) -> None:
        self.version = 0
        self.known: dict[str, Agent] = {}
        self.gone: dict[str, Agent] = {}
        self.whereabouts = Whereabouts(env)
        self.closed = ClosedDoors()
        self._env = env
        self.leaving: set[str] = set()
        self._drained: dict[str, str] = {}  # agent id -> the process that was drained; a new one may come

    def watch(self, agent_id: str, host: str) -> Agent:
        """The agent of this id; the first call starts to expect its heartbeats."""
        if agent_id in self.known:
            return self.known[agent_id]
        config, now = self._env.config, self._env.now
        detector = PhiDetector(
            floor_ns=config.heartbeat_floor_ns,
            ceiling_ns=config.heartbeat_ceiling_ns,
            interval_ns=config.heartbeat_interval_ns or HEARTBEAT_MOST_NS,
            now_ns=now,
        )
        self._env.alarms.set(Alarm.AGENT, detector.next_change_ns(now), agent_id)
        agent = self.known[agent_id] = Agent(agent_id, host, detector)
        self.gone.pop(agent_id, None)
        return agent

    def greet(self, agent: Agent, connection: str, hello: AgentHello) -> None:
        self.version += 1
        if agent.left_ns is not None:
            self._env.change()
        self.whereabouts.greet(agent.agent_id, hello.domains)
        agent.greet(connection, hello, self._env.now)
        agent.drain("asked" if self._drained.get(agent.agent_id) == hello.process else "no")
        if agent.draining:
            self.leaving.add(agent.agent_id)

    def wish(self, agent: Agent) -> None:
        """An agent wishes to leave; whether it may is decided when its slots are known."""
        self._env.change()
        agent.drain(agent.drained if agent.draining else "wished")
        self.leaving.add(agent.agent_id)

    def drain(self, agent: Agent, why: Why) -> None:
        """An agent has to give up all slots; a restart of the coordinator does not change that."""
        self.version += 1
        self.replay_drained(agent.agent_id, agent.process)
        self.leaving.add(agent.agent_id)
        agent.drain("asked")
        agent.repeat_slots()
        self._env.persist("drained", agent_id=agent.agent_id, process=agent.process, cause=why.cause, reason=why.reason)

    def replay_drained(self, agent_id: str, process: str) -> None:
        """This process of an agent was drained, in this or an earlier life of the coordinator."""
        self._drained[agent_id] = process

    def exited(self, agent: Agent, key: WorkerKey) -> None:
        self.version += 1
        agent.exited(key)

    def remove(self, agent_id: str) -> None:
        """An agent is given up because it is silent."""
        self.version += 1
        agent = self._forget(agent_id)
        self.whereabouts.give_up(agent_id, agent.host, {name: other.detector for name, other in self.known.items()})

    def refuse(self, agent: Agent) -> None:
        """An agent does not take part, because its host does not fit the job."""
        self.version += 1
        agent.drain("refused")
        self._forget(agent.agent_id)

    def _forget(self, agent_id: str) -> Agent:
        agent = self.gone[agent_id] = self.known.pop(agent_id)
        if len(self.gone) > GONE_MOST:
            del self.gone[next(iter(self.gone))]
        return agent

    def of(self, worker: Worker) -> Agent | None:
        """The agent that speaks for the worker: the one that started it, else the only agent of its host."""
        if worker.agent_id is not None:
            return self.known.get(worker.agent_id)
        same_host = [a for a in self.known.values() if worker.host and a.host == worker.host]
        return same_host[0] if len(same_host) == 1 else None

    def shown_name(self, agent: Agent) -> str:
        """The agent's name for people: the job's own host is known by its address, and shown by its name, unless
        another host has that name."""
        node = agent.about.get("node", "")
        if not node or agent.agent_id != agent.about.get("address"):
            return agent.agent_id
        others = [other for other in {**self.gone, **self.known}.values() if other is not agent]
        return agent.agent_id if any(node in (o.agent_id, o.about.get("node")) for o in others) else node

    def names(self, agent_ids: Iterable[str]) -> list[str]:
        """Names of these agents for people, also of those that are gone."""
        found = ((i, self.known.get(i) or self.gone.get(i)) for i in agent_ids)
        return [i if agent is None else self.shown_name(agent) for i, agent in found]

    def shown_host(self, worker: Worker) -> str:
        """The name of the worker's host for people."""
        agent = self.of(worker)
        return worker.host if agent is None else self.shown_name(agent)

    def domains(self, worker: Worker) -> Domains:
        """Failure domains of a worker: those that its host's agent has said, else those in a plan."""
        agent = self.of(worker)
        labels = None if agent is None else self.whereabouts.labels.get(agent.agent_id)
        if labels is None and worker.member is not None:
            labels = dict(worker.member.domains)
        return ordered(labels or {}, worker.host, self._env.config.hosts.gpu(worker.key.worker_id))

    def out_of_touch(self, worker: Worker) -> bool:
        """Whether the worker's host lost all connections so recently that it may be dead or alive, or is in doubt:
        no decision may count on it."""
        agent = self.of(worker)
        if agent is not None and self.whereabouts.in_doubt(agent.agent_id):
            return True
        away = None if agent is None or worker.connection is not None else agent.away_ns(self._env.now)
        return away is not None and away < self._env.config.hosts.reconnect_ns

    def run(self, key: WorkerKey) -> bool:
        return any(key in agent.believed for agent in self.known.values())
