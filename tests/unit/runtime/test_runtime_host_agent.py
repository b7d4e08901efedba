"""A host's agent without a job: a coordinator and a fork server that the test plays, and workers that only wait."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_coordinator import PATIENCE_S, FakeCoordinator

from everstep.base.cause import Cause
from everstep.base.config import load_config, to_dict
from everstep.base.exit_codes import NO_HEAD
from everstep.observe.events import read_events
from everstep.protocol import messages as m
from everstep.runtime.files.file_receiver import HeadReceiver
from everstep.runtime.host import host_agent
from everstep.runtime.host.board import Board
from everstep.runtime.host.fork_server_client import ForkServerClient
from everstep.runtime.host.host_agent import Absence, HostAgent, Left
from everstep.runtime.host.undoing import Undone
from everstep.runtime.link.address import address_of, announce, read_address
from everstep.runtime.link.context import Joining
from everstep.runtime.link.handshake import role_token
from everstep.runtime.process import END_ALONE, LEAVE, is_stopped, machine

TOKEN = b"0123456789abcdef"


class FakeForkServer:
    """Its process only waits; what it is asked for, and what it says, is the test's."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "1000"])
        ours, theirs = socket.socketpair()
        self._sock = ours
        self._requests = b""
        self.client = ForkServerClient(theirs, self.process.pid, self.process, greeting={"op": "ready"})
        self.workers: list[subprocess.Popen[bytes]] = []
        ours.settimeout(PATIENCE_S)
        threading.Thread(target=self._end_with_it, daemon=True).start()

    def _end_with_it(self) -> None:
        """As a real one, when its socket is closed."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        poll.poll()
        self.process.kill()

    def start(self) -> dict[str, Any]:
        """The next request for a worker, which is granted."""
        while True:
            line, end, rest = self._requests.partition(b"\n")
            if not end:
                data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, 8)
                self._requests += data
                for fd in fds:
                    os.close(fd)
                continue
            self._requests = rest
            request = json.loads(line)
            if request["op"] == "start":
                break
        worker = subprocess.Popen(["sleep", "1000"])
        self.workers.append(worker)
        life = {name: request["context"][name] for name in ("worker_id", "incarnation")}
        self.tell(op="started", **life, pids=[worker.pid])
        return dict(request)

    def exited(self, request: dict[str, Any]) -> None:
        """Wait for the newest worker's death, and tell of it."""
        code = self.workers[-1].wait(PATIENCE_S)
        status = -code if code < 0 else code << 8
        about = {name: request["context"][name] for name in ("worker_id", "incarnation")}
        self.tell(op="exited", pid=self.workers[-1].pid, cell_rank=0, status=status, unix_ns=1, **about)

    def tell(self, **message: Any) -> None:
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        for process in (self.process, *self.workers):
            process.kill()
            process.wait()
        self._sock.close()


