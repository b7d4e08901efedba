"""Waiting for descriptors, also for those of high numbers."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from everstep.base.readable import readable
from everstep.data.loader_process import LoaderProcess
from everstep.runtime.link.handshake import Seals
from everstep.runtime.link.peer import PeerConnection

BEYOND = 1100
"""`select` knows descriptors up to 1023."""


@pytest.fixture
def many() -> Iterator[None]:
    """All descriptors that are made from now on are beyond that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= BEYOND + 50:
        pytest.skip("no process here may have that many")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        fd = -1
        while fd < BEYOND:
            fd = os.open(os.devnull, os.O_RDONLY)
            held.callback(os.close, fd)
        yield


def test_what_can_be_read_is_found_whatever_its_number(many: None) -> None:
    here, there = socket.socketpair()
    with here, there:
        assert here.fileno() > BEYOND
        assert readable([here.fileno(), -1], 0.0) == set()
        there.send(b"x")
        assert readable([here.fileno()], None) == {here.fileno()}


def test_a_peer_and_a_loader_process_are_heard(many: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    connection = PeerConnection(here, Seals("peer", "peer", False, b"k" * 32, b"k" * 32))
    with there:
        assert not connection.readable(0.0)
        there.send(b"x")
        assert connection.readable(20.0)
    connection.close()
    assert connection.readable(0.0), "whoever reads from it next is told that it is closed"
    process = LoaderProcess(lambda step, lane: (step, lane))
    try:
        process.ask(1, 5, 6)
        assert process.receive() == (1, (5, 6))
    finally:
        process.close()
