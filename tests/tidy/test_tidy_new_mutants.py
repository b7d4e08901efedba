"""What is made of a planted bug with which the tests do not end, and of one in a line that imports alone execute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import new_mutants
from mutant_operators import Generated
from mutants import NoEnd

BUG = Generated("protocol/step_phases.py", 1, 0, 1, "b", "any", "f")


class Hanging:
    """Trees in which no test ends."""

    @contextmanager
    def planted(self, file: Path, change: Any) -> Iterator[tuple[Path, str]]:
        yield Path("tree"), "a = 1"

    def noticing(self, tree: Path, rungs: Any) -> str | None:
        raise NoEnd("test_x and others: pytest ended (too late), but no test has failed")


def test_a_bug_with_which_no_test_ends_is_noticed_and_counted_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    executed: Any = SimpleNamespace(tests=lambda bug: [], seeds=lambda bug: pytest.fail("it is noticed already"))
    trees: Any = Hanging()
    found = new_mutants.Judge(trees, executed, tmp_path)(BUG)
    assert found.killer.startswith("tests without an end: test_x")
    assert new_mutants.report([found], tmp_path / "found.json") == 0
    assert "0 by tests, 1 as tests do not end, 0 by seeds" in capsys.readouterr().out


def test_a_file_that_imports_alone_execute_is_given_to_the_tests_of_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_mutants, "_contexts", lambda path, file: {1: {""}})
    assert new_mutants.Executed(tmp_path).tests(BUG) == ["tests/unit/protocol"]
