"""Frames and the handshake: nothing is believed before the token is proven, and nothing breaks on garbage."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.base.errors import ProtocolError
from everstep.protocol.messages import MAX_FRAME_BYTES
from everstep.runtime import wire

TOKEN = b"t" * 32


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(min_value=1, max_value=50))
def test_frames_survive_any_cutting(bodies: list[bytes], size: int) -> None:
    data = b"".join(wire.frame(body) for body in bodies)
    reader = wire.FrameReader()
    got: list[bytes] = []
    for start in range(0, len(data), size):
        got += reader.feed(data[start : start + size])
    assert got == bodies


def test_frames_beyond_the_limit_are_refused_before_they_are_read() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        wire.FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(ProtocolError, match="exceeds"):
        wire.frame(bytes(MAX_FRAME_BYTES + 1))


def test_big_repetitive_bodies_are_deflated_and_come_back() -> None:
    body = b'{"worker_id": 1, "incarnation": 0}' * 5000
    data = wire.frame(body, deflate=True)
    assert len(data) < len(body) / 10
    assert wire.FrameReader().feed(data + wire.frame(b"next", deflate=True)) == [body, b"next"]
    noise = os.urandom(20_000)
    assert wire.frame(noise, deflate=True) == wire.frame(noise)


def test_deflated_frames_cannot_explode() -> None:
    packed = zlib.compress(bytes(MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="inflates beyond"):
        wire.FrameReader().feed((len(packed) | 1 << 31).to_bytes(4, "big") + packed)
    with pytest.raises(ProtocolError, match="deflated"):
        wire.FrameReader().feed((4 | 1 << 31).to_bytes(4, "big") + b"junk")


def test_what_inflates_beyond_the_limit_is_not_inflated_to_see_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 100_000)
    packed = zlib.compress(bytes(50_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="inflates beyond"):
            wire.inflate(packed)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_both_sides_prove_the_token() -> None:
    sent, nonce = wire.greeting()
    answered, expected = wire.answer(TOKEN, sent, "worker", "3.1")
    length = wire.answer_length(answered[:2])
    assert length == len(answered) - 2
    role, reply = wire.verify(TOKEN, nonce, answered[2:])
    assert role == "worker"
    assert reply == expected
    with pytest.raises(ProtocolError, match="token"):
        wire.verify(b"x" * 32, nonce, answered[2:])
    with pytest.raises(ProtocolError, match="token"):
        wire.verify(TOKEN, b"n" * 32, answered[2:])  # an answer to another greeting, replayed
    forged = answered[2:].replace(b"worker", b"agent!")
    with pytest.raises(ProtocolError, match="token"):
        wire.verify(TOKEN, nonce, forged)


def test_servers_of_another_kind_or_version_are_named() -> None:
    sent, _ = wire.greeting()
    with pytest.raises(ProtocolError, match="something else answered"):
        wire.answer(TOKEN, b"HTTP/1.1 400 Bad Request\r\n" + b" " * 20, "worker", "")
    other = sent[:4] + (99).to_bytes(2, "big") + sent[6:]
    with pytest.raises(ProtocolError, match="the server speaks 99"):
        wire.answer(TOKEN, other, "worker", "")


@given(st.binary(min_size=2, max_size=2))
def test_handshake_lengths_are_bounded(prefix: bytes) -> None:
    try:
        assert wire.answer_length(prefix) <= wire.MAX_ANSWER_BYTES
    except ProtocolError:
        pass


def test_over_sockets() -> None:
    left, right = socket.socketpair()
    with left, right:
        found: list[str] = []
        server = threading.Thread(target=lambda: found.append(wire.handshake_server(left, TOKEN)))
        server.start()
        wire.handshake_client(right, TOKEN, "agent", "host-1")
        server.join(30)
        assert found == ["agent"]
        wire.send_frame(right, b"hello")
        assert wire.recv_frame(left) == b"hello"


def test_a_server_that_does_not_know_the_token_is_not_believed() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(wire.greeting()[0] + b"\0" * wire.MAC_BYTES)
        with pytest.raises(ProtocolError, match="another job"):
            wire.handshake_client(right, TOKEN, "agent", "")


def test_who_drips_is_cut_off() -> None:
    left, right = socket.socketpair()
    with left, right:
        right.sendall((60).to_bytes(2, "big") + b"x")
        with pytest.raises(TimeoutError):
            wire.handshake_server(left, TOKEN, timeout_s=0.05)


def test_what_drips_is_not_waited_for_beyond_the_deadline() -> None:
    class Dripping:
        def __init__(self) -> None:
            self.timeouts: list[float] = []

        def settimeout(self, timeout_s: float) -> None:
            self.timeouts.append(timeout_s)

        def recv_into(self, out: memoryview) -> int:
            return 1

    dripping = Dripping()
    wire.recv_exact(cast(socket.socket, dripping), 3, time.monotonic() + 60.0)
    assert len(dripping.timeouts) == 3 and all(0 < later <= 60.0 for later in dripping.timeouts)
    with pytest.raises(TimeoutError):
        wire.recv_exact(cast(socket.socket, Dripping()), 3, time.monotonic() - 1.0)
    drop = Dripping()
    wire.recv_exact(cast(socket.socket, drop), 1, time.monotonic() + 4.0)
    assert drop.timeouts[0] <= 4.0


def test_the_token_file_is_the_owners(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    token = wire.new_token()
    wire.write_token(path, token)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert wire.read_token(path) == token
    path.write_text("no hex")
    with pytest.raises(ProtocolError, match="token"):
        wire.read_token(path)
