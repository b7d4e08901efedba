"""`everstep init` and `everstep completion`: files that run, nothing overwritten, keys completed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.cli.main import run_command
from everstep.cli.starting_points import init


@pytest.mark.parametrize("origin", ["plain", "lightning", "hf"])
def test_a_script_is_written_once(origin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "b"
    assert run_command(["init", str(folder), "--from", origin]) == 0
    assert f"everstep run {folder / 'train.py'} --workers 4" in capsys.readouterr().out
    text = (folder / "train.py").read_text()
    compile(text, "train.py", "exec")
    assert ("from everstep.integrations.huggingface import Trainer" in text) == (origin == "hf")
    assert ("import everstep.integrations.lightning as L" in text) == (origin == "lightning")
    assert "everstep run train.py --workers 4" in text
    (folder / "train.py").write_text("mine")
    assert run_command(["init", str(folder), "--from", origin]) == 2
    assert "it is there, and stays as it is" in capsys.readouterr().err
    assert (folder / "train.py").read_text() == "mine"


def test_every_origin_has_a_file() -> None:
    (option,) = (p for p in init.params if p.name == "origin")
    starters = Path(sys.modules[init.callback.__module__].__file__ or "").with_name("starters")
    assert sorted(path.stem for path in starters.iterdir()) == sorted(option.type.choices)  # type: ignore[attr-defined]


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_completion_of_a_shell(shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command(["completion", shell]) == 0
    named = capsys.readouterr().out
    assert f"_EVERSTEP_COMPLETE={shell}_complete" in named
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert run_command(["completion"]) == 0 and capsys.readouterr().out == named
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert run_command(["completion"]) == 2
    assert "expected one of bash, fish, zsh, got tcsh" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("everstep init", {"init"}),
        ("everstep config loader.pre", {"loader.prefetch"}),
        ("everstep run x --set loader.w", {"loader.workers="}),
        ("everstep run tra", {"transformer-text", "train.py", "trainers/"}),
        ("everstep run traine", {"traine"}),  # a folder alone: the shell lists it, and puts no blank after it
        ("everstep check models/", {"models/"}),  # files, which the shell lists
        ("everstep checkpoints ls ru", {"ru"}),
    ],
)
def test_what_a_shell_gets(words: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "trainers").mkdir()
    variables = {"_EVERSTEP_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-m", "everstep"]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == expected, done.stderr


def test_bash_puts_no_blank_between_a_key_and_its_value() -> None:
    program = Path(sys.executable).with_name("everstep")
    script = f"""eval "$({program} completion bash)"
    compopt() {{ echo compopt "$@"; }}
    for words in "--set loader.w" "--work"; do
      COMP_WORDS=(everstep run $words); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
      _everstep_completion {program} && echo "${{COMPREPLY[@]}}"
    done"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["compopt -o nospace", "loader.workers=", "--workers"], done.stderr
