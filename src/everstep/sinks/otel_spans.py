"""OpenTelemetry: a job as a trace: generations, steps, workers, recoveries with their phases, checkpoints.

Times are those of the events. Ids follow from the job and from the kind of span, so that a span that is sent twice is
the same span. The standard OTEL_* variables say where spans go.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, Status, StatusCode

from everstep import __version__
from everstep.base.errors import EverstepError
from everstep.report.recovery import recovery_of
from everstep.report.words import Event, known, number, one_line, whole_number
from everstep.sinks.sink import OVER, Sink, SinkJob, otlp_protocol

SHORTEST_NS = 50_000_000  # shorter steps share a span: 20 a second at most
_PORTION = 512
_ENDS = ("job_completed", "job_failed")
_Attributes = dict[str, str | bool | int | float]


@dataclass
class _Steps:
    """Steps that share a span."""

    begin_ns: int
    end_ns: int
    first: int
    last: int
    loss: float | None


class OtelSpans(Sink, SpanProcessor):
    """Exports spans once they have ended: it is the processor of its own spans, and so hears of their ends.

    exporters: None: those that the environment names.
    """

    remembers = True

    def __init__(self, exporters: list[SpanExporter] | None = None) -> None:
        self._exporters = exporters
        self._finished: list[ReadableSpan] = []
        self._job: Span | None = None
        self._generation: Span | None = None
        self._workers: dict[int, Span] = {}
        self._seated: set[int] = set()
        self._steps: _Steps | None = None
        self._attempt = 0
        self._last_ns = 0
        self._step_ns = 0
        self._generation_ns = 0

    def begin(self, run: SinkJob, config: Mapping[str, Any]) -> None:
        """Begin one trace for all attempts of a job. Raises: EverstepError for an exporter that is not installed."""
        if self._exporters is None:
            self._exporters = _exporters()
        self._run = run
        self._ids = _Ids(run.identity)
        said = os.environ.get("OTEL_SERVICE_NAME") or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        about = {"everstep.run": run.name, "everstep.task": run.task}
        resource = Resource.create(about if said else {"service.name": "everstep", **about})
        provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(self)
        self._tracer = provider.get_tracer("everstep", __version__)

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span that has ended; one that was sent before is not sent again."""
        if not self._run.again:
            self._finished.append(span)

    def scalars(self, step: int, time_ns: int, values: Mapping[str, float]) -> None:
        """Note a committed step: it lasts from the one before, or from the beginning of its generation."""
        if "job/generation" not in values:
            return
        begin_ns = min(time_ns, max(self._step_ns, self._generation_ns) or time_ns)
        self._step_ns = self._last_ns = time_ns
        steps = self._steps
        if steps is None:
            steps = self._steps = _Steps(begin_ns, time_ns, step, step, None)
        steps.end_ns, steps.last, steps.loss = max(time_ns, steps.begin_ns), step, values.get("train/loss")
        if steps.end_ns - steps.begin_ns >= SHORTEST_NS:
            self._end_steps()

    def event(self, step: int, text: str, event: Event) -> None:
        """Make a span of an event that lasts; an event of one moment is added to the generation's span."""
        kind, time_ns = str(event["kind"]), whole_number(event.get("time_unix_ns"))
        self._last_ns = max(self._last_ns, time_ns) if kind != "job_started" else self._last_ns
        lasts = _LASTING.get(kind)
        where = self._generation or self._job
        if lasts is not None:
            lasts(self, event, time_ns)
        elif where is not None:
            about = _about(event, "step", "generation", "worker_id", "incarnation", "cause")
            where.add_event(kind, {**about, "message": text}, timestamp=time_ns)
        if kind == "worker_evicted":
            self._evicted(event, time_ns)
        if kind in _ENDS:
            self._close(time_ns, "" if kind == _ENDS[0] else text)

    def flush(self) -> None:
        """Export all ended spans. Raises: EverstepError if an exporter refuses."""
        for exporter in self._exporters or ():
            for start in range(0, len(self._finished), _PORTION):
                portion = self._finished[start : start + _PORTION]
                if exporter.export(portion) is not SpanExportResult.SUCCESS:
                    where = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "the default endpoint")
                    raise EverstepError(f"{type(exporter).__name__} could not deliver spans to {where}")
        self._finished.clear()

    def end(self, state: str) -> None:
        """End open spans if the job is over; spans of a job that goes on are told later."""
        if state in OVER:
            self._run.again = False
            self._close(self._last_ns, state)
            self._run.memory["closed"] = str(self._attempt)
        self.flush()
        for exporter in self._exporters or ():
            exporter.shutdown()

    # ---- spans

    def _start(
        self, name: str, begin_ns: int, parent: Span | None, key: str, attributes: Mapping[str, Any] | None = None
    ) -> Span:
        self._ids.key = key
        context = trace.set_span_in_context(parent, Context()) if parent is not None else Context()
        said = {k: v for k, v in (attributes or {}).items() if v is not None}
        return self._tracer.start_span(f"everstep.{name}", context, start_time=begin_ns, attributes=said)

    def _new_attempt(self, event: Event, time_ns: int) -> None:
        self._close(self._last_ns or time_ns, "interrupted")
        self._attempt += 1
        about = {"everstep.attempt": self._attempt, **_about(event, "cause", "reason", "workers")}
        self._job = self._start("job", time_ns, None, f"job {time_ns}", about)
        self._step_ns = self._generation_ns = 0
        self._last_ns = max(self._last_ns, time_ns)

    def _end_steps(self) -> None:
        steps, self._steps = self._steps, None
        if steps is None:
            return
        count, parent = steps.last - steps.first + 1, self._generation or self._job
        about = {"everstep.step": steps.last, "everstep.steps": count, "everstep.loss": steps.loss}
        self._start("step", steps.begin_ns, parent, f"step {steps.last}", about).end(steps.end_ns)

    def _new_generation(self, event: Event, time_ns: int) -> None:
        self._end_steps()
        if self._generation is not None:
            self._generation.end(time_ns)
        members = event.get("workers")
        seated = {i for i in members if isinstance(i, int)} if isinstance(members, list) else set()
        for worker_id in self._seated - seated:
            self._end_worker(worker_id, time_ns, "")
        self._seated = seated
        self._generation_ns = time_ns
        about = {**_about(event, "generation", "cause", "reason"), "everstep.workers": sorted(seated)}
        self._generation = self._start("generation", time_ns, self._job, f"generation {time_ns}", about)

    def _joined(self, event: Event, time_ns: int) -> None:
        worker_id = known(event.get("worker_id"))
        if worker_id is not None:
            self._end_worker(worker_id, time_ns, "")
            about = _about(event, "worker_id", "incarnation", "pid", "host")
            key = f"worker {worker_id}.{event.get('incarnation')} {time_ns}"
            self._workers[worker_id] = self._start("worker", time_ns, self._job, key, about)

    def _evicted(self, event: Event, time_ns: int) -> None:
        worker_id = known(event.get("worker_id"))
        if worker_id is not None:
            self._seated.discard(worker_id)
            reason = one_line(event.get("reason")) or "evicted"
            self._end_worker(worker_id, whole_number(event.get("died_unix_ns")) or time_ns, reason)

    def _end_worker(self, worker_id: int, time_ns: int, why: str) -> None:
        span = self._workers.pop(worker_id, None)
        if span is not None:
            if why:
                span.set_status(Status(StatusCode.ERROR, why))
            span.end(time_ns)

    def _recovery(self, event: Event, time_ns: int) -> None:
        """Make the span of a recovery, from the fault to the next committed step, with its phases one after another."""
        recovery = recovery_of(event, time_ns)
        about = _about(event, "generation", "step", "worker_id", "incarnation", "cause", "reason")
        span = self._start("recovery", recovery.begin_ns, self._job, f"recovery {time_ns}", about)
        for part in recovery.phases:
            phase = part.use.removeprefix("recovery: ")
            key = f"recovery {time_ns} {phase}"
            self._start(f"recovery.{phase}", part.begin_ns, span, key).end(part.end_ns)
        span.end(time_ns)

    def _checkpoint(self, event: Event, time_ns: int) -> None:
        begin_ns = time_ns - round(max(0.0, number(event.get("duration_s"))) * 1e9)
        about = _about(event, "step", "tier", "size_bytes", "written_bytes", "stall_s", "cause", "reason")
        key = f"checkpoint {event.get('tier')} {event.get('step')} {time_ns}"
        span = self._start("checkpoint", begin_ns, self._generation or self._job, key, about)
        if event["kind"] == "checkpoint_failed":
            span.set_status(Status(StatusCode.ERROR, one_line(event.get("reason"))))
        span.end(time_ns)

    def _close(self, time_ns: int, why: str) -> None:
        """End all open spans. why: "" if the job is done."""
        if self._job is None:
            return
        sent = self._run.again
        self._run.again = sent or self._attempt <= int(self._run.memory.get("closed", 0))
        self._end_steps()
        for worker_id in list(self._workers):
            self._end_worker(worker_id, time_ns, "")
        self._seated.clear()
        if self._generation is not None:
            self._generation.end(time_ns)
        if why:
            self._job.set_status(Status(StatusCode.ERROR, why))
        self._job.end(time_ns)
        self._job = self._generation = None
        self._run.again = sent


