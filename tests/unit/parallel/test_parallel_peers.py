"""The sockets for small records: strangers, records of another exchange, and members that hang up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from parallel_cases import together
from torch.distributed import HashStore, PrefixStore

from everstep.base.errors import CollectiveAborted, InvariantViolation
from everstep.parallel.fence import Fence
from everstep.parallel.peers import Meeting, PeerSockets
from everstep.parallel.reduction import batches

KEY = bytes(40)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def pair(store: HashStore) -> Iterator[list[PeerSockets]]:
    fence = Fence()
    fence.enter(1)
    place = PrefixStore("generation1", store)
    found = [PeerSockets(Meeting((3, 7), me, place, "127.0.0.1", fence), lambda: None) for me in (3, 7)]
    yield found
    for peer in found:
        peer.retire()


def test_a_stranger_is_not_taken_for_a_member(pair: list[PeerSockets], store: HashStore) -> None:
    """He calls first and says what a member would say, but for the word that only members know."""
    called = threading.Event()

    def stranger() -> None:
        host, port, _ = store.get("generation1/records/3").decode().split()
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall((7).to_bytes(8, "little") + bytes(16))
            called.set()
            sock.recv(1)

    def member() -> None:
        called.wait(30)
        pair[1].connect()

    # The door of 7 must be known before 3 waits for calls.
    store.set("generation1/records/7", "127.0.0.1 1 " + bytes(16).hex())
    assert together(pair[0].connect, stranger, member) == [None] * 3
    found = together(lambda: pair[0].gather(KEY, b"three"), lambda: pair[1].gather(KEY, b"seven"))
    assert found == [{3: b"three", 7: b"seven"}] * 2


def test_another_exchange_is_a_bug_and_says_so(pair: list[PeerSockets]) -> None:
    assert together(pair[0].connect, pair[1].connect) == [None, None]
    other = b"\x01" + KEY[1:]
    found = together(lambda: pair[0].gather(KEY, b""), lambda: pair[1].gather(other, b""))
    assert all(isinstance(error, InvariantViolation) for error in found), found


def test_who_hangs_up_is_accused(pair: list[PeerSockets]) -> None:
    assert together(pair[0].connect, pair[1].connect) == [None, None]
    pair[1].retire()
    with pytest.raises(CollectiveAborted) as caught:
        pair[0].gather(KEY, b"x" * 10_000_000)
    assert caught.value.accused == (7,)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (5, 6), (0, 32), (7, 200), (191, 382)])
def test_batches_are_one_to_three_runs_side_by_side(first: int, last: int) -> None:
    runs = batches(first, last)
    assert [b for lo, hi in runs for b in range(lo, hi)] == list(range(first, last))
    assert all(lo < hi for lo, hi in runs) and len(runs) <= 3
