"""What a receiver makes of pieces of files: once each, whole or not at all, under names that it knows."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from everstep.checkpoint.pointers import read_pointer, seal
from everstep.checkpoint.store import DirectoryStore
from everstep.protocol.messages import FilePiece, FilePieces
from everstep.runtime.files.file_receiver import FileReceiver, HeadReceiver, append_at
from everstep.runtime.files.file_sets import LATEST, NEWEST_FILE, FileSet

KIND = FileSet(grows=re.compile(r"logs/\w+\.txt"), whole=re.compile(r"(parts/)?\w+\.bin"))
DATA = bytes(range(200))
VERSION = hashlib.blake2b(DATA, digest_size=16).hexdigest()


class Receiving:
    """A receiver into a folder, and what it answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.receiver = FileReceiver(folder, KIND, {})
        self.number = 0

    def take(self, *pieces: FilePiece) -> dict[str, int]:
        self.number += 1
        answer = self.receiver.take(FilePieces(source="0123456789abcdef", number=self.number, pieces=list(pieces)))
        assert answer.number == self.number
        return dict(answer.held)

    def whole(self, at: int, data: bytes, path: str = "parts/a.bin", version: str = VERSION, size: int = 200) -> Any:
        """How much of a file is there after this piece; None: it has to be asked again."""
        return self.take(FilePiece(path=path, version=version, at=at, data=data, size=size)).get(path)

    def grow(self, at: int, data: bytes, version: str = "1") -> Any:
        return self.take(FilePiece(path="logs/w.txt", version=version, at=at, data=data)).get("logs/w.txt")

    @property
    def names(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())


@pytest.fixture
def at(tmp_path: Path) -> Receiving:
    return Receiving(tmp_path)


def test_a_file_gets_its_name_when_all_of_it_has_come(at: Receiving) -> None:
    assert at.whole(0, b"") == 0
    assert at.whole(0, DATA[:90]) == 90 and at.names == ["parts/.a.bin.partial"]
    assert at.whole(0, DATA[:90]) == 90, "a piece that comes twice"
    assert at.whole(150, DATA[150:]) == 90, "one that comes too early"
    assert at.whole(90, DATA[90:]) == 200 and at.names == ["parts/a.bin"]
    assert (at.folder / "parts/a.bin").read_bytes() == DATA and at.receiver.versions == {"parts/a.bin": VERSION}
    assert at.whole(0, DATA[:90]) == 200, "it is there"
    os.truncate(at.folder / "parts/a.bin", 199)
    assert at.whole(0, b"") == 0, "it is not what it was"


def test_a_file_with_another_digest_is_dropped_and_may_come_again(at: Receiving) -> None:
    assert at.whole(0, DATA[:90]) == 90
    assert at.whole(90, bytes(110)) is None and at.names == [] and not at.receiver.versions
    assert at.whole(0, DATA) == 200 and at.names == ["parts/a.bin"]


def test_another_version_begins_anew_and_leaves_the_file_until_it_is_whole(at: Receiving) -> None:
    at.whole(0, DATA)
    other = DATA[::-1]
    version = hashlib.blake2b(other, digest_size=16).hexdigest()
    assert at.whole(0, other[:100], version=version) == 100
    assert (at.folder / "parts/a.bin").read_bytes() == DATA
    assert at.whole(0, b"", version=VERSION) == 200
    assert at.whole(100, other[100:], version=version) == 200
    assert (at.folder / "parts/a.bin").read_bytes() == other


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_of_whichever_version_pieces_come_what_is_held_are_its_first_bytes(come: list[tuple[int, int, int]]) -> None:
    """come: a version, and the piece of it that comes, in quarters of the file: any order, twice, both mixed."""
    versions = [DATA, DATA[::-1]]
    digests = [hashlib.blake2b(data, digest_size=16).hexdigest() for data in versions]
    with tempfile.TemporaryDirectory() as folder:
        at = Receiving(Path(folder))
        for k, first, last in come:
            held = at.whole(50 * first, versions[k][50 * first : 50 * last], version=digests[k])
            whole = held == len(DATA)
            path = at.folder / ("parts/a.bin" if whole else "parts/.a.bin.partial")
            there = path.read_bytes() if path.exists() else b""
            assert held is not None and there == versions[k][:held]
            assert not whole or at.receiver.versions == {"parts/a.bin": digests[k]}


