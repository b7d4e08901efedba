"""Hosts that take over: which directory they may go on from, and where they may listen."""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import os
import signal
import subprocess
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.base.config import load_config
from everstep.base.errors import ConfigError, Deposed, NoHead
from everstep.base.exit_codes import ANOTHER_LEADS
from everstep.cli import coming_back, main, run, standby, standby_fill
from everstep.cli.coming_back import end_agent, left_agent, refuse_deposed
from everstep.cli.job import JobFile, write_job
from everstep.cli.main import run_command
from everstep.cli.run_dir import StartPoint
from everstep.cli.standby_fill import kept_apart
from everstep.protocol.lease.requests import Holder, HolderSeen, Load, Loaded, Look, Unanswered
from everstep.runtime.files.host_directory import COPY_FILE, OWN_FOLDER, SOURCE_FILE, leave_word
from everstep.runtime.files.run_lock import run_lock
from everstep.runtime.lead.etcd import Announced
from everstep.runtime.lead.journal import Journal
from everstep.runtime.lead.succession import Succession
from everstep.runtime.link import wire
from everstep.runtime.link.address import COORDINATOR_FILE, EVENTS_FILE, JOB_FILE, JOURNAL_FILE, TOKEN_FILE
from everstep.runtime.start import Start

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


def test_what_may_become_a_copy(tmp_path: Path) -> None:
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
    (tmp_path / COPY_FILE).touch()
    assert kept_apart(tmp_path, JOB), "a host that stood by has led there"
    (tmp_path / "place").unlink()
    assert not kept_apart(tmp_path, JOB), "it is one"


def test_what_is_of_before_is_set_aside_but_for_what_is_still_of_use(tmp_path: Path) -> None:
    """Other hosts may need the parts of checkpoints that lie there, and this host's agent may run."""
    leave_word(tmp_path, None, JOB)
    kept = ("checkpoints/part", f"{OWN_FOLDER}/events.jsonl", "logs/worker-0.jsonl", COORDINATOR_FILE)
    lines = ("logs/output.log", "logs/output.1.log")
    for name in (JOB_FILE, "events.jsonl", "lock", f"{OWN_FOLDER}/{SOURCE_FILE}", *lines, *kept):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert "previous-1" in standby_fill._make_ready(tmp_path, JOB, bytes(32), agent_runs=True)
    assert all((tmp_path / name).exists() for name in kept)
    assert (tmp_path / "previous-1" / "events.jsonl").exists() and not (tmp_path / "events.jsonl").exists()
    assert all((tmp_path / "previous-1" / name).exists() and not (tmp_path / name).exists() for name in lines)
    (tmp_path / COPY_FILE).touch()
    assert not (tmp_path / "place").exists()
    assert standby_fill._make_ready(tmp_path, JOB, bytes(32)) == ""
    assert not (tmp_path / COORDINATOR_FILE).exists(), "nobody follows it yet"