class Started:
    """An agent in a thread, and whom it speaks with."""

    def __init__(self, run_dir: Path, parent: int = 0) -> None:
        self.run_dir = run_dir
        self.coordinator = FakeCoordinator(TOKEN)
        self.server = FakeForkServer()
        self.board = Board.create(8)
        at = f"127.0.0.1:{self.coordinator.port}"
        joining = Joining(at, "module:entry", [], "here", room=3, parent=parent)
        self.agent = HostAgent(joining, TOKEN, self.board, self.server.client)
        self.left: list[Left] = []
        self._thread = threading.Thread(target=lambda: self.left.append(self.agent.run()))
        self._thread.start()

    def facts(self, job_pid: int = 0, **config: Any) -> m.JobFacts:
        settings = {"workers": 2, "metrics.interval_s": 0, "backoff.initial_s": 0, **config}
        return m.JobFacts(
            task="task",
            argv=["--one"],
            config=to_dict(load_config([("test", settings)])),
            run_dir=str(self.run_dir),
            coordinator_file=str(self.run_dir / "nowhere"),
            job_pid=job_pid,
            machine=machine(),
        )

    def with_worker(self, worker_id: int = 1, first: int = 0) -> dict[str, Any]:
        """It knows the job, and runs one worker; the request for that."""
        self.coordinator.hear(m.AgentHello)
        self.coordinator.say(self.facts())
        self.coordinator.say(m.SetSlots(worker_ids=[worker_id], first=[first]))
        request = self.server.start()
        self.coordinator.hear(m.WorkerStarted)
        return request

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """One of each of these kinds, when the last of them is there."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            found = {event["kind"]: event for event in read_events(self.run_dir / "events.jsonl")}
            if set(kinds) <= set(found):
                return [found[kind] for kind in kinds]
            time.sleep(0.01)
        raise AssertionError(f"no {kinds}")

    def say(self, message: m.AnyMessage, heard: Callable[[], bool]) -> None:
        """Until it is heard: what its fork server says next comes another way, and may be there before."""
        self.coordinator.say(message)
        end_s = time.monotonic() + PATIENCE_S
        while not heard():
            assert self._thread.is_alive() and time.monotonic() < end_s, f"nobody has heard {message}"
            time.sleep(0.001)

    def over(self, message: m.JobEnded | None = None) -> None:
        """The job is over, and the agent knows it."""
        self.say(message or OVER, lambda: self.agent._ended is not None)

    def end(self) -> Left:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.left[0]

    def close(self) -> None:
        self.agent._inbox.put(signal.SIGTERM)
        self._thread.join(PATIENCE_S)
        self.server.close()
        self.coordinator.close()
        self.board.close()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    found = Started(tmp_path)
    yield found
    found.close()


OVER = m.JobEnded(state="completed", cause=Cause.COMPLETED, reason="step 9 was the last", exit_code=0)
WENT = Left(0, "the job is over: completed")


def test_it_starts_what_it_is_told_to_with_what_it_was_told(started: Started) -> None:
    hello = started.coordinator.hear(m.AgentHello)
    assert (hello.agent_id, hello.host, hello.workers, hello.slots, hello.room) == ("here", "here", [], 0, 3)
    started.coordinator.say(started.facts())
    started.coordinator.say(m.SetSlots(worker_ids=[1], first=[4]))
    request = started.server.start()
    context = request["context"]
    assert (context["worker_id"], context["incarnation"], request["entry"]) == (1, 4, "module:entry")
    context = request["context"]
    assert (context["task"], context["argv"], context["host"]) == ("task", ["--one"], "here")
    assert context["run_dir"] == str(started.run_dir) and context["token"] == role_token(TOKEN, "worker", "1.4").hex()
    life = started.coordinator.hear(m.WorkerStarted).worker
    assert (life.worker_id, life.incarnation, life.pid) == (1, 4, started.server.workers[0].pid)


def test_it_kills_on_request_tells_of_the_death_and_starts_the_next_life(started: Started) -> None:
    request = started.with_worker(first=2)
    who = {"worker_id": 1, "incarnation": 2}
    started.coordinator.say(m.KillWorker(**who, cause=Cause.HUNG, reason="it hangs"))
    assert started.coordinator.notice("worker_killed")["cause"] == Cause.HUNG
    started.server.exited(request)
    exited = started.coordinator.hear(m.WorkerExited)
    assert (exited.worker_id, exited.incarnation, exited.cause) == (1, 2, Cause.KILLED)
    assert started.server.start()["context"]["incarnation"] == 3


def test_while_the_coordinator_is_away_workers_go_on_and_are_named_when_it_is_back(started: Started) -> None:
    started.with_worker()
    started.coordinator.hang_up()
    hello = started.coordinator.hear(m.AgentHello)
    assert [(life.worker_id, life.incarnation) for life in hello.workers] == [(1, 0)] and hello.slots == 1
    assert started.server.workers[0].poll() is None
    started.coordinator.say(started.facts())
    started.coordinator.say(m.KillWorker(worker_id=1, incarnation=0, cause=Cause.HUNG, reason="it hangs"))
    started.coordinator.notice("worker_killed")


def test_when_the_job_is_over_it_waits_for_its_workers_and_leaves(started: Started) -> None:
    request = started.with_worker()
    started.board.row(1).set(step=7)
    started.over()
    started.server.workers[0].terminate()
    started.server.exited(request)
    assert started.coordinator.notice("host_left")["reached"] == 7
    assert started.end() == WENT


def test_what_it_does_to_its_links_and_cannot_do_is_told_in_the_jobs_events(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    started.with_worker()
    cut = m.StrikeNow(number=1, kind="cut", peer="192.0.2.7", for_s=1.0)
    started.coordinator.say(cut)
    [warning] = started.events("warning")

    def harm(message: m.StrikeNow, own: str) -> Undone:
        undone = Undone(0.0, [], "true")
        undone.begin()
        return undone

    monkeypatch.setattr(host_agent, "harm", harm)
    started.coordinator.say(msgspec.structs.replace(cut, number=2, kind="slow"))
    [over] = started.events("fault_over")
    assert [(event["cause"], event["reason"].partition(":")[2]) for event in (warning, over)] == [
        ("injected", " cut did not strike: expected a link to other hosts, got no address on no interface"),
        ("injected", " slow between this host and 192.0.2.7 is over"),
    ]


def test_a_job_that_is_over_before_it_knew_it(started: Started) -> None:
    started.coordinator.hear(m.AgentHello)
    started.coordinator.say(OVER)
    assert started.end() == WENT
    assert started.server.process.poll() is not None


@pytest.mark.parametrize(("signalled", "asked", "later"), [("TERM", 0, True), ("INT", 0, False), ("TERM", 1, False)])
def test_a_job_that_was_told_to_stop_may_go_on(started: Started, signalled: str, asked: int, later: bool) -> None:
    """What a person has ended does not, and who was asked to leave does not wait."""
    request = started.with_worker()
    if asked:
        started.agent._inbox.put(signal.SIGUSR1)
        started.coordinator.hear(m.HostLeaving)
    code = 128 + signal.Signals[f"SIG{signalled}"]
    started.over(m.JobEnded(state="interrupted", reason="told to", exit_code=code))
    started.server.workers[0].terminate()
    started.server.exited(request)
    assert started.end() == Left(0, "the job is over: interrupted", later)


@pytest.mark.parametrize(
    ("said", "asked", "code"), [(1, False, 1), (3, False, 3), (0, False, 1), (1, True, 0)], ids=lambda value: str(value)
)
def test_an_agent_ends_as_the_job_that_failed(started: Started, said: int, asked: bool, code: int) -> None:
    """Unless it was about to leave."""
    request = started.with_worker()
    if asked:
        started.agent._inbox.put(signal.SIGUSR1)
        started.coordinator.hear(m.HostLeaving)
    started.over(m.JobEnded(state="failed", reason="too much\nand more", exit_code=said))
    started.server.workers[0].terminate()
    started.server.exited(request)
    words = "the job is over: failed" + ("" if asked else ": too much")
    assert started.end() == Left(code, words)


def test_on_the_jobs_own_host_the_job_says_when_to_leave(tmp_path: Path) -> None:
    """Its process acts upon the signal, which a scheduler may send to all processes."""
    started = Started(tmp_path, parent=os.getpid())
    try:
        started.with_worker()
        started.agent._inbox.put(signal.SIGUSR1)
        started.coordinator.say(m.KillWorker(worker_id=1, incarnation=0, reason="so that it is known to have heard"))
        started.coordinator.notice("worker_killed")
        assert not started.agent.link.leaving
        started.agent._inbox.put(LEAVE)
        assert started.coordinator.hear(m.HostLeaving).agent_id == "here"
    finally:
        started.close()


def test_who_was_asked_to_leave_leaves_though_the_jobs_process_is_gone(started: Started) -> None:
    started.with_worker()
    started.agent._inbox.put(signal.SIGUSR1)
    started.coordinator.hear(m.HostLeaving)
    started.coordinator.say(m.Goodbye(cause=Cause.UNKNOWN, reason="the job is gone"))
    assert started.end().exit_code == 0


def test_when_the_jobs_process_is_gone_its_workers_are_ended(started: Started) -> None:
    job = subprocess.Popen(["sleep", "1000"])
    started.coordinator.hear(m.AgentHello)
    started.coordinator.say(started.facts(job.pid))
    started.coordinator.say(m.SetSlots(worker_ids=[0]))
    started.server.start()
    started.coordinator.hear(m.WorkerStarted)
    job.kill()
    job.wait()
    left = started.end()
    assert left.exit_code == NO_HEAD and "job's process is gone" in left.words
    assert started.server.workers[0].wait(PATIENCE_S) == -signal.SIGKILL


def test_another_job_at_the_same_address_is_not_its_job(started: Started) -> None:
    started.with_worker()
    started.coordinator.say(started.facts())
    started.coordinator.say(started.facts(seed=3))
    left = started.end()
    assert left.exit_code == NO_HEAD and "another job" in left.words


def test_who_is_refused_says_why(started: Started) -> None:
    started.coordinator.hear(m.AgentHello)
    started.coordinator.say(m.AgentRefused(cause=Cause.CONFIG, reason="another agent is called so"))
    assert started.end() == Left(2, "another agent is called so")


def test_a_drained_host_leaves_with_a_line(started: Started) -> None:
    started.coordinator.hear(m.AgentHello)
    started.coordinator.say(m.HostDismissed(reason="host here was drained"))
    assert started.end() == Left(0, "host here was drained")


def test_a_drained_host_starts_nothing_any_more_and_says_when_nothing_runs(started: Started) -> None:
    request = started.with_worker()
    started.say(m.SetSlots(worker_ids=[1], first=[1], drained=True), lambda: not started.agent._slots())
    started.server.workers[0].kill()
    started.server.exited(request)
    assert started.coordinator.hear(m.WorkerExited).worker_id == 1
    assert started.coordinator.hear(m.HostEmptied).agent_id == "here"
    started.coordinator.say(m.SetSlots(worker_ids=[], drained=True))  # another coordinator asks again
    assert started.coordinator.hear(m.HostEmptied).agent_id == "here"
    assert len(started.server.workers) == 1


def test_sigusr1_asks_for_its_host_to_be_drained_until_it_may_not(
    started: Started, capfd: pytest.CaptureFixture[str]
) -> None:
    started.with_worker()
    started.agent._inbox.put(signal.SIGUSR1)
    assert started.coordinator.hear(m.HostLeaving).agent_id == "here"
    started.coordinator.hang_up()
    assert started.coordinator.hear(m.AgentHello).leaving
    started.coordinator.say(started.facts())
    started.coordinator.say(m.HostKept(reason="it is needed"))
    started.coordinator.say(m.KillWorker(worker_id=1, incarnation=0, reason="so that it is known to have heard"))
    started.coordinator.notice("worker_killed")
    started.coordinator.hang_up()
    assert not started.coordinator.hear(m.AgentHello).leaving
    assert "everstep agent: it is needed" in capfd.readouterr().err


def test_a_run_directory_that_is_not_here_is_made_up_for_by_a_private_one(
    started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started.coordinator.hear(m.AgentHello)
    job = {"task": "task", "created_unix_ns": 255}
    facts = msgspec.structs.replace(started.facts(), run_dir=str(tmp_path / "elsewhere"), place="word", job=job)
    started.coordinator.say(facts)
    assert started.coordinator.hear(m.HostPlace) == m.HostPlace(agent_id="here", apart=True, disk="host here")
    started.coordinator.say(m.SetSlots(worker_ids=[1], first=[0]))
    context = started.server.start()["context"]
    own = Path(context["run_dir"])
    assert context["apart"] and own == tmp_path / f"everstep-{os.getuid()}" / "ff-here"
    assert json.loads((own / "job.json").read_text()) == job and own.stat().st_mode & 0o077 == 0
    assert read_address(Path(context["coordinator_file"])).port == started.coordinator.port
    (own / "events.jsonl").write_text('{"time_unix_ns":1,"kind":"warning"}\n')
    receiver = HeadReceiver(tmp_path)
    started.over()
    started.server.workers[0].terminate()
    while not (tmp_path / "events.jsonl").exists():
        started.coordinator.say(receiver.take(started.coordinator.hear(m.FilePieces)))
    started.server.exited({"context": context})
    assert started.end() == WENT
    assert not own.exists(), "the job is done"


@pytest.mark.parametrize("called_otherwise", [False, True])
@pytest.mark.parametrize("shared", [True, False])
def test_who_sees_the_jobs_directory_follows_what_is_said_there_whatever_it_is_called(
    started: Started, tmp_path: Path, called_otherwise: bool, shared: bool
) -> None:
    """A copy of it, which another word lies in, misleads nobody: its host goes on where it has joined."""
    here, other = tmp_path / "shared", FakeCoordinator(TOKEN)
    here.mkdir()
    (here / "place").write_text("word" if shared else "another word")
    announce(here / "coordinator.json", address_of("127.0.0.1", other.port))
    started.coordinator.hear(m.AgentHello)
    named = str(tmp_path / "elsewhere" if called_otherwise else here)
    if called_otherwise or not shared:
        started.agent._joining = replace(started.agent._joining, run_dir=str(here))
    facts = msgspec.structs.replace(started.facts(), run_dir=named, place="word", job={"created_unix_ns": 4})
    started.coordinator.say(facts)
    if not shared:
        assert started.coordinator.hear(m.HostPlace).apart
        started.coordinator.hang_up()
    assert (other if shared else started.coordinator).hear(m.AgentHello).agent_id == "here"
    other.close()


def test_a_directory_of_another_job_is_refused(started: Started, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"created_unix_ns": 3}')
    started.coordinator.hear(m.AgentHello)
    started.agent._joining = replace(started.agent._joining, run_dir=str(tmp_path))
    started.coordinator.say(msgspec.structs.replace(started.facts(), place="word", job={"created_unix_ns": 4}))
    left = started.end()
    assert left.exit_code == 2 and "another job" in left.words and "--run-dir" in left.words


def test_while_a_worker_finishes_after_its_time_the_agent_sleeps(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = started.with_worker()
    started.board.row(1).set(phase="finish")
    monkeypatch.setattr(host_agent, "GRACE_S", 0.0)
    slept, readable = threading.Event(), host_agent.readable

    def watch(fds: Iterable[int], timeout_s: float) -> set[int]:
        if started.agent._deadline_s is not None and timeout_s > 0:
            slept.set()
        return readable(fds, timeout_s)

    monkeypatch.setattr(host_agent, "readable", watch)
    started.over()
    assert slept.wait(PATIENCE_S / 3)
    started.server.workers[0].terminate()
    started.server.exited(request)
    assert started.end() == WENT


def test_a_signal_ends_its_workers_at_once(started: Started) -> None:
    started.with_worker()
    started.agent._inbox.put(signal.SIGTERM)
    assert started.end().exit_code == 128 + signal.SIGTERM
    assert started.server.workers[0].wait(PATIENCE_S) == -signal.SIGKILL


def test_slots_without_workers_are_told_once_they_have_all_left(started: Started) -> None:
    request = started.with_worker()
    started.say(m.SetSlots(worker_ids=[]), lambda: not started.agent._slots())
    started.server.workers[0].terminate()
    started.server.exited(request)
    assert started.coordinator.hear(m.WorkerExited).worker_id == 1
    started.coordinator.notice("workers_left")


def test_a_slot_that_was_given_up_is_told_again_to_who_comes_next(started: Started) -> None:
    started.coordinator.hear(m.AgentHello)
    started.coordinator.say(started.facts(on_failure="shrink"))
    started.coordinator.say(m.SetSlots(worker_ids=[1], first=[0]))
    request = started.server.start()
    life = started.coordinator.hear(m.WorkerStarted).worker
    started.coordinator.say(m.KillWorker(worker_id=1, incarnation=life.incarnation, reason="test"))
    started.server.exited(request)
    lost = started.coordinator.hear(m.SlotLost)
    started.coordinator.hang_up()
    assert started.coordinator.hear(m.AgentHello).lost == [lost]


def test_what_no_restart_can_help_ends_the_job(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    started.coordinator.hear(m.AgentHello)
    monkeypatch.setattr("everstep.runtime.host.kept_server.SERVER_HOPELESS", 1)
    started.server.client.ready = False  # it dies before it has imported everything
    started.coordinator.say(started.facts())
    started.server._sock.shutdown(socket.SHUT_RDWR)
    started.server.process.kill()
    failed = started.coordinator.hear(m.HostFailed)
    started.coordinator.hang_up()
    assert started.coordinator.hear(m.AgentHello).failed == failed, "it may have been said to a dead one"
    assert failed.cause == Cause.CRASH_LOOP and "the fork server cannot start" in failed.reason


def test_all_of_the_end_is_done_whatever_a_part_of_it_raises(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    started.with_worker()
    host = started.agent._host
    assert host is not None
    done: list[str] = []

    def breaks() -> int:
        done.append("goodbye")
        raise BrokenPipeError("within")

    monkeypatch.setattr(host, "reached", breaks)
    monkeypatch.setattr(started.agent.link, "close", lambda: done.append("link"))
    seen: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    started.agent._inbox.put(signal.SIGTERM)
    started._thread.join(PATIENCE_S)
    assert done == ["goodbye", "link"] and isinstance(seen[0], BrokenPipeError)
    assert not host._collector._thread.is_alive()


def test_a_stopped_worker_keeps_no_job_from_ending(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one that does what its script does after the last step is waited for; be it stopped again and again."""
    monkeypatch.setattr("everstep.runtime.host.host_agent.GRACE_S", 0.05)
    request = started.with_worker()
    started.board.row(1).set(phase="finish")
    worker = started.server.workers[0]
    worker.send_signal(signal.SIGSTOP)
    started.over()
    while worker.poll() is None:
        worker.send_signal(signal.SIGSTOP)
        time.sleep(0.001)
    started.server.exited(request)
    assert worker.returncode == -signal.SIGKILL
    assert started.end() == WENT


