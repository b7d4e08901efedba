"""OpenTelemetry spans of a run with a kill, from the SDK's own exporter in memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sink_cases import PHASES, at, event, generation, killed_run, publish, run_dir_of, step

pytest.importorskip("opentelemetry.sdk.trace")
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from everstep.sinks.otel_spans import OtelSpans
from everstep.sinks.sink import SinkFailed


def spans_of(run_dir: Path, over: bool = True) -> list[Any]:
    exporter = InMemorySpanExporter()
    publish(run_dir, "otel", OtelSpans([exporter]), over)
    return list(exporter.get_finished_spans())


def named(spans: list[Any], name: str) -> list[Any]:
    return sorted((s for s in spans if s.name == f"everstep.{name}"), key=lambda s: s.start_time)


def times(span: Any) -> tuple[int, int]:
    return span.start_time, span.end_time


def test_a_run_with_a_kill_as_a_trace(tmp_path: Path) -> None:
    spans = spans_of(run_dir_of(tmp_path / "mine", killed_run()))
    [job] = named(spans, "job")
    assert (times(job), job.parent, job.status.status_code) == ((at(0), at(14.5)), None, StatusCode.UNSET)
    assert job.resource.attributes["everstep.run"] == "mine"
    assert len({s.context.trace_id for s in spans}) == 1 and len({s.context.span_id for s in spans}) == len(spans)
    first, second = named(spans, "generation")
    assert (times(first), times(second)) == ((at(3), at(8.75)), (at(8.75), at(14.5)))
    assert second.attributes["everstep.reason"] == "worker 0 is dead"
    assert [e.name for e in first.events] == ["worker_evicted"]
    steps = named(spans, "step")
    assert [s.attributes["everstep.step"] for s in steps] == list(range(1, 11))
    assert [times(s) for s in steps[4:6]] == [(at(7), at(8)), (at(8.75), at(9.5))]
    assert [s.parent.span_id for s in steps[4:6]] == [first.context.span_id, second.context.span_id]
    assert steps[3].attributes["everstep.loss"] == 0.25
    [checkpoint] = named(spans, "checkpoint")
    assert times(checkpoint) == (at(13.5), at(14))


def test_a_killed_worker_and_the_phases_of_its_recovery(tmp_path: Path) -> None:
    spans = spans_of(run_dir_of(tmp_path, killed_run()))
    dead, *others = named(spans, "worker")
    assert (times(dead), dead.status.status_code) == ((at(2), at(8.5)), StatusCode.ERROR)
    assert (dead.status.description, dead.attributes["everstep.worker_id"]) == ("killed by SIGKILL", 0)
    assert [s.end_time for s in others] == [at(14.5)] * 2
    [recovery] = named(spans, "recovery")
    assert times(recovery) == (at(8.5), at(9.5))
    assert recovery.attributes["everstep.worker_id"] == 0
    parts = [s for s in spans if s.parent is not None and s.parent.span_id == recovery.context.span_id]
    lengths = {s.name.removeprefix("everstep.recovery."): (s.end_time - s.start_time) / 1e9 for s in parts}
    assert lengths == {phase: seconds for phase, seconds in PHASES.items() if seconds}
    assert parts[0].start_time == at(8.5) and parts[-1].end_time == at(9.5)


@pytest.mark.parametrize("cut", [0, 1, 7, 12, 14, 20])
def test_told_in_two_parts_is_the_same_trace(tmp_path: Path, cut: int) -> None:
    lines = killed_run()
    whole = spans_of(run_dir_of(tmp_path / "run", lines))
    (tmp_path / "run" / "otel" / "published.json").unlink()
    run_dir = run_dir_of(tmp_path / "run", lines[:cut])
    parts = spans_of(run_dir, over=False)
    (run_dir / "events.jsonl").write_bytes(b"".join(lines))
    parts += spans_of(run_dir)
    assert {(s.context.span_id, s.name, times(s)) for s in parts} == {
        (s.context.span_id, s.name, times(s)) for s in whole
    }
    assert len(parts) == len(whole)
    assert spans_of(run_dir) == []


def test_a_job_that_died_and_went_on(tmp_path: Path) -> None:
    lines = killed_run()[:14]
    run_dir = run_dir_of(tmp_path, lines)
    [job] = named(spans_of(run_dir), "job")
    assert (job.end_time, job.status.description) == (at(9.5), "interrupted")
    lines += [event("job_started", 50, step=6, workers=1), generation(51, 3, {0: [0, 1, 2, 3]}, "all are there")]
    lines += [step(7, 52, 3), event("job_failed", 53, state="failed", reason="why", exit_code=1)]
    (run_dir / "events.jsonl").write_bytes(b"".join(lines))
    later = spans_of(run_dir)
    [again] = named(later, "job")
    assert (again.attributes["everstep.attempt"], times(again)) == (2, (at(50), at(53)))
    assert again.status.status_code == StatusCode.ERROR and "why" in again.status.description
    assert [s.attributes["everstep.step"] for s in named(later, "step")] == [7]


def test_short_steps_share_spans(tmp_path: Path) -> None:
    lines = [event("job_started", 0, workers=1), generation(1, 1, {0: [0]}, "go")]
    lines += [step(n, 1 + n / 100, 1) for n in range(1, 101)]
    lines.append(event("job_completed", 2.5, state="completed"))
    steps = named(spans_of(run_dir_of(tmp_path, lines)), "step")
    assert len(steps) == 20
    assert sum(s.attributes["everstep.steps"] for s in steps) == 100
    assert all(a.end_time == b.start_time for a, b in pairwise(steps))


def test_spans_that_are_refused_are_sent_again(tmp_path: Path) -> None:
    class Refusing(InMemorySpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.FAILURE

    run_dir = run_dir_of(tmp_path, killed_run())
    with pytest.raises(SinkFailed, match="could not deliver"):
        publish(run_dir, "otel", OtelSpans([Refusing()]))
    assert len(named(spans_of(run_dir), "step")) == 10


def test_exporters_are_those_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = run_dir_of(tmp_path, killed_run()[:3])
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    publish(run_dir, "otel", OtelSpans())
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nonsense")
    (run_dir / "otel" / "published.json").unlink()
    with pytest.raises(SinkFailed, match="OTEL_TRACES_EXPORTER=nonsense"):
        publish(run_dir, "otel", OtelSpans())
