"""Traces of several workers as one: workers as processes, one clock, their steps and phases, and events of the job.

The result is in the form that Perfetto (https://ui.perfetto.dev) and chrome://tracing read. Source: the Trace Event
Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; kineto gives its times in
microseconds since `baseTimeNanoseconds` (unix time).
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from everstep.base.below import drafted, placed
from everstep.base.errors import ConfigError
from everstep.base.given import open_given
from everstep.report.facts import Facts
from everstep.report.words import whole_number
from everstep.runtime.link.address import TRACE_KEY

TraceEvent = dict[str, Any]
_MOST_BYTES = 2 << 30
_JOB_PID = 1
_FIRST_PID = 10
_DEVICE_PIDS = 1_000_000  # beyond the workers'
_STEPS_TID, _PHASES_TID = 1, 2
_OWN_TRACKS = {_STEPS_TID: "steps", _PHASES_TID: "phases"}
_JOB_TRACKS = {1: "generations", 2: "recoveries", 3: "events"}
_FAULTS = frozenset({"evicted", "fault", "fallback", "coordinator", "launcher"})
_FLOWS = frozenset("stfbenSTFNOD")
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


@dataclass
class Trace:
    """Trace of one worker. base_ns: unix time of its zero."""

    said: Mapping[str, Any]
    events: list[TraceEvent]
    base_ns: int

    @property
    def worker_id(self) -> int:
        return whole_number(self.said.get("worker_id"))

    @property
    def name(self) -> str:
        """Name of the worker's track: worker 2 (stage 1, active)."""
        stage, role = self.said.get("stage"), self.said.get("role")
        known = ([f"stage {stage}"] if stage is not None else []) + ([str(role)] if role else [])
        return f"worker {self.worker_id}" + (f" ({', '.join(known)})" if known else "")

    @property
    def window_ns(self) -> tuple[int, int]:
        """Time from the begin of its first step to its end."""
        steps = self.said.get("steps") or [[self.base_ns, 0]]
        return int(steps[0][0]), int(self.said.get("end_ns") or steps[-1][0])


def read_trace(path: Path) -> Trace:
    """The trace in a file. Raises: ConfigError if the file is no trace of a worker."""
    try:
        with open_given(path, 2) as packed, gzip.open(packed, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ConfigError(f"{path} is no trace of a worker: it unpacks to more than {_MOST_BYTES} bytes")
        data = _decode(text)
        return Trace(data[TRACE_KEY], data["traceEvents"], whole_number(data.get("baseTimeNanoseconds")))
    except (OSError, EOFError, ValueError, KeyError, RecursionError, zlib.error) as error:
        raise ConfigError(f"{path} is no trace of a worker: {type(error).__name__}: {error}") from None


def merge(paths: Iterable[Path], facts: Facts, out: Path, folders: int | None = None) -> int:
    """Write the traces at `paths`, with the facts of their time, into one file. Returns its number of events.

    One worker's trace is held in memory at a time. The file is gzipped if its name says so. folders: as for `drafted`.

    Raises: ConfigError for a file that is no trace, or if the result cannot be written.
    """
    begin_ns = end_ns = zero_ns = count = 0
    try:
        with drafted(out, folders) as draft:
            with _open(draft, out.suffix == ".gz") as file:
                file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
                for path in paths:
                    trace = read_trace(path)
                    window = trace.window_ns
                    begin_ns = min(begin_ns or window[0], window[0])
                    end_ns = max(end_ns, window[1])
                    zero_ns = zero_ns or trace.base_ns
                    count += _write(file, worker_events(trace, zero_ns), count)
                    del trace
                count += _write(file, job_events(facts, begin_ns, end_ns, zero_ns), count)
                file.write(b'\n],"baseTimeNanoseconds":%d}\n' % zero_ns)
            placed(draft, out.name)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from None
    return count


def _open(path: Path, small: bool) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "wb", 3)) if small else open(path, "wb")


def _write(file: IO[bytes], events: Iterable[TraceEvent], before: int) -> int:
    count = 0
    for event in events:
        file.write((b",\n" if before + count else b"") + _encode(event))
        count += 1
    return count


