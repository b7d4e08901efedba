"""The reading library: everything that a run directory says about its job, kept current while the files grow.

The one way in which the dashboard, reports, comparisons, `top` and `logs` read. Reading is incremental and in bounded
portions, so that a caller can do something else between two of them; memory is bounded whatever the files hold.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from everstep.observe.events import KINDS, begun_last
from everstep.report.account import goodput
from everstep.report.facts import Facts
from everstep.report.tail import Folder, Tail
from everstep.report.tally import Tally
from everstep.report.usage import Usage
from everstep.report.words import Event
from everstep.runtime import commands
from everstep.runtime.address import EVENTS_FILE, JOB_FILE, METRICS_FOLDER

PORTION_BYTES = 4 << 20
_decode = msgspec.json.Decoder().decode


class History:
    """What is known of one job.

    facts: from its events; tally: what these add up to; usage: from its metrics; `foreign`: lines that could not be
    read. `resets` grows when the directory was begun anew (`--fresh`), which makes everything known before void. heard:
    told each event, in order, after the others have taken it in.
    """

    def __init__(self, run_dir: Path, heard: Callable[[Event], None] | None = None) -> None:
        self.run_dir = run_dir
        self._heard = heard
        self.facts = Facts()
        self.tally = Tally()
        self.usage = Usage()
        self.foreign = 0
        self.resets = 0
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
            for line in lines:
                self._event(line)
            changed = True
        for lines in self._metrics.read(most_bytes):
            for line in lines:
                self._sample(line)
            changed = True
        if not changed or not (self._events.unread_bytes() or self._metrics.unread_bytes()):
            self.loaded = True
        return changed

    def load(self) -> History:
        """Read everything there is."""
        while self.poll() and not self.loaded:
            pass
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
        config = self.job.get("config")
        steps = config.get("steps") if isinstance(config, dict) else None
        return steps if isinstance(steps, int) else None

    def running(self) -> bool:
        """Whether a job holds the directory."""
        return commands.is_locked(self.run_dir)

    def state(self, running: bool) -> str:
        """INTERFACE's state of the job, as far as files tell."""
        facts = self.facts
        over = facts.ended_ns is not None
        if running and not over:
            return facts.state
        if over:
            return facts.state
        return "completed" if self.digest else "interrupted" if facts.counts else "starting"

    def seconds(self, running: bool, now_ns: int | None = None) -> dict[str, float]:
        """The account of the wall time, by cause; of a running job up to now."""
        facts = self.facts
        if running and facts.ended_ns is None and facts.account.begin_ns is not None:
            now_ns = time.time_ns() if now_ns is None else now_ns
            facts.account.reach(now_ns)
            return facts.account.seconds(facts.under_way(now_ns))
        return facts.account.seconds(facts.under_way(facts.account.end_ns))

    def goodput(self, running: bool) -> float | None:
        """Share of the running time that was training."""
        return goodput(self.seconds(running))

    def _reset(self) -> None:
        self.resets = self._events.replaced
        self.facts = Facts()
        self.tally = Tally()
        self.usage = Usage()
        self._metrics = Folder(self.run_dir / METRICS_FOLDER, "*.jsonl")

    def _event(self, line: bytes) -> None:
        event = self._object(line)
        if event is None:
            return
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

    def _sample(self, line: bytes) -> None:
        sample = self._object(line)
        if sample is not None:
            self.usage.take(sample)

    def _object(self, line: bytes) -> dict[str, Any] | None:
        if not line.strip():
            return None
        try:
            found = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            try:
                found = json.loads(begun_last(line))  # after half a line, or NaN, which strict readers refuse
            except (ValueError, RecursionError):
                self.foreign += 1
                return None
        if not isinstance(found, dict):
            self.foreign += 1
            return None
        return found

    def _json(self, name: str) -> dict[str, Any]:
        path = self.run_dir / name
        try:
            found = path.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            known = self._stored.get(name)
            if known is None or known[0] != stamp:
                data = json.loads(path.read_bytes())
                known = self._stored[name] = (stamp, data if isinstance(data, dict) else {})
            return known[1]
        except (OSError, ValueError):
            return {}
