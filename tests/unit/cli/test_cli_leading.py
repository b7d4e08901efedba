"""What the command of a host that has led says and does when its job's process is over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from everstep.base.cause import Cause, Why
from everstep.base.config import Config, load_config
from everstep.base.errors import Deposed
from everstep.base.exit_codes import ANOTHER_LEADS
from everstep.cli import coming_back, leading
from everstep.cli.job import JobFile, write_job
from everstep.observe.events import EventLog, read_events
from everstep.runtime import job as job_module
from everstep.runtime.files.host_directory import OWN_FOLDER, SOURCE_FILE, leave_word, private_folder, word_in
from everstep.runtime.files.run_lock import run_lock
from everstep.runtime.job_end import Outcome
from everstep.runtime.lead.succession import Succession
from everstep.runtime.link.address import EVENTS_FILE
from everstep.runtime.start import Start

CONFIG = load_config([("test", {"control.etcd": "etcd://127.0.0.1:5/j", "steps": 3})])
COMPLETED = Why(Cause.COMPLETED, "said so")


class FakeJob:
    """A job's process on the host on which the job has begun."""

    outcome = Outcome(0, "completed", COMPLETED)
    left_agent = 0
    signalled = 0

    def __init__(self, begun: Start) -> None:
        self.run_dir, self.reached = begun.folder, 3
        self.deposed = self.outcome.elsewhere or self.outcome.exit_code == ANOTHER_LEADS

    def run(self, on_event: Callable[[dict[str, Any]], None]) -> Outcome:
        return self.outcome

    def interrupt(self, number: int) -> None:
        self.signalled = number


def led(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, *, as_json: bool = False, config: Config = CONFIG
) -> int:
    monkeypatch.setattr(FakeJob, "outcome", outcome)
    monkeypatch.setattr(job_module, "Job", FakeJob)
    job = JobFile("task.py:Task", (), config)
    write_job(run_dir, job)
    owner = "o" if config.control.etcd is not None else ""
    begun = Start(config, run_dir=run_dir, early=Mock(), succession=Succession(owner=owner))
    return leading.see_through(begun, job, leading.UserView(as_json=as_json))


