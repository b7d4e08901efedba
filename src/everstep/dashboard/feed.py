"""Facts of the runs on a dashboard, kept current by threads: one reads files, others ask coordinators.

Apart from the web server, so that a slow disk or a silent coordinator never holds up a request.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from everstep.base.errors import ConfigError, EverstepError
from everstep.dashboard.catalog import Catalog, ListRow, list_row
from everstep.dashboard.details import as_line
from everstep.protocol.roles import INJECT, OPERATE
from everstep.report.history import History
from everstep.report.logfiles import LogFiles
from everstep.report.notes import checked_notes, read_notes, write_notes
from everstep.report.raised import raised_lines
from everstep.report.told_facts import Line
from everstep.runtime import commands

Audit = Callable[[Path], dict[str, Any]]
_Part = TypeVar("_Part", "RunFeed", Catalog)

_PORTION_BYTES = 1 << 20
_IDLE_S = 0.25
_STATUS_S = 1.0
_STALE_S = 5.0
_PATIENCE_S = 2.0
_MOST_LINES = 4000
_LAST_BYTES = 1 << 16
_LIST_S = 1.0
_MOST_OPEN = 32
_MOST_TOLD = 20
MOST_COMPARED = 12
"""Number of a list's runs that may be viewed together on a page."""
_AUTOMATIC_LEDGER_BYTES = 32 << 20


