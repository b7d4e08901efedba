"""Bulk data over our own sockets: bytes arrive where they are wanted, and nobody else's are taken."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parallel_cases import same_bits, together
from torch.distributed import HashStore, PrefixStore

from everstep.base.config_keys import TlsConfig
from everstep.base.errors import CollectiveAborted, InvariantViolation
from everstep.parallel.fence import Fence
from everstep.parallel.peers import Meeting
from everstep.parallel.socket_mesh import _HEAD, BlockNote, Parcel, SocketMesh
from everstep.runtime.link.handshake import TAG_BYTES
from everstep.runtime.link.tls import Tls, shown_by

ELSEWHERE = "127.0.0.2"
"""Callers come from 127.0.0.1, so this counts as another host: every byte is tagged."""
FRAME_BYTES = _HEAD.size + TAG_BYTES


_POLL = select.poll


class Polls:
    """Poll objects that count how often any of them returned."""

    returned = 0

    def __init__(self) -> None:
        self._poll = _POLL()
        self.register, self.unregister = self._poll.register, self._poll.unregister

    def poll(self, *most: int) -> list[tuple[int, int]]:
        found = self._poll.poll(*most)
        Polls.returned += 1
        return found


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> type[Polls]:
    monkeypatch.setattr(select, "poll", Polls)
    return Polls


@pytest.fixture(params=["127.0.0.1", ELSEWHERE, "tls"])
def meshes(request: pytest.FixtureRequest) -> Iterator[list[SocketMesh]]:
    place = PrefixStore("generation1", HashStore())
    tls = Tls.of(shown_by(TlsConfig("on"), b"t" * 32, ELSEWHERE)) if request.param == "tls" else None
    host = ELSEWHERE if request.param == "tls" else request.param
    found = []
    for me in (3, 7):
        fence = Fence()
        fence.enter(1)
        found.append(SocketMesh(Meeting((3, 7), me, place, host, fence, b"k" * 32, tls), lambda: None))
    assert together(found[0].connect, found[1].connect) == [None, None]
    tagged = all(line.seals.bulk_tags for mesh in found for line in mesh._lines.values())
    assert tagged is (request.param == ELSEWHERE)
    yield found
    for mesh in found:
        mesh.retire()


def tensors(count: int, size: int) -> list[torch.Tensor]:
    return [torch.randn(size, generator=torch.Generator().manual_seed(k)) for k in range(count)]


def test_tensors_arrive_whoever_is_first(meshes: list[SocketMesh]) -> None:
    """Large and empty ones, both ways at once, asked for before and after they are sent, out of order."""
    given = [*tensors(4, 700_000), torch.empty(0)]

    def give_and_take(mesh: SocketMesh, other: int, first: bool) -> tuple[list[torch.Tensor], list[Parcel]]:
        got = [torch.empty_like(t) for t in given]
        if first:
            kept = [mesh.send((t, other, 2 + k)) for k, t in enumerate(given)]
        coming = [mesh.receive((got[k], other, 2 + k)) for k in reversed(range(len(given)))]
        if not first:
            kept = [mesh.send((t, other, 2 + k)) for k, t in enumerate(given)]
        for receipt in coming:
            mesh.wait(receipt)
        return got, kept

    for _ in range(3):
        found = together(lambda: give_and_take(meshes[0], 7, True), lambda: give_and_take(meshes[1], 3, False))
        for one in found:
            assert isinstance(one, tuple), one
            assert all(same_bits(ours, theirs) for ours, theirs in zip(one[0], given, strict=True))


def test_no_thread_wakes_without_work(polls: type[Polls], meshes: list[SocketMesh]) -> None:
    """However long nothing is sent after large tensors, which do not leave at once, went both ways."""
    given = tensors(3, 1_500_000)

    def exchange(mesh: SocketMesh, other: int) -> list[Parcel]:
        kept = [mesh.send((t, other, 2 + k)) for k, t in enumerate(given)]
        for receipt in [mesh.receive((torch.empty_like(t), other, 2 + k)) for k, t in enumerate(given)]:
            mesh.wait(receipt)
        return kept

    assert all(
        isinstance(one, list) for one in together(lambda: exchange(meshes[0], 7), lambda: exchange(meshes[1], 3))
    )
    before = polls.returned
    for _ in range(200):  # a thread that spins gets a turn with each of these
        assert together(lambda: None) == [None]
    assert polls.returned - before < 20, "each of four threads may wake once more or twice"


def test_two_under_one_tag_come_in_the_order_in_which_they_were_sent(meshes: list[SocketMesh]) -> None:
    first, second = tensors(2, 1000)
    got = [torch.empty(1000), torch.empty(1000)]
    coming = [meshes[1].receive((tensor, 3, 5)) for tensor in got]
    kept = [meshes[0].send((tensor, 7, 5)) for tensor in (first, second)]
    for receipt in coming:
        meshes[1].wait(receipt)
    assert same_bits(got[0], first) and same_bits(got[1], second) and kept


def test_what_was_let_go_of_is_not_sent(meshes: list[SocketMesh]) -> None:
    old, new = tensors(2, 100)
    kept = meshes[0].send((old, 7, 9))
    del kept
    kept = meshes[0].send((new, 7, 9))
    got = torch.empty(100)
    meshes[1].wait(meshes[1].receive((got, 3, 9)))
    assert same_bits(got, new) and kept


def test_another_size_than_was_asked_for_ends_the_generation_and_nothing_else(meshes: list[SocketMesh]) -> None:
    kept = meshes[0].send((torch.zeros(10), 7, 9))
    receipt = meshes[1].receive((torch.empty(20), 3, 9))
    with pytest.raises(CollectiveAborted, match="it wants 80 bytes where 40 are sent"):
        for _ in range(1000):
            meshes[0].receive((torch.empty(1), 7, 11))
            threading.Event().wait(0.01)
    with pytest.raises(CollectiveAborted) as caught:
        meshes[1].wait(receipt)
    assert caught.value.accused == (3,) and kept


@pytest.mark.parametrize("what", [b"\xff" * FRAME_BYTES, bytes(FRAME_BYTES), b"\x02".ljust(FRAME_BYTES, b"\0")])
def test_bytes_of_somebody_on_the_way_are_not_taken(meshes: list[SocketMesh], what: bytes) -> None:
    got = torch.zeros(1000)
    receipt = meshes[1].receive((got, 3, 9))
    meshes[0]._lines[7].sock.sendall(what)
    with pytest.raises(CollectiveAborted, match="something else") as caught:
        meshes[1].wait(receipt)
    assert caught.value.accused == (3,) and not got.any()


class Relay:
    """A socket behind which somebody changes one byte of whatever is long."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def send(self, piece: memoryview) -> int:
        changed = bytearray(piece)
        if len(changed) > 100:
            changed[50] ^= 1
        return self.sock.send(changed)


