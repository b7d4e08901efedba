"""The logs of a run as one stream of lines: workers, coordinator, what was printed, and the events.

Lines of text begin with the time of day (observe/logs.py); the day follows from when the file was last written. JSON
lines bear everything as fields. A line that begins with neither (a traceback, a print) belongs to the one before it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from everstep.report.tail import Tail
from everstep.report.words import level as level_of
from everstep.report.words import number, sentence
from everstep.runtime.address import EVENTS_FILE

LEVELS = ("debug", "info", "warning", "error", "critical")
_TEXT = re.compile(
    r"(?P<clock>\d\d:\d\d:\d\d)[.,](?P<ms>\d{3}) (?:worker \d+\.\d+ gen \d+ step \d+ )?"
    r"(?P<level>[A-Z]+) (?P<text>.*)"
)
_WORKER_FILE = re.compile(r"worker-(\d+)\b")
_DAY_S = 86400.0


@dataclass(frozen=True)
class LogLine:
    """One line. time_s: since 1970, local clock. worker_id: None of the coordinator's and the launcher's."""

    time_s: float
    source: str
    worker_id: int | None
    level: str
    text: str

    def at_least(self, level: str) -> bool:
        """Whether it is of this level or a graver one."""
        return LEVELS.index(self.level) >= LEVELS.index(level)

    def __str__(self) -> str:
        clock = datetime.fromtimestamp(self.time_s).strftime("%H:%M:%S.%f")[:-3]
        return f"{clock} {self.source:<11} {self.level:<7} {self.text}"


class LogFiles:
    """Reads all logs of a run incrementally. Files that appear later are found."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[Path, _LogFile] = {}
        self._events = Tail(run_dir / EVENTS_FILE)

    def read(self, steps: bool = False) -> list[LogLine]:
        """What is new, by time. steps: committed steps, too."""
        for path in sorted((self._run_dir / "logs").glob("*.log")):
            if path not in self._files:
                self._files[path] = _LogFile(path)
        found = [line for file in self._files.values() for line in file.read()]
        found += self._new_events(steps)
        return sorted(found, key=lambda line: line.time_s)

    def _new_events(self, steps: bool) -> Iterator[LogLine]:
        for lines in self._events.read():
            for line in lines:
                event = _object(line)
                if event is None or not isinstance(event.get("kind"), str):
                    continue
                if event["kind"] == "step_committed" and not steps:
                    continue
                worker_id = event.get("worker_id")
                known = worker_id if isinstance(worker_id, int) else None
                yield LogLine(number(event.get("time_unix_ns")) / 1e9, "event", known, level_of(event), sentence(event))


class _LogFile:
    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._path = path
        found = _WORKER_FILE.match(path.name)
        self._worker_id = int(found[1]) if found else None
        self._source = f"worker {found[1]}" if found else path.stem
        self._level = "info"
        self._time_s = 0.0

    def read(self) -> Iterator[LogLine]:
        try:
            written_s = self._path.stat().st_mtime
        except OSError:
            return
        fresh = [self._line(line, written_s) for lines in self._tail.read() for line in lines if line.strip()]
        first = next((line.time_s for line in fresh if line.time_s), written_s)
        for line in fresh:
            yield line if line.time_s else LogLine(first, line.source, line.worker_id, line.level, line.text)

    def _line(self, data: bytes, written_s: float) -> LogLine:
        text = data.decode(errors="replace")
        said = _object(data) if data.startswith(b"{") else None
        found = _TEXT.match(text) if said is None else None
        if said is not None:
            text = self._said(said)
        elif found is not None:
            level = found["level"].lower()
            self._level = level if level in LEVELS else "info"
            self._time_s = _moment(found["clock"], int(found["ms"]), written_s)
            text = found["text"]
        safe = "".join(c if c.isprintable() or c == "\t" else "�" for c in text)
        return LogLine(self._time_s, self._source, self._worker_id, self._level, safe)

    def _said(self, fields: dict[str, Any]) -> str:
        level = str(fields.get("level") or fields.get("levelname") or "info").lower()
        self._level = level if level in LEVELS else "info"
        stamp = fields.get("time_unix_ns") or fields.get("t")
        if isinstance(stamp, int):
            self._time_s = stamp / 1e9
        else:
            self._time_s = _iso(fields.get("timestamp") or fields.get("time") or fields.get("asctime")) or self._time_s
        return str(fields.get("message") or fields.get("msg") or json.dumps(fields))


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _moment(clock: str, ms: int, written_s: float) -> float:
    """The newest moment with this time of day that is not after the file was last written."""
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    day = time.localtime(written_s)
    moment = time.mktime((day.tm_year, day.tm_mon, day.tm_mday, hours, minutes, seconds, 0, 0, -1)) + ms / 1e3
    return moment if moment <= written_s + 60 else moment - _DAY_S


def _iso(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text).replace(",", ".")).timestamp()
    except ValueError:
        return 0.0
