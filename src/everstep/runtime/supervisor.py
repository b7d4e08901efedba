"""The launcher's hand on the coordinator: starts it, restarts it on the same port, knows when that is hopeless."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from everstep.base.cause import Cause, Why
from everstep.base.errors import EverstepError
from everstep.runtime.address import COORDINATOR_FILE, read_address
from everstep.runtime.process import cause_of_status, describe_status, own_command
from everstep.runtime.zygote_client import end_process

MODULE = "everstep.runtime.coordinator_main"
SHORT_LIFE_S = 2.0
HOPELESS = 8
MAX_BACKOFF_S = 5.0


class CoordinatorProcess:
    """The one coordinator of a run directory. `pidfd` is readable when it has died; -1 while none runs."""

    def __init__(self, run_dir: Path, host: str) -> None:
        self._run_dir = run_dir
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._down_since_unix_ns = 0
        self._death = Why(Cause.UNKNOWN, "unknown")
        self._silent = False
        self._short_lives = 0
        self.pidfd = -1
        self.restart_at_s: float | None = None
        self.log_path = run_dir / "logs" / "coordinator.log"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start it, on the port of its predecessor if there was one."""
        port = 0
        with contextlib.suppress(OSError, EverstepError):
            port = read_address(self._run_dir / COORDINATOR_FILE).port
        command = own_command(MODULE, str(self._run_dir), "--host", self._host, "--port", str(port))
        command += ["--parent", str(os.getpid()), "--down-since", str(self._down_since_unix_ns)]
        command += ["--cause", self._death.cause]
        with open(self.log_path, "ab") as log:
            # A session of its own: what is sent to the launcher's process group is for the launcher to act upon.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
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
        self._down_since_unix_ns = time.time_ns()
        if self._process is not None:
            code = self._process.wait()
            status = -code if code < 0 else code << 8
            cause = Cause.HUNG if self._silent else cause_of_status(status)
            self._death, self._silent = Why(cause, describe_status(status)), False
        self._drop()
        self._short_lives = self._short_lives + 1 if now_s - self._started_s < SHORT_LIFE_S else 0
        delay_s = 0.0 if self._short_lives <= 1 else min(MAX_BACKOFF_S, 0.05 * 2**self._short_lives)
        self.restart_at_s = now_s + delay_s
        return self._death, self._short_lives >= HOPELESS

    def log_tail(self) -> str:
        """The last line of its log."""
        return last_line(self.log_path)

    def end(self) -> None:
        """Stop it for good."""
        if self._process is not None:
            end_process(self._process, 2.0, signal.SIGTERM)
        self._drop()

    def _drop(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pidfd = -1
        self._process = None


def last_line(path: Path) -> str:
    """The last line of a text file that is not empty, '' if there is none."""
    with contextlib.suppress(OSError):
        lines = [line for line in path.read_text(errors="replace")[-8192:].splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""
    return ""
