"""`python -m everstep` is `everstep`. Signals mean something from here on: the imports that follow take a while.

The working directory, which `-m` puts first, is no place to import from.
"""

import signal
import sys

_ENDING = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Entry point: SIGINT and SIGTERM end a command at once, with one line and exit code 130 or 143.

    A running job has handlers of its own. SIGUSR1 is for it to act upon: before and after it there is nothing to save.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    from everstep.base.leaving import leave

    for number in _ENDING:
        signal.signal(number, lambda found, _frame: leave(found))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    from everstep.cli.main import run_command

    code = run_command()
    for number in _ENDING:  # all is done, and how it ended is known
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]
    main()
