"""The job's hand on processes that are started again when they die: the coordinator, and the agent of its own host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from everstep.base.cause import Cause, Why
from everstep.base.errors import EverstepError
from everstep.runtime.address import COORDINATOR_FILE, LOGS_FOLDER, read_address
from everstep.runtime.process import cause_of_status, describe_status, own_command

COORDINATOR_MODULE = "everstep.runtime.coordinator_main"
SHORT_LIFE_S = 2.0
HOPELESS = 8
MAX_BACKOFF_S = 5.0


class Supervised(ABC):
    """One process and its lives. `pidfd` is readable when it has died; -1 while none runs.

    death, exit_code (negative: by that signal), died_unix_ns: of its last life.
    """

    def __init__(self, log_path: Path) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._silent = False
        self._short_lives = 0
        self.death: Why | None = None
        self.exit_code = 0
        self.died_unix_ns = 0
        self.pidfd = -1
        self.restart_at_s: float | None = None
        self.log_path = log_path

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @abstractmethod
    def start(self) -> None:
        """Start its next life."""

    def spawn(self, command: Sequence[str], descriptors: Sequence[int] = ()) -> None:
        """Start a life as this command, which inherits these descriptors."""
        with open(self.log_path, "ab") as log:
            # A session of its own: what is sent to the job's process group is for the job to act upon.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=descriptors,
                start_new_session=True,
            )
        self._started_s = time.monotonic()
        self.pidfd = os.pidfd_open(self._process.pid)
        self.restart_at_s = None

    def kill(self) -> None:
        """SIGKILL: it lives, but does nothing. `pidfd` becomes readable."""
        if self._process is not None:
            self._silent = True
            self._process.kill()

    def died(self, now_s: float) -> tuple[Why, bool]:
        """Call when `pidfd` is readable; sets `restart_at_s`.

        Returns why it died, and whether another start is hopeless.
        """
        self.died_unix_ns = time.time_ns()
        code = self.exit_code = self._process.wait() if self._process is not None else 0
        status = -code if code < 0 else code << 8
        cause = Cause.HUNG if self._silent else cause_of_status(status)
        self.death, self._silent = Why(cause, describe_status(status)), False
        self._drop()
        self._short_lives = self._short_lives + 1 if now_s - self._started_s < SHORT_LIFE_S else 0
        delay_s = 0.0 if self._short_lives <= 1 else min(MAX_BACKOFF_S, 0.05 * 2**self._short_lives)
        self.restart_at_s = now_s + delay_s
        return self.death, self._short_lives >= HOPELESS

    def log_tail(self) -> str:
        """The last line of its log."""
        return last_line(self.log_path)

    def end(self, timeout_s: float = 2.0) -> None:
        """Stop it for good: SIGTERM, and SIGKILL after so long."""
        if self._process is not None:
            end_process(self._process, timeout_s, signal.SIGTERM)
        self._drop()

    def _drop(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pidfd = -1
        self._process = None


class CoordinatorProcess(Supervised):
    """The one coordinator of a run directory. port: for its first life; 0 is any."""

    def __init__(self, run_dir: Path, port: int) -> None:
        super().__init__(run_dir / LOGS_FOLDER / "coordinator.log")
        self._run_dir = run_dir
        self._port = port

    def start(self) -> None:
        """Start it, on the port of its predecessor if there was one."""
        with contextlib.suppress(OSError, EverstepError):
            self._port = read_address(self._run_dir / COORDINATOR_FILE).port
        command = own_command(COORDINATOR_MODULE, str(self._run_dir), "--port", str(self._port))
        command += ["--parent", str(os.getpid()), "--down-since", str(self.died_unix_ns)]
        command += ["--cause", self.death.cause if self.death is not None else Cause.UNKNOWN]
        self.spawn(command)


def end_process(process: subprocess.Popen[bytes], timeout_s: float, number: signal.Signals | None) -> None:
    """Wait for a process to end, after sending it `number`; SIGKILL after `timeout_s`."""
    if process.poll() is None and number is not None:
        process.send_signal(number)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_line(path: Path) -> str:
    """The last line of a text file that is not empty, '' if there is none."""
    with contextlib.suppress(OSError):
        lines = [line for line in path.read_text(errors="replace")[-8192:].splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""
    return ""
