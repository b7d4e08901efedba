"""Traces of several workers as one: rows, ids, one clock, what befell the job; files that are no traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from everstep.base.errors import ConfigError
from everstep.report.facts import Facts
from everstep.report.traces import merge

BASE_NS = 1_767_225_600_000_000_000
S = 1_000_000_000


def write(folder: Path, worker_id: int, base_ns: int, begin_s: float) -> Path:
    """A trace as kineto writes it: of 0.1 s from `begin_s` after BASE_NS on, with one operation at its begin."""
    pid = 500 + worker_id
    begin_ns = BASE_NS + int(begin_s * S)
    at_us = (begin_ns - base_ns) / 1e3
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": at_us, "args": {"name": "python"}},
        {"ph": "M", "name": "process_name", "pid": 3, "tid": 0, "ts": at_us, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": pid, "ts": at_us, "args": {"name": "thread 1"}},
        {"ph": "M", "name": "thread_name", "pid": 3, "tid": 7, "ts": at_us, "args": {"name": "unused stream"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": pid, "tid": pid, "ts": at_us, "dur": 5.5},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": pid, "tid": pid, "ts": at_us},
        {"ph": "X", "cat": "kernel", "name": "add", "pid": 0, "tid": 7, "ts": at_us, "dur": 2, "args": {"stream": 7}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": at_us, "dur": 9},
    ]
    said = {
        "worker_id": worker_id,
        "pid": pid,
        "stage": worker_id // 2,
        "role": "active",
        "steps": [[begin_ns, 7], [begin_ns + S // 20, 8]],
        "phases": [[begin_ns, "load"], [begin_ns + S // 40, "forward"]],
        "end_ns": begin_ns + S // 10,
    }
    path = folder / f"worker-{worker_id}.json.gz"
    trace = {"traceEvents": events, "baseTimeNanoseconds": base_ns, "everstep": said}
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return path


def facts() -> Facts:
    known = Facts()
    for at_s, kind, more in (
        (1.0, "job_started", {"step": 0}),
        (2.0, "generation_started", {"generation": 1, "workers": [0, 2], "reason": "first"}),
        (10.05, "worker_evicted", {"generation": 1, "worker_id": 1, "reason": "killed by SIGKILL"}),
        (10.06, "generation_started", {"generation": 2, "workers": [0], "reason": "worker 1 died"}),
        (10.08, "recovery_completed", {"generation": 2, "duration_s": 0.03, "phases_s": {"redo": 0.01}, "reason": "x"}),
        (50.0, "recovery_completed", {"generation": 3, "duration_s": 1.0, "phases_s": {}, "reason": "later"}),
        (99.0, "worker_evicted", {"generation": 2, "worker_id": 0, "reason": "later"}),
    ):
        known.take({"time_unix_ns": BASE_NS + int(at_s * S), "kind": kind, "step": 7, **more})
    return known


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_rows_ids_and_one_clock(tmp_path: Path, name: str) -> None:
    paths = [write(tmp_path, 0, BASE_NS, 10.0), write(tmp_path, 2, BASE_NS - 3600 * S, 10.01)]
    out = tmp_path / name
    count = merge(paths, facts(), out)
    data = out.read_bytes()
    trace = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    events = trace["traceEvents"]
    assert len(events) == count and trace["baseTimeNanoseconds"] == BASE_NS
    rows = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert len(set(rows.values())) == len(rows), "two rows must not have one id"
    worker, other = rows["worker 0 (stage 0, active)"], rows["worker 2 (stage 1, active)"]
    assert set(rows) == {
        "job",
        "worker 0 (stage 0, active)",
        "worker 0 (stage 0, active), device 0",
        "worker 2 (stage 1, active)",
        "worker 2 (stage 1, active), device 0",
    }
    times = {e["pid"]: e["ts"] for e in events if e["name"] == "aten::add"}
    assert times[worker] == pytest.approx(10e6, abs=0.01) and times[other] == pytest.approx(10.01e6, abs=0.01)
    assert {e["id"] for e in events if e["name"] == "ac2g"} == {"0.1", "2.1"}
    assert not any(e["pid"] == "Spans" for e in events)
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == worker} == {
        "thread 1",
        "steps",
        "phases",
    }
    own = {e["name"]: (e["ts"], e["dur"]) for e in events if e.get("cat") == "everstep" and e["pid"] == worker}
    assert own == {
        "step 7": (10e6, 50e3),
        "step 8": (10.05e6, 50e3),
        "load": (10e6, 25e3),
        "forward": (10.025e6, 75e3),
    }
    job = [e for e in events if e["pid"] == rows["job"] and e["ph"] != "M"]
    ranges = {e["name"]: (e["ts"], e["dur"]) for e in job if e["ph"] == "X"}
    assert ranges["generation 1"] == (10e6, 60e3) and ranges["generation 2"] == (10.06e6, 50e3)
    assert ranges["recovery to generation 2"] == (pytest.approx(10.05e6), pytest.approx(30e3)) and len(ranges) == 3
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] == rows["job"]}
    there = {e["name"].partition(" ")[0]: e["tid"] for e in job if e["ph"] == "X"}
    assert there == {"generation": tracks["generations"], "recovery": tracks["recoveries"]}
    assert [e["name"] for e in job if e["ph"] == "i"] == ["worker 1 was evicted: killed by SIGKILL"]


def test_every_row_is_named_and_placed_once_a_device_beside_its_worker(tmp_path: Path) -> None:
    paths = [write(tmp_path, i, BASE_NS, 10.0) for i in (11, 0, 2)]
    merge(paths, facts(), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = {e["pid"] for e in events if e["ph"] != "M"}
    told: dict[str, dict[int, Any]] = {"process_name": {}, "process_sort_index": {}}
    for e in events:
        if e["name"] in told:
            assert e["pid"] in shown and e["pid"] not in told[e["name"]], e
            told[e["name"]][e["pid"]] = next(iter(e["args"].values()))
    assert all(set(of_all) == shown for of_all in told.values())
    places = told["process_sort_index"]
    names = [name for _, name in sorted((places[pid], name) for pid, name in told["process_name"].items())]
    workers = [f"worker {i} (stage {i // 2}, active)" for i in (0, 2, 11)]
    assert names == ["job", *(row for name in workers for row in (name, f"{name}, device 0"))]
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert tracks <= {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"} | {(p, 7) for p, _ in tracks}


@pytest.mark.parametrize("begins", [(10.0, 10.05), (10.05, 10.0)])
def test_the_rows_of_the_job_cover_all_traces_whichever_comes_first(tmp_path: Path, begins: tuple[float, ...]) -> None:
    paths = [write(tmp_path, 2 * k, BASE_NS, begin_s) for k, begin_s in enumerate(begins)]
    merge(paths, facts(), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    times = [e["ts"] + e.get("dur", 0) for e in events if e["name"].startswith("generation")]
    first = next(e["ts"] for e in events if e["name"] == "generation 1")
    assert (first, max(times)) == (10e6, 10.15e6)


def test_what_is_no_trace_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.json.gz"
    for data in (b"no gzip", gzip.compress(b"{}"), gzip.compress(b'{"traceEvents": [')[:-9]):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="no trace of a worker"):
            merge([path], facts(), tmp_path / "trace.json")
    with pytest.raises(ConfigError, match="cannot write"):
        merge([], facts(), tmp_path / "nowhere" / "trace.json")
    assert [p.name for p in tmp_path.iterdir()] == ["worker-0.json.gz"]
