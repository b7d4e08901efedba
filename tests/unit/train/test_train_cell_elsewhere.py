"""Two parts of a worker, as on two hosts: each holds its ranges, and has those of the other for a while."""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import queue
import re
import signal
import socket
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from everstep.base.errors import CheckpointCorrupt, CollectiveAborted
from everstep.base.own_pages import own_pages
from everstep.exact.image import Image, Outline, StateEntry
from everstep.exact.snapshot import Snapshot
from everstep.exact.state_memory import StateMemory
from everstep.parallel.cell_memory import CellMemory, SharedPlace
from everstep.parallel.mapping import PAGE
from everstep.runtime.host import cell_doors
from everstep.runtime.host.board import Board
from everstep.runtime.host.cell import CellCommand
from everstep.runtime.host.cell_doors import CellDoor, CellPlan, Deputies, PartLines
from everstep.runtime.link import peer
from everstep.runtime.link.context import WorkerContext
from everstep.runtime.link.peer import PeerConnection, peer_connect
from everstep.runtime.link.silence import LINK_SILENT_S, notice_silence
from everstep.train.cell_deputy import Deputy
from everstep.train.cell_elsewhere import OtherParts, notes_bytes, owned

KEY = b"k" * 32
PARAMETERS, STATE = SharedPlace(PAGE, 4 * PAGE), SharedPlace(5 * PAGE, 4 * PAGE)
NOTES = SharedPlace(9 * PAGE, notes_bytes(1, 2))
FLOATS = PAGE // 4
RUNS = [[(0, FLOATS)], [(FLOATS, 4 * FLOATS)]]
"""Of both: the head's part has a page, the other three."""


def call(address: str, request: dict[str, Any]) -> PeerConnection:
    return peer_connect(address, KEY, request)


class Part:
    """One host's memory, seen by one process."""

    def __init__(self, doors: list[CellDoor], part: int, values: Tensor) -> None:
        plan = CellPlan("0.0", part, tuple(door.address for door in doors), 1)
        self.memory = CellMemory.create(10 * PAGE, part)
        self.parameters = self.memory.tensor(PARAMETERS, torch.float32)
        self.parameters.copy_(values)
        self.state = self.memory.tensor(STATE, torch.float32)
        doors[part].show(0, self.memory)
        doors[part].belong(plan.name)
        ranges = owned(plan, PARAMETERS, RUNS, PARAMETERS.offset + PARAMETERS.size)
        self.lines = PartLines(plan, 0, call)
        self.elsewhere = OtherParts(self.memory, self.lines, [ranges], NOTES)
        self.elsewhere.divide(STATE, RUNS)


@pytest.fixture
def doors() -> Iterator[list[CellDoor]]:
    found = [CellDoor("127.0.0.1", KEY, None) for _ in range(2)]
    yield found
    for door in found:
        door.close()


@pytest.fixture
def parts(doors: list[CellDoor]) -> Iterator[list[Part]]:
    values = torch.arange(4 * FLOATS, dtype=torch.float32)
    found = [Part(doors, part, values) for part in range(2)]
    yield found
    for part in found:
        part.lines.close()
        part.memory.close()


