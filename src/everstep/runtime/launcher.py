"""The launcher of one host: coordinator, fork server, workers, agent, signals; it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.config import Config, to_dict
from everstep.protocol.messages import AnyMessage, CommandReply, JobEnded, KillWorker, SetSlots
from everstep.runtime import wire
from everstep.runtime.address import (
    COORDINATOR_FILE,
    JOB_FILE,
    JOURNAL_FILE,
    LOGS_FOLDER,
    METRICS_FOLDER,
    TOKEN_FILE,
    write_atomically,
)
from everstep.runtime.agent import Agent
from everstep.runtime.board import MAX_ROWS, Board
from everstep.runtime.collector import Collector
from everstep.runtime.context import WorkerContext
from everstep.runtime.process import raise_descriptor_limit
from everstep.runtime.sampler import Sampler
from everstep.runtime.slots import RestartPolicy
from everstep.runtime.supervisor import CoordinatorProcess, last_line
from everstep.runtime.workers import Workers
from everstep.runtime.zygote import DEFAULT_PRELOAD
from everstep.runtime.zygote_client import EarlyZygote, ZygoteClient

GRACE_S = 10.0
LAST_WAIT_S = 15.0
ZYGOTE_HOPELESS = 3
COORDINATOR_SILENT_S = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
Observer = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Outcome:
    """How the job ended: 'completed', 'failed' or 'interrupted', and why."""

    exit_code: int
    state: str
    why: Why


class Launcher:
    """Runs a job in `run_dir` on this host, from start to end.

    task, argv: handed to the workers.
    entry: "module:function", called in each worker with its `WorkerContext`; what it returns is the worker's exit code,
    and 0 means that it left in order (done, or dismissed by request).
    on_event: called from the launcher's thread with {"kind": ..., ...} for what it does itself (worker_started,
    worker_exited, worker_killed, worker_restarting, slot_lost, coordinator_started, coordinator_died, zygote_ready,
    warning, job_ended).
    preload: modules that the fork server imports. early: a fork server that may be running already. resume: keep the
    coordinator's journal of an earlier launcher here. ranks: processes of each worker.

    The directory must be locked by the caller (`commands.run_lock`). In the main thread `run` takes SIGINT and SIGTERM;
    elsewhere the caller passes them on with `interrupt`.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        task: str,
        argv: Sequence[str],
        entry: str,
        on_event: Observer | None = None,
        *,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        early: EarlyZygote | None = None,
        host: str = "127.0.0.1",
        resume: bool = False,
        ranks: int = 1,
    ) -> None:
        self.run_dir = run_dir
        self.config = config
        self.task = task
        self.argv = list(argv)
        self.host = host
        self.board = early.board if early is not None else Board.create(MAX_ROWS)
        self.outcome: Outcome | None = None
        self._preload = tuple(preload)
        self._early = early
        self._on_event = on_event
        self._resume = resume
        self._token = wire.new_token()
        self._selector = selectors.DefaultSelector()
        self._inbox: deque[AnyMessage | int] = deque()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_r, selectors.EVENT_READ, self._on_wake)
        self._signals = 0
        self._interrupted = 0
        self._ending: Outcome | None = None
        self._deadline_s: float | None = None
        self._killed = False
        self._finished = False
        self._zygote_failures = 0
        self._silenced = 0
        backoff = config.backoff
        policy = RestartPolicy(
            config.max_restarts, backoff.initial_s, backoff.max_s, restart=config.on_failure != "shrink"
        )
        self._coordinator = CoordinatorProcess(run_dir, host)
        self._zygote: ZygoteClient | None = None
        logs = config.logs
        self._collector = Collector(run_dir / LOGS_FOLDER, self.board, int(logs.max_mb * (1 << 20)), logs.keep)
        self._workers = Workers(self.board, entry, policy, self._context, self._notify, self._collector, ranks)
        self._agent: Agent | None = None
        self._sampler: Sampler | None = None

    # ---- from outside

    def run(self) -> int:
        """Run the job to its end. Returns the exit code; `outcome` says more. Nothing is left running."""
        try:
            with self._signal_handlers():
                self._prepare()
                self._start_coordinator()
                self._start_zygote()
                self._start_agent()
                self._start_sampler()
                self._workers.want(list(range(self.config.workers + self.config.spares)))
                while not self._finished:
                    self._turn()
        finally:
            self._tear_down()
        outcome = self._ending or Outcome(1, "failed", Why(Cause.UNKNOWN, "the launcher ended early"))
        self.outcome = outcome
        self._notify("job_ended", outcome.why, exit_code=outcome.exit_code, state=outcome.state)
        return outcome.exit_code

    def interrupt(self, number: int) -> None:
        """As if the signal had come: SIGUSR1 asks for a checkpoint at once; of the others the first ends the job in
        order, the second immediately. Any thread."""
        self._inbox.append(number)
        self._wake()

    # ---- start

    def _prepare(self) -> None:
        raise_descriptor_limit()
        (self.run_dir / LOGS_FOLDER).mkdir(parents=True, exist_ok=True)
        (self.run_dir / COORDINATOR_FILE).unlink(missing_ok=True)
        if not self._resume:
            (self.run_dir / JOURNAL_FILE).unlink(missing_ok=True)
        wire.write_token(self.run_dir / TOKEN_FILE, self._token)
        job: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.run_dir / JOB_FILE).read_text())
            job = found if isinstance(found, dict) else {}
        job.update(task=self.task, argv=self.argv, config=to_dict(self.config))
        write_atomically(self.run_dir / JOB_FILE, json.dumps(job, indent=2) + "\n")

    def _start_coordinator(self) -> None:
        self._coordinator.start()
        self._selector.register(self._coordinator.pidfd, selectors.EVENT_READ, self._on_coordinator_death)
        if self._agent is not None:
            self._agent.expect_anew()
        self._notify("coordinator_started", pid=self._coordinator.pid)

    def _start_zygote(self) -> None:
        log_path = self.run_dir / LOGS_FOLDER / "zygote.log"
        early, self._early = self._early, None
        zygote = early.take(self.config.threads, log_path) if early is not None else None
        if zygote is None:
            zygote = ZygoteClient(log_path, self.board.fd, self.config.threads, self._preload)
        self._zygote = self._workers.zygote = zygote
        self._selector.register(zygote.fd, selectors.EVENT_READ, self._on_zygote_message)
        if zygote.ready:
            self._zygote_ready(zygote.greeting)

    def _start_agent(self) -> None:
        interval = self.config.heartbeat.interval_s
        self._agent = Agent(
            self.run_dir / COORDINATOR_FILE,
            self._token,
            f"{os.uname().nodename}-{os.getpid()}",
            self.host,
            self.board,
            self._workers.lives,
            self._workers.wanted_slots,
            self._on_message,
            None if isinstance(interval, str) else float(interval),
        )
        self._workers.agent = self._agent

    def _start_sampler(self) -> None:
        interval_s = self.config.metrics.interval_s
        if interval_s:
            folder, name = self.run_dir / METRICS_FOLDER, os.uname().nodename
            self._sampler = Sampler(folder, name, self.board, self._workers.lives, interval_s)

    def _context(self, worker_id: int, incarnation: int) -> WorkerContext:
        return WorkerContext(
            run_dir=str(self.run_dir.resolve()),
            worker_id=worker_id,
            incarnation=incarnation,
            host=self.host,
            token=self._token.hex(),
            coordinator_file=str((self.run_dir / COORDINATOR_FILE).resolve()),
            board_fd=self.board.fd,
            board_row=worker_id,
            config=to_dict(self.config),
            task=self.task,
            argv=self.argv,
            spare=worker_id >= self.config.workers,
            agent_pid=os.getpid(),
        )

    # ---- the loop

    def _turn(self) -> None:
        now_s = time.monotonic()
        for key, _ in self._selector.select(self._patience(now_s)):
            key.data()
        now_s = time.monotonic()
        if self._agent is not None:
            self._agent.beat(now_s)
        if self._ending is None:
            self._check_coordinator(now_s)
            restart_at_s = self._coordinator.restart_at_s
            if restart_at_s is not None and restart_at_s <= now_s:
                self._start_coordinator()
            self._workers.start_due(now_s)
            if self._workers.hopeless is not None:
                self._end(Outcome(1, "failed", self._workers.hopeless), 0.0)
        self._check_end(now_s)

    def _check_coordinator(self, now_s: float) -> None:
        """One that lives and answers nothing (stopped, or stuck in the kernel) is as good as dead."""
        if self._agent is None or self._coordinator.pidfd < 0 or self._coordinator.pid == self._silenced:
            return
        silence_s = self._agent.silence_s(now_s)
        if silence_s >= COORDINATOR_SILENT_S:
            self._silenced = self._coordinator.pid
            text = f"the coordinator has not answered for {silence_s:.1f} s: it is killed and started again"
            self._notify("warning", Why(Cause.HUNG, text))
            self._coordinator.kill()

    def _patience(self, now_s: float) -> float:
        waits = [1.0]
        if self._agent is not None:
            waits.append(self._agent.due_in(now_s))
        if self._ending is None and self._coordinator.restart_at_s is not None:
            waits.append(self._coordinator.restart_at_s - now_s)
        due = self._workers.due_in(now_s)
        if due is not None:
            waits.append(due)
        if self._deadline_s is not None:
            waits.append(self._deadline_s - now_s)
        return max(0.0, min(waits))

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, int):
                self._on_signal(item)
            elif isinstance(item, KillWorker):
                if self._workers.kill(item.worker_id, item.incarnation):
                    self._notify("worker_killed", Why(item.cause, item.reason), worker_id=item.worker_id)
            elif isinstance(item, SetSlots):
                self._workers.want(item.worker_ids)
            elif isinstance(item, JobEnded):
                self._on_job_ended(item)
            elif isinstance(item, CommandReply) and not item.ok:
                self._notify("warning", Why(Cause.REQUESTED, item.error))

    def _on_zygote_message(self) -> None:
        zygote = self._zygote
        if zygote is None:
            return
        messages = zygote.receive()
        for message in messages:
            if message["op"] == "ready":
                self._zygote_ready(message)
            else:
                self._workers.heard(message)
        if not messages:
            self._on_zygote_death(zygote)

    def _zygote_ready(self, message: dict[str, Any]) -> None:
        self._zygote_failures = 0
        self._notify("zygote_ready", **{k: v for k, v in message.items() if k != "op"})

    def _on_zygote_death(self, zygote: ZygoteClient) -> None:
        was_ready = zygote.ready
        self._selector.unregister(zygote.fd)
        zygote.close(timeout_s=2.0)
        self._zygote = self._workers.zygote = None
        self._workers.zygote_died()
        if self._ending is not None:
            return
        self._zygote_failures = 0 if was_ready else self._zygote_failures + 1
        said = last_line(self.run_dir / LOGS_FOLDER / "zygote.log")
        self._notify("warning", Why(Cause.EXITED, f"the fork server died and is started again: {said}"))
        if self._zygote_failures >= ZYGOTE_HOPELESS:
            why = Why(Cause.CRASH_LOOP, f"the fork server cannot start: {said}")
            self._end(Outcome(1, "failed", why), 0.0)
        else:
            self._start_zygote()

    def _on_coordinator_death(self) -> None:
        self._selector.unregister(self._coordinator.pidfd)
        why, hopeless = self._coordinator.died(time.monotonic())
        self._notify("coordinator_died", why)
        if hopeless and self._ending is None:
            tail = self._coordinator.log_tail()
            text = f"the coordinator cannot start ({why.reason}): {tail}"
            self._end(Outcome(1, "failed", Why(Cause.CRASH_LOOP, text)), 0.0)

    # ---- the end

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGUSR1:
            if self._ending is None and self._agent is not None and not self._interrupted:
                text = f"{name}: a preemption is coming, so a checkpoint is taken now"
                self._notify("warning", Why(Cause.PREEMPTED, text))
                words = {"cause": Cause.PREEMPTED, "reason": f"notice of a preemption ({name})"}
                self._agent.command("checkpoint", words)
            return
        self._signals += 1
        outcome = Outcome(128 + number, "interrupted", Why(Cause.INTERRUPTED, f"interrupted by {name}"))
        if self._signals > 1:
            self._ending = outcome if self._interrupted else (self._ending or outcome)
            self._kill_everything()
            self._finished = True
            return
        self._interrupted = number
        if self._ending is not None or self._agent is None:
            return
        self._workers.stopping = True
        rule = self.config.checkpoint
        grace_s = rule.grace_s if rule.enabled else 0.0
        why, code = outcome.why, outcome.exit_code
        args = {"cause": why.cause, "reason": why.reason, "exit_code": code, "grace_s": grace_s}
        self._agent.command("stop", args)
        self._deadline_s = time.monotonic() + grace_s + GRACE_S
        self._notify("warning", Why(why.cause, f"{why.reason}: ending in order, once more ends at once"))

    def _on_job_ended(self, message: JobEnded) -> None:
        why = Why(message.cause, message.reason)
        outcome = Outcome(message.exit_code, message.state, why)
        if self._interrupted and message.state != "completed":
            outcome = Outcome(128 + self._interrupted, "interrupted", why)
        self._end(outcome, GRACE_S)

    def _end(self, outcome: Outcome, grace_s: float) -> None:
        if self._ending is None:
            self._ending = outcome
            self._workers.stopping = True
            self._deadline_s = time.monotonic() + grace_s

    def _check_end(self, now_s: float) -> None:
        late = self._deadline_s is not None and now_s >= self._deadline_s
        if self._ending is not None:
            if self._workers.none_live():
                self._finished = True
            elif late and self._finishing(now_s):
                return
            elif late and not self._killed:
                self._killed = True
                self._workers.kill_all()
                self._deadline_s = now_s + GRACE_S
            elif late:
                self._finished = True
        elif self._interrupted:
            if late:
                text = f"interrupted by {signal.Signals(self._interrupted).name}; the coordinator did not answer"
                why = Why(Cause.INTERRUPTED, text)
                self._end(Outcome(128 + self._interrupted, "interrupted", why), GRACE_S)
        elif not self._workers.none_coming():
            self._deadline_s = None
        elif self._deadline_s is None:
            self._deadline_s = now_s + LAST_WAIT_S
        elif late:
            why = Why(Cause.UNKNOWN, "all workers have left, but the coordinator has not said how the job ended")
            self._end(Outcome(1, "failed", why), 0.0)

    def _finishing(self, now_s: float) -> bool:
        """Whether the job is completed and some worker still runs what its script does after the last step."""
        if self._ending is None or self._ending.state != "completed" or self._deadline_s is None:
            return False
        lives = self._workers.lives()
        busy = any(self.board.read(life.worker_id).phase == "finish" for life in lives)
        return busy and now_s < self._deadline_s + self.config.quorum_wait_s

    def _kill_everything(self) -> None:
        self._workers.stopping = True
        self._workers.kill_all()
        if self._zygote is not None:
            with contextlib.suppress(ProcessLookupError):
                self._zygote.process.kill()

    def _tear_down(self) -> None:
        """All of it is done, whatever a part of it raises, or a signal interrupts."""
        self._workers.stopping = True
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._selector.close)
            last_first.callback(self._forget_coordinator)
            last_first.callback(self._coordinator.end)
            last_first.callback(self._collector.close)
            last_first.callback(self._end_workers)
            if self._agent is not None:
                last_first.callback(self._agent.close, 0.0)
            if self._sampler is not None:
                last_first.callback(self._sampler.close)

    def _end_workers(self) -> None:
        if self._zygote is not None:
            self._workers.kill_all()
            self._zygote.close(timeout_s=5.0 if self._zygote.ready else 0.0)  # while it imports it hears nothing
            self._workers.zygote_died()

    def _forget_coordinator(self) -> None:
        with contextlib.suppress(OSError):
            (self.run_dir / COORDINATOR_FILE).unlink(missing_ok=True)

    # ---- small things

    def _on_message(self, message: AnyMessage) -> None:
        """In the connection's thread."""
        self._inbox.append(message)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"\0")

    def _notify(self, kind: str, why: Why | None = None, **fields: Any) -> None:
        if self._on_event is not None:
            said = {} if why is None else {"cause": why.cause, "reason": why.reason}
            self._on_event({"time_unix_ns": time.time_ns(), "kind": kind, **said, **fields})

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handler(number: int, _frame: FrameType | None) -> None:
            self.interrupt(number)

        before = {number: signal.signal(number, handler) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)
