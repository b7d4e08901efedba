"""The coordinator process: `python -m everstep.runtime.lead.coordinator_main RUN_DIR --port P`. No torch.

It only carries events to the pure `protocol.coordinator.Coordinator` and executes its effects, in order: entries that
have to persist are synced before any message that depends on them leaves.
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
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, cast

import uvloop

from everstep.base.below import keep_to
from everstep.base.cause import Cause, Why
from everstep.base.config import load_config
from everstep.base.doors import is_loopback, parse_ports
from everstep.base.errors import EverstepError, ProtocolError, check
from everstep.base.given import read_json
from everstep.base.plan import Plan
from everstep.observe.events import EventLog, last_generation, say
from everstep.protocol.coordinator.agreement import timed
from everstep.protocol.coordinator.coordinator import Coordinator
from everstep.protocol.coordinator.types import (
    Close,
    Connected,
    CoordinatorEffect,
    CoordinatorEvent,
    Disconnected,
    Knows,
    ProbePort,
    Received,
    Remember,
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
    Command,
    CommandReply,
    Goodbye,
    JobFacts,
    JobHello,
    Ping,
    Pong,
    TermBegun,
    decode,
)
from everstep.protocol.roles import CONTROL_ROLES, PEOPLE
from everstep.runtime.files.head_files import HeadFiles
from everstep.runtime.files.host_directory import OWN_FOLDER, word_of
from everstep.runtime.files.led_directory import MOVED, led_directory
from everstep.runtime.files.standby_senders import StandbyHosts
from everstep.runtime.lead.coordinator_setup import coordinator_config, job_facts, report_end, scripted_strikes
from everstep.runtime.lead.journal import JournalTaken
from everstep.runtime.lead.journal_and_lease import (
    EtcdStore,
    InOrder,
    JournalStore,
    Post,
    Tenure,
    decline,
    make_known,
    open_journal,
    warn,
)
from everstep.runtime.link import listening, wire
from everstep.runtime.link.address import COORDINATOR_FILE, EVENTS_FILE, JOB_FILE, TOKEN_FILE, address_of, remember
from everstep.runtime.link.handshake import Ends, Greeter, Seals, keys_of
from everstep.runtime.link.head_facts import answer
from everstep.runtime.link.listener_probe import PortProber
from everstep.runtime.link.silence import CONTROL_SILENT_S, notice_silence
from everstep.runtime.link.tls import Tls, TlsPipe, shown_by
from everstep.runtime.link.unproven_connections import Complaints, Strangers
from everstep.runtime.process import die_with_parent, raise_descriptor_limit

MAX_STRANGERS = 2048
MAX_ASKED_BYTES = 64 << 10
MOST_UNREAD = 4096
MAX_UNSENT_BYTES = 256 << 20
RARELY = (50_000, 20, 100)
"""Thresholds of Python's garbage collection. A plan for thousands makes tens of thousands of objects, none garbage."""
_LATE_S = _LOOK_S = 0.25
_BACKLOG = 2048
Sends = list[tuple[str, AnyMessage]]


class Switchboard:
    """Messages between the job's process and its agents that need no decision of the coordinator.

    Pure: messages in, messages out. It knows which connections are agents' and which the job's. Messages of agents wait
    while the job is not connected. facts: told to agents. clock: Unix nanoseconds, for questions about this host.
    """

    def __init__(self, facts: JobFacts, clock: Callable[[], int] = time.time_ns) -> None:
        self._facts = facts
        self._clock = clock
        self._later: dict[str, Any] = {}
        self._jobs: set[str] = set()
        self._agents: dict[str, AgentHello] = {}
        self._unread: deque[AgentNotice] = deque(maxlen=MOST_UNREAD)

    def take(self, connection: str, message: AnyMessage) -> tuple[Sends, bool]:
        """Take a message. Returns (messages to send by connection, whether the coordinator needs it, too)."""
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
            case Goodbye():
                others = sorted(self._jobs - {connection})
                return [(name, message) for name in (*sorted(self._agents), *others, connection)], False
            case Command(request=request, name="about", args=args):
                address = str(self._facts.config.get("network", {}).get("address", ""))
                said = answer(args, self._facts.versions, address, self._clock, {**self._facts.job, **self._later})
                return [(connection, CommandReply(request=request, ok=True, error="", result=said))], False
            case AgentHello():
                return self._agent_hello(connection, message)
        return [], True

    def remember(self, facts: Mapping[str, Any]) -> None:
        """Facts of the job that were not known at its start, for questions about it."""
        self._later |= facts

    def gone(self, connection: str) -> Sends:
        """A connection has ended."""
        self._jobs.discard(connection)
        return self._tell() if self._agents.pop(connection, None) is not None else []

    def _agent_hello(self, connection: str, hello: AgentHello) -> tuple[Sends, bool]:
        for other in self._agents.values():
            if other.agent_id == hello.agent_id and other.process != hello.process:
                pid, where = other.process.partition("-")[0], other.about.get("address") or "an unknown address"
                text = f"another agent of this job is called {hello.agent_id!r} (at {where}, process {pid})"
                refused = AgentRefused(cause=Cause.CONFIG, reason=f"{text}: give one of them another --host-name")
                return [(connection, refused)], False
        self._agents[connection] = hello
        return [(connection, self._facts), *self._tell()], True

    def _tell(self) -> Sends:
        return [(job, self._present()) for job in sorted(self._jobs)]

    def _present(self) -> AgentCount:
        agents = sorted({hello.agent_id for hello in self._agents.values()})
        return AgentCount(agent_ids=agents, place=self._facts.place)


