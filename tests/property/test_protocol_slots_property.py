"""Slots that move between agents: no life of a slot is started twice, and none that is fenced from the beginning."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from everstep.base.plan import WorkerKey
from everstep.protocol import messages as m

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "protocol"))
from coordinator_harness import S, World, drop, member

from sampling import examples

SLOTS = 3
NAMES = ("a", "b", "c")


@dataclass
class AgentModel:
    """An agent's process as the coordinator meets it: it counts incarnations for itself, from what it is told.

    told: it knows its slots as they are since it connected; before, it may start what is another's by now. drained: it
    was asked to say when nothing runs, and has not answered.
    """

    name: str  # also of its connection
    process: str
    room: int
    wanted: list[int] = field(default_factory=list)
    following: dict[int, int] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)
    connected: bool = True
    told: bool = False
    drained: bool = False


class Model:
    """A coordinator, its agents, and all lives that were ever started.

    seen: those of which an agent began to speak while it was told of its slots, or that were believed. What it counts
    for itself meanwhile nobody can know: that may be the number of a life elsewhere, and must not be taken for it
    (`believed`).
    """

    def __init__(self) -> None:
        self.world = World(workers=SLOTS, slots=SLOTS, heartbeat_ceiling_ns=5 * S)
        self.agents: dict[str, AgentModel] = {}
        self.seen: set[WorkerKey] = set()
        self.believed: dict[WorkerKey, str] = {}
        self.processes = 0
        self.read = 0

    def act(self, what: str, name: str, worker_id: int) -> None:
        agent = self.agents.get(name)
        if what == "join" and agent is None:
            self.join(name, room=worker_id)
        elif what == "wait":
            self.world.wait((4 + 300 * worker_id) * S)
        elif what == "die" and agent is not None:
            del self.agents[name]
            self.cut(agent)
        elif what == "exit" and agent is not None and worker_id in agent.lives:
            self.exit(agent, worker_id)
        elif what == "hello" and agent is not None and worker_id in agent.lives:
            self.hello(agent, worker_id)
        elif what == "drain":
            self.world.command("drain", host=name)
        elif what == "scale":
            self.world.command("scale", workers=1 + worker_id)
        elif what == "leave" and agent is not None and agent.connected:
            self.world.say(agent.name, m.HostLeaving(agent_id=name))
        elif what == "cut" and agent is not None:
            self.cut(agent)
        elif what == "again" and agent is not None:
            drop(self.world, agent.name)
            self.greet(agent)
        elif what == "restart":
            self.world, self.read = self.world.restart(), 0
            for one in self.agents.values():
                one.connected = False
        self.deliver()

    def cut(self, agent: AgentModel) -> None:
        """Nothing of its host is heard any more."""
        agent.connected = False
        drop(self.world, agent.name)
        for i, incarnation in agent.lives.items():
            drop(self.world, _connection(agent, i, incarnation))

    def join(self, name: str, room: int) -> None:
        self.processes += 1
        self.agents[name] = AgentModel(name, str(self.processes), room)
        self.greet(self.agents[name])

    def greet(self, agent: AgentModel) -> None:
        """It connects (again), and says what it runs."""
        agent.connected, agent.told = True, False
        lives = [m.WorkerLife(worker_id=i, incarnation=n, pid=1) for i, n in sorted(agent.lives.items())]
        self.world.connect(agent.name, "agent")
        about = {"slots": len(agent.wanted), "room": agent.room, "process": agent.process}
        self.world.say(agent.name, m.AgentHello(agent_id=agent.name, host=agent.name, workers=lives, **about))

    def hello(self, agent: AgentModel, worker_id: int) -> None:
        """A worker connects (again)."""
        name = _connection(agent, worker_id, agent.lives[worker_id])
        drop(self.world, name)
        self.world.connect(name, "worker")
        self.world.say(name, m.WorkerHello(member=member(worker_id, agent.lives[worker_id], agent.name), step=0))

    def exit(self, agent: AgentModel, worker_id: int, in_order: bool = False) -> None:
        incarnation = agent.lives.pop(worker_id)
        if agent.connected:
            drop(self.world, _connection(agent, worker_id, incarnation))
            self.world.exited(worker_id, incarnation, agent=agent.name, in_order=in_order)

    def kill(self, agent: AgentModel, message: m.KillWorker) -> None:
        if agent.lives.get(message.worker_id) == message.incarnation:
            self.exit(agent, message.worker_id)

    def dismiss(self, connection: str, drained: bool) -> None:
        """A worker is to go; one that has left in order is not started again, unless the agent is told so."""
        for agent in self.agents.values():
            for i, incarnation in list(agent.lives.items()):
                if _connection(agent, i, incarnation) == connection:
                    agent.wanted = [one for one in agent.wanted if one != i or not drained]
                    self.exit(agent, i, in_order=drained)

    def deliver(self) -> None:
        """What the coordinator has said to agents; and what they start because of that, or again of what was ended."""
        again = True
        while True:
            fresh, self.read = self.world.sent[self.read :], len(self.world.sent)
            for to, message in fresh:
                agent = next((a for a in self.agents.values() if a.name == to), None)
                if agent is not None and isinstance(message, m.SetSlots):
                    agent.wanted, agent.told = [] if message.drained else message.worker_ids, True
                    agent.drained = message.drained
                    for i, first in zip(message.worker_ids, message.first, strict=True):
                        agent.following[i] = max(first, agent.following.get(i, 0))
                elif agent is not None and isinstance(message, m.KillWorker):
                    self.kill(agent, message)
                elif isinstance(message, m.Dismissed):
                    self.dismiss(to, message.drained)
                elif agent is not None and isinstance(message, m.HostDismissed):
                    assert not agent.lives, "whose workers run does not leave"
                    drop(self.world, agent.name)
                    del self.agents[agent.name]
            self.look()
            some = [agent for agent in self.agents.values() if agent.told or again]
            waiting = [(agent, i) for agent in some for i in agent.wanted if i not in agent.lives]
            started, again = [self.start(*one) for one in waiting], False
            empty = [one for one in self.agents.values() if one.connected and one.drained and not one.lives]
            for agent in empty:
                agent.drained = False
                self.world.say(agent.name, m.HostEmptied(agent_id=agent.name))
            if not fresh and not started and not empty:
                return

    def start(self, agent: AgentModel, worker_id: int) -> None:
        key = WorkerKey(worker_id, agent.following[worker_id])
        agent.following[worker_id] += 1
        agent.lives[worker_id] = key.incarnation
        membership = self.world.coordinator.job.membership
        if agent.connected and agent.told:
            assert not membership.is_fenced(key), f"{key} is fenced"
        if agent.connected:
            self.world.started(worker_id, key.incarnation, agent=agent.name)
            worker = membership.workers.get(worker_id)
            if agent.told or (worker is not None and (worker.key, worker.agent_id) == (key, agent.name)):
                assert key not in self.seen, f"{key} was started before"
                self.seen.add(key)

    def look(self) -> None:
        """No life that is known to be on one host is ever believed to be on another."""
        for worker in self.world.coordinator.job.membership.workers.values():
            if worker.host:
                host = self.believed.setdefault(worker.key, worker.host)
                assert host == worker.host, f"{worker.key} is believed to be on {host} and on {worker.host}"


def _connection(agent: AgentModel, worker_id: int, incarnation: int) -> str:
    return f"w{worker_id}.{incarnation}@{agent.name}"


def actions() -> st.SearchStrategy[tuple[str, str, int]]:
    often = ("join", "join", "hello", "hello", "exit", "die", "wait")
    whats = st.sampled_from((*often, "drain", "scale", "leave", "again", "cut", "restart"))
    return st.tuples(whats, st.sampled_from(NAMES), st.integers(0, SLOTS - 1))


@settings(max_examples=examples(200))
@given(st.lists(actions(), max_size=40))
@example(
    [("join", "a", 0), ("join", "b", 0), ("join", "c", 0), ("drain", "a", 0), ("restart", "a", 0), ("wait", "a", 0)]
)
def test_no_life_is_started_twice_and_none_in_vain(acts: list[tuple[str, str, int]]) -> None:
    model = Model()
    for act in acts:
        model.act(*act)
    for name in list(model.agents):
        model.act("again", name, 0)
    model.act("wait", NAMES[0], 0)  # all have been told of their slots
    for name, i in [(agent.name, i) for agent in model.agents.values() for i in sorted(agent.lives)]:
        model.act("hello", name, i)
    running = [i for agent in model.agents.values() for i in agent.lives]
    over = model.world.coordinator.job.progress.ended is not None  # for want of workers: nobody is told of slots then
    assert over or len(running) == len(set(running)), "a slot runs on two hosts"
