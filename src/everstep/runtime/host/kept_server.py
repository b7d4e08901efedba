"""The fork server of a host, of which there is always one: another one is started when it dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.runtime.host.board import Board
from everstep.runtime.host.fork_server_client import ForkServerClient, start_fork_server
from everstep.runtime.host.host_workers import Workers
from everstep.runtime.process import last_line

SERVER_HOPELESS = 3
SERVER_LOG = "fork-server.log"
_END_WAIT_S = 5.0


class KeptServer:
    """Starts the workers of a host. log: of the process. tell: reports an event of the job; notify: tells observers.
    failed: why no fork server can start here, None while there is hope."""

    def __init__(
        self,
        server: ForkServerClient,
        threads: int,
        preload: Sequence[str],
        board: Board,
        log: Path,
        workers: Workers,
        notify: Callable[..., None],
        tell: Callable[[str, Why], None],
    ) -> None:
        self.failed: Why | None = None
        self._server = server
        self._threads, self._preload, self._board = threads, preload, board
        self._log, self._workers = log, workers
        self._notify, self._tell = notify, tell
        self._failures = 0

    def begin(self, *, anew: bool) -> None:
        """Use the fork server that there is; anew: it has another number of threads, so another one takes its place."""
        if anew:
            self._server.close(0.0)
            self._server = self._new()
        self._use()

    @property
    def fd(self) -> int:
        """Descriptor, readable when the fork server has sent a message; -1 if there is none any more."""
        return self._server.fd

    def hear(self) -> None:
        """Take in messages of the fork server; start another one if it has died."""
        messages = self._server.receive()
        for message in messages:
            if message["op"] == "ready":
                self._ready(message)
            else:
                self._workers.heard(message)
        if not messages:
            self._died()

    def ping_in(self, now_s: float) -> float:
        return self._server.watch.due_in(now_s) if self._server.fd >= 0 else inf

    def watch(self, now_s: float) -> None:
        """Kill a fork server that lives but does not answer (stopped, or stuck in the kernel)."""
        server = self._server
        if server.fd < 0:
            return  # none runs any more
        server.ping(now_s)
        silent = server.watch.too_long()
        if silent:
            self._tell("warning", Why(Cause.HUNG, f"the fork server {silent}: it is killed and started again"))
            server.watch.killed(now_s)
            server.kill()
            self._died()

    def kill(self) -> None:
        self._server.kill()

    def close(self, *, at_once: bool) -> None:
        """End it; at_once: without waiting. While it imports it hears nothing."""
        self._server.close(timeout_s=_END_WAIT_S if self._server.ready and not at_once else 0.0)

    def _new(self) -> ForkServerClient:
        before, names = self._server, list(self._preload)
        if not before.ready:  # packages of the task's may be the reason
            names = [name for name in names if ":" not in name]
        return start_fork_server(self._log, self._board.fd, self._threads, names, before.watch)

    def _use(self) -> None:
        self._server.log_to(self._log)
        self._workers.use(self._server)
        if self._server.ready:
            self._ready(self._server.greeting)

    def _ready(self, message: dict[str, Any]) -> None:
        self._failures = 0
        self._notify("fork_server_ready", **{k: v for k, v in message.items() if k != "op"})

    def _died(self) -> None:
        was_ready = self._server.ready
        how = self._server.close(timeout_s=2.0)
        self._workers.server_died()
        self._failures = 0 if was_ready else self._failures + 1
        words = last_line(self._log)
        said = f"{how}; its last words: {words}" if words else how
        text = f"the fork server died ({said}) and is started again; its workers go on"
        self._notify("warning", Why(Cause.EXITED, text))
        if self._failures >= SERVER_HOPELESS:
            self.failed = Why(Cause.CRASH_LOOP, f"the fork server cannot start: {said}")
            return
        self._server = self._new()
        self._use()