class RunFeed:
    """One run. `lock` protects everything; `status` is the coordinator's newest answer, None if it is silent (then
    `silent` is set at once) or the answer is old; `may`: the roles in which this process can ask something of it.
    lines: the events, and with `logs` also the workers' printed and logged lines; each has a number of its own."""

    def __init__(self, run_dir: Path, audit: Audit | None = None, logs: bool = True) -> None:
        self.lock = threading.Lock()
        self.history = History(run_dir)
        self._status: dict[str, Any] | None = None
        self._status_at = 0.0
        self.running, self.silent = self.history.running(), False
        self.may: list[str] = []
        self.notes = read_notes(run_dir)
        self.ledger: dict[str, Any] = {}
        self.raised: list[str] = []
        self._raised_ns: int | None = None
        self.lines: deque[Line] = deque(maxlen=_MOST_LINES)
        self._numbers = 0
        self._events = (0, 0)
        self._waiting: list[Line] = []
        self._logs = LogFiles(run_dir, events=False, last_bytes=_LAST_BYTES) if logs else None
        self._audit = audit
        self._auditing = threading.Lock()
        self._audited = (0, 0)

    @property
    def run_dir(self) -> Path:
        return self.history.run_dir

    @property
    def status(self) -> dict[str, Any] | None:
        return self._status if time.monotonic() - self._status_at <= _STALE_S else None

    @status.setter
    def status(self, answer: dict[str, Any] | None) -> None:
        self._status, self._status_at = answer, time.monotonic()

    def read(self) -> bool:
        """Read a portion of the run's news; returns whether there were any."""
        said, ran = self._said(), self.history.running()
        with self.lock:
            changed = self.history.poll(_PORTION_BYTES)
            self._take_lines(said)
            self.running = ran or self.history.running()  # looked at before its events are: they tell how it ended
        return changed

    def load(self) -> None:
        while self.read():
            pass

    def _said(self) -> list[Line]:
        """New lines in the workers' logs, as far as a page has room for them."""
        found: deque[Line] = deque(maxlen=_MOST_LINES)
        for line in self._logs.read() if self._logs is not None else ():
            found.append(as_line(line))
        return list(found)

    def _take_lines(self, said: list[Line]) -> None:
        """Add new lines, by time; the workers' lines wait until all earlier events are there."""
        self._waiting = (self._waiting + said)[-_MOST_LINES:]
        resets, known = self._events
        if resets != self.history.resets:
            self.lines.clear()
            self.ledger = {}
            known = 0
        fresh = list(takewhile(lambda line: line.number > known, reversed(self.history.facts.log)))[::-1]
        self._events = (self.history.resets, fresh[-1].number if fresh else known)
        if (self.history.loaded or self.history.trouble) and self._waiting:
            fresh, self._waiting = sorted(fresh + self._waiting, key=lambda line: line.time_ns), []
        for line in fresh:
            self._numbers += 1
            self.lines.append(replace(line, number=self._numbers))

    def ask(self) -> None:
        """Ask the coordinator, if the job is running."""
        running, allowed = self.history.running(), True
        status: dict[str, Any] | None = None
        may = [role for role in (OPERATE, INJECT) if commands.has_token(self.run_dir, role)] if running else []
        try:
            status = commands.ask(self.run_dir, "status", timeout_s=_PATIENCE_S) if running else None
        except EverstepError as error:
            allowed = not isinstance(error, commands.NotAllowed)
        finally:
            with self.lock:
                self.may = may
                self.silent = running and status is None and allowed
                if status is not None or not running:
                    self.status = status

    def look_for_raised(self) -> None:
        """Read what the user's code raised, if the job has ended with that; once for each end."""
        with self.lock:
            facts = self.history.facts
            ended_ns, known_ns = facts.condition.ended_ns, self._raised_ns
        if ended_ns != known_ns:
            found = raised_lines(self.run_dir, facts) if ended_ns is not None else []
            with self.lock:
                self.raised, self._raised_ns = found, ended_ns

    def list_row(self) -> ListRow:
        with self.lock:
            live = self.status if self.running else None
            return list_row(self.history, self.running, self.notes, live, self.silent)

    def check_ledger(self, automatic: bool = False) -> dict[str, Any]:
        """Audit the ledger now: {"checked_step", "clean", "steps", "problems", "note"}. One at a time.

        automatic: only if the ledger is small and the result is not known yet.
        """
        with self._auditing:
            step, resets = self.history.facts.course.step, self.history.resets
            known = bool(self.ledger) and self._audited == (resets, step)
            if self._audit is None or (automatic and (known or self._ledger_bytes() > _AUTOMATIC_LEDGER_BYTES)):
                return self.ledger
            result: dict[str, Any] = {"checked_step": step, "clean": None, "steps": 0, "problems": [], "note": ""}
            try:
                found = self._audit(self.run_dir)
                problems = [str(problem)[:300] for problem in found["problems"][:20]]
                result |= {"clean": found["clean"], "steps": found["steps"], "problems": problems}
            except EverstepError as error:
                result["note"] = str(error)
            with self.lock:
                self.ledger, self._audited = result, (resets, step)
            return result

    def _ledger_bytes(self) -> int:
        try:
            return sum(path.stat().st_size for path in (self.run_dir / "ledger").iterdir())
        except OSError:
            return 0


