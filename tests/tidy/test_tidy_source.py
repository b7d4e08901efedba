"""The source obeys the rules of the house: layers, purity, lengths, docstrings, no dead files."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import tidy_raising
import tidy_rules as rules

EACH = [
    rules.wrong_directions,
    rules.wrong_rooms,
    rules.impurities,
    rules.late_decoders,
    rules.long_functions,
    rules.long_file,
    rules.missing_docstrings,
    rules.asserts,
    rules.pickles,
    rules.own_processes,
    rules.opened_elsewhere,
    rules.held,
    rules.limited_waits,
    rules.unguarded,
    rules.unfinished,
    rules.names_of_pictures,
    rules.parsed_reasons,
    rules.causeless,
    rules.crowded_types,
    rules.writes_into_others,
]


def test_the_source_was_found() -> None:
    rooms = {source.room for source in rules.all_sources()}
    assert {"base", "placement", "order", "protocol", "exact", "runtime", "train", "cli"} <= rooms


@pytest.mark.parametrize("rule", EACH, ids=lambda rule: rule.__name__)
def test_every_file(rule: object) -> None:
    problems = [problem for source in rules.all_sources() for problem in rule(source)]  # type: ignore[operator]
    assert not problems, "\n" + "\n".join(problems)


def test_rooms_are_named_for_what_lives_there() -> None:
    assert not list(rules.rooms_without_name(source.module for source in rules.all_sources()))


def test_files_are_named_for_what_lies_there() -> None:
    assert not list(rules.files_without_name(source.module for source in rules.all_sources()))
    tests = [path.stem for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert len(tests) > 100 and not list(rules.files_without_name(tests))


def test_no_dead_files() -> None:
    project = tomllib.loads((rules.ROOT / "pyproject.toml").read_text())["project"]
    entries = {target.partition(":")[0] for target in project["scripts"].values()}
    problems = list(rules.dead_modules({source.module: source for source in rules.all_sources()}, entries))
    assert not problems, "\n" + "\n".join(problems)


def test_no_files_import_each_other() -> None:
    problems = list(rules.cycles({source.module: source for source in rules.all_sources()}))
    assert not problems, "\n" + "\n".join(problems)


def test_nothing_is_unused() -> None:
    found = dict(rules.unused_names({source.module: source for source in rules.all_sources()}))
    known = rules.CALLED_BY_OTHERS | rules.PUBLIC
    assert not found.keys() - known, "\n" + "\n".join(text for name, text in found.items() if name not in known)
    assert not known - found.keys(), "let off without need"


def test_what_is_said_to_be_raised_is() -> None:
    problems = list(tidy_raising.untrue_raises(rules.all_sources()))
    assert not problems, "\n" + "\n".join(problems)


def test_a_name_means_one_thing() -> None:
    problems = list(rules.shared_names(rules.all_sources()))
    assert not problems, "\n" + "\n".join(problems)


def test_test_files_have_unique_names() -> None:
    names: dict[str, list[str]] = {}
    for path in (rules.ROOT / "tests").rglob("*.py"):
        if path.name not in ("conftest.py", "__init__.py"):
            names.setdefault(path.name, []).append(str(path.relative_to(rules.ROOT)))
    assert not {name: paths for name, paths in names.items() if len(paths) > 1}


def test_test_files_are_of_bearable_length() -> None:
    for path in [*(rules.ROOT / "tests").rglob("*.py"), *(rules.ROOT / "bench").rglob("*.py")]:
        assert len(path.read_text().splitlines()) <= rules.MAX_TEST_FILE_LINES, path
