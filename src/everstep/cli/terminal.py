"""The one way to the user's terminal: what is printed is made visible on the way, whoever said it.

`guarded` stands before stdout and stderr as long as a command runs, so no command has to think of it. What draws in
colours or in place goes through `console`, whose own sequences pass and whose text does not; nothing else writes to
`raw` streams.
"""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from everstep.base.visible import visible

if TYPE_CHECKING:
    from rich.console import Console

LEVEL_STYLES = {"good": "bold green", "warning": "bold yellow", "bad": "bold red"}
"""Of the sentence that says how it is."""


class SilentKeys:
    """From now on keys that are pressed at the terminal leave no trace on it; signals pass. Nothing where there is no
    terminal, or another process has it."""

    def __init__(self) -> None:
        self._fd, self._before = -1, list[Any]()
        with contextlib.suppress(OSError, ValueError, AttributeError, termios.error):
            fd = sys.stdin.fileno()
            if os.tcgetpgrp(fd) == os.getpgrp():
                self._before = termios.tcgetattr(fd)
                quiet = [*self._before]
                quiet[3] &= ~termios.ECHO
                termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
                self._fd = fd

    def leave_screen(self) -> None:
        """As it was before a picture that filled it, cursor and keys, without a word to those who draw that."""
        with contextlib.suppress(OSError):
            os.write(1, b"\x1b[?1049l\x1b[?25h")
        self.restore()

    def restore(self) -> None:
        """As it was before; what was typed meanwhile is forgotten."""
        if self._fd >= 0:
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self._fd, termios.TCSAFLUSH, self._before)
            self._fd = -1


class Visible:
    """A stream of text on which everything can be looked at."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """As any stream does."""
        self.stream.write(visible(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Likewise."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def guarded() -> Iterator[None]:
    """While it lasts, stdout and stderr show what is not for looking at as escapes; characters that they cannot show,
    too."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (Visible(raw(stream)) for stream in before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def raw(stream: TextIO) -> TextIO:
    """What is behind a guarded stream: for text that is all our own."""
    return stream.stream if isinstance(stream, Visible) else stream


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """A console of rich on stdout or stderr. Text in it is text: it holds no markup, and is made visible."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class VisibleConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=visible(segment.text))

    stream = raw(sys.stderr if stderr else sys.stdout)
    return VisibleConsole(file=stream, width=width, markup=False, emoji=False)
