"""What has to be alike on all hosts."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from everstep.runtime import versions as runtime_versions
from everstep.runtime.versions import differences, task_digest, versions


def test_a_host_is_like_itself() -> None:
    here = versions()
    assert {"python", "everstep", "torch", "numpy", "everstep's sources"} <= set(here) and not differences(here, here)


def test_what_differs_is_named_with_both_values() -> None:
    here = {"torch": "2.13.0", "everstep's sources": "1"}
    there = {"torch": "2.12.0", "everstep's sources": "2", "task file": "abc", "numpy": ""}
    assert differences(here, there) == [
        "everstep's sources is 1, the job's host has 2",
        "task file is not here, the job's host has abc",
        "torch is 2.13.0, the job's host has 2.12.0",
    ]


def test_another_checkout_of_one_version_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(runtime_versions.__file__).parents[1]
    copied = tmp_path / "everstep" / "runtime"
    copied.mkdir(parents=True)
    for path in (own / "__init__.py", own / "runtime" / "versions.py"):
        shutil.copy(path, tmp_path / "everstep" / path.relative_to(own))
    here = versions()
    monkeypatch.setattr(runtime_versions, "__file__", str(copied / "versions.py"))
    found = []
    for more in ("", "# another line\n"):
        (copied / "versions.py").write_text((own / "runtime" / "versions.py").read_text() + more)
        runtime_versions.own_sources.cache_clear()
        found.append(versions()["everstep's sources"])
    runtime_versions.own_sources.cache_clear()
    assert found[0] != found[1] and here["everstep's sources"] not in found


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
