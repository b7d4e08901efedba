"""Runs many small jobs quickly: a process that has imported everything once and forks an `everstep run` per request.

A job is the real command with real processes; only those that would import all of it anew (the fork server, the first
coordinator and agent, and the look at the task before the start) are forked from here instead. Later lives of them are
ordinary ones. Requests come as JSON lines on stdin; the end of stdin ends it all.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from everstep.runtime import supervisor
from everstep.runtime.host import fork_server, fork_server_client
from everstep.runtime.link.address import COORDINATOR_MODULE
from everstep.runtime.process import adopt_orphans, children, close_descriptors, die_with_parent, own_command

PRELOAD = (
    *fork_server_client.DEFAULT_PRELOAD,
    "everstep",
    "everstep.__main__",
    "everstep.cli.main",
    "everstep.cli.run",
    "everstep.cli.probe",
    "everstep.cli.worker",
    "everstep.train.worker",
    COORDINATOR_MODULE,
    supervisor.AGENT_MODULE,
)


class Egg:
    """A fork that waits to become a process of a job; made before the job's process has threads. become: called there,
    with the way to that process."""

    def __init__(self, become: Callable[[socket.socket], None]) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            die_with_parent(os.getppid())
            become(theirs)
        theirs.close()
        self.socket = ours


def _be_fork_server(control: socket.socket) -> None:
    """Wait for the descriptors, then be what `python -m everstep.runtime.host.fork_server` is."""
    message, fds, _, _ = socket.recv_fds(control, 64, 3)
    if not message:
        os._exit(0)
    fd, board_fd, log_fd = fds
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(log_fd, number)
    fd, wanted = fcntl.fcntl(fd, fcntl.F_DUPFD, 500), int(message)
    os.dup2(board_fd, wanted)  # workers are told the number that the agent has
    board_fd = wanted
    close_descriptors({fd, board_fd})
    fork_server._SERVER_PID = os.getpid()
    arguments = ["--fd", str(fd), "--board-fd", str(board_fd), "--parent", str(os.getppid()), "--preload", ""]
    os._exit(fork_server.main(arguments))


def _be_module(control: socket.socket) -> None:
    """Wait for a command and its descriptors, then be what `python -m MODULE` is. Never returns."""
    message, fds, _, _ = socket.recv_fds(control, 1 << 16, 8)
    with control.makefile("rb") as rest:
        request = json.loads(message + rest.read() or "null")
    if request is None:
        os._exit(0)
    os.setsid()
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 500) for fd in fds]
    wanted = [0, 1, 2, *request["descriptors"]]
    for fd, number in zip(moved, wanted, strict=True):
        os.dup2(fd, number)
    close_descriptors(set(wanted))
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["command"][3:]
    _be_called(request["command"])
    code = 1
    try:
        code = importlib.import_module(request["command"][3]).main(request["command"][4:])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _be_called(command: list[str]) -> None:
    """Other processes see this command in /proc. Source: proc(5): arg_start and arg_end in /proc/PID/stat."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    with open("/proc/self/mem", "r+b", 0) as memory:
        memory.seek(start)
        memory.write("\0".join(command).encode()[: end - start - 1].ljust(end - start, b"\0"))


class Child:
    """What is needed of `Popen`, for a fork."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def lay() -> None:
    """The first fork server, coordinator and agent of this process are forks, which need no import; later ones are
    ordinary ones."""
    ordinary, eggs = fork_server_client.start_fork_server, [Egg(_be_fork_server)]
    modules = {module: Egg(_be_module) for module in (COORDINATOR_MODULE, supervisor.AGENT_MODULE)}

    def start(log_path: Path | None, board_fd: int, threads: int, preload: Any) -> fork_server_client.ForkServerClient:
        if not eggs or threads != 1:
            return ordinary(log_path, board_fd, threads, preload)
        egg = eggs.pop()
        ours, theirs = socket.socketpair()
        with theirs, egg.socket as way, open(log_path or os.devnull, "ab") as log:
            socket.send_fds(way, [str(board_fd).encode()], [theirs.fileno(), board_fd, log.fileno()])
        return fork_server_client.ForkServerClient(ours, egg.pid, Child(egg.pid))  # type: ignore[arg-type]

    class Popen(subprocess.Popen[bytes]):
        """A process that an egg becomes, if one is left for its module."""

        def _execute_child(self, command: list[str], *how: Any) -> None:
            egg = modules.pop(command[len(own_command("")) - 1], None)
            if egg is None:
                super()._execute_child(command, *how)  # type: ignore[misc]
                return
            _executable, _before, _close, descriptors, _folder, environment, _info, _flags, _shell, *pipes = how
            own = [pipes[0], pipes[3], pipes[5], *descriptors]
            request = {"command": command, "environment": dict(environment), "descriptors": list(descriptors)}
            data = json.dumps(request).encode()
            with egg.socket as way:
                way.sendall(data[socket.send_fds(way, [data], own) :])
                way.shutdown(socket.SHUT_WR)  # other eggs have it, too
            self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]
            self.pid, self._child_created = egg.pid, True

    fork_server_client.start_fork_server = start
    supervisor.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": Popen})  # type: ignore[assignment]


def probe_in_fork(task: str, request: Any, server: Any, *, units: bool = False) -> Any:
    """What `cli.probe.probe_task` does, in a fork."""
    from dataclasses import asdict

    from everstep.cli import probe

    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        question = {"task": task, "request": json.loads(json.dumps(asdict(request))), "units": units}
        os.write(write_end, json.dumps(probe.answer(question)).encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as answers:
        data = json.loads(answers.read())
    os.waitpid(pid, 0)
    return probe.read_answer(data)


def run_job(request: dict[str, Any]) -> None:
    """In a fork: `everstep ARGV` or `python ARGV`, output and exit code into files. Never returns."""
    from everstep import __main__ as everstep
    from everstep.cli import run

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
        lay()
        run.probe_task = probe_in_fork
        sys.argv = ["everstep", *request["argv"]]
        everstep.main()
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
    faulthandler.register(signal.SIGQUIT, all_threads=True)  # jobs that hang are asked where
    begin = time.monotonic()
    fork_server.preload(list(PRELOAD))
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
