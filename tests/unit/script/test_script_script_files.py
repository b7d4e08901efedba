"""What a script is made of, and so when it is rehearsed again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everstep.script.script_files import MOST_FILES, files_of
from everstep.train.rehearsing import is_rehearsed, script_digest

SOURCES = {
    "train.py": "import torch, os.path\nimport model\nfrom lib import nets, nothing\ndef later():\n    import lazy\n",
    "model.py": "from lib.parts.heads import Head\nimport train\n",
    "lazy.py": "",
    "unused.py": "",
    "lib/__init__.py": "",
    "lib/nets.py": "from .parts import heads\nfrom . import twice\n",
    "lib/twice/__init__.py": "from ..nets import x\n",
    "lib/parts/heads.py": "x = '\\d'\nfrom ....... import far\n",
    "lib/broken.py": "def",
    "os.py": "",
}
USED = ["lazy.py", "lib/__init__.py", "lib/nets.py", "lib/parts/heads.py", "lib/twice/__init__.py", "model.py", "os.py"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "train.py"


def test_modules_of_its_own_folder_belong_to_a_script(script: Path, recwarn: pytest.WarningsRecorder) -> None:
    first, *others = files_of(str(script))
    assert first == script and [str(path.relative_to(script.parent)) for path in others] == USED
    assert not recwarn.list, "what the compiler has to say of a source is said when it is run"


@pytest.mark.parametrize("name", [*USED, "train.py"])
def test_it_is_rehearsed_again_when_one_of_them_changes(script: Path, name: str) -> None:
    before = script_digest(str(script), ["a"])
    (script.parent / "rehearsed.json").write_text(json.dumps({"script": before, "note": ""}))
    assert is_rehearsed(script.parent, script_digest(str(script), ["a"]))
    (script.parent / name).write_text(SOURCES[name] + "# changed\n")
    assert not is_rehearsed(script.parent, script_digest(str(script), ["a"]))


@pytest.mark.parametrize("name", ["unused.py", "lib/broken.py"])
def test_what_it_does_not_import_is_none_of_it(script: Path, name: str) -> None:
    before = script_digest(str(script), [])
    (script.parent / name).write_text("changed = 1\n")
    assert script_digest(str(script), []) == before


def test_sources_that_cannot_be_read_and_endless_ones(script: Path) -> None:
    (script.parent / "model.py").write_bytes(b"\xff\x00" + b"(" * 100_000)
    assert script_digest(str(script), [])
    script.write_text("\n".join(f"import m{n}" for n in range(2 * MOST_FILES)))
    for n in range(2 * MOST_FILES):
        (script.parent / f"m{n}.py").touch()
    assert len(files_of(str(script))) == MOST_FILES
