"""Everstep's own errors in a script that runs by itself: one line each, as under `everstep run`. Exceptions of others
are left alone."""

from __future__ import annotations

import sys
from types import TracebackType

from everstep.base.errors import EverstepError, one_line
from everstep.train.task import where

_before = sys.excepthook


def say_in_one_line() -> None:
    """From here on an error of Everstep that ends this process is one line, with the exit code that the job would have:
    2 for a config or a loop that cannot be used, else 1."""
    global _before
    if sys.excepthook is not _hook:
        _before, sys.excepthook = sys.excepthook, _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, EverstepError):
        _before(kind, error, trace)
        return
    sys.stdout.flush()
    inner = error.__cause__  # of the user's code
    place = where(inner) if inner is not None and inner.__traceback__ is not None else ""
    text = one_line(str(error))
    print(f"everstep: error: {text}{'' if place in text else place}", file=sys.stderr, flush=True)
    if not hasattr(sys, "ps1"):  # of an interactive session, which goes on
        raise SystemExit(error.exit_code)
