"""The end of a command that a signal interrupts: it leaves at once, after the few acts that others have asked for.

Apart because a handler runs wherever Python happens to be. An exception raised there may be swallowed (in a destructor,
in a hook of fork) or leave a lock locked, so nothing is raised: a running job only takes note of its signals, and every
other command has nothing to save. What a command must not leave behind (a folder, a process, a terminal's mode) it
names here for as long as it has it.
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


@contextlib.contextmanager
def before_leaving(act: Callable[[], None]) -> Iterator[None]:
    """While inside, `act` is done before a signal ends this process. It must take no lock, and never waits long."""
    _acts.append(act)
    try:
        yield
    finally:
        _acts.remove(act)


@contextlib.contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder that is gone afterwards, also when a signal ends this process. parent: None for the usual place."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        with before_leaving(lambda: shutil.rmtree(folder, ignore_errors=True)):
            yield Path(folder)


def leave(number: int) -> NoReturn:
    """End this process for this signal, with one line on stderr and exit code 128 + number."""
    for act in reversed(_acts):
        with contextlib.suppress(Exception):  # one that fails keeps no other from being done
            act()
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    with contextlib.suppress(OSError):
        os.write(2, f"error: interrupted{by}\n".encode())
    os._exit(128 + number)
