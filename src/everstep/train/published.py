"""Outputs that leave the process once a step can no longer be undone: ledger rows, events, metrics.

Apart because of one rule: nothing here runs before every member is known to have committed the step. Rows are keyed by
step and idempotent, so every worker writes its own file and a reader takes the union.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from everstep.base.below import folder_of, open_below
from everstep.base.cause import Cause
from everstep.base.given import read_json
from everstep.base.plan import WorkerKey
from everstep.observe.events import EventLog, encoded, told_lately
from everstep.observe.told import ToldFile
from everstep.order.ledger import LaneUse, LedgerRow, encode_row
from everstep.protocol.driver.records import StepOutcome
from everstep.runtime.files.host_directory import ARRIVED_FILE
from everstep.runtime.link.address import EVENTS_FILE

log = logging.getLogger(__name__)

_Held = tuple[StepOutcome, int, dict[str, Any]]
_Fields = dict[str, Any]
_Otherwise = tuple[int, float, float]
LOOK_EVERY = 100
"""Number of further waiting steps before the next look at which of them have been told."""
MOST_UNTOLD = 100_000
"""Steps whose events each worker keeps while nothing reaches the job: some 60 MB."""
_MOST_REPORTS = 1000
TAIL_BYTES = 1 << 20
"""Part of an event log that is looked through at first: some thousand steps."""
_MOST_GIVEN = 1000

MOST_WAITING_BYTES = 64 << 20
"""Rows of 300,000 steps of 8 lanes: days of a full disk."""
LAST_WAIT_S = 5.0
"""Time that the end waits for a full disk; less than agents give workers to leave."""
_RETRY_S = 0.1
_BLOCK_BYTES = 1 << 16
_CLOCK_SET_S = 2.0


class Publisher:
    """Holds the outcomes of decided steps until they are released, then writes them.

    `run_dir` None: nothing is written (a job without a directory).
    """

    def __init__(self, run_dir: Path | None, me: WorkerKey) -> None:
        self._pending: dict[int, _Held] = {}
        self._committed_ns: dict[int, int] = {}
        self._told_waiting = self._told_given_up = False
        self._leading = False
        self._released = 0
        self._clock_ns = _clock_ns()
        self._reports: dict[tuple[str, int], dict[str, Any]] = {}
        events = rows = None
        self._events_path = Path(os.devnull, EVENTS_FILE)  # there is no such file
        if run_dir is not None:
            self._events_path = events = run_dir / EVENTS_FILE
            rows = run_dir / "ledger" / f"worker-{me.worker_id}-{me.incarnation}.jsonl"
            with folder_of(rows, 1, make=True):
                pass  # the file exists now
        self._events = EventLog(events, worker_id=me.worker_id, incarnation=me.incarnation, pid=os.getpid())
        self._ledger = LedgerFile(rows)
        self.untold = Untold(self._events_path)

    def hold(self, outcome: StepOutcome, generation: int, extra: dict[str, Any]) -> None:
        """A step has been committed, reduced in this generation; `extra` goes into its event. Does nothing if the step
        was released before."""
        if outcome.step > self._released:
            self._pending[outcome.step] = (outcome, generation, extra)

    def learn(self, untold: bytes, step: int) -> None:
        """Take another worker's events of steps up to this one that may not have been told: that worker may be gone
        when this one has to tell them."""
        for fields in _unpacked(untold):
            if self._released < fields["step"] <= step:
                self.untold.add(fields["step"], fields)

    def committed(self, step: int, unix_ns: int) -> None:
        """Note when the first worker committed the step."""
        if unix_ns:
            self._committed_ns[step] = unix_ns

    def release(self, step: int, leads: bool) -> _Otherwise | None:
        """Write everything up to this step. The leader tells it, also the events that the leader before left.

        Returns the first step that was told before with another loss, that loss, and the present one; None if there is
        none.
        """
        self._released = max(self._released, step)
        for number in sorted(n for n in self._pending if n <= step):
            outcome, generation, extra = self._pending.pop(number)
            self._ledger.append(_row(outcome, generation))
            self.untold.add(number, self._event_of(outcome, generation, extra))
        self._committed_ns = {n: t for n, t in self._committed_ns.items() if n > step}
        with self._events.timing(self._ledger.path or self._events_path) if leads else contextlib.nullcontext():
            self._write_ledger()
        if leads and not self._leading:
            self._look()
            self._repeat_reports()
        elif self.untold.many:
            self._look()
        self._watch_clock(leads)
        if leads:
            for fields in self.untold.take():
                self._report(fields)
        self._leading = leads
        return self.untold.otherwise

    def _look(self) -> None:
        """Forget events that others have told."""
        self.untold.look()
        known = self.untold.through  # later reports may have been told, or not
        self._reports = {key: fields for key, fields in self._reports.items() if key[1] >= known}

    def _watch_clock(self, leads: bool) -> None:
        """As leader, tell if this host's clock was set forward or back: readers compute with times of events."""
        before_ns, self._clock_ns = self._clock_ns, _clock_ns()
        set_s = (self._clock_ns - before_ns) / 1e9
        if leads and abs(set_s) > _CLOCK_SET_S:
            reason = f"the clock of this host was set {'forward' if set_s > 0 else 'back'} by {abs(set_s):.1f} s"
            self.emit("warning", cause=Cause.CLOCK, reason=reason, clock_set_s=set_s)

    def report(self, kind: str, step: int, leads: bool, fields: dict[str, Any]) -> None:
        """Note an event that all workers know of and one tells: the leader, or the next leader if that one died
        meanwhile.

        One per kind and step.
        """
        self._reports[kind, step] = fields
        for old in list(self._reports)[:-_MOST_REPORTS]:
            del self._reports[old]
        if leads and self._leading:
            self.emit(kind, step=step, **fields)
        elif leads:
            self._look()
            self._repeat_reports()

    def _repeat_reports(self) -> None:
        """As a new leader, tell reports that the leader before has not told; it may have told some. Logged numbers grow
        within a step, and may be told again."""
        told = told_lately(self._events_path) if self._reports else set()
        for (kind, step), fields in self._reports.items():
            if (kind, step) not in told or kind == "logged":
                self.emit(kind, step=step, **fields)

    def emit(self, kind: str, **fields: Any) -> bool:
        """Write an event of this worker's own. Returns whether it is written, or will be."""
        return self._events.write(kind, **fields)

    def close(self) -> None:
        """This worker leaves: rows that still wait for a full disk get a last while."""
        missing = self._ledger.close()
        if missing:
            reason = (
                f"leaving without having written {missing} rows of the ledger: {self._ledger.error}; unless another "
                "worker has written them they are missing: `everstep ledger` says which"
            )
            log.warning("%s", reason)
            self.emit("warning", cause=Cause.DISK, reason=reason)
        self._events.close()

    def _write_ledger(self) -> None:
        """Write released and waiting rows; warn once, as soon as possible, if the disk refuses them."""
        ledger = self._ledger
        if ledger.flush():
            self._told_waiting = False
        elif not self._told_waiting:
            reason = f"rows of the ledger cannot be written: {ledger.error}; they wait in memory: free some space"
            self._told_waiting = self.emit("warning", cause=Cause.DISK, reason=reason)
        if ledger.given_up and not self._told_given_up:
            reason = f"rows of the ledger are given up: {ledger.waiting} wait for the disk, and no more are kept"
            self._told_given_up = self.emit("warning", cause=Cause.DISK, reason=reason)

    def _event_of(self, outcome: StepOutcome, generation: int, extra: _Fields) -> _Fields:
        return {
            "time_unix_ns": self._committed_ns.get(outcome.step) or time.time_ns(),
            "generation": generation,
            "step": outcome.step,
            "loss": outcome.loss,
            "samples": outcome.samples,
            **_tokens(outcome),
            **({"metrics": found} if (found := outcome.logged()) else {}),
            **extra,
        }

    def _report(self, fields: _Fields) -> None:
        strange = fields.pop("strange", None)
        if isinstance(strange, dict):
            said = {name: fields[name] for name in ("time_unix_ns", "generation", "step")}
            said |= {name: strange.get(name) for name in ("lanes", "samples", "in_a_row")}
            self._events.write("nonfinite", cause=Cause.NONFINITE, reason=fields.get("nonfinite"), **said)
        self._events.write("step_committed", **fields)


