"""What TASK may be, and one line that says what does not import and why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from everstep.base.config import load_config
from everstep.base.errors import ConfigError
from everstep.cli import task_loading
from everstep.cli.task_loading import load_task, parse_task

GOOD = """
import everstep
class Mine(everstep.Task):
    defaults = {"lanes": 4}
class NeedsArgument(everstep.Task):
    def __init__(self, size):
        pass
number = 3
"""


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_loading, "zoo_names", lambda: ("resnet18-digits", "transformer-text"))


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_own_task.py"
    path.write_text(GOOD)
    return path


def test_kinds(task_file: Path) -> None:
    assert (parse_task("resnet18-digits").kind, parse_task("resnet18-digits").short) == ("zoo", "resnet18-digits")
    zoo = parse_task("transformer-text:/some/where")
    assert (zoo.kind, zoo.where, zoo.what, zoo.short) == ("zoo", "transformer-text", "/some/where", "transformer-text")
    module = parse_task("package.module:Class")
    assert (module.kind, module.where, module.what, module.short) == ("module", "package.module", "Class", "Class")
    file = parse_task(f"{task_file}:Mine")
    assert (file.kind, file.where, file.what, file.short) == ("file", str(task_file), "Mine", "Mine")
    script = parse_task(str(task_file))
    assert (script.kind, script.where, script.short) == ("script", str(task_file), "my_own_task")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("resnet19-digits", ["no ready task", "did you mean 'resnet18-digits'"]),
        ("nonsense", ["'nonsense'", "resnet18-digits, transformer-text"]),
        ("missing.py", ["no file missing.py"]),
        ("missing.py:Class", ["no file missing.py"]),
        ("not a module:Class", ["no ready task"]),
    ],
)
def test_what_is_no_task(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_task(text)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_loads_from_a_file_and_sets_the_config(task_file: Path) -> None:
    config = load_config([])
    task = load_task(f"{task_file}:Mine", config)
    assert type(task).__name__ == "Mine"
    assert task.config is config


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("Other", ["has no 'Other'", "it has Mine, NeedsArgument"]),
        ("number", ["subclass of everstep.Task", "a int"]),
        ("NeedsArgument", ["cannot be constructed", "TypeError"]),
    ],
)
def test_says_why_a_class_cannot_be_used(task_file: Path, what: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_task(f"{task_file}:{what}", load_config([]))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module_at_all", ["ModuleNotFoundError", "no_such_module_at_all"]),
        ("def broken(:", ["SyntaxError"]),
        ("raise ValueError('two\\nlines')", ["ValueError: two lines"]),
    ],
)
def test_says_why_a_file_does_not_import(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "broken_task.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_task(f"{path}:Task", load_config([]))
    message = str(caught.value)
    assert "does not import" in message
    assert "\n" not in message
    for word in words:
        assert word in message


def test_says_which_module_does_not_import() -> None:
    with pytest.raises(ConfigError, match=r"module 'no_such_package\.x' does not import: ModuleNotFoundError"):
        load_task("no_such_package.x:Task", load_config([]))


@pytest.mark.parametrize("kind", ["module", "file"])
def test_neighbours_are_found_and_what_is_installed_comes_first_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    name, work, folder = f"task_of_{kind}", tmp_path / "work", tmp_path / ("work" if kind == "module" else "folder")
    installed = tmp_path / "installed"
    for path in (work, folder, installed):
        path.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(f"from {name}_beside import WHERE\n{GOOD}")
    for path in (folder, installed):
        (path / f"{name}_beside.py").write_text(f"WHERE = {path.name!r}\n")
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "path", [str(installed), *sys.path])
    before = list(sys.path)
    task = load_task(f"{name}:Mine" if kind == "module" else f"{folder / name}.py:Mine", load_config([]))
    assert folder.name == sys.modules[type(task).__module__].WHERE, "what lies beside a task is what it means"
    assert sys.path == [*before, *dict.fromkeys([str(folder), str(work)])]


def test_a_script_is_no_task(task_file: Path) -> None:
    with pytest.raises(ConfigError, match="is a script"):
        load_task(str(task_file), load_config([]))
