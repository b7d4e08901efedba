"""Facts from the events of a job: workers, generations, recoveries, curves, the account of its time. Pure.

Everything is bounded: curves are decimated, lists keep their newest entries and count the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from everstep.base.cause import Cause
from everstep.report.course import Course
from everstep.report.crew import Crew
from everstep.report.fault_count import FaultCount
from everstep.report.incidents import LAUNCHER, Incident, Incidents
from everstep.report.job_condition import JobCondition
from everstep.report.logged import Logged
from everstep.report.recovery import RecoveryFact, recovery_of
from everstep.report.told_facts import MOST_LISTED, CheckpointFact, Checkpoints, Line, Mark, Trouble
from everstep.report.wall_time import Stretch, TimeAccount
from everstep.report.words import (
    Event,
    cause,
    checkpoint_result,
    known,
    level,
    number,
    one_line,
    reason_text,
    sentence,
    whole_number,
    why_of,
)

_MOST_LOG = 4000
_LATELY_NS = 60_000_000_000
SET_BACK_NS = 10_000_000_000  # hosts may differ by less
_MARKED = {"fault_injected": "fault", "worker_evicted": "evicted", "leader_changed": "leader"}
_MARKED |= {"coordinator_restarted": "coordinator", "fallback": "fallback", "worker_healed": "healed"}


@dataclass
class Facts:
    """Takes in events in file order. `condition`: how the job is; `course`: its steps; `crew`: its workers. `counts`:
    events by kind; `told_ns`: when the newest was told. `full`: newest trouble with the disk, None if a checkpoint was
    written since; `slow`: newest word of a slow directory."""

    condition: JobCondition = field(default_factory=JobCondition)
    course: Course = field(default_factory=Course)
    crew: Crew = field(default_factory=Crew)
    incidents: Incidents = field(default_factory=Incidents)
    counts: dict[str, int] = field(default_factory=dict)
    recoveries: deque[RecoveryFact] = field(default_factory=lambda: deque(maxlen=MOST_LISTED))
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MOST_LISTED))
    log: deque[Line] = field(default_factory=lambda: deque(maxlen=_MOST_LOG))
    told_ns: int = 0
    full: Trouble | None = None
    slow: Trouble | None = None
    fault_count: FaultCount = field(default_factory=FaultCount)
    logged: Logged = field(default_factory=Logged)
    _lines: int = 0

    def take(self, event: Event) -> None:
        """Take in the next event; a malformed one is counted and otherwise passed over."""
        kind = str(event["kind"])
        self.counts[kind] = self.counts.get(kind, 0) + 1
        time_ns = whole_number(event.get("time_unix_ns"))
        if not time_ns:
            return
        if kind == "job_started" and self.account.begin_ns is not None:
            _not_running(self, time_ns)
        fresh = kind == "step_committed" and whole_number(event.get("step")) > self.course.pace.told  # else told late
        if kind == "job_started" or (fresh and self.told_ns - time_ns > SET_BACK_NS):
            self.told_ns = 0
        if fresh and self.course.last_step_ns - time_ns > SET_BACK_NS:
            self.account.clock_set_back(time_ns)
        self.told_ns = max(self.told_ns, time_ns)
        if kind == "worker_evicted" and cause(event) is Cause.REPLACED and self.stands_still(time_ns):
            event = {**event, "died_unix_ns": self.progress_ns}  # nobody could tell of it: there was no coordinator
        elif kind == "worker_suspected" and self.stands_still(time_ns):
            event = {**event, "stood_unix_ns": self.progress_ns}
        self.account.reach(time_ns)
        if event.get("generation") != self.crew.generation:
            self.crew.generation = max(self.crew.generation, whole_number(event.get("generation")))
        act = _ACTS.get(kind)
        try:
            if act is not None:
                act(self, event, time_ns)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError):
            self.counts["not understood"] = self.counts.get("not understood", 0) + 1
        if kind == "step_committed":
            return
        again, known_before = self.incidents.has_raised(event), self.incidents.count
        self.incidents.take(event, time_ns, self.course.step)
        self.fault_count.take(event, time_ns, again, self.incidents.count > known_before)
        if kind in _MARKED or (kind == "checkpoint_completed" and event.get("tier") != "memory"):
            mark, step = _MARKED.get(kind, "checkpoint"), whole_number(event.get("step")) or self.course.step
            step = self._struck_at(event, time_ns) if mark == "evicted" else step
            self.marks.append(Mark(time_ns, step, mark, known(event.get("worker_id")), cause(event), sentence(event)))
        self._lines += 1
        where = known(event.get("worker_id")), known(event.get("step"))
        self.log.append(Line(self._lines, time_ns, level(event), one_line(kind, 40), *where, sentence(event)))

    def _struck_at(self, event: Event, time_ns: int) -> int:
        """The step that an eviction fell into: the step of the injected fault, if there was one."""
        for mark in reversed(self.marks):
            lately = time_ns - mark.time_ns < _LATELY_NS
            if lately and (mark.kind, mark.worker_id) == ("fault", known(event.get("worker_id"))):
                return mark.step
        return self.course.step + 1

    @property
    def account(self) -> TimeAccount:
        """Account of the wall time."""
        return self.condition.account

    def under_way(self, now_ns: int, goes_on: bool = False) -> list[Stretch]:
        """Stretches of time that last now, without an event that ends them yet: for the account. goes_on: steps are
        known to be done that no event has told."""
        found, condition = self.condition.under_way(now_ns), self.condition
        recovers = condition.fault_ns is not None and condition.state == "recovering"
        if not goes_on and condition.waiting_ns is None and not recovers and self.stands_still(now_ns):
            found.append(self.course.standstill(now_ns))
        return found

    def stands_still(self, now_ns: int) -> bool:
        """Whether the next step is overdue by much; of a job that has begun and goes on."""
        begun = self.progress_ns > 0 and self.condition.ended_ns is None
        return begun and self.course.pace.stands_still((now_ns - self.progress_ns) / 1e9)

    @property
    def progress_ns(self) -> int:
        """Time of the newest known commit, 0 if there was none since the start. A recovery ends with a commit, and is
        told before it; once that is told, its time counts, also if the clock was set back meanwhile."""
        last = self.recoveries[-1] if self.recoveries and self.course.last_step_ns else None
        return max(self.course.last_step_ns, last.end_ns if last is not None and not last.told else 0)

    @property
    def began_ns(self) -> int:
        """When the job was first started, 0 if it was not."""
        return self.account.begin_ns or 0

    @property
    def faults(self) -> int:
        """Number of faults that were injected, or noticed without having been injected."""
        return self.fault_count.number

    @property
    def checkpoint_step(self) -> int:
        """The newest step with a checkpoint that outlives the processes, as far as events tell; 0 if none."""
        return max((one.step for one in self.checkpoints.good()), default=0)

    # ---- events

    def _job_started(self, event: Event, time_ns: int) -> None:
        self.condition.begin(time_ns)
        self.crew.started(event)
        self.full = self.slow = None
        self.checkpoints.begin()
        self.account.paint(*self.course.begin(whole_number(event.get("step")), time_ns), "steps done again")

    def _step_committed(self, event: Event, time_ns: int) -> None:
        condition, crew = self.condition, self.crew
        stalled = self.course.committed(event, time_ns, crew.members, condition.started_ns is None)
        if stalled is not None:
            self.account.paint(stalled.begin_ns, stalled.end_ns, stalled.use)
        self.logged.take(event, self.course.step, time_ns)
        generation = whole_number(event.get("generation"))
        last = self.recoveries[-1] if self.recoveries else None
        if last is not None and not last.told and generation >= last.generation:
            self.recoveries[-1] = replace(last, step=self.course.step, told=True)
        if self.incidents.waits:
            self.incidents.committed(time_ns, self.course.step, generation)
        unsettled = condition.state != "running" or crew.suspected or condition.started_ns is not None
        if (unsettled or condition.fault_ns is not None) and self.incidents.open is None and condition.ended_ns is None:
            condition.go_on(time_ns)
            crew.alive(time_ns)

    def _generation_started(self, event: Event, time_ns: int) -> None:
        condition, seated = self.condition, self.crew.generation_started(event, time_ns)
        self.account.capacity(time_ns, seated / self.crew.wanted if self.crew.wanted else 1.0)
        if cause(event) is Cause.INTERRUPTED:
            condition.stops(event, time_ns)
        self.course.clean = False
        if not self.course.last_step_ns:
            self.course.pace.begin(time_ns)
        self._was_done(whole_number(event.get("step")))
        condition.end_of_waiting(time_ns)
        if condition.state == "waiting":
            condition.be("recovering" if self.course.step else "starting")
        if condition.started_ns is not None:
            condition.end_of_start(time_ns)
            condition.be("running")

    def _was_done(self, step: int) -> None:
        """This step is known to be done: its own event comes when the next one is decided."""
        if step == self.course.step + 1:
            self.course.step = step

    def _worker_suspected(self, event: Event, time_ns: int) -> None:
        self.crew.suspect(event, time_ns)
        self._was_done(whole_number(event.get("step")))  # it says which step it did last
        self.condition.fault_ns = self.condition.fault_ns or time_ns

    def _worker_evicted(self, event: Event, time_ns: int) -> None:
        died_ns, condition = whole_number(event.get("died_unix_ns")) or time_ns, self.condition
        worker_id = self.crew.evicted(event, died_ns)
        self._was_done(whole_number(event.get("step")))
        condition.be("recovering", event)
        condition.reason = f"worker {worker_id}: {condition.reason}"
        condition.fault_ns = min(condition.fault_ns or died_ns, died_ns)

    def _recovery_completed(self, event: Event, time_ns: int) -> None:
        recovery = recovery_of(event, time_ns)
        for part in recovery.phases:
            self.account.paint(part.begin_ns, part.end_ns, part.use)
        self.condition.fault_ns = None
        self.recoveries.append(recovery)

    def _evaluated(self, event: Event, time_ns: int) -> None:
        if self.course.evaluated(event, time_ns) and self.course.last_step_ns:
            self.account.paint(self.course.last_step_ns, time_ns, "evaluation")

    def _checkpoint(self, event: Event, time_ns: int) -> None:
        result, stall_s = checkpoint_result(event), number(event.get("stall_s"))
        ok, duration_s = result == "complete", number(event.get("duration_s"))
        size = int(number(event.get("size_bytes") or event.get("bytes")))
        tier, step = one_line(event.get("tier"), 20) or "disk", whole_number(event.get("step"))
        fact = CheckpointFact(tier, step, time_ns, ok, duration_s, size, stall_s, *why_of(event), result == "skipped")
        self.checkpoints.take(fact)
        if ok and tier == "disk":
            self.full = None
            self._was_done(step)
        elif result == "failed" and fact.cause is Cause.DISK:
            self.full = Trouble(time_ns, fact.reason)
        if ok and stall_s:
            self.account.paint(time_ns - round(stall_s * 1e9), time_ns, "checkpoints")

    def _warning(self, event: Event, time_ns: int) -> None:
        saved_ns = next((c.time_ns for c in self.checkpoints.good() if c.tier == "disk"), 0)
        if cause(event) is Cause.DISK and time_ns > saved_ns:  # it may be told after the disk has taken more
            self.full = Trouble(time_ns, reason_text(event.get("reason")))
        if cause(event) is Cause.CLOCK:
            self.account.clock_set_forward(time_ns, round(number(event.get("clock_set_s")) * 1e9))
        if cause(event) is Cause.SLOW and "took_s" in event:
            self.slow = Trouble(time_ns, reason_text(event.get("reason")))
        step, strange = whole_number(event.get("step")), self.course.strange
        if cause(event) is Cause.NONFINITE and (strange is None or strange.last <= step):
            self.course.finite(step, False)  # the last one: the weights show it

    def _ended(self, event: Event, time_ns: int) -> None:
        course, completed, stopping = self.course, event["kind"] == "job_completed", self.condition.stopping
        for part in self.under_way(time_ns):
            self.account.paint(part.begin_ns, part.end_ns, part.use)
        self.condition.be(one_line(event.get("state"), 20) or ("completed" if completed else "failed"), event)
        course.step = max(course.step, whole_number(event.get("step")))  # no other event tells of the last step
        course.redo_to = 0
        self.condition.end(known(event.get("exit_code")), time_ns)
        if course.last_step_ns and (completed or stopping is not None):  # until then the next step was computed
            since_ns = max(course.last_step_ns, stopping.time_ns if stopping is not None else 0)
            self.account.paint(since_ns, time_ns, "finishing")
        self.crew.end_spans(time_ns)


def lost_mark(incident: Incident) -> Mark:
    """The loss of a launcher as a mark."""
    return Mark(incident.begin_ns, incident.step - 1, LAUNCHER, None, incident.cause, incident.brief)


def _not_running(facts: Facts, time_ns: int) -> None:
    """From the end of the start before until now nothing ran; without a word of that end, its launcher was lost."""
    ended_ns = facts.condition.ended_ns or facts.told_ns
    if facts.condition.ended_ns is None and facts.counts["job_started"] > 1:  # else it was a script by itself
        facts.fault_count.launcher_lost()
        facts.incidents.launcher_lost(ended_ns, facts.course.step, time_ns)
        facts.marks.append(lost_mark(facts.incidents.all[-1]))
    facts.account.paint(ended_ns, time_ns, "not running")
    facts.crew.not_running(ended_ns)


def present_speed(facts: Facts, now_ns: int | None = None) -> float | None:
    """Samples per second over the newest steps, None before two; now_ns: it falls while training stands still."""
    overdue = now_ns is not None and facts.stands_still(now_ns)
    return facts.course.pace.samples_per_s(now_ns if overdue else None)


def by_itself(facts: Facts) -> bool:
    """Whether this is a script that nobody has launched: it tells its steps, but neither its begin nor its end."""
    return bool(facts.counts) and "job_started" not in facts.counts


def heard_lately(facts: Facts, now_ns: int) -> bool:
    """Whether the newest event is no older than some steps usually take."""
    return now_ns - facts.told_ns <= max(_LATELY_NS, 10e9 * (facts.course.pace.usual_s or 0.0))


def _commanded(facts: Facts, event: Event, time_ns: int) -> None:
    if event.get("command") == "stop":
        facts.condition.stops(event, time_ns)


def _falls_back(facts: Facts, event: Event, time_ns: int) -> None:
    if event.get("what") == "checkpoint":
        facts.checkpoints.damaged(whole_number(event.get("step")))
    facts.account.paint(*facts.course.fall_back(event, time_ns), "steps done again")


def _waits(facts: Facts, event: Event, time_ns: int) -> None:
    facts.condition.wait(event, time_ns)
    facts._was_done(whole_number(event.get("step")))


def facts_of(events: Iterable[Event]) -> Facts:
    """Facts from these events."""
    facts = Facts()
    for event in events:
        facts.take(event)
    return facts


_ACTS: dict[str, Callable[[Facts, Event, int], None]] = {
    "job_started": Facts._job_started,
    "step_committed": Facts._step_committed,
    "generation_started": Facts._generation_started,
    "worker_joined": lambda facts, event, time_ns: facts.crew.joined(event, time_ns),
    "worker_left": lambda facts, event, time_ns: facts.crew.left(event, time_ns),
    "worker_suspected": Facts._worker_suspected,
    "worker_evicted": Facts._worker_evicted,
    "recovery_completed": Facts._recovery_completed,
    "fallback": _falls_back,
    "waiting": _waits,
    "evaluated": Facts._evaluated,
    "logged": lambda facts, event, time_ns: facts.logged.take(event, whole_number(event.get("step")), time_ns),
    "checkpoint_completed": Facts._checkpoint,
    "checkpoint_failed": Facts._checkpoint,
    "checkpoint_skipped": Facts._checkpoint,
    "warning": Facts._warning,
    "commanded": _commanded,
    "job_completed": Facts._ended,
    "job_failed": Facts._ended,
}
