"""A job's process without agents, and with a coordinator that the test plays."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from fake_coordinator import PATIENCE_S, FakeCoordinator

from everstep.base.cause import Cause, Why
from everstep.base.config import load_config
from everstep.base.exit_codes import ANOTHER_LEADS
from everstep.observe.events import read_events
from everstep.protocol import messages as m
from everstep.runtime.files.led_directory import MOVED
from everstep.runtime.job import Job, JobLink
from everstep.runtime.job_end import JobEnd, Outcome
from everstep.runtime.lead.journal import format_entry
from everstep.runtime.lead.succession import Succession
from everstep.runtime.link.address import COORDINATOR_FILE, JOURNAL_FILE, address_of, announce
from everstep.runtime.process import LEAVE
from everstep.runtime.start import Start
from everstep.runtime.supervisor import REFUSED, Supervised

TOKEN = b"0123456789abcdef"


class FakeProcess(Supervised):
    """A process as the job sees it. deaths: reasons; with `hopeless` the first is the last."""

    def __init__(self, run_dir: Path, port: int | None = None, *, hopeless: bool = False) -> None:
        super().__init__(run_dir / "log")
        self._file = run_dir / COORDINATOR_FILE
        self._port = port
        self._hopeless = hopeless
        self._alive = -1
        self.starts = 0
        self.in_order = False
        self.started = threading.Semaphore(0)
        self.kills = threading.Semaphore(0)
        self.alone = threading.Semaphore(0)
        self.ended = 0
        self.room = 0
        self.leaves_alone = False
        self.left = 0
        self.name = "h0"
        self.leaving = self.resigned = False

    @property
    def pid(self) -> int:
        return 1000 + self.starts

    def start(self) -> None:
        if self._port is not None:
            announce(self._file, address_of("127.0.0.1", self._port))
        self.pidfd, self._alive = os.pipe()
        self.restart_at_s = inf
        self.starts += 1
        self.started.release()

    def wake(self, now_s: float) -> str:
        return ""

    def end_alone(self) -> None:
        self.alone.release()
        if self.leaves_alone:
            self.in_order = True
            self.die()

    def ask_to_leave(self) -> bool:
        self.leaving = self.in_order = True
        self.die()
        return True

    def resign(self) -> None:
        self.resigned = True

    def die(self) -> None:
        alive, self._alive = self._alive, -1
        os.close(alive)  # from here on there may be another life

    def kill(self) -> bool:
        self.kills.release()
        self.die()
        return True

    def died(self, now_s: float) -> tuple[Why, bool]:
        self._drop()
        self.restart_at_s = inf if self.in_order else now_s
        return Why(Cause.KILLED, "killed by SIGKILL"), self._hopeless

    def leave(self) -> int:
        self.left = self.pid
        self.die()
        self._drop()
        return self.left

    def end(self, timeout_s: float = 0.0) -> None:
        self.ended += 1
        if self._alive >= 0:
            self.die()
        self._drop()


class Started:
    """A job in a thread, and whom it speaks with."""

    def __init__(
        self,
        run_dir: Path,
        *,
        local: bool,
        hopeless: bool,
        silent_s: float = 600.0,
        succession: Succession = Succession(),  # noqa: B008
        stays: bool = False,
    ) -> None:
        run_dir.mkdir()
        self.events: list[dict[str, Any]] = []
        self.coordinator = FakeCoordinator(TOKEN)
        self.local = FakeProcess(run_dir, hopeless=hopeless) if local else None
        config = load_config([("test", {"checkpoint.grace_s": 3, "coordinator.silent_s": silent_s})])
        known = {"succession": succession, "stays": stays}
        job = Job(Start(config, run_dir=run_dir, task="task", argv=("--one",), token=TOKEN, **known))
        job._local = self.local  # type: ignore[assignment]
        self.process = FakeProcess(run_dir, self.coordinator.port)
        job._coordinator = self.process  # type: ignore[assignment]
        self.job = job
        self.outcome: Outcome | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.coordinator.hear(m.JobHello)

    def _run(self) -> None:
        self.outcome = self.job.run(self.events.append)

    def over(self, code: int = 0, state: str = "completed") -> None:
        self.coordinator.say(m.JobEnded(state=state, cause=Cause.COMPLETED, reason="said so", exit_code=code))

    def end(self) -> int:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        assert self.outcome is not None
        return self.outcome.exit_code

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]

    def close(self) -> None:
        for _ in range(2):
            self.job.interrupt(signal.SIGTERM)
        self._thread.join(PATIENCE_S)
        self.coordinator.close()


@pytest.fixture
def started(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Started]:
    found = Started(tmp_path / "run", **{"local": False, "hopeless": False, **getattr(request, "param", {})})
    yield found
    found.close()


GUEST = Succession(True, "me")
leased = pytest.mark.parametrize("started", [{"succession": Succession(owner="o", word="ab" * 16)}], indirect=True)
with_agent = pytest.mark.parametrize("started", [{"local": True}], indirect=True)


def test_what_others_need_is_in_the_run_directory_and_its_end_is_the_coordinators_word(started: Started) -> None:
    run_dir = started.job.run_dir
    job = json.loads((run_dir / "job.json").read_text())
    assert (job["task"], job["argv"], job["config"]["workers"]) == ("task", ["--one"], 1)
    assert (run_dir / "token").read_text() == TOKEN.hex()
    assert (run_dir / "token").stat().st_mode & 0o777 == 0o600
    started.over(3, "failed")
    assert started.end() == 3
    assert started.outcome is not None and started.outcome.why.reason == "said so"
    assert not (run_dir / COORDINATOR_FILE).exists() and started.process.ended == 1
    assert started.kinds() == ["coordinator_started", "job_ended"]


@pytest.mark.parametrize("started", [{"succession": Succession(term=3)}], indirect=True)
def test_a_job_that_begins_after_a_takeover_writes_its_term_before_anything_leads(started: Started) -> None:
    assert (started.job.run_dir / JOURNAL_FILE).read_bytes() == format_entry({"kind": "term", "term": 3})
    assert (started.job.run_dir / "token").exists()
    started.over()
    assert started.end() == 0


def test_it_waits_for_agents_and_hears_how_far_their_workers_came(started: Started) -> None:
    started.coordinator.say(m.AgentCount(agent_ids=["a", "b"]))
    started.over()
    for agent, reached in (("a", 7), ("b", 9)):
        started.coordinator.say(m.AgentNotice(agent_id=agent, kind="host_left", fields={"reached": reached}))
    started.coordinator.say(m.AgentCount(agent_ids=[]))
    assert started.end() == 0
    assert started.job.reached == 9


def test_what_agents_tell_is_handed_on(started: Started) -> None:
    fields = {"worker_id": 1, "cause": "killed", "reason": "killed by SIGKILL", "in_order": False}
    started.coordinator.say(m.AgentNotice(agent_id="a", kind="worker_exited", fields=fields))
    started.over()
    started.end()
    assert {"kind": "worker_exited", **fields} in started.events


def test_signals_become_commands(started: Started) -> None:
    started.job.interrupt(signal.SIGUSR1)
    saving = started.coordinator.hear(m.Command)
    assert (saving.name, saving.args["cause"]) == ("checkpoint", Cause.PREEMPTED)
    started.coordinator.say(m.CommandReply(request=saving.request, ok=False, error="no worker", result={}))
    started.job.interrupt(signal.SIGINT)
    stop = started.coordinator.hear(m.Command)
    assert (stop.name, stop.args["exit_code"], stop.args["grace_s"]) == ("stop", 130, pytest.approx(1.8))
    started.over(130, "interrupted")
    assert started.end() == 130
    said = [event["reason"] for event in started.events if event["kind"] == "warning"]
    assert "no worker" in said and len(said) == 3
    assert any("a preemption is coming" in text for text in said) and any("ending in order" in text for text in said)


@pytest.mark.parametrize("started", [{"succession": GUEST}, {"succession": GUEST, "local": True}], indirect=True)
def test_a_host_that_stands_by_leaves_in_order(started: Started) -> None:
    """The job goes on elsewhere, and nobody there is asked for a checkpoint."""
    assert started.local is None or started.local.started.acquire(timeout=PATIENCE_S)
    started.job.interrupt(signal.SIGUSR1)
    assert started.end() == 128 + signal.SIGUSR1
    assert started.local is None or (started.local.leaving and started.local.starts == 1)
    assert not [event for event in started.events if event["kind"] in ("warning", "agent_died")]


OWNER = Succession(owner="me")


@pytest.mark.parametrize("started", [{"succession": OWNER, "stays": True}, {"succession": GUEST}, {}], indirect=True)
def test_an_engine_s_host_that_leads_and_has_to_go_gives_up_its_lease(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it has asked for a checkpoint, which the next head takes; without a lease there is no next one."""
    leads = threading.Event()

    def look(pid: int) -> None:  # in the job's own thread, which may be about to say otherwise
        started.job._lead.here = True
        leads.set()

    monkeypatch.setattr(started.job._lead, "look", look)
    assert leads.wait(PATIENCE_S)
    started.job.interrupt(signal.SIGUSR1)
    assert started.coordinator.hear(m.Command).name == "checkpoint"
    started.over()
    assert started.end() == 0 and started.process.resigned == bool(started.job._begun.succession.owner)


