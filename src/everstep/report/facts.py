"""What the events of a job add up to: workers, generations, recoveries, curves, the account of its time. Pure.

Everything is bounded: curves are decimated, lists keep their newest entries and count the rest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from everstep.base.cause import Cause
from everstep.report.incidents import Incidents
from everstep.report.pace import Pace
from everstep.report.recovery import RecoveryFact, recovery_of
from everstep.report.seats import seats_of
from everstep.report.series import POINTS, Series
from everstep.report.told_facts import CheckpointFact, Generation, Line, Mark, Span, Strange, Trouble, WorkerFact
from everstep.report.wall_time import Stretch, TimeAccount
from everstep.report.words import (
    Event,
    cause,
    checkpoint_result,
    known,
    level,
    number,
    one_line,
    sentence,
    whole_number,
)

MEMBERS = ("leader", "active", "standby")
# time_s, loss, loss_min, loss_max, lr, samples, workers
_STEP_RULES = ("last", "mean", "min", "max", "last", "sum", "last")
_MOST_LOG = 4000
_MOST_LISTED = 1000
_MOST_SPANS = 8000
_LATELY_NS = 60_000_000_000
_LEFT = (Cause.DRAINED, Cause.SCALED)
_MARKED = {"fault_injected": "fault", "worker_evicted": "evicted", "leader_changed": "leader"}
_MARKED |= {"coordinator_restarted": "coordinator", "fallback": "fallback", "worker_healed": "healed"}


@dataclass
class Facts:
    """Takes in events in file order. `counts`: events by kind. `rates`: samples, seconds by number of workers.
    `loss`: of the newest step, None if there is none or it is not finite; `strange`: steps that were not. `redo_to`: up
    to this step steps are done again that had been done before, 0 if none are; `began_again_ns`: since when.
    `stopping`: why the job is being ended; `full`: newest trouble with the disk, None if a checkpoint was written
    since."""

    state: str = "starting"
    cause: Cause | None = None
    reason: str = ""
    step: int = 0
    loss: float | None = None
    generation: int = 0
    wanted: int = 0
    steps_lost: int = 0
    tokens_per_sample: float | None = None
    strange: Strange | None = None
    exit_code: int | None = None
    workers: dict[int, WorkerFact] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_step: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    steps: Series = field(default_factory=lambda: Series(_STEP_RULES, POINTS))
    evaluations: dict[str, Series] = field(default_factory=dict)
    generations: deque[Generation] = field(default_factory=lambda: deque(maxlen=_MOST_LISTED))
    recoveries: deque[RecoveryFact] = field(default_factory=lambda: deque(maxlen=_MOST_LISTED))
    checkpoints: deque[CheckpointFact] = field(default_factory=lambda: deque(maxlen=_MOST_LISTED))
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=_MOST_SPANS))
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=_MOST_LISTED))
    log: deque[Line] = field(default_factory=lambda: deque(maxlen=_MOST_LOG))
    account: TimeAccount = field(default_factory=TimeAccount)
    rates: dict[int, list[float]] = field(default_factory=dict)
    last_step_ns: int = 0
    told_ns: int = 0
    ended_ns: int | None = None
    redo_to: int = 0
    began_again_ns: int | None = None
    stopping: Trouble | None = None
    full: Trouble | None = None
    pace: Pace = field(default_factory=Pace)
    incidents: Incidents = field(default_factory=Incidents)
    _lines: int = 0
    _open: dict[int, Span] = field(default_factory=dict)
    started_ns: int | None = None
    waiting_ns: int | None = None
    _fault_ns: int | None = None
    _clean: bool = False
    _members: int = 0
    _suspected: bool = False
    _seated: frozenset[int] = frozenset()

    def take(self, event: Event) -> None:
        """Take in the next event; one that makes no sense counts and is otherwise passed over."""
        kind = str(event["kind"])
        self.counts[kind] = self.counts.get(kind, 0) + 1
        time_ns = whole_number(event.get("time_unix_ns"))
        if not time_ns:
            return
        if kind == "job_started" and self.account.begin_ns is not None:
            self._not_running(time_ns)
        if time_ns > self.told_ns:
            self.told_ns = time_ns
        self.account.reach(time_ns)
        if event.get("generation") != self.generation:
            self.generation = max(self.generation, _integer(event, "generation"))
        act = _ACTS.get(kind)
        try:
            if act is not None:
                act(self, event, time_ns)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError):
            self.counts["not understood"] = self.counts.get("not understood", 0) + 1
        if kind == "step_committed":
            return
        self.incidents.take(event, time_ns, self.step)
        if kind in _MARKED or (kind == "checkpoint_completed" and event.get("tier") != "memory"):
            mark = _MARKED.get(kind, "checkpoint")
            step = self._struck_at(event, time_ns) if mark == "evicted" else _integer(event, "step") or self.step
            self.marks.append(Mark(time_ns, step, mark, known(event.get("worker_id")), cause(event), sentence(event)))
        self._lines += 1
        where = known(event.get("worker_id")), known(event.get("step"))
        self.log.append(Line(self._lines, time_ns, level(event), one_line(kind, 40), *where, sentence(event)))

    def _struck_at(self, event: Event, time_ns: int) -> int:
        """The step that an eviction fell into: that of the fault which was injected, if one was."""
        for mark in reversed(self.marks):
            lately = time_ns - mark.time_ns < _LATELY_NS
            if lately and (mark.kind, mark.worker_id) == ("fault", known(event.get("worker_id"))):
                return mark.step
        return self.step + 1

    def under_way(self, now_ns: int) -> list[Stretch]:
        """What lasts at the moment and no event has ended yet: for the account."""
        found = []
        if self.started_ns is not None:
            found.append(Stretch(self.started_ns, now_ns, "start-up"))
        if self.waiting_ns is not None:
            found.append(Stretch(self.waiting_ns, now_ns, "waiting for workers"))
        elif self._fault_ns is not None and self.state == "recovering":
            found.append(Stretch(self._fault_ns, now_ns, "recovery: other"))
        elif self.stands_still(now_ns):
            found.append(self._standstill(now_ns))
        return found

    def stands_still(self, now_ns: int) -> bool:
        """Whether the next step is overdue by much; of a job that has begun and goes on."""
        begun = self.progress_ns > 0 and self.ended_ns is None
        return begun and self.pace.stands_still((now_ns - self.progress_ns) / 1e9)

    @property
    def progress_ns(self) -> int:
        """When the newest step was committed that is known of, 0 if none was since the start: a recovery ends with one,
        and is told before it."""
        last = self.recoveries[-1].end_ns if self.recoveries and self.last_step_ns else 0
        return max(self.last_step_ns, last)

    def _standstill(self, until_ns: int) -> Stretch:
        due_ns = self.last_step_ns + round(1e9 * (self.pace.usual_s or 0.0))
        return Stretch(min(until_ns, due_ns), until_ns, "stalled")

    def efficiency(self) -> list[dict[str, float]]:
        """By number of workers, rising: samples per second, and that per worker relative to the fewest workers."""
        found: list[dict[str, float]] = []
        for workers, (samples, seconds, steps) in sorted(self.rates.items()):
            if seconds > 0 and steps >= 2 and workers:
                rate = samples / seconds
                base = found[0]["samples_per_s"] / found[0]["workers"] if found else rate / workers
                share = rate / workers / base if base else 0.0
                found.append({"workers": workers, "samples_per_s": rate, "efficiency": share, "steps": steps})
        return found

    def samples_per_s(self, now_ns: int | None = None) -> float | None:
        """Over the newest steps; now_ns: it falls while the next one is overdue."""
        return self.pace.samples_per_s(now_ns)

    def eta_s(self, total_steps: int | None) -> float | None:
        """Seconds to the last step at the speed of the newest steps; None if unknown, or there already."""
        return self.pace.eta_s(self.step, total_steps)

    @property
    def loss_text(self) -> str:
        """Of the newest step; "nan" if it is not finite, "" if there is none."""
        if self.loss is not None:
            return f"{self.loss:.4f}"
        return "nan" if self.strange is not None and self.strange.last == self.step else ""

    @property
    def began_ns(self) -> int:
        """When the job was first started, 0 if it was not."""
        return self.account.begin_ns or 0

    @property
    def faults(self) -> int:
        """Those that were injected, or noticed without having been injected."""
        count = self.counts.get
        coordinators = max(count("coordinator_restarted", 0), count("coordinator_killed", 0))
        return max(count("fault_injected", 0), count("worker_evicted", 0) + coordinators)

    @property
    def checkpoint_step(self) -> int:
        """The newest step of which there is a checkpoint, as far as events tell; 0 if none."""
        return max((c.step for c in self.checkpoints if c.ok), default=0)

    def mean_samples_per_s(self) -> float | None:
        """Over all steps that no change of generation and no evaluation fell into."""
        spent = sum(seconds for _, seconds, _ in self.rates.values())
        return sum(samples for samples, _, _ in self.rates.values()) / spent if spent > 0 else None

    # ---- events

    def _not_running(self, time_ns: int) -> None:
        begin_ns = self.ended_ns or self.told_ns
        self.account.paint(begin_ns, time_ns, "not running")
        self._end_spans(begin_ns)
        self.workers.clear()
        self._seated = frozenset()

    def _job_started(self, event: Event, time_ns: int) -> None:
        self._is("starting")
        self.exit_code, self.ended_ns = None, None
        self.wanted = _integer(event, "workers")
        self.started_ns, self.waiting_ns, self._fault_ns = time_ns, None, None
        self._suspected, self.stopping, self.full = False, None, None
        start = _integer(event, "step")
        self.redo_to = self.step if 0 < start < self.step else 0  # from step 0 on all is told again
        self._go_back(start, time_ns)
        self.step, self.began_again_ns = max(self.step, start), time_ns
        self.last_step_ns, self._clean = 0, False
        self.pace.begin()
        self.strange = self.strange if self.step else None

    def _step_committed(self, event: Event, time_ns: int) -> None:
        step = int(event["step"])
        self.step = step
        loss = _float(event.get("loss"))
        self.loss = loss if loss is not None and math.isfinite(loss) else None
        empty = self.loss is None and not whole_number(event.get("samples"))
        self._finite(step, empty or (self.loss is not None and not event.get("nonfinite")))
        rate = event.get("lr")
        lr = _float(rate[0] if isinstance(rate, list) and rate else rate)
        samples = whole_number(event.get("samples"))
        tokens = number(event["tokens"]) if "tokens" in event else 0.0
        self.tokens_per_sample = tokens / samples if tokens > 0 and samples > 0 else None
        self.steps.add(step, (time_ns / 1e9, loss, loss, loss, lr, samples, self._members))
        passed_s = (time_ns - self.last_step_ns) / 1e9 if self.last_step_ns else 0.0
        clean = self._clean and passed_s > 0.0
        if clean:
            entry = self.rates.setdefault(self._members, [0.0, 0.0, 0.0])
            entry[0] += samples
            entry[1] += passed_s
            entry[2] += 1
        if passed_s > 1.0 and not self.redo_to and self.pace.stands_still(passed_s):
            self.account.intervals.append(self._standstill(time_ns))
        self.pace.commit(time_ns, step, samples, clean)
        self._clean = self.started_ns is None
        self.last_step_ns = time_ns
        self.redo_to = self.redo_to if step < self.redo_to else 0
        if self.incidents.waits:
            self.incidents.committed(time_ns, step)
        unsettled = self.state != "running" or self._suspected or self.started_ns is not None
        if (unsettled or self._fault_ns is not None) and self.incidents.open is None and self.ended_ns is None:
            self._go_on(time_ns)

    def _finite(self, step: int, finite: bool) -> None:
        strange = self.strange
        if finite and strange is not None:
            self.strange = replace(strange, in_a_row=0)
        elif not finite:
            before = strange or Strange(0, step, 0, 0)
            self.strange = Strange(before.count + 1, before.first, step, before.in_a_row + 1)

    def _go_on(self, time_ns: int) -> None:
        """A step was committed: every member is alive, nothing is waited for."""
        if self.started_ns is not None:
            self.account.paint(self.started_ns, time_ns, "start-up")
        self._end_of_waiting(time_ns)
        self.started_ns = self._fault_ns = None
        self._is("running")
        if self._suspected:
            for worker in self.workers.values():
                if worker.state == "suspect":
                    self._be(worker, worker.role, time_ns)
            self._suspected = False

    def _end_of_waiting(self, time_ns: int) -> None:
        if self.waiting_ns is not None:
            self.account.paint(self.waiting_ns, time_ns, "waiting for workers")
            self.waiting_ns = None

    def _generation_started(self, event: Event, time_ns: int) -> None:
        seats = seats_of(event)
        before, self._seated = self._seated, frozenset(seats)
        leaders = event.get("leaders")
        if not isinstance(leaders, list):
            leaders = [event.get("leader")]
        asked = event if cause(event) in _LEFT else None
        for i, worker in self.workers.items():
            if i not in seats and worker.state not in ("dead", "left"):
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
        self._members = sum(1 for w in self.workers.values() if w.role in MEMBERS and w.lanes)
        self.wanted = _integer(event, "target") or self.wanted
        self.account.capacity(time_ns, len(seats) / self.wanted if self.wanted else 1.0)
        if cause(event) in (Cause.INTERRUPTED, Cause.PREEMPTED):
            self._stops(event, time_ns)
        self._clean = False
        self._end_of_waiting(time_ns)
        if self.state == "waiting":
            self._is("recovering" if self.step else "starting")
        if self.started_ns is not None:
            self.account.paint(self.started_ns, time_ns, "start-up")
            self.started_ns = None
            self._is("running")
        name, step = _integer(event, "generation"), _integer(event, "step")
        leading = tuple(i for i in leaders if isinstance(i, int))[:64]
        self.generations.append(Generation(name, time_ns, step, *_why(event), len(seats), leading))

    def _outside(self, members: int) -> str:
        """What a worker in no plan is doing: it is on its way in if somebody is missing."""
        return "healing" if self.generation and (not self.wanted or members < self.wanted) else "spare"

    def _worker_joined(self, event: Event, time_ns: int) -> None:
        i = int(event["worker_id"])
        incarnation = _integer(event, "incarnation")
        before = self.workers.get(i)
        if before is None or before.incarnation != incarnation or before.state in ("dead", "left"):
            members = sum(w.role in MEMBERS and w.state not in ("dead", "left") for w in self.workers.values())
            worker = WorkerFact(i, incarnation, role=self._outside(members))  # in no pool until it is given a seat
            self.workers[i] = worker
            self._be(worker, worker.role, time_ns)
        worker, pids = self.workers[i], event.get("pids")
        worker.pid = known(event.get("pid"))
        listed = pids if isinstance(pids, list) else [worker.pid]
        worker.pids = tuple(one for one in listed[:_MOST_LISTED] if isinstance(one, int))
        worker.host = one_line(event.get("host"), 80)

    def _worker_suspected(self, event: Event, time_ns: int) -> None:
        worker = self.workers.get(int(event["worker_id"]))
        if worker is not None and worker.state not in ("dead", "left"):
            self._be(worker, "suspect", time_ns, event)
            self._suspected = True
        self._fault_ns = self._fault_ns or time_ns

    def _worker_evicted(self, event: Event, time_ns: int) -> None:
        i = int(event["worker_id"])
        died_ns = whole_number(event.get("died_unix_ns")) or time_ns
        worker = self.workers.setdefault(i, WorkerFact(i, _integer(event, "incarnation")))
        worker.lanes = ()
        self._be(worker, "dead", died_ns, event)
        self._is("recovering", event)
        self.reason = f"worker {i}: {self.reason}"
        self._fault_ns = min(self._fault_ns or died_ns, died_ns)

    def _recovery_completed(self, event: Event, time_ns: int) -> None:
        recovery = recovery_of(event, time_ns)
        for part in recovery.phases:
            self.account.paint(part.begin_ns, part.end_ns, part.use)
        self._fault_ns = None
        self.recoveries.append(recovery)

    def _fallback(self, event: Event, time_ns: int) -> None:
        back_to = known(event.get("step"))
        if back_to is None or event.get("what") == "checkpoint":  # that one is not used, which tells no more
            return
        if event.get("steps_redone") is None and back_to >= self.step:
            return
        self.redo_to = max(self.redo_to, self.step, back_to + (known(event.get("steps_redone")) or 0))
        self.steps_lost += max(0, self.step - back_to)
        self._go_back(back_to, time_ns)
        self._clean, self.began_again_ns = False, time_ns
        self.pace.begin()

    def _go_back(self, back_to: int, time_ns: int) -> None:
        """The steps after this one are done again, to the same bits: they are not told again, so their points stay."""
        at = self.steps.at(back_to + 1)
        if at is not None:
            begin_ns = int(self.steps.columns[0][max(0, at - 1)] * 1e9)
            self.account.paint(begin_ns, min(time_ns, self.last_step_ns), "steps done again")
        self.step = min(self.step, back_to)

    def _waiting(self, event: Event, time_ns: int) -> None:
        self._is("waiting", event)
        self.waiting_ns = self.waiting_ns or time_ns

    def _evaluated(self, event: Event, time_ns: int) -> None:
        metrics = event.get("metrics")
        if not isinstance(metrics, dict):
            return
        self.metrics = {one_line(k, 60): number(v) for k, v in list(metrics.items())[:16]}
        self.metrics_step = _integer(event, "step")
        for name, value in self.metrics.items():
            if len(self.evaluations) < 16 or name in self.evaluations:
                series = self.evaluations.setdefault(name, Series(("last", "last")))
                series.add(self.metrics_step, (time_ns / 1e9, value))
        if self.last_step_ns:
            self.account.paint(self.last_step_ns, time_ns, "evaluation")
        self._clean = False

    def _checkpoint(self, event: Event, time_ns: int) -> None:
        result, stall_s = checkpoint_result(event), number(event.get("stall_s"))
        ok, duration_s = result == "complete", number(event.get("duration_s"))
        size = int(number(event.get("size_bytes") or event.get("bytes")))
        tier, step = one_line(event.get("tier"), 20) or "disk", _integer(event, "step")
        fact = CheckpointFact(tier, step, time_ns, ok, duration_s, size, stall_s, *_why(event), result == "skipped")
        self.checkpoints.append(fact)
        if ok and tier == "disk":
            self.full = None
            if step == self.step + 1:  # it was done: its own event comes when the next one is decided
                self.step = step
        elif result == "failed" and fact.cause is Cause.DISK:
            self.full = Trouble(time_ns, fact.reason)
        if ok and stall_s:
            self.account.paint(time_ns - round(stall_s * 1e9), time_ns, "checkpoints")

    def _stops(self, event: Event, time_ns: int) -> None:
        """The job is being ended: since it was asked for, with the newest word for it."""
        if event["kind"] == "generation_started" or event.get("command") == "stop":
            self.stopping = Trouble(self.stopping.time_ns if self.stopping else time_ns, one_line(event.get("reason")))

    def _warning(self, event: Event, time_ns: int) -> None:
        if cause(event) is Cause.DISK:
            self.full = Trouble(time_ns, one_line(event.get("reason")))
        step = _integer(event, "step")
        if cause(event) is Cause.NONFINITE and (self.strange is None or self.strange.last < step):
            self._finite(step, False)  # the last one: its loss does not show it

    def _ended(self, event: Event, time_ns: int) -> None:
        default = "completed" if event["kind"] == "job_completed" else "failed"
        self._is(one_line(event.get("state"), 20) or default, event)
        self.exit_code = known(event.get("exit_code"))
        self.step = max(self.step, _integer(event, "step"))  # the last step is told by nobody else
        self.redo_to, self.stopping = 0, None
        self.account.intervals.extend(self.under_way(time_ns))
        self.started_ns = self.waiting_ns = self._fault_ns = None
        if self.last_step_ns:
            self.account.paint(self.last_step_ns, time_ns, "finishing")
        self.ended_ns = time_ns
        self._end_spans(time_ns)

    def _end_spans(self, time_ns: int) -> None:
        for span in self._open.values():
            span.end_ns = time_ns
        self._open.clear()

    def _is(self, state: str, why: Event | None = None) -> None:
        """From now on the job is in this state; why: the event that says so, where there is something to say."""
        self.state = state
        self.cause, self.reason = (None, "") if why is None else _why(why)

    def _be(self, worker: WorkerFact, state: str, time_ns: int, why: Event | None = None) -> None:
        """From now on the worker is in this state; why: likewise."""
        worker.cause, worker.reason = (None, "") if why is None else _why(why)
        if worker.state == state and worker.worker_id in self._open:
            return
        worker.state, worker.since_ns = state, time_ns
        last = self._open.pop(worker.worker_id, None)
        if last is not None:
            last.end_ns = max(last.begin_ns, time_ns)
        span = Span(worker.worker_id, worker.incarnation, state, time_ns)
        self.spans.append(span)
        if state == "left":
            span.end_ns = time_ns
        else:
            self._open[worker.worker_id] = span


def facts_of(events: Iterable[Event]) -> Facts:
    """What these events add up to."""
    facts = Facts()
    for event in events:
        facts.take(event)
    return facts


_ACTS = {
    "job_started": Facts._job_started,
    "step_committed": Facts._step_committed,
    "generation_started": Facts._generation_started,
    "worker_joined": Facts._worker_joined,
    "worker_suspected": Facts._worker_suspected,
    "worker_evicted": Facts._worker_evicted,
    "recovery_completed": Facts._recovery_completed,
    "fallback": Facts._fallback,
    "waiting": Facts._waiting,
    "evaluated": Facts._evaluated,
    "checkpoint_completed": Facts._checkpoint,
    "checkpoint_failed": Facts._checkpoint,
    "checkpoint_skipped": Facts._checkpoint,
    "warning": Facts._warning,
    "commanded": Facts._stops,
    "job_completed": Facts._ended,
    "job_failed": Facts._ended,
}


def _why(event: Event) -> tuple[Cause, str]:
    return cause(event), one_line(event.get("reason"))


def _float(value: Any) -> float | None:
    return value if type(value) is float else float(value) if isinstance(value, int | float) else None


def _integer(event: Event, name: str) -> int:
    return whole_number(event.get(name))
