"""The fork server that `everstep run` starts before its command line is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from everstep.base.config_fields import SECRET_VARIABLES
from everstep.cli.early_server import PRELOAD, start_early, take_early
from everstep.cli.main import run_command
from everstep.runtime.process import children

BEFORE: list[int] = []
"""Children of this process that other tests have left."""


@pytest.fixture
def context() -> Iterator[click.Context]:
    BEFORE[:] = children()
    with click.Context(click.Command("run")) as made:
        yield made
    assert started() == []


def started() -> list[int]:
    return [pid for pid in children() if pid not in BEFORE]


def test_the_server_that_was_started_is_taken(context: click.Context) -> None:
    start_early(context, ["script.py"])
    (pid,) = started()
    server = take_early(1, ())
    assert server.hand_over(1, PRELOAD).pid == pid
    assert started() == [pid]


def test_one_that_has_imported_what_the_job_must_not_is_replaced(context: click.Context) -> None:
    start_early(context, ["script.py"])
    server = take_early(1, ())
    (pid,) = started()
    server.import_packages(["json:"])
    assert server.hand_over(1, PRELOAD).pid != pid
    server.close()


def test_another_number_of_threads_needs_another_server(context: click.Context) -> None:
    start_early(context, ["script.py"])
    take_early(2, ())
    assert started() == []


@pytest.mark.parametrize("option", ["--help", "--dry-run", "--rank=1"])
def test_a_command_that_begins_no_job_starts_none(context: click.Context, option: str) -> None:
    start_early(context, ["script.py", option])
    assert started() == []


def test_nor_do_completion_and_a_process_of_another_launcher(
    context: click.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    context.resilient_parsing = True
    start_early(context, ["script.py"])
    context.resilient_parsing = False
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    start_early(context, ["script.py"])
    assert started() == []


def test_it_knows_no_secrets(context: click.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, "hidden-from-workers")
    start_early(context, ["script.py"])
    (pid,) = started()
    assert b"hidden-from-workers" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_command_that_is_refused_leaves_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "no-such-task", "--workers", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert started() == []
