"""Samples of what workers spend: their lines, their files, and processes that are gone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from everstep.protocol.messages import WorkerLife
from everstep.runtime.host import collector
from everstep.runtime.host.board import Board
from everstep.runtime.host.collector import Sampler, own_memory, process_usage, rotate


def test_a_line_has_everybody_who_lives(tmp_path: Path) -> None:
    board = Board.create(3)
    board.row(0).reset(4, os.getpid())
    board.row(1).reset(0, os.getpid())
    row = board.row(0)
    row.set(step=7, phase="forward", samples=16, generation=2)
    row.set(phase="settle")
    row.sent("heal", 10)
    lives = [
        WorkerLife(worker_id=0, incarnation=4, pid=os.getpid()),
        WorkerLife(worker_id=1, incarnation=1, pid=os.getpid()),  # the row is still that of the life before
        WorkerLife(worker_id=2, incarnation=0, pid=1 << 22),
    ]
    known = Sampler(tmp_path, "h", board, lambda: lives, 3600.0)
    line = known.line(5)
    known.close()
    assert (line["t"], line["host"], [w["worker_id"] for w in line["workers"]]) == (5, "h", [0])
    worker = line["workers"][0]
    found = {name: worker[name] for name in ("incarnation", "step", "generation", "phase", "samples", "passes")}
    assert found == {"incarnation": 4, "step": 7, "generation": 2, "phase": "settle", "samples": 16, "passes": 1}
    assert worker["rss_bytes"] > 1 << 20 and worker["cpu_s"] > 0
    assert set(worker["seconds"]) <= {"forward", "other"} and worker["bytes"] == {"heal": 10}
    lines = [json.loads(text) for text in (tmp_path / "h.jsonl").read_text().splitlines()]
    assert len(lines) == 2, "one when it starts, one when it ends"


def test_files_are_rotated(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    for text in "abcde":
        path.write_text(text)
        rotate(path, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h.1.jsonl", "h.2.jsonl"]
    assert (tmp_path / "h.1.jsonl").read_text() == "e" and (tmp_path / "h.2.jsonl").read_text() == "d"


def test_what_cannot_be_written_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("a file where the folder should be")
    board = Board.create(1)
    board.row(0).reset(0, os.getpid())
    lives = [WorkerLife(worker_id=0, incarnation=0, pid=os.getpid())]
    Sampler(tmp_path / "metrics", "h", board, lambda: lives, 3600.0).close()


def test_a_process_that_is_gone() -> None:
    assert process_usage(1 << 22) is None


def test_a_workers_own_memory_is_looked_at_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board.create(1)
    board.row(0).reset(0, os.getpid())
    lives = [WorkerLife(worker_id=0, incarnation=0, pid=os.getpid())]
    sampler = Sampler(tmp_path, "h", board, lambda: lives, 3600.0)
    sampler.close()
    assert "pss_bytes" not in sampler.line(5)["workers"][0], "a worker that has just begun"
    monkeypatch.setattr(collector, "_OWN_S", -1.0)
    later = Sampler(tmp_path, "h", board, lambda: lives, 3600.0)
    later.close()
    worker = later.line(7)["workers"][0]
    assert 1 << 20 < worker["pss_bytes"] <= 1.1 * worker["rss_bytes"]
    lives.clear()
    assert later.line(8)["workers"] == [] and own_memory(1 << 22) == 0
