"""The fork server that `everstep run` starts before its command line is read."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from everstep.cli.early_server import end_early, start_early, take_early
from everstep.cli.main import run_command
from everstep.runtime.process import children


@pytest.fixture
def context() -> Iterator[click.Context]:
    with click.Context(click.Command("run")) as made:
        yield made
    assert children() == []


def test_the_server_that_was_started_is_taken(context: click.Context) -> None:
    start_early(context, ["script.py"])
    (pid,) = children()
    server = take_early(1, ())
    assert server.hand_over(1).pid == pid
    assert children() == [pid]


def test_another_number_of_threads_needs_another_server(context: click.Context) -> None:
    start_early(context, ["script.py"])
    take_early(2, ())
    assert children() == []


def test_a_command_that_needs_none_ends_it(context: click.Context) -> None:
    start_early(context, ["script.py"])
    end_early()
    assert children() == []


@pytest.mark.parametrize("option", ["--help", "--dry-run"])
def test_help_and_a_look_at_the_placement_start_none(context: click.Context, option: str) -> None:
    start_early(context, ["script.py", option])
    assert children() == []


def test_a_command_that_is_refused_leaves_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "no-such-task", "--workers", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert children() == []
