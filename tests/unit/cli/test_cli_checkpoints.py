"""`everstep checkpoints` over a directory: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from checkpoint_saving import advance, make_state, save
from everstep.checkpoint.reader import steps_in
from everstep.checkpoint.store import DirectoryStore
from everstep.cli.main import run_command
from everstep.runtime.files.run_lock import run_lock
from everstep.runtime.link.address import JOB_FILE

TINY = {"weight": (50, 40), "bias": (9,)}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Three checkpoints of a small job."""
    state = make_state(1, TINY)
    for step in (10, 20, 30):
        save(tmp_path / "run" / "checkpoints", state, step, reason="every 10 steps", metrics={"accuracy": 1 / step})
        advance(state, step)
    return tmp_path / "run"


def call(*arguments: object) -> int:
    return run_command(["checkpoints", *map(str, arguments)])


def test_ls_and_show(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("ls", place, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["marks"], row["damaged"]) for row in rows] == [
        (10, ["best"], None),
        (20, [], None),
        (30, ["latest"], None),
    ]
    assert call("ls", place) == 0
    assert "every 10 steps" in capsys.readouterr().out
    assert call("show", place / "checkpoints" / "step-0000000020", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["metrics"], shown["identity"]["numerics"]["lanes"]) == (20, {"accuracy": 0.05}, 8)
    assert "model/weight" in [tensor["name"] for tensor in shown["tensors"]]
    assert call("show", place, "--step", "best") == 0
    assert "step 10 of task" in capsys.readouterr().out


def test_verify(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", place) == 0
    assert "3 checkpoints, all whole" in capsys.readouterr().out
    part = next((place / "checkpoints" / "step-0000000020").glob("*.safetensors"))
    os.truncate(part, 5000)
    assert call("verify", place, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert [(p["step"], "truncated" in p["what"]) for p in told["problems"]] == [(20, True)]
    assert call("verify", place, "--step", "30") == 0
    assert call("verify", place / "checkpoints" / "step-0000000020") == 1
    manifest = place / "checkpoints" / "step-0000000010" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-5])
    assert call("verify", place, "--step", "10") == 1
    assert call("show", place, "--step", "10") == 2
    capsys.readouterr()
    assert call("ls", place) == 0
    assert "damaged: " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["ls", "show", "verify", "prune"])
def test_what_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert call(command, tmp_path / "nothing") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_verify_of_a_step_that_is_not_there(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", place, "--step", "11") == 2
    assert "it has 10, 20, 30" in capsys.readouterr().err


def test_diff(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = place / "checkpoints"
    assert call("diff", folder / "step-0000000010", folder / "step-0000000010") == 0
    assert call("diff", folder / "step-0000000010", folder / "step-0000000020", "--json") == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "model/weight" in told["differ"] and told["values"] == ["groups", "scheduler"]
    assert told["only_a"] == told["only_b"] == told["other_kind"] == told["identity"] == []


def test_a_job_that_runs_prunes_its_own(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it may have to go back to is known to it alone."""
    store = DirectoryStore(place / "checkpoints")
    (place / JOB_FILE).write_text("{}")
    with run_lock(place):
        for path in (place, store.path, f"file://{store.path}", store.path / "step-0000000010"):
            assert call("prune", path, "--keep-last", "1") == 2
            said = capsys.readouterr().err
            assert said.count("\n") == 1 and f"the job in {place} is running" in said
        assert steps_in(store) == [10, 20, 30]
        assert call("prune", store.path, "--keep-last", "1", "--dry-run") == 0
    assert call("prune", store.path, "--keep-last", "1") == 0
    assert steps_in(store) == [30]


def test_prune_and_pin(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = DirectoryStore(place / "checkpoints")
    assert call("pin", place, "first", "--step", "10") == 0
    assert call("prune", place, "--keep-last", "1", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["places"][0]["deleted"] == [20]
    assert steps_in(store) == [10, 20, 30]
    assert call("prune", place, "--keep-last", "1") == 0
    assert steps_in(store) == [10, 30]
    assert call("verify", place) == 0
    assert call("pin", place, "first", "--remove") == 0
    assert call("pin", place, "first", "--remove") == 2
    assert call("pin", place, "latest") == 2
    assert call("prune", place, "--keep-last", "1") == 0
    assert steps_in(store) == [30]
    assert call("prune", place, "--keep-best", "1") == 2
