"""One host's part of a job: its workers, the fork server that starts them, their logs and figures."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from everstep.base.below import keep_to
from everstep.base.cause import Cause, Why
from everstep.base.config import Config, load_config
from everstep.base.plan import WorkerKey
from everstep.observe.events import EventLog
from everstep.protocol.messages import (
    JobFacts,
    WorkerLife,
)
from everstep.protocol.roles import WORKER
from everstep.runtime.files.agent_files import AgentFiles, PeerWire
from everstep.runtime.host.agent_link import AgentLink, Secrets
from everstep.runtime.host.board import Board
from everstep.runtime.host.collector import Collector, Sampler
from everstep.runtime.host.fork_server_client import ForkServerClient, start_fork_server
from everstep.runtime.host.hearsay import Hearsay
from everstep.runtime.host.host_workers import Workers
from everstep.runtime.link.address import COORDINATOR_FILE, EVENTS_FILE, METRICS_FOLDER
from everstep.runtime.link.context import Joining, WorkerContext
from everstep.runtime.link.handshake import PEER, role_token
from everstep.runtime.link.tls import Tls
from everstep.runtime.process import (
    is_stopped,
    last_line,
)

SERVER_HOPELESS = 3
SERVER_LOG = "fork-server.log"
_END_WAIT_S = 5.0


class Host:
    """This host's part of a job; starts nothing before it is told of slots (`workers.want`).

    board: that of `server`, a fork server that was started for `joining.threads` threads. notify: tells observers
    (kind, why, fields). `hopeless`: reason why no start here can help any more, None while there is hope.
    """

    def __init__(
        self,
        facts: JobFacts,
        joining: Joining,
        secrets: Secrets,
        board: Board,
        server: ForkServerClient,
        link: AgentLink,
        notify: Callable[..., None],
    ) -> None:
        self.facts = facts
        self._joining = joining
        self._secrets = secrets
        self._board = board
        self._notify = notify
        self._failures = 0
        self._failed: Why | None = None
        self.config: Config = load_config([("the job", facts.config)])
        wire = PeerWire(joining.own or joining.host, role_token(secrets.token, PEER), Tls.of(secrets.shown))
        self.files = AgentFiles(facts, joining, self.config, wire, link.client)
        self.run_dir = self.files.run_dir
        keep_to(self.run_dir)
        keep_to(self.files.logs.parent)
        logs = self.config.logs
        self._collector = Collector(self.files.logs, board, int(logs.max_mb * (1 << 20)), logs.keep)
        self.workers = Workers(joining, self.config, board, self._context, link, notify, self._collector)
        self._sampler = self._start_sampler()
        self._hearsay = self._hear_of_head(link)
        if self.config.threads != joining.threads:
            server.close(0.0)
            server = self._new_server(server)
        self._server = server
        self._begin(server)

    # ---- the fork server

    @property
    def server_fd(self) -> int:
        """Descriptor, readable when the fork server has sent a message; -1 if there is none any more."""
        return self._server.fd

    def hear_server(self) -> None:
        """Take in messages of the fork server; start another one if it has died."""
        messages = self._server.receive()
        for message in messages:
            if message["op"] == "ready":
                self._ready(message)
            else:
                self.workers.heard(message)
        if not messages:
            self._server_died()

    def ping_in(self, now_s: float) -> float:
        return self._server.watch.due_in(now_s) if self._server.fd >= 0 else inf

    def watch_server(self, now_s: float) -> None:
        """Kill a fork server that lives but does not answer (stopped, or stuck in the kernel)."""
        server = self._server
        if server.fd < 0:
            return  # none runs any more
        server.ping(now_s)
        silent = server.watch.too_long()
        if silent:
            self.tell("warning", Why(Cause.HUNG, f"the fork server {silent}: it is killed and started again"))
            server.watch.killed(now_s)
            server.kill()
            self._server_died()

    def _new_server(self, before: ForkServerClient) -> ForkServerClient:
        log, names = self.files.logs / SERVER_LOG, self._joining.preload
        if not before.ready:  # packages of the task's may be the reason
            names = [name for name in names if ":" not in name]
        return start_fork_server(log, self._board.fd, self.config.threads, names, before.watch)

    def _begin(self, server: ForkServerClient) -> None:
        server.log_to(self.files.logs / SERVER_LOG)
        self.workers.use(server)
        if server.ready:
            self._ready(server.greeting)

    def _ready(self, message: dict[str, Any]) -> None:
        self._failures = 0
        self._notify("fork_server_ready", **{k: v for k, v in message.items() if k != "op"})

    def _server_died(self) -> None:
        was_ready = self._server.ready
        how = self._server.close(timeout_s=2.0)
        self.workers.server_died()
        self._failures = 0 if was_ready else self._failures + 1
        words = last_line(self.files.logs / SERVER_LOG)
        said = f"{how}; its last words: {words}" if words else how
        text = f"the fork server died ({said}) and is started again; its workers go on"
        self._notify("warning", Why(Cause.EXITED, text))
        if self._failures >= SERVER_HOPELESS:
            self._failed = Why(Cause.CRASH_LOOP, f"the fork server cannot start: {said}")
            return
        self._server = self._new_server(self._server)
        self._begin(self._server)

    # ---- the workers

    @property
    def hopeless(self) -> Why | None:
        return self._failed or self.workers.hopeless

    def fall(self) -> None:
        """A scripted fault: all processes of this host die at once, this one last."""
        self.workers.kill_all()
        self._server.kill()
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(128 + signal.SIGKILL)  # the first process of a container survives its own signal

    def tell(self, kind: str, why: Why) -> None:
        """Report an event of the job, in the form that its workers here use."""
        events = EventLog(self.run_dir / EVENTS_FILE)
        events.write(kind, **vars(why))
        events.close()

    def finishing(self) -> list[WorkerLife]:
        """Workers that still run the end of their scripts after the last step; stopped ones do not count."""
        return [life for life in self.workers.lives() if self._finishes(life)]

    def _finishes(self, life: WorkerLife) -> bool:
        pids = (life.pid, *life.limbs)
        return self._board.read(life.worker_id).phase == "finish" and not any(map(is_stopped, pids))

    def kill_idle(self) -> None:
        for life in self.workers.lives():
            if not self._finishes(life):
                self.workers.kill(life.worker_id, life.incarnation)

    def reached(self) -> int:
        """The newest step that a worker of this host has applied."""
        return max(self._board.read(row).step for row in range(self._board.rows))

    def _context(self, worker_id: int, incarnation: int) -> WorkerContext:
        slots = self.workers.wanted_ids()
        return WorkerContext(
            run_dir=str(self.run_dir.resolve()),
            worker_id=worker_id,
            incarnation=incarnation,
            host=self._joining.host,
            token=role_token(self._secrets.token, WORKER, str(WorkerKey(worker_id, incarnation))).hex(),
            peer_token=role_token(self._secrets.token, PEER).hex(),
            coordinator_file=str(self.coordinator_file.resolve()),
            board_fd=self._board.fd,
            config=self.facts.config,
            task=self.facts.task,
            argv=list(self.facts.argv),
            address=self._joining.own,
            tls=None if self._secrets.shown is None else asdict(self._secrets.shown),
            local_rank=slots.index(worker_id) if worker_id in slots else 0,
            local_size=max(1, len(slots)),
            apart=self.files.apart,
            around=self._joining.around if self.files.apart else "",
        )

    def _hear_of_head(self, link: AgentLink) -> Hearsay | None:
        path, shared = self.coordinator_file, None if self.files.apart else self.run_dir / COORDINATOR_FILE
        if shared is not None and path.resolve() == shared.resolve():
            return None  # it follows the job's own file, which the head writes
        return Hearsay(path, link, self.files, self._secrets, shared)

    @property
    def coordinator_file(self) -> Path:
        """File from which processes of this host read where the coordinator is."""
        where = self._joining.where()
        return where if isinstance(where, Path) else self.run_dir / COORDINATOR_FILE

    def _start_sampler(self) -> Sampler | None:
        interval_s = self.config.metrics.interval_s
        if not interval_s:
            return None
        # Several agents on one machine need a file each.
        name = os.uname().nodename
        if self._joining.host not in (name, self.config.network.address):
            name = self._joining.host
        return Sampler(self.run_dir / METRICS_FOLDER, name, self._board, self.workers.lives, interval_s)

    def close(self, *, at_once: bool) -> None:
        """End everything; remaining workers are killed. All of it runs, even if a part raises.

        at_once: the fork server is not waited for.
        """
        self.workers.stop()
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._collector.close)
            last_first.callback(self._end_workers, at_once)
            if self._hearsay is not None:
                last_first.callback(self._hearsay.close)
            if self._sampler is not None:
                last_first.callback(self._sampler.close)

    def _end_workers(self, at_once: bool) -> None:
        self.workers.kill_all()
        # While it imports it hears nothing.
        self._server.close(timeout_s=_END_WAIT_S if self._server.ready and not at_once else 0.0)
        self.workers.end_all()
