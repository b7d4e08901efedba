"""One file of targets for all runs of a folder: each comes and goes, those that died go with the next one."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from everstep.dashboard.guard import kept_token
from everstep.runtime.files.run_lock import run_lock
from everstep.runtime.targets import TARGETS_FILE, TARGETS_TOKEN_FILE, put_target, shared_folder


def target(name: str, port: int = 1) -> dict[str, Any]:
    return {"targets": [f"127.0.0.1:{port}"], "labels": {"run": name}}


def known(folder: Path) -> list[str]:
    return [one["labels"]["run"] for one in json.loads((folder / TARGETS_FILE).read_text())]


def test_runs_come_and_go(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    a, b, c = (tmp_path / name for name in "abc")
    with contextlib.ExitStack() as held:
        for run_dir in (a, b):
            held.enter_context(run_lock(run_dir))
            put_target(run_dir, target(run_dir.name))
        put_target(a, target("a", 2))
        assert known(tmp_path) == ["b", "a"]
        put_target(b, None)
        assert known(tmp_path) == ["a"]
    c.mkdir()
    put_target(c, target("c"))
    assert known(tmp_path) == ["c"], "nobody holds a any more"
    assert (tmp_path / TARGETS_FILE).stat().st_size < 200


def test_what_others_wrote_is_passed_over(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for said in ("{", "3", json.dumps([1, {}, {"labels": 1}, {"labels": {"run": "../x"}}, {"labels": {"run": "x\0"}}])):
        (tmp_path / TARGETS_FILE).write_text(said)
        put_target(tmp_path / "a", target("a"))
        assert known(tmp_path) == ["a"]


def test_a_folder_that_others_may_write_to_has_none(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert shared_folder(tmp_path / "a") is None
    put_target(tmp_path / "a", target("a"))
    assert not list(tmp_path.iterdir())


def test_runs_of_a_folder_share_the_token(tmp_path: Path) -> None:
    shared = kept_token(tmp_path / TARGETS_TOKEN_FILE)
    (tmp_path / "metrics-token").write_text("another-token-of-old")
    (tmp_path / "metrics-token").chmod(0o600)
    assert kept_token(tmp_path / "metrics-token", shared) == shared == kept_token(tmp_path / "metrics-token")