class ControlServer:
    """Connections, timer, journal and events around one `Coordinator`."""

    def __init__(
        self,
        coordinator: Coordinator,
        switchboard: Switchboard,
        journal: JournalStore,
        events: EventLog,
        token: bytes,
        tls: Tls | None = None,
        tenure: Tenure | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.switchboard = switchboard
        self.tenure = tenure
        self._effects = InOrder(journal, self._act)
        self.events = events
        self.keys = keys_of(token, CONTROL_ROLES)
        self.tls = tls
        self.connections: dict[str, ControlSocket] = {}
        self.strangers: Strangers[ControlSocket] = Strangers(MAX_STRANGERS, wire.HANDSHAKE_TIMEOUT_S)
        self._complaints = Complaints(lambda text: self.warn(Why(Cause.REFUSED, text)))
        self._late: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._prober = PortProber(self.handle)
        run_dir = events.path.parent
        self.standbys = StandbyHosts(run_dir, word_of(run_dir), self._send, lambda: self.files.looked())
        self.files = HeadFiles(run_dir, self.standbys.told)
        self._names = 0
        self._round_ns = 0
        self._timer: tuple[int, asyncio.TimerHandle] | None = None  # the deadline of this timer
        self._frames = wire.Frames()

    def next_name(self) -> str:
        """Name that no other connection of this process has had."""
        self._names += 1
        return f"c{self._names}"

    def handle(self, event: CoordinatorEvent) -> None:
        """Pass an event to the coordinator and carry out its effects."""
        if self.tenure is not None and not self.tenure.sure():
            self.tenure.depose("its lease is over")
        if isinstance(event, Connected):
            self._send(event.connection, TermBegun(term=self.coordinator.job.env.config.hosts.term))
        self._effects.take(self.coordinator.handle(self._arrival_ns(), event))
        self._arm()

    def _act(self, effect: CoordinatorEffect) -> None:
        match effect:
            case Send(name, message):
                self._send(name, message)
            case Knows(name, plan):
                if name in self.connections:
                    self.connections[name].knows(plan)
            case Close(name, reason, foul):
                if foul and name in self.connections:
                    self.refuse(self.connections[name].peer, reason)
                self._end(name)
            case ProbePort():
                self._prober.probe_port(effect)
            case Remember(facts):
                remember(self.events.path.parent, facts)
                self.switchboard.remember(facts)
            case Report(kind, fields):
                if kind == "recovery_completed":
                    fields = timed(fields, time.time_ns())
                self.events.write(kind, **fields)

    def received(self, name: str, message: AnyMessage) -> None:
        permitted = not self.coordinator.refusal(name, message)
        if permitted:
            if self.standbys.take(name, message):
                return
            answers = self.files.take(name, message)
            if answers is not None:
                self._hand_on(answers)
                if self._looking is None:
                    self._send_pages()
                return
            sends, for_coordinator = self.switchboard.take(name, message)
            self._hand_on(sends)
            if not for_coordinator:
                return
        self.handle(Received(name, message, permitted))

    def lost(self, name: str) -> None:
        """Take in the end of a client's connection."""
        self.connections.pop(name, None)
        self.standbys.gone([name])
        self._hand_on([*self.switchboard.gone(name), *self.files.gone(name)])
        self.handle(Disconnected(name))

    def _send_pages(self) -> None:
        """Send changed pages now and then, while there is a host with a directory of its own."""
        there = bool(self.files.apart)
        if there:
            self._hand_on(self.files.changed_pages())
        self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._send_pages) if there else None

    def _hand_on(self, sends: Sends) -> None:
        for name, message in sends:
            self._send(name, message)
            if isinstance(message, AgentRefused):
                self._end(name)

    def _send(self, name: str, message: AnyMessage) -> None:
        if name in self.connections:
            self.connections[name].send(message, self._frames)

    def _end(self, name: str) -> None:
        if name in self.connections:
            self.connections[name].end()

    def _arrival_ns(self) -> int:
        """The time at which the events of this round of the loop were found waiting.

        Handling a thousand hellos takes seconds. If each event got the time of its own handling, a heartbeat that waits
        behind them would seem late. So the whole round gets one time, and the coordinator sees the gap between two
        rounds as an absence of its own.
        """
        if self._round_ns == 0:
            self._round_ns = time.monotonic_ns()
            asyncio.get_running_loop().call_soon(self._end_round)
        return self._round_ns

    def _end_round(self) -> None:
        self._round_ns = 0

    def refuse(self, peer: str, reason: str) -> None:
        """Count a refused connection, and warn now and then."""
        self._complaints.refused(peer, reason, time.monotonic())

    def arrived(self, stranger: ControlSocket) -> None:
        """Take in a new stranger; if there are too many, one that has been there for long is turned away."""
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

    def warn(self, why: Why) -> None:
        warn(self.events, why)

    def _arm(self) -> None:
        deadline_ns = self.coordinator.next_deadline_ns
        if self._timer is not None:
            if self._timer[0] == deadline_ns:
                return
            self._timer[1].cancel()
            self._timer = None
        if deadline_ns is not None:
            delay_s = max(0.0005, (deadline_ns - time.monotonic_ns()) / 1e9)
            self._timer = deadline_ns, asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.handle(Tick())


