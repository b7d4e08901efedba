"""Log lines for people: logs/worker-<id>.log, each with who, in which generation, at which step."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from pathlib import Path
from types import TracebackType


class WorkerLog(logging.Filter):
    """Puts worker, incarnation, generation and step on every record; the training loop keeps the last two current."""

    def __init__(self, worker_id: int, incarnation: int) -> None:
        super().__init__()
        self.worker = f"{worker_id}.{incarnation}"
        self.generation = 0
        self.step = 0

    def filter(self, record: logging.LogRecord) -> bool:
        record.worker = self.worker
        record.generation = self.generation
        record.step = self.step
        return True


def set_up_worker_log(
    path: str | os.PathLike[str] | None, worker_id: int, incarnation: int, level: int = logging.INFO
) -> WorkerLog:
    """Send the root logger's records, Python warnings and uncaught exceptions to `path` (None: to stderr).

    Returns the filter whose `generation` and `step` appear on each line. Calling it again replaces the set-up.
    """
    context = WorkerLog(worker_id, incarnation)
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, mode="a", encoding="utf-8")
    handler.addFilter(context)
    handler.setFormatter(
        logging.Formatter(
            "%(asctime)s.%(msecs)03d worker %(worker)s gen %(generation)d step %(step)d %(levelname)s"
            " %(name)s: %(message)s",
            datefmt="%H:%M:%S",
        )
    )
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(level)
    logging.raiseExceptions = False  # a full disk under the log must not fill stderr with tracebacks
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    return context


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("everstep").critical("uncaught", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None:
        name = arguments.thread.name if arguments.thread else "?"
        logging.getLogger("everstep").critical(
            "uncaught in thread %s", name, exc_info=(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
        )