def test_a_worker_that_stands_still_at_the_job_s_end_is_continued(started: Started) -> None:
    """What has stopped it may not be there any more to let go of it."""
    request = started.with_worker()
    worker = started.server.workers[0]
    worker.send_signal(signal.SIGSTOP)
    while not is_stopped(worker.pid):
        assert worker.poll() is None
    started.over()
    while is_stopped(worker.pid):
        assert not started.left
    worker.terminate()
    started.server.exited(request)
    assert started.end() == WENT


def test_without_a_coordinator_the_workers_are_asked_to_end_the_job_and_it_leaves_after_them(started: Started) -> None:
    request = started.with_worker()
    assert not started.board.row(1).end_asked
    started.agent._inbox.put(END_ALONE)
    started.coordinator.hang_up()
    while not started.board.row(1).end_asked:
        assert not started.left
    started.server.workers[0].terminate()
    started.server.exited(request)
    assert started.end() == Left(0)
    assert len(started.server.workers) == 1, "nothing is started any more"


def test_without_a_coordinator_and_without_workers_it_leaves_at_once(started: Started) -> None:
    started.coordinator.hear(m.AgentHello)
    started.agent._inbox.put(END_ALONE)
    assert started.end() == Left(0)


BYE = m.Goodbye(cause=Cause.INTERRUPTED, reason="the job's process has ended")


