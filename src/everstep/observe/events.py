"""events.jsonl: one JSON object per line, appended by several processes, read while it grows.

Each line is a single `os.write` on an O_APPEND descriptor, so lines of different processes never mix. Events inform;
they never stop training. An event that cannot be written (full disk) waits in memory and is written before later ones,
with the time at which it happened. If too much waits, further events are counted, and a warning says how many were
lost. A disk that just became full may keep half a line; the line is ended and the event written again. Another process
may have appended to the half line: readers find the event that began last on a line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from everstep.base.below import APPEND, open_below
from everstep.base.cause import Cause
from everstep.base.given import open_given, portions

KINDS = frozenset(
    {
        "job_started",
        "worker_joined",
        "worker_suspected",
        "worker_evicted",
        "worker_left",
        "worker_healed",
        "cell_shrunk",
        "leader_changed",
        "generation_started",
        "waiting",
        "nonfinite",
        "probe_done",
        "step_committed",
        "recovery_completed",
        "checkpoint_completed",
        "checkpoint_failed",
        "checkpoint_skipped",
        "fallback",
        "coordinator_restarted",
        "coordinator_killed",
        "commanded",
        "fault_injected",
        "fault_over",
        "warning",
        "evaluated",
        "logged",
        "job_completed",
        "job_failed",
    }
)
COMMON = ("time_unix_ns", "kind", "generation", "step", "worker_id", "incarnation", "pid", "cause", "reason")
_MAX_STEP = 10**10 - 1
MOST_LINE_BYTES = 8 << 20
"""Longer lines are none of ours."""
MOST_SEARCHED_BYTES = 256 << 20
"""Some million events; a coordinator that takes over does not look farther back."""
_TAIL_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20
_STARTED = b'_started"'
_MOST_SHOWN = 24
_START = b'{"time_unix_ns":'
MOST_WAITING_BYTES = 4 << 20
"""Limit of each process: about 10,000 events."""
_RETRY_S = 0.05
SLOW_S = 2.0
_SLOW_AGAIN_S = 60.0


class EventLog:
    """Appends events to a file (None: they go nowhere). Thread-safe; never raises for errors of the file.

    `defaults` are fields (worker_id, incarnation, pid, ...) of every event of this process, unless the event overrides
    them. A write that takes seconds is told, once a minute at most.
    """

    def __init__(self, path: str | os.PathLike[str] | None, **defaults: Any) -> None:
        self.path = Path(path or os.devnull)
        self._nowhere = path is None
        self._defaults = dict(defaults)
        self._fd: int | None = None
        self._waiting = bytearray()
        self._lost = 0
        self._torn = False
        self._told = False
        self._slow_s = -math.inf
        self._lock = threading.Lock()

    def write(self, kind: str, *, time_unix_ns: int | None = None, **fields: Any) -> bool:
        """Append one event; `time_unix_ns` is now unless given. Returns False if it is lost; it may also wait."""
        line = format_event(kind, time_unix_ns, {**self._defaults, **fields})
        with self.timing(self.path):
            return self._put(line)

    def _put(self, line: bytes) -> bool:
        with self._lock:
            kept = len(self._waiting) + len(line) <= MOST_WAITING_BYTES
            if kept:
                self._waiting += line
            else:
                self._lost += 1
            self._flush()
        return kept

    @contextlib.contextmanager
    def timing(self, file: Path) -> Iterator[None]:
        """Time a write into a file of the job; if it takes seconds, tell so."""
        begin_s = time.monotonic()
        yield
        end_s = time.monotonic()
        took_s = end_s - begin_s
        if took_s > SLOW_S and self._tells_slow(end_s):
            words = f"{file.parent} is slow: writing {file.name} there took {took_s:.1f} s"
            said: dict[str, Any] = {
                "cause": Cause.SLOW,
                "reason": f"{words}, and the job waits for such writes",
                "took_s": took_s,
            }
            self._put(format_event("warning", None, {**self._defaults, **said}))  # not timed: it would tell of itself

    def _tells_slow(self, now_s: float) -> bool:
        """Whether a slow write is to be told now; then none is for a while."""
        with self._lock:
            tells = now_s >= self._slow_s + _SLOW_AGAIN_S
            if tells:
                self._slow_s = now_s
            return tells

    def close(self, wait_s: float = 0.0) -> None:
        """Close the descriptor; a later write opens the file again. Events that wait for the disk are tried again for
        `wait_s` seconds; events that stay unwritten are counted on stderr."""
        end_s = time.monotonic() + wait_s
        with self._lock:
            while not self._flush() and time.monotonic() < end_s:
                time.sleep(_RETRY_S)
            self._close()
            if self._waiting or self._lost:
                count = self._waiting.count(b"\n") + self._lost
                say(f"everstep: {count} events of process {os.getpid()} are lost: {self.path} could not be written")
                self._waiting.clear()
                self._lost = 0

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _flush(self) -> bool:
        if self._nowhere:
            self._waiting.clear()
            self._lost = 0
        if not self._waiting and not self._lost:
            return True
        try:
            self._append(bytes(self._waiting) + self._said_of_lost())
        except OSError as error:
            self._close()  # the file may have been replaced, or the mount may be back: open it again next time
            if not self._told:
                said = f"cannot write {self.path}: {error.strerror or error}"
                say(f"everstep: {said}; events wait until it works again, training goes on")
            self._told = True
            return False
        self._lost, self._told = 0, False
        return True

    def _append(self, lines: bytes) -> None:
        if self._fd is None:
            self._fd = open_below(self.path, APPEND)
        before = b"\n" if self._torn else b""  # ends a half line that a full disk left, so that it spoils no other
        written = os.write(self._fd, before + lines) - len(before)
        end = max(0, written)
        whole = lines.rfind(b"\n", 0, end) + 1
        lacks_its_end = end > whole and lines[end : end + 1] == b"\n"  # a whole event is not told again
        del self._waiting[: end + 1 if lacks_its_end else whole]
        self._torn = whole < written or (written < 0 and self._torn)
        if written < len(lines):
            raise OSError(errno.ENOSPC, "only a part fitted")

    def _said_of_lost(self) -> bytes:
        if not self._lost:
            return b""
        reason = f"{self._lost} events of this process were lost: {self.path} could not be written"
        return format_event("warning", None, {**self._defaults, "cause": Cause.DISK, "reason": reason})


def say(text: str) -> None:
    """Print a line on stderr. If stderr is a file on a full disk, the line is lost without further harm."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def format_event(kind: str, time_unix_ns: int | None, fields: dict[str, Any]) -> bytes:
    """One line, newline included: the common fields first, null where they do not apply, then the others. A reason
    always has a cause beside it."""
    now_ns = time.time_ns() if time_unix_ns is None else time_unix_ns
    event: dict[str, Any] = {"time_unix_ns": now_ns, "kind": kind, **dict.fromkeys(COMMON[2:]), **fields}
    if event["reason"] and event["cause"] is None:
        event["cause"] = Cause.UNKNOWN
    try:
        line = _encode(event)  # NaN and infinity are no JSON: they become null
    except (ValueError, TypeError):  # for example text that is no UTF-8
        line = json.dumps(_finite(event), separators=(",", ":"), default=str).encode()
    return line + b"\n"


