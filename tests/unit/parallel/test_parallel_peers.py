"""The sockets for small records: strangers, records of another exchange, and members that hang up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
from parallel_cases import together
from torch.distributed import HashStore, PrefixStore

from everstep.base.config_keys import TlsConfig
from everstep.base.errors import CollectiveAborted, InvariantViolation, ProtocolError
from everstep.parallel.fence import Fence
from everstep.parallel.peers import _AT_ONCE_BYTES, _HEADER, Meeting, PeerSockets, _Talk
from everstep.runtime.link.handshake import GREETING_BYTES, PEER, TAG_BYTES, Caller, Seals
from everstep.runtime.link.tls import Tls, shown_by
from everstep.runtime.link.wire import HANDSHAKE_TIMEOUT_S, ends, recv_exact, secured

KEY = bytes(40)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture(params=["plain", "tls"])
def pair(request: pytest.FixtureRequest, store: HashStore) -> Iterator[list[PeerSockets]]:
    tls = Tls.of(shown_by(TlsConfig("on"), b"t" * 32, "127.0.0.1")) if request.param == "tls" else None
    fence = Fence()
    fence.enter(1)
    place = PrefixStore("generation1", store)
    found = [PeerSockets(Meeting((3, 7), me, place, "127.0.0.1", fence, b"k" * 32, tls), lambda: None) for me in (3, 7)]
    yield found
    for peer in found:
        peer.retire()


def test_a_stranger_is_not_taken_for_a_member(pair: list[PeerSockets], store: HashStore) -> None:
    """He calls first and says what a member would say, but for the proof that only members can make."""
    called = threading.Event()
    ours: list[socket.socket] = []

    def stranger() -> None:
        host, port = store.get("generation1/records/3").decode().split()
        sock = secured(socket.create_connection((host, int(port))), pair[1]._tls)
        ours.append(sock)
        greeting = recv_exact(sock, GREETING_BYTES)
        sock.sendall(Caller(b"guessed", PEER, "1 7", ends(sock)).answer(greeting))
        ours.extend(socket.create_connection((host, int(port))) for _ in range(20))  # and twenty who are silent
        called.set()

    def member() -> None:
        called.wait(30)
        pair[1].connect()

    # The door of 7 must be known before 3 waits for calls.
    store.set("generation1/records/7", "127.0.0.1 1")
    begin = time.monotonic()
    assert together(pair[0].connect, stranger, member) == [None] * 3
    assert time.monotonic() - begin < HANDSHAKE_TIMEOUT_S, "the silent were waited for"
    found = together(lambda: pair[0].gather(KEY, b"three"), lambda: pair[1].gather(KEY, b"seven"))
    assert found == [{3: b"three", 7: b"seven"}] * 2
    for sock in ours:
        sock.close()


def test_a_record_that_was_altered_on_its_way_is_not_believed(pair: list[PeerSockets]) -> None:
    assert together(pair[0].connect, pair[1].connect) == [None, None]
    pair[1]._sockets[3].sendall(_HEADER.pack(5, KEY) + b"seven" + bytes(TAG_BYTES))
    with pytest.raises(CollectiveAborted, match="came damaged") as caught:
        pair[0].gather(KEY, b"three")
    assert caught.value.accused == (7,)


def test_a_record_without_end_is_cut_off(pair: list[PeerSockets]) -> None:
    assert together(pair[0].connect, pair[1].connect) == [None, None]
    pair[1]._sockets[3].sendall(_HEADER.pack(1 << 40, KEY))
    with pytest.raises(CollectiveAborted, match="expected a record of at most") as caught:
        pair[0].gather(KEY, b"three")
    assert caught.value.accused == (7,)


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


@pytest.mark.parametrize("size", [_AT_ONCE_BYTES // 2, 3 * _AT_ONCE_BYTES])
def test_no_more_is_sent_to_whoever_is_late_than_a_kernel_takes(size: int) -> None:
    """One whose reader takes nothing for a while counts as silent, and the reader may still compute."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    keys = b"a" * 32, b"b" * 32
    early, late = _Talk(7, ends[0], Seals("peer", "", False, *keys), KEY, bytes(size)), None
    early.send()
    early.send()
    whole = _HEADER.size + size + TAG_BYTES
    assert len(ends[1].recv(1 << 20, socket.MSG_PEEK)) == (whole if whole <= _AT_ONCE_BYTES else _HEADER.size)
    late = _Talk(3, ends[1], Seals("peer", "", False, *reversed(keys)), KEY, b"small")
    while early.events() or late.events():
        for talk in (late, early):
            if talk.events():
                talk.send()
                talk.receive()
    assert early.payload() == b"small" and late.payload() == bytes(size)
    for end in ends:
        end.close()


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), ProtocolError("no proof"), TimeoutError("late")])
@pytest.mark.parametrize("again", [True, False])
def test_a_call_that_failed_is_made_again_unless_it_was_not_answered_for_too_long(
    pair: list[PeerSockets], error: Exception, again: bool
) -> None:
    call = Mock(worker_id=7, go_on=Mock(side_effect=error), again=Mock(return_value=again))
    with nullcontext() if again and not isinstance(error, TimeoutError) else pytest.raises(CollectiveAborted):
        assert pair[0]._advance(call) is False