def killed_by(act: Any) -> int:
    """The signal that ends a process which does this; 0 if none does."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        act()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def test_parameters_of_the_other_part_come_and_go(parts: list[Part]) -> None:
    head, other = parts
    assert killed_by(lambda: head.parameters[-1].item()) == 0
    assert killed_by(lambda: head.parameters[-1].fill_(1)) == signal.SIGSEGV
    for part in parts:
        part.elsewhere.let_go()
    head.parameters[:FLOATS].add_(1)
    other.parameters[FLOATS:].add_(2)
    assert killed_by(lambda: head.parameters[-1].item()) == signal.SIGSEGV
    for part in parts:
        part.elsewhere.hold(2)
    wanted = torch.arange(4 * FLOATS, dtype=torch.float32)
    wanted[:FLOATS] += 1
    wanted[FLOATS:] += 2
    assert torch.equal(head.parameters, wanted) and torch.equal(other.parameters, wanted)


def test_what_lies_on_both_is_read_in_one(parts: list[Part]) -> None:
    head, other = parts
    for part in parts:
        part.elsewhere.let_go()
    other.parameters[FLOATS:].mul_(3)
    whole = head.elsewhere.whole(head.parameters.view(2, -1))
    wanted = torch.arange(4 * FLOATS, dtype=torch.float32)
    wanted[FLOATS:] *= 3
    assert torch.equal(whole.reshape(-1), wanted)
    own = head.parameters[: FLOATS - 1]
    assert head.elsewhere.whole(own) is own
    start = PARAMETERS.offset + PAGE - 8
    view = memoryview(head.memory.memory)[start : start + 16]
    data = head.elsewhere.there(view)
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), wanted[FLOATS - 2 : FLOATS + 2])
    view.release()


def test_what_the_head_loads_goes_to_who_holds_it(parts: list[Part]) -> None:
    head, other = parts
    head.elsewhere.let_go()
    for place, value in ((PARAMETERS, 7.0), (STATE, 8.0)):
        with memoryview(head.memory.memory)[place.offset : place.offset + place.size] as view:
            for into, send in head.elsewhere.destinations(view):
                into[:] = torch.full((len(into) // 4,), value).numpy().tobytes()
                send()
                into.release()
    assert torch.equal(other.parameters[FLOATS:], torch.full((3 * FLOATS,), 7.0))
    assert torch.equal(other.state[FLOATS:], torch.full((3 * FLOATS,), 8.0))
    assert killed_by(lambda: head.state[-1].item()) == signal.SIGSEGV
    other.elsewhere.hold(head.elsewhere.version)
    assert torch.equal(other.parameters, torch.full((4 * FLOATS,), 7.0))


def state_of(head: Part) -> tuple[list[StateEntry], list[Tensor], StateMemory]:
    """Of a head: parameters, three numbers of its own, and the optimizer's."""
    memory = StateMemory()
    memory.share(head.elsewhere, lambda parameter, key: None)
    tensors = [head.parameters, torch.ones(3), head.state]
    entries = [
        StateEntry(name, "float32", tuple(t.shape), at, t.nbytes)
        for name, t, at in zip("abc", tensors, (0, 4 * PAGE, 5 * PAGE), strict=True)
    ]
    return entries, tensors, memory


def taken(head: Part) -> Snapshot:
    entries, tensors, memory = state_of(head)
    snapshot = Snapshot(
        entries, tensors, {}, Outline(), [1], None, lambda arena: None, memory, [(0, max(e.stop for e in entries))]
    )
    snapshot.start()
    assert snapshot.wait()
    return snapshot


def test_a_copy_of_the_state_stays_with_who_holds_it(doors: list[CellDoor], parts: list[Part]) -> None:
    head, other = parts
    for part in parts:
        part.elsewhere.let_go()
    entries, tensors, memory = state_of(head)
    head.state[:FLOATS], other.state[FLOATS:] = 5, 6
    live = Image.of_tensors(entries, tensors, {}, Outline(), memory)
    wanted, manifest = bytes(live.read_block(0)), live.manifest
    snapshot = taken(head)
    head.parameters[:FLOATS], other.state[FLOATS:] = 8, 9
    assert bytes(snapshot.read_block(0)) == wanted and snapshot.manifest() == manifest
    arena = snapshot._arena
    assert arena is not None and not arena[PAGE : 4 * PAGE].any() and len(doors[1]._copies) == 1
    kept = snapshot._image
    snapshot.release()
    head.lines.read(1, STATE.offset + PAGE, memoryview(bytearray(4)))  # the next word on the line of the last one
    assert not doors[1]._copies
    with pytest.raises(CheckpointCorrupt, match="was released"):
        kept.read_block(0)


def test_a_copy_that_nobody_has_any_more_is_dropped_with_the_next_one(doors: list[CellDoor], parts: list[Part]) -> None:
    snapshot = taken(parts[0])
    _ = snapshot.manifest()
    (first,) = doors[1]._copies
    gone = weakref.ref(snapshot._there)  # type: ignore[arg-type]
    snapshot._thread.join()  # type: ignore[union-attr]
    del snapshot
    gc.collect()
    assert gone() is None and list(doors[1]._copies) == [first]  # the collector says nothing to anybody
    snapshot = taken(parts[0])
    (second,) = doors[1]._copies
    assert second != first
    snapshot.release()


def test_a_copy_outlives_the_memory_that_it_was_made_of(doors: list[CellDoor], parts: list[Part]) -> None:
    snapshot = taken(parts[0])
    wanted = bytes(snapshot.read_block(0))
    memory = CellMemory.create(10 * PAGE, 1)
    doors[1].show(0, memory)
    parts[0].lines.close()
    assert bytes(snapshot.read_block(0)) == wanted
    memory.close()
    doors[1]._copies.clear()
    with pytest.raises(CheckpointCorrupt, match="part 1 of this worker has no copy"):
        snapshot.read_block(0)
    snapshot.release()


