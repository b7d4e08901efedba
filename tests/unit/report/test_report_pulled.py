"""Logs of hosts that keep them: fetched as far as they are new, and found by whoever reads logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.base.errors import ConfigError
from everstep.protocol.messages import HostPlace
from everstep.report import pulled
from everstep.report.excerpt import newest
from everstep.report.logfiles import LogFiles
from everstep.runtime import commands
from everstep.runtime.files import agent_files
from everstep.runtime.files.host_directory import write_hosts

Pull = Callable[..., list[str]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a host was asked for; its logs are in `there`."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(agent_files, "LOG_BYTES", 200)

    def ask(run_dir: Path, name: str, args: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        found.append(args)
        assert name == "logs" and args["host"] == "host2"
        there = tmp_path / "there"
        data = agent_files.log_bytes(there, args.get("name", ""), args.get("start", 0))
        return {"logs": agent_files.logs_in(there), "data": data}

    monkeypatch.setattr(commands, "ask", ask)
    (tmp_path / "there").mkdir()
    (tmp_path / "job" / "logs").mkdir(parents=True)
    apart = HostPlace(agent_id="host2", apart=True, disk="host host2", address="h:1")
    write_hosts(tmp_path / "job", {"host2": apart, "h1": HostPlace(agent_id="h1", apart=False, disk="job")})
    return found


def line(text: str, at: int = 1) -> str:
    return json.dumps({"time_unix_ns": at, "level": "info", "source": "stdout", "message": text}) + "\n"


def test_what_is_new_is_fetched_and_what_was_rotated_away_goes(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    job, there = tmp_path / "job", tmp_path / "there"
    log = there / "worker-2.jsonl"
    log.write_text("".join(line(f"line {n}", n) for n in range(20)))
    (there / "worker-2.error").write_text("no log")
    assert pulled.pull_logs(job) == []
    assert [found.text for found in newest(job, 2)] == [f"line {n}" for n in range(20)]
    asked.clear()
    assert pulled.pull_logs(job) == [] and len(asked) == 1, "nothing is new"
    log.rename(there / "worker-2.1.jsonl")
    log.write_text(line("anew", 99))
    pulled.pull_logs(job, "host2")
    assert [found.text for found in newest(job, 2)][-2:] == ["line 19", "anew"]
    (there / "worker-2.1.jsonl").unlink()
    pulled.pull_logs(job)
    (job / "logs" / "worker-7.jsonl").write_text(line("here"))
    assert {found.text for found in LogFiles(job).read()} == {"anew", "here"}
    assert {found.text for found in LogFiles(job, events=False, host="host2").read()} == {"anew"}


def test_nothing_goes_behind_a_link_nor_of_a_host_of_a_longer_name(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    job, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    (job / "logs" / "worker-0.b.host2-1.jsonl").write_text(line("of host b.host2"))
    assert pulled.pull_logs(job) == []
    assert (job / "logs" / "worker-0.b.host2-1.jsonl").exists()
    elsewhere.mkdir()
    (elsewhere / "worker-0.host2-1.jsonl").write_text(line("of another job"))
    (job / "logs").rename(job / "before")
    (job / "logs").symlink_to(elsewhere)
    (problem,) = pulled.pull_logs(job)
    assert "symbolic link" in problem
    assert (elsewhere / "worker-0.host2-1.jsonl").exists()


def test_a_host_that_there_is_not_is_one_line(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--host: expected a host of .* \(host2\), got 'host9'"):
        pulled.pull_logs(tmp_path / "job", "host9")
    assert pulled.hosts_apart(tmp_path) == [] and asked == []


def test_a_job_that_is_over_is_read_as_far_as_it_was_fetched(
    asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(*args: Any) -> dict[str, Any]:
        raise commands.NoJobRunning("over")

    monkeypatch.setattr(commands, "ask", nobody)
    assert pulled.pull_logs(tmp_path / "job") == []


@pytest.mark.parametrize("name", ["../x.jsonl", "worker-1.error", "/etc/passwd", "worker-1.jsonl/..", ""])
def test_hosts_give_no_other_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "worker-1.error").write_text("secret")
    assert agent_files.log_bytes(tmp_path, name, 0) == b""