@pytest.mark.parametrize("code", [0, -LEAVE])
@pytest.mark.parametrize("started", [{"succession": GUEST, "local": True}], indirect=True)
def test_an_agent_that_was_not_let_go_is_started_again_when_it_dies(started: Started, code: int) -> None:
    """The next one leaves, or was asked to before it could hear."""
    local = started.local
    assert local is not None and local.started.acquire(timeout=PATIENCE_S)
    local.leaving, local.exit_code = True, -signal.SIGKILL
    local.die()
    assert local.started.acquire(timeout=PATIENCE_S)
    local.exit_code, local.in_order = code, True
    local.die()
    assert started.end() == 128 + signal.SIGUSR1


def test_a_second_signal_does_not_wait_for_anybody(started: Started) -> None:
    started.coordinator.say(m.AgentCount(agent_ids=["a"]))
    started.job.interrupt(signal.SIGTERM)
    started.job.interrupt(signal.SIGTERM)
    assert started.end() == 143


def test_a_coordinator_that_died_is_started_again(started: Started) -> None:
    started.process.started.acquire()
    started.process.die()
    assert started.process.started.acquire(timeout=PATIENCE_S)
    started.over()
    started.end()
    assert started.kinds() == ["coordinator_started", "coordinator_died", "coordinator_started", "job_ended"]


