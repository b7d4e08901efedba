"""Runs many small jobs quickly: a process that has imported torch once and forks an `everstep run` per request.

A job is the real command with real processes; only what would import torch anew (the fork server, and the look at
the task before the start) is forked from here instead. Requests come as JSON lines on stdin; the end of stdin ends it
all.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from everstep.runtime.host import fork_server, fork_server_client
from everstep.runtime.process import adopt_orphans, children, close_descriptors, die_with_parent

PRELOAD = (
    *fork_server.DEFAULT_PRELOAD,
    "everstep",
    "everstep.__main__",
    "everstep.cli.main",
    "everstep.cli.run",
    "everstep.cli.probe",
    "everstep.cli.worker",
    "everstep.train.worker",
)


class Egg:
    """A fork that waits to become a job's fork server; made before the job's process has threads."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _hatch(theirs)
        theirs.close()
        self.socket = ours


def _hatch(control: socket.socket) -> None:
    """In the fork: wait for the descriptors, then be what `python -m everstep.runtime.host.fork_server` is."""
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
    os.dup2(board_fd, wanted)  # workers are told the number that the agent has
    board_fd = wanted
    close_descriptors({fd, board_fd})
    fork_server._SERVER_PID = os.getpid()
    arguments = ["--fd", str(fd), "--board-fd", str(board_fd), "--parent", str(parent), "--preload", ""]
    os._exit(fork_server.main(arguments))


class Child:
    """What is needed of `Popen`, for a fork."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def lay(egg: Egg) -> None:
    """The next fork server of this process is this one, which needs no import; a second one is an ordinary one."""
    ordinary, eggs = fork_server_client.start_fork_server, [egg]

    def start(log_path: Path | None, board_fd: int, threads: int, preload: Any) -> fork_server_client.ForkServerClient:
        if not eggs or threads != 1:
            return ordinary(log_path, board_fd, threads, preload)
        ours, theirs = socket.socketpair()
        with theirs, eggs.pop().socket as way, open(log_path or os.devnull, "ab") as log:
            socket.send_fds(way, [str(board_fd).encode()], [theirs.fileno(), board_fd, log.fileno()])
        return fork_server_client.ForkServerClient(ours, egg.pid, Child(egg.pid))  # type: ignore[arg-type]

    fork_server_client.start_fork_server = start


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
        lay(Egg())
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