def _plain(value: Any) -> Any:
    """Replacement for a value that the encoder does not know: kinds of float and int become numbers, all else text."""
    return float(value) if isinstance(value, float) else int(value) if isinstance(value, int) else str(value)


_encode = msgspec.json.Encoder(enc_hook=_plain).encode


def encoded(fields: Any) -> bytes:
    """Encoding of these fields as in an event. Raises: ValueError or TypeError for text that is no UTF-8."""
    return _encode(fields)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def parse_events(data: bytes) -> Iterator[dict[str, Any]]:
    """Events in whole lines; torn or foreign lines are skipped."""
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        event = None
        for text in (line, begun_last(line)):
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(text)
                break
        if isinstance(event, dict) and isinstance(event.get("kind"), str) and not absurd(event):
            yield event


_MOST = {
    "time_unix_ns": 1 << 62,
    "step": _MAX_STEP,
    "generation": 1 << 53,
    "worker_id": 1 << 31,
    "incarnation": 1 << 53,
}


def absurd(line: Mapping[str, Any]) -> str:
    """Words for the first impossible time or count of a line; "" if all are possible: readers compute with them."""
    for name, most in _MOST.items():
        value = line.get(name)
        if isinstance(value, int | float) and not -1 <= value <= most:
            return f"expected {name} from -1 to {most}, got {_shortened(str(value))}"
    return ""


def _shortened(number: str) -> str:
    return number if len(number) <= _MOST_SHOWN else f"{number[:_MOST_SHOWN]}... ({len(number)} digits)"


