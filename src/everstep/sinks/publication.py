"""One job told to one sink: each step and event in order, once, however often publishing starts again.

Everything is read through the reading library, from the first line on, so that all values that depend on earlier ones
(workers, generations, the account of the time) are right. Earlier deliveries are counted in the sink's own folder
(`DIR/<name>/published.json`) and not repeated.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any

import msgspec

from everstep.base.below import folder_of, write_atomically
from everstep.base.config_keys import NOTICES
from everstep.base.given import read_given
from everstep.report.history import History
from everstep.report.shown_settings import shown_settings
from everstep.report.usage import Newest
from everstep.report.wall_time import goodput
from everstep.report.words import Event, as_dict, number, one_line, sentence, whole_number
from everstep.runtime.files.run_lock import sole_holder
from everstep.sinks.sink import Sink, SinkFailed, SinkJob

CURSOR_FILE = "published.json"
_LOCK_FILE = "publishing.lock"
_MOST_WORKERS = 64
_LATE_S = 5.0  # by then samples of all hosts are there


@dataclass
class SinkCursor:
    """Progress of a sink. lines: events; sampled_s, sampled_step: samples of the workers' time and memory. begun_ns:
    the first event, by which another job in the same directory is recognised."""

    begun_ns: int = 0
    lines: int = 0
    sampled_s: float = 0.0
    sampled_step: int = 0
    memory: dict[str, str] = field(default_factory=dict)


_cursor = msgspec.json.Decoder(SinkCursor)


def read_cursor(folder: Path) -> SinkCursor:
    """Cursor in a sink's folder; a fresh one if there is none, or it is malformed."""
    try:
        return _cursor.decode(read_given(folder / CURSOR_FILE, folders=1))
    except (OSError, ValueError, RecursionError):
        return SinkCursor()


