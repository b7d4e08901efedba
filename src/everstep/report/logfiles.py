"""The logs of a run as one stream of lines by time: output and logs of workers, the coordinator's lines, the events.

Workers' files hold a record per line (runtime/host/collector.py). The other processes print only their own trouble, as
text: such a line is as old as its file.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from everstep.base.visible import visible
from everstep.observe.logs import LEVELS
from everstep.report.tail import Folder, Tail, object_of
from everstep.report.words import known, sentence, whole_number
from everstep.report.words import level as level_of
from everstep.runtime.link.address import EVENTS_FILE, LOGS_FOLDER
from everstep.train.console import OUTPUT_FILE

WORKER_FILE = re.compile(r"worker-(\d+)\.")


@dataclass(frozen=True)
class LogLine:
    """One line. worker_id: None for the coordinator's and the agent's. more: a traceback. fields: the record."""

    time_ns: int
    source: str
    worker_id: int | None
    level: str
    text: str
    step: int | None = None
    more: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def at_least(self, level: str) -> bool:
        """Whether the line has this level or a graver one."""
        return LEVELS.index(self.level) >= LEVELS.index(level)

    def has(self, text: str) -> bool:
        return text in self.text or text in self.more

    def json(self) -> str:
        said = {"time_unix_ns": self.time_ns, "level": self.level, "source": self.source, "message": self.text}
        return json.dumps({**said, "worker_id": self.worker_id, **self.fields}, default=str)

    def __str__(self) -> str:
        clock = datetime.fromtimestamp(self.time_ns / 1e9).strftime("%H:%M:%S.%f")[:-3]
        where = "" if self.step is None else f"step {self.step}"
        return f"{clock} {self.source:<11} {where:<9} {self.level:<8} {self.whole()}"

    def whole(self) -> str:
        """The text, and the traceback below it, without control characters."""
        return "\n    ".join(map(_plain, [self.text, *self.more.splitlines()]))


class LogFiles:
    """Reads all logs of a run incrementally. Files that appear later are found.

    events: also lines of events.jsonl; steps: committed steps, too. host: only files fetched from this one. last_bytes:
    of data already in a worker's file, only so much of the end; None: all.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        events: bool = True,
        steps: bool = False,
        last_bytes: int | None = None,
        host: str | None = None,
    ) -> None:
        self._of = "" if host is None else f"{host}-"
        self._last_bytes = last_bytes
        self._folder = run_dir / LOGS_FOLDER
        self._workers: dict[int, Folder] = {}
        self._texts: dict[Path, Tail] = {}
        self._events = Tail(run_dir / EVENTS_FILE) if events else None
        self._steps = steps

    @property
    def worker_ids(self) -> set[int]:
        """Ids of the workers that have logs here."""
        found = (WORKER_FILE.match(path.name) for path in self._folder.glob(f"worker-*.{self._of}*"))
        return {int(match[1]) for match in found if match}

    @property
    def absurd(self) -> str:
        """The line of events.jsonl with impossible numbers; "" if no line read has any."""
        return self._events.absurd if self._events is not None else ""

    def read(self) -> Iterator[LogLine]:
        """New lines, merged by time without holding all in memory. Read the iterator to its end."""
        for worker_id in self.worker_ids - self._workers.keys():
            self._workers[worker_id] = Folder(self._folder, f"worker-{worker_id}.{self._of}*jsonl", self._last_bytes)
        for path in self._folder.glob("*.log") if not self._of else ():
            if path.name not in (OUTPUT_FILE.name, f"{OUTPUT_FILE.stem}.1.log"):  # its worker's log has it, too
                self._texts.setdefault(path, Tail(path, folders=1))
        sources = [_records(worker_id, folder) for worker_id, folder in sorted(self._workers.items())]
        sources += [_texts(path, tail) for path, tail in sorted(self._texts.items())]
        if self._events is not None:
            sources.append(_events(self._events, self._steps))
        return heapq.merge(*sources, key=lambda line: line.time_ns)


def record_line(worker_id: int, said: Mapping[str, Any]) -> LogLine:
    """A record of a worker's file as a line."""
    level, message, step = said.get("level"), str(said.get("message", "")), known(said.get("step"))
    text = message if said.get("source") in ("stdout", "stderr") else f"{said.get('logger')}: {message}"
    time_ns, level = whole_number(said.get("time_unix_ns")), level if level in LEVELS else "info"
    more = str(said.get("exception") or "")
    return LogLine(time_ns, f"worker {worker_id}", worker_id, level, text, step, more, said)


def event_line(event: Mapping[str, Any]) -> LogLine | None:
    """A line of events.jsonl as a line of the log; None if it is none."""
    if not isinstance(event.get("kind"), str):
        return None
    time_ns, where = whole_number(event.get("time_unix_ns")), known(event.get("worker_id"))
    step = known(event.get("step"))
    return LogLine(time_ns, "event", where, level_of(event), sentence(event), step, fields=event)


def _records(worker_id: int, folder: Folder) -> Iterator[LogLine]:
    return (record_line(worker_id, said) for said in filter(None, map(object_of, folder.lines())))


def _texts(path: Path, tail: Tail) -> Iterator[LogLine]:
    found = WORKER_FILE.match(path.name)
    worker_id = int(found[1]) if found else None
    for line in filter(bytes.strip, tail.lines()):
        written_ns = path.stat().st_mtime_ns if path.exists() else 0
        yield LogLine(written_ns, path.stem, worker_id, "warning", line.decode(errors="replace"))


def _events(tail: Tail, steps: bool) -> Iterator[LogLine]:
    found = (event_line(event) for event in tail.objects(tail.lines()) if event)
    return (line for line in found if line is not None and (steps or line.fields["kind"] != "step_committed"))


def _plain(text: str) -> str:
    return visible(text).replace("\n", "\\n")
