"""The coordinator under arbitrary events: it never breaks an invariant, and it comes to rest where it should.

Two views. *Chaos*: any event in any order, sensible or not, with journal replays in between. *A working crowd*: workers
and agents that answer as the real ones do, with deaths, disconnects, restarts and commands; after the faults stop, the
job must run with as many members as are wanted.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "protocol"))
from coordinator_harness import MS, S, World, drop

from everstep.base.plan import Plan, WorkerKey
from everstep.protocol import messages as m
from everstep.protocol.coordinator.types import Connected, Disconnected, Received, Tick
from sampling import examples

ids = st.integers(0, 3)
lives = st.integers(0, 2)
generations = st.integers(0, 8)
names = st.sampled_from(["a1", "a2", "w0", "w1", "w2", "w3", "c1"])


def member_of(worker: int, life: int) -> m.Member:
    return m.Member(worker, life, "a1", 1000 + 10 * worker + life, f"a1:{worker}")


@st.composite
def any_message(draw) -> m.AnyMessage:
    worker, life, generation, step = draw(ids), draw(lives), draw(generations), draw(st.integers(0, 20))
    who = {"worker_id": worker, "incarnation": life}
    listed = [m.WorkerLife(worker_id=i, incarnation=n, pid=1) for i, n in draw(st.dictionaries(ids, lives)).items()]
    pulse = m.WorkerPulse(
        **who, step=step, phase=draw(st.sampled_from(["idle", "forward"])), still_ms=draw(st.sampled_from([0, 20_000])),
        samples_per_s=1.0,
    )  # fmt: skip
    accused = draw(st.lists(ids, max_size=3))
    return draw(
        st.sampled_from(
            [
                m.AgentHello(agent_id="a1", host="a1", workers=listed, slots=4),
                m.Heartbeat(agent_id="a1", seq=1, rtt_ms=1.0, workers=[pulse]),
                m.WorkerStarted(agent_id="a1", worker=m.WorkerLife(**who, pid=1)),
                m.WorkerExited(agent_id="a1", **who, reason="killed", died_unix_ns=1),
                m.WorkerHello(member=member_of(worker, life), step=step),
                m.WorkerHealed(**who, ticket=draw(st.integers(0, 5)), step=step),
                m.HealFailed(**who, ticket=draw(st.integers(0, 5)), reason="gone"),
                m.GenerationEntered(**who, generation=generation, step=step, phases_ms={"settle": 1.0}),
                m.Progress(**who, generation=generation, step=step, step_ms=5.0),
                m.PeerFault(**who, generation=generation, accused=accused, reason="reset"),
                m.WorkerFailed(**who, step=step, reason="boom", signature=str(step), fatal=False),
                m.StoreSet(generation=generation, key="k", value=b"v"),
                m.StoreGet(request=1, generation=generation, keys=["k"]),
                m.Command(request=1, name="scale", args={"workers": draw(st.integers(0, 5))}),
                m.Command(request=1, name="drain", args={"worker_id": worker}),
                m.Command(request=1, name="chaos", args={"fault": "kill", "workers": [worker]}),
                m.Command(request=1, name="status", args={}),
            ]
        )
    )


any_event = st.one_of(
    st.builds(Connected, names, st.sampled_from(["agent", "worker", "operate", "inject"])),
    st.builds(Disconnected, names),
    st.builds(Received, names, any_message()),
    st.just(Tick()),
)


class Plans:
    """Remembers every plan that left the coordinators, and checks that no generation has two."""

    def __init__(self) -> None:
        self.by_generation: dict[int, Plan] = {}

    def look(self, world: World) -> None:
        for _, message in world.sent:
            if isinstance(message, m.PlanNow | m.PlanPrepared):
                plan = self.by_generation.setdefault(message.plan.generation, message.plan)
                assert plan == message.plan
        world.sent.clear()


def nothing_was_missed(world: World) -> None:
    """Decisions are made only where something has changed; made again, they come to nothing."""
    coordinator = world.coordinator
    coordinator._decided = ()
    coordinator._decide()
    assert coordinator.job.env.take_effects() == []


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["replace", "shrink", "wait"]),
    st.lists(st.tuples(st.sampled_from([0, 1, 300, 3000]), any_event, st.booleans()), max_size=60),
)
def test_no_event_breaks_an_invariant(on_failure, events):
    world, plans = World(on_failure=on_failure, workers=2), Plans()
    world.agent(0, 1)
    world.hello(0)
    world.hello(1)
    fenced: set[tuple[int, int]] = set()
    for wait_ms, event, restart in events:
        world.now += wait_ms * MS
        world.handle(event)
        plans.look(world)
        nothing_was_missed(world)
        if restart and isinstance(event, Tick):
            world = world.restart()
        fenced |= {(e["worker_id"], e["incarnation"]) for e in world.journal if e["kind"] == "evict"}
        if world.plan is not None and not world.coordinator.job.agreement.broken:
            alive = [world.coordinator.job.membership.alive(x.key) for x in world.plan.members]
            assert all(alive), "a plan goes on although a member is gone"
        world.coordinator.status()
    generations = [e["plan"]["generation"] for e in world.journal if e["kind"] == "plan"]
    assert generations == sorted(set(generations))
    for entry in [e for e in world.journal if e["kind"] == "plan"]:
        position = world.journal.index(entry)
        before = {(e["worker_id"], e["incarnation"]) for e in world.journal[:position] if e["kind"] == "evict"}
        assert not before & {(x["worker_id"], x["incarnation"]) for x in entry["plan"]["members"]}


class Crowd:
    """Workers and one agent that behave: restart what died, enter plans, heal, switch to prepared plans."""

    def __init__(self, on_failure: str, workers: int, spares: int, min_workers: int) -> None:
        self.world = World(on_failure=on_failure, workers=workers, min_workers=min_workers)
        self.plans = Plans()
        self.wanted = list(range(workers + spares))
        self.life = dict.fromkeys(self.wanted, 0)
        self.alive: set[WorkerKey] = set()
        self.plan: dict[WorkerKey, Plan] = {}
        self.prepared: dict[WorkerKey, Plan] = {}
        self.step = 1
        self.world.agent(*self.wanted)
        for i in self.wanted:
            self.start(i)

    def name(self, key: WorkerKey) -> str:
        return f"w{key.worker_id}.{key.incarnation}"

    def start(self, worker_id: int) -> None:
        key = WorkerKey(worker_id, self.life[worker_id])
        self.alive.add(key)
        self.world.started(worker_id, key.incarnation)
        self.world.hello(worker_id, key.incarnation)

    def end(self, key: WorkerKey, reason: str) -> None:
        self.alive.discard(key)
        drop(self.world, self.name(key))
        self.world.exited(key.worker_id, key.incarnation, reason)
        self.life[key.worker_id] += 1

    def answer(self) -> None:
        """Carry out what was sent until nothing is left to do."""
        for _ in range(200):
            sent, self.world.sent = self.world.sent, []
            for to, message in sent:
                self.one(to, message)
            self.plans.look(type("Sent", (), {"sent": list(sent)})())  # type: ignore[arg-type]
            self.switch()
            for i in self.wanted:
                if not any(k.worker_id == i for k in self.alive):
                    self.start(i)
            if not self.world.sent:
                return
        raise AssertionError("the conversation does not end")

    def one(self, to: str, message: m.AnyMessage) -> None:
        if isinstance(message, m.SetSlots):
            self.wanted = message.worker_ids
            for i in self.wanted:
                self.life.setdefault(i, 0)
        if isinstance(message, m.KillWorker):
            key = WorkerKey(message.worker_id, message.incarnation)
            if key in self.alive:
                self.end(key, "killed")
            return
        key = next((k for k in self.alive if self.name(k) == to), None)
        if key is None:
            return
        if isinstance(message, m.PlanNow):
            self.plan[key] = message.plan
            self.world.entered(key.worker_id, message.plan.generation, self.step, key.incarnation)
        elif isinstance(message, m.PlanPrepared):
            self.prepared[key] = message.plan
        elif isinstance(message, m.Heal):
            self.world.healed(key.worker_id, key.incarnation, message.ticket)
        elif isinstance(message, m.Dismissed):
            self.end(key, "exit 0")

    def switch(self) -> None:
        """All members of a plan hold the same prepared one: they switch."""
        for plan in set(self.plan.values()):
            keys = [x.key for x in plan.members]
            held = {self.prepared.get(k) for k in keys}
            newer = next(iter(held))
            if len(held) != 1 or newer is None or newer.generation <= plan.generation:
                continue
            if all(k in self.alive and self.plan.get(k) == plan for k in keys):
                self.step += 1
                for member in newer.members:
                    if member.key in self.alive:
                        self.plan[member.key] = newer
                        self.world.entered(member.worker_id, newer.generation, self.step, member.incarnation)

    def reconnect(self, key: WorkerKey) -> None:
        drop(self.world, self.name(key))
        self.world.hello(key.worker_id, key.incarnation, plan=self.plan.get(key), step=self.step - 1)

    def restart_coordinator(self) -> None:
        self.world = self.world.restart()
        lives = [(k.worker_id, k.incarnation) for k in sorted(self.alive)]
        self.world.agent(*lives)
        for key in sorted(self.alive):
            self.world.hello(key.worker_id, key.incarnation, plan=self.plan.get(key), step=self.step - 1)


faults = st.tuples(
    st.sampled_from(["kill", "reconnect", "coordinator", "scale", "drain", "accuse", "wait", "answer", "answer"]),
    st.integers(0, 5),
)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["replace", "wait"]),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(1, 4),
    st.lists(faults, max_size=25),
)
def test_after_the_faults_the_wanted_number_of_members_runs(on_failure, workers, spares, min_workers, schedule):
    crowd = Crowd(on_failure, workers, spares, min(min_workers, workers))
    for kind, pick in schedule:
        keys = sorted(crowd.alive)
        key = keys[pick % len(keys)] if keys else None
        crowd.world.now += MS
        if kind == "kill" and key is not None:
            crowd.end(key, "killed by SIGKILL")
        elif kind == "reconnect" and key is not None:
            crowd.reconnect(key)
        elif kind == "coordinator":
            crowd.restart_coordinator()
        elif kind == "scale":
            crowd.world.command("scale", workers=pick)
        elif kind == "drain" and key is not None:
            crowd.world.command("drain", worker_id=key.worker_id)
        elif kind == "accuse" and key is not None and key in crowd.plan:
            generation = crowd.plan[key].generation
            crowd.world.fault(key.worker_id, generation, keys[0].worker_id, incarnation=key.incarnation)
        elif kind == "wait":
            crowd.world.wait(300 * MS)
        elif kind == "answer":
            crowd.answer()
    for _ in range(12):
        crowd.answer()
        crowd.world.wait(2 * S)
    crowd.answer()
    status = crowd.world.coordinator.status()
    assert status["state"] == "running", status
    members = [w for w in status["workers"] if w["stage"] is not None]
    assert len(members) == status["target"], status
    assert sorted(lane for w in members for lane in w["lanes"]) == list(range(8))