class Publication:
    """Tells a sink the news of a run directory each time `advance` is called.

    steps, events: numbers delivered by this object. notify: rules of notices, which the caller has to give, because the
    directory may have been prepared by another user.
    """

    def __init__(self, run_dir: Path, name: str, sink: Sink, notify: Mapping[str, Any] | None = None) -> None:
        self.run_dir = run_dir
        self.name = name
        self._notify = notify or {}
        self.folder = run_dir / name
        self.history = History(run_dir, heard=self._event)
        self.steps = self.events = 0
        self._sink = sink
        self._cursor = read_cursor(self.folder)
        self._run: SinkJob | None = None
        self._lines = 0
        self._step = self._evaluated = self._told_step = 0
        self._numbered: tuple[int, dict[str, float]] = (-1, {})
        self._last_ns = self._goodput_ns = 0
        self._carried: dict[str, float] = {}
        self._sampled_s = self._cursor.sampled_s
        self._worker_step = self._cursor.sampled_step

    def advance(self, over: bool) -> bool:
        """Deliver news, and remember that; returns whether there were any. over: the job has ended.

        Raises: SinkFailed. Then make a new publication, which goes on from there.
        """
        before = (self.steps, self.events, self._cursor.sampled_step)
        while self.history.poll():
            self._keep(everything=False)
        if self.history.trouble:
            raise SinkFailed(f"events cannot be read: {self.history.trouble}")
        if over:
            self._keep(everything=True)
        return before != (self.steps, self.events, self._cursor.sampled_step)

    def end(self, running: bool) -> None:
        """End the sink. Raises: SinkFailed."""
        if self._run is not None:
            with self._failing():
                self._sink.end(self.history.state(running))
            self._save(self._run)

    # ---- events

    def _event(self, event: Event) -> None:
        time_ns = whole_number(event.get("time_unix_ns"))
        if self.history.resets:
            return  # the job was begun again meanwhile: for another Publication
        if not self._lines and self._cursor.begun_ns not in (0, time_ns):
            self._cursor, self._sampled_s = SinkCursor(), 0.0
        if self._lines <= self._cursor.lines:
            self._told_step = max(self._step, self._evaluated)
        self._lines += 1
        again = self._lines <= self._cursor.lines
        if not self._cursor.lines and self._lines == 1:
            self._cursor.begun_ns = time_ns
        kind = event["kind"]
        if not time_ns:
            return
        if kind == "job_started":
            self._last_ns = 0
        if kind == "step_committed":
            self._committed(event, time_ns, again)
            return
        if kind == "logged":
            self._numbers(event, time_ns, again)
            return
        if kind == "evaluated":
            self._measured(event, time_ns, again)
        self.events += not again
        if self._wanted(again):
            with self._failing():
                self._sink.event(self._step, sentence(event), event)

    def _committed(self, event: Event, time_ns: int, again: bool) -> None:
        step = whole_number(event.get("step"))
        if step <= self._step:
            return  # told before: the step was done again, to the same bits
        facts = self.history.facts
        rates = event.get("lr")
        rates = rates if isinstance(rates, list) else [rates]
        said = {"train/loss": event.get("loss"), "train/grad_norm": event.get("grad_norm")}
        said |= {
            "train/lr" + (f"/{i}" if i else ""): rate for i, rate in enumerate(rates[:16]) if not i or rate != rates[0]
        }
        values = {k: number(v) for k, v in said.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        values |= _logged(event)
        if event.get("nonfinite"):
            values["train/nonfinite"] = 1.0  # what is not finite has no number
        samples = whole_number(event.get("samples"))
        if self._last_ns and time_ns > self._last_ns and step == self._step + 1:
            values["speed/step_s"] = (time_ns - self._last_ns) / 1e9
            values["speed/samples_per_s"] = samples / values["speed/step_s"]
        values["job/generation"] = whole_number(event.get("generation"))
        values["job/workers"] = facts.course.steps.columns[6][-1] if facts.course.steps.x else 0
        begin_ns = facts.account.begin_ns or time_ns
        if time_ns - self._goodput_ns >= max(1e9, (time_ns - begin_ns) / 200):
            share = goodput(facts.account.seconds(facts.under_way(time_ns)))
            self._goodput_ns = time_ns
            if share is not None:
                values["job/goodput"] = share
        self._step, self._last_ns = step, time_ns
        self.steps += not again
        self._tell(step, time_ns, values, again)

    def _measured(self, event: Event, time_ns: int, again: bool) -> None:
        step, metrics = whole_number(event.get("step")), event.get("metrics")
        if isinstance(metrics, Mapping) and step > self._evaluated:
            self._evaluated = step
            found = {k: number(v, nan) for k, v in list(metrics.items())[:64]}
            told = {f"eval/{one_line(k, 60)}": value for k, value in found.items() if isfinite(value)}
            self._tell(step, time_ns, told, again)

    def _numbers(self, event: Event, time_ns: int, again: bool) -> None:
        """Tell numbers of the leader, except those that a new leader repeats."""
        step, values = whole_number(event.get("step")), _logged(event)
        if step > self._numbered[0] or (step == self._numbered[0] and values != self._numbered[1]):
            self._numbered = step, values
            self._tell(step, time_ns, values, again)

    # ---- samples of the workers' time and memory

    def _breakdown(self, everything: bool) -> None:
        """Tell seconds of a worker per step, by phase, over each stretch in which steps were done."""
        usage, cursor = self.history.usage, self._cursor
        newest_ns = max((worker.time_ns for worker in usage.workers.values()), default=0)
        through_s = min(newest_ns / 1e9 - _LATE_S, self.history.facts.course.last_step_ns / 1e9)
        for key in sorted(usage.buckets):
            end_s = (key + 1) * usage.width_s
            if end_s <= self._sampled_s:
                continue
            if end_s > through_s and not everything:
                return
            self._sampled_s = end_s
            for phase, seconds in usage.buckets[key].seconds.items():
                self._carried[phase] = self._carried.get(phase, 0.0) + seconds
            step, members = self._at(end_s)
            passes = (step - cursor.sampled_step) * members
            if passes < 0:
                self._carried = {}  # these steps are done again
            elif not self._carried:
                cursor.sampled_step = step  # nothing was measured before
            elif passes:
                values = {f"time/{phase}_s": seconds / passes for phase, seconds in self._carried.items()}
                cursor.sampled_s, cursor.sampled_step, self._carried = end_s, step, {}
                self._tell(step, round(end_s * 1e9), values, again=False)

    def _at(self, time_s: float) -> tuple[int, int]:
        """The newest step at a time, and the number of workers that did it."""
        steps = self.history.facts.course.steps
        at = bisect.bisect_right(steps.columns[0], time_s) - 1
        return (int(steps.x[at]), int(steps.columns[6][at])) if at >= 0 else (0, 0)

    def _each_worker(self) -> None:
        """Tell the newest samples of the first workers, while they are new."""
        usage, facts = self.history.usage, self.history.facts
        newest_ns = max((worker.time_ns for worker in usage.workers.values()), default=0)
        step = self._at(newest_ns / 1e9)[0]
        if facts.condition.ended_ns is not None or step <= self._worker_step:
            return
        self._worker_step = step
        values: dict[str, float] = {}
        for worker_id, worker in sorted(usage.workers.items())[:_MOST_WORKERS]:
            fact = facts.crew.workers.get(worker_id)
            if fact is not None and fact.state not in ("dead", "left"):
                values |= {f"worker{worker_id}/{name}": value for name, value in _of_worker(worker)}
        self._tell(step, newest_ns, values, again=False)

    # ---- the sink

    def _tell(self, step: int, time_ns: int, values: Mapping[str, float], again: bool) -> None:
        if values and self._wanted(again):
            with self._failing():
                self._sink.scalars(step, time_ns, values)

    def _wanted(self, again: bool) -> bool:
        """Whether to tell the sink; begins it at its first news."""
        if again and not self._sink.remembers:
            return False
        if self._run is None:
            self._begin()
        if self._run is not None:
            self._run.again = again
        return True

    def _begin(self) -> None:
        job, fresh, memory = self.history.job, not self._cursor.lines, dict(self._cursor.memory)
        created_ns = whole_number(job.get("created_unix_ns"))
        identity = hashlib.sha256(f"{self.run_dir.resolve()} {created_ns}".encode()).hexdigest()[:16]
        identity = memory.setdefault("identity", identity)
        known_as = (self.history.name, str(job.get("task", "")), identity, created_ns)
        self._run = SinkJob(self.run_dir, self.folder, *known_as, fresh, self._told_step, memory)
        with self._failing():
            with folder_of(self.folder / CURSOR_FILE, 1, make=True) as folder:
                links = [entry.name for entry in os.scandir(folder) if entry.is_symlink()]
            if links:
                raise SinkFailed(f"{self.folder / links[0]} is a symbolic link: remove it, none is followed there")
            config = shown_settings(as_dict(job.get("config")))
            self._sink.begin(self._run, {NOTICES: self._notify} if self.name == NOTICES else config)

    def _keep(self, everything: bool) -> None:
        """Remember that all deliveries have arrived. everything: also tell samples that others may still complete."""
        self._breakdown(everything)
        self._each_worker()
        if self._run is None:
            return
        with self._failing():
            self._sink.flush()
        self._cursor.lines = max(self._cursor.lines, self._lines)
        self._save(self._run)

    def _save(self, run: SinkJob) -> None:
        self._cursor.memory = run.memory
        with self._failing():
            write_atomically(self.folder / CURSOR_FILE, json.dumps(asdict(self._cursor)) + "\n", 1)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any error of a library
            said = one_line(error, 300) or "no reason given"
            raise SinkFailed(f"the sink {self.name} failed: {type(error).__name__}: {said}") from error


def _logged(event: Event) -> dict[str, float]:
    """Values that the script has logged with an event."""
    found = as_dict(event.get("metrics")) if "metrics" in event else {}
    return {f"log/{one_line(k, 60)}": number(v) for k, v in list(found.items())[:64] if type(v) in (int, float)}


def _of_worker(worker: Newest) -> Iterator[tuple[str, float]]:
    row, spent = worker.row, worker.spent
    for name in ("rss_bytes", "device_allocated_bytes", "device_reserved_bytes"):
        if row.get(name):
            yield name, number(row.get(name))
    if spent is not None:
        for name in ("step_s", "communication_s", "busy"):
            value = getattr(spent, name)
            if value is not None:
                yield name, value
        yield from ((f"sent_bytes_per_s/{op}", value) for op, value in spent.bytes_per_s.items())


@contextlib.contextmanager
def sole_publisher(run_dir: Path, name: str) -> Iterator[None]:
    """Keep all other processes from telling this job to this sink meanwhile.

    Raises: ConfigError if another process does, or the sink's folder cannot be written.
    """
    held = f"{run_dir} is being published to {name} by another process: a running job with it among its sinks?"
    with sole_holder(run_dir, f"{name}/{_LOCK_FILE}", held):
        yield


def follow(
    make: Callable[[], Publication],
    wait: Callable[[float], bool],
    warn: Callable[[str, bool], None],
    poll_s: float = 1.0,
) -> bool:
    """Publish until the job is over; failures are tried again later. Returns whether everything has arrived.

    wait: waits for so many seconds, or until the job is over; returns whether it is. warn: called once with a message,
    and whether the job runs.
    """
    publication: Publication | None = None
    pause_s, warned, over = 0.0, False, False
    while True:
        over = over or wait(pause_s)
        try:
            publication = publication or make()
            new = publication.advance(over)
            pause_s = poll_s
            if over and not new:
                publication.end(running=False)
                return True
        except SinkFailed as error:
            runs = not over and (publication is None or publication.history.facts.condition.ended_ns is None)
            publication = None
            pause_s = min(900.0, max(60.0, 2 * pause_s))
            if not warned:
                warn(str(error), runs)
                warned = True
            if over:
                return False
