"""The workers of a job by its events: the states of each, and the members. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from everstep.base.cause import Cause
from everstep.report.seats import seats_of
from everstep.report.told_facts import MOST_LISTED, Generation, Span, WorkerFact
from everstep.report.words import Event, cause, known, one_line, whole_number, why_of

MEMBERS = ("leader", "active", "standby")
_MOST_SPANS = 8000
_LEFT = (Cause.DRAINED, Cause.SCALED, Cause.PREEMPTED, Cause.REBALANCED)
"""Causes of plans that leave out members which end in order."""
_GONE = ("dead", "left")


@dataclass
class Crew:
    """Workers of a job. `generation`: the newest one told; `members`, `wanted`: numbers of workers with lanes and asked
    for."""

    workers: dict[int, WorkerFact] = field(default_factory=dict)
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=_MOST_SPANS))
    generations: deque[Generation] = field(default_factory=lambda: deque(maxlen=MOST_LISTED))
    generation: int = 0
    wanted: int = 0
    members: int = 0
    suspected: bool = False
    _begins_after: int = 0
    _open: dict[int, Span] = field(default_factory=dict)
    _seated: frozenset[int] = frozenset()

    @property
    def seated(self) -> int:
        """Number of members that are not known to be gone; one that is only suspected counts."""
        return sum(w.role in MEMBERS and w.state not in _GONE for w in self.workers.values())

    def on_several_hosts(self) -> bool:
        """Whether workers have run on more than one host since the job was started."""
        return len({worker.host for worker in self.workers.values() if worker.host}) > 1

    def not_running(self, since_ns: int) -> None:
        """The job's process ended at this time; the job is started again."""
        self.end_spans(since_ns)
        self.workers.clear()
        self._seated = frozenset()

    def started(self, event: Event) -> None:
        self.wanted = whole_number(event.get("workers"))
        self.suspected = False
        self.generation = 0  # each start counts from 1
        self._begins_after = whole_number(event.get("step"))

    def alive(self, time_ns: int) -> None:
        """A step was committed, so every member lives."""
        for worker in self.workers.values() if self.suspected else ():
            if worker.state == "suspect":
                self._be(worker, worker.role, time_ns)
        self.suspected = False

    def generation_started(self, event: Event, time_ns: int) -> int:
        """Take in a new generation with its members. Returns the number of members."""
        seats, leaders = seats_of(event), event.get("leaders")
        before, self._seated = self._seated, frozenset(seats)
        self.wanted = whole_number(event.get("target")) or self.wanted
        leaders = leaders if isinstance(leaders, list) else [event.get("leader")]
        asked = event if cause(event) in _LEFT else None
        for i, worker in self.workers.items():
            if i not in seats and worker.state not in _GONE:
                why = asked if i in before else None
                outside = "left" if why is not None else self._outside(len(seats))
                worker.lanes, worker.stages, worker.role = (), (), outside
                self._be(worker, outside, time_ns, why)
        for i, held in seats.items():
            worker = self.workers.setdefault(i, WorkerFact(i, since_ns=time_ns))
            worker.stages = tuple(sorted({stage for stage, _, _ in held}))
            worker.stage = worker.stages[0]
            worker.lanes = tuple(sorted({lane for _, _, lanes in held for lane in lanes}))
            worker.role = "leader" if i in leaders else "active" if worker.lanes else "standby"
            self._be(worker, worker.role, time_ns)
        self.members = sum(1 for w in self.workers.values() if w.role in MEMBERS and w.lanes)
        name, step = whole_number(event.get("generation")), whole_number(event.get("step"))
        step, self._begins_after = max(step, self._begins_after), 0  # at the start the coordinator has not heard of it
        leading = tuple(i for i in leaders if isinstance(i, int))[:64]
        self.generations.append(Generation(name, time_ns, step, *why_of(event), len(seats), leading))
        return len(seats)

    def joined(self, event: Event, time_ns: int) -> None:
        """Take in the hello of a worker's life."""
        i, incarnation = int(event["worker_id"]), whole_number(event.get("incarnation"))
        before = self.workers.get(i)
        if before is None or before.incarnation != incarnation or before.state in _GONE:
            worker = WorkerFact(i, incarnation, role=self._outside(self.seated))  # in no pool until it is given a seat
            self.workers[i] = worker
            self._be(worker, worker.role, time_ns)
        worker, pids = self.workers[i], event.get("pids")
        worker.pid = known(event.get("pid"))
        listed = pids if isinstance(pids, list) else [worker.pid]
        worker.pids = tuple(one for one in listed[:MOST_LISTED] if isinstance(one, int))
        worker.host = one_line(event.get("node") or event.get("host"), 80)
        hosts = event.get("hosts")
        worker.hosts = tuple(one_line(one, 80) for one in hosts[:MOST_LISTED]) if isinstance(hosts, list) else ()

    def suspect(self, event: Event, time_ns: int) -> None:
        worker = self.workers.get(int(event["worker_id"]))
        if worker is not None and worker.state not in _GONE:
            self._be(worker, "suspect", time_ns, event)
            self.suspected = True

    def evicted(self, event: Event, died_ns: int) -> int:
        """Note that a worker is dead. Returns its id."""
        i = int(event["worker_id"])
        worker = self.workers.setdefault(i, WorkerFact(i, whole_number(event.get("incarnation"))))
        worker.lanes = ()
        self._be(worker, "dead", died_ns, event)
        return i

    def left(self, event: Event, time_ns: int) -> None:
        """Note that a worker, a spare perhaps, was dismissed."""
        worker = self.workers.get(int(event["worker_id"]))
        if worker is not None and worker.state not in _GONE:
            worker.lanes, worker.stages, worker.role = (), (), "left"
            self._be(worker, "left", time_ns, event)

    def end_spans(self, time_ns: int) -> None:
        for span in self._open.values():
            span.end_ns = time_ns
        self._open.clear()

    def _outside(self, members: int) -> str:
        """State of a worker outside the plan: it is on its way in if a member is missing."""
        return "healing" if self.generation and (not self.wanted or members < self.wanted) else "spare"

    def _be(self, worker: WorkerFact, state: str, time_ns: int, why: Event | None = None) -> None:
        """Set the worker's state; why: the event with the reason, if it has one."""
        worker.cause, worker.reason = (None, "") if why is None else why_of(why)
        last = self._open.get(worker.worker_id)
        worker.state = state
        if last is not None and (last.state, last.incarnation) == (state, worker.incarnation):
            return
        worker.since_ns = time_ns
        if last is not None:
            last.end_ns = max(last.begin_ns, time_ns)
        span = Span(worker.worker_id, worker.incarnation, state, time_ns)
        self.spans.append(span)
        if state == "left":
            self._open.pop(worker.worker_id, None)
            span.end_ns = time_ns
        else:
            self._open[worker.worker_id] = span
