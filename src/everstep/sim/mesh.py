"""Connections of one simulated worker: to every peer per generation, and to the coordinator.

The peers' connections stand for shared memory, sockets or NCCL: a peer's death or a broken link is seen, silence is not
(only a limit on how long a message may be stuck). A loss ends the operation that needs the message; nothing else does.
A message of the coordinator is treated as in production: it is checked at once for whether it interrupts the present
operation, and handed in; the driver takes it in when it may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from everstep.base.cause import Cause
from everstep.base.plan import Member, Plan
from everstep.base.ports import Tag
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.hearing import interrupts
from everstep.protocol.following import PlanAsked, PlanShown, name_of
from everstep.protocol.identity import Code, Kernels
from everstep.protocol.lease.terms import Terms
from everstep.protocol.telling import Listener
from everstep.sim.life import Life, nothing
from everstep.sim.promises import require
from everstep.sim.world import MS, SECOND, Process, SimConnection

_CONNECT_NS = 1000 * MS


class Mesh:
    """Everything one worker exchanges with the members of its generation."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.plan: Plan | None = None
        self.out: dict[int, SimConnection] = {}
        self.incoming: list[tuple[int, SimConnection]] = []
        self.lost: set[int] = set()
        self._early: dict[int, list[tuple[Any, ...]]] = {}
        self._records: dict[Tag, dict[int, bytes]] = {}
        self._opened: Callable[[do.Open], None] | None = None
        life.install(
            {
                do.Exchange: self._exchange,
                ("door", "mesh"): self._accept,
                ("message", "lost"): self._on_lost,
                ("message", "record"): self._on_record,
                ("owes", do.Open): lambda operation, peer: peer not in self.out,
                ("owes", do.Exchange): lambda operation, peer: peer not in self._records.get(operation.tag, {}),
            }
        )

    def uses(self, connection: SimConnection) -> bool:
        """Whether the connection may still carry something for this."""
        return connection in self.out.values() or any(connection is c for _, c in self.incoming)

    @property
    def generation(self) -> int:
        return self.plan.generation if self.plan is not None else 0

    # ---- a generation begins and ends

    def leave(self, generation: int) -> None:
        """Cut the connections of this generation and older; the peers see the end after earlier messages."""
        if self.generation <= generation:
            for _, connection in sorted(self.out.items()):
                connection.close(self.life)
            self.out = {}
        for opened_in, connection in self.incoming:
            if opened_in <= generation:
                connection.close(self.life)
        self.incoming = [(g, c) for g, c in self.incoming if g > generation]

    def open(self, operation: do.Open, opened: Callable[[do.Open], None]) -> None:
        """Connect to the members of the plan; call `opened` when all have been reached."""
        plan, self._opened = operation.plan, opened
        self.leave(plan.generation - 1)
        self._records = {}
        self.plan, self.lost = plan, set()
        early, self._early = self._early, {}
        for worker_id in plan.worker_ids:
            if worker_id != self.life.me.worker_id:
                self._connect(operation, worker_id, self.life.world.now_ns + _CONNECT_NS)
        for message in early.get(plan.generation, []):
            self.life.later(0, self.received, message)
        self._early = {g: m for g, m in early.items() if g > plan.generation}
        self._met(operation)

    def _connect(self, operation: do.Open, worker_id: int, until_ns: int) -> None:
        life, generation = self.life, operation.generation
        key, mine = operation.plan.member(worker_id).key, life.me.worker_id
        lost = partial(self._lost, generation, worker_id)
        connection = life.reach(key, "mesh", nothing, lost, generation, mine, timeout_ns=SECOND)
        peer = life.site.lives.get(key)
        waits = peer is not None and peer.alive and not life.world.spoiled(life.name, peer.name)
        if connection is not None:
            self.out[worker_id] = connection
            self._met(operation)
        elif waits and life.world.now_ns < until_ns:
            life.during(operation, 100 * MS, self._connect, worker_id, until_ns)
        else:
            life.later(life.world.latency_ns(), lost)

    def _met(self, operation: do.Open) -> None:
        if len(self.out) == len(operation.plan.worker_ids) - 1 and self._opened is not None:
            self.life.during(operation, self.life.world.latency_ns(), self._opened)

    def _accept(self, connection: SimConnection, generation: int, worker_id: int) -> None:
        """A peer has connected, perhaps for a generation that this worker has not heard of yet."""
        if generation < self.generation or generation <= self.life.cut_to:
            connection.close(self.life)
            return
        self.incoming.append((generation, connection))
        connection.listen(self.life, self.received, partial(self._lost, generation, worker_id))

    def _lost(self, generation: int, worker_id: int, connection: SimConnection | None = None) -> None:
        self.incoming = [(g, c) for g, c in self.incoming if c.open]
        if connection is not None and self._still_coming(generation, connection):
            return
        if generation == self.generation:
            self._on_lost(worker_id)
        elif generation > self.generation:
            self._early.setdefault(generation, []).append(("lost", generation, worker_id))

    def _still_coming(self, generation: int, lost: SimConnection) -> bool:
        """Whether the peer has hung up, and its own connection to here ends after what it had sent: the two stand for
        one, whose end overtakes no message."""
        return any(g == generation and c.closing and c.pair == lost.pair for g, c in self.incoming)

    # ---- messages

    def send(self, worker_id: int, kind: str, *parts: Any) -> None:
        """A message to a member of this generation, which may be this worker."""
        me, message = self.life, (kind, self.generation, *parts)
        if worker_id == me.me.worker_id:
            me.later(me.world.between(0, MS // 10), self.received, message)
        elif worker_id in self.out:
            self.out[worker_id].send(me, message)

    def received(self, message: tuple[Any, ...]) -> None:
        """A message of some generation: (kind, generation, ...). Older ones have no effect, newer ones wait."""
        kind, generation = message[0], message[1]
        if generation == self.generation:
            self.life.handlers["message", kind](*message[2:])
        elif generation > self.generation:
            self._early.setdefault(generation, []).append(message)

    def _on_lost(self, worker_id: int) -> None:
        self.lost.add(worker_id)
        self.look()

    # ---- small records

    def _exchange(self, operation: do.Exchange) -> None:
        if operation.tag.kind == "settle":
            self.life.site.checks.records.stated(operation.generation, self.life.me.worker_id, operation.payload)
        plan, me = operation.generation, self.life.me.worker_id
        if self.plan is None or plan != self.plan.generation:
            raise AssertionError(f"{operation} in generation {self.generation}")
        self.life.site.checks.records.contributed(plan, operation.tag, me, operation.payload)
        for worker_id in self.plan.worker_ids:
            self.send(worker_id, "record", operation.tag, me, operation.payload)

    def _on_record(self, tag: Tag, worker_id: int, payload: bytes) -> None:
        records = self._records.setdefault(tag, {})
        records[worker_id] = payload
        operation = self.life.operation
        if self.plan is None or len(records) < len(self.plan.worker_ids):
            return
        if isinstance(operation, do.Exchange) and operation.tag == tag:
            del self._records[tag]
            self.life.done(operation, records)

    # ---- neighbours that are gone

    def look(self) -> None:
        """End the operation under way if lost peers owe it something."""
        operation = self.life.operation
        if not self.lost or operation is None:
            return
        owes = self.life.handlers.get(("owes", type(operation)))
        missing = tuple(i for i in sorted(self.lost) if owes is not None and owes(operation, i))
        if missing:
            self.life.abort(operation, missing, "a transfer failed")


Dial = Callable[[Process, str, Callable[[Any], None], Callable[[], None]], SimConnection | None]
"""Connects a process, in a role, to the coordinator, with callbacks for messages and for the end."""


class SimControlClient:
    """A connection to the coordinator that is kept up once begun: hello first, then waiting messages."""

    def __init__(
        self,
        owner: Process,
        dial: Dial,
        role: str,
        hello: Callable[[], Sequence[wire.AnyMessage]],
        deliver: Callable[[Any], None],
        plan: Callable[[], Plan | None] = lambda: None,
    ) -> None:
        """plan: the one that the hello names."""
        self.plan = plan
        self.owner, self.role, self.hello, self.deliver = owner, role, hello, deliver
        self._dial = dial
        self._terms = Terms()
        self.connection: SimConnection | None = None
        self.queue: list[wire.AnyMessage] = []
        self.newest: wire.AnyMessage | None = None  # that was sent over this connection
        self.closed = True

    def begin(self) -> None:
        self.closed = False
        self._try()

    def _try(self) -> None:
        if self.closed or self.connection is not None:
            return
        connection = self._dial(self.owner, self.role, partial(self._heard, Listener(self.plan())), self._lost)
        if connection is None:
            self.owner.soon(20 * MS, 300 * MS, self._try)
            return
        self.connection = connection
        self._terms.connected()
        connection.send(self.owner, b"")
        waiting, self.queue = self.queue, []
        for message in [*self.hello(), *waiting]:
            self._say(connection, message)

    def _say(self, connection: SimConnection, message: wire.AnyMessage) -> None:
        self.newest = message
        connection.send(self.owner, wire.encode(message))

    def again(self) -> None:
        """Send the newest message a second time."""
        if self.newest is not None:
            self.send(self.newest)

    def _heard(self, listener: Listener, bodies: Sequence[bytes]) -> None:
        for body in bodies:
            message = listener.take(wire.decode(body))
            if message is not None:
                self._check_term(message)

    def _check_term(self, message: wire.AnyMessage) -> None:
        refused = self._terms.refusal(message)
        if not refused:
            self.deliver(message)
        elif self.connection is not None:
            self.owner.world.seen["terms", "refused"] += 1
            self.owner.world.log(self.owner.name, "refuses a coordinator:", refused)
            self.connection.close(self.owner)
            self._lost()

    def _lost(self) -> None:
        self.connection = self.newest = None
        self.owner.soon(20 * MS, 100 * MS, self._try)

    def send(self, message: wire.AnyMessage) -> None:
        """Send now, or once connected again; heartbeats and progress only now."""
        if self.connection is not None and self.connection.open:
            self._say(self.connection, message)
        elif not self.closed and not isinstance(message, wire.Heartbeat | wire.Progress):
            self.queue.append(message)

    def close(self) -> None:
        self.closed = True
        if self.connection is not None:
            self.connection.close(self.owner)


class Ties:
    """The connection to the coordinator, its messages, and the worker's facts for its agent."""

    def __init__(self, life: Life, dial: Dial, mesh: Mesh) -> None:
        self.life = life
        self.mesh = mesh
        self.at = ""  # where it stands still, once it has been asked
        self.compiles = False
        self.client = SimControlClient(life, dial, f"worker {life.me}", self._hello, self.deliver, self._plan)
        life.install({do.Tell: self._tell, do.Outvoted: self._outvoted})
        life.install({do.Refused: lambda effect: self.fail(effect.reason)})

    def _hello(self) -> list[wire.AnyMessage]:
        """Everything that the coordinator may have missed."""
        life, now = self.life, self.life.driver.situation
        member = Member(life.me.worker_id, life.me.incarnation, life.host, life.pid, life.name)
        size = life.job.state_bytes
        hello = wire.WorkerHello(
            member=member,
            step=now.step,
            follows=name_of(now.plan),
            prepared=now.prepared,
            settled=now.settled,
            stages=now.stages,
            state_bytes=size,
            lanes=life.job.lanes + (life.me in life.site.strays),
            kernels=Kernels(("f" if life.host == life.site.foreign else "0") * 32, life.host, 1),
            code=Code(
                {"task.py": f"{life.site.facts.get('edition', 0):016x}", f"stage{life.me.worker_id % 3}.py": "1" * 16},
                {"numpy": "2"},
            ),
        )
        return [hello, *now.messages]

    def meet(self) -> None:
        """Set a key of the generation's store, and ask for those of all members. For that it imports more."""
        life, plan = self.life, self._plan()
        about = {"worker_id": life.me.worker_id, "incarnation": life.me.incarnation}
        self.client.send(wire.Imported(**about, code=Code({"meeting.py": "2" * 16})))
        if plan is not None and plan.has(life.me):
            me, generation = life.me, plan.generation
            self.client.send(wire.StoreSet(generation=generation, key=str(me), value=str(me).encode()))
            keys = [str(member.key) for member in plan.members]
            self.client.send(wire.StoreGet(request=generation, generation=generation, keys=keys))

    def _met(self, answer: wire.StoreValues) -> None:
        records, generation = self.life.site.checks.records, answer.request
        self.life.world.seen["keys", "met" if answer.values is not None else "superseded"] += 1
        if answer.values is None:
            require(records.newest > generation, "P4", f"{self.life.me} meets nobody in {generation}, the newest plan")
        elif generation in records.plans:
            known = [str(member.key).encode() for member in records.plans[generation].members]
            require(answer.values == known, "P3", f"{self.life.me} meets {answer.values} in {generation}, not {known}")

    def show_stacks(self) -> None:
        """From now on its pulses say where it stands still."""
        self.at = "task.py:7"

    def _plan(self) -> Plan | None:
        return self.life.driver.situation.plan

    def uses(self, connection: SimConnection) -> bool:
        """Whether the connection may still carry something for this."""
        return self.client.connection is connection

    def pulse(self) -> wire.WorkerPulse:
        """Facts that the agent reads of it from shared memory."""
        life = self.life
        still = 0 if life.frozen_ns is None else (life.world.now_ns - life.frozen_ns) // MS
        return wire.WorkerPulse(
            worker_id=life.me.worker_id,
            incarnation=life.me.incarnation,
            step=life.driver.machine.step,
            phase=str(life.driver.machine.phase),
            still_ms=still,
            samples_per_s=100.0 / life.slowness,
            compute_ms_per_lane=2.0 * life.slowness,
            waited_ms=still if life.starved else 0,
            stopped=life.letter == "T",
            at=self.at if still else "",
            cold=self.compiles,
            lifeless_ms=50 if self.compiles else -1,
        )

    def compile(self, compiles: bool) -> None:
        """It begins to compile, and stands still meanwhile; or has done so."""
        self.compiles = compiles
        if compiles:
            self.life.freeze(stuck=True)
        else:
            self.life.thaw()

    def deliver(self, message: wire.AnyMessage) -> None:
        """Take a message of the coordinator."""
        life = self.life
        if isinstance(message, PlanAsked):
            life.world.seen["plans", "shown"] += 1
            if (how := unshown.pop() if (unshown := life.site.facts.get("unshown")) else 0) > 1:
                life.freeze()
                life.world.later(how * MS, life.thaw)
            life.later(0, self.show_plan, self._plan() if how != 1 else None)
            return
        if isinstance(message, wire.StoreValues):
            self._met(message)
            return
        if isinstance(message, wire.InjectFault) and "coordinator" in message.fault:
            self.strikes(message.number)
        if isinstance(message, wire.ProfileNow):
            worker_id, incarnation = life.me.worker_id, life.me.incarnation
            done = wire.Profiled(worker_id=worker_id, incarnation=incarnation, name=message.name, ok=True)
            life.later(message.steps * 20 * MS, self.client.send, done)
        if isinstance(message, wire.PlanNow | wire.PlanPrepared):
            life.site.checks.records.plan(message.plan)
        life.world.seen["messages", type(message).__name__] += 1
        newest = interrupts(message)
        if newest is not None:
            self._interrupt(newest)
        life.handle(do.Heard(message, life.world.now_ns))
        if isinstance(life.operation, do.Watch):
            life.soon(0, MS, life.done, life.operation, ())

    def show_plan(self, plan: Plan | None) -> None:
        """Send the coordinator a plan as the one that it follows."""
        who = {"worker_id": self.life.me.worker_id, "incarnation": self.life.me.incarnation}
        self.client.send(PlanShown(**who, plan=plan))

    def strikes(self, index: int) -> None:
        """The job's leader reports that a scripted fault is due, and others have to inject it."""
        life, plan, machine = self.life, self._plan(), self.life.driver.machine
        if plan is not None and plan.leader(0) == life.me.worker_id:
            who = {"worker_id": life.me.worker_id, "incarnation": life.me.incarnation}
            at = {"generation": machine.generation, "step": machine.step + 1}
            self.client.send(wire.StrikeDue(index=index, phase="compute", **who, **at))

    def _interrupt(self, generation: int) -> None:
        """End the transfers of this generation and older ones."""
        life, operation = self.life, self.life.operation
        life.cut(generation)
        if life.world.rng.random() < 0.5:
            self.mesh.leave(generation)
        if operation is not None and operation.generation <= generation:
            life.soon(0, 2 * MS, life.abort, operation)

    def fail(self, reason: str, cause: Cause = Cause.EXCEPTION, **more: int) -> None:
        """End by an exception, with last words."""
        self.client.send(self.life.last_words(cause, reason, **more))
        self.life.end(cause, reason)

    def _tell(self, effect: do.Tell) -> None:
        if isinstance(effect.message, wire.PeerFault):
            self.life.world.log(self.life.name, "accuses", effect.message.accused)
        self.client.send(effect.message)

    def _outvoted(self, effect: do.Outvoted) -> None:
        found = {"tainted": effect.step, "generation": effect.generation, "sound": effect.sound}
        self.fail(effect.reason, Cause.CORRUPT, **found)
