"""Which lives of which slots there are, and which are over for good. Pure."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import asdict, dataclass

from everstep.base.cause import Cause, Why
from everstep.base.errors import check
from everstep.base.plan import Member, WorkerKey
from everstep.protocol.coordinator.desk import Alarm, Desk
from everstep.protocol.messages import WorkerHello, WorkerLife, WorkerPulse


@dataclass
class Worker:
    """The newest life of a slot.

    pids: of its cell, the head's first. member: as it said in its hello (or as the journal says), None
    before; greeted: it said hello to this coordinator.
    gone_ns: when its connection ended, None while connected or before the first hello. ordered_ns: when it was last
    given a plan or a ticket. state_bytes: how large the state is that it would have to copy, -1 unknown. seen_ns: when
    its agent last saw it, 0 if never.
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
    wants_spare: bool = False
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
        """For events: which life it is, and its process."""
        return {**asdict(self.key), "pid": self.pid}

    @property
    def ready(self) -> bool:
        return self.member is not None and self.connection is not None

    def greet(self, connection: str, hello: WorkerHello) -> None:
        """It has said hello over this connection: it is ready, or back."""
        self.member, self.connection, self.gone_ns, self.greeted = hello.member, connection, None, True
        self.pids, self.host, self.wants_spare = hello.member.pids, hello.member.host, hello.wants_spare
        self.state_bytes = hello.state_bytes
        self.reached(hello.step)

    def leave(self, now_ns: int) -> None:
        """Its connection has ended, or should have been there by now."""
        self.connection, self.gone_ns = None, now_ns

    def restore(self, member: Member, agent_id: str | None) -> None:
        """What a plan says of it counts, as far as it has not said so itself."""
        self.member = self.member or member
        self.pids, self.host = member.pids, member.host
        self.agent_id = self.agent_id or agent_id

    def started(self, agent_id: str, life: WorkerLife, now_ns: int) -> None:
        """An agent says that it runs it; only the next pulses show whether it also sees it."""
        self.agent_id, self.pids = agent_id, (life.pid, *life.limbs)
        self.seen_ns = now_ns if self.seen_ns else 0

    def pulse(self, pulse: WorkerPulse, now_ns: int) -> None:
        """Its agent has seen it, and says how it gets on."""
        self.seen_ns, self.step, self.samples_per_s = now_ns, pulse.step, pulse.samples_per_s

    def reached(self, step: int) -> None:
        """It has committed this step; what comes late changes nothing."""
        self.step = max(self.step, step)

    def healed(self, step: int) -> None:
        """It follows the members from this step on."""
        self.step = step

    def ordered(self, now_ns: int) -> None:
        """It was given a plan or a ticket."""
        self.ordered_ns = now_ns

    def suspect(self, in_trouble: bool = True) -> bool:
        """Whether it may be in trouble. Returns whether that is new."""
        known, self.suspected = self.suspected, in_trouble
        return in_trouble and not known

    def pardon(self, gap_ns: int) -> None:
        """The coordinator was away for so long: that was no silence of the worker."""
        self.gone_ns = None if self.gone_ns is None else self.gone_ns + gap_ns
        self.seen_ns += gap_ns if self.seen_ns else 0


