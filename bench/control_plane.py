"""One coordinator process, 1,000 simulated agents over loopback TCP: what heartbeats cost it, how fast plans spread.

    python bench/control_plane.py [--agents 1000] [--workers 8] [--seconds 8] [--evictions 5]

Each agent has so many workers, and each worker a control connection of its own. Measured: the coordinator's share of a
core while every agent sends a heartbeat per second, and the time from an agent's word that a worker died until the last
surviving worker holds the new plan. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from everstep.base.config import load_config, to_dict
from everstep.base.plan import Member, Plan
from everstep.protocol import messages as m
from everstep.protocol.roles import AGENT, WORKER
from everstep.runtime import handshake, wire
from everstep.runtime.address import COORDINATOR_FILE, JOB_FILE, TOKEN_FILE, read_address
from everstep.runtime.handshake import GREETING_BYTES, PROOF_BYTES, Caller, Ends, role_token
from everstep.runtime.process import raise_descriptor_limit

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class Plans:
    """Decodes each distinct plan once: a thousand workers would each decode it on their own machine."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, m.AnyMessage]] = {}
        self._packed: dict[int, tuple[bytes, bytes]] = {}

    def inflate(self, packed: bytes, most_bytes: int) -> bytes:
        known = self._packed.get(len(packed))
        if known is None or known[0] != packed:
            known = self._packed[len(packed)] = (packed, wire.inflate(packed, most_bytes))
        return known[1]

    def decode(self, body: bytes) -> m.AnyMessage:
        if len(body) < 512:
            return m.decode(body)
        known = self._known.get(len(body))
        if known is None or (known[0] is not body and known[0] != body):
            known = self._known[len(body)] = (body, m.decode(body))
        return known[1]


