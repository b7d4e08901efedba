"""Notices of a real job: they arrive, and what hangs or fails holds up neither steps nor bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_cli import digest_of, events_of, one_error, together


@pytest.mark.longer
def test_notices_arrive_and_hold_up_nothing(small_task: str, tmp_path: Path) -> None:
    out = tmp_path / "told"
    good = tmp_path / "good.sh"
    good.write_text(f"#!/bin/sh\ncat >> {out}\n")
    good.chmod(0o700)
    settings = ["--set", "notify.events=[job_started,worker_evicted,job_completed]", "--set"]
    job = ["run", small_task, "--workers", "2", "--chaos", "kill:target=worker:1,at=4"]
    fails = [*job, *settings, "notify.command=false", "--run-dir", str(tmp_path / "fails")]
    works = [*job, *settings, f"notify.command={good}", "--run-dir", str(tmp_path / "works")]
    done = together(fails, works)
    assert [one.returncode for one in done] == [0, 0], done
    assert digest_of(tmp_path / "fails") == digest_of(tmp_path / "works")
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["event"] for one in told] == ["job_started", "worker_evicted", "job_completed"]
    assert told[1]["text"].startswith("works: worker 1 was evicted: ") and told[1]["cause"] == "killed"
    assert "notify has not received everything" in done[0].stdout + done[0].stderr
    warned = [e["reason"] for e in events_of(tmp_path / "fails") if e["kind"] == "warning" and e["cause"] == "sink"]
    assert all("notify.command did not take a notice: 'false' ended with 1" in reason for reason in warned)


def test_what_cannot_work_is_refused_before_the_start(small_task: str, run_dir: Path) -> None:
    secret = "https://hooks.example/a-secret"
    settings = ("notify.command=no-such-program", f"notify.webhook={secret}")
    asked = [["run", small_task, "--run-dir", run_dir / str(i), "--set", s] for i, s in enumerate(settings)]
    for setting, done in zip(settings, together(*asked), strict=True):
        assert done.returncode == 2 and "a-secret" not in done.stdout + done.stderr
        assert setting.partition("=")[0] in one_error(done)
