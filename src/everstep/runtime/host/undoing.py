"""Undoing of scripted faults: a stopped process is continued, a link passes packets again.

Each strike leaves a shell beside it that undoes it when its time is over, or when the shell is ended early. The fork
server knows the shell by its name and leaves it alone. If the shell itself is killed, others undo: the agent for its
workers, the job's process for the coordinator (both continue processes that they are about to end, and replace those
that stand still), and the agent that struck for links. A fault of a link ends with its agent in any case.

Source: POSIX, Shell Command Language, 2.11 (traps are run while `wait` waits, not during other commands).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Sequence

from everstep.runtime.process import OUTLIVES_WORKERS

_SHELL = "/bin/sh"
_PERIOD_S = 0.1
_SHARE = 0.1
_LIMIT_S = 10.0
_PATIENCE_S = 2.0  # for the shell's last commands
STOP, GO_ON = "kill -STOP", "kill -CONT"
_END = "kill -KILL"  # a process that was forked just now still has the shell's traps, and would forget a lesser signal


def _script(steps: str, let_go: str) -> str:
    """Shell that runs `let_go` after the steps, however they end. `rest S` waits, and can be interrupted."""
    rest = 'rest() { sleep "$1" & sleeps=$!; wait $!; }'
    undo = f"let_go() {{ trap - EXIT; {_END} $sleeps 2>/dev/null; {let_go}; }}"
    return f"{rest}; {undo}; sleeps=; trap let_go EXIT; trap 'exit 0' HUP INT TERM; {steps}"


def stop(pid: int, for_s: float | None, *, itself: bool) -> None:
    """Stop a process for so long, None: until somebody gives it up. itself: it is this process; then this returns at
    the end."""
    if for_s is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        return
    steps = _script(f"{STOP} {pid} && rest {for_s:.3f}", f"{GO_ON} {pid}")
    quiet = "</dev/null 2>/dev/null" if itself else "</dev/null >/dev/null 2>&1"
    command = [OUTLIVES_WORKERS, "-c", f"({steps}) {quiet} &"]
    # Reading the shell's output returns when the shell has ended; nothing is ever written.
    out = subprocess.PIPE if itself else subprocess.DEVNULL
    subprocess.run(command, executable=_SHELL, stdout=out, start_new_session=True, check=True)


def throttle(pid: int, for_s: float) -> None:
    """Give a process a tenth of the time for so long, as in a container that is over its CPU quota.

    All of its threads stand still for nine tenths of each period, at any place in their work. A slow process is late
    with some things, this one with everything; a stopped process is away for long, this one never. Source: the periods
    of 100 ms are those of cgroups' cpu.max.
    """
    away_s, there_s = _PERIOD_S * (1 - _SHARE), _PERIOD_S * _SHARE
    turns = f"rest {away_s:.3f}; {GO_ON} {pid} || exit 0; rest {there_s:.3f}"
    steps = f"n={round(for_s / _PERIOD_S)}; while [ $((n -= 1)) -ge 0 ] && {STOP} {pid}; do {turns}; done"
    command = [OUTLIVES_WORKERS, "-c", f"({_script(steps, f'{GO_ON} {pid}')}) </dev/null >/dev/null 2>&1 &"]
    subprocess.run(command, executable=_SHELL, start_new_session=True, check=True)


Words = list[str]


class Undone:
    """A fault that a shell of its own undoes: when its time is over, when this is closed, or when this process has
    ended. The shell exists before the fault begins; its time begins with the fault.

    undo: commands that may be run more than once, and fail if there is nothing to undo. last: one more line of shell.
    """

    def __init__(self, for_s: float, undo: Sequence[Words], last: str) -> None:
        self._lines = "; ".join([*(shlex.join(command) for command in undo), last])
        gone = f"{{ read -r _ <&3; {_END} $sleeps; }} 2>/dev/null & hears=$!"  # the other end of its input is closed
        let_go = f"{_END} $hears 2>/dev/null; {self._lines}"
        steps = f"exec 3<&0; read -r _ <&3 || exit 0; sleep {for_s:.3f} </dev/null & sleeps=$!; {gone}; wait $sleeps"
        command = [OUTLIVES_WORKERS, "-c", _script(steps, let_go)]
        nowhere = subprocess.DEVNULL
        self._shell = subprocess.Popen(
            command, executable=_SHELL, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
        )
        self._needed: subprocess.Popen[bytes] | None = None

    def needs(self, process: subprocess.Popen[bytes]) -> None:
        """The fault lasts only as long as this process; undoing it stops the process."""
        self._needed = process

    def begin(self) -> None:
        """Start the time of the fault, which has just begun."""
        if self._shell.stdin is not None:
            with contextlib.suppress(OSError):  # the shell was killed; `over` will see it
                self._shell.stdin.write(b"\n")
                self._shell.stdin.flush()

    def over(self) -> bool:
        """Whether it is undone. If the shell, or the process that the fault needs, was killed, it is undone here."""
        if self._shell.poll() is None and (self._needed is None or self._needed.poll() is None):
            return False
        self.close()
        return True

    def close(self) -> None:
        if self._shell.stdin is not None:
            with contextlib.suppress(OSError):
                self._shell.stdin.close()
        try:
            self._shell.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:  # for example it is stopped, or the process that it waits for is
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._shell.pid, signal.SIGKILL)
            self._shell.wait()
        if self._shell.returncode < 0:
            self._by_hand()
        if self._needed is not None:
            try:
                self._needed.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._needed.kill()
                self._needed.wait()

    def _by_hand(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            nowhere = subprocess.DEVNULL
            subprocess.run([_SHELL, "-c", self._lines], stdout=nowhere, stderr=nowhere, timeout=_LIMIT_S, check=False)


class Harms:
    """Faults that one agent has begun and that are not over, each with its name."""

    def __init__(self) -> None:
        self._going: list[tuple[str, Undone]] = []

    def take(self, name: str, do: Callable[[], Undone]) -> None:
        """Begin one more. Raises: exceptions of `do`."""
        self._going.append((name, do()))

    def look(self) -> list[str]:
        """Drop the faults that are over by now; returns their names."""
        over = [one for one in self._going if one[1].over()]
        self._going = [one for one in self._going if one not in over]
        return [name for name, _ in over]

    def close(self) -> None:
        going, self._going = self._going, []
        for _, one in going:
            one.close()
