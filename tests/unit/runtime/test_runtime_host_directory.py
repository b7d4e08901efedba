"""Which directory a host works in, and whose checkpoints it does not see."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from everstep.base.config_keys import CheckpointConfig, DiskTierConfig
from everstep.base.errors import ConfigError
from everstep.cli.standby_fill import kept_apart
from everstep.protocol.messages import HostPlace, JobFacts
from everstep.runtime.files.host_directory import (
    OWN_FOLDER,
    Place,
    begin_anew,
    disk_of,
    domains_there,
    find_place,
    leave_word,
    others,
    word_in,
    write_hosts,
)
from everstep.runtime.files.led_directory import led_directory
from everstep.runtime.lead.coordinator_setup import job_facts


def facts(run_dir: Path, word: str) -> JobFacts:
    return JobFacts(
        task="t", argv=[], config={}, run_dir=str(run_dir), coordinator_file="", job_pid=1, machine="m", place=word
    )


def test_a_host_that_finds_the_word_shares_the_directory_under_any_name(tmp_path: Path) -> None:
    job, alias, other = tmp_path / "job", tmp_path / "alias", tmp_path / "other"
    job.mkdir()
    alias.symlink_to(job)
    leave_word(job, None)
    word = word_in(job)
    assert find_place(facts(job, word), "", "h") == Place(job, apart=False)
    assert find_place(facts(tmp_path / "nowhere", word), str(alias), "h") == Place(alias, apart=False)
    assert find_place(facts(job, word), str(other), "h") == Place(other, apart=True)
    leave_word(job, None)
    assert word_in(job) != word, "a copy from before is none of the next run"


def test_a_word_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    """All hosts would share a directory that they do not see, or what was led in would be filled as a copy."""
    assert job_facts(tmp_path, {"config": {}}, 0).place == "" and not kept_apart(tmp_path, "ab" * 16)
    (tmp_path / "place").symlink_to("elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        job_facts(tmp_path, {"config": {}}, 0)
    with pytest.raises(OSError, match="symbolic link"):
        kept_apart(tmp_path, "ab" * 16)
    for copying_host in ("", "h"):
        with pytest.raises(OSError, match="symbolic link"):
            led_directory(tmp_path, copying_host, bytes(32), None, 2.0)
    assert word_in(tmp_path) == "", "of no directory in which this host only looks"


def test_a_private_directory_that_somebody_else_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    top = tmp_path / f"everstep-{os.getuid()}"
    top.mkdir(mode=0o777)
    top.chmod(0o777)
    with pytest.raises(ConfigError, match="not this user's alone"):
        find_place(facts(tmp_path / "nowhere", "w"), "", "h")
    top.rmdir()
    top.symlink_to("/tmp")
    with pytest.raises(ConfigError, match=r"not this user's alone|cannot make"):
        find_place(facts(tmp_path / "nowhere", "w"), "", "h")


def test_checkpoints_may_be_shared_where_the_run_directory_is_not_and_the_other_way(tmp_path: Path) -> None:
    job, own, shared, local = (tmp_path / name for name in ("job", "own", "shared", "local"))
    job.mkdir()
    leave_word(job, str(shared))
    told, apart = facts(job, word_in(job)), Place(own, apart=True)
    assert disk_of(told, apart, CheckpointConfig(), "h") == (own / "checkpoints", "host h")
    on_shared = CheckpointConfig(disk=DiskTierConfig(path=str(shared)))
    assert disk_of(told, apart, on_shared, "h") == (shared, "job")
    on_local = CheckpointConfig(disk=DiskTierConfig(path=str(local)))
    assert disk_of(told, Place(job, apart=False), on_local, "h") == (local, "host h")
    not_shared = CheckpointConfig(shared="no")
    assert disk_of(told, Place(job, apart=False), not_shared, "h") == (job / "checkpoints", "host h")
    with pytest.raises(ConfigError, match=r"checkpoint.shared=yes: expected .* it is not here"):
        disk_of(told, apart, CheckpointConfig(shared="yes"), "h")
    (job / "lock").touch()
    near = Place(job / OWN_FOLDER, apart=True)
    assert disk_of(told, near, CheckpointConfig(), "h")[1] == "host h", "what lies beside it decides nothing"
    inside = Place(job / OWN_FOLDER, apart=True, around=str(job))
    assert disk_of(told, inside, CheckpointConfig(shared="yes"), "h") == (job / "checkpoints", "job")
    (job / "place").unlink()  # another host leads
    assert disk_of(told, inside, CheckpointConfig(), "h") == (job / "checkpoints", "host h")


def test_each_disk_that_is_not_seen_has_one_address(tmp_path: Path) -> None:
    def place(name: str, disk: str) -> HostPlace:
        return HostPlace(agent_id=name, apart=disk != "job", disk=disk, address=f"{name}:1")

    rows = {"a": place("a", "job"), "b": place("b", "job"), "c": place("c", "host c"), "d": place("d", "host d")}
    write_hosts(tmp_path, {name: rows[name] for name in "ab"})
    assert others(tmp_path, "a") == {} and not list(tmp_path.iterdir())
    write_hosts(tmp_path, rows)
    assert others(tmp_path, "a") == others(tmp_path, "b") == {"c": "c:1", "d": "d:1"}
    assert others(tmp_path, "c") == {"a": "a:1", "d": "d:1"}
    write_hosts(tmp_path, {"a": rows["a"]})
    assert others(tmp_path, "a") == {}, "the others are gone"
    for text in ("", "[]", '{"a": 3}', '{"a": {"disk": 1}}'):
        (tmp_path / "hosts.json").write_text(text)
        assert others(tmp_path, "c") == {}


def test_hosts_say_in_which_domains_they_are(tmp_path: Path) -> None:
    def place(name: str, **labels: str) -> HostPlace:
        return HostPlace(agent_id=name, apart=True, disk=f"host {name}", address=f"{name}:1", domains=labels)

    assert domains_there(tmp_path) == {}
    write_hosts(tmp_path, {"b": place("b", rack="r1", zone="z"), "a": place("a")})
    assert domains_there(tmp_path) == {"a": (("host", "a"),), "b": (("zone", "z"), ("rack", "r1"), ("host", "b"))}
    rows = json.loads((tmp_path / "hosts.json").read_text())
    for labels in ({"rack": "a\n"}, {"zone": 3}, {"host": "b"}, 3):
        rows["b"]["domains"] = labels
        (tmp_path / "hosts.json").write_text(json.dumps(rows))
        assert domains_there(tmp_path) == {"a": (("host", "a"),)}


def test_what_nobody_could_know_again_does_not_arrive_twice(tmp_path: Path) -> None:
    """A head knows by their origin which events and rows it has; samples, launcher's lines and weights have none."""
    for name in ("events.jsonl", "ledger/a.jsonl", "metrics/h.jsonl", "logs/output.log", "final/digest.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    before = sorted(path.name for path in tmp_path.iterdir())
    begin_anew(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "no agent's folder"
    (tmp_path / "source").write_text("0123456789abcdef\n")
    begin_anew(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "ledger", "source"]