def worker_events(trace: Trace, zero_ns: int) -> Iterator[TraceEvent]:
    """A worker's events with ids that no other worker's have, and its own tracks.

    zero_ns: unix time of the zero of all times; one of today, because microseconds since 1970 have no room for parts.
    """
    shift_us = (trace.base_ns - zero_ns) / 1e3
    pid = _FIRST_PID + trace.worker_id
    own = trace.said.get("pid")
    devices: set[int] = set()
    names: list[TraceEvent] = []
    for event in trace.events:
        theirs = event.get("pid")
        if not isinstance(theirs, int) or event.get("cat") == "Trace":
            continue  # events of the profiler about itself
        if theirs != own and event.get("ph") != "M":
            devices.add(theirs)
        event["pid"] = pid if theirs == own else _DEVICE_PIDS + 1000 * trace.worker_id + theirs
        if event.get("ph") == "M":
            names.append(event) if event.get("name") == "thread_name" else None
            continue
        if "ts" in event:
            event["ts"] += shift_us
        if "id" in event and event.get("ph") in _FLOWS:
            event["id"] = f"{trace.worker_id}.{event['id']}"
        yield event
    yield from _row(pid, trace.name, _OWN_TRACKS)
    for device in sorted(devices):
        yield from _row(_DEVICE_PIDS + 1000 * trace.worker_id + device, f"{trace.name}, device {device}", {}, pid)
    known = {pid, *(_DEVICE_PIDS + 1000 * trace.worker_id + device for device in devices)}
    yield from (event for event in names if event["pid"] in known)
    yield from _own_tracks(trace, pid, zero_ns)


def _own_tracks(trace: Trace, pid: int, zero_ns: int) -> Iterator[TraceEvent]:
    """Tracks of the worker's steps and phases; each lasts until the next begins."""
    end_ns = trace.window_ns[1]
    for tid, marks in ((_STEPS_TID, trace.said.get("steps") or []), (_PHASES_TID, trace.said.get("phases") or [])):
        for (at_ns, what), (until_ns, _) in zip(marks, [*marks[1:], (end_ns, "")], strict=True):
            name = f"step {what}" if tid == _STEPS_TID else str(what)
            yield _range(pid, tid, name, at_ns - zero_ns, until_ns - zero_ns, {})


def job_events(facts: Facts, begin_ns: int, end_ns: int, zero_ns: int) -> Iterator[TraceEvent]:
    """Events of the job in this time: generations and recoveries as ranges, faults and others as instants."""
    yield from _row(_JOB_PID, "job", _JOB_TRACKS)
    generations = list(facts.crew.generations)
    for g, until_ns in zip(generations, [*(g.time_ns for g in generations[1:]), end_ns], strict=True):
        if until_ns > begin_ns and g.time_ns < end_ns:
            said = {"cause": g.cause, "reason": g.reason, "members": g.members, "since step": g.step}
            since_ns, until_ns = max(begin_ns, g.time_ns) - zero_ns, min(end_ns, until_ns) - zero_ns
            yield _range(_JOB_PID, 1, f"generation {g.number}", since_ns, until_ns, said)
    for r in facts.recoveries:
        if r.end_ns > begin_ns and r.begin_ns < end_ns:
            said = {"cause": r.cause, "reason": r.reason, **{f"{k}_s": v for k, v in r.phases_s.items()}}
            name = f"recovery to generation {r.generation}"
            yield _range(_JOB_PID, 2, name, r.begin_ns - zero_ns, r.end_ns - zero_ns, said)
    for mark in facts.marks:
        if begin_ns <= mark.time_ns <= end_ns:
            yield {
                "ph": "i",
                "s": "g" if mark.kind in _FAULTS else "p",
                "name": mark.text,
                "cat": mark.kind,
                "pid": _JOB_PID,
                "tid": 3,
                "ts": (mark.time_ns - zero_ns) / 1e3,
                "args": {"step": mark.step, "worker": mark.worker_id},
            }


def _range(pid: int, tid: int, name: str, begin_ns: int, end_ns: int, said: Mapping[str, Any]) -> TraceEvent:
    duration_us = max(0, end_ns - begin_ns) / 1e3
    at = {"pid": pid, "tid": tid, "ts": begin_ns / 1e3, "dur": duration_us}
    return {"ph": "X", "name": name, "cat": TRACE_KEY, **at, "args": dict(said)}


def _row(pid: int, name: str, tracks: Mapping[int, str], order: int | None = None) -> Iterator[TraceEvent]:
    """The name and the place of a process and of its own tracks."""
    yield _meta(pid, 0, "process_name", name=name)
    yield _meta(pid, 0, "process_sort_index", sort_index=pid if order is None else order)
    for tid, track in tracks.items():
        yield _meta(pid, tid, "thread_name", name=track)
        yield _meta(pid, tid, "thread_sort_index", sort_index=tid - 100)


def _meta(pid: int, tid: int, kind: str, **said: Any) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": said}
