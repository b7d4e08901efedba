"""Which imports of a script its fork server may do: of known packages, as the script itself would find them."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.script.first_imports import COMPILER, first_imports

pytest.importorskip("transformers", reason="needs the extra hf")
FOUND = "from transformers import GPT2Config, GPT2LMHeadModel as G"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FOUND, ("transformers:GPT2Config", "transformers:GPT2LMHeadModel")),
        ("import torch\nfrom torch import nn", ()),
        (
            '"""About."""\nfrom __future__ import annotations\nimport os, json\nimport transformers as t',
            ("transformers:",),
        ),
        ("import transformers.utils, numpy\nfrom peft import *", ("transformers.utils:", "peft:")),
        ("import everstep\nimport transformers\nimport transformers", ("transformers:",)),
        ("import os\nos.environ['HF_HOME'] = '/'\nimport transformers", ()),
        ("import peft\ntry:\n    import transformers\nexcept ImportError:\n    pass", ("peft:",)),
        ("import peft\nfrom . import own\nimport transformers", ("peft:",)),
        ("import peft\nimport beside\nimport transformers", ("peft:",)),
        ("import sklearn\nimport transformers", ()),
        ("not python", ()),
        ("import re, torch\npattern = re.compile('a')\ntorch.save(model, 'checkpoint')", ()),
        ("import torch\nmodel = torch.compile(Net())", (COMPILER,)),
        ("import torch\n@torch.compile\ndef loss(a): return a", (COMPILER,)),
        ("import peft\nfrom torch.utils.checkpoint import checkpoint", (COMPILER, "peft:")),
    ],
)
def test_only_what_the_script_would_find_first(tmp_path: Path, text: str, expected: tuple[str, ...]) -> None:
    (tmp_path / "beside.py").write_text("import os; os.environ['HF_HOME'] = '/'")
    script = tmp_path / "train.py"
    script.write_text(text)
    assert first_imports(script) == expected


@pytest.mark.parametrize("hidden", ["transformers.py", "tqdm/__init__.py", "json.py"])
def test_nothing_beside_files_that_hide_a_package(tmp_path: Path, hidden: str) -> None:
    (tmp_path / hidden).parent.mkdir(exist_ok=True)
    (tmp_path / hidden).write_text("")
    script = tmp_path / "train.py"
    script.write_text(FOUND)
    assert first_imports(script) == ()


def test_a_folder_of_data_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    script = tmp_path / "train.py"
    script.write_text(FOUND)
    assert len(first_imports(script)) == 2


def test_a_file_that_cannot_be_read_imports_nothing(tmp_path: Path) -> None:
    assert first_imports(tmp_path / "none.py") == ()
