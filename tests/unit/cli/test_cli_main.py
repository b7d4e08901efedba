"""The front door: help without torch, exit codes, one line per error; and the placement table."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys

import pytest

import everstep.cli
from everstep.base.config import load_config
from everstep.base.errors import CheckpointCorrupt, ConfigError, EverstepError, JobFailed, NoHead, TaskError
from everstep.cli.main import COMMANDS, cli, exit_code_of, run_command
from everstep.cli.placement_table import placement_rows, print_placement, span
from everstep.cli.probe import Probe


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from everstep.cli.main import run_command; run_command(['--help']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False"
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


COMPUTING = ("check_life", "checkpoint_import", "checkpoints_exchange", "evaluate")


def test_commands_that_compute_nothing_do_not_import_torch() -> None:
    """It takes two seconds: of every start, in the launcher before anything else, and of each look at a job."""
    modules = [f"everstep.cli.{m.name}" for m in pkgutil.iter_modules(everstep.cli.__path__) if m.name not in COMPUTING]
    modules += ["everstep.runtime.lead.coordinator_main", "everstep.runtime.host.host_agent"]
    lines = [f"import {name}\nassert 'torch' not in sys.modules, {name!r}" for name in modules]
    code = "\n".join(["import sys", *lines])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["run", "demo", "status", "verify", "ledger", "scale", "drain", "eval", "schedule"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([name, "--help"]) == 0
    assert "Usage:" in capsys.readouterr().out


def test_run_has_the_options_of_the_interface() -> None:
    command = cli.get_command(None, "run")  # type: ignore[arg-type]
    assert command is not None
    names = {name for parameter in command.params for name in parameter.opts}
    wanted = "workers spares min-workers steps epochs batch-size run-dir config set chaos simulate-failure fresh "
    wanted += "dry-run json stages pool redundancy resume-from"
    assert {f"--{name}" for name in wanted.split()} <= names


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["rum"], "did you mean 'run'"),
        (["run"], "TASK"),
        (["run", "x", "--nonsense"], "--nonsense"),
        (["run", "x", "--workers", "many"], "many"),
        (["run", "x", "--run-dir", "--steps", "3"], "--run-dir: expected a directory, got '--steps'"),
        (["verify", "a"], "DIR_B"),
        (["scale", "a"], "--workers"),
    ],
)
def test_usage_errors_are_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(argv) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert words in message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (CheckpointCorrupt("x"), 2),
        (NoHead("x"), 4),
        (JobFailed("x"), 1),
        (TaskError("x"), 1),
        (EverstepError("x"), 1),
    ],
)
def test_exit_codes(error: EverstepError, code: int) -> None:
    assert exit_code_of(error) == code


@pytest.mark.parametrize(("command", "code"), [("print('x' * 99)", 1), ("raise BrokenPipeError('within')", None)])
def test_only_a_reader_that_has_gone_ends_a_command_silently(command: str, code: int | None) -> None:
    script = (
        "import click, everstep.cli.main as main\n"
        f"@click.command()\ndef command():\n    {command}\n    return 0\n"
        "main.cli.add_command(command, 'x')\nmain.LazyGroup.resolve_command = click.Group.resolve_command\n"
        "main.LazyGroup.get_command = click.Group.get_command\n"
        "raise SystemExit(main.run_command(['x']))"
    )
    ours, theirs = os.pipe()
    if code is not None:
        os.close(ours)
    done = subprocess.run([sys.executable, "-c", script], stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1:] == ([] if code is not None else ["BrokenPipeError: within"])


PROBE = Probe({}, 100, ["Block", "Head"], [[0, 2]], [15])


def test_placement_rows() -> None:
    config = load_config([("t", {"workers": 3})])
    (row,) = placement_rows(config, PROBE)
    assert (row["stage"], row["leader"], row["backups"], row["device"]) == (0, 0, [1, 2], "cpu")
    assert (row["units"], row["parameters"]) == (["Block", "Head"], 15)
    assert sorted(lane for lanes in row["lanes"].values() for lane in lanes) == list(range(8))


def test_placement_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config([("t", {"workers": 2})])
    print_placement(config, PROBE, as_json=True)
    assert json.loads(capsys.readouterr().out)["stages"][0]["lanes"] == {"0": [0, 1, 2, 3], "1": [4, 5, 6, 7]}
    print_placement(config, Probe(), as_json=False)
    text = capsys.readouterr().out
    assert "0:0-3  1:4-7" in text
    assert "global batch 64 = 8 lanes x 8" in text


def test_spans() -> None:
    assert [span(lanes) for lanes in ([], [3], [0, 1, 2, 5], [1, 3])] == ["-", "3", "0-2,5", "1,3"]
