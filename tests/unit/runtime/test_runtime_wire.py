"""Frames and token files: what is cut anyhow comes whole, and nothing breaks on garbage."""

from __future__ import annotations

import os
import stat
import tracemalloc
import zlib
from pathlib import Path

import pytest
from fake_coordinator import both_ends
from hypothesis import given
from hypothesis import strategies as st

from everstep.base.errors import ProtocolError
from everstep.protocol.messages import MAX_FRAME_BYTES
from everstep.runtime.link import wire


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(min_value=1, max_value=50))
def test_frames_survive_any_cutting(bodies: list[bytes], size: int) -> None:
    left, right = both_ends()
    data = b"".join(wire.sealed(left, wire.frame(body)) for body in bodies)
    reader = wire.FrameReader(right)
    got: list[bytes] = []
    for start in range(0, len(data), size):
        got += reader.feed(data[start : start + size])
    assert got == bodies


def test_frames_beyond_the_limit_are_refused_before_they_are_read() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        wire.FrameReader(both_ends()[1]).feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(ProtocolError, match="at most 100"):
        wire.FrameReader(both_ends()[1], most_bytes=100).feed((101).to_bytes(4, "big"))
    with pytest.raises(ProtocolError, match="exceeds"):
        wire.frame(bytes(MAX_FRAME_BYTES + 1))


def test_big_repetitive_bodies_are_deflated_and_come_back() -> None:
    body = b'{"worker_id": 1, "incarnation": 0}' * 5000
    data = wire.frame(body, deflate=True)
    assert len(data) < len(body) / 10
    left, right = both_ends()
    frames = [wire.sealed(left, packed) for packed in (data, wire.frame(b"next", deflate=True))]
    assert wire.FrameReader(right).feed(b"".join(frames)) == [body, b"next"]
    noise = os.urandom(20_000)
    assert wire.frame(noise, deflate=True) == wire.frame(noise)


def test_deflated_frames_cannot_explode() -> None:
    packed = zlib.compress(bytes(MAX_FRAME_BYTES + 1))
    left, right = both_ends()
    with pytest.raises(ProtocolError, match="inflates beyond"):
        wire.FrameReader(right).feed(wire.sealed(left, (len(packed) | 1 << 31).to_bytes(4, "big") + packed))
    with pytest.raises(ProtocolError, match="deflated"):
        wire.FrameReader(right).feed(wire.sealed(left, (4 | 1 << 31).to_bytes(4, "big") + b"junk"))


def test_what_inflates_beyond_the_limit_is_not_inflated_to_see_that() -> None:
    packed = zlib.compress(bytes(50_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="inflates beyond"):
            wire.inflate(packed, 100_000)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


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