@pytest.mark.parametrize("started", [{"silent_s": 0.1}], indirect=True)
def test_a_coordinator_that_does_not_answer_is_killed(started: Started) -> None:
    started.coordinator.answers = False
    started.coordinator.say(m.AgentCount(agent_ids=[]))  # its first word
    assert started.process.kills.acquire(timeout=PATIENCE_S)
    started.over()
    started.end()
    [killed, *_] = [e for e in read_events(started.job.run_dir / "events.jsonl") if e["kind"] == "coordinator_killed"]
    assert (killed["cause"], killed["kills"], killed["pid"]) == ("hung", 1, 1001)
    assert "has not answered" in killed["reason"] and "with a limit of 0.2 s" in killed["reason"]


@with_agent
def test_a_coordinator_that_cannot_be_started_leaves_a_checkpoint(started: Started) -> None:
    local = started.local
    assert local is not None and local.started.acquire(timeout=PATIENCE_S)
    local.leaves_alone = True
    started.process.log_path.write_text("no module named uvloop\n")
    started.process._hopeless = True
    started.process.die()
    assert started.end() == 1 and local.alone.acquire(timeout=PATIENCE_S)
    outcome = started.outcome
    assert outcome is not None and (outcome.state, outcome.why.cause) == ("failed", Cause.CRASH_LOOP)
    assert outcome.why.reason.startswith("the coordinator cannot start (") and "uvloop" in outcome.why.reason
    assert any("the workers take the checkpoint among themselves" in e.get("reason", "") for e in started.events)


@with_agent
def test_an_agent_that_died_is_started_again(started: Started) -> None:
    local = started.local
    assert local is not None and local.started.acquire(timeout=PATIENCE_S)
    local.die()
    assert local.started.acquire(timeout=PATIENCE_S)
    local.in_order = True  # it heard of the end before the job did
    local.die()
    started.over()
    assert started.end() == 0
    died = [event for event in started.events if event["kind"] == "agent_died"]
    assert [(event["cause"], event["reason"]) for event in died] == [(Cause.HOST_LOST, "killed by SIGKILL")]


