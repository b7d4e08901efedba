"""Drives a coordinator as agents, workers and people would, and remembers what it answered. Shared by several tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from everstep.base.cause import Cause
from everstep.base.plan import Member, Plan
from everstep.protocol import messages as m
from everstep.protocol.coordinator.agreement import NO_PLAN
from everstep.protocol.coordinator.coordinator import Coordinator
from everstep.protocol.coordinator.types import (
    Close,
    Connected,
    CoordinatorConfig,
    Disconnected,
    Knows,
    Persist,
    Received,
    Report,
    Send,
    Tick,
)
from everstep.protocol.following import PlanAsked, PlanShown, name_of
from everstep.protocol.roles import COMMANDS, OPERATE

MS = 1_000_000
S = 1_000_000_000

CONFIG = CoordinatorConfig(
    lanes=8,
    stages=1,
    workers=3,
    min_workers=1,
    on_failure="replace",
    hang_limit_ns=10 * S,
    heartbeat_floor_ns=2 * S,
    heartbeat_ceiling_ns=10 * S,
    heartbeat_interval_ns=S,
    quorum_wait_ns=600 * S,
)


def member(worker_id: int, incarnation: int = 0, host: str = "a1") -> Member:
    return Member(worker_id, incarnation, host, 1000 + 10 * worker_id + incarnation, f"a1:{7000 + worker_id}", "")


class World:
    """One coordinator and what was said to it; `sent`, `reports` and `journal` collect the effects. told: as the
    coordinator has it."""

    def __init__(
        self, *, journal: list[dict[str, Any]] | None = None, now: int = S, told: int | None = None, **config: Any
    ) -> None:
        self.config = replace(CONFIG, **config)
        self.journal: list[dict[str, Any]] = list(journal or [])
        self.coordinator = Coordinator(self.config, list(self.journal), told)
        self.now = now
        self.sent: list[tuple[str, m.AnyMessage]] = []
        self.reports: list[Report] = []
        self.closed: list[str] = []
        self.follows: dict[str, Plan] = {}
        self.knows: dict[str, Plan] = {}
        self.seq = 0
        self.next_beat = now + S
        self.sees = False

    # ---- events

    def handle(self, event: Any) -> list[Any]:
        effects = self.coordinator.handle(self.now, event)
        for effect in effects:
            if isinstance(effect, Persist):
                self.journal.append(json.loads(json.dumps(effect.entry)))
            elif isinstance(effect, Send):
                assert m.decode(m.encode(effect.message)) == effect.message
                self.sent.append((effect.connection, effect.message))
                if isinstance(effect.message, m.PlanNow):
                    self.follows[effect.connection] = effect.message.plan
            elif isinstance(effect, Report):
                json.dumps(effect.fields)
                self.reports.append(effect)
            elif isinstance(effect, Knows):
                self.knows[effect.connection] = effect.plan
            elif isinstance(effect, Close):
                self.closed.append(effect.connection)
        return effects

    def connect(self, name: str, role: str) -> None:
        self.handle(Connected(name, role))

    def say(self, name: str, message: m.AnyMessage) -> list[Any]:
        return self.handle(Received(name, message))

    def agent(self, *workers: int | tuple[int, int], name: str = "a1", host: str = "a1", slots: int = 0) -> None:
        lives = [w if isinstance(w, tuple) else (w, 0) for w in workers]
        listed = [m.WorkerLife(worker_id=i, incarnation=n, pid=1000 + 10 * i + n) for i, n in lives]
        self.connect(name, "agent")
        self.say(name, m.AgentHello(agent_id=name, host=host, workers=listed, slots=slots or len(lives)))

    def hello(
        self,
        worker: int,
        incarnation: int = 0,
        *,
        plan: Plan | None = None,
        step: int = 0,
        host: str = "a1",
        shows: bool = True,
        settled: bool = False,
    ) -> str:
        """plan: that it follows; settled: in that; it shows that where it is asked, unless it does not (`shows`)."""
        name = f"w{worker}.{incarnation}"
        self.connect(name, "worker")
        me = member(worker, incarnation, host)
        self.say(name, m.WorkerHello(member=me, step=step, follows=name_of(plan), settled=settled))
        if shows and self.asked(name):
            self.shows(worker, incarnation, plan=plan)
        return name

    def asked(self, name: str) -> bool:
        """Whether who has this connection is the one that was asked last for its plan."""
        asked = [to for to, message in self.sent if isinstance(message, PlanAsked)]
        return bool(asked) and asked[-1] == name

    def shows(self, worker: int, incarnation: int = 0, *, plan: Plan | None) -> None:
        """What a worker answers that is asked for its plan."""
        self.say(f"w{worker}.{incarnation}", PlanShown(worker_id=worker, incarnation=incarnation, plan=plan))

    def started(self, worker: int, incarnation: int, agent: str = "a1") -> None:
        life = m.WorkerLife(worker_id=worker, incarnation=incarnation, pid=1000 + 10 * worker + incarnation)
        self.say(agent, m.WorkerStarted(agent_id=agent, worker=life))

    def exited(
        self,
        worker: int,
        incarnation: int = 0,
        reason: str = "killed by SIGKILL",
        agent: str = "a1",
        in_order: bool = False,
        cause: Cause = Cause.KILLED,
        again: bool = False,
    ) -> None:
        message = m.WorkerExited(
            agent_id=agent,
            worker_id=worker,
            incarnation=incarnation,
            reason=reason,
            died_unix_ns=123,
            in_order=in_order,
            again=again,
            cause=cause,
        )
        self.say(agent, message)

    def entered(self, worker: int, generation: int, step: int, incarnation: int = 0, **phases_ms: float) -> None:
        self.say(
            f"w{worker}.{incarnation}",
            m.GenerationEntered(
                worker_id=worker, incarnation=incarnation, generation=generation, step=step, phases_ms=phases_ms
            ),
        )

    def progress(self, worker: int, generation: int, step: int, step_ms: float = 100.0, incarnation: int = 0) -> None:
        self.say(
            f"w{worker}.{incarnation}",
            m.Progress(worker_id=worker, incarnation=incarnation, generation=generation, step=step, step_ms=step_ms),
        )

    def healed(self, worker: int, incarnation: int = 0, ticket: int | None = None) -> None:
        ticket = self.last(m.Heal, f"w{worker}.{incarnation}").ticket if ticket is None else ticket
        self.say(
            f"w{worker}.{incarnation}",
            m.WorkerHealed(worker_id=worker, incarnation=incarnation, ticket=ticket, step=5),
        )

    def fault(self, worker: int, generation: int, *accused: int, incarnation: int = 0) -> None:
        self.say(
            f"w{worker}.{incarnation}",
            m.PeerFault(
                worker_id=worker,
                incarnation=incarnation,
                generation=generation,
                accused=list(accused),
                reason="reset by peer",
            ),
        )

    def beat(self, *pulses: tuple[int, int, str, int], agent: str = "a1", late_ms: int = 0, **more: Any) -> None:
        """pulses: (worker_id, incarnation, phase, still_ms). late_ms: that the agent waited; more: fields of all."""
        self.seq += 1
        fields = {"step": 4, "samples_per_s": 9.5, **more}
        said = [
            m.WorkerPulse(worker_id=i, incarnation=n, phase=phase, still_ms=still, **fields)
            for i, n, phase, still in pulses
        ]
        self.say(agent, m.Heartbeat(agent_id=agent, seq=self.seq, rtt_ms=1.0, workers=said, waited_ms=late_ms))

    def no_death(self) -> None:
        """The time passes in which a death would explain broken links; the agents see all their workers alive."""
        self.wait(100 * MS)
        self.sees = True
        self._beat_all()
        self.wait(100 * MS)

    def _beat_all(self) -> None:
        for agent in [a for a in self.coordinator.job.agents.known.values() if a.connection is not None]:
            alive = filter(self.coordinator.job.membership.alive, agent.lives if self.sees else ())
            self.beat(*((key.worker_id, key.incarnation, "compute", 0) for key in alive), agent=agent.agent_id)

    def command(self, name: str, **args: Any) -> m.CommandReply:
        self.connect("c1", COMMANDS.get(name, OPERATE))
        self.say("c1", m.Command(request=1, name=name, args=args))
        reply = self.last(m.CommandReply, "c1")
        assert reply is not None
        return reply

    def wait(self, duration_ns: int, *, beating: bool = True) -> None:
        """Let time pass, with ticks at the deadlines; connected agents go on with heartbeats every second.
        They say nothing of their workers, unless they have seen them before (`sees`)."""
        end = self.now + duration_ns
        while True:
            deadline = self.coordinator.next_deadline_ns
            wake = min(end, self.next_beat if beating else end, deadline if deadline is not None else end)
            self.now = max(self.now, wake)
            if beating and self.now >= self.next_beat:
                self.next_beat = self.now + S
                self._beat_all()
            self.handle(Tick())
            if self.now >= end:
                return

    def restart(self, journal: list[dict[str, Any]] | None = None, told: int | None = None) -> World:
        """The coordinator dies, and another begins from its journal."""
        kept = self.journal if journal is None else journal
        return World(
            journal=kept,
            now=self.now + S,
            told=told,
            **{f: getattr(self.config, f) for f in CONFIG.__dataclass_fields__},
        )

    # ---- what came of it

    def messages(self, kind: type[Any], to: str | None = None) -> list[Any]:
        return [x for name, x in self.sent if isinstance(x, kind) and (to is None or name == to)]

    def last(self, kind: type[Any], to: str | None = None) -> Any:
        found = self.messages(kind, to)
        return found[-1] if found else None

    def kinds(self) -> list[str]:
        return [r.kind for r in self.reports]

    def report(self, kind: str) -> dict[str, Any]:
        return [r.fields for r in self.reports if r.kind == kind][-1]

    @property
    def plan(self) -> Plan | None:
        plan = self.coordinator.job.agreement.plan
        return plan if plan is not NO_PLAN else None

    @property
    def prepared(self) -> Plan | None:
        return self.coordinator.job.agreement.prepared

    def clear(self) -> None:
        self.sent.clear()
        self.reports.clear()


def running(workers: int = 3, *, elsewhere: Sequence[int] = (), **config: Any) -> World:
    """A job in generation 1 that computes step 1. elsewhere: these run under an agent a2 on a host a2."""
    world = World(workers=workers, **config)
    world.agent(*(i for i in range(workers) if i not in elsewhere))
    if elsewhere:
        world.agent(*elsewhere, name="a2", host="a2")
    for i in range(workers):
        world.hello(i)
    for i in range(workers):
        world.entered(i, 1, 1)
    world.clear()
    return world


def drop(world: World, name: str) -> None:
    world.handle(Disconnected(name))
