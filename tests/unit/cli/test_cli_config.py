"""`everstep config`: keys, and the causes that scripts go by."""

from __future__ import annotations

import json
import sys

import pytest

from everstep.base.cause import Cause
from everstep.base.config import describe
from everstep.cli.main import run_command


def test_causes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", "causes", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["cause"] for row in listed] == list(Cause) and all(row["meaning"] for row in listed)
    assert run_command(["config", "causes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(Cause)


def test_a_key_a_group_and_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", "lanes", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["key"], row["type"], row["default"]) == ("lanes", "whole number", "8") and row["meaning"]
    assert run_command(["config", "heartbeat"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "heartbeat.interval_s",
        "heartbeat.floor_s",
        "heartbeat.ceiling_s",
        "heartbeat.reconnect_s",
    ]
    assert run_command(["config", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(describe())


@pytest.mark.parametrize(("key", "near"), [("lane", "lanes"), ("cause", "causes"), ("heartbeat.floor", "heartbeat.fl")])
def test_an_unknown_key_is_one_line(key: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", key]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and repr(key) in error and near in error


def test_keys_are_found_by_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", "--search", "Norm", "--json"]) == 0
    assert "clip_norm" in [row["key"] for row in json.loads(capsys.readouterr().out)]
    assert run_command(["config", "--search", "num_workers", "--json"]) == 0
    assert [row["key"] for row in json.loads(capsys.readouterr().out)] == ["loader.workers"]
    for arguments, said in ((["--search", "qqq"], "'qqq'"), (["lanes", "--search", "lanes"], "--search WORD")):
        assert run_command(["config", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and said in error


def test_lines_fit_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe a key has one line, for `grep`; on a terminal no line is longer than that, and no word is cut."""
    assert run_command(["config"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(describe())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command(["config"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.split() == [word for row in describe() for cell in row for word in cell.split()]
