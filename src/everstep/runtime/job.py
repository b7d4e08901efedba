"""A job from start to end: its files, its coordinator, signals, and how it ended. What runs workers are agents.

It knows the agents, that of its own host too, from the control connection alone, and nothing of their workers.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.config import Config, to_dict
from everstep.protocol.messages import AgentCount, AgentNotice, AnyMessage, CommandReply, JobEnded
from everstep.runtime import wire
from everstep.runtime.address import (
    COORDINATOR_FILE,
    JOB_FILE,
    JOURNAL_FILE,
    LOGS_FOLDER,
    TOKEN_FILE,
    write_atomically,
)
from everstep.runtime.inbox import Inbox, readable
from everstep.runtime.job_end import JobEnd, Outcome
from everstep.runtime.job_link import JobLink
from everstep.runtime.local_host import LocalHost
from everstep.runtime.process import raise_descriptor_limit
from everstep.runtime.supervisor import CoordinatorProcess

COORDINATOR_SILENT_S = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
Observer = Callable[[dict[str, Any]], None]


class Job:
    """Runs a job in `run_dir`. `outcome`: how it ended; `reached`: the newest step that any worker had applied then.

    task, argv: handed to the workers. local: the agent of this host, None if agents come from elsewhere. on_event:
    called from the job's thread with {"kind": ..., ...} for what job and agents do themselves (worker_started,
    worker_exited, worker_killed, worker_restarting, slot_lost, agent_started, agent_died, coordinator_started,
    coordinator_died, fork_server_ready, warning, job_ended). port: where the coordinator listens, 0: anywhere. token:
    the job's secret, None: a new one.

    The directory must be locked by the caller (`commands.run_lock`). In the main thread `run` takes SIGINT and SIGTERM;
    elsewhere the caller passes them on with `interrupt`.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        task: str,
        argv: Sequence[str],
        local: LocalHost | None,
        on_event: Observer | None = None,
        *,
        port: int = 0,
        token: bytes | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.config = config
        self.outcome: Outcome | None = None
        self.reached = 0
        self._what = {"task": task, "argv": list(argv), "config": to_dict(config)}
        self._token = token or wire.new_token()
        self._on_event = on_event
        self._inbox: Inbox[AnyMessage | int] = Inbox()
        self._coordinator = CoordinatorProcess(run_dir, port)
        self._local = local
        self._end = JobEnd(config.quorum_wait_s)
        self._link: JobLink | None = None
        self._silenced = 0

    # ---- from outside

    def run(self) -> int:
        """Run the job to its end. Returns the exit code; `outcome` says more. Nothing is left running on this host."""
        try:
            with self._signal_handlers():
                self._write_files()
                self._start_coordinator()
                self._start_local()
                self._link = JobLink(self.run_dir / COORDINATOR_FILE, self._token, self._inbox.put)
                while not self._end.over:
                    self._turn(self._link)
        finally:
            self._tear_down()
        outcome = self._end.outcome or Outcome(1, "failed", Why(Cause.UNKNOWN, "the job's process ended early"))
        self.outcome = outcome
        self._notify("job_ended", outcome.why, exit_code=outcome.exit_code, state=outcome.state)
        return outcome.exit_code

    def interrupt(self, number: int) -> None:
        """As if the signal had come: SIGUSR1 asks for a checkpoint at once; of the others the first ends the job in
        order, the second immediately. Any thread."""
        self._inbox.put(number)

    # ---- start

    def _write_files(self) -> None:
        raise_descriptor_limit()
        (self.run_dir / LOGS_FOLDER).mkdir(parents=True, exist_ok=True)
        (self.run_dir / COORDINATOR_FILE).unlink(missing_ok=True)
        (self.run_dir / JOURNAL_FILE).unlink(missing_ok=True)
        wire.write_token(self.run_dir / TOKEN_FILE, self._token)
        job: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.run_dir / JOB_FILE).read_text())
            job = found if isinstance(found, dict) else {}
        write_atomically(self.run_dir / JOB_FILE, json.dumps({**job, **self._what}, indent=2) + "\n")

    def _start_coordinator(self) -> None:
        self._coordinator.start()
        if self._link is not None:
            self._link.expect_anew()
        self._notify("coordinator_started", pid=self._coordinator.pid)

    def _start_local(self) -> None:
        if self._local is not None:
            self._local.start()
            self._notify("agent_started", pid=self._local.pid)

    # ---- the loop

    def _turn(self, link: JobLink) -> None:
        local_fd = self._local.pidfd if self._local is not None else -1
        fds = (self._inbox.fd, self._coordinator.pidfd, local_fd)
        ready = readable(fds, self._patience(link, time.monotonic()))
        if self._coordinator.pidfd in ready:
            self._on_coordinator_death()
        if local_fd in ready:
            self._on_local_death()
        for item in self._inbox.take():
            self._take(item, link)
        now_s = time.monotonic()
        link.ping(now_s)
        if self._end.outcome is None:
            self._check_coordinator(link, now_s)
            self._start_due(now_s)
        self._end.look(now_s, self._local is not None and self._local.pidfd >= 0)

    def _patience(self, link: JobLink, now_s: float) -> float:
        waits = [1.0, link.due_in(now_s)]
        for process in (self._coordinator, self._local):
            if process is not None and process.restart_at_s is not None and self._end.outcome is None:
                waits.append(process.restart_at_s - now_s)
        due_s = self._end.due_in(now_s)
        return min(waits if due_s is None else [*waits, due_s])

    def _start_due(self, now_s: float) -> None:
        for process, start in ((self._coordinator, self._start_coordinator), (self._local, self._start_local)):
            if process is not None and process.restart_at_s is not None and process.restart_at_s <= now_s:
                start()

    def _check_coordinator(self, link: JobLink, now_s: float) -> None:
        """One that lives and answers nothing (stopped, or stuck in the kernel) is as good as dead."""
        if self._coordinator.pidfd < 0 or self._coordinator.pid == self._silenced:
            return
        silence_s = link.silence_s(now_s)
        if silence_s >= COORDINATOR_SILENT_S:
            self._silenced = self._coordinator.pid
            text = f"the coordinator has not answered for {silence_s:.1f} s: it is killed and started again"
            self._notify("warning", Why(Cause.HUNG, text))
            self._coordinator.kill()

    def _on_coordinator_death(self) -> None:
        why, hopeless = self._coordinator.died(time.monotonic())
        self._notify("coordinator_died", why)
        if self._end.outcome is not None:
            self._end.present(())  # nobody will say when the agents have left
        if hopeless and self._end.outcome is None:
            tail = self._coordinator.log_tail()
            self._end.fail(Why(Cause.CRASH_LOOP, f"the coordinator cannot start ({why.reason}): {tail}"))

    def _on_local_death(self) -> None:
        if self._local is None:
            return
        why, hopeless = self._local.died(time.monotonic())
        if self._end.outcome is not None or self._local.restart_at_s is None:
            return  # it has left, as it was to
        self._notify("agent_died", Why(Cause.HOST_LOST, why.reason))
        if hopeless:
            tail = self._local.log_tail()
            self._end.fail(Why(Cause.CRASH_LOOP, f"the agent of this host cannot start ({why.reason}): {tail}"))

    # ---- what comes

    def _take(self, item: AnyMessage | int, link: JobLink) -> None:
        if isinstance(item, int):
            self._on_signal(item, link)
        elif isinstance(item, JobEnded):
            self._end.told(item, time.monotonic())
        elif isinstance(item, AgentCount):
            self._end.present(item.agent_ids)
        elif isinstance(item, AgentNotice):
            self._on_notice(item)
        elif isinstance(item, CommandReply) and not item.ok:
            self._notify("warning", Why(Cause.REQUESTED, item.error))

    def _on_notice(self, notice: AgentNotice) -> None:
        if notice.kind == "host_left":
            reached = notice.fields.get("reached")
            self.reached = max(self.reached, reached if isinstance(reached, int) else 0)
        elif notice.kind == "workers_left":
            self._end.all_left(notice.agent_id)
        else:
            if notice.kind == "worker_started":
                self._end.started(notice.agent_id)
            if self._on_event is not None:
                self._on_event({"kind": notice.kind, **notice.fields})

    def _on_signal(self, number: int, link: JobLink) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGUSR1:
            if self._end.outcome is None and not self._end.interrupted:
                text = f"{name}: a preemption is coming, so a checkpoint is taken now"
                self._notify("warning", Why(Cause.PREEMPTED, text))
                words = {"cause": Cause.PREEMPTED, "reason": f"notice of a preemption ({name})"}
                link.command("checkpoint", words)
            return
        rule = self.config.checkpoint
        grace_s = rule.grace_s if rule.enabled else 0.0
        if self._end.signal(number, time.monotonic(), grace_s) != "ask":
            return
        why = Why(Cause.INTERRUPTED, f"interrupted by {name}")
        args = {"cause": why.cause, "reason": why.reason, "exit_code": 128 + number, "grace_s": grace_s}
        link.command("stop", args)
        self._notify("warning", Why(why.cause, f"{why.reason}: ending in order, once more ends at once"))

    # ---- the end

    def _tear_down(self) -> None:
        """All of it is done, whatever a part of it raises, or a signal interrupts."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._inbox.close)
            last_first.callback(self._forget_coordinator)
            last_first.callback(self._coordinator.end)
            last_first.callback(self._hear_the_last)
            if self._link is not None:
                last_first.callback(self._link.close)
            if self._local is not None:
                last_first.callback(self._local.end)

    def _hear_the_last(self) -> None:
        """What an agent has said before it left, and the loop has not seen."""
        for item in self._inbox.take():
            if isinstance(item, AgentNotice):
                self._on_notice(item)

    def _forget_coordinator(self) -> None:
        with contextlib.suppress(OSError):
            (self.run_dir / COORDINATOR_FILE).unlink(missing_ok=True)

    # ---- small things

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
