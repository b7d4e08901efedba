"""The job's hold on processes that it starts again when they die: the coordinator, and the agent of its own host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

from everstep.base.below import APPEND, open_below
from everstep.base.cause import Cause, Why
from everstep.base.errors import EverstepError
from everstep.base.readable import readable
from everstep.protocol.patience import Patience
from everstep.runtime.files.host_directory import OWN_FOLDER, begin_anew
from everstep.runtime.files.led_directory import MOVED
from everstep.runtime.files.run_lock import is_locked
from everstep.runtime.host.undoing import stop, throttle
from everstep.runtime.lead.journal_and_lease import DEPOSED
from everstep.runtime.link.address import COORDINATOR_FILE, COORDINATOR_MODULE, LOGS_FOLDER, TOKEN_FILE, read_address
from everstep.runtime.process import END_ALONE, LEAVE, killed_from_outside, last_line, own_command, why_ended
from everstep.runtime.process_figures import ask_about
from everstep.runtime.start import Start

AGENT_MODULE = "everstep.runtime.host.host_agent"
SHORT_LIFE_S = 2.0
STOPPED_S = 5.0
HOPELESS = 8
REFUSED = 2
"""Exit code of an agent that cannot take part."""
MAX_BACKOFF_S = 5.0
LAST_WAIT_S = 15.0
_SERVER_WAIT_S = 0.5
_OTHERS_FIRST_S = 1.0


class Supervised(ABC):
    """One process and its lives. `pidfd` is readable when it has died; -1 while none runs.

    restart_at_s: when its next life is due; inf: never, or it runs. death, exit_code (negative: by that signal),
    died_unix_ns: of its last life.
    """

    def __init__(self, log_path: Path) -> None:
        self._process: subprocess.Popen[bytes] | Child | None = None
        self._started_s = 0.0
        self._silent = False
        self._short_lives = 0
        self._failed_starts = 0
        self.death: Why | None = None
        self.exit_code = 0
        self.died_unix_ns = 0
        self.pidfd = -1
        self.restart_at_s = inf
        self.log_path = log_path

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def moved(self) -> bool:
        """Whether it ended because another host leads the job in a directory of its own."""
        return self.exit_code == MOVED

    def age_s(self, now_s: float) -> float:
        """Age of its present life, in seconds."""
        return now_s - self._started_s

    @abstractmethod
    def start(self) -> None:
        """Start its next life."""

    def spawn(
        self, command: Sequence[str], descriptors: Sequence[int] = (), secrets: Mapping[str, str] | None = None
    ) -> None:
        """Start a life as this command, which inherits these descriptors. secrets: for its environment alone."""
        with os.fdopen(open_below(self.log_path, APPEND, 1, make=True), "ab") as log:
            # A session of its own: signals to the job's process group are for the job to act upon.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=descriptors,
                start_new_session=True,
                env={**os.environ, **(secrets or {})},
            )
        self._started_s = time.monotonic()
        self.pidfd = os.pidfd_open(self._process.pid)
        self.restart_at_s = inf

    def adopt(self, pid: int) -> None:
        """Take in a child of this process that it started before it became another program."""
        self._process = Child(pid)
        self._started_s = time.monotonic()
        self.pidfd = os.pidfd_open(pid)
        self.restart_at_s = inf

    def kill(self) -> bool:
        """SIGKILL a process that lives but does nothing; `pidfd` becomes readable. Returns False if it was killed
        already."""
        if self._process is None or self._silent:
            return False
        self._silent = True
        self._process.kill()
        return True

    def died(self, now_s: float) -> tuple[Why, bool]:
        """Take in its death when `pidfd` is readable; sets `restart_at_s`.

        Returns why it died, and whether another start is hopeless: it ends itself each time. A life that was killed
        from outside could have begun, so that is no reason.
        """
        self.died_unix_ns = time.time_ns()
        self.exit_code = self._process.wait() if self._process is not None else 0
        self.death = why_ended(self.exit_code)
        if self._silent:
            self.death, self._silent = Why(Cause.HUNG, self.death.reason), False
        self._drop()
        # On a loaded machine it may take long to find that it cannot begin.
        short = now_s - self._started_s < SHORT_LIFE_S or self.exit_code == REFUSED
        self._short_lives = self._short_lives + 1 if short else 0
        if not killed_from_outside(self.exit_code):
            self._failed_starts = self._failed_starts + 1 if short else 0
        delay_s = 0.0 if self._short_lives <= 1 else min(MAX_BACKOFF_S, 0.05 * 2**self._short_lives)
        self.restart_at_s = now_s + delay_s
        return self.death, self._failed_starts >= HOPELESS

    def end(self, timeout_s: float = 2.0) -> None:
        """Stop it for good: SIGTERM, and SIGKILL after so long. A stopped process is continued first."""
        if self._process is not None:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._drop()

    def _drop(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pidfd = -1
        self._process = None


class Child:
    """A child of which this process knows the pid alone; methods as those of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Exit code, None while it runs."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._code = -signal.SIGKILL  # nobody knows
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout_s: float | None = None) -> int:
        """Exit code once it has ended. Raises: subprocess.TimeoutExpired."""
        if self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                readable([pidfd], timeout_s)
            finally:
                os.close(pidfd)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout_s or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class CoordinatorProcess(Supervised):
    """The one coordinator of a run directory; coordinators of other hosts may take its place, or it theirs."""

    def __init__(self, begun: Start) -> None:
        super().__init__(begun.folder / LOGS_FOLDER / "coordinator.log")
        self._begun = begun
        self._port = begun.port or 0

    def died(self, now_s: float) -> tuple[Why, bool]:
        """Take in its death, as other processes'; but a coordinator that was replaced by another stands by at once."""
        why, hopeless = super().died(now_s)
        if self.moved:
            self.restart_at_s = inf
            self.death = Why(Cause.LEASE, last_line(self.log_path))
            return self.death, False
        if self._begun.succession.owner and self.exit_code in (0, DEPOSED):
            given_up = self.exit_code == 0
            self.restart_at_s = now_s + _OTHERS_FIRST_S * given_up
            how = "given up" if given_up else "lost"
            self.death = Why(Cause.LEASE, f"it has {how} its lease, and stands by")
            return self.death, False
        return why, hopeless

    def resign(self) -> None:
        """Have it give up its lease: its next life stands by, and leads again if no other host does."""
        if self._process is not None:
            self._process.terminate()

    def strike(self, kind: str, for_s: float) -> None:
        """Carry out a scripted fault: kill, stop (for_s 0: until it is continued) or throttle."""
        if self._process is None or self._process.poll() is not None:
            return
        if kind == "throttle":
            throttle(self._process.pid, for_s)
        elif kind == "stop":
            stop(self._process.pid, for_s or None, itself=False)
        else:
            self._process.kill()

    def start(self) -> None:
        """Start it, on the port of its predecessor if there was one."""
        begun, succession = self._begun, self._begun.succession
        if succession.begins and not succession.owner:
            with contextlib.suppress(OSError, EverstepError):
                self._port = read_address(begun.folder / COORDINATOR_FILE).port
        command = own_command(COORDINATOR_MODULE, str(begun.folder), "--port", str(self._port))
        command += ["--parent", str(os.getpid()), "--down-since", str(self.died_unix_ns)]
        command += ["--cause", self.death.cause if self.death is not None else Cause.UNKNOWN]
        command += succession.words(begun.address)
        self.spawn(command, secrets=begun.secrets if succession.owner else None)


