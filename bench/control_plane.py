"""One coordinator process, 1,000 simulated agents over loopback TCP: what heartbeats cost it, how fast plans spread.

    python bench/control_plane.py [--agents 1000] [--workers 8] [--seconds 8] [--evictions 5] [--processes 2]

Each agent has so many workers, and each worker a control connection of its own. Measured: the coordinator's share of a
core while every agent sends a heartbeat per second, the time until the last worker has the first plan, and the time
from an agent's word that a worker died until the last surviving worker holds the new plan. Then the coordinator is
killed, and one worker dies meanwhile: from the start of the next coordinator until all others have come back to it and
hold the plan without that worker; once more with a journal that lacks the newest plan.

Agents and workers are shared out to several processes, each of which decodes every distinct plan once: what 8,000
workers do on 1,000 machines would otherwise be all that is measured. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import uvloop

from everstep.base.config import load_config, to_dict
from everstep.base.plan import Member, Plan
from everstep.protocol import messages as m
from everstep.protocol import telling
from everstep.protocol.following import PlanAsked, PlanName, PlanShown, name_of
from everstep.protocol.roles import AGENT, WORKER
from everstep.runtime.link import handshake, wire
from everstep.runtime.link.address import COORDINATOR_FILE, JOB_FILE, JOURNAL_FILE, TOKEN_FILE, read_address
from everstep.runtime.link.handshake import GREETING_BYTES, PROOF_BYTES, Caller, Ends, role_token
from everstep.runtime.process import raise_descriptor_limit

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PATIENCE_S = 300.0
Inflate = Callable[[bytes, int], bytes]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class Plans:
    """Decodes each distinct plan once: a thousand workers would each decode it on their own machine."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, m.AnyMessage]] = {}
        self._packed: dict[int, tuple[bytes, bytes]] = {}
        self._heard: dict[tuple[int, int], tuple[m.PlanTold, Plan | None, Plan]] = {}
        self._hear = telling.heard

    def inflate(self, packed: bytes, most_bytes: int) -> bytes:
        known = self._packed.get(len(packed))
        if known is None or known[0] != packed:
            known = self._packed[len(packed)] = (packed, wire.inflate(packed, most_bytes))
        return known[1]

    def decode(self, body: bytes) -> m.AnyMessage:
        known = self._known.get(len(body))
        if known is None or (known[0] is not body and known[0] != body):
            known = self._known[len(body)] = (body, m.decode(body))
        return known[1]

    def heard(self, saying: m.PlanTold, before: Plan | None) -> Plan:
        key = id(saying), id(before)
        if key not in self._heard:
            self._heard[key] = (saying, before, self._hear(saying, before))
        return self._heard[key][2]


