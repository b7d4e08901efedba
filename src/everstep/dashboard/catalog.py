"""A list of runs: one row for each run directory below a folder.

A run that is over is read once and only its row is kept, until its files change; so a folder of hundreds of runs costs
as much memory as the runs that are active.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.base.config import dotted
from everstep.base.errors import ConfigError
from everstep.report.headline import disk_trouble, headline
from everstep.report.history import History
from everstep.report.notes import Notes, checked_notes, read_notes, write_notes
from everstep.report.shown_settings import setting_text, shown_settings
from everstep.report.words import as_dict, one_line
from everstep.runtime.files.run_lock import is_locked
from everstep.runtime.link.address import EVENTS_FILE, JOB_FILE, NOTES_FILE

ListRow = dict[str, Any]
MOST_RUNS = 1000
_MOST_SETTINGS = 60
_PORTION_BYTES = 1 << 20
_FILES = (EVENTS_FILE, JOB_FILE, "final/digest.json", NOTES_FILE)


def is_run(path: Path) -> bool:
    """Whether a folder has the files of a run."""
    return any((path / name).is_file() for name in (EVENTS_FILE, JOB_FILE))


def holds_runs(path: Path) -> bool:
    """Whether a folder is no run, but directly contains some."""
    try:
        return not is_run(path) and any(is_run(child) for child in path.iterdir())
    except OSError:
        return False


def list_row(
    history: History, running: bool, notes: Notes, live: Mapping[str, Any] | None = None, asked: bool = False
) -> ListRow:
    """Row of a run in the list. live, asked: as of `History.now`. said: the headline; of a run that is over it does not
    change with time. digest: of the final state, "" before the end; times in ms."""
    facts, now = history.facts, history.now(running, live, asked)
    said = headline(facts, now)
    digest = history.final.get("state") or history.final.get("model")
    return {
        "name": history.name,
        "task": one_line(history.job.get("task"), 200),
        "state": history.told_state(running, live),
        "said": {"level": said.level, "text": said.text},
        "running": running,
        "disk_trouble": disk_trouble(facts, now),
        "loaded": history.loaded,
        "step": facts.course.step,
        "total": history.total_steps,
        "loss": facts.course.loss,
        "loss_text": facts.course.loss_text,
        "level": facts.course.strange.level if facts.course.strange is not None else "",
        "goodput": history.goodput(running),
        "faults": history.faults(running),
        "digest": one_line(digest, 64),
        "began_ms": facts.began_ns // 1_000_000,
        "settings": _settings(history.job),
        "tags": list(notes.tags),
        "note": notes.note,
    }


def _settings(job: Mapping[str, Any]) -> dict[str, str]:
    """Settings that the user has chosen, as text by dotted key."""
    config, explicit = dotted(shown_settings(as_dict(job.get("config")))), job.get("explicit")
    keys = [key for key in explicit if isinstance(key, str) and key in config] if isinstance(explicit, list) else []
    return {one_line(key, 80): one_line(setting_text(config[key]), 120) for key in keys[:_MOST_SETTINGS]}


def _unreadable(name: str, error: Exception) -> ListRow:
    """Row of a run that this version cannot read."""
    said = {"level": "bad", "text": f"This run cannot be read: {one_line(f'{type(error).__name__}: {error}', 200)}"}
    texts = dict.fromkeys(("task", "loss_text", "level", "digest", "note"), "")
    numbers = dict.fromkeys(("step", "faults", "began_ms"), 0)
    nothing = dict.fromkeys(("total", "loss", "goodput"))
    rest = {"running": False, "disk_trouble": False, "loaded": True, "settings": {}, "tags": []}
    return {"name": name, "state": "unreadable", "said": said, **texts, **numbers, **nothing, **rest}


class Catalog:
    """The runs below a folder. `rows`: by name. One thread calls `advance`; rows are replaced, never changed."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.rows: dict[str, ListRow] = {}
        self._stamps: dict[str, tuple[Any, ...]] = {}
        self._reading: dict[str, History] = {}

    def path(self, name: str) -> Path | None:
        """Path of the run with this name; None if the list has none."""
        return self.top / name if name in self.rows else None

    def note(self, name: str, args: dict[str, Any]) -> Notes:
        """Write tags and a note of a run. Raises: ConfigError."""
        path = self.path(name)
        if path is None:
            raise ConfigError("there is no such run in the list")
        notes = checked_notes(args)
        write_notes(path, notes)
        return notes

    def advance(self) -> bool:
        """Look at all runs once, and read a portion of each one's news; returns whether there is more to read."""
        names = self._names()
        for gone in self.rows.keys() - set(names):
            for known in (self.rows, self._stamps, self._reading):
                known.pop(gone, None)
        busy, wrong = [], list[Exception]()
        for name in names:
            try:
                busy.append(self._look(name))
            except Exception as error:  # its row would stay as it is, and say that all is well
                wrong.append(error)
                self.rows[name] = _unreadable(name, error)
        if wrong and not any(busy):
            raise wrong[0]
        return any(busy)

    def _names(self) -> list[str]:
        try:
            found = sorted(path.name for path in self.top.iterdir() if path.name.isprintable() and is_run(path))
        except OSError:
            return []
        return found[:MOST_RUNS]

    def _look(self, name: str) -> bool:
        path = self.top / name
        running = is_locked(path)
        stamp = (running, *map(_stamp, (path / file for file in _FILES)))
        history = self._reading.get(name)
        if history is None and self._stamps.get(name) == stamp and not running:
            return False
        if history is None:
            history = self._reading[name] = History(path)
        history.poll(_PORTION_BYTES)
        self.rows[name] = list_row(history, running, read_notes(path))
        self._stamps[name] = stamp
        if history.loaded and not (running or history.trouble or history.maybe_trains(running)):
            del self._reading[name]
        return not (history.loaded or history.trouble)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)