def test_between_hosts_not_one_byte_can_be_changed(meshes: list[SocketMesh]) -> None:
    line = meshes[0]._lines[7]
    meshes[0]._lines[7] = line._replace(sock=Relay(line.sock))  # type: ignore[arg-type]
    receipt = meshes[1].receive((torch.empty(1000), 3, 9))
    kept = meshes[0].send((torch.zeros(1000), 7, 9))
    if line.seals.bulk_tags:
        with pytest.raises(CollectiveAborted, match="got others") as caught:
            meshes[1].wait(receipt)
        assert caught.value.accused == (3,)
    else:
        meshes[1].wait(receipt)
    assert kept


def test_nobody_is_sent_what_it_did_not_ask_for(meshes: list[SocketMesh]) -> None:
    receipt = meshes[1].receive((torch.empty(4), 3, 9))
    meshes[0]._queue(7, 2, 12345, 1 << 50, None)
    with pytest.raises(CollectiveAborted, match="that were not asked for"):
        meshes[1].wait(receipt)


def test_a_cut_frees_who_waits_and_nothing_is_written_any_more(meshes: list[SocketMesh]) -> None:
    got = torch.zeros(1000)
    receipt = meshes[1].receive((got, 3, 9))
    waiter = threading.Timer(0.05, meshes[1]._fence.abort, (1,))
    waiter.start()
    with pytest.raises(CollectiveAborted):
        meshes[1].wait(receipt)
    waiter.join()
    with pytest.raises(CollectiveAborted):
        for _ in range(1000):
            meshes[0].send((torch.ones(1000), 7, 9))
            threading.Event().wait(0.01)
    assert not got.any()


def test_blocks_that_nobody_takes_end_the_generation(meshes: list[SocketMesh]) -> None:
    meshes[0].push(7, BlockNote(1, 0, 4, 0, True), torch.zeros(1000))
    with pytest.raises(CollectiveAborted, match="blocks that this worker does not take") as caught:
        meshes[1].wait(meshes[1].receive((torch.empty(1), 3, 9)))
    assert caught.value.accused == (3,)


def test_a_mesh_that_cannot_make_room_ends_its_own_worker(meshes: list[SocketMesh]) -> None:
    """And not in a wait without an end, nor as a fault of the others."""

    class Full:
        def space(self, w: int, note: BlockNote, size: int) -> memoryview:
            raise RuntimeError("not enough memory")

        def came(self, note: BlockNote, size: int) -> None: ...

        def lost(self) -> None: ...

    meshes[1]._receiver = Full()
    meshes[0].push(7, BlockNote(1, 0, 4, 0, True), torch.zeros(1000))
    with pytest.raises(InvariantViolation, match="not enough memory"):
        meshes[1].wait(meshes[1].receive((torch.empty(1), 3, 9)))
    assert not meshes[1].whole