class Membership:
    """The newest lives; fences, so that no message of an older life takes effect; and the time that the workers of a
    journal have to come back.

    workers: the newest life of each slot that has one, by worker id.
    """

    def __init__(self, desk: Desk) -> None:
        self.version = 0
        self.grace_until_ns = 0
        self.workers: dict[int, Worker] = {}
        self._desk = desk
        self._fenced: dict[int, int] = {}  # worker id -> newest incarnation that is over
        self._fenced_for: dict[int, Cause] = {}
        self._came: set[int] = set()
        self._absent_since_ns: int | None = None  # grace goes on: all who hold the state have yet to come back

    @property
    def came(self) -> int:
        """How many slots have said hello to this life of the coordinator, living or not."""
        return len(self._came)

    def alive(self, key: WorkerKey) -> Worker | None:
        """The worker, if this life of its slot is the present one and is not known to be dead."""
        worker = self.workers.get(key.worker_id)
        return worker if worker is not None and worker.key == key else None

    def newer(self, key: WorkerKey) -> bool:
        """Whether a newer life of the same slot is known."""
        known = self.workers.get(key.worker_id)
        return known is not None and known.key.incarnation > key.incarnation

    def next_incarnation(self, worker_id: int) -> int:
        """The least that a life of this slot may have that is to be started where the others are not known."""
        known, fenced = self.workers.get(worker_id), self._fenced.get(worker_id, -1)
        return 1 + (fenced if known is None else max(fenced, known.key.incarnation))

    def add(self, key: WorkerKey, host: str = "") -> Worker:
        """A new life of a slot, which had none, or whose last one is over."""
        self.version += 1
        worker = self.workers[key.worker_id] = Worker(key, host=host)
        return worker

    def greet(self, worker: Worker, connection: str, hello: WorkerHello, *, awaited: bool) -> None:
        """A worker has said hello. awaited: a decision may wait for that."""
        self.version += awaited
        self._came.add(worker.key.worker_id)
        worker.greet(connection, hello)

    def left(self, worker: Worker, *, awaited: bool) -> None:
        """A worker's connection has ended. awaited: a decision may look at who is there."""
        self.version += awaited
        worker.leave(self._desk.now)

    def remove(self, key: WorkerKey, why: Why) -> None:
        """This life is over. No message of it, or of an older one of its slot, takes effect from here on."""
        self.version += 1
        del self.workers[key.worker_id]
        check(not self.is_fenced(key), f"worker {key} is fenced twice")
        self._fenced[key.worker_id], self._fenced_for[key.worker_id] = key.incarnation, why.cause
        self._desk.persist("evict", **asdict(key), cause=why.cause, reason=why.reason)

    def is_fenced(self, key: WorkerKey) -> bool:
        """Whether this life, or a newer one of its slot, was declared over."""
        return key.incarnation <= self._fenced.get(key.worker_id, -1)

    def fenced_for(self, worker_id: int) -> Cause:
        """Why the newest life of this slot that is over was declared so."""
        return self._fenced_for.get(worker_id, Cause.UNKNOWN)

    # ---- from the journal

    def restore(self, member: Member, agent_id: str | None) -> None:
        """Believe that a member of a plan lives, until a grace period has passed without a hello."""
        if not self.is_fenced(member.key) and not self.newer(member.key):
            (self.alive(member.key) or self.add(member.key)).restore(member, agent_id)

    def replay_evict(self, key: WorkerKey, cause: Cause) -> None:
        """A life that a former life of the coordinator has declared over."""
        self._fenced[key.worker_id] = max(key.incarnation, self._fenced.get(key.worker_id, -1))
        self._fenced_for[key.worker_id] = cause
        worker = self.workers.get(key.worker_id)
        if worker is not None and self.is_fenced(worker.key):
            del self.workers[key.worker_id]

    def keep_only(self, keys: Container[WorkerKey]) -> None:
        """Forget all lives but these."""
        self.workers = {i: worker for i, worker in self.workers.items() if worker.key in keys}

    # ---- time to come back

    @property
    def in_grace(self) -> bool:
        return self._desk.now < self.grace_until_ns

    def begin_grace(self) -> None:
        """The workers of the journal have some time from now on to come back."""
        self.grace_until_ns = self._desk.now + self._desk.config.grace_ns
        self._desk.alarms.set(Alarm.GRACE, self.grace_until_ns)

    def absent(self) -> list[Worker]:
        """The workers of the journal that have yet to come back."""
        return [w for _, w in sorted(self.workers.items()) if not w.greeted and w.member is not None]

    def waited_ns(self) -> int:
        """For how long grace has been prolonged: the first call begins the count."""
        if self._absent_since_ns is None:
            self._absent_since_ns = self._desk.now
        return self._desk.now - self._absent_since_ns

    def end_grace(self) -> None:
        """The time to come back is over."""
        self.version += 1
        self.grace_until_ns, self._absent_since_ns = 0, None
