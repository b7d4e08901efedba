"""The launcher's end of the fork server: starts it, asks it for workers, hears of their deaths."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everstep.runtime.context import WorkerContext
from everstep.runtime.process import pinned_environment

MODULE = "everstep.runtime.zygote"


class ZygoteClient:
    """One fork server process. `ready` once it has imported everything; `fd` is readable when it has said something."""

    def __init__(self, log_path: Path, board_fd: int, threads: int, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", MODULE, "--fd", str(theirs.fileno()), "--board-fd", str(board_fd)]
        command += ["--parent", str(os.getpid()), "--preload", ",".join(preload)]
        with theirs, open(log_path, "ab") as log:
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
        self.pidfd = os.pidfd_open(self.process.pid)

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    def start(self, entry: str, context: WorkerContext) -> None:
        """Ask for a worker. A fork server that is dead is noticed elsewhere."""
        request = {
            "op": "start",
            "worker_id": context.worker_id,
            "incarnation": context.incarnation,
            "entry": entry,
            "log": str(context.log_path),
            "context": asdict(context),
        }
        with contextlib.suppress(OSError):
            self._sock.sendall(json.dumps(request).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """What it has said; call when `fd` is readable. Empty at the end of the stream."""
        try:
            data = self._sock.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.ready = self.ready or any(m["op"] == "ready" for m in messages)
        return messages

    def close(self, timeout_s: float) -> None:
        """End it and its children; SIGKILL after `timeout_s`."""
        self._sock.close()
        os.close(self.pidfd)
        end_process(self.process, timeout_s, None)


def end_process(process: subprocess.Popen[bytes], timeout_s: float, number: signal.Signals | None) -> None:
    """Wait for a process to end, after sending it `number`; SIGKILL after `timeout_s`."""
    if process.poll() is None and number is not None:
        process.send_signal(number)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
