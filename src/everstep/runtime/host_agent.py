"""The agent of a host: keeps the slots filled that the coordinator gives it, and leaves when the job is over.

It knows the job from its connection alone, and needs that only for what has to be decided: while the coordinator is
away its workers go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from everstep.base.cause import Why
from everstep.protocol.messages import (
    AgentRefused,
    AnyMessage,
    JobEnded,
    JobFacts,
    KillWorker,
    SetSlots,
    WorkerLife,
)
from everstep.runtime.agent_link import AgentLink
from everstep.runtime.board import Board
from everstep.runtime.fork_server_client import ForkServerClient
from everstep.runtime.host import Host
from everstep.runtime.inbox import Inbox, readable
from everstep.runtime.joining import Joining
from everstep.runtime.process import machine

GRACE_S = 10.0
AWAY_LIMIT_S = 600.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Left:
    """How an agent ended: exit code, and a line for the user where it is not the job's doing. at_once: by a signal."""

    exit_code: int
    words: str = ""
    at_once: bool = False


class HostAgent:
    """One agent. In the main thread `run` takes SIGINT and SIGTERM: its workers are ended at once, and it leaves.

    board, server: as `Host` has them; the agent ends the server.
    """

    def __init__(self, joining: Joining, token: bytes, board: Board, server: ForkServerClient) -> None:
        self._joining = joining
        self._token = token
        self._board = board
        self._server = server
        self._inbox: Inbox[AnyMessage | int] = Inbox()
        self._host: Host | None = None
        self._job_fd = -1
        self._connected_s = time.monotonic()
        self._ended: JobEnded | None = None
        self._deadline_s: float | None = None
        self._killed = False
        self._told_failed = False
        self._idle = True  # until it is told of slots
        self._left: Left | None = None
        self._link = AgentLink(
            joining.where(), token, joining.host, joining.room, board, self._lives, self._slots, self._inbox.put
        )

    def run(self) -> Left:
        """Take part until the job is over. Nothing is left running."""
        try:
            with self._signal_handlers():
                while self._left is None:
                    self._turn()
        finally:
            self._tear_down()
        return self._left

    def _turn(self) -> None:
        now_s = time.monotonic()
        server_fd = self._host.server_fd if self._host is not None else -1
        ready = readable((self._inbox.fd, server_fd, self._job_fd), self._patience(now_s))
        if self._host is not None and server_fd in ready:
            self._host.hear_server()
        for item in self._inbox.take():
            self._take(item)
        now_s = time.monotonic()
        if self._job_fd in ready and self._ended is None:
            self._leave(Left(3, "the job's process is gone: its workers here are ended"))
        self._link.beat(now_s)
        self._look_at_workers(now_s)
        self._look_at_link(now_s)
        self._look_at_end(now_s)

    def _patience(self, now_s: float) -> float:
        waits = [1.0, self._link.due_in(now_s)]
        due_s = self._host.workers.due_in(now_s) if self._host is not None else None
        waits += [due_s] if due_s is not None else []
        if self._deadline_s is not None and now_s < self._deadline_s:  # later, only what workers still do keeps it here
            waits.append(self._deadline_s - now_s)
        return min(waits)

    # ---- what comes

    def _take(self, item: AnyMessage | int) -> None:
        host = self._host
        if isinstance(item, int):
            self._leave(Left(128 + item, f"interrupted by {signal.Signals(item).name}", at_once=True))
        elif isinstance(item, JobFacts):
            if host is None:
                self._begin(item)
            elif item != host.facts:
                self._leave(Left(3, f"another job listens at {self._joining.address} by now"))
        elif isinstance(item, AgentRefused):
            self._leave(Left(2, item.reason))
        elif isinstance(item, JobEnded):
            self._on_job_ended(item)
        elif isinstance(item, SetSlots) and host is not None:
            host.workers.want(item.worker_ids, item.first)
            self._idle = False
        elif isinstance(item, KillWorker) and host is not None:
            self._kill(host, item)

    def _kill(self, host: Host, message: KillWorker) -> None:
        if host.workers.kill(message.worker_id, message.incarnation):
            self._notify("worker_killed", Why(message.cause, message.reason), worker_id=message.worker_id)

    def _begin(self, facts: JobFacts) -> None:
        if facts.job_pid and facts.machine == machine():
            try:
                self._job_fd = os.pidfd_open(facts.job_pid)
            except ProcessLookupError:
                self._leave(Left(3, "the job's process is gone"))
                return
        run_dir = self._joining.run_dir or facts.run_dir
        if not os.path.isdir(run_dir):
            self._leave(Left(2, f"the job's directory {run_dir} is not here: say with --run-dir where it is"))
            return
        self._host = Host(facts, self._joining, self._token, self._board, self._server, self._link, self._notify)
        interval = self._host.config.heartbeat.interval_s
        self._link.beat_every(None if isinstance(interval, str) else float(interval))
        if not self._joining.run_dir and os.path.exists(facts.coordinator_file):
            self._link.client.follow(facts.coordinator_file)

    def _on_job_ended(self, message: JobEnded) -> None:
        if self._ended is None:
            self._ended = message
            self._deadline_s = time.monotonic() + GRACE_S
            if self._host is not None:
                self._host.workers.stop()

    # ---- what is to be done

    def _look_at_workers(self, now_s: float) -> None:
        host = self._host
        if host is None or self._ended is not None:
            return
        host.workers.start_due(now_s)
        if host.hopeless is not None and not self._told_failed:
            self._told_failed = True
            host.workers.stop()
            self._link.host_failed(host.hopeless)
        if host.workers.none_coming() and not self._idle:
            self._idle = True
            self._notify("workers_left")

    def _look_at_link(self, now_s: float) -> None:
        if self._link.client.connected:
            self._connected_s = now_s
        elif now_s - self._connected_s >= AWAY_LIMIT_S:
            self._leave(Left(3, f"the job at {self._joining.address} has not answered for {AWAY_LIMIT_S:g} s"))

    def _look_at_end(self, now_s: float) -> None:
        if self._ended is None or self._deadline_s is None:
            return
        late, host = now_s >= self._deadline_s, self._host
        if host is None or host.workers.none_live():
            self._leave(Left(0))
        elif late and self._finishing(host, now_s):
            return
        elif late and not self._killed:
            self._killed = True
            host.workers.kill_all()
            self._deadline_s = now_s + GRACE_S
        elif late:
            self._leave(Left(0))

    def _finishing(self, host: Host, now_s: float) -> bool:
        """Whether the job is completed and some worker may still do what its script does after the last step."""
        if self._ended is None or self._ended.state != "completed" or self._deadline_s is None:
            return False
        return host.finishing() and now_s < self._deadline_s + host.config.quorum_wait_s

    def _leave(self, how: Left) -> None:
        self._left = self._left or how

    def _tear_down(self) -> None:
        """All of it is done, whatever a part of it raises."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._inbox.close)
            last_first.callback(self._link.close)
            last_first.callback(self._say_goodbye)
            if self._host is None:
                last_first.callback(self._server.close, 0.0)
            else:
                last_first.callback(self._host.close, at_once=self._left is not None and self._left.at_once)
            if self._job_fd >= 0:
                last_first.callback(os.close, self._job_fd)

    def _say_goodbye(self) -> None:
        if self._host is not None:
            self._notify("host_left", reached=self._host.reached())

    # ---- small things

    def _lives(self) -> list[WorkerLife]:
        return self._host.workers.lives() if self._host is not None else []

    def _slots(self) -> int:
        return self._host.workers.wanted_slots() if self._host is not None else 0

    def _notify(self, kind: str, why: Why | None = None, **fields: Any) -> None:
        said = {} if why is None else {"cause": why.cause, "reason": why.reason}
        self._link.notice(kind, {"time_unix_ns": time.time_ns(), **said, **fields})

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handler(number: int, _frame: FrameType | None) -> None:
            self._inbox.put(number)

        before = {number: signal.signal(number, handler) for number in _SIGNALS}
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # for the job to act upon
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)
