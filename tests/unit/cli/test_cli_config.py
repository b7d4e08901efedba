"""`everstep config`: keys, and the causes that scripts go by."""

from __future__ import annotations

import json
import sys

import pytest

from everstep.base.cause import Cause
from everstep.base.config import describe
from everstep.cli.main import run_command


@pytest.fixture(autouse=True)
def narrow_terminals_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


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
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
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
    assert [row["key"] for row in json.loads(capsys.readouterr().out)] == ["workers", "loader.workers"]


def test_what_a_search_finds_has_default_and_first_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", "--search", "GRAD-NORM"]) == 0
    assert capsys.readouterr().out.split(maxsplit=2) == ["clip_norm", "none", "largest global norm of the gradient\n"]
    assert run_command(["config", "--search", "nonfinite"]) == 0
    key, meaning = capsys.readouterr().out.splitlines()[:2]
    assert (
        key.split() == ["on_nonfinite", "warn"]
        and meaning.strip() == "when the loss or gradient of a step is not finite"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--search", "qqq"],
            "no key has 'qqq' in its name, its meaning or its name in other tools: `everstep config`",
        ),
        (["--search", "collate_fn"], "write Task.collate, or give join(collate=...)"),
        (["--search", "collat"], "write Task.collate, or give join(collate=...)"),
        (["lanes", "--search", "lanes"], "--search WORD"),
        (["max_grad_norm"], "unknown key 'max_grad_norm': here it is clip_norm"),
        (["--json", "collate_fn"], "unknown key 'collate_fn': write Task.collate"),
    ],
)
def test_what_is_no_key_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", *arguments]) == 2
    error = capsys.readouterr()
    assert not error.out and error.err.count("\n") == 1 and said in error.err


def test_lines_fit_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is longer than the terminal, or than COLUMNS says, or 100 characters in a pipe; no word is cut."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run_command(["config"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
    monkeypatch.setenv("COLUMNS", "80")
    for terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal, raising=False)
        assert run_command(["config"]) == 0
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= 80
        assert shown.split() == [word for row in describe() for cell in row for word in cell.split()]
