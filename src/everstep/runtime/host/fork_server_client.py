"""The agent's end of the fork server: starts it, asks for workers, hears of their deaths, hands it to others."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.base.below import APPEND, open_below
from everstep.base.errors import EverstepError
from everstep.base.readable import readable
from everstep.protocol.patience import Patience
from everstep.runtime.host.board import MAX_ROWS, create_board_memory
from everstep.runtime.process import own_command, pinned_environment, unreaped_status, why_ended
from everstep.runtime.process_figures import ask_about

if TYPE_CHECKING:
    from everstep.runtime.link.context import Handed, WorkerContext

MODULE = "everstep.runtime.host.fork_server"
DEFAULT_PRELOAD = (
    "everstep.exact.lazy_dynamo",  # first: its import of torch takes longest, and any other may import torch._dynamo
    "torch",
    "numpy",
    "torch.utils.data",
    "torch.distributed",
    "torch.optim",
    "torch.nn.utils.stateless",
)
SILENT_S = 5.0
_DEATH_WAIT_S = 5.0


class ForkEnded(EverstepError):
    """The fork has ended without an answer; the text says how."""


class ForkServerClient:
    """A running fork server. `ready` once it has imported everything; `fd` is readable when it has sent a message.
    `watch`: whether it answers pings.

    sock: the connection to it. process: set if it is a child of this process. heard, greeting: as `Handed` has them.
    watch: of its predecessor.
    """

    def __init__(
        self,
        sock: socket.socket,
        pid: int,
        process: subprocess.Popen[bytes] | None = None,
        heard: str = "",
        greeting: dict[str, Any] | None = None,
        watch: Patience | None = None,
    ) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.greeting = greeting or {}
        self.ready = bool(greeting)
        self._sock = sock
        self.watch = watch or Patience(SILENT_S)
        self.watch.begins()
        if self.ready:
            self.watch.answered()
        self._process = process
        self._buffer = heard.encode()

    @classmethod
    def adopt(cls, handed: Handed) -> ForkServerClient:
        """Take a fork server over from another process that has stopped talking to it."""
        return cls(socket.socket(fileno=handed.fd), handed.pid, heard=handed.heard, greeting=handed.greeting)

    def hand_over(self, board_fd: int) -> Handed:
        """Data with which another process can take it over; this process must ask it nothing from now on."""
        from everstep.runtime.link.context import Handed

        return Handed(self.fd, board_fd, self.pid, self._buffer.decode(), self.greeting)

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    def start(self, entry: str, context: WorkerContext, outputs: Sequence[tuple[int, int]], lifeline: int) -> None:
        """Ask for a worker with as many processes as its context says. A dead fork server is noticed elsewhere.

        outputs: for each process the descriptors that become its stdout and stderr. lifeline: the reading end of a
        pipe; the worker dies when the other end is closed. All of these are closed here.
        """
        fds = [*(fd for pair in outputs for fd in pair), lifeline]
        self._ask(fds, op="start", entry=entry, context=asdict(context))
        for fd in fds:
            os.close(fd)

    def receive(self, *, whole: bool = False) -> list[dict[str, Any]]:
        """Take the messages that it sent; call when `fd` is readable. Empty at the end of the stream. whole: wait for
        the rest of a message that has begun."""
        lines: list[bytes] = []
        while not lines:
            try:
                data = self._sock.recv(1 << 16)
            except OSError:
                data = b""
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            if not (data and whole):
                break
        messages: list[dict[str, Any]] = [json.loads(line) for line in lines]
        for message in messages:
            if message["op"] == "ready":
                self.ready, self.greeting = True, message
        if messages:
            self.watch.answered()
        return messages

    def ping(self, now_s: float) -> None:
        """Ping it if that is due; while it imports it cannot answer. `now_s` is monotonic."""
        if ask_about(self.watch, self.pid, now_s) and self.ready:
            self._ask(op="ping")

    def call(self, entry: str, question: Any, until_s: float = math.inf) -> Any:
        """Answer of "module:function" from a fork of the server. Waits, so only for use before there are workers.
        until_s: monotonic time until which it may import.

        Raises: ForkEnded if there is no answer, or it still imports then.
        """
        self._ask(op="call", entry=entry, question=question)
        answers: list[Any] = []
        while messages := self._heard(until_s):
            for message in messages:  # the answer comes before the end
                if message["op"] == "answer":
                    answers.append(message["answer"])
                elif message["op"] == "called" and answers:
                    return answers[0]
                elif message["op"] == "called":
                    raise ForkEnded(why_ended(os.waitstatus_to_exitcode(message["status"])).reason)
        code = self._process.wait() if self._process is not None else 0
        raise ForkEnded(f"the fork server: {why_ended(code).reason}")

    def _heard(self, until_s: float) -> list[dict[str, Any]]:
        limit_s = None if self.ready or until_s == math.inf else until_s - time.monotonic()
        if not readable([self.fd], limit_s):
            raise ForkEnded("imports took all the time there was")
        return self.receive(whole=True)

    def import_packages(self, names: Sequence[str]) -> None:
        """Have it import packages of the user's, before anything is asked of it."""
        self._ask(op="packages", names=list(names))

    def log_to(self, path: Path) -> None:
        """Write the server's own output there from now on."""
        self._ask(op="log", path=str(path.resolve()))

    def _ask(self, fds: Sequence[int] = (), **request: Any) -> None:
        with contextlib.suppress(OSError):
            data = json.dumps(request).encode() + b"\n"
            self._sock.sendall(data[socket.send_fds(self._sock, [data], fds) :])

    def let_go(self) -> None:
        """Close this end: another process has the connection by now."""
        self._sock.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self, timeout_s: float) -> str:
        """End it and its children; SIGKILL after `timeout_s`. Returns how it ended."""
        self._sock.close()
        if self.pidfd < 0:
            return ""
        if not readable([self.pidfd], timeout_s):
            self.kill()
            readable([self.pidfd], _DEATH_WAIT_S)
        os.close(self.pidfd)
        self.pidfd = -1
        if self._process is None:
            status = unreaped_status(self.pid)
            return "nobody saw how" if status is None else why_ended(os.waitstatus_to_exitcode(status)).reason
        return why_ended(self._process.wait()).reason


