"""What a process says that it has imported: the user's files as they were when they were imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from everstep.script import imported
from everstep.script.imported import LateImports, code_here

NAMES = ("helper_of_mine", "linked_of_mine", "package_of_mine")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


def test_a_file_that_is_edited_later_is_not_what_runs_here(folder: Path) -> None:
    """A worker says all of it again when its coordinator was restarted."""
    path = folder / "helper_of_mine.py"
    path.write_text("FACTOR = 1\n")
    module = importlib.import_module("helper_of_mine")
    imports = LateImports()
    first = imports.all().files["helper_of_mine.py"]
    path.write_text("FACTOR = 2  # another one\n")
    assert imports.all().files["helper_of_mine.py"] == first
    path.unlink()
    assert imports.all().files["helper_of_mine.py"] == first and imports.more() is None
    path.write_text("FACTOR = 2  # another one\n")
    importlib.reload(module)
    assert imports.all().files["helper_of_mine.py"] == code_here().files["helper_of_mine.py"] != first


def test_files_and_packages_behind_links_are_told_by_content(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    (elsewhere / "package_of_mine").mkdir(parents=True)
    for path in ("common.py", "package_of_mine/__init__.py", "package_of_mine/inner.py"):
        (elsewhere / path).write_text("")
    (folder / "linked_of_mine.py").symlink_to(elsewhere / "common.py")
    site = folder / "site-packages"
    site.mkdir()
    (site / "package_of_mine").symlink_to(elsewhere / "package_of_mine")
    sys.path.insert(0, str(site))
    try:
        importlib.import_module("linked_of_mine")
        importlib.import_module("package_of_mine.inner")
    finally:
        sys.path.remove(str(site))
    said = code_here()
    assert {"linked_of_mine.py", "package_of_mine/__init__.py", "package_of_mine/inner.py"} <= said.files.keys()
    assert "package_of_mine" not in said.packages


def test_a_package_that_was_installed_anew_since_it_was_imported_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", ModuleType("peft"))
    monkeypatch.setattr(sys.modules["peft"], "__version__", "1.0", raising=False)
    for installed, said in {"1.0": "1.0", "1.1": "1.0, beside 1.1 on the disk"}.items():
        imported._version.cache_clear()
        monkeypatch.setattr(imported.metadata, "version", {"peft": installed}.get)
        assert imported._version("peft") == said
    imported._version.cache_clear()
