"""The end of a command that a signal interrupts: it ends at once, after the few acts registered here.

Apart because a handler runs wherever Python happens to be. An exception raised there may be swallowed (in a destructor,
in a hook of fork) or leave a lock locked, so nothing is raised: a running job only takes note of its signals, and every
other command has nothing to save. A command registers here what it must not leave behind (a folder, a process, a
terminal's mode) for as long as it has it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

_acts: list[Callable[[], None]] = []
_meant: list[bool] = []


@contextlib.contextmanager
def before_leaving(act: Callable[[], None]) -> Iterator[None]:
    """While inside, `act` is done before a signal ends this process. The act must take no lock and never wait long."""
    _acts.append(act)
    try:
        yield
    finally:
        _acts.remove(act)


@contextlib.contextmanager
def until_ctrl_c() -> Iterator[None]:
    """While inside, Ctrl-C is how the command is meant to end: no error is told."""
    _meant.append(True)
    try:
        yield
    finally:
        _meant.pop()


@contextlib.contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder that is removed at the end, also if a signal ends this process. parent: None for the usual place."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        with before_leaving(lambda: shutil.rmtree(folder, ignore_errors=True)):
            yield Path(folder)


def leave(number: int) -> NoReturn:
    """End this process for this signal, with one line on stderr (unless it is meant to end so) and exit code 128 +
    number."""
    for act in reversed(_acts):
        with contextlib.suppress(Exception):  # an act that fails does not prevent the others
            act()
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    if not _meant or number != signal.SIGINT:
        with contextlib.suppress(OSError):
            os.write(2, f"error: interrupted{by}\n".encode())
    os._exit(128 + number)
