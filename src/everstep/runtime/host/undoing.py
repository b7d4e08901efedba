"""Faults on purpose that have to be undone: a process that was stopped goes on, a link passes packets again.

What strikes here leaves a shell beside it that lets go when its time is over, or when something ends it early; by its
name the fork server knows that it is to let it be. Should that shell be killed itself, others let go: of workers their
agent, of the coordinator the job's process, which continue what they are about to end, and replace what stands still;
of links the agent that struck. A fault of a link ends with its agent, whatever ends that.

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
_PATIENCE_S = 2.0  # until it has done what it does at its end
STOP, GO_ON = "kill -STOP", "kill -CONT"
_END = "kill -KILL"  # a process that was forked just now still has the shell's traps, and would forget a lesser signal


def _script(steps: str, let_go: str) -> str:
    """Shell for steps after which, however they end, `let_go` is run. `rest S` waits, and can be interrupted."""
    rest = 'rest() { sleep "$1" & sleeps=$!; wait $!; }'
    undo = f"let_go() {{ trap - EXIT; {_END} $sleeps 2>/dev/null; {let_go}; }}"
    return f"{rest}; {undo}; sleeps=; trap let_go EXIT; trap 'exit 0' HUP INT TERM; {steps}"


def stop(pid: int, for_s: float | None, *, itself: bool) -> None:
    """A process stands still for so long, None: until it is given up. itself: it is this one; then this returns when it
    is over."""
    if for_s is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        return
    steps = _script(f"{STOP} {pid} && rest {for_s:.3f}", f"{GO_ON} {pid}")
    quiet = "</dev/null 2>/dev/null" if itself else "</dev/null >/dev/null 2>&1"
    command = [OUTLIVES_WORKERS, "-c", f"({steps}) {quiet} &"]
    # What reads to the end of what the shell says returns when that has ended; nothing is ever said.
    out = subprocess.PIPE if itself else subprocess.DEVNULL
    subprocess.run(command, executable=_SHELL, stdout=out, start_new_session=True, check=True)


def throttle(pid: int, for_s: float) -> None:
    """A process that gets a tenth of the time for so long, as in a container that is over its CPU quota.

    All of its threads stand still for nine tenths of each period, in the middle of whatever they do: unlike one that is
    slow it is late with everything, and unlike one that is stopped it is never away for long. Source: the periods of
    100 ms are those of cgroups' cpu.max.
    """
    away_s, there_s = _PERIOD_S * (1 - _SHARE), _PERIOD_S * _SHARE
    turns = f"rest {away_s:.3f}; {GO_ON} {pid} || exit 0; rest {there_s:.3f}"
    steps = f"n={round(for_s / _PERIOD_S)}; while [ $((n -= 1)) -ge 0 ] && {STOP} {pid}; do {turns}; done"
    command = [OUTLIVES_WORKERS, "-c", f"({_script(steps, f'{GO_ON} {pid}')}) </dev/null >/dev/null 2>&1 &"]
    subprocess.run(command, executable=_SHELL, start_new_session=True, check=True)


Words = list[str]


class Undone:
    """One harm that a shell of its own undoes: when its time is over, when this is closed, or this process has ended.
    It is there before the harm is done, and its time begins when that is.

    undo: commands, which may be run more than once, and fail where there is nothing to undo. last: one more line of
    shell.
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
        """Without this process the harm would be another one, so it is over with it; undone, it ends that."""
        self._needed = process

    def begin(self) -> None:
        """The harm is done."""
        if self._shell.stdin is not None:
            with contextlib.suppress(OSError):  # the shell has been killed: seen by whoever looks
                self._shell.stdin.write(b"\n")
                self._shell.stdin.flush()

    def over(self) -> bool:
        """Whether it is undone; where somebody has killed the shell, or what the harm needs, it is done here."""
        if self._shell.poll() is None and (self._needed is None or self._needed.poll() is None):
            return False
        self.close()
        return True

    def close(self) -> None:
        """Let go now."""
        if self._shell.stdin is not None:
            with contextlib.suppress(OSError):
                self._shell.stdin.close()
        try:
            self._shell.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:  # it is stopped, say, and so is what it waits for
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
    """Those that one agent has done, and that are not over, each with its name."""

    def __init__(self) -> None:
        self._going: list[tuple[str, Undone]] = []

    def take(self, name: str, do: Callable[[], Undone]) -> None:
        """One more. Raises: what `do` raises."""
        self._going.append((name, do()))

    def look(self) -> list[str]:
        """Time has passed. Returns those that are over by now."""
        over = [one for one in self._going if one[1].over()]
        self._going = [one for one in self._going if one not in over]
        return [name for name, _ in over]

    def close(self) -> None:
        """Let go of all."""
        going, self._going = self._going, []
        for _, one in going:
            one.close()