_LASTING = {
    "job_started": OtelSpans._new_attempt,
    "generation_started": OtelSpans._new_generation,
    "worker_joined": OtelSpans._joined,
    "recovery_completed": OtelSpans._recovery,
    "checkpoint_completed": OtelSpans._checkpoint,
    "checkpoint_failed": OtelSpans._checkpoint,
}
"""Kinds of events that begin or are a span; of all others only the moment is told."""


def _about(event: Event, *names: str) -> _Attributes:
    """Fields of an event as attributes."""
    found = {f"everstep.{name}": event.get(name) for name in names}
    return {k: one_line(v) if isinstance(v, str) else v for k, v in found.items() if isinstance(v, str | int | float)}


def _exporters() -> list[SpanExporter]:
    """Exporters that OTEL_TRACES_EXPORTER names: otlp (the default), console, none, or any that is installed."""
    names = [name.strip() for name in os.environ.get("OTEL_TRACES_EXPORTER", "").split(",") if name.strip()] or ["otlp"]
    found: list[SpanExporter] = []
    for name in names:
        if name == "none":
            continue
        entry = f"otlp_proto_{'grpc' if otlp_protocol() == 'grpc' else 'http'}" if name == "otlp" else name
        points = importlib.metadata.entry_points(group="opentelemetry_traces_exporter", name=entry)
        if not points:
            raise EverstepError(f"OTEL_TRACES_EXPORTER={name}: no such exporter is installed")
        found.append(next(iter(points)).load()())
    return found


class _Ids(IdGenerator):
    """Ids derived from the spans' keys; `key` is set before each."""

    def __init__(self, identity: str) -> None:
        self.key = ""
        self._identity = identity

    def generate_trace_id(self) -> int:
        return self._hash("trace", 16)

    def generate_span_id(self) -> int:
        return self._hash(self.key, 8)

    def _hash(self, what: str, size_bytes: int) -> int:
        digest = hashlib.sha256(f"{self._identity} {what}".encode()).digest()
        return int.from_bytes(digest[:size_bytes], "big") or 1
