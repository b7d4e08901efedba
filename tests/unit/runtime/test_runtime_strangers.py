"""Strangers: few at once, not for long, beside one another, and little said of them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from everstep.runtime.link.handshake import PEER, peer_keys
from everstep.runtime.link.peer import PeerServer, peer_connect
from everstep.runtime.link.unproven_connections import MAX_STRANGERS, Complaints, Strangers, UnprovenConnections
from everstep.runtime.link.wire import HANDSHAKE_TIMEOUT_S, handshake_client

KEY = b"k" * 32


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_crowd_from_one_host_keeps_nobody_else_out() -> None:
    strangers: Strangers[int] = Strangers(3, 5.0)
    assert strangers.arrive(1, "quiet", 0.0) is None
    assert [strangers.arrive(who, "crowd", 0.1 * who) for who in (2, 3)] == [None, None]
    assert strangers.arrive(4, "crowd", 0.4) == 2
    strangers.leave(2)
    assert strangers.arrive(5, "crowd", 0.5) == 3
    strangers.leave(3)
    assert len(strangers) == 3
    assert strangers.late(5.0) == [1]
    strangers.leave(1)
    assert strangers.late(5.45) == [4]


def test_complaints_become_rare_and_lose_no_count() -> None:
    said: list[str] = []
    complaints = Complaints(said.append)
    for tenth in range(10 * 3600):
        complaints.refused("10.0.0.9:1", "a wrong token", tenth / 10)
    assert complaints.count == 36_000 and len(said) < 70
    assert said[0].endswith("(1 refused so far)")
    before = len(said)
    complaints.refused("10.0.0.9:1", "a wrong token", 8000.0)
    assert len(said) == before + 1 and said[-1].endswith("(36001 refused so far)")
    complaints.refused("10.0.0.9:1", "a wrong token", 8001.5)
    assert len(said) == before + 2, "after a long silence it begins anew"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as found:
        yield found


def test_the_silent_are_in_nobodys_way_and_cost_a_bounded_number_of_descriptors(listener: socket.socket) -> None:
    said: list[str] = []
    unproven = UnprovenConnections(listener, peer_keys(KEY), Complaints(said.append))
    crowd, before = [], descriptors()
    for _ in range(MAX_STRANGERS + 100):
        crowd.append(socket.create_connection(listener.getsockname()))
        unproven.turn(0.0)
    unproven.turn(0.1)
    assert descriptors() - before - len(crowd) <= MAX_STRANGERS
    assert len(said) == 1, "one line, not one for each"
    with socket.create_connection(listener.getsockname()) as sock:
        caller = threading.Thread(target=handshake_client, args=(sock, KEY, PEER, "me"))
        caller.start()
        known, begin = [], time.monotonic()
        while not known and time.monotonic() - begin < 60:
            known = unproven.turn(0.1)
        assert [seals.name for _, seals in known] == ["me"]
        assert time.monotonic() - begin < HANDSHAKE_TIMEOUT_S
        caller.join(60)
        known[0][0].close()
    for stranger in crowd:
        stranger.close()
    unproven.close()


def test_peers_are_served_while_strangers_stand_around() -> None:
    """Silent ones, some that drip, some that talk nonsense: four times as many as wait at once."""
    server = PeerServer("127.0.0.1", KEY, lambda connection, request: connection.send_json(connection.recv_json()))
    before, threads, crowd = descriptors(), threading.active_count(), []
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        for number in range(4 * MAX_STRANGERS):
            sock = stack.enter_context(socket.create_connection((server.host, server.port)))
            crowd.append(sock)
            with contextlib.suppress(OSError):
                sock.send((b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 700)[number % 4])
        for number in range(20):
            with peer_connect(server.address, KEY, {}) as peer:
                peer.send_json(number)
                assert peer.recv_json() == number
        assert descriptors() - before - len(crowd) <= MAX_STRANGERS + 1
        end_s = time.monotonic() + 60  # those of peers that were served end by themselves
        while threading.active_count() - threads > 1 and time.monotonic() < end_s:
            time.sleep(0.001)
        assert threading.active_count() - threads <= 1, "strangers get no threads"