def test_a_job_that_went_on_elsewhere_does_not_begin_again_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was stopped before this host had its files, and the same command is typed again."""
    for name in (f"{OWN_FOLDER}/{JOB_FILE}", "checkpoints/part", "data.csv", "lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "previous-2").mkdir()
    refuse_deposed(tmp_path)  # no agent has worked there
    (tmp_path / "previous-2").rmdir()
    (tmp_path / OWN_FOLDER / SOURCE_FILE).write_text("0" * 16 + "\n")
    refuse_deposed(tmp_path)  # no host has set anything aside
    for number in (9, 10):
        (tmp_path / f"previous-{number}").mkdir()
    (tmp_path / "train.py").touch()
    assert run_command(["run", str(tmp_path / "train.py"), "--run-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "another host has led the job" in said and "previous-10: go on" in said and "--fresh begins anew" in said
    assert (tmp_path / "checkpoints" / "part").exists() and not (tmp_path / JOB_FILE).exists()
    monkeypatch.setattr(run, "find_start", lambda *given, **how: StartPoint(4, brought=True))
    monkeypatch.setattr(run, "_launch", lambda *given: 0)
    assert run_command(["run", str(tmp_path / "train.py"), "--run-dir", str(tmp_path)]) == 0, "it does not begin anew"


@pytest.mark.parametrize("becomes", (False, True))
def test_an_agent_that_nobody_takes_over_is_ended(
    becomes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(**words: Any) -> None:
        raise Deposed("another leads", refuses, functools.partial(end_agent, begun))

    def refuses() -> None:
        raise ConfigError("no")

    with subprocess.Popen(["sleep", "600"]) as child:
        begun = Start(load_config([]), run_dir=tmp_path, agent=child.pid)
        monkeypatch.setattr(main.cli, "main", command)
        assert main.run_command([], becomes=becomes) == ANOTHER_LEADS
        assert "another leads; this host" in capsys.readouterr().err
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)
        end_agent(replace(begun, agent=0))


def test_an_agent_is_left_to_the_program_that_its_parent_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        for text, found in (("", 0), ("x", 0), ("1", 0), ("9" * 40, 0), (str(child.pid), child.pid)):
            monkeypatch.setenv("EVERSTEP_AGENT", text)
            assert left_agent() == found, text
            assert "EVERSTEP_AGENT" not in os.environ, "of no use to what this process starts"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setenv("EVERSTEP_AGENT", str(child.pid))
        assert left_agent() == 0, "it is dead"


class FakeEtcd:
    """Knows a job, but does not answer these first questions about it."""

    address = "etcd://10.0.0.1:2379/j"

    def __init__(self, silent: int) -> None:
        self.silent = silent

    def announced(self) -> Announced:
        self.silent -= 1
        if self.silent >= 0:
            raise NoHead("etcd without a quorum: 2 of 3 members do not answer")
        return Announced({"run_dir": "/none", "word": JOB}, "1")

    def ask(self, request: Look | Load) -> Unanswered:
        return Unanswered("silent")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("agent_runs", (False, True))
def test_where_workers_run_etcd_is_waited_for_and_what_is_in_vain_ends_them_in_order(
    agent_runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They run since before this process came back, and would be killed with it."""
    etcd, tried = FakeEtcd(3), list[str]()
    monkeypatch.setattr(standby, "etcd_at", lambda begun: etcd)
    monkeypatch.setattr(standby, "_AGAIN_S", 0.0)
    monkeypatch.setattr(standby, "_sees", lambda *given: False)

    def refused(begun: Start, *given: Any) -> None:
        tried.append("filled")
        os.kill(begun.agent, 0)
        raise ConfigError("no room")

    monkeypatch.setattr(standby, "copy_in", refused)
    script = "trap 'echo in order; exit 0' TERM; echo begun; while :; do sleep 0.05; done"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as child, ExitStack() as last:
        last.callback(child.kill)
        assert child.stdout is not None and child.stdout.readline() == "begun\n"
        monkeypatch.setenv("EVERSTEP_AGENT", str(child.pid) if agent_runs else "")
        begun = Start(load_config([]), host="h", own="127.0.0.1", run_dir=tmp_path, stays=True)
        with pytest.raises(ConfigError if agent_runs else NoHead):
            standby.stand_by(begun)
        assert tried == ["filled"] * agent_runs
        if not agent_runs:
            child.send_signal(signal.SIGTERM)
        assert child.stdout.read() == "in order\n"
    assert ("2 of 3 members do not answer: waiting for it" in capsys.readouterr().err) == agent_runs


