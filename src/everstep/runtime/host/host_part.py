"""One host's part of a job: its workers, the fork server that starts them, their logs and figures."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from everstep.base.below import keep_to
from everstep.base.cause import Why
from everstep.base.config import Config, load_config
from everstep.base.plan import WorkerKey
from everstep.observe.events import EventLog
from everstep.protocol.messages import JobFacts, WorkerLife
from everstep.protocol.roles import WORKER
from everstep.runtime.files.agent_files import AgentFiles, PeerWire
from everstep.runtime.host.agent_link import AgentLink, Secrets
from everstep.runtime.host.board import Board
from everstep.runtime.host.collector import Collector, Sampler
from everstep.runtime.host.fork_server_client import ForkServerClient
from everstep.runtime.host.hearsay import Hearsay
from everstep.runtime.host.host_workers import Workers
from everstep.runtime.host.kept_server import SERVER_LOG, KeptServer
from everstep.runtime.link.address import COORDINATOR_FILE, EVENTS_FILE, METRICS_FOLDER
from everstep.runtime.link.context import Joining, WorkerContext
from everstep.runtime.link.handshake import PEER, role_token
from everstep.runtime.link.tls import Tls
from everstep.runtime.process import is_stopped


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
        threads, log = self.config.threads, self.files.logs / SERVER_LOG
        self.server = KeptServer(server, threads, joining.preload, board, log, self.workers, notify, self.tell)
        self.server.begin(anew=threads != joining.threads)

    # ---- the workers

    @property
    def hopeless(self) -> Why | None:
        return self.server.failed or self.workers.hopeless

    def fall(self) -> None:
        """A scripted fault: all processes of this host die at once, this one last."""
        self.workers.kill_all()
        self.server.kill()
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
        self.server.close(at_once=at_once)
        self.workers.end_all()
