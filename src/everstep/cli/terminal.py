"""The one way to the user's terminal: all printed text is made visible, from any origin.

`guarded` wraps stdout and stderr while a command runs, so no command has to think of it. Code that draws in colours or
in place uses `console`: its own sequences pass, its text is made visible. Nothing else writes to `raw` streams.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import termios
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from everstep.base.visible import visible

if TYPE_CHECKING:
    from rich.console import Console

LEVEL_STYLES = {"good": "bold green", "warning": "bold yellow", "bad": "bold red"}
"""Styles of the sentence about the job's condition."""


class SilentKeys:
    """Switches the terminal's echo off: pressed keys leave no trace on it; signals pass. It does nothing without a
    terminal, or if another process has it."""

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
        """Restore the terminal behind a full-screen picture, its cursor and keys, past the library that draws it."""
        with contextlib.suppress(OSError):
            os.write(1, b"\x1b[?1049l\x1b[?25h")
        self.restore()

    def restore(self) -> None:
        """Put the terminal back as it was; keys typed meanwhile are forgotten."""
        if self._fd >= 0:
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self._fd, termios.TCSAFLUSH, self._before)
            self._fd = -1


class Visible:
    """A text stream that makes every character visible."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(visible(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def guarded() -> Iterator[None]:
    """While the block lasts, stdout and stderr show control characters as escapes, and also characters that they cannot
    encode."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (Visible(raw(stream)) for stream in before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def stdout_width() -> int | None:
    """Columns of the terminal that standard output is, or COLUMNS; None in a pipe, where lines stay whole."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else None


def paragraph(text: str, stream: TextIO, indent: str = "") -> str:
    """A line of text for a stream: on a terminal it is broken between words, further lines with an indent; in a pipe it
    stays one line."""
    return folded(text, shutil.get_terminal_size().columns, indent) if stream.isatty() else text


def folded(text: str, width: int, indent: str = "") -> str:
    """Text in lines of at most so many characters, as far as its words allow it."""
    wrapper = textwrap.TextWrapper(
        max(20, width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.fill(text)


def folded_around_command(text: str, width: int) -> str:
    """Text in lines of at most so many characters; a command at its end is not broken: it is there to be copied."""
    words, mark, command = text.partition(": everstep ")
    if len(text) <= width or not mark:
        return folded(text, width, "  ")
    return f"{folded(f'{words}:', width, '  ')}\neverstep {command}"


def tell(text: str, stream: TextIO) -> None:
    """Print a line at once. If nobody reads the stream any more, this line and what follows is dropped: a job goes on,
    and ends with its own exit code."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def raw(stream: TextIO) -> TextIO:
    """The stream behind a guarded one, for text that is all our own."""
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
