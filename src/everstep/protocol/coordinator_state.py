"""What the coordinator knows, and the small acts everything else is made of. Pure.

Apart from the decisions, so that each of them (health, links, joins, plans, commands) is a module of plain functions
over one `State`. Nothing here decides anything. `dirty` says that a decision may have become due; `coordinator.py`
then lets the decisions run until nothing more follows.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from everstep.base.cause import Cause, Why
from everstep.base.errors import check
from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.base.pool_wish import PoolWish
from everstep.protocol.coordinator_types import (
    Close,
    CoordinatorConfig,
    CoordinatorEffect,
    Persist,
    Report,
    Send,
)
from everstep.protocol.detector import PhiDetector
from everstep.protocol.messages import AnyMessage, JobEnded, ProfileNow

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000


Alarm = tuple[str, str]


class Place(Protocol):
    """`placement.lanes.place`, handed in because layers of the same height do not import each other."""

    def __call__(
        self,
        worker_ids: Sequence[int],
        lanes: int,
        *,
        stages: int = 1,
        speeds: Mapping[int, float] | None = None,
        previous: Sequence[Seat] = (),
        wish: PoolWish = ...,
        anew: bool = False,
    ) -> tuple[Seat, ...]: ...


@dataclass
class Connection:
    """A control connection; `worker` or `agent_id` is set by the hello."""

    role: str
    worker: WorkerKey | None = None
    agent_id: str | None = None


@dataclass
class Agent:
    """The supervisor of one host's workers. `lives`: the processes it runs, as it last said.

    restored: those that it ran according to the journal, until it says hello to this life of the coordinator.
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
    sent_slots: list[int] | None = None
    suspected: bool = False
    rtts_ms: deque[float] = field(default_factory=lambda: deque(maxlen=31))
    killed_ns: dict[WorkerKey, int] = field(default_factory=dict)


@dataclass
class Worker:
    """The newest life of a slot.

    member: as it said in its hello (or as the journal says), None before; greeted: it said hello to this coordinator.
    gone_ns: when its connection ended, None while connected or before the first hello. ordered_ns: when it was last
    given a plan or a ticket. state_bytes: how large the state is that it would have to copy, -1 unknown. ms_per_lane:
    as it last said, 0 unknown; lane_times_ms: at the last looks at the speeds. seen_ns: when its agent last saw it,
    0 if never.
    """

    key: WorkerKey
    pid: int = 0
    host: str = ""
    agent_id: str | None = None
    member: Member | None = None
    connection: str | None = None
    greeted: bool = False
    gone_ns: int | None = None
    ordered_ns: int = 0
    wants_spare: bool = False
    suspected: bool = False
    heal_failures: int = 0
    step: int = 0
    phase: str = "starting"
    samples_per_s: float = 0.0
    state_bytes: int = -1
    ms_per_lane: float = 0.0
    seen_ns: int = 0
    lane_times_ms: deque[float] = field(default_factory=lambda: deque(maxlen=6))

    @property
    def ready(self) -> bool:
        return self.member is not None and self.connection is not None


@dataclass
class Join:
    """A worker on its way in. `healed_ns`: since when it follows closely enough; `retry_ns`: next attempt.

    stages: whose state it copies, and where it is to sit.
    """

    key: WorkerKey
    ticket: int
    stages: tuple[int, ...] = (0,)
    healed_ns: int | None = None
    retry_ns: int | None = None


@dataclass
class Recovery:
    """From a fault until training goes on. Times of the coordinator's clock; phases in ms, the slowest member's."""

    noticed_ns: int
    notice_s: float
    why: Why
    key: WorkerKey | None
    died_unix_ns: int | None
    decided_ns: int | None = None
    settled_ns: int | None = None
    generation: int = 0
    phases_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """How the job ends once a checkpoint is complete, or at `until_ns`."""

    state: str
    why: Why
    exit_code: int
    until_ns: int


@dataclass
class Profile:
    """Who was asked to record what. ended: who has said so, with the reason if there is no trace."""

    request: ProfileNow
    workers: dict[int, WorkerKey]
    ended: dict[int, str] = field(default_factory=dict)


class Alarms:
    """Moments at which the coordinator wants to be called, for what and about whom (an agent's id or a worker's as
    text; "" where there is only one). One may ring early; whoever set it looks again."""

    def __init__(self) -> None:
        self._at: dict[Alarm, int] = {}
        self._heap: list[tuple[int, Alarm]] = []

    def set(self, what: str, at_ns: int, who: str = "") -> None:
        """Ring for this at `at_ns` at the latest."""
        name = (what, who)
        known = self._at.get(name)
        if known is None or at_ns < known:
            self._at[name] = at_ns
            heapq.heappush(self._heap, (at_ns, name))

    def due(self, now_ns: int) -> Iterator[Alarm]:
        """Take out what has become due; alarms set meanwhile for the past ring in the next call."""
        names = []
        while self._heap and self._heap[0][0] <= now_ns:
            at, name = heapq.heappop(self._heap)
            if self._at.get(name) == at:
                del self._at[name]
                names.append(name)
        return iter(names)

    @property
    def next_ns(self) -> int | None:
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