@pytest.mark.parametrize("over", (False, True))
def test_an_agent_whose_job_is_over_is_not_kept_for_the_next_one(
    over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be another job's, or dead, and no other would be started."""
    agents: list[int] = []

    class Ended(FakeEtcd):
        looks = [over, over, False]  # noqa: RUF012

        def ask(self, request: Look | Load) -> HolderSeen | Loaded:  # type: ignore[override]
            if isinstance(request, Load):
                return Loaded([{"kind": "ended"}], 1)
            return HolderSeen(None if self.looks.pop(0) else Holder("next", {"host": "a", "port": 1}, 1, 1))

    def filled(begun: Start, *given: Any) -> None:
        agents.append(begun.agent)
        raise ConfigError("no room")

    monkeypatch.setattr(standby, "etcd_at", lambda begun: Ended(0))
    monkeypatch.setattr(standby, "_AGAIN_S", 0.0)
    monkeypatch.setattr(standby, "_sees", lambda *given: False)
    monkeypatch.setattr(standby, "copy_in", filled)
    with subprocess.Popen(["sleep", "600"]) as child, ExitStack() as last:
        last.callback(child.kill)
        monkeypatch.setenv("EVERSTEP_AGENT", str(child.pid))
        with pytest.raises(ConfigError, match="no room"):
            standby.stand_by(Start(load_config([]), host="h", own="127.0.0.1", stays=True))
        assert agents == [0 if over else child.pid]


def test_a_silent_etcd_says_nothing_about_the_directory_in_which_the_job_is_led(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of before would be taken for the job's."""
    monkeypatch.setattr(standby, "_AGAIN_S", 0.0)
    seen = [Unanswered("silent"), HolderSeen(Holder("b", {"host": "b", "port": 1, "place": OTHER}, 1, 1))]
    etcd: Any = SimpleNamespace(address="etcd://b", ask=lambda request: seen.pop(0))
    assert standby._place(etcd, 60.0) == OTHER
    etcd.ask = lambda request: Unanswered("silent")
    with pytest.raises(NoHead, match="who leads"):
        standby._place(etcd, 0.0)


@pytest.mark.parametrize("led_here", (False, True))
def test_who_sees_the_directory_of_a_host_that_leads_again_does_not_share_its_agents_folder(
    led_here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that host's agent it is a process of that host that comes back at once."""
    used: list[Path | None] = []
    to_take_over(tmp_path, monkeypatch)
    leave_word(tmp_path, None, OTHER)
    monkeypatch.setattr(standby, "etcd_at", lambda begun: FakeEtcd(0))
    monkeypatch.setattr(standby, "in_etcd", lambda etcd: None)
    monkeypatch.setattr(standby, "_sees", lambda *given: True)
    monkeypatch.setattr(standby, "copy_in", lambda begun, *given: used.append(begun.run_dir) or nullcontext(tmp_path))
    with run_lock(tmp_path / OWN_FOLDER) if led_here else nullcontext():
        assert standby.stand_by(Start(load_config([]), host="h", own="127.0.0.1", run_dir=tmp_path)) == 0
    assert used == [None] * led_here


@pytest.mark.parametrize("elsewhere", (True, False))
def test_a_host_that_comes_back_stands_by_though_the_new_head_holds_the_directory(
    elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All hosts see it, and whoever leads has it locked."""

    def stands_by(begun: Start, **how: Any) -> None:
        raise ConfigError(f"stood by in {begun.folder}, with patience for {begun.config.hosts.wait_s:g} s")

    monkeypatch.setattr(run, "runs_elsewhere", lambda begun: elsewhere)
    monkeypatch.setattr(run, "_LOCK_WAIT_S", 0.0)
    monkeypatch.setattr(coming_back, "become_standby", stands_by)
    words = ["run", "resnet18-digits", "--run-dir", str(tmp_path), "--listen", "127.0.0.1:0", "--or-standby"]
    words += ["--set", "control.etcd=etcd://127.0.0.1/jobs/a", "--set", "hosts.wait_s=900"]
    with run_lock(tmp_path):
        code = run_command(words)
    said = capsys.readouterr().err
    assert code == (ANOTHER_LEADS if elsewhere else 2)
    assert f"stood by in {tmp_path}, with patience for 900 s" in said if elsewhere else "a job is still running" in said


OR_STANDBY = ("--listen", "127.0.0.1:0", "--or-standby", "--set", "control.etcd=etcd://127.0.0.1/jobs/a")


@pytest.mark.parametrize("meets", ["lock", "lease"])
def test_a_host_stands_by_for_one_that_began_to_lead_after_it_had_asked(
    meets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused as a second one; and the directory, which hosts share, is left as it was."""

    def stands_by(begun: Start, **how: Any) -> None:
        assert not begun.stays, "a job that is stopped goes on by the same command"
        raise ConfigError(f"stood by in {begun.folder} with {how['refill']}")

    (tmp_path / "train.py").touch()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    answers = [False, True]
    monkeypatch.setattr(run, "runs_elsewhere", lambda begun: answers.pop(0))
    monkeypatch.setattr(coming_back, "become_standby", stands_by)
    monkeypatch.setattr(standby, "_leader", lambda *given: Holder("heir", {"host": "heir", "port": 1}, 1, 1))
    words = ["run", str(tmp_path / "train.py"), "--run-dir", str(run_dir), "--workers", "1", *OR_STANDBY]
    with run_lock(run_dir) if meets == "lock" else nullcontext():
        assert run_command(words) == ANOTHER_LEADS
    said = capsys.readouterr().err
    assert f"the job runs already; this host could not stand by: stood by in {run_dir} with" in said
    assert not (run_dir / JOB_FILE).exists() and not (run_dir / TOKEN_FILE).exists()
    assert answers == ([] if meets == "lock" else [True])


def test_a_host_that_is_to_lead_waits_for_the_one_that_is_about_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one has given up its lease, and still looks at the ledger. Nobody leads, so this one's end is the job's."""
    mark, before = tmp_path / "mark", ExitStack()
    monkeypatch.setenv(coming_back.HEAD_MARK, str(mark))
    monkeypatch.setattr(run, "runs_elsewhere", lambda begun: False)
    monkeypatch.setattr(run, "_LOCK_AGAIN_S", 0.0)
    monkeypatch.setattr(run, "set_aside", lambda *given: pytest.fail("a host that comes back would start over"))
    before.enter_context(run_lock(tmp_path))
    begun = Start(load_config([]), run_dir=tmp_path, stays=True)
    given = {"control.etcd": "etcd://127.0.0.1/jobs/a"}
    monkeypatch.setattr(run, "mark_head", lambda leads: (coming_back.mark_head(leads=leads), before.close()))
    with run._held(begun, given):
        assert mark.exists()
    assert run_command(["run", "resnet18-digits", "--run-dir", str(tmp_path), "--fresh", *OR_STANDBY]) == 2


def test_a_second_host_that_is_not_to_stand_by_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heir = Holder("heir", {"host": "heir", "port": 1}, 1, 1)
    monkeypatch.setattr(standby, "_leader", lambda *given: heir)
    begun = Start(load_config([("test", {"control.etcd": "etcd://127.0.0.1/j"})]), run_dir=tmp_path, token=bytes(32))
    with pytest.raises(ConfigError, match="a job is still running under etcd"):
        standby.begin_leased(begun)


def test_a_standby_host_that_leaves_in_order_does_not_say_that_the_job_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who started it would take 0 for the job's end."""
    to_take_over(tmp_path, monkeypatch)
    monkeypatch.setattr(standby, "see_through", lambda *given: 128 + signal.SIGUSR1)
    monkeypatch.setattr(standby, "etcd_at", lambda begun: FakeEtcd(0))
    monkeypatch.setattr(standby, "_sees", lambda *given: True)
    assert standby.stand_by(Start(load_config([]), host="h", own="127.0.0.1", run_dir=tmp_path)) == 138


class Lease:
    """An etcd that answers the one question after the other; the last of these holders again and again."""

    def __init__(self, *holders: Holder | None, ended: bool = False) -> None:
        self._holders = list(holders)
        self._ended = ended

    def announced(self) -> Announced:
        return Announced({}, "1.a")

    def ask(self, request: Look | Load) -> HolderSeen | Loaded:
        if isinstance(request, Load):
            return Loaded([{"kind": "ended"}] if self._ended else [], 1)
        return HolderSeen(self._holders.pop(0) if len(self._holders) > 1 else self._holders[0])


def test_who_leads_is_clear_only_after_the_lease_of_a_lost_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "_AGAIN_S", 0.01)
    lost, heir = (Holder(owner, {"host": owner, "port": 1}, 1, 1) for owner in ("lost", "heir"))
    for lease, found in ((Lease(lost, lost, None, heir), heir), (Lease(lost, None, ended=True), None)):
        assert standby._leader(lease, 0) == found  # type: ignore[arg-type]
    assert standby._leader(Lease(None), 0) is None, "nobody takes it"  # type: ignore[arg-type]


# ---- by hand


def to_take_over(run_dir: Path, monkeypatch: pytest.MonkeyPatch, address: str = "127.0.0.1") -> Path:
    """A directory whose job was led at this address; who takes over does nothing more."""
    write_job(run_dir, JobFile("task.py:Task", (), load_config([("test", {"network.address": address})])))
    (run_dir / JOURNAL_FILE).touch()
    wire.write_token(run_dir / TOKEN_FILE, hashlib.sha256(b"x").digest())
    monkeypatch.setattr(standby, "see_through", lambda *given: 0)
    return run_dir


def test_a_job_of_several_hosts_is_not_taken_over_where_no_other_host_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = to_take_over(tmp_path, monkeypatch, "10.0.0.1")
    assert run_command(["takeover", str(run_dir), "--listen", "127.0.0.1:0"]) == 2
    words = capsys.readouterr().err
    assert "--listen: expected an address that the job's other hosts can reach, as 10.0.0.1 was" in words
    assert words.count("\n") == 1


def test_a_job_of_one_host_is_taken_over_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = to_take_over(tmp_path, monkeypatch)
    assert run_command(["takeover", str(run_dir), "--listen", "127.0.0.1:0"]) == 0
    assert capsys.readouterr().err == "this runs task.py:Task\n"


@pytest.mark.parametrize("command", ["takeover", "agent --standby"])
def test_whoever_takes_over_says_first_what_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """A directory, or a lease, that somebody else prepared names the task and the command for notices."""
    said: list[str] = []
    run_dir = to_take_over(tmp_path, monkeypatch)
    config = load_config([("test", {"notify.command": "mail \x1b[1m me", "notify.events": ["job_failed"]})])
    write_job(run_dir, JobFile("task.py:Task", ("--lr", "a b"), config))
    monkeypatch.setattr(standby, "see_through", lambda *given: said.append(capsys.readouterr().err) or 0)
    if command == "takeover":
        assert run_command(["takeover", str(run_dir)]) == 0
    else:
        monkeypatch.setattr(standby, "etcd_at", lambda *given: io.BytesIO())  # something that can be closed
        monkeypatch.setattr(standby, "_announced", lambda *given, **said: Announced({"run_dir": str(run_dir)}, 1))
        monkeypatch.setattr(standby, "_sees", lambda *given: True)
        token_file = tmp_path / TOKEN_FILE
        argv = ["agent", "--standby", "--join", "etcd://127.0.0.1:5/j", "--address", "127.0.0.1", "--host-name", "h"]
        assert run_command([*argv, "--token-file", str(token_file)]) == 0
    before = "" if command == "takeover" else f"h stands by for the job in {run_dir}; "
    assert len(said) == 1 and said[0].startswith(f"{before}this runs task.py:Task --lr 'a b', and for notices mail ")
    assert "\x1b" not in said[0] and said[0].count("\n") == 1


@pytest.mark.parametrize(
    ("lives", "code"),
    [
        (["job_started", "step_committed"], 0),
        (["job_started", "step_committed", "job_failed", "warning"], 2),
        (["job_started", "job_failed", "job_started", "coordinator_restarted"], 0),
    ],
)
def test_a_job_that_has_stopped_is_not_taken_over(
    lives: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody was lost, so there is nobody to take over from; nothing is told of it anew."""
    run_dir = to_take_over(tmp_path, monkeypatch)
    told = "".join(json.dumps({"time_unix_ns": i + 1, "kind": kind}) + "\n" for i, kind in enumerate(lives))
    (run_dir / EVENTS_FILE).write_text(told)
    assert run_command(["takeover", str(run_dir)]) == code
    words = capsys.readouterr().err
    assert (f"the job in {run_dir} has stopped" in words) == (code == 2)
    assert (f"To go on: everstep run task.py:Task --run-dir {run_dir}" in words) == (code == 2)
    assert (run_dir / EVENTS_FILE).read_text() == told


def test_a_takeover_that_cannot_be_written_ends_in_one_line_and_a_second_one_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, led = to_take_over(tmp_path, monkeypatch), []
    monkeypatch.setattr(standby, "see_through", lambda begun, job: led.append(begun.succession) or 0)

    def full(*given: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Journal, "take_over", full)
        assert run_command(["takeover", str(run_dir)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "error" in line] == said[-1:] and "who leads the job: No space left" in said[-1]
    assert not led and not (run_dir / EVENTS_FILE).exists()
    for term in (1, 2):
        assert run_command(["takeover", str(run_dir)]) == 0 and led[-1] == Succession(by_hand=True, term=term)