def test_what_comes_from_others_lies_with_both_until_it_is_loaded(
    doors: list[CellDoor], parts: list[Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where several threads bring it; and if a part has no memory for it, that is told."""
    head = parts[0]
    room = head.elsewhere.room(4 * PAGE)
    pieces = [memoryview(bytes([k]) * PAGE) for k in range(4)]
    with ThreadPoolExecutor(2) as pool:
        kept = list(pool.map(room.put, range(0, 4 * PAGE, PAGE), pieces))
    assert kept[0] is pieces[0] and kept[1] is pieces[1]
    assert [block() for block in kept if callable(block)] == pieces[2:]
    (there,) = doors[1]._copies.values()
    assert not any(there[: 2 * PAGE]) and not doors[0]._copies
    del room, kept
    head.elsewhere.let_go()
    head.lines.read(1, STATE.offset + PAGE, memoryview(bytearray(4)))  # the next word on the line of the last one
    assert not doors[1]._copies
    monkeypatch.setattr(cell_doors, "own_pages", full)
    with pytest.raises(OSError, match=r"part 1 of this worker, at 127.0.0.1:\d+: no \d+ bytes for a copy"):
        head.elsewhere.room(4 * PAGE).put(3 * PAGE, pieces[3])
    head.lines.read(1, STATE.offset + PAGE, memoryview(bytearray(4)))


def full(nbytes: int) -> memoryview:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_no_room_for_a_copy_is_told_by_name(parts: list[Part], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_doors, "own_pages", full)
    with pytest.raises(OSError, match=r"part 1 of this worker, at 127.0.0.1:\d+: no \d+ bytes for a copy") as told:
        taken(parts[0])
    assert told.value.errno == errno.ENOMEM


@pytest.mark.skipif(Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2", reason="all memory is set aside")
def test_memory_for_copies_is_not_set_aside(parts: list[Part]) -> None:
    copied = parts[0].memory.copied(PARAMETERS)
    for memory in (own_pages(PAGE), memoryview(copied)):
        at, flags, inside = np.frombuffer(memory, np.uint8).ctypes.data, "", False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(place[1], 16) <= at < int(place[2], 16)
            elif inside and line.startswith("VmFlags:"):
                flags = line
        assert "nr" in flags.split()


def test_words_of_one_are_told_to_the_other(parts: list[Part]) -> None:
    head, other = parts
    head.memory.open_gate(True)
    head.memory.break_pass()
    with pytest.raises(Exception, match="has left the pass"):
        other.memory.meet(1, [0, 1], lambda: None)
    assert other.memory.go
    for part in parts:
        part.memory.start(2)
    other.memory.meet(1, [1], lambda: None)
    head.memory.meet(1, [0, 1], lambda: None)


def test_no_process_of_another_cell_comes_in(doors: list[CellDoor], parts: list[Part]) -> None:
    line = call(doors[1].address, {"cell": "0.1", "what": "memory", "stage": 0})
    with pytest.raises(CollectiveAborted):
        line.recv_json()
    line.close()


def test_the_first_process_of_a_part_is_not_idle_while_it_obeys() -> None:
    """An agent shows its phase for all of the part, and in an idle worker nobody that stands still is noticed."""
    board = Board.create(1)
    context = WorkerContext("", 0, 1, "host2", "", "", board.fd, {}, "")
    said: list[bytes] = []
    orders = [msgspec.msgpack.encode(CellCommand("lanes", {})), b""]
    head = SimpleNamespace(readable=lambda wait_s: True, recv_bytes=lambda most: orders.pop(0), send_bytes=said.extend)
    search = SimpleNamespace(ended=False, door=SimpleNamespace(commander=lambda wait_s: head))
    deputy = Deputy(context, CellPlan("0.1", 1, ("", ""), 1), cast(Any, search))
    deputy.serve({"lanes": lambda: deputy.row.read().phase})
    assert [msgspec.msgpack.decode(one) for one in said] == [["reduce"]]
    assert deputy.row.read().phase == "idle"
    board.close()


def test_both_ends_of_what_lives_as_long_as_the_worker_notice_that_the_other_host_is_silent(
    doors: list[CellDoor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words that a host tells the others are waited for without limit."""
    noticed: queue.Queue[tuple[int, int]] = queue.Queue()

    def notice(sock: socket.socket, silent_s: float) -> None:
        notice_silence(sock, silent_s)
        noticed.put((sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), int(silent_s)))

    monkeypatch.setattr(peer, "notice_silence", notice)
    plan = CellPlan("0.0", 0, tuple(door.address for door in doors), 1)
    doors[1].belong(plan.name)
    deputies = Deputies(plan, doors[0], call)
    try:
        assert [noticed.get(timeout=60.0) for _ in range(2)] == [(1, int(LINK_SILENT_S))] * 2
    finally:
        deputies.close()