def start_fork_server(
    log_path: Path | None, board_fd: int, threads: int, preload: Sequence[str], watch: Patience | None = None
) -> ForkServerClient:
    """Start a fork server that ends with this process. log_path None: its output is dropped until `log_to`. watch: of
    its predecessor."""
    ours, theirs = socket.socketpair()
    command = own_command(MODULE, "--fd", str(theirs.fileno()), "--board-fd", str(board_fd))
    command += ["--parent", str(os.getpid()), "--preload", ",".join(preload)]
    log = os.open(os.devnull, os.O_WRONLY) if log_path is None else open_below(log_path, APPEND, 1, make=True)
    with theirs, os.fdopen(log, "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(), board_fd),
            env=pinned_environment(threads),
            start_new_session=True,
        )
    return ForkServerClient(ours, process.pid, process, watch=watch)


class EarlyForkServer:
    """A fork server that is started before its job: it imports while one of its forks looks at the task.

    threads: as far as is known by then; preload: names that it imports, as `fork_server.preload` takes them. It stays a
    child of this process when an agent has taken it over.
    """

    def __init__(self, threads: int, preload: Sequence[str]) -> None:
        self._threads = threads
        self._preload = tuple(preload)
        self._board_fd = -1
        self._client: ForkServerClient | None = None

    def call(self, entry: str, question: Any, until_s: float = math.inf) -> Any:
        """As `ForkServerClient.call`; starts the server."""
        return self._started().call(entry, question, until_s)

    def start(self) -> None:
        """Start the server now."""
        self._started()

    def import_packages(self, names: Sequence[str]) -> None:
        """Have it import packages of the user's, before anything is asked of it."""
        self._preload = (*self._preload, *names)
        if self._client is not None:
            self._client.import_packages(names)

    def hand_over(self, threads: int, preload: tuple[str, ...]) -> Handed:
        """Data with which an agent takes the server over, for a job with so many threads and these imports, and the
        board that its workers inherit. The agent's process has to inherit both descriptors; then call `let_go`."""
        if (threads, preload) != (self._threads, self._preload):
            self.close()
            self._threads, self._preload = threads, preload
        return self._started().hand_over(self._board_fd)

    def let_go(self) -> None:
        """The agent has its descriptors."""
        if self._client is not None:
            self._client.let_go()
            self._close_board()

    def leave(self) -> None:
        """The server outlives this object, with its agent."""
        self._client = None

    def close(self, timeout_s: float = 0.0) -> None:
        if self._client is not None:
            self._client.close(timeout_s)
            self._client = None
            self._close_board()

    def _started(self) -> ForkServerClient:
        if self._client is None:
            self._board_fd = create_board_memory(MAX_ROWS)
            self._client = start_fork_server(None, self._board_fd, self._threads, self._preload)
        return self._client

    def _close_board(self) -> None:
        if self._board_fd >= 0:
            os.close(self._board_fd)
            self._board_fd = -1
