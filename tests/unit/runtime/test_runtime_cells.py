"""A worker of several processes on its host: rows, samples, logs, commands, and what ends it."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.base.cell_keys import MAX_RANKS
from everstep.base.errors import InvariantViolation, ProtocolError
from everstep.base.plan import Rank
from everstep.protocol.messages import WorkerLife
from everstep.runtime.host import cell as channels
from everstep.runtime.host.agent_link import Pulses
from everstep.runtime.host.board import ROW_BYTES, Board
from everstep.runtime.host.cell import Head, Limb, LimbLost
from everstep.runtime.host.collector import Collector, Sampler, process_usage
from everstep.runtime.host.fork_server import ForkedCell, first_to_go
from everstep.runtime.link.context import WorkerContext

KILLED, FAILED, DONE = int(signal.SIGKILL), 1 << 8, 0


# ---- who is to blame


@pytest.mark.parametrize(
    ("found", "first"),
    [
        ({0: DONE}, 0),
        ({0: KILLED}, 0),
        ({1: DONE}, None),
        ({1: DONE, 2: DONE}, None),
        ({2: KILLED}, 2),
        ({0: FAILED, 1: KILLED}, 1),
        ({0: KILLED, 1: DONE}, 0),
        ({0: KILLED, 2: FAILED}, 0),
        ({0: FAILED, 2: FAILED, 1: DONE}, 2),
        ({0: DONE, 1: KILLED}, 0),
    ],
)
def test_who_ended_a_cell(found: dict[int, int], first: int | None) -> None:
    assert first_to_go(found) == first


def test_the_first_death_counts_and_the_others_follow() -> None:
    cell = ForkedCell(3, 1, {100: 0, 101: 1, 102: 2})
    assert cell.died({102: DONE}, 5) == []
    assert cell.status is None and set(cell.ranks) == {100, 101}
    assert cell.died({101: FAILED}, 6) == [100]
    assert cell.died({100: KILLED}, 7) == []
    assert not cell.ranks
    assert (cell.cell_rank, cell.status, cell.unix_ns) == (1, FAILED, 6)


# ---- rows


def test_each_rank_has_a_row_and_the_slowest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000]
    monkeypatch.setattr("everstep.runtime.host.board._monotonic_ns", lambda: now[0])
    board = Board.create(3)
    board.begin(1, 4, 3)
    head, *limbs = (board.row(1, cell_rank) for cell_rank in range(3))
    now[0] = 2_000
    head.set(step=7, phase="update", samples=64)
    head.sent("reduce", 10)
    limbs[0].sent("reduce", 5)
    limbs[0].tick()
    now[0] = 3_000
    head.tick()
    limbs[0].tick()
    pulse = board.read(1)
    assert (pulse.step, pulse.phase, pulse.samples, pulse.incarnation) == (7, "update", 64, 4)
    assert (pulse.slowest, pulse.beat_ns, pulse.sent_bytes[0]) == (2, 1_000, 15)
    limbs[1].tick()
    now[0] = 4_000
    limbs[0].tick()
    limbs[1].tick()
    assert (board.read(1).slowest, board.read(1).beat_ns) == (0, 3_000)
    assert board.read(0).counter == board.read(2).counter == 0


def test_a_worker_of_one_process_has_no_slowest_rank() -> None:
    board = Board.create(2)
    board.begin(1, 0, 1)
    assert board.read(1) == board.row(1).read() and board.read(1).slowest is None


def test_a_row_of_a_cell_from_another_process() -> None:
    board = Board.create(2)
    pid = os.fork()
    if pid == 0:
        Board.attach(board.fd).row(1, 2).set(step=9)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert board.row(1, 2).read().step == 9
    assert os.fstat(board.fd).st_size == 2 * MAX_RANKS * ROW_BYTES
    with pytest.raises(InvariantViolation):
        board.row(0, MAX_RANKS)


def test_a_limb_that_stands_still_makes_the_worker_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr("everstep.runtime.host.board._monotonic_ns", lambda: now[0])
    monkeypatch.setattr("everstep.runtime.host.agent_link.time.monotonic_ns", lambda: now[0])
    board = Board.create(1)
    board.begin(0, 0, 2)
    life = WorkerLife(worker_id=0, incarnation=0, pid=1, limbs=(2,))
    now[0] = 3_000_000_000
    board.row(0).set(step=2, phase="forward")
    (pulse,) = Pulses(board).of([life], 0.0)
    assert (pulse.still_ms, pulse.slowest, pulse.step, pulse.phase) == (3000, 1, 2, "forward")


# ---- samples and logs


def test_what_a_worker_spends_is_the_sum_over_its_ranks(tmp_path: Path) -> None:
    board = Board.create(1)
    board.begin(0, 0, 3)
    gone = 1 << 22
    life = WorkerLife(worker_id=0, incarnation=0, pid=os.getpid(), limbs=(os.getpid(), gone))
    sampler = Sampler(tmp_path, "h", board, lambda: [life], 3600.0)
    (worker,) = sampler.line(5)["workers"]
    sampler.close()
    usage = process_usage(os.getpid())
    assert usage is not None
    assert worker["rss_bytes"] > 1.5 * usage[1] and worker["cpu_s"] > 1.5 * usage[0]
    assert (worker["pid"], worker["pids"]) == (os.getpid(), [os.getpid(), os.getpid(), gone])


def test_what_a_limb_prints_is_its_workers_with_its_own_pid(tmp_path: Path) -> None:
    board = Board.create(1)
    board.begin(0, 2, 2)
    board.row(0).set(step=4, generation=3)
    board.row(0).set_pid(70)
    board.row(0, 1).set_pid(71)
    collector = Collector(tmp_path, board, 1 << 20, 3)
    for cell_rank, words in enumerate((b"head\n", b"limb\n")):
        out, err = collector.open(0, 2, cell_rank)
        os.write(out, words)
        os.close(out)
        os.close(err)
    collector.close()
    found = [json.loads(line) for line in (tmp_path / "worker-0.jsonl").read_text().splitlines()]
    facts = {(r["message"], r["pid"], r["step"], r["generation"], r["incarnation"]) for r in found}
    assert facts == {("head", 70, 4, 3, 2), ("limb", 71, 4, 3, 2)}


# ---- commands


class Pair:
    """A head with limbs that run in threads of this process."""

    def __init__(self, n_limbs: int) -> None:
        self.board = Board.create(1)
        self.board.begin(0, 0, n_limbs + 1)
        self.ticks = 0
        self.on_tick: Callable[[], object] = lambda: None
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(n_limbs)]
        self.head = Head(self.context(0, n_limbs + 1, [ours.detach() for ours, _ in pairs]), self.tick)
        self.limbs = [Limb(self.context(k, n_limbs + 1, [theirs.detach()])) for k, (_, theirs) in enumerate(pairs, 1)]
        self.ended: list[BaseException | None] = []
        self.threads: list[threading.Thread] = []

    def tick(self) -> None:
        self.ticks += 1
        self.on_tick()

    def context(self, cell_rank: int, size: int, fds: list[int]) -> WorkerContext:
        where = ("/nowhere", 0, 0, "h", "", "", self.board.fd, {}, "task")
        return WorkerContext(*where, cell_rank=cell_rank, cell_size=size, cell_fds=fds)

    def serve(self, k: int, act: dict[str, Callable[..., Any]]) -> None:
        def run() -> None:
            try:
                self.limbs[k].serve(act)
                self.ended.append(None)
            except Exception as error:
                self.ended.append(error)
            finally:
                os.close(self.limbs[k]._head)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def join(self) -> list[BaseException | None]:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()
        return self.ended


@pytest.fixture
def pair() -> Iterator[Callable[[int], Pair]]:
    made: list[Pair] = []

    def make(n_limbs: int) -> Pair:
        made.append(Pair(n_limbs))
        return made[-1]

    yield make
    for one in made:
        one.head.close()
        one.join()
        one.board.close()


def test_limbs_introduce_themselves_obey_and_leave_with_their_head(pair: Callable[[int], Pair]) -> None:
    cell = pair(2)
    sums = [0, 0]

    def add(k: int, number: int) -> int:
        sums[k] += number
        return sums[k]

    for k in range(2):
        cell.serve(k, {"add": lambda number, k=k: add(k, (k + 1) * number)})
    assert cell.head.meet() == (Rank(os.getpid()),) * 2
    assert cell.head.pids == (os.getpid(),) * 3
    assert [cell.head.command("add", number=n) for n in (1, 10)] == [[1, 2], [11, 22]]
    assert cell.board.row(0, 2).read().phase == "idle" and cell.ticks > 0
    cell.head.close()
    assert cell.join() == [None, None]


def test_who_waits_on_either_side_ticks(pair: Callable[[int], Pair]) -> None:
    cell = pair(1)
    before = cell.board.row(0, 1).read().counter
    go = threading.Event()
    cell.serve(0, {"wait": lambda: go.wait(60)})
    cell.head.meet()
    while cell.board.row(0, 1).read().counter < before + 5:
        time.sleep(0.001)
    cell.on_tick = lambda: go.set() if cell.ticks > 3 else None
    assert cell.head.command("wait") == [True]


def test_a_command_that_no_limb_knows(pair: Callable[[int], Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_END_S", 0.0)
    cell = pair(1)
    cell.serve(0, {"update": lambda: None})
    with pytest.raises(LimbLost, match=r"rank 1 of worker 0\.0"):
        cell.head.command("dance")
    (error,) = cell.join()
    assert isinstance(error, ProtocolError) and "'dance'; known: update" in str(error)


def test_a_worker_of_one_process_commands_nobody(pair: Callable[[int], Pair]) -> None:
    alone = pair(0).head
    assert alone.meet() == () and alone.command("update") == [] and alone.pids == (os.getpid(),)


def test_only_a_head_has_a_link_and_only_a_limb_serves() -> None:
    where = ("/nowhere", 3, 1, "h", "", "", -1, {}, "task")
    with pytest.raises(InvariantViolation, match=r"rank 1 of worker 3\.1 is no head"):
        Head(WorkerContext(*where, cell_rank=1, cell_size=2), lambda: None)
    with pytest.raises(InvariantViolation, match="expected 1 sockets"):
        Head(WorkerContext(*where, cell_size=2), lambda: None)
    with pytest.raises(InvariantViolation, match=r"3\.1"):
        Limb(WorkerContext(*where))
