"""Slots that move between agents: no life of a slot is started twice, and none that is fenced from the beginning."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.base.plan import WorkerKey
from everstep.protocol import messages as m

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "protocol"))
from coordinator_harness import S, World, drop

SLOTS = 3
NAMES = ("a", "b", "c")


@dataclass
class AgentModel:
    """An agent's process as the coordinator meets it: it counts incarnations for itself, from what it is told."""

    name: str  # also of its connection
    process: str
    room: int
    wanted: list[int] = field(default_factory=list)
    following: dict[int, int] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)


class Model:
    """A coordinator, its agents, and all lives that were ever started."""

    def __init__(self) -> None:
        self.world = World(workers=SLOTS, slots=SLOTS, heartbeat_ceiling_ns=5 * S)
        self.agents: dict[str, AgentModel] = {}
        self.seen: set[WorkerKey] = set()
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
            drop(self.world, agent.name)
            for i, incarnation in agent.lives.items():
                drop(self.world, f"w{i}.{incarnation}")
        elif what == "exit" and agent is not None and worker_id in agent.lives:
            self.exit(agent, worker_id)
        elif what == "hello" and agent is not None and worker_id in agent.lives:
            self.world.hello(worker_id, agent.lives[worker_id], host=name)
        elif what == "drain":
            self.world.command("drain", host=name)
        elif what == "scale":
            self.world.command("scale", workers=1 + worker_id)
        elif what == "leave" and agent is not None:
            self.world.say(agent.name, m.HostLeaving(agent_id=name))
        elif what == "again" and agent is not None:
            drop(self.world, agent.name)
            self.greet(agent)
        self.deliver()

    def join(self, name: str, room: int) -> None:
        self.processes += 1
        self.agents[name] = AgentModel(name, str(self.processes), room)
        self.greet(self.agents[name])

    def greet(self, agent: AgentModel) -> None:
        """It connects (again), and says what it runs."""
        lives = [m.WorkerLife(worker_id=i, incarnation=n, pid=1) for i, n in sorted(agent.lives.items())]
        self.world.connect(agent.name, "agent")
        about = {"slots": len(agent.wanted), "room": agent.room, "process": agent.process}
        self.world.say(agent.name, m.AgentHello(agent_id=agent.name, host=agent.name, workers=lives, **about))

    def exit(self, agent: AgentModel, worker_id: int) -> None:
        incarnation = agent.lives.pop(worker_id)
        drop(self.world, f"w{worker_id}.{incarnation}")
        self.world.exited(worker_id, incarnation, agent=agent.name)

    def kill(self, agent: AgentModel, message: m.KillWorker) -> None:
        if agent.lives.get(message.worker_id) == message.incarnation:
            self.exit(agent, message.worker_id)

    def deliver(self) -> None:
        """What the coordinator has said to agents; and what they start because of that."""
        while True:
            fresh, self.read = self.world.sent[self.read :], len(self.world.sent)
            for to, message in fresh:
                agent = next((a for a in self.agents.values() if a.name == to), None)
                if agent is not None and isinstance(message, m.SetSlots):
                    agent.wanted = message.worker_ids
                    for i, first in zip(message.worker_ids, message.first, strict=True):
                        agent.following[i] = max(first, agent.following.get(i, 0))
                elif agent is not None and isinstance(message, m.KillWorker):
                    self.kill(agent, message)
                elif agent is not None and isinstance(message, m.HostDismissed):
                    assert not agent.lives, "whose workers run does not leave"
                    drop(self.world, agent.name)
                    del self.agents[agent.name]
            started = [self.start(a, i) for a in self.agents.values() for i in a.wanted if i not in a.lives]
            if not fresh and not started:
                return

    def start(self, agent: AgentModel, worker_id: int) -> None:
        key = WorkerKey(worker_id, agent.following[worker_id])
        assert key not in self.seen, f"{key} was started before"
        assert not self.world.coordinator.job.membership.is_fenced(key), f"{key} is fenced"
        self.seen.add(key)
        agent.following[worker_id] += 1
        agent.lives[worker_id] = key.incarnation
        self.world.started(worker_id, key.incarnation, agent=agent.name)


def actions() -> st.SearchStrategy[tuple[str, str, int]]:
    often = ("join", "join", "hello", "hello", "exit", "die", "wait")
    whats = st.sampled_from((*often, "drain", "scale", "leave", "again"))
    return st.tuples(whats, st.sampled_from(NAMES), st.integers(0, SLOTS - 1))


@settings(max_examples=200)
@given(st.lists(actions(), max_size=40))
def test_no_life_is_started_twice_and_none_in_vain(acts: list[tuple[str, str, int]]) -> None:
    model = Model()
    for act in acts:
        model.act(*act)
    running = [i for agent in model.agents.values() for i in agent.lives]
    assert len(running) == len(set(running)), "a slot runs on two hosts"