def _clock_ns() -> int:
    """The clock's time less the time since the machine was started: it changes when the clock is set."""
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Untold:
    """Events of steps that have been released, and may not have been told: if the leader is lost, perhaps with its host
    and disk, the next leader tells them.

    A step has been told if it is in the event log that this host sees (its own log dies with it), or if the job has
    said so (`ARRIVED_FILE`, if that is another log). So events that were told before a missing one are kept, too.
    """

    def __init__(self, events: Path) -> None:
        self._file = ToldFile(events, TAIL_BYTES)
        self._word = events.with_name(ARRIVED_FILE)
        self._steps: dict[int, _Fields] = {}
        self._told_through = 0
        self._given_up = False
        self._look_at = LOOK_EVERY
        self.otherwise: _Otherwise | None = None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def many(self) -> bool:
        """Whether there are so many that it is time to look."""
        return len(self._steps) > self._look_at

    @property
    def through(self) -> int:
        """Last step up to which all had been told at the last look."""
        return max(self._told_through, self._file.told.through)

    def add(self, step: int, fields: _Fields) -> None:
        self._steps[step] = fields

    def look(self) -> None:
        """Drop events that have been told; an unreadable log counts as having told none."""
        with contextlib.suppress(OSError):
            while not self._file.look():
                pass
        self._told_through = _told_through(self._word)
        self._forget()
        gone = sorted(self._steps)[:-MOST_UNTOLD]
        if gone and not self._given_up:
            reason = f"nothing reaches the job's events, and no more than {MOST_UNTOLD} steps are kept to be told"
            log.warning("%s: step %d and those after it may never be told", reason, gone[0])
        self._given_up |= bool(gone)
        for step in gone:
            del self._steps[step]
        self._look_at = len(self._steps) + LOOK_EVERY

    def packed(self) -> bytes:
        """The newest kept events, for another worker; empty if there are none."""
        found = [self._steps[n] for n in sorted(self._steps)[-_MOST_GIVEN:]]
        with contextlib.suppress(ValueError, TypeError):  # for example text that is no UTF-8
            return encoded(found) if found else b""
        return b""

    def _forget(self) -> None:
        told = self._file.told
        for n in sorted(told.losses.keys() & self._steps.keys()):
            then, now = told.losses[n], self._steps[n]["loss"]
            if self.otherwise is None and then != now and not (math.isnan(then) and math.isnan(now)):
                self.otherwise = n, then, now
        self._steps = {n: fields for n, fields in self._steps.items() if n > self._told_through and told.lacks(n)}

    def take(self) -> list[_Fields]:
        """All events, in order, and none are kept: the caller tells them now."""
        self._forget()  # a step that is done again may be new to this worker
        steps, self._steps, self._look_at = self._steps, {}, LOOK_EVERY
        return [steps[n] for n in sorted(steps)]


