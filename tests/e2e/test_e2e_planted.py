"""`everstep check` finds planted mistakes, with object and line, by its default options; a sample here, all of them in
`make extended`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_cli import everstep

import planted_mistakes
from sampling import mostly_longer

_SAMPLE = ("cache in a module",)
_EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "planted", mostly_longer(planted_mistakes.PLANTED, lambda p: p.name in _SAMPLE), ids=lambda p: p.name
)
def test_a_planted_mistake_is_named_with_its_line(planted: planted_mistakes.Planted, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(planted.text)
    done = everstep("check", "train.py", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)["findings"]
    right = [f for f in found if planted.object in f["object"] and {f["line"], f["changed"]} & planted.lines]
    assert right and right[0]["file"].endswith("train.py"), (found, planted.lines)


@pytest.mark.longer
@pytest.mark.parametrize("target", planted_mistakes.EXAMPLES)
def test_the_examples_raise_no_alarm(target: str) -> None:
    done = everstep("check", target, "--json", cwd=_EXAMPLES)
    assert done.returncode == 0, done.stdout + done.stderr
    covered = json.loads(done.stdout)["covered"]
    assert any("resumed on three workers" in text for text in covered), covered
