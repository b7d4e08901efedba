"""The journal: what was acknowledged is there after a crash, whatever else is not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.runtime.journal import Journal, format_entry, parse

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