class Feeds:
    """The runs of a dashboard by number, and the threads that keep them current.

    The runs are those it was started with; or, over a folder of runs, those that a page has opened, and `catalog` has a
    row for each run there is.
    """

    def __init__(self, run_dirs: Iterable[Path], audit: Audit | None = None, top: Path | None = None) -> None:
        self.runs = {i: RunFeed(path, audit) for i, path in enumerate(run_dirs)}
        self.catalog = None if top is None else Catalog(top)
        self._audit = audit
        self._numbers = len(self.runs)
        self._looked_at: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._told: set[str] = set()
        self._threads = [
            threading.Thread(target=self._read, name="dashboard-files", daemon=True),
            threading.Thread(target=self._ask, name="dashboard-status", daemon=True),
        ]
        if self.catalog is not None:
            self._threads.append(threading.Thread(target=self._list, name="dashboard-list", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_PATIENCE_S + 1)

    @property
    def stopped(self) -> bool:
        """Whether nothing is kept current any more: after `stop`, or if a thread has died."""
        return self._stop.is_set() or any(t.ident is not None and not t.is_alive() for t in self._threads)

    def open(self, names: Sequence[str]) -> list[int]:
        """Numbers of the runs with these names in the list, as far as they exist; close them afterwards. Without a
        list, all runs. Runs that no page has open make room for others."""
        with self._lock:
            numbers = list(self.runs) if self.catalog is None else list(map(self._number, names[:MOST_COMPARED]))
            found = [number for number in numbers if number is not None]
            self._looked_at.update(found)
            for number in [i for i in self.runs if not self._looked_at[i]] if self.catalog is not None else []:
                if len(self.runs) > _MOST_OPEN:
                    self.runs = {i: run for i, run in self.runs.items() if i != number}
            return found

    def close(self, numbers: Iterable[int]) -> None:
        """Note that a page that had these open is gone."""
        with self._lock:
            self._looked_at.subtract(numbers)

    def list_rows(self) -> dict[str, ListRow]:
        """Rows of the list of runs, by a key that a page may name; {} for a single run."""
        if self.catalog is not None:
            return dict(self.catalog.rows)
        if len(self.runs) < 2:
            return {}
        return {str(i): run.list_row() for i, run in self.runs.items()}

    def note(self, key: str, args: dict[str, Any]) -> None:
        """Write tags and a note of a run in the list. Raises: ConfigError."""
        if self.catalog is not None:
            self.catalog.note(key, args)
            return
        run = {str(i): run for i, run in self.runs.items()}.get(key)
        if run is None:
            raise ConfigError("there is no such run in the list")
        notes = checked_notes(args)
        write_notes(run.run_dir, notes)
        run.notes = notes

    def _number(self, name: str) -> int | None:
        path = None if self.catalog is None else self.catalog.path(name)
        if path is None:
            return None
        known = next((i for i, run in self.runs.items() if run.run_dir == path), None)
        if known is not None:
            return known
        self.runs = {**self.runs, self._numbers: RunFeed(path, self._audit)}  # other threads iterate over it meanwhile
        self._numbers += 1
        return self._numbers - 1

    def _read(self) -> None:
        while not self._stop.is_set():
            busy = [self._guarded(run, self._has_more) for run in list(self.runs.values())]
            self._stop.wait(0.002 if any(busy) else _IDLE_S)

    def _has_more(self, run: RunFeed) -> bool:
        return run.read() and not run.history.loaded

    def _ask(self) -> None:
        """Look at all runs about once a second; one whose coordinator is silent, or whose ledger is long, holds up no
        other."""
        looks: dict[RunFeed, threading.Thread] = {}
        while not self._stop.is_set():
            looks = {run: thread for run, thread in looks.items() if thread.is_alive()}
            for run in [run for run in self.runs.values() if run not in looks]:
                args = run, self._look
                look = threading.Thread(target=self._guarded, args=args, name="dashboard-look", daemon=True)
                with contextlib.suppress(RuntimeError):  # there are too many threads: later
                    look.start()
                    looks[run] = look
            self._stop.wait(_STATUS_S)

    def _look(self, run: RunFeed) -> bool:
        run.ask()
        run.look_for_raised()
        if not run.running and run.history.loaded and run.history.facts.course.step:
            run.check_ledger(automatic=True)
        return True

    def _list(self) -> None:
        while self.catalog is not None and not self._stop.is_set():
            self._stop.wait(0.002 if self._guarded(self.catalog, Catalog.advance) else _LIST_S)

    def _guarded(self, what: _Part, act: Callable[[_Part], bool]) -> bool:
        """The result; False after an error, which is told once and leaves the others alone."""
        try:
            return act(what)
        except Exception:
            where = what.run_dir if isinstance(what, RunFeed) else "the list of runs"
            text = f"{where}: the dashboard cannot go on reading:\n{traceback.format_exc()}"
            if text not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(text)
                print(text, file=sys.stderr, flush=True)
            return False
