"""Runs many small jobs quickly: a process that has imported torch once and forks an `everstep run` per request.

A job is the real command with real processes (several per worker, if EVERSTEP_TEST_RANKS says so); only what would
import torch anew (the fork server, and the look at the task before the start) is forked from here instead. Requests
come as JSON lines on stdin; the end of stdin ends it all.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import cell_worker
from everstep.runtime import launcher, zygote
from everstep.runtime.process import adopt_orphans, children, close_descriptors, die_with_parent
from everstep.runtime.zygote_client import ZygoteClient

PRELOAD = (
    *zygote.DEFAULT_PRELOAD,
    "everstep",
    "everstep.cli.main",
    "everstep.cli.run",
    "everstep.cli.probe",
    "everstep.cli.worker",
    "everstep.train.worker",
)


class Egg:
    """A fork that waits to become a job's fork server; made before its launcher has threads."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _hatch(theirs)
        theirs.close()
        self.socket = ours


def _hatch(control: socket.socket) -> None:
    """In the fork: wait for the descriptors, then be what `python -m everstep.runtime.zygote` is."""
    parent = os.getppid()
    die_with_parent(parent)
    message, fds, _, _ = socket.recv_fds(control, 64, 3)
    if not message:
        os._exit(0)
    fd, board_fd, log_fd = fds
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(log_fd, number)
    fd, wanted = fcntl.fcntl(fd, fcntl.F_DUPFD, 500), int(message)
    os.dup2(board_fd, wanted)  # workers are told the launcher's number
    board_fd = wanted
    close_descriptors({fd, board_fd})
    zygote._SERVER_PID = os.getpid()
    arguments = ["--fd", str(fd), "--board-fd", str(board_fd), "--parent", str(parent), "--preload", ""]
    os._exit(zygote.main(arguments))


class Child:
    """What the launcher needs of `Popen`, for a fork."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        import select
        import subprocess

        if self.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                if not select.select([pidfd], [], [], timeout_s)[0]:
                    raise subprocess.TimeoutExpired("fork server", timeout_s or 0.0)
            finally:
                os.close(pidfd)
            self.poll()
        return self.returncode or 0

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class WarmZygote(ZygoteClient):
    """The launcher's end of a fork server that needs no import; a second one in the same job is an ordinary one."""

    egg: Egg | None = None

    def __init__(self, log_path: Path, board_fd: int, threads: int, preload: Any) -> None:
        egg, WarmZygote.egg = WarmZygote.egg, None
        if egg is None or threads != 1:
            super().__init__(log_path, board_fd, threads, preload)
            return
        ours, theirs = socket.socketpair()
        with theirs, egg.socket, open(log_path, "ab") as log:
            socket.send_fds(egg.socket, [str(board_fd).encode()], [theirs.fileno(), board_fd, log.fileno()])
        self.process = Child(egg.pid)  # type: ignore[assignment]
        self._sock = ours
        self._buffer = b""
        self.ready = False
        self.pidfd = os.pidfd_open(egg.pid)


def probe_in_fork(task: str, request: Any, *, units: bool = False, server: Any = None) -> Any:
    """What `cli.probe.probe_task` does, in a fork."""
    from dataclasses import asdict

    from everstep.base.errors import ConfigError
    from everstep.cli import probe

    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, json.dumps(asdict(probe.look(task, request, units))).encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as answers:
        data = json.loads(answers.read())
    os.waitpid(pid, 0)
    if data["error"]:
        raise ConfigError(data["error"])
    return probe.Probe(data["defaults"], data["dataset_size"])


def run_job(request: dict[str, Any]) -> None:
    """In a fork: `everstep ARGV` or `python ARGV`, output and exit code into files. Never returns."""
    from everstep.cli import main, run

    code = 1
    try:
        die_with_parent(os.getppid())
        os.setsid()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in ((1, request["out"]), (2, request["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if request["argv"][0].endswith(".py"):
            sys.argv = request["argv"]
            runpy.run_path(sys.argv[0], run_name="__main__")
            sys.exit(0)
        WarmZygote.egg = Egg()
        launcher.ZygoteClient = WarmZygote  # type: ignore[misc]
        run.probe_task = probe_in_fork
        ranks = int(os.environ.get("EVERSTEP_TEST_RANKS", "1"))
        if ranks > 1:
            run.ENTRY = cell_worker.ENTRY
            launcher.Launcher = functools.partial(launcher.Launcher, ranks=ranks)  # type: ignore
        code = main.run_command(request["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        Path(request["code"]).write_text(str(code))
        os._exit(0)


def main() -> None:
    """Serve until stdin ends."""
    adopt_orphans()
    begin = time.monotonic()
    zygote.preload(list(PRELOAD))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for jobs
    print(json.dumps({"ready_s": round(time.monotonic() - begin, 1)}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            run_job(json.loads(line))
        print(json.dumps({"pid": pid}), flush=True)
    for child in children():
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