class State:
    """Everything the coordinator knows. See the fields' comments."""

    def __init__(self, config: CoordinatorConfig, place: Place) -> None:
        self.config = config
        self.place = place
        self.now = 0
        self.dirty = True
        self.alarms = Alarms()
        self.persists: list[CoordinatorEffect] = []
        self.effects: list[CoordinatorEffect] = []
        # Who is there.
        self.connections: dict[str, Connection] = {}
        self.agents: dict[str, Agent] = {}
        self.workers: dict[int, Worker] = {}
        self.fenced: dict[int, int] = {}  # worker_id -> newest evicted incarnation
        self.fenced_for: dict[int, Cause] = {}  # why that one was
        # What was agreed.
        self.plan: Plan | None = None
        self.prepared: Plan | None = None
        self.generation = 0  # the highest ever given out or heard of
        self.entered: set[int] = set()  # members that have settled in `plan`
        self.switched = 0  # the prepared generation whose beginning this life of the coordinator has told
        self.broken: list[Why] = []  # why the current plan cannot go on
        self.fallback = False  # all state is lost; the next plan starts at step 0
        self.step = 0
        self.lost_stages: list[int] = []  # whose whole pool was gone; until it is told what they were restored from
        # What is wanted.
        self.target = config.workers
        self.slots: set[int] | None = None  # None: as the agents started them
        self.retiring: set[int] = set()  # slots not wanted any more whose worker has not left yet
        self.unwanted: dict[int, Cause] = {}  # why slots are not wanted any more
        self.slot_owner: dict[int, str] = {}
        self.lost_slots: dict[int, str] = {}
        # What is going on.
        self.joins: dict[int, Join] = {}
        self.greeted: set[int] = set()  # who has said hello to this life of the coordinator, living or not
        self.idle: tuple[int, bool] = (0, False)  # generation, and whether its members have lanes to share out anew
        self.ticket = 0
        self.recovery: Recovery | None = None
        self.first_hello_ns: int | None = None
        self.quorum_since_ns: int | None = None
        self.waiting: Why | None = None
        self.grace_until_ns: int | None = None
        self.absent_since_ns: int | None = None  # grace goes on: all who hold the state have yet to come back
        self.failures: dict[tuple[int, str], tuple[WorkerKey, int]] = {}  # the first like this, and its generation
        self.failed: dict[WorkerKey, Why] = {}  # whose loop has raised, and who stay until a checkpoint is taken
        self.tainted: dict[int, int] = {}  # step before which states differed -> generation in which that was found
        self.sound = -1  # states after this step are tainted, and no generation was entered yet whose plan says so
        self.doubt: Why | None = None  # why all go back: the states of the newest steps are tainted
        self.accusations: dict[int, set[int]] = {}
        self.accusation_reasons: list[str] = []
        self.link_faults: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.step_times_ms: deque[float] = deque(maxlen=100)
        self.speeds: dict[int, float] = {}  # lanes per second, by which lanes are laid out; empty: evenly
        self.watching_speeds = False
        self.uneven_since_ns: int | None = None  # since when other lanes would shorten the steps by much
        self.rebalanced_ns: int | None = None
        self.fell_from = 0  # the step that had been reached when all state was lost
        self.ending: Ending | None = None
        self.save_requests: list[tuple[str, int]] = []  # (connection, request) that wait for a checkpoint
        self.newest_fault = 0  # the number of the newest fault that was asked for; no coordinator gives one out twice
        self.save_why = Why(Cause.REQUESTED, "requested")  # of the newest of them
        self.profile: Profile | None = None  # the newest
        self.ended: JobEnded | None = None

    # ---- effects

    def persist(self, kind: str, **fields: Any) -> None:
        self.persists.append(Persist({"kind": kind, **fields}))

    def report(self, kind: str, why: Why, **fields: Any) -> None:
        self.effects.append(Report(kind, {"cause": why.cause, "reason": why.reason, **fields}))

    def send(self, connection: str | None, message: AnyMessage) -> None:
        """To a connection, if there is one."""
        if connection is not None and connection in self.connections:
            self.effects.append(Send(connection, message))

    def close(self, connection: str | None, reason: str) -> None:
        if connection is not None and self.connections.pop(connection, None) is not None:
            self.effects.append(Close(connection, reason))

    def take_effects(self) -> list[CoordinatorEffect]:
        """All effects since the last call, what must be persisted first: the journal is synced once per event."""
        effects = self.persists + self.effects
        self.persists, self.effects = [], []
        return effects

    # ---- lookups

    @property
    def min_workers(self) -> int:
        return max(1, self.config.min_workers)

    @property
    def capacity(self) -> int:
        """How many members there is room for."""
        config = self.config
        return max(config.lanes * config.stages, config.workers)

    def watch_speeds(self) -> None:
        """Somebody says how fast it computes: begin to look at the speeds now and then."""
        if not self.watching_speeds:
            self.watching_speeds = True
            self.alarms.set("speeds", self.now + self.config.look_ns)

    def seats(
        self, worker_ids: Sequence[int], previous: Sequence[Seat], *, anew: bool = False, speeds: Any = None
    ) -> tuple[Seat, ...]:
        """Placement, with what the job's config says about it, and by the speeds that are in force."""
        config = self.config
        speeds = self.speeds if speeds is None else speeds
        return self.place(
            worker_ids,
            config.lanes,
            stages=config.stages,
            speeds={i: speeds[i] for i in worker_ids if i in speeds},
            previous=previous,
            wish=config.wish,
            anew=anew,
        )

    @property
    def in_grace(self) -> bool:
        return self.grace_until_ns is not None and self.now < self.grace_until_ns

    def is_fenced(self, key: WorkerKey) -> bool:
        return key.incarnation <= self.fenced.get(key.worker_id, -1)

    def alive(self, key: WorkerKey) -> Worker | None:
        """The worker, if this life of its slot is the present one and is not known to be dead."""
        worker = self.workers.get(key.worker_id)
        return worker if worker is not None and worker.key == key else None

    def survivors(self) -> list[Worker]:
        """The members of the current plan that live, in id order."""
        members = self.plan.members if self.plan is not None else ()
        return [w for w in (self.alive(m.key) for m in members) if w is not None]

    def agent_of(self, worker: Worker) -> Agent | None:
        """Who speaks for the worker: the agent that started it, else the only agent of its host."""
        if worker.agent_id is not None:
            return self.agents.get(worker.agent_id)
        same_host = [a for a in self.agents.values() if worker.host and a.host == worker.host]
        return same_host[0] if len(same_host) == 1 else None

    def slot_ids(self) -> set[int]:
        """The worker ids that are to be kept running, those given up included."""
        if self.slots is not None:
            return self.slots
        announced = sum(agent.slots for agent in self.agents.values())
        return set(range(max(self.config.workers, self.config.slots, announced))) | set(self.workers)

    def next_incarnation(self, worker_id: int) -> int:
        """The least that a life of this slot may have that is to be started where the others are not known."""
        known = self.workers.get(worker_id)
        newest = self.fenced.get(worker_id, -1)
        return 1 + (newest if known is None else max(newest, known.key.incarnation))

    def slot_wanted(self, worker_id: int) -> bool:
        return self.slots is None or worker_id in self.slots

    def expected(self) -> int:
        """How many members there can be: the target, less what was given up for good."""
        return min(self.target, len(self.slot_ids() - set(self.lost_slots)))

    def in_any_plan(self, key: WorkerKey) -> bool:
        return any(p is not None and p.has(key) for p in (self.plan, self.prepared))

    def fence(self, key: WorkerKey, why: Why) -> None:
        """No message of this life, or of an older one of its slot, takes effect from here on."""
        check(key.incarnation > self.fenced.get(key.worker_id, -1), f"worker {key} is fenced twice")
        self.fenced[key.worker_id], self.fenced_for[key.worker_id] = key.incarnation, why.cause
        who = {"worker_id": key.worker_id, "incarnation": key.incarnation}
        self.persist("evict", **who, cause=why.cause, reason=why.reason)

    def set_target(self, target: int, slots: set[int], why: Why) -> None:
        """Change how many members, and which slots, are wanted."""
        running = {key.worker_id for agent in self.agents.values() for key in agent.lives}
        running |= {worker_id for worker_id, worker in self.workers.items() if worker.connection is not None}
        self.retiring = (self.retiring | (self.slot_ids() & running)) - slots
        self.unwanted |= dict.fromkeys(self.slot_ids() - slots, why.cause)
        self.target, self.slots, self.dirty = target, set(slots), True
        self.persist("target", target=target, slots=sorted(slots), cause=why.cause, reason=why.reason)

    def end(self, state: str, why: Why, exit_code: int) -> None:
        """The job is over: journal it, tell all workers and agents."""
        if self.ended is not None:
            return
        self.ended = JobEnded(state=state, cause=why.cause, reason=why.reason, exit_code=exit_code)
        self.persist("ended", state=state, cause=why.cause, reason=why.reason, exit_code=exit_code)
        for name in sorted(self.connections):
            if self.connections[name].role != "client":
                self.send(name, self.ended)
        self.report(
            "job_completed" if state == "completed" else "job_failed",
            why,
            state=state,
            exit_code=exit_code,
            step=self.step,
            generation=self.plan.generation if self.plan is not None else 0,
        )


def describe(key: WorkerKey) -> str:
    """How a worker's life is named to the user."""
    return f"worker {key.worker_id} (incarnation {key.incarnation})"


def listed(ids: Sequence[int] | set[int]) -> str:
    """Worker ids in plain words."""
    return ", ".join(str(i) for i in sorted(ids)) or "none"
