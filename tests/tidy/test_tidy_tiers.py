"""Every test is run by `make test` or `make extended`, and `make test` says what failed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import all_tiers
from extended import LONGER, ROOT, TIERS

FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def test_what_takes_longer_is_run_by_extended() -> None:
    run = {word for parts in TIERS.values() for part in parts for word in part.command}
    longer = {str(path.relative_to(ROOT)) for path in FILES if LONGER.search(path.read_text())}
    assert longer and longer <= run


def test_all_folders_of_tests_are_run() -> None:
    """By a target that `make test` runs, but for those of `make extended` alone."""
    text = (ROOT / "Makefile").read_text()
    targets = [target[0] for kind in all_tiers.TIERS.values() for target in kind]
    recipes = "".join(re.findall(rf"^(?:{'|'.join(targets)}):.*\n(?:\t.*\n)+", text, re.MULTILINE))
    run = set(re.findall(r"tests/(\w+)", recipes))
    assert {path.relative_to(ROOT / "tests").parts[0] for path in FILES} - run == {"release"}


MAKE = """#!/bin/sh
echo "$*" >> calls
[ "$2" != broken ] || { echo "this is broken"; exit 1; }
"""


def test_a_failure_is_said_and_nothing_else_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make, calls = tmp_path / "make", tmp_path / "calls"
    make.write_text(MAKE)
    make.chmod(0o700)
    monkeypatch.setenv("MAKE", str(make))
    monkeypatch.setattr(all_tiers, "ROOT", tmp_path)
    monkeypatch.setattr(all_tiers, "STAMPS", tmp_path / "stamps")
    monkeypatch.setattr(all_tiers, "tree", lambda: "this")
    tiers = {"computing": (("broken",), ("sound",)), "waiting": (("slow", "N=1"),)}
    monkeypatch.setattr(all_tiers, "TIERS", tiers)
    monkeypatch.setenv("CI", "")
    assert all_tiers.main([]) == 1
    said = capfd.readouterr().out
    assert "this is broken" in said and said.splitlines()[-1].startswith("FAILED: broken, ")
    assert sorted(calls.read_text().split("\n"))[1:] == [
        f"--no-print-directory {t}" for t in ("broken", "slow N=1", "sound")
    ]

    calls.unlink()
    assert all_tiers.main([]) == 1
    assert calls.read_text() == "--no-print-directory broken\n" and "slow: has passed before" in capfd.readouterr().out
    assert all_tiers.main(["sound"]) == 0
    monkeypatch.setenv("CI", "true")
    assert all_tiers.main(["sound"]) == 0
    assert calls.read_text().endswith("broken\n--no-print-directory sound\n")
    assert all_tiers.main(["nonsense"]) == 2
