"""Which imports of a script its fork server may do: installed packages, as the script itself would find them."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.script.first_imports import first_imports


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\nfrom torch import nn", ("torch:", "torch:nn")),
        ('"""About."""\nfrom __future__ import annotations\nimport os, json\nimport numpy as np', ("numpy:",)),
        ("import torch.nn.functional as F, numpy", ("torch.nn.functional:", "numpy:")),
        ("from numpy import *", ("numpy:",)),
        ("import everstep\nimport torch\nimport torch", ("torch:",)),
        ("import torch\nimport os\nos.environ['HOME'] = '/'\nimport numpy", ("torch:",)),
        ("import torch\ntry:\n    import numpy\nexcept ImportError:\n    pass", ("torch:",)),
        ("import torch\nfrom . import own\nimport numpy", ("torch:",)),
        ("import nowhere_to_be_found\nimport numpy", ()),
        ("import beside\nimport numpy", ()),
        ("import torch\nimport numpy", ("torch:",)),
        ("import torch\nimport json\nimport yaml", ("torch:",)),
        ("not python", ()),
    ],
)
def test_only_what_the_script_would_find_first(tmp_path: Path, text: str, expected: tuple[str, ...]) -> None:
    (tmp_path / "beside.py").write_text("import os; os.environ['HF_HOME'] = '/'")
    if text.endswith("import torch\nimport numpy"):  # one that is hidden by a file beside the script
        (tmp_path / "numpy.py").write_text("")
    if "yaml" in text:
        (tmp_path / "json").mkdir()
        (tmp_path / "json" / "__init__.py").write_text("")
    script = tmp_path / "train.py"
    script.write_text(text)
    assert first_imports(script) == expected


def test_a_file_that_cannot_be_read_imports_nothing(tmp_path: Path) -> None:
    assert first_imports(tmp_path / "none.py") == ()