@pytest.mark.parametrize("as_json", (False, True))
@pytest.mark.parametrize("elsewhere", (False, True))
def test_an_end_on_another_host_is_not_told_as_that_of_this_directory(
    elsewhere: bool, as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows and weights that are not here are there."""
    code = led(tmp_path, monkeypatch, Outcome(0, "completed", COMPLETED, elsewhere=elsewhere), as_json=as_json)
    said, complained = capsys.readouterr()
    assert ("the job has ended on another host" in said + complained) == elsewhere
    assert (json.loads(said.splitlines()[-1])["state"] == "completed") if as_json else '"summary"' not in said
    assert code == int(not elsewhere) and ("the ledger lacks" in complained) == (not elsewhere)
    kinds = [event["kind"] for event in read_events(tmp_path / EVENTS_FILE)]
    assert ("job_completed" in kinds) == (not elsewhere)


def test_a_host_that_fails_while_another_one_leads_tells_no_end_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They share the directory."""
    failed = Outcome(1, "failed", Why(Cause.CRASH_LOOP, "its agent cannot start"), alone=True)
    assert led(tmp_path, monkeypatch, failed) == 1
    assert "its agent cannot start" in capsys.readouterr().err
    assert "job_failed" not in [event["kind"] for event in read_events(tmp_path / EVENTS_FILE)]


def test_a_head_whose_job_was_taken_over_by_hand_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody stands by without a lease, and the job goes on in this directory."""
    moved = Outcome(ANOTHER_LEADS, "interrupted", Why(Cause.LEASE, "the job was taken over"))
    assert led(tmp_path, monkeypatch, moved, config=load_config([("test", {"steps": 3})])) == ANOTHER_LEADS
    assert "error: the job was taken over" in capsys.readouterr().err
    assert {e["kind"] for e in read_events(tmp_path / EVENTS_FILE)} <= {"job_started"}


def test_the_script_that_started_a_host_knows_whether_it_leads_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it has led, and another host does since: its end is not the job's."""
    mark = tmp_path / "mark"
    mark.touch()
    monkeypatch.setenv(coming_back.HEAD_MARK, str(mark))
    with contextlib.ExitStack() as held:
        begun = Start(CONFIG, run_dir=tmp_path, succession=Succession(owner="o"))
        work = leading.LeadersWork(begun, Mock(), held)
        held.callback(work.close)
        for kind in ("coordinator_follows", "coordinator_leads", "coordinator_follows"):
            work.on_event({"kind": kind})
            assert mark.exists() == (kind == "coordinator_leads")


@pytest.mark.parametrize("comes", ["before", "while sinks end"])
def test_a_signal_to_a_deposed_head_ends_it_until_it_is_a_standby(
    comes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is heard, and does not kill, while sinks deliver the rest: then nobody else would look for it."""
    moved = Outcome(ANOTHER_LEADS, "interrupted", Why(Cause.LEASE, "another host leads"))
    come = lambda *given: monkeypatch.setattr(FakeJob, "signalled", signal.SIGTERM)  # noqa: E731
    monkeypatch.setattr(leading, "become_standby", lambda left: pytest.fail("it stands by"))
    with subprocess.Popen(["sleep", "600"]) as child:
        monkeypatch.setattr(FakeJob, "left_agent", child.pid)
        if comes == "before":
            come()
            assert led(tmp_path, monkeypatch, moved) == 128 + signal.SIGTERM
        else:
            monkeypatch.setattr(leading.LeadersWork, "close", come)
            with pytest.raises(Deposed) as caught:
                led(tmp_path, monkeypatch, moved)
            assert caught.value.become() == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


@pytest.mark.parametrize("agent", (0, 1))
def test_a_notice_of_a_preemption_does_not_kill_what_is_about_to_be_a_standby(
    agent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent would be killed with it, and the workers that go on."""
    found: list[Any] = []
    before = signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr(coming_back, "put_aside", lambda folder: found.append(signal.getsignal(signal.SIGUSR1)))
    monkeypatch.setattr(os, "execve", lambda *given: found.append(signal.getsignal(signal.SIGUSR1)))
    try:
        coming_back.become_standby(Start(CONFIG, run_dir=tmp_path, agent=agent))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [signal.SIG_IGN if agent else before] * 2, "a program keeps what its predecessor ignored"


@pytest.mark.parametrize(
    ("succession", "held", "comes_back"),
    [
        (Succession(owner="o"), False, True),
        (Succession(True, "o", copying_host="h"), False, True),
        (Succession(True, "o"), True, False),
        (Succession(True, "o"), False, False),
    ],
)
@pytest.mark.parametrize("led", (True, False))
def test_hosts_that_shared_a_directory_that_is_of_before_do_not_meet_there(
    succession: Succession, held: bool, comes_back: bool, led: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one on which the job began holds it, or sets it aside and comes back there; others have one of their own, and
    set aside what nobody holds: if that host is lost for good, nobody else would."""
    done: list[Any] = []
    if led:
        leave_word(tmp_path, None)
    word = word_in(tmp_path)
    monkeypatch.setattr(os, "execve", lambda path, command, environment: done.extend(command))
    with run_lock(tmp_path) if held else contextlib.nullcontext():
        coming_back.become_standby(Start(CONFIG, host="h", run_dir=tmp_path, succession=succession))
    assert (tmp_path / "previous-1" / "place").exists() == (led and not held) and word_in(tmp_path) == word * held
    given = done[done.index("--run-dir") + 1] if "--run-dir" in done else None
    own = str(private_folder(word[:16], "h-standby")) if led else None
    assert given == (str(tmp_path) if comes_back else own)


def test_what_an_agent_of_before_could_not_send_comes_before_what_is_told_of_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / OWN_FOLDER
    own.mkdir()
    write_job(own, JobFile("task.py:Task", (), CONFIG))
    (own / SOURCE_FILE).write_text("0123456789abcdef\n")
    EventLog(own / EVENTS_FILE).write("step_committed", step=1)
    led(tmp_path, monkeypatch, Outcome(1, "failed", COMPLETED))
    kinds = [event["kind"] for event in read_events(tmp_path / EVENTS_FILE)]
    assert kinds[:2] == ["step_committed", "job_started"]
