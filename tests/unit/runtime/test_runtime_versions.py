"""What has to be alike on all hosts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from everstep.runtime.versions import differences, task_digest, versions


def test_a_host_is_like_itself() -> None:
    here = versions()
    assert {"python", "everstep", "torch", "numpy", "instruction set"} <= set(here) and not differences(here, here)


def test_what_differs_is_named_with_both_values() -> None:
    here = {"torch": "2.13.0", "instruction set": "x86_64 avx2"}
    there = {"torch": "2.12.0", "instruction set": "x86_64 avx512f", "task file": "abc", "numpy": ""}
    assert differences(here, there) == [
        "instruction set is x86_64 avx2, the job's host has x86_64 avx512f",
        "task file is not here, the job's host has abc",
        "torch is 2.13.0, the job's host has 2.12.0",
    ]
    assert not differences({**there, "instruction set": "aarch64 sve"}, there, mixed=True)


def test_the_file_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "raise SystemExit('nothing of it is run')\n"
    (tmp_path / "inner").mkdir()
    for path in (tmp_path / "mine.py", tmp_path / "inner" / "__init__.py", tmp_path / "inner" / "deep.py"):
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    for task in (f"{tmp_path}/mine.py:Task", f"{tmp_path}/mine.py", "mine:Task", "inner:Task", "inner.deep:Task"):
        assert task_digest(task) == digest
    for task in ("digits", f"{tmp_path}/none.py:Task", "nowhere:Task"):
        assert task_digest(task) == ""
