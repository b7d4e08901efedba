"""Worker processes that hold a transport and do as they are told; a control thread in each serves aborts."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.base.ports import Node, Tag, Transport
from everstep.exact.layout import BLOCK_ELEMENTS, Entry, GradientLayout, UnitRange
from everstep.parallel.group import GroupTransport
from everstep.parallel.shared_memory import SharedMemoryTransport
from everstep.parallel.transport_kinds import ControlStore
from everstep.placement.tree import children, cover, fold
from process_resources import resources

LANES = 8
TIMEOUT_S = 60.0


def shape(blocks: int) -> GradientLayout:
    n = blocks * BLOCK_ELEMENTS
    return GradientLayout((Entry("w", 0, "param", (n,), n, 0, (1,), "float32"),), (UnitRange(0, n, n),), n)


def leaf(blocks: int, step: int, lane: int) -> torch.Tensor:
    return torch.randn(blocks * BLOCK_ELEMENTS, generator=torch.Generator().manual_seed(step * 1000 + lane))


def node_sum(blocks: int, step: int, node: Node) -> torch.Tensor:
    if node.hi - node.lo == 1:
        return leaf(blocks, step, node.lo)
    left, right = children(node)
    return node_sum(blocks, step, left) + node_sum(blocks, step, right)


def reference(blocks: int, step: int) -> bytes:
    lanes = {lane: leaf(blocks, step, lane) for lane in range(LANES)}
    return fold(LANES, lanes, torch.add).numpy().tobytes()


class FolderStore:
    """Keys as files of a folder, for a `ControlStore`: what the control connection is in production."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.superseded = threading.Event()

    def set_key(self, key: str, value: bytes) -> None:
        path = self._folder / key.replace("/", "_")
        path.with_suffix(".new" + str(os.getpid())).write_bytes(value)
        path.with_suffix(".new" + str(os.getpid())).rename(path)

    def get_keys(self, keys: list[str]) -> list[bytes] | None:
        paths = [self._folder / key.replace("/", "_") for key in keys]
        while not all(path.exists() for path in paths):
            if self.superseded.wait(0.001):
                return None
        return [path.read_bytes() for path in paths]


class Hand:
    """Inside a worker: one method per order."""

    def __init__(self, kind: str, worker_id: int, blocks: int, folder: Path) -> None:
        torch.set_num_threads(1)
        self.key = WorkerKey(worker_id, 0)
        self.blocks = blocks
        self.files = FolderStore(folder)
        self.store = ControlStore(self.files.set_key, self.files.get_keys, self.files.superseded.is_set)
        self.plan: Plan | None = None
        self.waits = 0
        self.transport: Transport
        layout = shape(blocks)
        if kind == "shm":
            self.transport = SharedMemoryTransport(self.key, layout, LANES, self.tick, record_bytes=1 << 16)
        else:
            self.transport = GroupTransport(self.key, layout, LANES, self.store, self.tick, key=b"k" * 32)

    def tick(self) -> None:
        self.waits += 1

    def hello(self) -> Member:
        return Member(self.key.worker_id, 0, "here", os.getpid(), "127.0.0.1:1", self.transport.segment)

    def open(self, plan: Plan) -> float:
        begin = time.monotonic()
        self.files.superseded.clear()
        self.plan = plan
        self.transport.open(plan)
        return time.monotonic() - begin

    def fill(self, step: int) -> None:
        self.presence = {}
        for node in cover(self.plan.lanes_of(self.key.worker_id), LANES):
            self.transport.node(step, node).copy_(node_sum(self.blocks, step, node))
            self.presence[node] = b"\x01"

    def reduce(self, step: int) -> bytes:
        self.fill(step)
        reduced = self.transport.reduce(step, self.presence)
        return torch.cat([piece.data for piece in reduced.pieces]).numpy().tobytes()

    def keep(self, step: int) -> None:
        """Reduce, and hold on to the result as it lies."""
        self.fill(step)
        self.held = self.transport.reduce(step, self.presence)

    def kept(self) -> bytes:
        return torch.cat([piece.data for piece in self.held.pieces]).numpy().tobytes()

    def reduce_often(self, first: int, last: int) -> int:
        """Reduces cheap gradients until told to leave; returns the last step whose result was complete and right.

        A result counts once all have said that they have theirs: who has been stopped may find another one there.
        """
        done = first - 1
        for step in range(first, last):
            presence = {}
            for node in cover(self.plan.lanes_of(self.key.worker_id), LANES):
                self.transport.node(step, node).fill_(float((node.hi - node.lo) * step))
                presence[node] = b"\x01"
            reduced = self.transport.reduce(step, presence)
            right = all(bool((piece.data == LANES * step).all()) for piece in reduced.pieces)
            self.transport.exchange(Tag("decide", step, 0), b"")
            if not right:
                raise AssertionError(f"step {step}: wrong result")
            done = step
        return done

    def exchange(self, tag: Tag, payload: bytes) -> dict[int, bytes]:
        return self.transport.exchange(tag, payload)

    def resources(self) -> dict[str, int]:
        """Of this process, garbage collected first."""
        import gc

        gc.collect()
        return resources()

    def close(self) -> None:
        self.transport.close()


