"""Place at which a worker stands still: it writes its threads' stacks to its log, and one line of them is reported.

The interpreter's `faulthandler` writes them from a signal handler in C, so it works while other code holds the
interpreter lock.
"""

from __future__ import annotations

import faulthandler
import re
import signal
import sysconfig
from pathlib import Path

SHOW_STACKS = signal.SIGRTMIN + 6
_THREAD = re.compile(rb"(Current t|T)hread 0x[0-9a-f]+ .*\(most recent call first\):")
_FRAME = re.compile(rb'  File "(.{1,2000})", line (\d{1,9}|\?\?\?) in (.{1,200})')
_MOST = 300
_OTHERS = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))


def show_on_signal(fd: int) -> None:
    """From now on this process writes the stacks of all its threads to this descriptor when it gets `SHOW_STACKS`."""
    faulthandler.register(SHOW_STACKS, file=fd, all_threads=True)


class StackReader:
    """Finds the innermost line of the user's own code in a process's stacks. The main thread is written last."""

    def __init__(self) -> None:
        self._at: tuple[bool, str] | None = None
        self._within = False

    def take(self, line: bytes) -> str:
        """Take the next line. Returns the last thread's place, as far as known by then; "" for any other line."""
        frame = _FRAME.fullmatch(line)
        if frame is None or not self._within:
            self._within = _THREAD.fullmatch(line) is not None
            self._at = None
            return ""
        path, number, name = (part.decode(errors="replace") for part in frame.groups())
        own = not path.startswith(("<", *_OTHERS)) and "-packages/" not in path
        if self._at is None or (own and not self._at[0]):
            self._at = own, f"{path}:{number} ({name})"[-_MOST:]
        return self._at[1]
