"""Details that a page asks for: the log at a moment, a worker's last words, its traces.

They are read from the run's files on request, so that nothing is held in memory. A value from a URL is a number, or is
matched before it becomes part of a path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from everstep.base.given import read_given
from everstep.report.excerpt import around, newest
from everstep.report.logfiles import LogLine
from everstep.report.pulled import pull_logs
from everstep.report.told_facts import Line
from everstep.report.words import one_line
from everstep.runtime.link.address import PROFILES_FOLDER

_MOST_MS = 1 << 53
_LAST_LINES = 40
_PULL_S = 2.0
_MOST_TRACES = 8
_MOST_TRACEBACK = 6000
_MOST_TRACE_BYTES = 64 << 20
_FOLDER = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
_TRACE = re.compile(r"worker-\d{1,7}\.json\.gz")
_LEVELS = {"debug": "info", "critical": "error"}


def as_line(line: LogLine) -> Line:
    """Line of any log as a line of the page."""
    level = _LEVELS.get(line.level, line.level)
    if line.source == "event":
        return Line(0, line.time_ns, level, "event", line.worker_id, line.step, line.text)
    text = one_line(f"{line.source}: {line.text}{' | ' if line.more else ''}{line.more}")
    return Line(0, line.time_ns, level, one_line(line.fields.get("source", "log"), 40), line.worker_id, line.step, text)


def row(line: Line) -> list[Any]:
    """Fields of a line for a page: number, ms, level, kind, worker, step, text."""
    return [line.number, line.time_ns // 1_000_000, *astuple(line)[2:]]


def whole(text: str | None, most: int) -> int | None:
    """Number in a URL; None if it is no number, or beyond `most`."""
    good = text is not None and text.isascii() and text.isdecimal() and len(text) <= 17 and int(text) <= most
    return int(text) if good and text is not None else None


def log_at(run_dir: Path, at: str | None, worker: str | None) -> dict[str, Any]:
    """Lines around a moment, in ms since 1970."""
    at_ms, worker_id = whole(at, _MOST_MS), whole(worker, 1_000_000)
    if at_ms is None or (worker and worker_id is None):
        return {"ok": False, "error": "expected at=MILLISECONDS since 1970, and a worker's id if any"}
    pull_logs(run_dir, timeout_s=_PULL_S)
    lines = around(run_dir, at_ms * 1_000_000, worker_id)
    return {"ok": True, "lines": [row(as_line(line)) for line in lines]}


def worker_detail(run_dir: Path, worker_id: int) -> dict[str, Any]:
    """A worker's last lines, its newest traceback ("" if there is none), and its recorded traces."""
    pull_logs(run_dir, timeout_s=_PULL_S)
    lines = newest(run_dir, worker_id)
    raised = next((line for line in reversed(lines) if line.more), None)
    return {
        "ok": True,
        "log": [row(as_line(replace(line, more=""))) for line in lines[-_LAST_LINES:]],
        "traceback": "" if raised is None else raised.whole()[-_MOST_TRACEBACK:],
        "traceback_ms": 0 if raised is None else raised.time_ns // 1_000_000,
        "traces": _traces((run_dir / PROFILES_FOLDER).glob(f"*/worker-{worker_id}.json.gz")),
    }


def _traces(found: Iterable[Path]) -> list[str]:
    """FOLDER/FILE of the newest traces."""
    named = (path for path in found if _FOLDER.fullmatch(path.parent.name) and _TRACE.fullmatch(path.name))
    return [f"{path.parent.name}/{path.name}" for path in sorted(named, reverse=True)[:_MOST_TRACES]]


def trace(run_dir: Path, folder: str, name: str) -> bytes | None:
    """A trace that a worker has recorded, gzipped; None if there is none of that name."""
    if not _FOLDER.fullmatch(folder) or not _TRACE.fullmatch(name):
        return None
    try:
        return read_given(run_dir / PROFILES_FOLDER / folder / name, _MOST_TRACE_BYTES, 2)
    except OSError:
        return None
