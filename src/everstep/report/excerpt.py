"""The logs of a run around one moment, however long they are. Each file is in the order of time, so the place is found
by halving, and only its surroundings are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from everstep.base.given import open_given
from everstep.report.logfiles import WORKER_FILE, LogLine, event_line, record_line
from everstep.report.tail import object_of
from everstep.report.words import whole_number
from everstep.runtime.link.address import EVENTS_FILE, LOGS_FOLDER

_NEAR_BYTES = 96 << 10
_MOST_LINE_BYTES = 1 << 20
_MOST_FILES = 512
_MOST_STEPS = 40


def around(run_dir: Path, time_ns: int, worker_id: int | None = None, most: int = 160) -> list[LogLine]:
    """The lines nearest to this unix time, in the order of time: events, and output of workers.

    worker_id: only this one of the workers. most: at most so many lines, of which committed steps are a quarter.
    """
    told = [line for said in _near(run_dir / EVENTS_FILE, time_ns) if (line := event_line(said)) is not None]
    steps = [line for line in told if line.fields["kind"] == "step_committed"]
    found = [line for line in told if line.fields["kind"] != "step_committed"]
    pattern = "worker-*.jsonl" if worker_id is None else f"worker-{worker_id}.*jsonl"
    for path in sorted((run_dir / LOGS_FOLDER).glob(pattern))[:_MOST_FILES]:
        whose = WORKER_FILE.match(path.name)
        if whose is not None:
            found += [record_line(int(whose[1]), said) for said in _near(path, time_ns)]
    nearest = _nearest(found, time_ns, most - _MOST_STEPS) + _nearest(steps, time_ns, _MOST_STEPS)
    return sorted(nearest, key=lambda line: line.time_ns)


def newest(run_dir: Path, worker_id: int, most: int = 200) -> list[LogLine]:
    """The last lines of a worker, in the order of time."""
    paths = (run_dir / LOGS_FOLDER).glob(f"worker-{worker_id}.*jsonl")
    found = [record_line(worker_id, said) for path in list(paths)[:_MOST_FILES] for said in _near(path, 1 << 62)]
    return sorted(found, key=lambda line: line.time_ns)[-most:]


def _nearest(lines: list[LogLine], time_ns: int, most: int) -> list[LogLine]:
    return sorted(lines, key=lambda line: abs(line.time_ns - time_ns))[:most]


def _near(path: Path, time_ns: int) -> Iterator[dict[str, object]]:
    """The objects in a file about the place where that moment is."""
    data = b""
    with contextlib.suppress(OSError), open_given(path, 1) as file:
        place = _place(file, time_ns)
        begin = max(0, place - _NEAR_BYTES)
        file.seek(begin)
        data = file.read(place - begin + _NEAR_BYTES)
        if begin:
            data = data.partition(b"\n")[2]
    whole = data[: data.rfind(b"\n") + 1]
    return filter(None, map(object_of, whole.splitlines()))


def _place(file: BinaryIO, time_ns: int) -> int:
    """Offset, in bytes, near the first line of that moment."""
    low, high = 0, file.seek(0, 2)
    while high - low > _NEAR_BYTES // 4:
        middle = (low + high) // 2
        at_ns = _time_after(file, middle)
        if at_ns is None or at_ns >= time_ns:
            high = middle
        else:
            low = middle
    return high


def _time_after(file: BinaryIO, place: int) -> int | None:
    """Time of the first whole line from there on; None if none follows soon."""
    file.seek(place)
    file.readline(_MOST_LINE_BYTES)
    for _ in range(8):
        found = object_of(file.readline(_MOST_LINE_BYTES)) or {}
        if time_ns := whole_number(found.get("time_unix_ns")):
            return time_ns
    return None
