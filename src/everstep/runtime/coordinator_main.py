"""The coordinator process: `python -m everstep.runtime.coordinator_main RUN_DIR --port P`. No torch.

It only carries events to the pure `protocol.coordinator.Coordinator` and executes its effects, in order: what has to be
persisted is synced before anything that depends on it leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import uvloop

from everstep.base.cause import Cause, Why
from everstep.base.config import Config, load_config, pool_wish
from everstep.base.errors import EverstepError, ProtocolError
from everstep.base.given import read_json
from everstep.observe.events import EventLog
from everstep.protocol.coordinator.agreement import timed
from everstep.protocol.coordinator.coordinator import Coordinator
from everstep.protocol.coordinator.types import (
    Close,
    Connected,
    CoordinatorConfig,
    CoordinatorEvent,
    Disconnected,
    HostRules,
    Persist,
    Received,
    Report,
    Send,
    Tick,
)
from everstep.protocol.messages import (
    MAX_FRAME_BYTES,
    AgentCount,
    AgentHello,
    AgentNotice,
    AgentRefused,
    AnyMessage,
    Goodbye,
    HostPlace,
    HostsThere,
    JobFacts,
    JobHello,
    Ping,
    PlanNow,
    PlanPrepared,
    Pong,
    decode,
    encode,
)
from everstep.protocol.roles import CONTROL_ROLES, PEOPLE
from everstep.runtime import wire
from everstep.runtime.address import COORDINATOR_FILE, EVENTS_FILE, JOB_FILE, JOURNAL_FILE, TOKEN_FILE, write_address
from everstep.runtime.files_desk import FilesDesk, Pages
from everstep.runtime.handshake import Ends, Greeter, Seals, keys_of
from everstep.runtime.journal import Journal
from everstep.runtime.places import word_in
from everstep.runtime.porch import Complaints, Strangers
from everstep.runtime.process import die_with_parent, machine, raise_descriptor_limit
from everstep.runtime.tls import Tls, TlsPipe, shown_by
from everstep.runtime.versions import task_digest, versions

MAX_STRANGERS = 2048
MAX_ASKED_BYTES = 64 << 10
MOST_UNREAD = 4096
MAX_UNSENT_BYTES = 256 << 20
RETURN_NS = 30_000_000_000
_LATE_S = _LOOK_S = 0.25
Sends = list[tuple[str, AnyMessage]]


class Switchboard:
    """What passes between the job's process and its agents without the coordinator deciding anything.

    Pure: what came in, what goes out. Knows which connections are agents' and which the job's. What agents say while
    the job is not there waits for it. facts: what agents are told.
    """

    def __init__(self, facts: JobFacts) -> None:
        self._facts = facts
        self._jobs: set[str] = set()
        self._agents: dict[str, AgentHello] = {}
        self._unread: deque[AgentNotice] = deque(maxlen=MOST_UNREAD)
        self._places: dict[str, HostPlace] = {}

    def take(self, connection: str, message: AnyMessage) -> tuple[Sends, bool]:
        """A message came. Returns what to send to which connections, and whether it is for the coordinator too."""
        match message:
            case Ping(seq=seq):
                return [(connection, Pong(seq=seq))], False
            case AgentNotice():
                if not self._jobs:
                    self._unread.append(message)
                return [(job, message) for job in sorted(self._jobs)], False
            case JobHello():
                self._jobs.add(connection)
                unread = [(connection, notice) for notice in self._unread]
                self._unread.clear()
                return [(connection, self._present()), *unread], True
            case HostPlace():
                self._places[connection] = message
                return self._tell_hosts(), False
            case Goodbye():
                return [(name, message) for name in (*sorted(self._agents), connection)], False
            case AgentHello():
                return self._agent_hello(connection, message)
        return [], True

    def gone(self, connection: str) -> Sends:
        """A connection has ended."""
        self._jobs.discard(connection)
        sends = self._tell() if self._agents.pop(connection, None) is not None else []
        return [*sends, *self._tell_hosts()] if self._places.pop(connection, None) is not None else sends

    @property
    def apart(self) -> list[str]:
        """The connections of agents whose run directory is their own."""
        return [name for name, place in self._places.items() if place.apart]

    def _tell_hosts(self) -> Sends:
        """All agents, in the order of names."""
        there = HostsThere(places={place.agent_id: place for _, place in sorted(self._places.items())})
        return [(name, there) for name in sorted(self._places)]

    def _agent_hello(self, connection: str, hello: AgentHello) -> tuple[Sends, bool]:
        for other in self._agents.values():
            if other.agent_id == hello.agent_id and other.process != hello.process:
                pid = other.process.partition("-")[0]
                text = f"another agent of this job is called {hello.agent_id!r} (process {pid} of its host)"
                refused = AgentRefused(cause=Cause.CONFIG, reason=f"{text}: give one of them another --host-name")
                return [(connection, refused)], False
        self._agents[connection] = hello
        return [(connection, self._facts), *self._tell()], True

    def _tell(self) -> Sends:
        return [(job, self._present()) for job in sorted(self._jobs)]

    def _present(self) -> AgentCount:
        return AgentCount(agent_ids=sorted({hello.agent_id for hello in self._agents.values()}))


class ControlServer:
    """Connections, timer, journal and events around one `Coordinator`."""

    def __init__(
        self,
        coordinator: Coordinator,
        switchboard: Switchboard,
        journal: Journal,
        events: EventLog,
        token: bytes,
        tls: Tls | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.switchboard = switchboard
        self.journal = journal
        self.events = events
        self.keys = keys_of(token, CONTROL_ROLES)
        self.tls = tls
        self.connections: dict[str, ControlSocket] = {}
        self.strangers: Strangers[ControlSocket] = Strangers(MAX_STRANGERS, wire.HANDSHAKE_TIMEOUT_S)
        self._complaints = Complaints(lambda text: self._warn(Why(Cause.REFUSED, text)))
        self._late: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self.desk, self.pages = FilesDesk(events.path.parent), Pages(events.path.parent)
        self._names = 0
        self._round_ns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._journal_warned = False
        self._last_encoded: tuple[AnyMessage | None, bytes] = (None, b"")

    def next_name(self) -> str:
        """A name that no other connection of this process has had."""
        self._names += 1
        return f"c{self._names}"

    def handle(self, event: CoordinatorEvent) -> None:
        """Pass an event to the coordinator and do what it says."""
        for effect in self.coordinator.handle(self._arrival_ns(), event):
            match effect:
                case Persist(entry):
                    self._persist(entry)
                case Send(name, message):
                    self._send(name, message)
                case Close(name, reason, foul):
                    if foul and name in self.connections:
                        self.refuse(self.connections[name].peer, reason)
                    self._end(name)
                case Report(kind, fields):
                    if kind == "recovery_completed":
                        fields = timed(fields, time.time_ns())
                    self.events.write(kind, **fields)
        self._arm()

    def received(self, name: str, message: AnyMessage) -> None:
        """A message of a client."""
        if not self.coordinator.refusal(name, message):
            answers = self.desk.take(name, message)
            if answers is not None:
                self._hand_on(answers)
                return
            sends, for_coordinator = self.switchboard.take(name, message)
            self._hand_on(sends)
            if isinstance(message, HostPlace) and message.apart:
                self._bring_pages(name)
            if not for_coordinator:
                return
        self.handle(Received(name, message))

    def lost(self, name: str) -> None:
        """A client's connection has ended."""
        self.connections.pop(name, None)
        self._hand_on([*self.switchboard.gone(name), *self.desk.gone(name)])
        self.handle(Disconnected(name))

    def _bring_pages(self, name: str = "") -> None:
        """Agents of hosts with directories of their own hear of what has changed; a new one of all that there is."""
        for page in self.pages.all() if name else self.pages.changed():
            for apart in [name] if name else self.switchboard.apart:
                self._send(apart, page)
        if not name or self._looking is None:
            there = bool(self.switchboard.apart)
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._bring_pages) if there else None

    def _hand_on(self, sends: Sends) -> None:
        for name, message in sends:
            self._send(name, message)
            if isinstance(message, AgentRefused):
                self._end(name)

    def _send(self, name: str, message: AnyMessage) -> None:
        if name in self.connections:
            self.connections[name].send(self._frame(message))

    def _end(self, name: str) -> None:
        if name in self.connections:
            self.connections[name].end()

    def _arrival_ns(self) -> int:
        """The time at which the events of this round of the loop were found waiting.

        Handling a thousand hellos takes seconds. With the time at which each event is handled, those would count as the
        silence of whoever's heartbeat waits behind them; so the whole round happens at once, and the coordinator sees
        the gap between two rounds as an absence of its own.
        """
        if self._round_ns == 0:
            self._round_ns = time.monotonic_ns()
            asyncio.get_running_loop().call_soon(self._end_round)
        return self._round_ns

    def _end_round(self) -> None:
        self._round_ns = 0

    def refuse(self, peer: str, reason: str) -> None:
        """Somebody was turned away: count it, and say so now and then."""
        self._complaints.refused(peer, reason, time.monotonic())

    def arrived(self, stranger: ControlSocket) -> None:
        """Somebody has connected: one of those who have been there for too long may have to go for it."""
        out = self.strangers.arrive(stranger, stranger.host, time.monotonic())
        if out is not None:
            out.turn_away("too many connections at once have not proved the token")
        if self._late is None:
            self._late = asyncio.get_running_loop().call_later(_LATE_S, self._send_off)

    def _send_off(self) -> None:
        for stranger in self.strangers.late(time.monotonic()):
            stranger.turn_away("the handshake took too long")
        there = len(self.strangers) > 0
        self._late = asyncio.get_running_loop().call_later(_LATE_S, self._send_off) if there else None

    def _frame(self, message: AnyMessage) -> bytes:
        """The frame of a message; a plan for a thousand workers is encoded once, not a thousand times."""
        known, data = self._last_encoded
        same = known is message
        if isinstance(message, PlanNow | PlanPrepared) and type(known) is type(message):
            same = getattr(known, "plan", None) is message.plan
        if not same:
            data = wire.frame(encode(message), deflate=True)
            self._last_encoded = (message, data)
        return data

    def _persist(self, entry: dict[str, Any]) -> None:
        if self.journal.append(entry):
            self._journal_warned = False
        elif not self._journal_warned:
            self._journal_warned = True
            text = (
                f"cannot write {self.journal.path}: the coordinator keeps {self.journal.pending} entries in memory and"
                " tries again; a restart of it would rely on what the workers report"
            )
            self._warn(Why(Cause.DISK, text))

    def _warn(self, why: Why) -> None:
        print(why.reason, file=sys.stderr, flush=True)
        self.events.write("warning", **vars(why))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_ns = self.coordinator.next_deadline_ns
        if deadline_ns is not None:
            delay_s = max(0.0005, (deadline_ns - time.monotonic_ns()) / 1e9)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.handle(Tick())


