"""Rows on a disk that is full for a while, or for good: none is torn, none is lost in silence."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.order.ledger import LaneUse, LedgerRow, decode_rows, encode_row
from everstep.train.published import LedgerFile

ROWS = [LedgerRow(step, 1, tuple(LaneUse(lane, 0, 2, step << lane) for lane in range(4))) for step in range(1, 9)]
LINES = [encode_row(row) for row in ROWS]


@contextlib.contextmanager
def no_file_beyond(n_bytes: int) -> Iterator[None]:
    """Files cannot grow beyond this: the write that would is short, the next one is refused."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def rows_of(path: Path) -> list[LedgerRow]:
    """Read strictly: whole lines only."""
    data = path.read_bytes()
    assert data.endswith(b"\n") and data.count(b"\n") == len(decode_rows(data)), data
    return decode_rows(data)


@pytest.mark.parametrize("room", [0, 1, len(LINES[0]) - 1])
def test_a_disk_that_is_full_for_a_while_costs_no_row(tmp_path: Path, room: int) -> None:
    ledger = LedgerFile(tmp_path / "rows")
    ledger.append(LINES[0])
    assert ledger.flush() and ledger.waiting == 0
    with no_file_beyond(len(LINES[0]) + room):
        for number, line in enumerate(LINES[1:5], start=1):
            ledger.append(line)
            assert not ledger.flush() and ledger.waiting == number and ledger.error
    ledger.append(LINES[5])
    assert ledger.flush() and rows_of(ledger.path) == ROWS[:6]
    ledger.append(LINES[6])
    assert ledger.flush() and rows_of(ledger.path) == ROWS[:7]


def test_of_a_short_write_the_whole_rows_count(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path / "rows")
    for line in LINES[:4]:
        ledger.append(line)
    with no_file_beyond(len(b"".join(LINES[:2])) + 7):
        assert not ledger.flush() and ledger.waiting == 2
        assert ledger.path.stat().st_size == len(b"".join(LINES[:2])) + 7, "two rows and a piece"
        assert not ledger.flush() and ledger.waiting == 2
    assert ledger.flush() and rows_of(ledger.path) == ROWS[:4]


@pytest.mark.parametrize("torn", [b"", LINES[2][:1], LINES[2][:-1], b"x" * 200_000])
@pytest.mark.parametrize("whole", [0, 2])
def test_what_an_earlier_life_left_is_gone_on_with(tmp_path: Path, torn: bytes, whole: int) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"".join(LINES[:whole]) + torn)
    ledger = LedgerFile(path)
    ledger.append(LINES[2])
    assert ledger.close() == 0
    assert rows_of(path) == [*ROWS[:whole], ROWS[2]]


def test_the_end_waits_for_the_disk(tmp_path: Path) -> None:
    refused = threading.Event()

    class Watched(LedgerFile):
        def flush(self) -> bool:
            done = super().flush()
            refused.set()
            return done

    ledger = Watched(tmp_path / "later" / "rows")
    ledger.append(LINES[0])
    left: list[int] = []
    leaving = threading.Thread(target=lambda: left.append(ledger.close(60.0)))
    leaving.start()
    assert refused.wait(60)
    ledger.path.parent.mkdir()
    leaving.join(60)
    assert left == [0] and rows_of(ledger.path) == ROWS[:1]


def test_what_is_missing_at_the_end_is_counted(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path / "nowhere" / "rows", most_bytes=len(LINES[0]) + len(LINES[1]))
    for line in LINES[:5]:
        ledger.append(line)
        assert not ledger.flush()
    assert (ledger.waiting, ledger.given_up) == (2, 3)
    assert ledger.close(0.0) == 5 and "No such file" in ledger.error