class LocalHost(Supervised):
    """One agent process after the other; the first takes over the early fork server, later ones start their own.
    `left`: pid of the one that goes on without this process's program, 0 if none does. `leaving`: it was asked to leave
    in order."""

    def __init__(self, begun: Start) -> None:
        super().__init__(begun.folder / LOGS_FOLDER / "agent.log")
        self._begun = begun
        self._early = begun.early
        self._handed = False
        self.left = 0
        self.leaving = False
        self._moves = Patience(STOPPED_S, spoke=True)
        self._continued = False

    @property
    def name(self) -> str:
        return self._begun.name

    def start(self) -> None:
        """Start an agent, with the early fork server if no agent has had it yet. The first may run already."""
        begun, early = self._begun, None if self._handed else self._early
        if begun.agent and not self._handed:
            self._handed = True
            self.adopt(begun.agent)
            return
        first, self._handed = not self._handed, True
        threads, run_dir = begun.config.threads, begun.folder
        if first and begun.keeps_apart and not is_locked(run_dir / OWN_FOLDER):
            begin_anew(run_dir / OWN_FOLDER)
        server = early.hand_over(threads, begun.imports) if early is not None else None
        joining = begun.joining(
            str((run_dir / COORDINATOR_FILE).resolve()),
            token_file=str(run_dir / TOKEN_FILE),
            run_dir=str(run_dir / OWN_FOLDER) if begun.keeps_apart else "",
            around=str(run_dir) if begun.keeps_apart else "",
            threads=threads,
            server=server,
            parent=os.getpid(),
        )
        self.spawn(own_command(AGENT_MODULE, joining.to_json()), (server.fd, server.board_fd) if server else ())
        if early is not None:
            early.let_go()

    def wake(self, now_s: float) -> str:
        """Continue an agent that a signal has stopped, because it speaks for its workers no more; kill it if that does
        not help. Call again and again. Returns words about the act."""
        if self.pidfd < 0 or not ask_about(self._moves, self.pid, now_s):
            return ""
        stopped_s = self._moves.stopped_s
        if not stopped_s:
            self._continued = False
            return ""
        words = f"the agent of this host has been stopped for {stopped_s:.1f} s: it is"
        if stopped_s >= 2 * STOPPED_S:
            self._moves.answered()
            self.kill()
            return f"{words} killed and started again"
        if stopped_s >= STOPPED_S and not self._continued:
            self._continued = True
            signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)  # a kill would take the workers' state along
            return f"{words} continued"
        return ""

    def leave(self) -> int:
        """Leave the agent to the program that this process becomes; returns its pid, 0 if none runs."""
        self.left = self.pid if self.pidfd >= 0 else 0
        if self.left and self._early is not None:
            self._early.leave()
        self._drop()
        return self.left

    def ask_to_leave(self) -> bool:
        """Have its workers hand over; then it ends with 0. Returns whether an agent runs."""
        self.leaving = True
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, LEAVE)
        return self.pidfd >= 0

    def end_alone(self) -> None:
        """Have its workers save and leave by themselves, because no coordinator tells them to."""
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, END_ALONE)

    def died(self, now_s: float) -> tuple[Why, bool]:
        """Take in its death, as other processes'. An agent that was told of the job's end, maybe earlier than this
        process, is not started again; nor is a refused one, as the next one would be refused, too."""
        if self._early is not None:  # a child of this process, which does not outlive the agent that had it
            self._early.close(_SERVER_WAIT_S)
        found = super().died(now_s)
        if self.exit_code in (0, REFUSED, -END_ALONE):
            self.restart_at_s = inf
        return found

    def end(self, timeout_s: float = LAST_WAIT_S) -> None:
        """Stop it for good, and its workers with it."""
        super().end(timeout_s)
        if self._early is not None:
            self._early.close(_SERVER_WAIT_S)
