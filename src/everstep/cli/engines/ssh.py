"""A job on hosts reached by ssh: the first is the job's own, the others have agents, which are started again when lost.

The token goes over the standard input of each ssh, which stays open: when it ends, the process there is told to end.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from everstep.base.doors import at_port
from everstep.base.errors import ConfigError
from everstep.base.exit_codes import JOB_FAILED, WORKERS_MISSING
from everstep.base.readable import readable
from everstep.cli.engines.launch import JOB_ENDS_S, NOT_REACHED, Launch, job_code, note_end
from everstep.runtime.process import Inbox, taking_signals

FIRST_AGAIN_S = 1.0
MOST_AGAIN_S = 60.0
HEALTHY_S = 60.0
_REFUSED = 2
_OVER = (0, 1, _REFUSED, 3, 130, 143)
_LAST_WAIT_S = 45.0
_ALONE_S = 10.0
_REMOTE = """\
exec 3<&0
read -r EVERSTEP_TOKEN <&3 && export EVERSTEP_TOKEN || exit 2
cd {folder} 2>/dev/null || cd {beside} || exit 2
{words} 3<&- </dev/null &
here=$!
unset EVERSTEP_TOKEN
( while read -r number <&3; do kill -"$number" "$here"; done; kill -TERM "$here" ) 2>/dev/null &
watch=$!
exec 3<&-
wait "$here"
code=$?
kill "$watch" 2>/dev/null
exit "$code"
"""


def remote_words(launch: Launch, number: int, address: str, port: int) -> str:
    """Script for the shell of host `number`. address, port: where the job listens, on host 0."""
    if number == 0:
        words = launch.job_words(f"{shlex.quote(at_port(address, port))}")
    else:
        words = launch.agent_words(f"{shlex.quote(at_port(address, port))}", f"host-{number}")
    words = (
        "".join(f"{name}={shlex.quote(value)} " for name, value in launch.variables)
        + f"{shlex.join(launch.everstep)} {words}"
    )
    folder, beside = shlex.quote(launch.folder or "."), shlex.quote(str(Path(launch.run_dir).parent))
    return _REMOTE.format(folder=folder, beside=beside, words=words)


@dataclass
class Remote:
    """One host: whether its ssh runs, and when the next one is due. Pure."""

    name: str
    running: bool = False
    due_s: float = -inf
    over: bool = False
    _began_s: float = 0.0
    _tries: int = 0

    def begun(self, now_s: float) -> None:
        self.running, self.due_s, self._began_s = True, inf, now_s

    def ended(self, code: int, now_s: float) -> str:
        """Take in that its ssh has ended with this code. Returns words for the user, "" if there are none.

        Exit code 0: handed over, or the job is over; 2: refused; other codes: it is tried again, at growing intervals
        while that fails. An agent whose job failed says so before the job's own host has ended.
        """
        self.running = False
        if now_s - self._began_s >= HEALTHY_S:
            self._tries = 0
        if code in (0, _REFUSED):
            self.over = True
            return "" if code == 0 else f"{self.name} was refused and is left out"
        least_s = JOB_ENDS_S if code in (JOB_FAILED, WORKERS_MISSING) else FIRST_AGAIN_S
        delay_s = min(MOST_AGAIN_S, least_s * 2**self._tries)
        self._tries += 1
        self.due_s = now_s + delay_s
        if code in (JOB_FAILED, WORKERS_MISSING) and self._tries == 1:
            return ""
        how = "cannot be reached" if code == NOT_REACHED else f"ended with {code}"
        return f"{self.name} {how}: again in {delay_s:g} s"


@dataclass
class SshHosts:
    """Runs a job on these hosts. start: starts ssh to a host with a script, its standard input an unbuffered pipe.
    alike: any host may lead the job, so the first is tried again as any other, and is one of them from then on. In the
    main thread SIGINT, SIGTERM and SIGUSR1 are passed on to the job, which has the others end; once the first host was
    lost, the first two end all hosts."""

    hosts: Sequence[str]
    scripts: Sequence[str]
    token: bytes
    start: Callable[[str, str], subprocess.Popen[bytes]]
    alike: bool = False
    _first_leads: bool = True
    _signal: int = 0
    _told: bool = False
    _inbox: Inbox[int] = field(default_factory=Inbox)
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _fds: dict[int, int] = field(default_factory=dict)
    _ends: dict[int, tuple[float, int]] = field(default_factory=dict)

    def run(self) -> int:
        """Run the job. Returns the exit code of the job's own host, once all have ended."""
        remotes = [Remote(name) for name in self.hosts]
        code: int | None = None
        with taking_signals((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), self._inbox.put):
            while code is None:
                now_s = time.monotonic()
                for number, remote in enumerate(remotes):
                    if not (remote.running or remote.over or self._signal) and remote.due_s <= now_s:
                        self._begin(number)
                        remote.begun(now_s)
                patience_s = max(0.0, min([1.0, *(r.due_s - now_s for r in remotes if not r.over)]))
                ready = readable([self._inbox.fd, *self._fds.values()], patience_s)
                for signalled in self._inbox.take():
                    self._tell(signalled)
                for number in [n for n, fd in self._fds.items() if fd in ready]:
                    ended = self._end(number)
                    self._first_leads &= number != 0 or not self.alike or self._ends_all(ended)
                    if number == 0 and self._first_leads:
                        code = ended
                        if code == NOT_REACHED or code < 0:
                            self._say(
                                f"{self.hosts[0]}, the job's own host, is lost: run the same command again to go on"
                            )
                        continue
                    note_end(self._ends, number, ended, time.monotonic())
                    counted = 0 if self.alike and ended in _OVER and ended != _REFUSED else ended
                    if words := remotes[number].ended(counted, time.monotonic()):
                        self._say(words)
                if self.alike and code is None and not self._processes:
                    final = all(remote.over for remote in remotes)
                    code = job_code(self._ends.values(), final=final)
                    code = 128 + self._signal if self._signal and code not in (JOB_FAILED, WORKERS_MISSING) else code
            self._end_others(0.0 if code == 128 + signal.SIGTERM else _ALONE_S)
        return 1 if code == NOT_REACHED or code < 0 else code

    def _ends_all(self, code: int) -> bool:
        """Whether the job is over as the first host has ended with this code, though any host may lead. One that leaves
        in order, untold, while others run does not tell: another one leads, or they end as well."""
        left = code == 0 or (code in (130, 143) and not self._told)
        return code in _OVER and not (left and self._processes)

    def _say(self, text: str) -> None:
        print(f"everstep launch: {text}", file=sys.stderr, flush=True)

    def _begin(self, number: int) -> None:
        process = self.start(self.hosts[number], self.scripts[number])
        self._processes[number], self._fds[number] = process, os.pidfd_open(process.pid)
        self._write(number, f"{self.token.hex()}\n")

    def _tell(self, signalled: int) -> None:
        """Pass a signal on: to all hosts if the first may not lead any more, which nobody here knows better."""
        if self._first_leads:
            self._told = True
            self._write(0, f"{signalled}\n")
            self._first_leads = not (self.alike and signalled == signal.SIGUSR1)  # it gives up its lease
        elif signalled != signal.SIGUSR1:  # it would have all leave in order
            self._signal = signalled
            for number in self._processes:
                self._write(number, f"{signalled}\n")

    def _write(self, number: int, text: str) -> None:
        process = self._processes.get(number)
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):  # its process has ended, which is noticed elsewhere
                process.stdin.write(text.encode())

    def _end(self, number: int) -> int:
        os.close(self._fds.pop(number))
        process = self._processes.pop(number)
        if process.stdin is not None:
            process.stdin.close()
        return process.wait()

    def _end_others(self, alone_s: float) -> None:
        """Wait for the agents, which have heard of the end; after so many seconds the others are told by the end of
        their standard input. Agents of a job that was told to stop would wait for the next one."""
        readable_until_s = time.monotonic() + _LAST_WAIT_S
        for number in list(self._processes):
            fd, process = self._fds[number], self._processes[number]
            if not readable([fd], alone_s) and process.stdin is not None:
                process.stdin.close()
            if not readable([fd], max(0.0, readable_until_s - time.monotonic())):
                process.kill()
            self._end(number)


def ssh(options: Sequence[str]) -> Callable[[str, str], subprocess.Popen[bytes]]:
    """Function that starts ssh with these options: to a host, with a script for its shell."""

    def start(host: str, script: str) -> subprocess.Popen[bytes]:
        command = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", *options, "--", host]
        try:
            return subprocess.Popen(
                [*command, f"sh -c {shlex.quote(script)}"], bufsize=0, stdin=subprocess.PIPE, start_new_session=True
            )
        except FileNotFoundError:
            raise ConfigError("ssh is not on the PATH here") from None

    return start