class Digests:
    """Reads each distinct long frame once for its digest, for the same reason."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, bytes]] = {}
        self._read = handshake.frame_digest

    def __call__(self, *parts: bytes | memoryview) -> bytes:
        if len(parts) != 1 or len(parts[0]) < 16 << 10:
            return self._read(*parts)
        frame = bytes(parts[0])  # a view is compared byte by byte, which takes longer than to read it for its digest
        known = self._known.get(len(frame))
        if known is None or known[0] != frame:
            known = self._known[len(frame)] = (frame, self._read(frame))
        return known[1]


class Line(asyncio.Protocol):
    """A control connection, from the handshake on. Without asyncio's streams, which copy what comes twice more and wake
    a task for it. name: of who speaks; take: called with the body of each frame."""

    def __init__(self, key: bytes, role: str, name: str, inflate: Inflate, take: Callable[[bytes], None]) -> None:
        self._who = key, role, name
        self._inflate, self._take = inflate, take
        self._said, self._answered = b"", False
        self._reader: wire.FrameReader | None = None
        self.open = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        here, there = (wire.address_text(transport.get_extra_info(end)) for end in ("sockname", "peername"))
        self._caller = Caller(*self._who, Ends(here, there))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.open.done():
            self.open.set_exception(ConnectionError("the connection ended before it was open"))

    def data_received(self, data: bytes) -> None:
        if self._reader is None:
            data = self._handshake(data)
        for body in () if self._reader is None else self._reader.feed(data):
            self._take(body)

    def _handshake(self, data: bytes) -> bytes:
        """Returns what follows it."""
        said = self._said + data
        if not self._answered and len(said) >= GREETING_BYTES:
            self.transport.write(self._caller.answer(said[:GREETING_BYTES]))
            self._answered, said = True, said[GREETING_BYTES:]
        self._said = said
        if not self._answered or len(said) < PROOF_BYTES:
            return b""
        self._seals = self._caller.accept(said[:PROOF_BYTES])
        self._reader = wire.FrameReader(self._seals, self._inflate)
        self.open.set_result(None)
        return said[PROOF_BYTES:]

    def send(self, message: m.AnyMessage) -> None:
        self.transport.write(wire.sealed(self._seals, wire.frame(m.encode(message), deflate=True)))


class Client:
    """An agent or a worker, with its newest connection."""

    def __init__(self, number: int, role: str, inflate: Inflate, take: Callable[[Client, bytes], None]) -> None:
        self.number = number
        self.role = role
        self.pongs = 0
        self.heard = telling.Listener()
        self.plan: Plan | None = None
        self._inflate, self._take = inflate, partial(take, self)

    async def connect(self, host: str, port: int, token: bytes) -> None:
        name = f"host-{self.number}" if self.role == AGENT else f"{self.number}.0"
        key = role_token(token, self.role, name if self.role == WORKER else "")
        self.line = Line(key, self.role, name, self._inflate, self._take)
        await asyncio.get_running_loop().create_connection(lambda: self.line, host, port)
        await self.line.open

    def send(self, message: m.AnyMessage) -> None:
        self.line.send(message)


class Place(NamedTuple):
    """What each process of clients needs to know. each: workers of an agent; count: agents in all processes."""

    host: str
    port: int
    token: bytes
    each: int
    count: int


class Crowd:
    """The agents of one process, and their workers. Says what has come of what the main process asks for."""

    def __init__(self, place: Place, agents: Iterable[int], pipe: Connection) -> None:
        self.place, self.pipe = place, pipe
        self.plans = Plans()
        inflate = self.plans.inflate
        self.agents = {n: Client(n, AGENT, inflate, self._agent) for n in agents}
        self.workers = {i: Client(i, WORKER, inflate, self._worker) for n in self.agents for i in self.of(n)}
        telling.heard = self.plans.heard
        handshake.frame_digest = Digests()  # type: ignore[assignment]
        self.live = set(self.workers)
        self.waiting_for = 1
        self.first_at = 0.0
        self.missing = set(self.live)
        self.tasks: list[asyncio.Task[None]] = []
        self.names: dict[int, tuple[Plan, PlanName | None]] = {}

    def of(self, agent: int) -> range:
        """The workers of an agent."""
        return range(agent * self.place.each, (agent + 1) * self.place.each)

    async def run(self) -> None:
        """Do what the main process says until it is gone."""
        asked: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(self.pipe.fileno(), lambda: asked.put_nowait(self.pipe.recv()))
        while True:
            what, given = await asked.get()
            if what == "connect":
                await self.connect()
            elif what == "hello":
                self.say_hello()
            elif what == "reconnect":
                await self.reconnect(*given)
            elif what == "expect":
                self.expect(*given)
            elif what == "evict":
                self.evict(given)
            elif what == "pongs":
                self.pipe.send(sum(client.pongs for client in self.agents.values()))

    async def connect(self) -> None:
        """Connections of all; hellos and heartbeats of the agents."""
        gate = asyncio.Semaphore(50)
        await asyncio.gather(*(self._connect(c, gate) for c in (*self.agents.values(), *self.workers.values())))
        for agent in self.agents.values():
            self._agent_hello(agent)
        self.tasks.append(asyncio.create_task(self.beat()))
        while not all(client.pongs for client in self.agents.values()):
            await asyncio.sleep(0.05)
        self.pipe.send("connected")

    async def _connect(self, client: Client, gate: asyncio.Semaphore) -> None:
        async with gate:
            while True:
                try:
                    return await client.connect(*self.place[:3])
                except ConnectionError:  # it took too long: again, as all clients do
                    await asyncio.sleep(0.1)

    async def reconnect(self, host: str, port: int) -> None:
        """All that live lose their connections, find the next coordinator, and say hello as soon as they have one."""
        for task in self.tasks:
            task.cancel()
        self.place, self.tasks, gate = self.place._replace(host=host, port=port), [], asyncio.Semaphore(50)

        async def again(client: Client) -> None:
            client.line.transport.abort()
            await self._connect(client, gate)
            self._agent_hello(client) if client.role == AGENT else self._worker_hello(client)

        there = [*self.agents.values(), *(self.workers[i] for i in sorted(self.live))]
        await asyncio.gather(*(again(client) for client in there))
        self.tasks.append(asyncio.create_task(self.beat()))
        self.pipe.send(time.monotonic())

    def _agent_hello(self, agent: Client) -> None:
        number, each = agent.number, self.place.each
        live = [i for i in self.of(number) if i in self.live]
        lives = [m.WorkerLife(worker_id=i, incarnation=0, pid=1000 + i) for i in live]
        host = f"host-{number}"
        agent.send(m.AgentHello(agent_id=host, host=host, workers=lives, slots=each, room=each))

    def say_hello(self) -> None:
        """The hellos of all workers."""
        for worker in self.workers.values():
            self._worker_hello(worker)

    def _worker_hello(self, worker: Client) -> None:
        i, number = worker.number, worker.number // self.place.each
        address = f"10.0.{number // 250}.{number % 250}:{10000 + i * 7919 % 50000}"
        member = Member(i, 0, f"host-{number}", 1000 + i, address, f"{i * 2654435761 % 2**32:08x}")
        worker.heard = telling.Listener(worker.plan)
        worker.send(m.WorkerHello(member=member, step=0, follows=self._name(worker.plan)))

    def _name(self, plan: Plan | None) -> PlanName | None:
        """Once for all who follow it, who would each do so on their own machine."""
        if plan is not None and id(plan) not in self.names:
            self.names[id(plan)] = (plan, name_of(plan))
        return None if plan is None else self.names[id(plan)][1]

    async def beat(self) -> None:
        """A heartbeat per agent and second, spread evenly."""
        start, numbers, seq = time.monotonic(), list(self.agents), 0
        while True:
            number = numbers[seq % len(numbers)]
            due = start + seq / len(numbers)
            now = time.monotonic()
            if due > now:
                await asyncio.sleep(due - now)
            pulses = [
                m.WorkerPulse(worker_id=i, incarnation=0, step=5, phase="forward", still_ms=3, samples_per_s=9.5)
                for i in self.of(number)
                if i in self.live
            ]
            beat = m.Heartbeat(agent_id=f"host-{number}", seq=seq, rtt_ms=0.2, workers=pulses)
            self.agents[number].send(beat)
            seq += 1

    def _agent(self, client: Client, body: bytes) -> None:
        client.pongs += isinstance(m.decode(body), m.Pong)

    def _worker(self, client: Client, body: bytes) -> None:
        message = client.heard.take(self.plans.decode(body))
        if isinstance(message, m.PlanNow | m.PlanPrepared):
            self._plan(client, message.plan)
        elif isinstance(message, PlanAsked):
            client.send(PlanShown(worker_id=client.number, incarnation=0, plan=client.plan))

    def _plan(self, client: Client, plan: Plan) -> None:
        entered = m.GenerationEntered(
            worker_id=client.number, incarnation=0, generation=plan.generation, step=1, phases_ms={}
        )
        client.send(entered)
        client.plan = plan
        if plan.generation >= self.waiting_for and self.missing:
            self.first_at = self.first_at or time.monotonic()
            self.missing.discard(client.number)
            if not self.missing:
                self.pipe.send((self.first_at, time.monotonic(), plan.generation))

    def expect(self, generation: int, victim: int) -> None:
        """Wait for this generation, of which the victim is no member."""
        self.live.discard(victim)
        self.waiting_for, self.missing, self.first_at = generation, set(self.live), 0.0
        self.pipe.send("expecting")

    def evict(self, victim: int) -> None:
        """The agent's word that this worker died."""
        message = m.WorkerExited(
            agent_id=f"host-{victim // self.place.each}",
            worker_id=victim,
            incarnation=0,
            reason="killed by SIGKILL",
            died_unix_ns=time.time_ns(),
        )
        self.agents[victim // self.place.each].send(message)


def crowd(place: Place, agents: Iterable[int], pipe: Connection) -> None:
    """A process of clients."""
    raise_descriptor_limit()
    uvloop.run(Crowd(place, agents, pipe).run())


class Crowds:
    """All processes of clients."""

    def __init__(self, place: Place, processes: int) -> None:
        self.pipes: list[Connection] = []
        self.processes = []
        for k in range(processes):
            here, there = multiprocessing.Pipe()
            given = (place, range(k, place.count, processes), there)
            process = multiprocessing.Process(target=crowd, args=given, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def ask(self, what: str, given: object = None) -> None:
        for pipe in self.pipes:
            pipe.send((what, given))

    def answers(self) -> list[Any]:
        found = []
        for pipe in self.pipes:
            if not pipe.poll(PATIENCE_S):
                raise TimeoutError(f"a process of clients has said nothing for {PATIENCE_S:.0f} s")
            found.append(pipe.recv())
        return found

    def pongs(self) -> int:
        self.ask("pongs")
        return sum(self.answers())

    def cpu_seconds(self) -> float:
        return sum(cpu_seconds(process.pid or 0) for process in self.processes)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class Head:
    """The coordinator's process, and the next one."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.start()

    def start(self) -> None:
        self.started_at = time.monotonic()
        command = [sys.executable, "-m", "everstep.runtime.lead.coordinator_main", str(self.run_dir)]
        self.process = subprocess.Popen([*command, "--parent", str(os.getpid())])
        file = self.run_dir / COORDINATOR_FILE
        while self.process.poll() is None and (not file.exists() or read_address(file).pid != self.process.pid):
            time.sleep(0.01)
        self.address = read_address(file)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """The journal loses its newest plan, and what follows it."""
        journal = self.run_dir / JOURNAL_FILE
        lines = journal.read_bytes().splitlines(keepends=True)
        last = max(n for n, line in enumerate(lines) if b'"kind":"plan"' in line)
        journal.write_bytes(b"".join(lines[:last]))


def restart(crowds: Crowds, head: Head, generation: int, victim: int, *, forget: bool) -> dict[str, object]:
    """Kill the coordinator, start the next one, and wait for the plan without the victim."""
    head.kill()
    if forget:
        head.forget()
    crowds.ask("expect", (generation + 1, victim))
    crowds.answers()
    head.start()
    announced_at = time.monotonic()
    crowds.ask("reconnect", (head.address.host, head.address.port))
    answers = [crowds.answers(), crowds.answers()]  # of each: when the last has said hello, and has the plan
    hellos = [one for one in (a for found in answers for a in found) if isinstance(one, float)]
    plans = [one for one in (a for found in answers for a in found) if not isinstance(one, float)]
    return {
        "newest_plan_in_journal": not forget,
        "start_to_listening_s": round(announced_at - head.started_at, 3),
        "start_to_last_hello_s": round(max(hellos) - head.started_at, 3),
        "start_to_last_worker_with_next_plan_s": round(max(last for _, last, _ in plans) - head.started_at, 3),
        "first_to_last_worker_s": round(max(last for _, last, _ in plans) - min(first for first, _, _ in plans), 3),
        "coordinator_cpu_s": round(cpu_seconds(head.process.pid), 2),
        "coordinator_peak_mb": peak_mb(head.process.pid),
        "generation": max(known for _, _, known in plans),
    }


def measure(crowds: Crowds, place: Place, head: Head, seconds: float, evictions: int) -> dict[str, object]:
    """The whole conversation."""
    pid = head.process.pid
    start = time.monotonic()
    crowds.ask("connect")
    crowds.answers()
    connected_at, hello_cpu = time.monotonic(), cpu_seconds(pid)
    clients_cpu = crowds.cpu_seconds()
    crowds.ask("hello")
    first = crowds.answers()
    first_cpu, clients_cpu = cpu_seconds(pid) - hello_cpu, crowds.cpu_seconds() - clients_cpu
    time.sleep(2.0)
    pongs, cpu, since = crowds.pongs(), cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    beats, elapsed = crowds.pongs() - pongs, time.monotonic() - since
    share = (cpu_seconds(pid) - cpu) / elapsed
    changes, spreads, cpus, generation = [], [], [], max(known for _, _, known in first)
    for n in range(evictions):
        victim = n * (place.count * place.each // evictions) + 1
        crowds.ask("expect", (generation + 1, victim))
        crowds.answers()
        said_at, cpu = time.monotonic(), cpu_seconds(pid)
        crowds.pipes[victim // place.each % len(crowds.pipes)].send(("evict", victim))
        reached = crowds.answers()
        cpus.append(cpu_seconds(pid) - cpu)
        changes.append(max(last for _, last, _ in reached) - said_at)
        spreads.append(max(last for _, last, _ in reached) - min(began for began, _, _ in reached))
        generation = max(known for _, _, known in reached)
        time.sleep(2.0)
    peak, restarts = peak_mb(pid), []
    for forget in (False, True):
        restarts.append(restart(crowds, head, generation, 2 + place.each * (1 + forget), forget=forget))
        generation = int(str(restarts[-1]["generation"]))
        time.sleep(2.0)
    return {
        "agents": place.count,
        "workers": place.count * place.each,
        "heartbeats_per_s": round(beats / elapsed, 1),
        "coordinator_core_share": round(share, 4),
        "coordinator_us_per_heartbeat": round(share / max(1.0, beats / elapsed) * 1e6, 1),
        "generation_change_s": {
            "median": round(statistics.median(changes), 4),
            "worst": round(max(changes), 4),
            "all": [round(c, 4) for c in changes],
            "coordinator_cpu_s": [round(c, 2) for c in cpus],
            "first_to_last_worker": [round(c, 4) for c in spreads],
        },
        "agents_connected_s": round(connected_at - start, 3),
        "workers_hello_to_first_plan_s": round(max(last for _, last, _ in first) - connected_at, 3),
        "first_plan_first_to_last_worker_s": round(
            max(last for _, last, _ in first) - min(began for began, _, _ in first), 3
        ),
        "first_plan_coordinator_cpu_s": round(first_cpu, 2),
        "first_plan_clients_cpu_s": round(clients_cpu, 2),
        "restarts": restarts,
        "coordinator_peak_mb": peak,
        "load_average": os.getloadavg()[0],
        "targets": {"coordinator_core_share": 0.5, "generation_change_s": 1.0},
    }


def peak_mb(pid: int) -> int:
    """The most memory that the process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8, help="of each agent")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--evictions", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2, help="of clients")
    arguments = parser.parse_args()
    raise_descriptor_limit()
    workers = arguments.agents * arguments.workers
    settings = {
        "workers": workers,
        "lanes": workers,
        "heartbeat.interval_s": 1.0,
        "heartbeat.floor_s": 60,
        "heartbeat.ceiling_s": 120,
    }
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        token = wire.new_token()
        wire.write_token(run_dir / TOKEN_FILE, token)
        config = to_dict(load_config([("bench", settings)]))
        (run_dir / JOB_FILE).write_text(json.dumps({"config": config}))
        head = Head(run_dir)
        try:
            place = Place(head.address.host, head.address.port, token, arguments.workers, arguments.agents)
            crowds = Crowds(place, arguments.processes)
            try:
                print(json.dumps(measure(crowds, place, head, arguments.seconds, arguments.evictions), indent=2))
            finally:
                crowds.end()
        finally:
            head.kill()


if __name__ == "__main__":
    main()