def _unpacked(untold: bytes) -> list[_Fields]:
    """Events that another worker has packed; none if the data is malformed."""
    if not untold:
        return []
    try:
        found = msgspec.json.decode(untold, type=list[dict[str, Any]])[:_MOST_GIVEN]
        right = all(type(f[name]) is int for f in found for name in ("step", "generation", "time_unix_ns"))
        if right and not any("kind" in fields for fields in found):
            return found
    except (msgspec.MsgspecError, KeyError, RecursionError):
        pass
    log.warning("a donor's record of untold steps is malformed: it is ignored")
    return []


def _told_through(word: Path) -> int:
    """Step up to which the job says that all have been told; 0 if it has not said."""
    try:
        through = read_json(word)["through"]
    except (OSError, ValueError, TypeError, KeyError):
        return 0
    return through if type(through) is int else 0


def _tokens(outcome: StepOutcome) -> dict[str, int]:
    """Number of tokens of a step, if the loss is a mean over units finer than samples."""
    counted = math.isfinite(outcome.weight) and outcome.weight.is_integer() and outcome.weight > outcome.samples
    return {"tokens": int(outcome.weight)} if counted else {}


def _row(outcome: StepOutcome, generation: int) -> bytes:
    uses = tuple(LaneUse(r.lane, outcome.workers[r.lane], r.count, r.use) for r in outcome.lanes)
    return encode_row(LedgerRow(outcome.step, generation, uses))


class LedgerFile:
    """Appends whole lines to a file that only this process writes. Never raises for errors of the file.

    A row is a proof, not news: unlike an event it may not be lost to a disk that is full for a while. So rows wait in
    memory while the disk refuses them, and no half row stays. Others write the same rows into files of their own, so
    only rows that no worker could write are missing. `waiting`: rows that are not on disk yet; `given_up`: rows that
    came when `most_bytes` were waiting already; `error`: the disk's last error.
    """

    def __init__(self, path: Path | None, most_bytes: int = MOST_WAITING_BYTES) -> None:
        self.path = path
        self.waiting = 0
        self.given_up = 0
        self.error = ""
        self._most_bytes = most_bytes
        self._lines = bytearray()
        self._fd = -1

    def append(self, row: bytes) -> None:
        """Add a row, its line feed included; it is on disk once `flush` has said so."""
        if len(self._lines) + len(row) > self._most_bytes:
            self.given_up += 1
            return
        self._lines += row
        self.waiting += 1

    def flush(self) -> bool:
        """Write waiting rows. Returns whether all are on disk; the rest waits for the next call."""
        if self.path is None:
            self._lines.clear()
            self.waiting = 0
        if self.path is None or not self._lines:
            return True
        try:
            if self._fd < 0:
                self._fd = _open_whole(self.path)
            written = os.write(self._fd, self._lines)
        except OSError as error:
            self.error = error.strerror or str(error)
            self._forget()  # the file may have been replaced, or the mount may be back: open it again next time
            return False
        whole = self._lines.rfind(b"\n", 0, written) + 1
        self.waiting -= self._lines.count(b"\n", 0, whole)
        del self._lines[:whole]
        if self._lines:
            self.error = "only a part of the rows fitted"
            self._forget()  # opening it again cuts the half row off
        return not self._lines

    def close(self, wait_s: float = LAST_WAIT_S) -> int:
        """Try for a while to write waiting rows, and close the descriptor; returns the number of rows not on disk."""
        end_s = time.monotonic() + wait_s
        while not self.flush() and time.monotonic() < end_s:
            time.sleep(_RETRY_S)
        self._forget()
        return self.waiting + self.given_up

    def _forget(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_whole(path: Path) -> int:
    """Descriptor for appending, after cutting off a half row that a full disk or an earlier life left at the end.

    Raises: OSError.
    """
    fd = open_below(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 1)
    try:
        size = end = os.fstat(fd).st_size
        while end > 0:
            begin = max(0, end - _BLOCK_BYTES)
            cut = os.pread(fd, end - begin, begin).rfind(b"\n") + 1
            end = begin + cut
            if cut:
                break
        if end < size:
            os.ftruncate(fd, end)
    except OSError:
        os.close(fd)
        raise
    return fd
