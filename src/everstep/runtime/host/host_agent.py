"""The agent of a host: keeps the slots filled that the coordinator gives it, and leaves when the job is over.

It knows the job from its connection alone, and needs that only for decisions: while the coordinator is away its workers
go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.config import load_config
from everstep.base.errors import ConfigError, EverstepError
from everstep.base.exit_codes import NO_HEAD
from everstep.base.readable import readable
from everstep.observe.events import say
from everstep.protocol.messages import (
    AgentRefused,
    AnyMessage,
    FilesHeld,
    Goodbye,
    HostAsk,
    HostDismissed,
    HostKept,
    HostsThere,
    JobEnded,
    JobFacts,
    JobPage,
    KillWorker,
    ProbeHosts,
    SetSlots,
    ShowStacks,
    StrikeNow,
    WorkerLife,
)
from everstep.runtime.host.admission import why_not
from everstep.runtime.host.agent_link import AgentLink, Pulses, Secrets
from everstep.runtime.host.board import MAX_ROWS, Board, create_board_memory
from everstep.runtime.host.fork_server_client import ForkServerClient, start_fork_server
from everstep.runtime.host.host_part import Host
from everstep.runtime.host.host_probes import probe_hosts
from everstep.runtime.host.packet_faults import clear, harm
from everstep.runtime.host.undoing import Harms
from everstep.runtime.lead.finding import Finder, Where
from everstep.runtime.link import wire
from everstep.runtime.link.context import Joining
from everstep.runtime.link.tls import shown_by
from everstep.runtime.process import (
    END_ALONE,
    LEAVE,
    Inbox,
    adopt_orphans,
    die_with_parent,
    machine,
    raise_descriptor_limit,
    taking_signals,
)

GRACE_S = 10.0
AWAY_LIMIT_S = 600.0
SAY_EVERY_S = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, END_ALONE, LEAVE)
_BRING_S, _HURRY_S = 30.0, 2.0


@dataclass(frozen=True)
class Left:
    """How an agent ended: exit code, and a line for the user if the job does not report it. later: the job was stopped
    by a scheduler's signal, so it may be started again."""

    exit_code: int
    words: str = ""
    later: bool = False


class Absence:
    """Time for which the coordinator has been away, reported now and then. Pure. over: the agent gives up."""

    def __init__(self, address: str, now_s: float) -> None:
        self._address = address
        self._there_s = self._said_s = now_s
        self.over = False

    def look(self, connected: bool, now_s: float, tried: str = "") -> str:
        """Words to print now, "" for none. tried: the address at which the job was looked for last."""
        if connected:
            back = self._said_s > self._there_s
            words = f"the job at {self._address} answers again" if back else ""
            self._there_s = self._said_s = now_s
            return words
        away_s = now_s - self._there_s
        at = f"{self._address} (tried: {tried})" if tried and tried != self._address else self._address
        self.over = away_s >= AWAY_LIMIT_S
        if self.over:
            return f"the job at {at} has not answered for {AWAY_LIMIT_S:g} s"
        if now_s - self._said_s < SAY_EVERY_S:
            return ""
        self._said_s = now_s
        left_s = AWAY_LIMIT_S - away_s
        return f"the job at {at} has not answered for {away_s:.0f} s: workers go on, {left_s:.0f} s are left"


