"""The launcher's end of the fork server: starts it, asks it for workers, hears of their deaths."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everstep.base.errors import EverstepError
from everstep.runtime.board import MAX_ROWS, Board
from everstep.runtime.context import WorkerContext
from everstep.runtime.process import describe_status, own_command, pinned_environment

MODULE = "everstep.runtime.zygote"


class ForkEnded(EverstepError):
    """The fork that was to answer has ended without an answer; the text says how."""


class ZygoteClient:
    """One fork server process. `ready` once it has imported everything; `fd` is readable when it has said something.

    log_path None: what it prints goes nowhere until `log_to`.
    """

    def __init__(self, log_path: Path | None, board_fd: int, threads: int, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        command = own_command(MODULE, "--fd", str(theirs.fileno()), "--board-fd", str(board_fd))
        command += ["--parent", str(os.getpid()), "--preload", ",".join(preload)]
        with theirs, open(log_path or os.devnull, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), board_fd),
                env=pinned_environment(threads),
                start_new_session=True,
            )
        self._sock = ours
        self._buffer = b""
        self.ready = False
        self.greeting: dict[str, Any] = {}
        self.pidfd = os.pidfd_open(self.process.pid)

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    def start(self, entry: str, context: WorkerContext, outputs: Sequence[tuple[int, int]]) -> None:
        """Ask for a worker, of as many processes as its context says. A fork server that is dead is noticed elsewhere.

        outputs: for each of them the descriptors that become its stdout and stderr; they are closed here.
        """
        fds = [fd for pair in outputs for fd in pair]
        request = {
            "op": "start",
            "worker_id": context.worker_id,
            "incarnation": context.incarnation,
            "entry": entry,
            "context": asdict(context),
        }
        with contextlib.suppress(OSError):
            socket.send_fds(self._sock, [json.dumps(request).encode() + b"\n"], fds)
        for fd in fds:
            os.close(fd)

    def receive(self) -> list[dict[str, Any]]:
        """What it has said; call when `fd` is readable. Empty at the end of the stream."""
        try:
            data = self._sock.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages: list[dict[str, Any]] = [json.loads(line) for line in lines]
        for message in messages:
            if message["op"] == "ready":
                self.ready, self.greeting = True, message
        return messages

    def call(self, entry: str, question: Any) -> Any:
        """What "module:function" answers in a fork of the server. Before there are workers: it waits.

        Raises: ForkEnded if there is no answer.
        """
        request = {"op": "call", "entry": entry, "question": question}
        with contextlib.suppress(OSError):
            self._sock.sendall(json.dumps(request).encode() + b"\n")
        answers: list[Any] = []
        while messages := self.receive():
            answers += [message["answer"] for message in messages if message["op"] == "answer"]
            if answers:
                return answers[0]
            for message in messages:
                if message["op"] == "called":
                    raise ForkEnded(describe_status(message["status"]))
        code = self.process.wait()
        raise ForkEnded(f"the fork server: {describe_status(-code if code < 0 else code << 8)}")

    def log_to(self, path: Path) -> None:
        """Where the server's own output goes from now on."""
        with contextlib.suppress(OSError):
            self._sock.sendall(json.dumps({"op": "log", "path": str(path.resolve())}).encode() + b"\n")

    def close(self, timeout_s: float) -> None:
        """End it and its children; SIGKILL after `timeout_s`."""
        self._sock.close()
        os.close(self.pidfd)
        end_process(self.process, timeout_s, None)


class EarlyZygote:
    """A fork server that is started before its job: it imports while the task is looked at, in a fork of its own.

    threads: as far as is known by then; preload: what it imports. `board` is the job's.
    """

    def __init__(self, threads: int, preload: Sequence[str]) -> None:
        self.board = Board.create(MAX_ROWS)
        self._threads = threads
        self._preload = preload
        self._client: ZygoteClient | None = None

    def call(self, entry: str, question: Any) -> Any:
        """As `ZygoteClient.call`; starts the server."""
        if self._client is None:
            self._client = ZygoteClient(None, self.board.fd, self._threads, self._preload)
        return self._client.call(entry, question)

    def take(self, threads: int, log_path: Path) -> ZygoteClient | None:
        """The server, for a job with so many threads; from now on the caller ends it. None: it takes another one."""
        if threads != self._threads:
            self.close()
        client, self._client = self._client, None
        if client is not None:
            client.log_to(log_path)
        return client

    def close(self) -> None:
        """End the server if nobody has taken it."""
        if self._client is not None:
            self._client.close(timeout_s=0.0)
            self._client = None


def end_process(process: subprocess.Popen[bytes], timeout_s: float, number: signal.Signals | None) -> None:
    """Wait for a process to end, after sending it `number`; SIGKILL after `timeout_s`."""
    if process.poll() is None and number is not None:
        process.send_signal(number)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
