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
from everstep.base.readable import readable
from everstep.cli.coming_back import HEAD_MARK
from everstep.cli.engines.launch import (
    ENDS_JOB,
    LED,
    NOBODY_LEADS,
    NOT_REACHED,
    Launch,
    LaunchedHost,
    completed,
    given_up,
    job_code,
)
from everstep.runtime.process import Inbox, taking_signals

_LAST_WAIT_S = 45.0
_ALONE_S = 10.0
_REMOTE = """\
exec 3<&0
read -r EVERSTEP_TOKEN leads <&3 && export EVERSTEP_TOKEN || exit 2
cd {folder} 2>/dev/null || cd {beside} || {astray}
{before}{words} 3<&- </dev/null &
here=$!
unset EVERSTEP_TOKEN
( while read -r number <&3; do kill -"$number" "$here"; done; kill -TERM "$here" ) 2>/dev/null &
watch=$!
exec 3<&-
wait "$here"
code=$?
kill "$watch" 2>/dev/null
{after}exit "$code"
"""
_MARKED = f"""\
if [ -e "${HEAD_MARK}" ]; then
  rm -f "${HEAD_MARK}"
  case $code in {" | ".join(map(str, ENDS_JOB))}) code=$((code + {LED})) ;; esac
fi
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
    before = f"export {HEAD_MARK}=$(mktemp -u)\n" if launch.etcd else ""
    before += f'[ -z "$leads" ] || touch "${HEAD_MARK}"\n' if launch.etcd else ""
    after = _MARKED if launch.etcd else ""
    astray = f'{{ [ -z "$leads" ] || exit {2 + LED}; exit 2; }}' if launch.etcd else "exit 2"
    return _REMOTE.format(folder=folder, beside=beside, astray=astray, before=before, words=words, after=after)


@dataclass
class SshHosts:
    """Runs a job on these hosts, until `job_code` says that it is over; `LaunchedHost` says what begins again. start:
    starts ssh to a host with a script, its standard input an unbuffered pipe. alike: any host may lead the job.
    patience_s: as `given_up` has it.

    In the main thread SIGINT, SIGTERM and SIGUSR1 are passed on to the first host. After SIGINT or SIGTERM no host
    begins again; when the first does not run (any more), or the signal comes again, the others are ended, too.
    """

    hosts: Sequence[str]
    scripts: Sequence[str]
    token: bytes
    start: Callable[[str, str], subprocess.Popen[bytes]]
    alike: bool = False
    patience_s: float = inf
    _signal: int = 0
    _hosts: list[LaunchedHost] = field(default_factory=list)
    _inbox: Inbox[int] = field(default_factory=Inbox)
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _fds: dict[int, int] = field(default_factory=dict)

    def run(self) -> int:
        """Run the job. Returns its exit code, once all hosts have ended."""
        self._hosts = [LaunchedHost(name, self.alike) for name in self.hosts]
        code: int | None = None
        with taking_signals((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), self._inbox.put):
            while code is None:
                now_s = time.monotonic()
                for number, host in enumerate(self._hosts):
                    if host.due_s <= now_s and not self._last:
                        self._begin(number, leads=number == 0 and host.due_s == -inf)
                        host.begun(now_s)
                due_s = inf if self._last else min(host.due_s for host in self._hosts)
                patience_s = max(0.0, min(1.0, due_s - now_s))
                ready = readable([self._inbox.fd, *self._fds.values()], patience_s)
                for signalled in self._inbox.take():
                    code = self._tell(signalled) if code is None else code
                for number in [n for n, fd in self._fds.items() if fd in ready]:
                    code = self._take_end(number) if code is None else code
                if code is None and self._signal and 0 not in self._processes:
                    code = 128 + self._signal
                if code is None and (code := given_up(self._hosts, self.patience_s, time.monotonic())):
                    self._say(NOBODY_LEADS)
            self._end_others(code)
        return code

    def _tell(self, signalled: int) -> int | None:
        """Pass a signal on. Returns the job's exit code if it is the second one that is to end the job."""
        again = bool(self._signal) and signalled != signal.SIGUSR1
        self._signal = self._signal if signalled == signal.SIGUSR1 else signalled
        self._write(0, f"{signalled}\n")
        return 128 + signalled if again else None

    @property
    def _last(self) -> bool:
        """Whether no host begins again."""
        return bool(self._signal) or completed(self._hosts)

    def _take_end(self, number: int) -> int | None:
        """Take in that a host's ssh has ended. Returns the job's exit code if it is over."""
        ended, host = self._end(number), self._hosts[number]
        code = job_code(number, ended, alike=self.alike)
        if code is not None and (code == NOT_REACHED or code < 0):
            self._say(f"{host.name}, the job's own host, is lost: run the same command again to go on")
            return 1
        if code is None and (words := host.ended(ended, time.monotonic())) and not self._last:
            self._say(words)
        return code

    def _say(self, text: str) -> None:
        print(f"everstep launch: {text}", file=sys.stderr, flush=True)

    def _begin(self, number: int, *, leads: bool) -> None:
        process = self.start(self.hosts[number], self.scripts[number])
        self._processes[number], self._fds[number] = process, os.pidfd_open(process.pid)
        self._write(number, f"{self.token.hex()}{' leads' * leads}\n")

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

    def _end_others(self, code: int) -> None:
        """Wait for the others, which have heard of the end. After some time they are told by the end of their standard
        input: agents of a job that was told to stop, and hosts that came (back) too late to hear, wait for the next
        one."""
        self._wait_for_others(0.0 if code > 128 else _ALONE_S)
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        self._wait_for_others(_LAST_WAIT_S)
        for number in list(self._processes):
            self._processes[number].kill()
            self._end(number)

    def _wait_for_others(self, for_s: float) -> None:
        until_s = time.monotonic() + for_s
        while self._fds and (ready := readable(self._fds.values(), max(0.0, until_s - time.monotonic()))):
            for number in [n for n, fd in self._fds.items() if fd in ready]:
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
