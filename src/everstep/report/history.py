"""The reading library: everything that a run directory says about its job, kept current while the files grow.

The one way in which the dashboard, reports, comparisons, `top` and `logs` read. Reading is incremental and in bounded
portions, so that a caller can do something else between two of them; memory is bounded whatever the files hold.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from everstep.base.given import read_json
from everstep.observe.events import KINDS
from everstep.report.account import goodput
from everstep.report.facts import Facts
from everstep.report.tail import Folder, Tail, object_of
from everstep.report.tally import Tally
from everstep.report.usage import Usage
from everstep.report.words import Event, as_dict, known
from everstep.runtime import commands
from everstep.runtime.address import EVENTS_FILE, JOB_FILE, METRICS_FOLDER

PORTION_BYTES = 4 << 20


class History:
    """What is known of one job.

    facts: from its events; tally: what these add up to; usage: from its metrics; `foreign`: lines that could not be
    read. `resets` grows when the directory was begun anew (`--fresh`), which makes everything known before void. heard:
    told each event, in order, after the others have taken it in.
    """

    def __init__(self, run_dir: Path, heard: Callable[[Event], None] | None = None) -> None:
        self.run_dir = run_dir
        self._heard = heard
        self.facts, self.tally, self.usage = Facts(), Tally(), Usage()
        self.foreign = self.resets = 0
        self.loaded = False
        self._events = Tail(run_dir / EVENTS_FILE)
        self._metrics = Folder(run_dir / METRICS_FOLDER, "*.jsonl")
        self._stored: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}

    def poll(self, most_bytes: int = PORTION_BYTES) -> bool:
        """Read what is new, a portion at most; returns whether there was anything. `loaded` once all was read."""
        changed = False
        for lines in self._events.read(most_bytes):
            if self._events.replaced > self.resets:
                self._reset()
            for event in self._objects(lines):
                self._event(event)
            changed = True
        for lines in self._metrics.read(most_bytes):
            for sample in self._objects(lines):
                self.usage.take(sample)
            changed = True
        if not changed or not (self._events.unread_bytes() or self._metrics.unread_bytes()):
            self.loaded = True
        return changed

    def load(self) -> History:
        """Read everything there is."""
        while self.poll():
            pass
        return self

    @property
    def name(self) -> str:
        """What people call the run: the last part of its path."""
        return self.run_dir.resolve().name or str(self.run_dir)

    @property
    def job(self) -> dict[str, Any]:
        """job.json, {} where it cannot be read."""
        return self._json(JOB_FILE)

    @property
    def digest(self) -> dict[str, Any]:
        """final/digest.json, {} of a job that has not finished."""
        return self._json(os.path.join("final", "digest.json"))

    @property
    def total_steps(self) -> int | None:
        """How many steps the config asks for, where it says so."""
        return known(as_dict(self.job.get("config")).get("steps"))

    def running(self) -> bool:
        """Whether a job holds the directory."""
        return commands.is_locked(self.run_dir)

    def state(self, running: bool) -> str:
        """INTERFACE's state of the job, as far as files tell."""
        if running or self.facts.ended_ns is not None:
            return self.facts.state
        return "completed" if self.digest else "interrupted" if self.facts.counts else "starting"

    def seconds(self, running: bool) -> dict[str, float]:
        """The account of the wall time, by cause; of a running job up to now."""
        facts, account = self.facts, self.facts.account
        if running and facts.ended_ns is None and account.begin_ns is not None:
            account.reach(time.time_ns())
        return account.seconds(facts.under_way(account.end_ns))

    def goodput(self, running: bool) -> float | None:
        """Share of the running time that was training."""
        return goodput(self.seconds(running))

    def _reset(self) -> None:
        self.resets = self._events.replaced
        self.facts, self.tally, self.usage = Facts(), Tally(), Usage()
        self._metrics = Folder(self.run_dir / METRICS_FOLDER, "*.jsonl")

    def _objects(self, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            found = object_of(line)
            if found is not None:
                yield found
            else:
                self.foreign += bool(line.strip())

    def _event(self, event: Event) -> None:
        kind = event.get("kind")
        if not isinstance(kind, str):
            self.foreign += 1
            return
        if kind not in KINDS and len(self.facts.counts) > 200:
            return  # of a file that is not ours, kinds would pile up
        self.facts.take(event)
        self.tally.take(event)
        if self._heard is not None:
            self._heard(event)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.run_dir / name
        try:
            found = path.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            stored = self._stored.get(name)
            if stored is None or stored[0] != stamp:
                stored = self._stored[name] = (stamp, as_dict(read_json(path)))
            return stored[1]
        except (OSError, ValueError):
            return {}
