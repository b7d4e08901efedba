"""What workers print becomes records: which lines, whose, in files of bounded size, whatever the disk does."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from everstep.observe.logs import RECORD, WorkerLog
from everstep.protocol.messages import WorkerLife
from everstep.runtime.host.board import Board
from everstep.runtime.host.collector import Collector, LineFile, Sampler


def read(folder: Path, worker_id: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"worker-{worker_id}.jsonl").read_text().splitlines()]


def board_of(worker_id: int, incarnation: int, pid: int) -> Board:
    board = Board.create(worker_id + 1)
    row = board.row(worker_id)
    row.reset(incarnation, pid)
    row.set(step=41, generation=3)
    row.seat(1, "standby")
    return board


def give(fds: tuple[int, int], out: bytes = b"", err: bytes = b"") -> None:
    for fd, data in zip(fds, (out, err), strict=True):
        os.write(fd, data)
        os.close(fd)


def test_lines_become_records_of_their_worker(tmp_path: Path) -> None:
    collector = Collector(tmp_path / "logs", board_of(2, 1, 77), 1 << 20, 3)
    record = WorkerLog(2, 1).line("error", "mine", "it broke", exception="Traceback")
    bad = b"\xff\xfe and \x1e{no record}"
    give(collector.open(2, 1), b"one\n\nold\rnew\r\ntorn", b"half" + RECORD + record + b"free(): bad\n" + bad)
    collector.close()
    found = read(tmp_path / "logs", 2)
    by_source = {source: [r for r in found if r["source"] == source] for source in ("stdout", "stderr", "log")}
    assert [r["message"] for r in by_source["stdout"]] == ["one", "new", "torn"]
    assert [r["message"] for r in by_source["stderr"]] == ["half", "free(): bad", "\ufffd\ufffd and {no record}"]
    assert [(r["message"], r["exception"]) for r in by_source["log"]] == [("it broke", "Traceback")]
    one = by_source["stdout"][0]
    assert (one["worker_id"], one["incarnation"], one["pid"], one["step"], one["generation"]) == (2, 1, 77, 41, 3)
    assert (one["stage"], one["role"], one["level"]) == (1, "standby", "info")
    assert {r["level"] for r in by_source["stderr"]} == {"warning"}


def test_who_is_followed_by_another_life_is_not_taken_for_it(tmp_path: Path) -> None:
    board = board_of(0, 0, 77)
    collector = Collector(tmp_path, board, 1 << 20, 3)
    old = collector.open(0, 0)
    board.row(0).reset(1, 88)
    give(old, b"last words\n")
    give(collector.open(0, 1), b"first words\n")
    collector.close()
    assert {(r["message"], r["incarnation"], r["pid"]) for r in read(tmp_path)} == {
        ("last words", 0, 0),
        ("first words", 1, 88),
    }


def test_files_are_rotated_across_lives(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    path.write_bytes(b"{}" * 300 + b"\n")  # of an earlier launcher
    for life in range(40):
        file = LineFile(path, 1000, 2)
        assert file.write(b"%03d " % life + b"x" * 95 + b"\n")
        file.close()
    names = ["worker-0.1.jsonl", "worker-0.2.jsonl", "worker-0.jsonl"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert all(p.stat().st_size <= 1000 for p in tmp_path.iterdir())
    lines = b"".join((tmp_path / name).read_bytes() for name in (names[1], names[0], names[2])).splitlines()
    assert [int(line[:3]) for line in lines] == list(range(40 - len(lines), 40))
    alone = LineFile(path, 10, 0)
    assert alone.write(b"alone\n") and path.read_bytes() == b"alone\n"
    alone.close()


def test_a_full_disk_costs_lines_which_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector(tmp_path, board_of(0, 0, 1), 1 << 20, 3)
    collector.close()
    file = LineFile(tmp_path / "worker-0.jsonl", 1 << 20, 3)
    write = os.write

    def full(fd: int, data: bytes) -> int:
        write(fd, data[:5])
        if len(data) <= 5:
            raise OSError(errno.ENOSPC, "full")
        return 5

    assert file.write(b"fits 1\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert not file.write(b"lost 1\nlost 2\n")
        assert not file.write(b"no\n")
    assert file.dropped == 3
    assert file.write(b"fits 2\n")
    file.close()
    lines = (tmp_path / "worker-0.jsonl").read_bytes().splitlines()
    assert (lines[0], lines[-1]) == (b"fits 1", b"fits 2")


def test_a_disk_that_takes_nothing_leaves_no_empty_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LineFile(tmp_path / "worker-0.jsonl", 1 << 20, 3)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert not file.write(b"lost\n") and file.dropped == 1
    assert file.write(b"fits\n")
    file.close()
    assert (tmp_path / "worker-0.jsonl").read_bytes() == b"fits\n"


def test_samples_that_were_dropped_are_counted_in_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.write_text("a file where the folder should be")
    life = WorkerLife(worker_id=0, incarnation=0, pid=os.getpid())
    sampler = Sampler(folder, "here", board_of(0, 0, 1), lambda: [life], 1000.0)
    while sampler._file.dropped < 1:
        os.sched_yield()
    folder.unlink()
    sampler.close()
    (line,) = (folder / "here.jsonl").read_text().splitlines()
    assert json.loads(line)["dropped"] == 1


def test_dropped_lines_are_told_once_there_is_room(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.write_text("a file where the folder should be")
    collector = Collector(folder, board_of(0, 0, 1), 1 << 20, 3)
    fds = collector.open(0, 0)
    file = collector._files[0]
    os.write(fds[0], b"lost\n" * 3)
    while file.dropped < 3:
        os.sched_yield()
    folder.unlink()
    give(fds, b"there\n")
    collector.close()
    told, there = read(folder)
    assert told["level"] == "warning" and told["message"].startswith("3 lines could not be written")
    assert there["message"] == "there"


def test_what_keeps_a_pipe_open_is_not_waited_for(tmp_path: Path) -> None:
    collector = Collector(tmp_path, board_of(0, 0, 1), 1 << 20, 3)
    fds = collector.open(0, 0)
    os.write(fds[0], b"there")
    collector.close()
    collector.close()
    assert [r["message"] for r in read(tmp_path)] == ["there"]
    with contextlib.suppress(BrokenPipeError):
        os.write(fds[0], b"nobody reads this\n")
    for fd in fds:
        os.close(fd)
