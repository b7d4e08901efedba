"""The journal: what was acknowledged is there after a crash, whatever else is not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.coordinator.restoring import DAMAGED, restore
from everstep.protocol.coordinator.types import CoordinatorConfig
from everstep.runtime.lead.journal import Journal, JournalTaken, format_entry, parse

CONFIG = CoordinatorConfig(8, 1, 3, 1, "replace", 1, 1, 1, 1, 1)
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
def test_an_altered_line_is_not_believed_and_what_follows_counts(position: int, bit: int) -> None:
    lines = [format_entry(entry) for entry in ENTRIES]
    data = bytearray(b"".join(lines))
    position %= len(data)
    data[position] ^= 1 << bit
    entries, end = parse(bytes(data))
    if bytes(data[position : position + 1]).isalpha() and entries == ENTRIES:  # a checksum's letter case
        return
    ends = [sum(map(len, lines[: n + 1])) for n in range(len(lines))]
    altered = next(n for n, at in enumerate(ends) if position < at)
    joined = altered + 2 if position == ends[altered] - 1 else altered + 1  # it is the end of a line that is altered
    good = [entry for entry in entries if entry != DAMAGED]
    assert good == [*ENTRIES[:altered], *ENTRIES[joined:]]
    assert (DAMAGED in entries) == (joined < len(ENTRIES))
    assert end == (len(data) if joined < len(ENTRIES) else (ends[altered - 1] if altered else 0))


def test_a_damaged_line_before_good_ones_is_kept_and_what_follows_counts(tmp_path: Path) -> None:
    """No crash leaves such a line; what follows it has been acknowledged."""
    path = tmp_path / "journal"
    lines = [format_entry(target(number)) for number in range(50)]
    data = b"".join([*lines[:3], b"\0" * 100 + b"\n", *lines[3:]])
    path.write_bytes(data)
    journal = Journal(path, 1000)
    assert (journal.damaged, journal.cut_bytes) == (1, 0) and len(journal.entries) == 51
    assert journal.append(target(50)) and path.read_bytes() == data + format_entry(target(50))
    journal.take_over({"kind": "term", "term": 1})
    assert parse(path.read_bytes())[0] == [*journal.entries, target(50), {"kind": "term", "term": 1}]
    assert path.with_name("journal.damaged").read_bytes() == data + format_entry(target(50))
    again = Journal(path, 1000)
    said = restore(CONFIG, again.entries)[2]
    assert again.damaged == 0 and said == ["entry 4: its line is damaged"], "the new file itself is whole"
    again.take_over({"kind": "term", "term": 2})
    path.write_bytes(b"\0\n" + path.read_bytes())
    Journal(path).take_over({"kind": "term", "term": 3})
    assert path.with_name("journal.damaged").read_bytes() == data + format_entry(target(50)), "the first one is kept"


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


# ---- another coordinator


def test_where_names_and_open_files_have_other_numbers_the_size_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems of a network or of a user's process make numbers up."""
    path, real, made = tmp_path / "journal", os.stat, iter(range(10**6))

    def other(name: str | os.PathLike[str], **how: object) -> os.stat_result:
        if not str(name).startswith(str(tmp_path)):
            return real(name, **how)
        found = list(real(name, **how))
        found[1] = next(made)
        return os.stat_result(found)

    monkeypatch.setattr(os, "stat", other)
    journal = filled(path, 60)
    journal.take_over({"kind": "term", "term": 1})
    assert journal.append(target(60)) and Journal(path).entries[-2:] == [{"kind": "term", "term": 1}, target(60)]
    Journal(path).take_over({"kind": "term", "term": 2})
    with pytest.raises(JournalTaken):
        journal.append(target(61))


@pytest.mark.parametrize("compact_bytes", [1000, 100_000])
def test_whoever_was_taken_over_from_writes_nothing_into_its_successors_file(
    tmp_path: Path, compact_bytes: int
) -> None:
    path = tmp_path / "journal"
    before = filled(path, 5)
    after = Journal(path, compact_bytes)
    assert all(after.append(target(number)) for number in range(5, 100))
    there = path.read_bytes()
    for _ in range(30):
        with pytest.raises(JournalTaken):
            before.append(target(1))
    assert path.read_bytes() == there and after.append(target(100))


@pytest.mark.parametrize("moment", ["before", "while it is written", "stale"])
def test_what_a_lost_coordinator_still_writes_lands_in_no_file_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its write may have hung in a file system that lost its server, and may come through long after."""
    path, real = tmp_path / "journal", os.pwrite
    before = filled(path, 5, 100_000)

    def taken(fd: int, data: bytes, offset: int) -> int:
        Journal(path).take_over({"kind": "term", "term": 1})
        if moment == "stale":
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(fd, data, offset)

    if moment == "before":
        taken(before._fd, b"", before._end)
    with monkeypatch.context() as late:
        if moment != "before":
            late.setattr(os, "pwrite", taken)
        with pytest.raises(JournalTaken):
            before.append({"kind": "ended"})
    assert Journal(path).entries == [*map(target, range(5)), {"kind": "term", "term": 1}]


def test_a_life_knows_its_own_file_after_it_was_shortened_and_after_what_the_disk_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "journal", os.pwrite
    journal = filled(path, 60)

    def tears(fd: int, data: bytes, offset: int) -> int:
        real(fd, data[:9], offset)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", tears)
        assert not journal.append(target(60)) and not journal.retry()
    assert journal.append(target(61)) and journal.pending == 0
    path.unlink()
    assert journal.append(target(62)), "who took the directory away ends the job otherwise"