class HostAgent:
    """One agent. In the main thread `run` takes SIGINT and SIGTERM: its workers are ended at once, and it leaves.

    board, server: as `Host` has them; the agent ends the server.
    """

    def __init__(self, joining: Joining, token: bytes, board: Board, server: ForkServerClient) -> None:
        self._joining = joining
        shown = shown_by(joining.tls, token, joining.own) if joining.own else None
        self._secrets = Secrets(token, shown)
        self._board = board
        self._server = server
        self._inbox: Inbox[AnyMessage | int] = Inbox()
        self._host: Host | None = None
        self._job_fd = -1
        self._absence = Absence(joining.said or joining.address, time.monotonic())
        self._ended: JobEnded | None = None
        self._deadline_s = inf
        self._done = {"idle"}  # until the coordinator gives it slots; also: drained, emptied, killed, told of failure
        self._left: Left | None = None
        self._harms = Harms()
        pulses = Pulses(board, lambda *about: "" if self._host is None else self._host.workers.seen_at(*about))
        self.link = AgentLink(joining, self._secrets, pulses, self._lives, self._slots, self._hear)

    def run(self) -> Left:
        """Take part until the job is over. Nothing is left running."""
        clear(self._joining.own)
        try:
            with taking_signals(_SIGNALS, self._inbox.put):
                while self._left is None:
                    self._turn()
        finally:
            self._tear_down()
        return self._left

    def _turn(self) -> None:
        now_s = time.monotonic()
        server_fd = self._host.server.fd if self._host is not None else -1
        orphans = self._host.workers.orphan_fds if self._host is not None else []
        ready = readable((self._inbox.fd, server_fd, self._job_fd, *orphans), self._patience(now_s))
        if self._host is not None:
            if server_fd in ready:
                self._host.server.hear()
            if ready.intersection(orphans):
                self._host.workers.look_at_orphans()
            self._host.server.watch(time.monotonic())
        for item in self._inbox.take():
            self._take(item)
        now_s = time.monotonic()
        if self._job_fd in ready and self._ended is None:
            self._leave(Left(NO_HEAD, "the job's process is gone: its workers on this host are stopped"))
        self.link.beat(now_s)
        for name in self._harms.look():
            if self._host is not None:
                self._host.tell("fault_over", Why(Cause.INJECTED, f"chaos: {name} is over"))
        self._look_at_workers(now_s)
        self._look_at_link(now_s)
        self._look_at_end(now_s)

    def _patience(self, now_s: float) -> float:
        host = self._host
        start_s, ping_s = (inf, inf) if host is None else (host.workers.due_in(now_s), host.server.ping_in(now_s))
        end_s = self._deadline_s - now_s  # after that, only the end of workers' scripts is waited for
        return min(1.0, self.link.due_in(now_s), start_s, ping_s, end_s if end_s > 0 else inf)

    # ---- messages

    def _take(self, item: AnyMessage | int) -> None:
        host = self._host
        if item in (signal.SIGUSR1, LEAVE):
            self._wish_to_leave(told=item == LEAVE)
            return
        if item == END_ALONE:
            self._end_alone()
            return
        if isinstance(item, int):
            self._leave(Left(128 + item, f"interrupted by {signal.Signals(item).name}"))
        elif isinstance(item, JobFacts):
            if host is None:
                self._begin(item)
            elif words := _unfit(host, item, self._joining.said or self._joining.address):
                self._leave(Left(NO_HEAD, words))
            else:
                host.files.meet(item)
        elif isinstance(item, AgentRefused):
            self._leave(Left(2, item.reason))
        elif isinstance(item, JobEnded):
            self._on_job_ended(item)
        elif isinstance(item, HostDismissed):
            self._leave(Left(0, item.reason))
        elif isinstance(item, HostKept):
            self.link.stay()
            _say(item.reason)
        elif isinstance(item, Goodbye):
            if self._ended is None and self._job_fd < 0:  # on the job's host, the agent sees the process end
                self._leave(Left(NO_HEAD, f"{item.reason}: its workers here are ended"))
        elif isinstance(item, HostsThere | JobPage | HostAsk) and host is not None:
            host.files.hear(item)
        elif host is not None:
            self._order(host, item)

    def _wish_to_leave(self, *, told: bool) -> None:
        """Ask to leave. told: by the job's process on this host, which else acts upon the signal itself."""
        if told or not self._joining.parent:
            _say("SIGUSR1: this host leaves in order")
            self.link.ask_to_leave()

    def _hear(self, message: AnyMessage) -> None:
        """In the connection's thread. Answers about arrived files count also while this agent leaves."""
        if isinstance(message, FilesHeld) and self._host is not None:
            self._host.files.answered(message)
        else:
            self._inbox.put(message)

    def _end_alone(self) -> None:
        """End without a coordinator: the job's process has told this agent, and no other one."""
        if self._host is None:
            self._leave(Left(0))
        else:
            self._host.workers.end_alone()

    def _order(self, host: Host, message: AnyMessage) -> None:
        """Carry out an order about this host's workers, or about the host."""
        if isinstance(message, SetSlots):
            host.workers.want([] if message.drained else message.worker_ids, message.first, message.ranks)
            if message.drained:
                self._done = (self._done | {"drained"}) - {"emptied"}  # a coordinator that asks again gets an answer
            elif message.worker_ids:  # a host that never had workers cannot say that they have left
                self._done.discard("idle")
        elif isinstance(message, KillWorker):
            if host.workers.kill(message.worker_id, message.incarnation, again=message.again):
                self._notify("worker_killed", Why(message.cause, message.reason), worker_id=message.worker_id)
        elif isinstance(message, ProbeHosts):
            probe_hosts(message, self.link.probed)
        elif isinstance(message, ShowStacks):
            host.workers.show_stacks(message.worker_id, message.incarnation)
        elif isinstance(message, StrikeNow) and message.kind == "kill":
            host.fall()
        elif isinstance(message, StrikeNow):
            name = f"{message.kind} between {self._joining.own or 'this host'} and {message.peer or 'all others'}"
            try:
                self._harms.take(name, lambda: harm(message, self._joining.own))
            except (ConfigError, OSError) as error:
                host.tell("warning", Why(Cause.INJECTED, f"chaos: {message.kind} did not strike: {error}"))

    def _begin(self, facts: JobFacts) -> None:
        if facts.job_pid and facts.machine == machine():
            try:
                self._job_fd = os.pidfd_open(facts.job_pid)
            except ProcessLookupError:
                self._leave(Left(NO_HEAD, "the job's process is gone"))
                return
        refused = why_not(facts, load_config([("the job", facts.config)]), self._joining)
        if not refused:
            own = (self._secrets, self._board, self._server, self.link, self._notify)
            try:
                self._host = Host(facts, self._joining, *own)
            except ConfigError as error:
                refused = str(error)
        if refused or self._host is None:
            self.link.stay_out(Why(Cause.CONFIG, refused))
            self._leave(Left(2, refused))
            return
        if not self._joining.parent:
            room = self._joining.room
            slots = f"{room} slot{'s' * (room > 1)}" if room else "any number of slots"
            _say(f"takes part in {facts.task} as host {self._joining.host}, {slots}")
        interval = self._host.config.heartbeat.interval_s
        self.link.beat_every(None if isinstance(interval, str) else float(interval))
        finds = isinstance(self._joining.where(), Path) or self._host.files.apart  # then it follows its own file
        if not finds and self._host.coordinator_file.exists():
            self.link.client.follow(self._host.coordinator_file)

    def _on_job_ended(self, message: JobEnded) -> None:
        if self._ended is None:
            self._ended = message
            self._deadline_s = time.monotonic() + GRACE_S
            if self._host is not None:
                self._host.workers.stop()
                self._host.workers.go_on()  # stopped workers cannot leave

    # ---- work

    def _look_at_workers(self, now_s: float) -> None:
        host = self._host
        if host is None or self._ended is not None:
            return
        host.workers.start_due(now_s)
        if host.hopeless is not None and "failed" not in self._done:
            self._done.add("failed")
            host.workers.stop()
            self.link.host_failed(host.hopeless)
        if host.workers.none_coming() and "idle" not in self._done:
            self._done.add("idle")
            self._notify("workers_left")
        if "drained" in self._done and "emptied" not in self._done and host.workers.none_live():
            self._done.add("emptied")
            self.link.emptied()

    def _look_at_link(self, now_s: float) -> None:
        words = self._absence.look(self.link.client.connected or self._ended is not None, now_s, self.link.client.tried)
        if self._absence.over:
            self._leave(Left(NO_HEAD, words))
        elif words:
            _say(words)

    def _look_at_end(self, now_s: float) -> None:
        host = self._host
        if host is None or host.workers.none_live():
            alone = host is not None and host.workers.alone
            if self._ended is not None or alone:
                self._leave(_over(self._ended, self._joining, self.link.leaving))
            return
        if self._ended is None or now_s < self._deadline_s:
            return
        patient = self._ended.state == "completed" and now_s < self._deadline_s + host.config.quorum_wait_s
        if patient and host.finishing():
            host.kill_idle()  # some worker still runs its script's end
        elif "killed" in self._done:
            self._leave(_over(self._ended, self._joining, self.link.leaving))
        else:
            self._done.add("killed")
            host.workers.kill_all()
            self._deadline_s = now_s + GRACE_S

    def _leave(self, how: Left) -> None:
        if how.exit_code == NO_HEAD and self.link.leaving:
            how = Left(0, how.words)  # it was going to do that anyway
        self._left = self._left or how

    def _tear_down(self) -> None:
        """Run all of it, even if a part raises."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._inbox.close)
            last_first.callback(self.link.close)
            if self._host is None:
                last_first.callback(self._server.close, 0.0)
            else:
                last_first.callback(lambda host: self._notify("host_left", reached=host.reached()), self._host)
                by_signal = self._left is not None and self._left.exit_code > 128
                done = self._ended is not None and self._ended.state == "completed"
                last_first.callback(self._host.files.close, done=done)
                last_first.callback(self._host.files.finish, _HURRY_S if by_signal else _BRING_S)
                last_first.callback(self._host.close, at_once=by_signal)
            if self._job_fd >= 0:
                last_first.callback(os.close, self._job_fd)
            last_first.callback(self._harms.close)

    # ---- small things

    def _lives(self) -> list[WorkerLife]:
        return self._host.workers.lives() if self._host is not None else []

    def _slots(self) -> int:
        return self._host.workers.wanted_slots() if self._host is not None else 0

    def _notify(self, kind: str, why: Why | None = None, **fields: Any) -> None:
        said = vars(why) if why is not None else {}
        self.link.notice(kind, {"time_unix_ns": time.time_ns(), **said, **fields})


def _unfit(host: Host, facts: JobFacts, said: str) -> str:
    """Reason why this agent cannot go on with the job of a new connection, "" if it can."""
    if (facts.task, facts.argv, facts.config) != (host.facts.task, host.facts.argv, host.facts.config):
        return f"another job listens at {said} by now"
    if not host.files.fits(facts):
        return f"the job goes on in another directory than {host.run_dir}: start this agent again"
    return ""


def _over(ended: JobEnded | None, joining: Joining, leaving: bool) -> Left:
    """Result for an ended job, with its exit code if it has failed; on the job's own host its process reports the end.
    leaving: the host was asked to leave."""
    if ended is None or joining.parent:
        return Left(0)
    if ended.state == "failed" and not leaving:
        why = ended.reason.strip().partition("\n")[0]
        return Left(ended.exit_code or 1, f"the job is over: failed: {why}")
    stopped = ended.state == "interrupted" and ended.exit_code == 128 + signal.SIGTERM
    return Left(0, f"the job is over: {ended.state}", later=stopped and not leaving)


def _say(words: str) -> None:
    say(f"everstep agent: {words}")


def take_part(joining: Joining, token: bytes, look: Callable[[], Where | None] | None = None) -> Left:
    """Be the agent of this host until the job is over. look: as `Finder` has it, if the address is a file that this
    agent has to keep up to date."""
    raise_descriptor_limit()
    adopt_orphans()  # for workers whose fork server dies
    if joining.server is not None:
        for fd in (joining.server.fd, joining.server.board_fd):
            os.set_inheritable(fd, False)
        board, server = Board.attach(joining.server.board_fd), ForkServerClient.adopt(joining.server)
    else:
        board = Board.attach(create_board_memory(MAX_ROWS))
        server = start_fork_server(None, board.fd, joining.threads, joining.preload)
    agent = HostAgent(joining, token, board, server)
    with contextlib.ExitStack() as last_first:
        last_first.callback(board.close)
        path = joining.where()
        if look is not None and isinstance(path, Path):
            last_first.callback(Finder(path, look, agent.link.misses_head, agent.link.client.follow).close)
        return agent.run()


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process."""
    try:
        joining = Joining.from_json((sys.argv[1:] if argv is None else argv)[0])
        die_with_parent(joining.parent)
        left = take_part(joining, wire.read_token(Path(joining.token_file)))
    except (EverstepError, OSError) as error:
        print(f"everstep agent: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1  # 2: it was refused, and would be again
    if left.words:
        print(f"everstep agent: {left.words}", file=sys.stderr, flush=True)
    return left.exit_code


if __name__ == "__main__":
    sys.exit(main())
