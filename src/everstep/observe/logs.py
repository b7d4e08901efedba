"""Log records of workers: one JSON object per line, each with worker, place, generation and step.

A worker hands its records to its agent through the pipe that its stderr is. The first byte of a record (RFC 7464) tells
it from printed text. So a worker never waits for a disk, and its last words arrive however it ends.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from types import TracebackType
from typing import Any

import msgspec

RECORD = b"\x1e"
"""First byte of a record; printed text does not begin with it."""
LEVELS = ("debug", "info", "warning", "error", "critical")
MOST_CHARACTERS = 1 << 15
"""Limit of a message, and of a traceback, of which the end is kept."""
RAISED_IN = "raised in lane "
"""Beginning of the line that names lane, step and samples of the batch over which the user's loop has raised."""
_encode = msgspec.json.Encoder().encode


class WorkerLog:
    """Fields about the worker that every record bears; the training loop keeps the last four current."""

    def __init__(self, worker_id: int, incarnation: int) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.host = os.uname().nodename
        self.pid = os.getpid()
        self.stage: int | None = None
        self.role = ""
        self.generation = 0
        self.step = 0

    def at(self, step: int) -> None:
        """Note that the state is that of this step."""
        self.step = step

    def entered(self, generation: int, step: int, stage: int | None, role: str) -> None:
        """Note that a generation goes on from this step."""
        self.generation, self.step, self.stage, self.role = generation, step, stage, role

    def line(
        self,
        level: str,
        logger: str,
        message: str,
        source: str = "log",
        exception: str = "",
        time_ns: int = 0,
        place: tuple[str, str, int] | None = None,
    ) -> bytes:
        """One record, newline included. time_ns: unix time; 0: now. source: log, stdout or stderr. place: module, file
        and line of the caller that logged it."""
        record: dict[str, Any] = {
            "time_unix_ns": time_ns or time.time_ns(),
            "level": level,
            "logger": logger,
            "message": message if len(message) <= MOST_CHARACTERS else f"{message[:MOST_CHARACTERS]}…",
            "source": source,
            "worker_id": self.worker_id,
            "incarnation": self.incarnation,
            "stage": self.stage,
            "role": self.role or None,
            "generation": self.generation,
            "step": self.step,
            "host": self.host,
            "pid": self.pid,
        }
        if place is not None:
            record["module"], record["file"], record["line"] = place
        if exception:
            record["exception"] = exception[-MOST_CHARACTERS:]
        return _encode(record) + b"\n"


class RecordHandler(logging.Handler):
    """Writes records to a descriptor. Errors in it never disturb the caller that logs."""

    def __init__(self, context: WorkerLog, fd: int) -> None:
        super().__init__()
        self._context = context
        self._fd = fd

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message, exception = record.getMessage(), ""
            if record.exc_info and record.exc_info[1] is not None:
                exception = "".join(traceback.format_exception(*record.exc_info))
            name = record.levelname.lower()
            level = name if name in LEVELS else "info"
            line = self._context.line(
                level,
                record.name,
                message,
                exception=exception,
                place=(record.module, record.pathname, record.lineno),
            )
            rest = memoryview(RECORD + line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except Exception:
            self.lost = True  # the agent is gone, or the record cannot be made text

    lost = False


def set_up_worker_log(fd: int, worker_id: int, incarnation: int, level: int = logging.INFO) -> WorkerLog:
    """Send the root logger's records, Python warnings, uncaught exceptions and the stacks of crashes to `fd`.

    Returns the context that appears on each record. Calling it again replaces the set-up.
    """
    context = WorkerLog(worker_id, incarnation)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    root.addHandler(RecordHandler(context, fd))
    root.setLevel(level)
    logging.raiseExceptions = False
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    faulthandler.enable(fd)
    return context


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("everstep").critical("uncaught", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None:
        name = arguments.thread.name if arguments.thread else "?"
        logging.getLogger("everstep").critical(
            "uncaught in thread %s", name, exc_info=(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
        )