class Digests:
    """Reads each distinct long frame once for its digest, for the same reason."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, bytes]] = {}
        self._read = handshake.frame_digest

    def __call__(self, *parts: bytes | memoryview) -> bytes:
        if len(parts) != 1 or len(parts[0]) < 16 << 10:
            return self._read(*parts)
        known = self._known.get(len(parts[0]))
        if known is None or known[0] != parts[0]:
            known = self._known[len(parts[0])] = (bytes(parts[0]), self._read(*parts))
        return known[1]


class Client:
    """One control connection."""

    def __init__(self, number: int, role: str) -> None:
        self.number = number
        self.role = role
        self.pongs = 0
        self.generation = 0
        self.joined: asyncio.Event = asyncio.Event()

    async def connect(self, host: str, port: int, token: bytes) -> None:
        self.reader, self.writer = await asyncio.open_connection(host, port, limit=wire.MAX_FRAME_BYTES)
        name = f"agent-{self.number}" if self.role == AGENT else f"{self.number}.0"
        key = role_token(token, self.role, name if self.role == WORKER else "")
        sock = self.writer.get_extra_info("socket")
        ends = Ends(wire.address_text(sock.getsockname()), wire.address_text(sock.getpeername()))
        caller = Caller(key, self.role, name, ends)
        self.writer.write(caller.answer(await self.reader.readexactly(GREETING_BYTES)))
        self.seals = caller.accept(await self.reader.readexactly(PROOF_BYTES))

    def send(self, message: m.AnyMessage) -> None:
        self.writer.write(wire.sealed(self.seals, wire.frame(m.encode(message))))


class Bench:
    """All simulated agents and workers."""

    def __init__(self, count: int, each: int, host: str, port: int, token: bytes, pid: int) -> None:
        self.count, self.each, self.host, self.port, self.token, self.pid = count, each, host, port, token, pid
        self.agents = [Client(n, AGENT) for n in range(count)]
        self.workers = [Client(n, WORKER) for n in range(count * each)]
        self.plans = Plans()
        self.live = set(range(count * each))
        self.waiting_for = 1
        self.missing: set[int] = set(self.live)
        self.reached = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        gate = asyncio.Semaphore(50)

        async def connect(client: Client) -> None:
            async with gate:
                await client.connect(self.host, self.port, self.token)

        await asyncio.gather(*(connect(c) for c in self.agents + self.workers))
        for number in range(self.count):
            lives = [m.WorkerLife(worker_id=i, incarnation=0, pid=1) for i in self.of(number)]
            hello = m.AgentHello(agent_id=f"agent-{number}", host=f"host-{number}", workers=lives, slots=self.each)
            self.agents[number].send(hello)
            self.tasks.append(asyncio.create_task(self._agent(self.agents[number])))
        self.tasks.append(asyncio.create_task(self.beat()))
        for number in range(self.count * self.each):
            member = Member(number, 0, f"host-{number // self.each}", 1, f"10.0.0.1:{10000 + number}", "segment")
            self.workers[number].send(m.WorkerHello(member=member, step=0, plan=None))
            self.tasks.append(asyncio.create_task(self._worker(self.workers[number])))

    def of(self, agent: int) -> range:
        """The workers of an agent."""
        return range(agent * self.each, (agent + 1) * self.each)

    async def beat(self) -> None:
        """A heartbeat per agent and second, spread evenly."""
        start = time.monotonic()
        seq = 0
        while True:
            number = seq % self.count
            due = start + seq / self.count
            now = time.monotonic()
            if due > now:
                await asyncio.sleep(due - now)
            agent = self.agents[number]
            pulses = [
                m.WorkerPulse(worker_id=i, incarnation=0, step=5, phase="forward", still_ms=3, samples_per_s=9.5)
                for i in self.of(number)
                if i in self.live
            ]
            agent.send(m.Heartbeat(agent_id=f"agent-{number}", seq=seq, rtt_ms=0.2, workers=pulses))
            seq += 1

    async def _agent(self, client: Client) -> None:
        reader = wire.FrameReader(client.seals)
        while data := await client.reader.read(1 << 16):
            client.pongs += sum(isinstance(m.decode(body), m.Pong) for body in reader.feed(data))

    async def _worker(self, client: Client) -> None:
        reader = wire.FrameReader(client.seals, self.plans.inflate)
        while data := await client.reader.read(1 << 20):
            for body in reader.feed(data):
                message = self.plans.decode(body)
                if isinstance(message, m.PlanNow | m.PlanPrepared):
                    self._plan(client, message.plan)

    def _plan(self, client: Client, plan: Plan) -> None:
        client.generation = plan.generation
        entered = m.GenerationEntered(
            worker_id=client.number, incarnation=0, generation=plan.generation, step=1, phases_ms={}
        )
        client.send(entered)
        if plan.generation >= self.waiting_for:
            self.missing.discard(client.number)
            if not self.missing:
                self.reached.set()

    async def evict(self, victim: int) -> float:
        """Seconds from the agent's word until the last survivor holds the new plan."""
        self.live.discard(victim)
        self.waiting_for = max(c.generation for c in self.workers) + 1
        self.missing = set(self.live)
        self.reached = asyncio.Event()
        message = m.WorkerExited(
            agent_id=f"agent-{victim // self.each}",
            worker_id=victim,
            incarnation=0,
            reason="killed by SIGKILL",
            died_unix_ns=time.time_ns(),
        )
        start = time.perf_counter()
        self.agents[victim // self.each].send(message)
        await asyncio.wait_for(self.reached.wait(), 60)
        return time.perf_counter() - start


async def measure(bench: Bench, seconds: float, evictions: int) -> dict[str, object]:
    """The whole conversation."""
    handshake.frame_digest = Digests()  # type: ignore[assignment]
    start = time.perf_counter()
    await bench.start()
    await asyncio.wait_for(bench.reached.wait(), 300)
    first_plan_s = time.perf_counter() - start
    await asyncio.sleep(2.0)
    pongs, cpu, since = sum(a.pongs for a in bench.agents), cpu_seconds(bench.pid), time.perf_counter()
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - since
    beats = sum(a.pongs for a in bench.agents) - pongs
    share = (cpu_seconds(bench.pid) - cpu) / elapsed
    changes = []
    for n in range(evictions):
        changes.append(await bench.evict(n * (bench.count * bench.each // evictions) + 1))
        await asyncio.sleep(0.5)
    for task in bench.tasks:
        task.cancel()
    return {
        "agents": bench.count,
        "workers": bench.count * bench.each,
        "heartbeats_per_s": round(beats / elapsed, 1),
        "coordinator_core_share": round(share, 4),
        "coordinator_us_per_heartbeat": round(share / max(1.0, beats / elapsed) * 1e6, 1),
        "generation_change_s": {
            "median": round(statistics.median(changes), 4),
            "worst": round(max(changes), 4),
            "all": [round(c, 4) for c in changes],
        },
        "connect_to_first_plan_s": round(first_plan_s, 3),
        "targets": {"coordinator_core_share": 0.5, "generation_change_s": 1.0},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8, help="of each agent")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--evictions", type=int, default=5)
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
        command = [sys.executable, "-m", "everstep.runtime.coordinator_main", str(run_dir)]
        coordinator = subprocess.Popen([*command, "--parent", str(os.getpid())])
        try:
            while not (run_dir / COORDINATOR_FILE).exists() and coordinator.poll() is None:
                time.sleep(0.01)
            address = read_address(run_dir / COORDINATOR_FILE)
            bench = Bench(arguments.agents, arguments.workers, address.host, address.port, token, address.pid)
            print(json.dumps(uvloop.run(measure(bench, arguments.seconds, arguments.evictions)), indent=2))
        finally:
            coordinator.kill()
            coordinator.wait()


if __name__ == "__main__":
    main()