class ControlSocket(asyncio.Protocol):
    """One socket: first a stranger, then a client with a role. Data of strangers is not decoded.

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
        self._told: Plan | None = None
        self._here = ""
        self.host = "?"
        self.peer = "?"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, which is no subclass of it
        peer = transport.get_extra_info("peername") or ("?", 0)
        self.host, self.peer = str(peer[0]), f"{peer[0]}:{peer[1]}"
        self._here = wire.address_text(transport.get_extra_info("sockname"))
        tls = self._server.tls
        there = wire.address_text(peer) if peer[1] else ""  # the socket may be gone again
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

    def send(self, message: AnyMessage, frames: wire.Frames) -> None:
        """Queue a message. A client that does not read is cut off beyond `MAX_UNSENT_BYTES`; it will reconnect."""
        transport, seals = self._transport, self._seals
        if transport is None or seals is None or transport.is_closing():
            return
        said, self._told = frames.of(message, self._told)
        self._write(*(part for data, digest in said for part in (data, seals.tag(data, digest=digest))))
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._server.refuse(self.peer, f"more than {MAX_UNSENT_BYTES} bytes wait for it to read")
            transport.abort()

    def knows(self, plan: Plan) -> None:
        """Note that the other end has this plan."""
        self._told = self._told or plan

    def end(self) -> None:
        """Close after the queued messages have left."""
        if self._transport is not None:
            self._transport.close()

    def _begin_tls(self, data: bytes) -> bytes:
        """Take a stranger's TLS data; a stranger costs no TLS state before its first bytes. Returns the decrypted
        data."""
        tls = self._server.tls
        if tls is None or self._transport is None:
            return b""
        pipe = self._pipe = self._pipe or tls.pipe()
        try:
            data = pipe.feed(data)
        finally:  # a refusal sends an alert, too
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
            self._transport.writelines(parts)
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
            raise ProtocolError(f"expected a certificate from a client with the role {seals.role!r}, got none")
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
        self._server.strangers.leave(self)
        self._server.refuse(self.peer, reason)
        if self._transport is None:
            return
        if self._pipe is not None:
            self._transport.close()  # after the TLS alert has left
        else:
            self._transport.abort()


async def serve(place: Post) -> None:
    """Run the server until the process is ended."""
    run_dir = place.run_dir
    keep_to(run_dir)
    job = read_json(run_dir / JOB_FILE)
    config = load_config([(JOB_FILE, job["config"])])
    host = place.host or config.network.address
    token = wire.read_token(run_dir / TOKEN_FILE)
    shown = shown_by(config.security.tls, token, host)
    directory = led_directory(run_dir, place.copying_host, token, Tls.of(shown), config.control.lease_s)
    own = EventLog(run_dir / (OWN_FOLDER if place.copying_host else "") / EVENTS_FILE)  # nobody writes into a copy
    server: ControlServer | None = None
    ports = parse_ports(config.network.ports)
    listening.keep_within(ports)

    def accepted() -> ControlSocket:
        check(server is not None, "the coordinator accepts no client before it has read the journal")
        return ControlSocket(cast(ControlServer, server))

    def listen(port: int) -> Coroutine[Any, Any, asyncio.Server]:
        loop, where = asyncio.get_running_loop(), place.host or config.network.listen or host
        if port == 0 and ports is not None and not is_loopback(where):
            return loop.create_server(accepted, sock=listening.listen(where, _BACKLOG), start_serving=False)
        return loop.create_server(accepted, where, port, backlog=_BACKLOG, start_serving=False)

    try:
        listener = await listen(place.port)
    except OSError:
        if place.port == 0:
            raise
        listener = await listen(0)  # another program took the port; clients read the new one from the address file
    for one in listener.sockets:  # the connections that it accepts have that from it
        notice_silence(one, CONTROL_SILENT_S)
    bound = listener.sockets[0].getsockname()
    where = address_of(host, bound[1], *((config.security.tls.mode, shown.ca) if shown is not None else ()))
    tenure, journal = await open_journal(place, config, token, where, own, directory)
    term = journal.fence()
    try:
        lacking = directory.taken(config.checkpoint.disk.path)
    except OSError as error:
        return await decline(cast(Tenure, tenure), own, error)
    events = EventLog(run_dir / EVENTS_FILE)
    sudden = tenure is not None and tenure.sudden
    rules = coordinator_config(config, term, scripted_strikes(job), job, sudden=sudden)
    told = await asyncio.to_thread(last_generation, events.path) if journal.entries else None
    coordinator = Coordinator(rules, journal.entries, told)
    board = Switchboard(job_facts(run_dir, job, 0 if place.owner else place.parent))
    server = ControlServer(coordinator, board, journal, events, token, Tls.of(shown), tenure)
    await listener.start_serving()
    known = asyncio.get_running_loop().create_task(make_known(run_dir / COORDINATOR_FILE, where, events))
    await asyncio.sleep(0)  # it was tried once before anything else
    if journal.entries and coordinator.job.progress.ended is None:
        report_restart(events, coordinator, journal, place)
    elif coordinator.job.progress.ended is not None:
        report_end(events, coordinator.job.progress.ended)
    if isinstance(journal, EtcdStore):
        journal.end_after(server.standbys.caught_up)
    if lacking:
        server.warn(Why(Cause.LEASE, lacking))
    server.handle(Tick())
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)
    await known
    await asyncio.Event().wait()


def report_restart(events: EventLog, coordinator: Coordinator, journal: JournalStore, place: Post) -> None:
    """Write the event that this coordinator continues the work of another."""
    now_ns = time.time_ns()
    down_ns = place.down_since_unix_ns
    where = f" on {place.host}, in place of one on another host," if place.host and not down_ns else ""
    events.write(
        "coordinator_restarted",
        time_unix_ns=now_ns,
        generation=coordinator.status().get("generation"),
        pid=os.getpid(),
        cause=Cause.LEASE if where else place.cause,
        reason=f"continues{where} from its journal of {len(journal.entries)} entries{journal.notes}",
        downtime_s=(now_ns - down_ns) / 1e9 if down_ns else None,
        host=place.host or None,
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="everstep.runtime.lead.coordinator_main")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--parent", type=int, default=0, help="exit with this process, its parent")
    parser.add_argument("--down-since", type=int, default=0, help="time of the predecessor's death, Unix nanoseconds")
    parser.add_argument("--cause", default="", help="cause of the predecessor's death")
    parser.add_argument("--host", default="", help="address to listen on instead of the config's")
    parser.add_argument("--owner", default="", help="stand by for the job's lease")
    parser.add_argument("--job", default="", help="name of the job in etcd")
    parser.add_argument("--copying-host", default="", help="name of this host, whose directory is a copy of the job's")
    parser.add_argument("--term", type=int, default=0, help="number of the takeover by which this host leads")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the job's process, which ends it in order
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler may send its notice to all processes
    if arguments.parent:
        die_with_parent(arguments.parent)
    raise_descriptor_limit()
    try:
        given = vars(arguments)
        down = {"down_since_unix_ns": given.pop("down_since"), "cause": Cause.read(given.pop("cause"))}
        uvloop.run(serve(Post(**given, **down)))
    except JournalTaken as error:
        say(str(error))
        return MOVED
    except (EverstepError, OSError, ValueError, KeyError) as error:
        print(f"everstep coordinator: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
