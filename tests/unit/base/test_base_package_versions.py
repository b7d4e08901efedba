"""Versions of other packages that lie outside the range which Everstep asks for."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from everstep.base.errors import ConfigError
from everstep.base.package_versions import in_range, refuse_versions


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.13,<2.16", True),
        ("2.13", ">=2.13.0,<2.16", True),
        ("2.15.1", ">=2.13,<2.16", True),
        ("2.16.0", ">=2.13,<2.16", False),
        ("2.16.0.dev20261101+cpu", ">=2.13,<2.16", False),
        ("2.9.1", ">=2.13,<2.16", False),  # numbers, not letters
        ("5.20.0", ">=5.20,<6", True),
        ("4.57.1", ">=5.20,<6", False),
        ("6.0.0", ">=5.20,<6", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, wanted: str, fits: bool) -> None:
    assert in_range(version, wanted) is fits


def test_one_outside_the_range_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_versions("torch", "transformers", "lightning", "no-such-package", "pip")
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1" if name == "transformers" else real(name))
    with pytest.raises(ConfigError) as refused:
        refuse_versions("torch", "transformers")
    assert str(refused.value).startswith("transformers: expected a version >=5.20,<6, got 4.57.1: pip install 'transf")


def test_a_package_that_was_removed_by_half_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformers-5.20.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    refuse_versions("transformers")