@pytest.mark.parametrize("started", [{"local": True, "hopeless": True}], indirect=True)
def test_an_agent_that_cannot_be_started_ends_the_job(started: Started) -> None:
    local = started.local
    assert local is not None and local.started.acquire(timeout=PATIENCE_S)
    local.log_path.write_text("no module named torch\n")
    local.die()
    assert started.end() == 1
    assert started.outcome is not None
    assert started.outcome.why.reason.endswith("cannot start (killed by SIGKILL): no module named torch")


@with_agent
def test_a_refused_agent_is_not_started_again_and_ends_the_job_if_there_is_no_other(started: Started) -> None:
    local = started.local
    assert local is not None and local.started.acquire(timeout=PATIENCE_S)
    local.log_path.write_text("everstep agent: host h1: its code is not the job's\n")
    local.name, local.exit_code, local.in_order = "h1", REFUSED, True
    local.die()
    assert started.end() == 2 and started.outcome is not None
    assert started.outcome.why == Why(Cause.CONFIG, "host h1: its code is not the job's")
    end = JobEnd(1.0)
    end.present(["h1", "h2"])
    assert end.others("h1")
    end.present(["h1"])
    assert not end.others("h1")


@pytest.mark.parametrize(("guest", "leads"), [(False, False), (True, False), (True, True)])
def test_a_refused_agent_of_the_host_that_leads_ends_no_other_hosts(
    tmp_path: Path, guest: bool, leads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that stands by ends its own part, unless it leads by now."""
    one = Started(tmp_path / "run", local=True, hopeless=False, succession=Succession(guest, "o"))
    local = one.local
    assert local is not None and local.started.acquire(timeout=PATIENCE_S)
    local.name, local.exit_code, local.in_order = "h1", REFUSED, True
    one.coordinator.say(m.AgentCount(agent_ids=["h1", "h2"]))
    while not one.job._end.others("h1"):
        time.sleep(0.01)
    local.log_path.write_text("no\n")
    monkeypatch.setattr(one.job._lead, "look", lambda pid: None)
    one.job._lead.here, one.job._lead._follows = leads, guest and not leads
    local.die()
    if not guest or leads:
        while "agent_died" not in one.kinds():
            time.sleep(0.01)
        one.over()
        one.coordinator.say(m.AgentCount(agent_ids=[]))
    assert one.end() == (REFUSED if guest and not leads else 0) and one.outcome is not None
    assert one.outcome.alone == (guest and not leads)
    one.close()


@with_agent
def test_all_of_the_end_is_done_whatever_a_part_of_it_raises(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))

    def breaks(timeout_s: float = 0.0) -> None:
        raise BrokenPipeError("within")

    monkeypatch.setattr(started.local, "end", breaks)
    for _ in range(2):
        started.job.interrupt(signal.SIGINT)
    started._thread.join(PATIENCE_S)
    assert isinstance(seen[0], BrokenPipeError)
    assert started.process.ended == 1 and not (started.job.run_dir / COORDINATOR_FILE).exists()


def test_whatever_it_ends_of_it_says_goodbye(started: Started) -> None:
    """Twice interrupted, it does not wait for the coordinator's word, but those of other hosts are told."""
    for _ in range(2):
        started.job.interrupt(signal.SIGTERM)
    assert started.coordinator.hear(m.Goodbye).reason == "the job's process has ended"
    assert started.end() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    "started", [{"succession": Succession(owner="o"), "local": True, "hopeless": True}], indirect=True
)
@pytest.mark.parametrize("leads", (True, False, None))
def test_what_fails_where_another_host_leads_ends_no_job(
    started: Started, leads: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a directory that hosts share: the agents of others are not sent away. None: nobody leads yet."""
    said: list[Why] = []
    monkeypatch.setattr(JobLink, "goodbye", lambda link, why: said.append(why))
    local = started.local
    assert local is not None and local.started.acquire(timeout=PATIENCE_S)
    looked = threading.Event()
    monkeypatch.setattr(started.job._lead, "look", lambda pid: looked.set())
    assert looked.wait(PATIENCE_S), "the look before has ended"
    started.job._lead.here, started.job._lead._follows = bool(leads), leads is False
    local.die()
    assert started.end() == 1 and started.outcome is not None
    assert bool(said) == bool(leads) and started.outcome.alone == (leads is False)


def test_where_another_host_leads_in_its_own_directory_it_ends_and_no_other_host_does(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Why] = []
    monkeypatch.setattr(JobLink, "goodbye", lambda link, why: said.append(why))
    started.process.started.acquire()
    started.process.exit_code = MOVED
    started.process.die()
    assert started.end() == ANOTHER_LEADS
    assert not said and started.process.starts == 1
    assert (started.job.run_dir / "coordinator.json").exists(), "the other host's address, where they share a directory"
    assert [e["in_order"] for e in started.events if e["kind"] == "coordinator_died"] == [True], "it is said at the end"
    assert started.kinds() == ["coordinator_started", "coordinator_died", "job_ended"]


def test_a_signal_to_a_host_that_leads_no_more_ends_its_part(started: Started) -> None:
    """It came before the news that another host leads: a scheduler's signal is not to be forgotten over it."""
    started.job.interrupt(signal.SIGTERM)
    assert started.coordinator.hear(m.Command).name == "stop"
    started.process.exit_code = MOVED
    started.process.die()
    assert started.end() == 128 + signal.SIGTERM and started.job.deposed
    assert started.outcome is not None and "the job goes on elsewhere" in started.outcome.why.reason


@leased
@pytest.mark.parametrize("place", ["cd" * 16, "ab" * 16])
def test_a_head_that_etcd_does_not_answer_hears_of_the_next_one_from_that_one(
    started: Started, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal then ends this host's part alone: the job goes on elsewhere. Hosts that share the directory are told."""
    said: list[Any] = []
    for name in ("command", "goodbye"):
        monkeypatch.setattr(JobLink, name, lambda link, *about: said.append(about))
    started.coordinator.say(m.AgentCount(agent_ids=["b"], place=place))
    while not started.job._end.others(""):
        time.sleep(0.01)
    started.job.interrupt(signal.SIGTERM)
    if place == "ab" * 16:
        while not said:
            time.sleep(0.01)
        assert said[0][0] == "stop" and not started.job.deposed
        return
    assert started.end() == 128 + signal.SIGTERM and started.job.deposed
    assert started.outcome is not None and "the job goes on elsewhere" in started.outcome.why.reason
    assert started.kinds().count("led_elsewhere") == 1 and not said


@leased
@pytest.mark.parametrize("place", ["cd" * 16, "ab" * 16])
def test_an_end_on_another_host_is_not_that_of_this_directory(started: Started, place: str) -> None:
    started.coordinator.say(m.AgentCount(agent_ids=[], place=place))
    started.over()
    assert started.end() == 0 and started.outcome is not None
    assert started.outcome.elsewhere == started.job.deposed == (place == "cd" * 16)


@with_agent
@pytest.mark.parametrize("over", (False, True))
def test_an_agent_is_left_only_to_a_standby_host(started: Started, over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not if the job was over before another host began to lead: nobody would take the agent over."""
    local, job = started.local, started.job
    assert local is not None and local.started.acquire(timeout=PATIENCE_S)
    job._begun = replace(job._begun, succession=Succession(copying_host="h"))
    told, tell = threading.Event(), job._end.told
    monkeypatch.setattr(job._end, "told", lambda *about: (tell(*about), told.set()))
    if over:
        started.over()
        assert told.wait(PATIENCE_S)
    started.process.exit_code = MOVED
    started.process.die()
    assert started.end() == (0 if over else ANOTHER_LEADS)
    assert (local.ended, job.left_agent) == ((1, 0) if over else (0, local.pid))


def test_the_end_that_the_journal_has_is_the_end_though_nobody_says_so(started: Started) -> None:
    """The coordinator is silent, or what came of it went astray."""
    entry = {"kind": "ended", "cause": str(Cause.COMPLETED), "state": "completed", "reason": "all done", "exit_code": 0}
    (started.job.run_dir / JOURNAL_FILE).write_bytes(format_entry({"kind": "unknown"}) + format_entry(entry))
    started.coordinator.answers = False
    assert started.end() == 0
    assert started.outcome is not None and started.outcome.why.reason == "all done"
