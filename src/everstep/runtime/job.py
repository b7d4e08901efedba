"""A job from start to end: its files, its coordinator, signals, and its end. Agents run the workers.

It knows the agents, also that of its own host, from the control connection alone, and nothing of their workers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf
from pathlib import Path
from typing import Any

from everstep.base.below import moved, write_atomically
from everstep.base.cause import Cause, Why
from everstep.base.config import to_dict
from everstep.base.exit_codes import ANOTHER_LEADS, NO_HEAD
from everstep.base.given import read_json
from everstep.base.readable import readable
from everstep.observe.events import EventLog
from everstep.protocol.coordinator.user_commands import MOST_ASKED
from everstep.protocol.messages import (
    AgentCount,
    AgentNotice,
    AnyMessage,
    Command,
    CommandReply,
    Goodbye,
    JobEnded,
    JobHello,
    Ping,
    Pong,
    StrikeNow,
)
from everstep.protocol.patience import Patience
from everstep.protocol.roles import JOB, PEOPLE
from everstep.runtime.files.host_directory import HOSTS_FILE, leave_word
from everstep.runtime.job_end import JobEnd, Outcome, reserve_s
from everstep.runtime.lead.journal import begin_term, end_in_file
from everstep.runtime.lead.succession import Lead
from everstep.runtime.link import wire
from everstep.runtime.link.address import (
    COORDINATOR_FILE,
    EVENTS_FILE,
    JOB_FILE,
    JOURNAL_FILE,
    LOGS_FOLDER,
    TOKEN_FILE,
    role_file,
)
from everstep.runtime.link.control_client import ControlClient
from everstep.runtime.link.handshake import role_token
from everstep.runtime.link.tls import Tls, shown_by
from everstep.runtime.process import LEAVE, Inbox, last_line, raise_descriptor_limit, taking_signals
from everstep.runtime.process_figures import ask_about
from everstep.runtime.start import Start
from everstep.runtime.supervisor import REFUSED, CoordinatorProcess, LocalHost, Supervised

INTERRUPTED_WAIT_S = 3.0
GOODBYE_S = 1.0
JOURNAL_S = 2.0
_ALONE = "the workers take the checkpoint among themselves, and leave"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
Observer = Callable[[dict[str, Any]], None]


class Job:
    """Runs a job in its directory. `reached`: the newest step that any worker has applied. `left_agent`: pid of this
    host's agent if it goes on, because another host leads; 0 if not. `signalled`: the last signal that is to end this
    process, 0 if none came.

    The directory must be locked by the caller (`run_lock`). In the main thread `run` takes SIGINT and SIGTERM;
    elsewhere the caller passes them on with `interrupt`.
    """

    def __init__(self, begun: Start) -> None:
        self.run_dir = begun.folder
        self.config = begun.config
        self.reached = 0
        self.left_agent = self.signalled = 0
        self._begun = begun
        self._token = begun.token or wire.new_token()
        self._on_event: Observer | None = None
        self._inbox: Inbox[AnyMessage | int] = Inbox()
        self._lead = Lead(begun.folder, begun.succession, begun.address, self._notify)
        self._coordinator = CoordinatorProcess(begun)
        self._local = None if begun.room is None else LocalHost(begun)
        self._end = JobEnd(begun.config.quorum_wait_s)
        self._link: JobLink | None = None
        self._watch = Patience(begun.config.coordinator.silent_s)

    # ---- from outside

    def run(self, on_event: Observer | None = None) -> Outcome:
        """Run the job to its end.

        on_event: called from the job's thread with {"kind": ..., ...} for acts of the job and its agents
        (worker_started, worker_exited, worker_killed, worker_restarting, slot_lost, agent_started, agent_died,
        coordinator_started, coordinator_died, fork_server_ready, warning, job_ended; also coordinator_leads,
        coordinator_follows and led_elsewhere if other processes may take this one's place, or it theirs).

        Returns how it ended. Nothing is left running on this host.
        """
        self._on_event = on_event
        try:
            with hearing_signals(self):
                self._write_files()
                self._start_coordinator()
                self._start_local()
                shown = shown_by(self.config.security.tls, self._token, self._begun.address)
                where = self.run_dir / COORDINATOR_FILE
                self._link = JobLink(where, self._token, self._inbox.put, self._watch, Tls.of(shown))
                while not self._end.over:
                    self._turn(self._link)
        finally:
            self._tear_down()
        self.left_agent = 0 if self._local is None else self._local.left
        outcome = self._end.outcome or Outcome(1, "failed", Why(Cause.UNKNOWN, "the job's process ended early"))
        self._notify("job_ended", outcome.why, exit_code=outcome.exit_code, state=outcome.state)
        return outcome

    def interrupt(self, number: int) -> None:
        """Act as if the signal had come: SIGUSR1 asks for a checkpoint at once; of the others the first ends the job in
        order, the second immediately. Any thread."""
        if number != signal.SIGUSR1:
            self.signalled = number
        self._inbox.put(number)

    # ---- start

    def _write_files(self) -> None:
        raise_descriptor_limit()
        (self.run_dir / LOGS_FOLDER).mkdir(parents=True, exist_ok=True)
        if not self._begun.succession.begins:
            return
        (self.run_dir / COORDINATOR_FILE).unlink(missing_ok=True)
        (self.run_dir / JOURNAL_FILE).unlink(missing_ok=True)
        if self._begun.succession.term:
            begin_term(self.run_dir / JOURNAL_FILE, self._begun.succession.term)
        (self.run_dir / HOSTS_FILE).unlink(missing_ok=True)
        leave_word(self.run_dir, self.config.checkpoint.disk.path, self._begun.succession.word)
        wire.write_token(self.run_dir / TOKEN_FILE, self._token)
        for role in PEOPLE:
            wire.write_token(self.run_dir / role_file(role), role_token(self._token, role))
        job: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            found = read_json(self.run_dir / JOB_FILE)
            job = found if isinstance(found, dict) else {}
        begun = self._begun
        job |= {"task": begun.task, "argv": begun.argv, "config": to_dict(self.config)}
        job |= {"strikes": [vars(s) for s in begun.strikes], "doors": {"port": begun.port or 0, "slots": begun.room}}
        write_atomically(self.run_dir / JOB_FILE, json.dumps(job, indent=2) + "\n")

    def _start_coordinator(self) -> None:
        self._coordinator.start()
        self._watch.begins()
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
        away = _taken_away(self.run_dir) if self._end.outcome is None and not self._begun.succession.guest else None
        if away is not None:
            self._end.fail(away)
        now_s = time.monotonic()
        if ask_about(self._watch, self._coordinator.pid, now_s):
            link.ping()
        if self._end.outcome is None:
            led = self._lead.here
            self._lead.look(self._coordinator.pid)
            if self._lead.here and not led:
                self._watch.answered()  # silence was the previous process's
        self._check_processes(
            link, now_s
        )  # also after the end: a silent coordinator never reports which agents have left
        self._start_due(now_s)
        if self._end.outcome is None:
            self._look_for_answer(link, now_s)
        self._end.look(now_s, self._local is not None and self._local.pidfd >= 0, self._lead.here)

    def _patience(self, link: JobLink, now_s: float) -> float:
        restart_s = self._coordinator.restart_at_s - now_s
        if self._end.alone:
            restart_s = inf
        elif self._end.outcome is None and self._local is not None:
            restart_s = min(restart_s, self._local.restart_at_s - now_s)
        return min(1.0, self._watch.due_in(now_s), self._end.due_in(now_s), restart_s)

    def _start_due(self, now_s: float) -> None:
        """Start again what has died; the coordinator also after the end, since agents may not know of that yet, and the
        journal does."""
        if self._coordinator.restart_at_s <= now_s and not (self._end.failing or self._end.over):
            self._start_coordinator()
        goes_on = self._end.outcome is None and not self._end.alone
        if self._local is not None and self._local.restart_at_s <= now_s and goes_on:
            self._start_local()

    def _look_for_answer(self, link: JobLink, now_s: float) -> None:
        """While the coordinator is silent: read the journal for the job's end; else, if the job is to end, have the
        workers end it among themselves."""
        if self._begun.succession.begins and link.unheard_s(now_s) >= JOURNAL_S:
            ended = end_in_file(self.run_dir / JOURNAL_FILE)
            if ended is not None:
                self._end.told(ended, now_s)
        unheard_s = link.unheard_s(now_s)
        starting = self._coordinator.pidfd >= 0 and self._coordinator.age_s(now_s) < unheard_s
        if self._local is not None and self._end.goes_alone(now_s, unheard_s, starting):
            self._notify("warning", Why(Cause.INTERRUPTED, f"no coordinator answers: {_ALONE}"))
            self._local.end_alone()

    def _check_processes(self, link: JobLink, now_s: float) -> None:
        """Kill processes that live but do not answer (stopped, or stuck in the kernel)."""
        woken = self._local.wake(now_s) if self._local is not None else ""
        if woken:
            self._notify("warning", Why(Cause.HUNG, woken))
        if self._coordinator.pidfd < 0 or not self._lead.here:
            return
        silent = self._watch.too_long()
        stands_by = bool(self._begun.succession.owner) and link.unheard_s(now_s) > self._coordinator.age_s(now_s)
        if silent and not stands_by and self._coordinator.kill():
            self._watch.killed(now_s)
            again = f"and started again, with a limit of {self._watch.limit_s:g} s"
            what = again if self._end.outcome is None else "and started again to say that the job is over"
            about: dict[str, Any] = {"kills": self._watch.kills, "silent_s": self._watch.silence_s}
            about |= {"cause": Cause.HUNG, "reason": f"the coordinator {silent}: it is killed, {what}"}
            events = EventLog(self.run_dir / EVENTS_FILE, pid=self._coordinator.pid)
            events.write("coordinator_killed", **about)
            events.close()

    def _on_coordinator_death(self) -> None:
        why, hopeless = self._coordinator.died(time.monotonic())
        self._notify("coordinator_died", why, in_order=self._coordinator.moved)  # the outcome says why
        if self._end.outcome is not None:
            self._end.present(())  # no coordinator will report that the agents have left
        if self._coordinator.moved and self.signalled:
            self._end.leave(self.signalled)
        elif self._coordinator.moved:
            self._end.give_up(ANOTHER_LEADS, why)
        elif hopeless and self._end.outcome is None and not self._end.alone:
            self._fail_start("the coordinator", self._coordinator, why)

    def _on_local_death(self) -> None:
        if self._local is None:
            return
        why, hopeless = self._local.died(time.monotonic())
        refused = self._local.exit_code == REFUSED
        left = self._local.leaving and self._local.exit_code in (0, -LEAVE)  # a refused wish leaves it to its work
        if self._end.outcome is None and left and not self._lead.here:
            self._end.leave(signal.SIGUSR1)
        if self._end.outcome is not None or (self._local.restart_at_s == inf and not refused):
            return  # it has left, as it should
        self._notify("agent_died", Why(Cause.HOST_LOST, why.reason))
        alone = self._lead.by_another
        others = self._end.others(self._local.name) and (self._lead.here or not self._begun.succession.guest)
        if self._begun.succession.owner and self._local.exit_code in (REFUSED, NO_HEAD) and not others:
            why = Why(Cause.UNKNOWN, last_line(self._local.log_path))
            self._end.give_up(self._local.exit_code, why, alone=alone)
        elif refused and not others:
            why = Why(Cause.CONFIG, last_line(self._local.log_path).removeprefix("everstep agent: "))
            self._end.fail(why, REFUSED, alone=alone)
        elif hopeless:
            self._fail_start("the agent of this host", self._local, why)

    def _fail_start(self, what: str, process: Supervised, why: Why) -> None:
        text = f"{what} cannot start ({why.reason}): {last_line(process.log_path)}"
        rule, alone = self.config.checkpoint, self._lead.by_another
        if process is self._coordinator and rule.enabled and self._local is not None and self._local.pidfd >= 0:
            self._notify("warning", Why(Cause.CRASH_LOOP, f"{text}; {_ALONE}"))
            self._end.fail_alone(Why(Cause.CRASH_LOOP, text), time.monotonic(), rule.grace_s, alone=alone)
            self._local.end_alone()
        else:
            self._end.fail(Why(Cause.CRASH_LOOP, text), alone=alone)

    # ---- messages

    def _take(self, item: AnyMessage | int, link: JobLink) -> None:
        if isinstance(item, int):
            self._on_signal(item, link)
        elif isinstance(item, JobEnded):
            self._end.told(item, time.monotonic(), self._lead.elsewhere)
        elif isinstance(item, AgentCount):
            self._end.present(item.agent_ids)
            self._lead.heard(item.place)
        elif isinstance(item, AgentNotice):
            self._on_notice(item)
        elif isinstance(item, StrikeNow):
            if self._lead.here:
                self._coordinator.strike(item.kind, item.for_s)
        elif isinstance(item, Goodbye) and self._begun.succession.guest:
            self._end.give_up(NO_HEAD, Why(item.cause, item.reason))
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
        if number == signal.SIGUSR1 and self._begun.succession.guest and not self._lead.here:
            if self._local is None or not self._local.ask_to_leave():  # another host leads, and takes its workers over
                self._end.leave(number)
            return
        if number == signal.SIGUSR1:
            if self._end.outcome is None and not self._end.interrupted:
                text = f"{name}: a preemption is coming, so a checkpoint is taken now"
                self._notify("warning", Why(Cause.PREEMPTED, text))
                link.command("checkpoint", vars(Why(Cause.PREEMPTED, f"notice of a preemption ({name})")))
                if self._begun.succession.guest or (self._begun.stays and self._begun.succession.owner):
                    self._coordinator.resign()
            return
        if self._begun.succession.guest or self._lead.elsewhere:
            self._end.leave(number)
            return
        rule = self.config.checkpoint
        grace_s = rule.grace_s if rule.enabled else 0.0
        if not self._end.signal(number, time.monotonic(), grace_s):
            return
        why = Why(Cause.INTERRUPTED, f"interrupted by {name}")
        save_s = 0.8 * (grace_s - reserve_s(grace_s))
        args = {**vars(why), "exit_code": 128 + number, "grace_s": save_s}
        link.command("stop", args, time.monotonic() + save_s)
        self._notify("warning", Why(why.cause, f"{why.reason}: ending in order; a second signal ends at once"))

    # ---- the end

    @property
    def deposed(self) -> bool:
        """Whether another host leads the job now, in a directory of its own."""
        return self._coordinator.moved or self._lead.elsewhere

    def _tear_down(self) -> None:
        """Run all of it, even if a part raises or a signal interrupts."""

        def hear_the_last() -> None:  # messages that an agent sent before it left, and the loop has not seen
            for item in self._inbox.take():
                if isinstance(item, AgentNotice):
                    self._on_notice(item)

        with contextlib.ExitStack() as last_first:
            last_first.callback(self._inbox.close)
            if self._lead.here and not self._coordinator.moved:
                last_first.callback(_forget, self.run_dir / COORDINATOR_FILE)
            last_first.callback(self._coordinator.end)
            last_first.callback(hear_the_last)
            if self._link is not None:
                last_first.callback(self._link.close)
            moved = self._end.outcome is not None and self._end.outcome.exit_code == ANOTHER_LEADS
            stands_by = moved and not self.signalled
            if self._local is not None and stands_by and self._begun.keeps_apart:
                last_first.callback(self._local.leave)
            elif self._local is not None:
                last_first.callback(self._local.end, *([INTERRUPTED_WAIT_S] if self._end.interrupted else []))
            leads = self._lead.here and not (self._begun.succession.guest or self.deposed)
            if self._link is not None and leads:
                last_first.callback(self._link.goodbye, Why(Cause.INTERRUPTED, "the job's process has ended"))

    # ---- small things

    def _notify(self, kind: str, why: Why | None = None, **fields: Any) -> None:
        if self._on_event is not None:
            said = vars(why) if why is not None else {}
            self._on_event({"time_unix_ns": time.time_ns(), "kind": kind, **said, **fields})


def hearing_signals(job: Job) -> AbstractContextManager[None]:
    """While the block lasts, note signals, and act upon them while the job runs, also upon those that came before."""
    return taking_signals(_SIGNALS, job.interrupt)


def _taken_away(run_dir: Path) -> Why | None:
    """Reason if the run directory was taken away: without it nothing of a job can be told, saved or started again."""
    words = moved(run_dir)
    text = f"the run directory {run_dir} {words} while the job used it, so nothing more can be saved"
    then = "put it or a copy back, and run the job again to go on from its newest checkpoint"
    return Why(Cause.DISK, f"{text}: {then}") if words else None


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


# ---- its connection to the coordinator


class JobLink:
    """Speaks for the job. on_message: called in the connection's thread for the coordinator's messages. watch: told of
    each message. tls: as `ControlClient` has it."""

    def __init__(
        self,
        coordinator_file: Path,
        token: bytes,
        on_message: Callable[[AnyMessage], None],
        watch: Patience,
        tls: Tls | None = None,
    ) -> None:
        self._on_message = on_message
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[Command, float | None]] = {}
        self._watch = watch
        self._greeted = False
        self._told = threading.Event()
        self._spoke_s = time.monotonic()
        self._client = ControlClient(
            coordinator_file, role_token(token, JOB), JOB, f"job-{os.getpid()}", self._hello, self._receive, tls=tls
        )

    def ping(self) -> None:
        if self._client.connected:
            self._client.send(Ping(seq=next(self._numbers)))

    def expect_anew(self) -> None:
        """Expect a new coordinator's first words: messages of the previous one are not its word."""
        self._greeted = False

    def unheard_s(self, now_s: float) -> float:
        """Seconds since the coordinator last said anything."""
        return now_s - self._spoke_s

    def command(self, name: str, args: dict[str, Any], until_s: float | None = None) -> None:
        """Send a command, as the command line would; the reply goes to `on_message`. Each hello repeats it until the
        reply has come (a stop: until the job is over). until_s: when the time of "grace_s" is over."""
        message = Command(request=next(self._numbers), name=name, args=args)
        if len(self._asked) >= MOST_ASKED:
            self._asked.pop(min(self._asked))
        self._asked[message.request] = (message, until_s)
        self._client.send(message)

    def goodbye(self, why: Why) -> None:
        """Tell the remaining agents of other hosts that they need not wait for this job any more."""
        if self._client.wait_connected(GOODBYE_S / 4):
            self._client.send(Goodbye(cause=why.cause, reason=why.reason))
            self._told.wait(GOODBYE_S)

    def _hello(self) -> JobHello:
        self._greeted = True
        return JobHello(asked=[_what_is_left(*asked) for asked in tuple(self._asked.values())])

    def close(self) -> None:
        self._client.close(0.0)

    def _receive(self, message: AnyMessage) -> None:
        if self._greeted:
            self._watch.answered()
        self._spoke_s = time.monotonic()
        if isinstance(message, Goodbye):
            self._told.set()
        if isinstance(message, CommandReply):
            asked = self._asked.get(message.request)
            if asked is not None and asked[0].name != "stop":
                self._asked.pop(message.request, None)
        if not isinstance(message, Pong):
            self._on_message(message)


def _what_is_left(asked: Command, until_s: float | None) -> Command:
    """The command with the grace time that is left."""
    if until_s is None:
        return asked
    left = {"grace_s": max(0.0, until_s - time.monotonic())}
    return Command(request=asked.request, name=asked.name, args={**asked.args, **left})
