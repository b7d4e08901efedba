"""A key that is said twice would silently be overruled: refused, with key and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.base.errors import ConfigError
from everstep.cli.config_file import read_config_file


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 1\nlanes: 4\nsteps: 2\n", ("line 3", "'steps'", "line 1")),
        ("loader:\n  workers: 1\n  workers: 1\n", ("line 3", "'workers'", "line 2")),
    ],
)
def test_a_key_given_twice(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config_file(written(tmp_path, text))
    assert all(word in str(caught.value) for word in words)


def test_everything_else_is_yaml_as_ever(tmp_path: Path) -> None:
    text = "a: &x {workers: 1}\nb:\n  <<: *x\n  prefetch: 2\nworkers: 3\n"
    assert read_config_file(written(tmp_path, text)) == {
        "a": {"workers": 1},
        "b": {"workers": 1, "prefetch": 2},
        "workers": 3,
    }
    assert read_config_file(written(tmp_path, "")) == {}
