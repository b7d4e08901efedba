"""The journal: what was acknowledged is there after a crash, whatever else is not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.runtime.lead.journal import Journal, format_entry, parse

ENTRIES = [{"kind": "plan", "generation": n, "text": "ü\n" * n} for n in range(5)]


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    assert journal.entries == []
    assert all(journal.append(entry) for entry in ENTRIES)
    journal.close()
    again = Journal(path)
    assert again.entries == ENTRIES and again.cut_bytes == 0
    again.append({"kind": "more"})
    again.close()
    assert Journal(path).entries == [*ENTRIES, {"kind": "more"}]


@given(st.integers(min_value=0))
def test_a_torn_tail_costs_only_what_is_torn(cut: int) -> None:
    lines = [format_entry(entry) for entry in ENTRIES]
    data = b"".join(lines)
    cut %= len(data) + 1
    entries, end = parse(data[:cut])
    whole = next((n for n in range(len(lines), -1, -1) if sum(map(len, lines[:n])) <= cut), 0)
    assert entries == ENTRIES[:whole]
    assert end == sum(map(len, lines[:whole]))


@given(st.integers(min_value=0), st.integers(min_value=0, max_value=7))
def test_an_altered_line_and_what_follows_is_not_believed(position: int, bit: int) -> None:
    data = bytearray(b"".join(format_entry(entry) for entry in ENTRIES))
    position %= len(data)
    data[position] ^= 1 << bit
    entries, _ = parse(bytes(data))
    assert entries == ENTRIES[: len(entries)]
    assert len(entries) < len(ENTRIES) or bytes(data[position : position + 1]).isalpha()  # a checksum's letter case


def test_opening_cuts_the_torn_tail_off(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    good = format_entry({"a": 1})
    path.write_bytes(good + b"00000000 {torn")
    journal = Journal(path)
    assert journal.entries == [{"a": 1}] and journal.cut_bytes == len(b"00000000 {torn")
    assert path.read_bytes() == good
    journal.append({"b": 2})
    assert Journal(path).entries == [{"a": 1}, {"b": 2}]


def test_an_entry_counts_once_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, synced = Journal(tmp_path / "journal"), []

    def sync(fd: int) -> None:
        synced.append(parse((tmp_path / "journal").read_bytes())[0])
        if len(synced) == 2:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", sync)
    assert [journal.append({"n": n}) for n in range(3)] == [True, False, True]
    assert synced == [[{"n": k} for k in range(n + 1)] for n in range(3)]
    journal.close()


def test_a_full_disk_delays_entries_but_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    assert journal.append({"n": 1})
    real = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert not journal.append({"n": 2})
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:5], offset))
    assert not journal.append({"n": 3})
    assert journal.pending == 2
    assert parse(path.read_bytes())[0] == [{"n": 1}]
    monkeypatch.setattr(os, "pwrite", real)
    assert journal.append({"n": 4})
    assert journal.pending == 0
    assert Journal(path).entries == [{"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}]


def test_a_torn_tail_is_passed_over_where_the_disk_does_not_let_it_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    path.write_bytes(format_entry(ENTRIES[1]) + b"0000 torn, and longer than what comes next" * 9)

    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "ftruncate", full)
        journal = Journal(path)
    assert journal.entries == [ENTRIES[1]] and journal.append(ENTRIES[2])
    journal.close()
    assert Journal(path).entries == ENTRIES[1:3]


# ---- what is superseded


def target(number: int) -> dict[str, object]:
    return {"kind": "target", "target": number, "slots": [0], "reason": "x" * 50}


def filled(path: Path, count: int, compact_bytes: int = 1000) -> Journal:
    """One in which so many entries were written, of which the last counts."""
    journal = Journal(path, compact_bytes)
    assert all(journal.append(target(number)) for number in range(count))
    return journal


def test_the_file_keeps_what_still_counts_and_does_not_grow_without_end(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, sizes = Journal(path, 1000), []
    for number in range(100):
        assert journal.append(target(number))
        sizes.append(path.stat().st_size)
        assert parse(path.read_bytes())[0][-1] == target(number)
    journal.close()
    assert max(sizes) < 3000
    again = Journal(path, 1000)
    assert again.append(target(100)) and again.append({"kind": "ended"})
    assert Journal(path).entries[-2:] == [target(100), {"kind": "ended"}]
    assert path.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["journal"]


def test_an_old_long_file_is_shortened_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    lines = [format_entry(target(number)) for number in range(50)]
    path.write_bytes(b"".join(lines) + b"torn")
    journal = Journal(path, 1000)
    assert len(journal.entries) == 50 and journal.cut_bytes == 4
    assert path.read_bytes() == lines[-1]


def test_what_makes_no_sense_does_not_supersede_what_does(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    entries = [*map(target, range(50)), {"kind": "target", "target": "of a newer version"}]
    path.write_bytes(b"".join(map(format_entry, entries)))
    journal = Journal(path, 1000)
    assert all(journal.append(target(number)) for number in range(50, 99))
    assert parse(path.read_bytes())[0] == [*entries, *map(target, range(50, 99))]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
def test_a_full_disk_leaves_the_file_as_it_is_until_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path, real = tmp_path / "journal", getattr(os, call)
    journal, refused = Journal(path, 1000), []

    def full(*args: object, **options: object) -> object:
        refused.append(call)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    assert all(journal.append(target(number)) for number in range(30))
    monkeypatch.setattr(os, call, real)
    assert 1 <= len(refused) <= 3 and parse(path.read_bytes())[0] == [target(number) for number in range(30)]
    assert all(journal.append(target(number)) for number in range(30, 90))
    assert path.stat().st_size < 3000 and parse(path.read_bytes())[0][-1] == target(89)
    assert os.listdir(tmp_path) == ["journal"]


def test_nothing_counts_in_a_file_that_may_not_have_the_name_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash could give the name back to the file before: that lacks what has come since."""
    path, real = tmp_path / "journal", os.fsync
    journal, number = Journal(path, 1000), 0

    def refuses_folders(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", refuses_folders)
    while journal.append(target(number)):
        number += 1
    assert parse(path.read_bytes())[0] == [target(number - 1), target(number)]
    assert not journal.append(target(number + 1)) and journal.pending == 2
    monkeypatch.setattr(os, "fsync", real)
    assert journal.append(target(number + 2)) and journal.pending == 0
    assert parse(path.read_bytes())[0] == [target(one) for one in range(number - 1, number + 3)]


def test_at_every_point_of_shortening_all_of_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "journal", []

    def looks(call: str) -> None:
        real = getattr(os, call)

        def watched(*args: object, **options: object) -> object:
            seen.append((call, parse(path.read_bytes())[0][-1]))
            return real(*args, **options)

        monkeypatch.setattr(os, call, watched)

    journal = filled(path, 8)
    for call in ("open", "write", "fsync", "rename", "close"):
        looks(call)
    while ("rename", target(8)) not in seen:
        assert journal.append(target(8))
    assert all(last == target(8) for _, last in seen)


@pytest.mark.parametrize("compact_bytes", [1000, 100_000])
def test_whoever_was_taken_over_from_does_not_put_its_file_in_the_place_of_its_successors(
    tmp_path: Path, compact_bytes: int
) -> None:
    path = tmp_path / "journal"
    before = filled(path, 5)
    after = Journal(path, compact_bytes)
    assert all(after.append(target(number)) for number in range(5, 100))
    for _ in range(30):
        before.append(target(1))
    there = path.stat()
    assert (there.st_ino, there.st_size) == (os.fstat(after._fd).st_ino, after._end)
