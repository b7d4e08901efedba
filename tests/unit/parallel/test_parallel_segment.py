"""What a peer finds behind a descriptor of a process that is dying, or of another job."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from everstep.base.errors import ConfigError, MembershipError
from everstep.base.plan import WorkerKey
from everstep.parallel import mapping
from everstep.parallel.mapping import Geometry, OwnSegment, PeerSegment, let_files_go

ME, SMALL, OTHER = WorkerKey(0, 0), Geometry(65536, 1, 2, 4096), Geometry(131072, 1, 2, 4096)


def test_a_descriptor_that_was_closed_and_taken_by_a_file_is_a_dead_peer(tmp_path: Path) -> None:
    own = OwnSegment(ME, SMALL)
    kind, pid, _fd, nonce = own.name.split(":")
    own.close()
    with open(tmp_path / "words", "w+") as file:
        file.write("something else entirely, long enough to hold a header" * 4)
        file.flush()
        with pytest.raises(FileNotFoundError):
            PeerSegment(f"{kind}:{pid}:{file.fileno()}:{nonce}", ME, SMALL)


def test_a_descriptor_that_was_taken_by_a_socket_is_a_dead_peer() -> None:
    with socket.socket() as taken, pytest.raises(FileNotFoundError):
        PeerSegment(f"memfd:{os.getpid()}:{taken.fileno()}:{'0' * 16}", ME, SMALL)


@pytest.mark.parametrize("name", ["memfd:1:2", "memfd:1:2:a:b", "memfd:x:2:a", "memfd:1:x:a", "file:1:2:a", ""])
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(MembershipError, match=r"expected a segment as memfd:<pid>:<fd>:<nonce>, got "):
        PeerSegment(name, ME, SMALL)


@pytest.mark.parametrize("timeout_s", [0.001, 0.75])
def test_a_wait_for_the_bell_lasts_as_long_as_it_says(timeout_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    own = OwnSegment(ME, SMALL)
    monkeypatch.setattr(mapping, "_FUTEX", 1)
    monkeypatch.setattr(mapping, "_SYSCALL", lambda *given: asked.append(given))
    try:
        own.await_bell(7, timeout_s)
    finally:
        own.close()
    until = next(one._obj for given in asked for one in given if hasattr(one, "_obj"))
    assert [getattr(until, name) for name, _ in until._fields_] == [0, round(timeout_s * 1e9)] and 7 in asked[0]


def test_a_segment_of_another_model_is_refused() -> None:
    own = OwnSegment(ME, SMALL)
    try:
        with pytest.raises(MembershipError, match="another model"):
            PeerSegment(own.name, ME, OTHER)
        PeerSegment(own.name, ME, SMALL).close()
    finally:
        own.close()


def test_a_segment_in_a_file_is_read_by_peers_and_keeps_what_it_lets_go_of(tmp_path: Path) -> None:
    own = OwnSegment(ME, SMALL, tmp_path)
    try:
        assert list(tmp_path.iterdir()) == []
        own.slot(1).fill_(3.0)
        peer = PeerSegment(own.name, ME, SMALL)
        own.forget_slot(1)
        let_files_go()
        assert bool((peer.slot(1) == 3.0).all()) and bool((own.slot(1) == 3.0).all())
        peer.close()
    finally:
        own.close()


def test_a_segment_in_a_file_takes_its_room_on_disk_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, there = OwnSegment(ME, SMALL, tmp_path), os.posix_fallocate

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    try:
        own.result(0)
        monkeypatch.setattr(os, "posix_fallocate", full)
        own.result(0)
        with pytest.raises(ConfigError, match=r"room for the gradients.*No space left"):
            own.slot(0)
        monkeypatch.setattr(os, "posix_fallocate", there)
        own.slot(0)
    finally:
        own.close()
    with pytest.raises(ConfigError, match=r"room for the gradients.*No such file"):
        OwnSegment(ME, SMALL, tmp_path / "none")
