"""What CONTRIBUTING.md says of where to add things holds: tables, folders, config, help and that page name the same."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

import click
import pytest
import tidy_rules as rules

from everstep.base import config_keys
from everstep.base.config import describe
from everstep.base.pipeline.schedule_table import KINDS as SCHEDULES
from everstep.chaos.fault_kinds import KINDS as FAULTS
from everstep.checkpoint.stores.store_table import STORES
from everstep.cli.main import COMMANDS, cli
from everstep.parallel.transport_kinds import KINDS as TRANSPORTS

SOURCE = rules.SRC / rules.PACKAGE
ROOMS = {"base/pipeline": SCHEDULES}


def members(room: str) -> set[str]:
    """The files of a folder that are no table of it."""
    return {path.stem for path in (SOURCE / room).glob("*.py")} - {"__init__", "kind", "schedule_table", "store_table"}


@pytest.mark.parametrize("room", ROOMS)
def test_each_file_of_a_room_is_in_its_table(room: str) -> None:
    modules = [importlib.import_module(f"everstep.{room.replace('/', '.')}.{name}") for name in members(room)]
    assert {module.KIND.name for module in modules} == set(ROOMS[room])


@pytest.mark.parametrize("table", [SCHEDULES, FAULTS, TRANSPORTS])
def test_each_kind_stands_in_its_table_by_its_name(table: Mapping[str, Any]) -> None:
    assert all(kind.name == name for name, kind in table.items())


def test_stores_are_named_by_the_config() -> None:
    assert members("checkpoint/stores") == set(config_keys.BUCKETS) == set(STORES) - {"file"}


def test_the_config_takes_what_there_is() -> None:
    types = {key: text for key, text, _, _ in describe()}
    assert types["schedule"].split(" | ") == list(SCHEDULES)
    assert types["transport"].split(" | ") == list(TRANSPORTS)


@pytest.mark.parametrize(("words", "names"), [((), COMMANDS), (("chaos",), FAULTS), (("schedule",), SCHEDULES)])
def test_help_names_what_there_is(words: tuple[str, ...], names: dict[str, object]) -> None:
    command: click.Command = cli
    for word in words:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found is not None
        command = found
    text = command.get_help(click.Context(command))
    assert [name for name in names if not re.search(rf"^ *{re.escape(name)} ", text, re.MULTILINE)] == []


def test_each_command_is_a_file_of_the_command_line() -> None:
    for name, (place, _) in COMMANDS.items():
        module, _, attribute = place.partition(":")
        assert module.startswith("everstep.cli."), name
        assert isinstance(getattr(importlib.import_module(module), attribute or "command"), click.Command), name


def test_the_page_names_files_that_are_there() -> None:
    page = (rules.ROOT / "CONTRIBUTING.md").read_text()
    section = page.partition("## Where to add\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 9
    for row in rows:
        _, _, new, edits, _ = row.split("|")
        paths = re.findall(r"`([a-z_/]+)(?:NAME)?\.py`", new + edits)
        assert paths and len(re.findall(r"`[a-z_/]+\.py`", edits)) <= 2, row
        assert all((SOURCE / f"{path}.py").is_file() or (SOURCE / path).is_dir() for path in paths), row
