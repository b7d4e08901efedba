"""What a host runs of a job, once its agent knows which: fork server, workers, their logs and samples."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.config import Config, load_config
from everstep.protocol.messages import JobFacts
from everstep.runtime.address import COORDINATOR_FILE, LOGS_FOLDER, METRICS_FOLDER
from everstep.runtime.agent_link import AgentLink
from everstep.runtime.board import Board
from everstep.runtime.collector import Collector
from everstep.runtime.context import WorkerContext
from everstep.runtime.fork_server_client import ForkServerClient, start_fork_server
from everstep.runtime.joining import Joining
from everstep.runtime.sampler import Sampler
from everstep.runtime.slots import RestartPolicy
from everstep.runtime.supervisor import last_line
from everstep.runtime.workers import Workers

SERVER_HOPELESS = 3
_END_WAIT_S = 5.0


class Host:
    """Starts nothing before it is told of slots (`workers.want`).

    board: that of `server`, a fork server that was started for `joining.threads` threads. notify: tells whoever watches
    (kind, why, fields). `hopeless`: why nothing that is started here can help any more, None while there is hope.
    """

    def __init__(
        self,
        facts: JobFacts,
        joining: Joining,
        token: bytes,
        board: Board,
        server: ForkServerClient,
        link: AgentLink,
        notify: Callable[..., None],
    ) -> None:
        self.facts = facts
        self._joining = joining
        self._token = token
        self._board = board
        self._notify = notify
        self._failures = 0
        self._failed: Why | None = None
        self.config: Config = load_config([("the job", facts.config)])
        self.run_dir = Path(joining.run_dir or facts.run_dir)
        logs, backoff = self.config.logs, self.config.backoff
        self._collector = Collector(self.run_dir / LOGS_FOLDER, board, int(logs.max_mb * (1 << 20)), logs.keep)
        policy = RestartPolicy(
            self.config.max_restarts, backoff.initial_s, backoff.max_s, restart=self.config.on_failure != "shrink"
        )
        self.workers = Workers(
            board, joining.entry, policy, self._context, link, notify, self._collector, joining.ranks
        )
        self._sampler = self._start_sampler()
        if self.config.threads != joining.threads:
            server.close(0.0)
            server = self._new_server()
        self._server = server
        self._begin(server)

    # ---- the fork server

    @property
    def server_fd(self) -> int:
        """Readable when the fork server has said something; -1 if there is none any more."""
        return self._server.fd

    def hear_server(self) -> None:
        """Take in what the fork server has said; where it has died, start another."""
        messages = self._server.receive()
        for message in messages:
            if message["op"] == "ready":
                self._ready(message)
            else:
                self.workers.heard(message)
        if not messages:
            self._server_died()

    def _new_server(self) -> ForkServerClient:
        return start_fork_server(self._log_path, self._board.fd, self.config.threads, self._joining.preload)

    def _begin(self, server: ForkServerClient) -> None:
        server.log_to(self._log_path)
        self.workers.use(server)
        if server.ready:
            self._ready(server.greeting)

    def _ready(self, message: dict[str, Any]) -> None:
        self._failures = 0
        self._notify("fork_server_ready", **{k: v for k, v in message.items() if k != "op"})

    def _server_died(self) -> None:
        was_ready = self._server.ready
        self._server.close(timeout_s=2.0)
        self.workers.server_died()
        self._failures = 0 if was_ready else self._failures + 1
        said = last_line(self._log_path)
        self._notify("warning", Why(Cause.EXITED, f"the fork server died and is started again: {said}"))
        if self._failures >= SERVER_HOPELESS:
            self._failed = Why(Cause.CRASH_LOOP, f"the fork server cannot start: {said}")
            return
        self._server = self._new_server()
        self._begin(self._server)

    @property
    def _log_path(self) -> Path:
        return self.run_dir / LOGS_FOLDER / "fork-server.log"

    # ---- the workers

    @property
    def hopeless(self) -> Why | None:
        return self._failed or self.workers.hopeless

    def finishing(self) -> bool:
        """Whether some worker still runs what its script does after the last step."""
        return any(self._board.read(life.worker_id).phase == "finish" for life in self.workers.lives())

    def reached(self) -> int:
        """The newest step that a worker of this host has applied."""
        return max(self._board.read(row).step for row in range(self._board.rows))

    def _context(self, worker_id: int, incarnation: int) -> WorkerContext:
        return WorkerContext(
            run_dir=str(self.run_dir.resolve()),
            worker_id=worker_id,
            incarnation=incarnation,
            host=self._joining.host,
            token=self._token.hex(),
            coordinator_file=str((self.run_dir / COORDINATOR_FILE).resolve()),
            board_fd=self._board.fd,
            board_row=worker_id,
            config=self.facts.config,
            task=self.facts.task,
            argv=list(self.facts.argv),
            spare=worker_id >= self.config.workers,
        )

    def _start_sampler(self) -> Sampler | None:
        interval_s = self.config.metrics.interval_s
        if not interval_s:
            return None
        # Of several agents of one machine each needs a file of its own.
        name = os.uname().nodename
        if self._joining.host not in (name, self.config.network.address):
            name = self._joining.host
        return Sampler(self.run_dir / METRICS_FOLDER, name, self._board, self.workers.lives, interval_s)

    def close(self, *, at_once: bool) -> None:
        """End everything; what is left of the workers is killed. All of it is done, whatever a part of it raises.

        at_once: the fork server is not waited for.
        """
        self.workers.stop()
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._collector.close)
            last_first.callback(self._end_workers, at_once)
            if self._sampler is not None:
                last_first.callback(self._sampler.close)

    def _end_workers(self, at_once: bool) -> None:
        self.workers.kill_all()
        # While it imports it hears nothing.
        self._server.close(timeout_s=_END_WAIT_S if self._server.ready and not at_once else 0.0)
        self.workers.server_died()