def test_no_more_comes_than_a_file_is_said_to_have(at: Receiving) -> None:
    assert at.whole(0, DATA, size=199) == 0 and at.whole(0, b"", size=1 << 45) == 0
    empty = hashlib.blake2b(b"", digest_size=16).hexdigest()
    assert at.whole(0, b"", path="e.bin", version=empty, size=0) == 0 and (at.folder / "e.bin").read_bytes() == b""


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("../a.bin", VERSION),
        ("parts/a.txt", VERSION),
        ("a.bin", "1"),
        ("a.bin", VERSION + "0"),
        ("logs/a.bin", VERSION),
    ],
)
def test_what_is_not_known_by_name_and_digest_is_not_written(at: Receiving, path: str, version: str) -> None:
    assert at.take(FilePiece(path=path, version=version, at=0, data=DATA, size=200)) == {}
    assert at.names == [] and not (at.folder.parent / "a.bin").exists()


def test_a_link_is_not_followed_and_holds_up_nothing_else(at: Receiving, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (at.folder / "parts").symlink_to(outside)
    first = FilePiece(path="parts/a.bin", version=VERSION, at=0, data=DATA, size=200)
    second = FilePiece(path="b.bin", version=VERSION, at=0, data=DATA, size=200)
    assert at.take(first, second) == {"b.bin": 200}
    assert list(outside.iterdir()) == []


def test_lines_are_appended_where_the_file_ends(at: Receiving) -> None:
    assert at.grow(0, b"one\n") == 4
    assert at.grow(0, b"one\n") == 4 and at.grow(9, b"late\n") == 4 and at.grow(4, b"two\n") == 8
    assert (at.folder / "logs/w.txt").read_bytes() == b"one\ntwo\n"


def test_a_file_that_was_replaced_begins_again_from_its_first_byte(at: Receiving) -> None:
    at.grow(0, b"one\ntwo\n")
    assert at.grow(8, b"x\n", version="2") == 0, "the sender begins with it"
    assert (at.folder / "logs/w.txt").read_bytes() == b"one\ntwo\n"
    assert at.grow(0, b"new\n", version="2") == 4
    assert (at.folder / "logs/w.txt").read_bytes() == b"new\n"


def test_what_a_full_disk_takes_in_part_counts_as_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "a", os.pwrite
    assert append_at(path, 0, 0, b"12345") == 5
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:2], at))
    assert append_at(path, 0, 5, b"6789") == 5 and path.read_bytes() == b"12345"
    monkeypatch.undo()
    assert append_at(path, 0, 5, b"") == 5 and append_at(path, 0, 4, b"x") == 5
    assert append_at(path, 0, 5, b"6789") == 9 and path.read_bytes() == b"123456789"


def test_only_what_must_last_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    append_at(tmp_path / "a", 0, 0, b"x")
    assert not synced
    append_at(tmp_path / "a", 0, 1, b"x", durably=True)
    assert len(synced) == 1


def test_bytes_that_the_disk_could_not_keep_have_not_arrived(at: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is told once: the next sync says that all is well."""
    errors = iter([OSError(errno.EIO, "Input/output error")])

    def sync(fd: int) -> None:
        if error := next(errors, None):
            raise error

    monkeypatch.setattr(os, "fdatasync", sync)
    assert at.whole(0, DATA) is None
    assert (at.folder / "parts/.a.bin.partial").stat().st_size == 0
    assert at.whole(0, b"") == 0 and at.whole(0, DATA) == 200


def test_the_name_of_a_file_is_on_the_disk_before_the_sender_hears_of_it(
    at: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may remove its own file then."""
    synced: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.listdir(fd)))
    assert at.whole(0, DATA[:90]) == 90 and not synced
    assert at.whole(90, DATA[90:]) == 200 and synced == [["a.bin"]]


def test_a_host_that_comes_back_does_not_bring_its_older_word_of_the_newest_checkpoint(tmp_path: Path) -> None:
    """One that had sent another word before has written this one since: all have gone back."""

    def points(source: str, step: int, receiver: HeadReceiver) -> int:
        data = seal("pointer", {"step": step})
        version = hashlib.blake2b(data, digest_size=16).hexdigest()
        for come in (b"", data):
            piece = FilePiece(path=LATEST, version=version, at=0, data=come, size=len(data))
            held = receiver.take(FilePieces(source=source, number=1, pieces=[piece])).held
        assert held == {LATEST: len(data)} and [path.name for path in tmp_path.iterdir()] == [NEWEST_FILE]
        return read_pointer(DirectoryStore(tmp_path), NEWEST_FILE) or 0

    first, other = "0123456789abcdef", "fedcba9876543210"
    head = HeadReceiver(tmp_path)
    assert points(first, 100, head) == 100 and points(other, 50, head) == 100 and points(other, 50, head) == 100
    assert points(other, 150, head) == 150 and points(first, 100, head) == 150
    again = HeadReceiver(tmp_path)
    assert points(first, 100, again) == 150 and points(other, 150, again) == 150
    assert points(first, 60, again) == 60 and points(other, 150, HeadReceiver(tmp_path)) == 150
