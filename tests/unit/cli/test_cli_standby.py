"""Hosts that stand by: which directory they may go on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.base.errors import ConfigError
from everstep.cli import replica, standby
from everstep.cli.replica import kept_apart
from everstep.runtime.address import JOB_FILE
from everstep.runtime.places import leave_word
from everstep.runtime.replica import OWN_FOLDER, REPLICA_FILE

JOB, OTHER = "ab" * 16, "cd" * 16


def test_a_directory_of_the_same_name_on_another_disk_is_not_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there is of another job, or a copy."""
    monkeypatch.setattr(standby, "_SHARED_S", 0.0)
    leave_word(tmp_path, None, JOB)
    assert standby._sees(tmp_path, lambda: JOB)
    assert not standby._sees(tmp_path, lambda: OTHER)
    assert not standby._sees(tmp_path / "none", lambda: OTHER)


def test_what_may_become_a_replica(tmp_path: Path) -> None:
    assert not kept_apart(tmp_path, JOB), "it is empty"
    (tmp_path / JOB_FILE).touch()
    with pytest.raises(ConfigError, match="files of another job") as caught:
        kept_apart(tmp_path, JOB)
    assert str(tmp_path) in str(caught.value)
    leave_word(tmp_path, None, JOB)
    assert kept_apart(tmp_path, JOB), "the job was led there"
    leave_word(tmp_path, None, OTHER)
    with pytest.raises(ConfigError, match="files of another job"):
        kept_apart(tmp_path, JOB)
    (tmp_path / REPLICA_FILE).touch()
    assert kept_apart(tmp_path, JOB), "a host that stood by has led there"
    (tmp_path / "place").unlink()
    assert not kept_apart(tmp_path, JOB), "it is one"


def test_what_is_of_before_is_set_aside_but_for_the_checkpoints(tmp_path: Path) -> None:
    """Other hosts may need the parts that lie there."""
    leave_word(tmp_path, None, JOB)
    for name in (JOB_FILE, "events.jsonl", "checkpoints/part"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert "previous-1" in replica._make_ready(tmp_path, JOB, bytes(32))
    assert (tmp_path / "previous-1" / "events.jsonl").exists() and not (tmp_path / "events.jsonl").exists()
    assert (tmp_path / OWN_FOLDER / "checkpoints" / "part").exists()
    assert not (tmp_path / "place").exists()
    assert replica._make_ready(tmp_path, JOB, bytes(32)) == ""
