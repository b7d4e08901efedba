"""`python -m everstep` is `everstep`. Signals mean something from here on: the imports that follow take a while.

The working directory, which `-m` puts first, is no place to import from.
"""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_ENDING = (signal.SIGINT, signal.SIGTERM)
_codes: list[int] = []  # what was interrupted may have swallowed the exception, as destructors do


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """Whatever is being done ends, and what was opened is closed. A running job has handlers of its own."""
    _ignore(_ENDING)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    _say("error: interrupted by SIGTERM")
    _codes.append(128 + number)
    sys.exit(_codes[0])


def _ignore(numbers: tuple[signal.Signals, ...]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())


def main() -> None:
    """Entry point: from the first line to the last, SIGINT and SIGTERM end it with one line, and with 130 and 143.

    SIGUSR1 is for a running job to act upon: before it and after it there is nothing to save.
    """
    _ignore((signal.SIGUSR1,))
    try:
        for number in _ENDING:
            signal.signal(number, _interrupted)
        from everstep.cli.main import run_command

        code = run_command()
        _ignore(_ENDING)  # all is done, and how it ended is known
    except KeyboardInterrupt:
        _say("error: interrupted")
        code = 128 + signal.SIGINT
    sys.exit(_codes[0] if _codes else code)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]
    main()
