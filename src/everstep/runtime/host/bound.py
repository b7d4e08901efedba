"""`python -m everstep.runtime.host.bound PID COMMAND...`: become this command, as a child that dies with its parent.

Apart because it runs in the child: a hook between fork and exec would run Python there, with the parent's locks and
signal handlers.
"""

from __future__ import annotations

import os
import signal
import sys

from everstep.runtime.process import die_with_parent, own_command


def bound_command(*command: str) -> list[str]:
    """Command that runs this one as a child that the kernel kills when this process ends."""
    return own_command(__name__, str(os.getpid()), *command)


def main() -> int:
    """Run the command; returns 127, after one line, if that is impossible."""
    parent, *command = sys.argv[1:]
    die_with_parent(int(parent))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these signals, and the command would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: {command[0]!r} cannot be run: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