class ControlSocket(asyncio.Protocol):
    """One socket: first a stranger, then a client with a role. Nothing of a stranger's is decoded.

    Over TLS, people show no certificate, and all others do.
    """

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._name = ""
        self._greeter: Greeter | None = None
        self._seals: Seals | None = None
        self._reader: wire.FrameReader | None = None
        self._pipe: TlsPipe | None = None
        self._here = ""
        self.host = "?"
        self.peer = "?"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, which is no subclass of it
        peer = transport.get_extra_info("peername") or ("?", 0)
        self.host, self.peer = str(peer[0]), f"{peer[0]}:{peer[1]}"
        self._here = wire.address_text(transport.get_extra_info("sockname"))
        tls = self._server.tls
        there = wire.address_text(peer) if peer[1] else ""  # it may be gone again
        covered = tls is not None and tls.covers(Ends(self._here, there))
        self._server.arrived(self)
        if tls is None or not covered:
            self._greet(Greeter(self._server.keys, self._here))

    def data_received(self, data: bytes) -> None:
        try:
            if self._greeter is None and not self._name:
                data = self._begin_tls(data)
            elif self._pipe is not None:
                data = self._pipe.feed(data)
            if not data:
                return
            if self._name:
                self._frames(data)
            elif self._transport is not None:
                self._handshake(data)
        except ProtocolError as error:
            if self._name:
                self._server.refuse(self.peer, str(error))
                self.end()
            else:
                self.turn_away(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._name:
            self._server.lost(self._name)
        else:
            self._server.strangers.leave(self)

    def send(self, data: bytes) -> None:
        """Queue a frame. A client that does not read is cut off beyond `MAX_UNSENT_BYTES`; it will reconnect."""
        transport, seals = self._transport, self._seals
        if transport is None or seals is None or transport.is_closing():
            return
        self._write(data, seals.tag(data))
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._server.refuse(self.peer, f"more than {MAX_UNSENT_BYTES} bytes wait for it to read")
            transport.abort()

    def end(self) -> None:
        """Close after what is queued has left."""
        if self._transport is not None:
            self._transport.close()

    def _begin_tls(self, data: bytes) -> bytes:
        """A stranger that has to speak TLS says something; until then it costs nothing of that. Returns what it says
        inside."""
        tls = self._server.tls
        if tls is None or self._transport is None:
            return b""
        pipe = self._pipe = self._pipe or tls.pipe()
        try:
            data = pipe.feed(data)
        finally:  # a refusal has words too
            self._write()
        if pipe.ready and self._greeter is None:
            self._greet(Greeter(self._server.keys, self._here, tls.fingerprint))
        return data

    def _greet(self, greeter: Greeter) -> None:
        self._greeter = greeter
        self._write(greeter.greeting)

    def _write(self, *parts: bytes) -> None:
        if self._transport is None:
            return
        if self._pipe is None:
            for part in parts:
                self._transport.write(part)
            return
        for part in parts:
            self._pipe.write(part)
        sealed = self._pipe.leaving()
        if sealed:
            self._transport.write(sealed)

    def _handshake(self, data: bytes) -> None:
        transport, greeter = self._transport, self._greeter
        if transport is None or greeter is None or transport.is_closing():
            return
        reply = greeter.feed(data)
        seals = greeter.seals
        if seals is None:
            return
        if self._pipe is not None and not self._pipe.shows_certificate and seals.role not in PEOPLE:
            raise ProtocolError(f"expected a certificate of who claims the role {seals.role!r}, it showed none")
        self._write(reply)
        self._greeter, self._seals = None, seals
        most = MAX_ASKED_BYTES if seals.role in PEOPLE else MAX_FRAME_BYTES
        self._reader = wire.FrameReader(seals, most_bytes=most)
        self._name = self._server.next_name()
        self._server.strangers.leave(self)
        self._server.connections[self._name] = self
        self._server.handle(Connected(self._name, seals.role, seals.name))

    def _frames(self, data: bytes) -> None:
        for body in self._reader.feed(data) if self._reader is not None else ():
            if self._transport is None or self._transport.is_closing():
                return
            self._server.received(self._name, decode(body))

    def turn_away(self, reason: str) -> None:
        """A stranger has to go."""
        self._server.strangers.leave(self)
        self._server.refuse(self.peer, reason)
        if self._transport is None:
            return
        if self._pipe is not None:
            self._transport.close()  # after what is said of it
        else:
            self._transport.abort()


def coordinator_config(config: Config) -> CoordinatorConfig:
    """What the coordinator needs of the job's config."""
    beat = config.heartbeat
    return CoordinatorConfig(
        lanes=config.lanes,
        stages=config.stages,
        workers=config.workers,
        min_workers=config.min_workers,
        on_failure=config.on_failure,
        hang_limit_ns=_ns(config.hang_limit_s),
        heartbeat_floor_ns=int(beat.floor_s * 1e9),
        heartbeat_ceiling_ns=int(beat.ceiling_s * 1e9),
        heartbeat_interval_ns=_ns(beat.interval_s),
        quorum_wait_ns=int(config.quorum_wait_s * 1e9),
        wish=pool_wish(config),
        save_ns=int(config.checkpoint.grace_s * 1e9) if config.checkpoint.enabled else 0,
        slots=config.workers + config.spares,
        hosts=HostRules(
            reconnect_ns=int(beat.reconnect_s * 1e9),
            return_ns=RETURN_NS if config.hosts.return_ == "rebalance" else None,
        ),
    )


def _ns(seconds: float | str) -> int | None:
    """None for 'auto'."""
    return None if isinstance(seconds, str) else int(seconds * 1e9)


def job_facts(run_dir: Path, job: dict[str, Any], job_pid: int) -> JobFacts:
    """What agents are told of the job. job: as job.json says it."""
    return JobFacts(
        task=str(job.get("task", "")),
        argv=[str(word) for word in job.get("argv", ())],
        config=job["config"],
        run_dir=str(run_dir.resolve()),
        coordinator_file=str((run_dir / COORDINATOR_FILE).resolve()),
        job_pid=job_pid,
        machine=machine(),
        versions={**versions(), "task file": task_digest(str(job.get("task", "")))},
        place=word_in(run_dir),
        job=job,
    )


async def serve(run_dir: Path, port: int, job_pid: int, down_since_unix_ns: int, cause: Cause) -> None:
    """Run the server until the process is ended. cause: of the end of its predecessor, if there was one."""
    job = read_json(run_dir / JOB_FILE)
    config = load_config([(JOB_FILE, job["config"])])
    host = config.network.address
    token = wire.read_token(run_dir / TOKEN_FILE)
    journal = Journal(run_dir / JOURNAL_FILE)
    events = EventLog(run_dir / EVENTS_FILE)
    coordinator = Coordinator(coordinator_config(config), journal.entries)
    shown = shown_by(config.security.tls, token, host)
    board = Switchboard(job_facts(run_dir, job, job_pid))
    server = ControlServer(coordinator, board, journal, events, token, Tls.of(shown))

    def listen(port: int) -> Coroutine[Any, Any, asyncio.Server]:
        return asyncio.get_running_loop().create_server(lambda: ControlSocket(server), host, port, backlog=2048)

    try:
        listener = await listen(port)
    except OSError:
        if port == 0:
            raise
        listener = await listen(0)  # somebody else took the port; clients read the new one from the address file
    bound = listener.sockets[0].getsockname()
    tls = (config.security.tls.mode, shown.ca) if shown is not None else ()
    write_address(run_dir / COORDINATOR_FILE, bound[0], bound[1], *tls)
    if journal.entries:
        report_restart(events, coordinator, journal, down_since_unix_ns, cause)
    server.handle(Tick())
    gc.collect()
    gc.freeze()
    await asyncio.Event().wait()


def report_restart(
    events: EventLog, coordinator: Coordinator, journal: Journal, down_since_unix_ns: int, cause: Cause
) -> None:
    """Tell that this coordinator continues the work of another."""
    now_ns = time.time_ns()
    downtime_s = (now_ns - down_since_unix_ns) / 1e9 if down_since_unix_ns else None
    torn = f"; a torn line of {journal.cut_bytes} bytes was cut off its end" if journal.cut_bytes else ""
    events.write(
        "coordinator_restarted",
        time_unix_ns=now_ns,
        generation=coordinator.status().get("generation"),
        pid=os.getpid(),
        cause=cause,
        reason=f"continues from its journal of {len(journal.entries)} entries{torn}",
        downtime_s=downtime_s,
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="everstep.runtime.coordinator_main")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--parent", type=int, default=0, help="die with this process, which started it")
    parser.add_argument("--down-since", type=int, default=0, help="when the predecessor died, Unix nanoseconds")
    parser.add_argument("--cause", default="", help="what the predecessor died of")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the job's process, which ends it in order
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler may send its notice to all processes
    if arguments.parent:
        die_with_parent(arguments.parent)
    raise_descriptor_limit()
    try:
        cause = Cause.read(arguments.cause)
        uvloop.run(serve(arguments.run_dir, arguments.port, arguments.parent, arguments.down_since, cause))
    except (EverstepError, OSError, ValueError, KeyError) as error:
        print(f"everstep coordinator: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