def begun_last(line: bytes) -> bytes:
    """The event that follows half of another one on a line; inside text its beginning would be escaped."""
    return line[max(0, line.rfind(_START)) :]


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All events of a file; a missing file has none. Raises: OSError."""
    found, lines = list[dict[str, Any]](), Lines()
    try:
        with open_given(path) as file:
            for data in portions(file):
                found += parse_events(lines.whole(data))
    except FileNotFoundError:
        return []
    return found


class Lines:
    """Cuts data read from a growing file into whole lines; lines that are too long to be ours are skipped. rest: begin
    of a line whose end is not there yet."""

    def __init__(self) -> None:
        self.rest = b""
        self._skipping = False

    def whole(self, data: bytes) -> bytes:
        """Lines that these bytes complete, the last line feed included."""
        if self._skipping:
            _, end, data = data.partition(b"\n")
            self._skipping = not end
        lines, end, self.rest = (self.rest + data).rpartition(b"\n")
        if len(self.rest) > MOST_LINE_BYTES:
            self.rest, self._skipping = b"", True
        return lines + end


def last_committed_step(path: str | os.PathLike[str]) -> int:
    """Newest step of a `step_committed` event since the last `job_started` at step 0, 0 if none; reads from the end.

    A job that goes on from a checkpoint does not report steps again that it had reported.
    """
    size, steps, whole = _TAIL_BYTES, list[int](), False
    while not steps and not whole:
        events, whole = _newest(path, size)
        steps = [event["step"] for event in events if event["kind"] == "step_committed" and _step_of(event)]
        size *= 4
    return max(steps, default=0)


def last_generation(path: str | os.PathLike[str]) -> int | None:
    """Generation of the last `generation_started` since the last `job_started`, 0 if none; None if nobody can say: the
    file cannot be read, or both lie farther back than `MOST_SEARCHED_BYTES`. Such events are rare, so only lines that
    may be one are parsed."""
    try:
        with open_given(path) as file:
            end = file.seek(0, os.SEEK_END)
            least = max(0, end - MOST_SEARCHED_BYTES)
            for line in _starts(file, least, end):
                for event in parse_events(line):
                    if event["kind"] in ("job_started", "generation_started"):
                        generation = event.get("generation") if event["kind"] == "generation_started" else 0
                        return generation if type(generation) is int else 0
            return None if least else 0
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError:
        return None


def _starts(file: BinaryIO, least: int, end: int) -> Iterator[bytes]:
    """Lines between two positions that may tell of the start of a job or of a generation, the last one first."""
    rest, skipping = b"", False  # the end of a line whose begin is farther back; its begin is one of a line too long
    while end > least:
        begin = max(least, end - _BLOCK_BYTES)
        file.seek(begin)
        data, end = file.read(end - begin), begin
        if skipping:
            data = data[: data.rfind(b"\n") + 1]
            skipping = not data
        rest, _, lines = (data + rest).partition(b"\n") if begin else (b"", b"", data + rest)
        if len(rest) > MOST_LINE_BYTES:
            rest, skipping = b"", True
        before = len(lines)
        while (found := lines.rfind(_STARTED, 0, before)) >= 0:
            before, after = lines.rfind(b"\n", 0, found) + 1, lines.find(b"\n", found)
            yield lines[before : after if after >= 0 else None]


def told_lately(path: str | os.PathLike[str]) -> set[tuple[str, int]]:
    """(kind, step) of the events at the end of a file since the last `job_started` at step 0; reads the last megabyte
    at most. Empty if the file cannot be read: events may be told twice then, which stops no training."""
    try:
        events, _ = _newest(path, 1 << 20)
    except OSError:
        return set()
    return {(event["kind"], event["step"]) for event in events if _step_of(event) is not None}


def _step_of(event: dict[str, Any]) -> int | None:
    step = event.get("step")
    return step if type(step) is int and 0 <= step <= _MAX_STEP else None


def _newest(path: str | os.PathLike[str], size: int) -> tuple[list[dict[str, Any]], bool]:
    """Events in the last `size` bytes since the last `job_started` at step 0 (that job gave up what was before), and
    whether these are all."""
    try:
        with open_given(path) as file:
            end = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, end - size))
            lines = Lines()
            data = b"".join(map(lines.whole, portions(file))) + lines.rest
    except (FileNotFoundError, NotADirectoryError):
        return [], True
    found, whole = list[dict[str, Any]](), start == 0
    for event in parse_events(data if start == 0 else data[data.find(b"\n") + 1 :]):
        if event["kind"] == "job_started" and not _step_of(event):
            found, whole = [], True
        else:
            found.append(event)
    return found, whole


def follow(
    path: str | os.PathLike[str],
    *,
    poll_s: float = 0.05,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[dict[str, Any]]:
    """Yield events as they are appended, whole lines only, until `stop()` is true and everything written is read.

    Waits for a file that does not exist yet.
    """
    position, lines = 0, Lines()
    while True:
        last = stop()
        try:
            with open_given(path) as file:
                file.seek(position)
                for data in portions(file):
                    yield from parse_events(lines.whole(data))
                before, position = position, file.tell()
        except FileNotFoundError:
            before, position, lines = 0, 0, Lines()
        except OSError:
            before = position  # what has been read is not read again
        if last:
            return
        if position == before:
            time.sleep(poll_s)