def serve(kind: str, worker_id: int, blocks: int, folder: str, connection: Connection) -> None:
    """The worker process: orders run in the main thread, aborts in the control thread."""
    hand = _hand(kind, worker_id, blocks, Path(folder))
    orders: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()

    def control() -> None:
        while True:
            try:
                name, args = connection.recv()
            except EOFError:
                os._exit(0)
            if name == "abort":
                hand.files.superseded.set()
                hand.transport.abort(*args)
            elif name == "waits":
                connection.send(("waits", hand.waits))
            else:
                orders.put((name, args))

    threading.Thread(target=control, daemon=True).start()
    while (order := orders.get()) is not None:
        name, args = order
        try:
            result: object = getattr(hand, name)(*args)
        except Exception as error:
            error.__notes__ = [traceback.format_exc()]
            result = error
        connection.send((name, result))


def _hand(kind: str, worker_id: int, blocks: int, folder: Path) -> Any:
    if not kind.startswith("staged-"):
        return Hand(kind, worker_id, blocks, folder)
    from parallel_stages import StagedHand  # it imports this module

    return StagedHand(kind, worker_id, blocks, folder)


class Crew:
    """The test's side: processes 0..n-1, more on demand."""

    def __init__(self, kind: str, blocks: int, folder: Path) -> None:
        self.kind = kind
        self.blocks = blocks
        self.folder = folder
        self.members: dict[int, Member] = {}
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "everstep.parallel.staged"])
        self._processes: dict[int, Any] = {}
        self._connections: dict[int, Connection] = {}

    def hire(self, *ids: int) -> None:
        for i in ids:
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=serve, args=(self.kind, i, self.blocks, str(self.folder), there), daemon=True
            )
            process.start()
            there.close()
            self._processes[i], self._connections[i] = process, here
            self.tell(i, "hello")
        for i in ids:
            self.members[i] = self.result(i)

    def plan(self, generation: int, ids: list[int]) -> Plan:
        seats = []
        for k, i in enumerate(ids):
            seats.append(Seat(i, 0, "active", tuple(range(k * LANES // len(ids), (k + 1) * LANES // len(ids)))))
        return Plan(generation, "a test", tuple(self.members[i] for i in ids), tuple(seats), LANES)

    def tell(self, worker_id: int, name: str, *args: object) -> None:
        self._connections[worker_id].send((name, args))

    def result(self, worker_id: int) -> Any:
        """Of the last order; exceptions are returned."""
        assert self._connections[worker_id].poll(TIMEOUT_S), f"worker {worker_id} does not answer"
        return self._connections[worker_id].recv()[1]

    def all(self, ids: list[int], name: str, *args: object) -> list[Any]:
        for i in ids:
            self.tell(i, name, *args)
        return [self.result(i) for i in ids]

    def open(self, generation: int, ids: list[int]) -> Plan:
        plan = self.plan(generation, ids)
        took = self.all(ids, "open", plan)
        assert all(isinstance(t, float) for t in took), took
        return plan

    def until_waiting(self, worker_id: int, more: int = 5) -> None:
        """Until a worker has ticked some times: it is inside a transfer."""
        self.tell(worker_id, "waits")
        first = self.result(worker_id)
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            self.tell(worker_id, "waits")
            if self.result(worker_id) >= first + more:
                return
            time.sleep(0.002)
        raise AssertionError(f"worker {worker_id} never waited")

    def signal(self, worker_id: int, number: signal.Signals) -> None:
        process = self._processes[worker_id]
        os.kill(process.pid, number)
        if number == signal.SIGKILL:
            process.join(TIMEOUT_S)

    def dismiss(self, worker_id: int) -> None:
        self.signal(worker_id, signal.SIGKILL)
        self._connections.pop(worker_id).close()
        self._processes.pop(worker_id).close()

    def close(self) -> None:
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
            process.join(TIMEOUT_S)
        for connection in self._connections.values():
            connection.close()
