"""The processes of one life of a worker, as its agent holds them: with or without the fork server that made them.

The file is apart because workers outlive a fork server. While it lives it waits for them and reports their ends;
afterwards the agent sees their ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

from everstep.base.readable import readable
from everstep.runtime.host.board import Row
from everstep.runtime.host.fork_server import ForkedCell

_DEATH_WAIT_S = 2.0


class Running:
    """One life. All of its processes are killed when the descriptor `lifeline`, which nobody else has, is closed."""

    def __init__(self, lifeline: int) -> None:
        self._lifeline = lifeline
        self._pidfds: dict[int, int] = {}
        self._orphan: ForkedCell | None = None
        self.unseen = False
        """Whether the end of a process was not seen."""

    def started(self, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # dead and reaped already: a later message says so
                self._pidfds[pid] = os.pidfd_open(pid)

    def kill(self) -> bool:
        """SIGKILL all its processes. Returns whether any was there."""
        return sum(_send(pidfd, signal.SIGKILL) for pidfd in self._pidfds.values()) > 0

    def send(self, number: int) -> None:
        for pidfd in self._pidfds.values():
            _send(pidfd, number)

    def close(self) -> None:
        """Close all descriptors; the kernel kills remaining processes."""
        for fd in (self._lifeline, *self._pidfds.values()):
            os.close(fd)
        self._lifeline, self._pidfds = -1, {}

    def end(self) -> None:
        """Kill it, and wait until it is dead."""
        self.kill()
        for pidfd in self._pidfds.values():
            readable([pidfd], _DEATH_WAIT_S)

    # ---- without a fork server

    @property
    def fds(self) -> list[int]:
        """Descriptors, readable as soon as there is something to `look` at."""
        return list(self._pidfds.values()) if self._orphan is not None else []

    def adopt(self, worker_id: int, incarnation: int, pids: Sequence[int]) -> None:
        """Watch the processes from here: their fork server is dead."""
        self._orphan = ForkedCell(worker_id, incarnation, {pid: rank for rank, pid in enumerate(pids)})

    def look(self, row: Callable[[int], Row]) -> ForkedCell | None:
        """The end of the life, None before; the death of one process ends the others. row: returns a rank's row."""
        cell = self._orphan
        if cell is None:
            return None
        dead = [pid for pid in cell.ranks if pid not in self._pidfds or readable([self._pidfds[pid]], 0.0)]
        if dead:
            statuses = {pid: self._status(pid, row(cell.ranks[pid])) for pid in dead}
            for pid in cell.died(statuses, time.time_ns()):
                _send(self._pidfds[pid], signal.SIGKILL)
        return None if cell.ranks else cell

    def _status(self, pid: int, row: Row) -> int:
        """Wait status from the kernel, if this process has become its parent; else from the process's own word, or that
        of a kill."""
        with contextlib.suppress(ChildProcessError, KeyError):
            found = os.waitid(os.P_PIDFD, self._pidfds[pid], os.WEXITED | os.WNOHANG)
            if found is not None:
                return found.si_status << 8 if found.si_code == os.CLD_EXITED else found.si_status
        self.unseen |= row.exit_code is None
        return signal.SIGKILL if row.exit_code is None else row.exit_code << 8


def _send(pidfd: int, number: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True