def test_when_the_job_of_another_host_says_goodbye_its_workers_are_ended_at_once(started: Started) -> None:
    started.with_worker()
    started.coordinator.say(BYE)
    assert started.end() == Left(NO_HEAD, "the job's process has ended: its workers here are ended")


def test_a_spare_leaves_at_once_too(started: Started) -> None:
    started.coordinator.hear(m.AgentHello)
    started.coordinator.say(BYE)
    assert started.end().exit_code == NO_HEAD


def test_who_was_told_of_the_end_before_leaves_as_it_was_told(started: Started) -> None:
    request = started.with_worker()
    started.over()
    started.coordinator.say(BYE)
    started.server.workers[0].terminate()
    started.server.exited(request)
    assert started.end() == WENT


def test_who_has_lost_the_job_says_so_every_ten_seconds_and_gives_up_in_the_end() -> None:
    absence, said = Absence("10.0.0.1:29400", 0.0), []
    for second in range(1, 30):
        said.append(absence.look(second > 25, float(second)))
    assert [text for text in said if text] == [
        "the job at 10.0.0.1:29400 has not answered for 10 s: workers go on, 590 s are left",
        "the job at 10.0.0.1:29400 has not answered for 20 s: workers go on, 580 s are left",
        "the job at 10.0.0.1:29400 answers again",
    ]
    assert not absence.over
    assert absence.look(False, 700.0) == "the job at 10.0.0.1:29400 has not answered for 600 s" and absence.over
