"""Job, coordinator, agent, fork server and fake workers as real processes: births, deaths, signals, a clean end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.base.config import load_config
from everstep.base.errors import EverstepError
from everstep.observe.events import read_events
from everstep.runtime.commands import NoJobRunning, ask
from everstep.runtime.job import Job as JobProcess
from everstep.runtime.job_end import Outcome
from everstep.runtime.link.address import read_address
from everstep.runtime.start import Start

HERE = Path(__file__).parent
ENTRY = "runtime_fake_worker:main"
PATIENCE_S = 60.0


def until(what: Callable[[], Any], why: str) -> Any:
    """Poll a condition of other processes; what it returned when it became true."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with contextlib.suppress(EverstepError, OSError):
            found = what()
            if found:
                return found
        time.sleep(0.005)
    pytest.fail(f"not within {PATIENCE_S:g} s: {why}")


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def parent(pid: int) -> int:
    """Who has started it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def processes_of(run_dir: Path) -> list[int]:
    """Pids of workers, and those whose command line, or whose log file, names the run directory."""
    said = (path.read_text() for path in run_dir.glob("pid-*"))
    found = [int(pid) for pid in said if pid and runs(int(pid))]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if not runs(int(entry.name)):
                continue
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
            stdout = os.readlink(entry / "fd" / "1")
            if str(run_dir) in command or stdout.startswith(str(run_dir)):
                found.append(int(entry.name))
    return found


class Job:
    """A job in a thread, with what tests ask about it."""

    def __init__(
        self, run_dir: Path, *, argv: list[str] | None = None, entry: str = ENTRY, ranks: int = 1, **config: Any
    ) -> None:
        self.run_dir = run_dir
        self.seen: list[dict[str, Any]] = []
        settings = {"workers": 2, "heartbeat.interval_s": 0.2, "checkpoint.enabled": False, **config}
        found = load_config([("test", settings)])
        begun = Start(found, entry, (), ranks=ranks, run_dir=run_dir, task="task", argv=tuple(argv or ()))
        self.process = JobProcess(begun)
        self.code: int | None = None
        self.outcome: Outcome | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.outcome = self.process.run(self.seen.append)
        self.code = self.outcome.exit_code

    def status(self) -> dict[str, Any]:
        return ask(self.run_dir, "status", {}, timeout_s=30)

    def members(self) -> dict[int, dict[str, Any]]:
        """Workers with a seat, by id."""
        return {w["worker_id"]: w for w in self.status()["workers"] if w["stage"] is not None}

    def running(self, incarnations: dict[int, int], step: int = 1) -> dict[str, Any]:
        """Wait until these lives are the members, have all been heard of, and have passed the step."""

        def ready() -> dict[str, Any] | None:
            status = self.status()
            seats = {w["worker_id"]: w["incarnation"] for w in status["workers"] if w["stage"] is not None}
            if seats == incarnations and status["state"] == "running" and status["step"] >= step:
                return status
            return None

        found: dict[str, Any] = until(ready, f"members {incarnations} at step {step}")
        return found

    def finish(self) -> int:
        """Let the job complete; its exit code."""
        (self.run_dir / "finish").touch()
        return self.wait()

    def wait(self) -> int:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the job did not end"
        assert self.code is not None
        return self.code

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.seen if e["kind"] == kind]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    jobs: list[Job] = []

    def make(**kwargs: Any) -> Job:
        jobs.append(Job(tmp_path / "run", **kwargs))
        return jobs[-1]

    yield make
    for job in jobs:
        if job.thread.is_alive():
            job.process.interrupt(signal.SIGTERM)
            job.process.interrupt(signal.SIGTERM)
            job.thread.join(PATIENCE_S)
    assert processes_of(tmp_path) == []


def test_a_job_from_start_to_end(start: Callable[..., Job]) -> None:
    job = start(workers=3)
    status = job.running({0: 0, 1: 0, 2: 0})
    assert sorted(lane for w in status["workers"] for lane in w["lanes"]) == list(range(8))
    assert job.finish() == 0
    assert job.outcome is not None and job.outcome.state == "completed"
    assert processes_of(job.run_dir) == []
    kinds = [e["kind"] for e in read_events(job.run_dir / "events.jsonl")]
    assert kinds.count("worker_joined") == 3 and "generation_started" in kinds and "job_completed" in kinds
    assert json.loads((job.run_dir / "job.json").read_text())["config"]["workers"] == 3
    assert (job.run_dir / "token").stat().st_mode & 0o777 == 0o600
    assert "life 1.0 starts, hash seed 0" in (job.run_dir / "logs" / "worker-1.jsonl").read_text()
    with pytest.raises(NoJobRunning, match="no job is running"):
        ask(job.run_dir, "status")


def test_workers_inherit_nothing_but_the_board_and_their_lifeline(start: Callable[..., Job]) -> None:
    job = start(workers=1)
    job.running({0: 0})
    fds = [int(fd) for fd in (job.run_dir / "fds-0.0").read_text().split()]
    board = int((job.run_dir / "board-0.0").read_text())
    assert {0, 1, 2, board} < set(fds)
    assert len(fds) == 6  # the sixth is that of listing them
    job.finish()


def test_a_killed_worker_is_replaced(start: Callable[..., Job]) -> None:
    job = start()
    status = job.running({0: 0, 1: 0})
    victim = next(w["pid"] for w in status["workers"] if w["worker_id"] == 1)
    killed_ns = time.time_ns()
    os.kill(victim, signal.SIGKILL)
    job.running({0: 0, 1: 1}, status["step"] + 1)
    exit_event = job.kinds("worker_exited")[0]
    assert exit_event["reason"] == "killed by SIGKILL" and exit_event["pid"] == victim
    assert exit_event["cause"] == "killed" and not exit_event["in_order"]
    assert exit_event["time_unix_ns"] - killed_ns < 2_000_000_000
    evicted = next(e for e in read_events(job.run_dir / "events.jsonl") if e["kind"] == "worker_evicted")
    assert evicted["worker_id"] == 1 and "SIGKILL" in evicted["reason"] and evicted["cause"] == "killed"
    assert job.finish() == 0


def test_a_killed_coordinator_comes_back_and_everybody_with_it(start: Callable[..., Job]) -> None:
    job = start()
    status = job.running({0: 0, 1: 0})
    before = read_address(job.run_dir / "coordinator.json")
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: read_address(job.run_dir / "coordinator.json").pid != before.pid, "a new coordinator")
    after = read_address(job.run_dir / "coordinator.json")
    assert after.port == before.port
    later = job.running({0: 0, 1: 0}, status["step"] + 5)
    assert later["generation"] == status["generation"]
    restarted = until(
        lambda: [e for e in read_events(job.run_dir / "events.jsonl") if e["kind"] == "coordinator_restarted"], "event"
    )
    assert len(restarted) == 1 and 0 < restarted[0]["downtime_s"] < 30 and restarted[0]["pid"] == after.pid
    victim = next(w["pid"] for w in later["workers"] if w["worker_id"] == 0)
    os.kill(victim, signal.SIGKILL)  # it decides as well as its predecessor did
    job.running({0: 1, 1: 0}, later["step"] + 1)
    assert job.finish() == 0


@pytest.mark.longer
def test_a_worker_and_the_coordinator_killed_at_once(start: Callable[..., Job]) -> None:
    job = start()
    status = job.running({0: 0, 1: 0})
    os.kill(read_address(job.run_dir / "coordinator.json").pid, signal.SIGKILL)
    os.kill(next(w["pid"] for w in status["workers"] if w["worker_id"] == 0), signal.SIGKILL)
    job.running({0: 1, 1: 0}, status["step"] + 1)
    assert job.finish() == 0


def test_workers_outlive_a_killed_fork_server_and_the_next_one_makes_new_ones(start: Callable[..., Job]) -> None:
    job = start(min_workers=1)
    status = job.running({0: 0, 1: 0})
    os.kill(parent(status["workers"][0]["pid"]), signal.SIGKILL)
    until(lambda: len(job.kinds("fork_server_ready")) == 2, "another fork server")
    assert any("its workers go on" in e["reason"] for e in job.kinds("warning"))
    later = job.running({0: 0, 1: 0}, job.status()["step"] + 2)
    os.kill(next(w["pid"] for w in later["workers"] if w["worker_id"] == 1), signal.SIGKILL)
    job.running({0: 0, 1: 1}, later["step"] + 1)
    (exited,) = job.kinds("worker_exited")
    assert exited["cause"] == "killed" and "killed by SIGKILL" in exited["reason"]
    assert job.finish() == 0
    assert processes_of(job.run_dir) == []


def test_a_killed_agent_takes_its_workers_along_and_all_come_back(start: Callable[..., Job]) -> None:
    job = start(min_workers=1)
    status = job.running({0: 0, 1: 0})
    for life in (1, 2):
        agent = job.kinds("agent_started")[-1]["pid"]
        os.kill(agent, signal.SIGKILL)
        until(lambda n=life: len(job.kinds("agent_started")) == n + 1, "another agent")
        job.running({0: life, 1: life})
        assert not any(runs(w["pid"]) for w in status["workers"])
        status = job.status()
    assert [e["cause"] for e in job.kinds("agent_died")] == ["host_lost"] * 2
    evicted = [e for e in read_events(job.run_dir / "events.jsonl") if e["kind"] == "worker_evicted"]
    assert [e["cause"] for e in evicted] == ["host_lost"] * 4
    assert job.finish() == 0


def test_an_agent_that_cannot_be_started_ends_the_job(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.runtime.supervisor.AGENT_MODULE", "everstep.nowhere")
    monkeypatch.setattr("everstep.runtime.supervisor.HOPELESS", 2)
    job = start()
    assert job.wait() == 1
    assert job.outcome is not None
    reason = job.outcome.why.reason
    assert "the agent of this host cannot start" in reason and "everstep.nowhere" in reason


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_job_in_order(start: Callable[..., Job], number: signal.Signals, code: int) -> None:
    job = start()
    job.running({0: 0, 1: 0})
    job.process.interrupt(number)
    assert job.wait() == code
    assert job.outcome is not None and job.outcome.state == "interrupted"
    assert [(e["reason"], e["in_order"]) for e in job.kinds("worker_exited")] == [("exit code 0", True)] * 2
    assert processes_of(job.run_dir) == []


def test_a_second_signal_ends_it_at_once(start: Callable[..., Job]) -> None:
    job = start()
    job.running({0: 0, 1: 0})
    (job.run_dir / "stubborn").touch()
    job.process.interrupt(signal.SIGINT)
    until(lambda: any("ending in order" in e["reason"] for e in job.kinds("warning")), "the first signal")
    began = time.monotonic()
    job.process.interrupt(signal.SIGINT)
    assert job.wait() == 130
    assert time.monotonic() - began < 5
    assert processes_of(job.run_dir) == []


def test_a_signal_before_anything_runs(start: Callable[..., Job]) -> None:
    job = start()
    job.process.interrupt(signal.SIGINT)
    assert job.wait() == 130


def test_garbage_and_wrong_tokens_do_no_harm(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start()
    status = job.running({0: 0, 1: 0})
    address = read_address(job.run_dir / "coordinator.json")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, b"\0\0", b""):
        with socket.create_connection((address.host, address.port)) as sock, contextlib.suppress(OSError):
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(PATIENCE_S)
            while sock.recv(4096):
                pass
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "coordinator.json").write_text((job.run_dir / "coordinator.json").read_text())
    (stranger / "token").write_text("ab" * 32)
    with pytest.raises(NoJobRunning, match="token"):
        ask(stranger, "status")
    later = job.running({0: 0, 1: 0}, status["step"] + 5)
    assert later["generation"] == status["generation"]
    warnings = [e["reason"] for e in read_events(job.run_dir / "events.jsonl") if e["kind"] == "warning"]
    assert any("refused a connection" in reason for reason in warnings)
    assert job.finish() == 0


def test_a_crash_loop_ends_the_job_with_the_reason(start: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "crash-1").touch()
    job = start(min_workers=2, **{"backoff.initial_s": 0.01})
    assert job.wait() == 1
    assert job.outcome is not None
    reason = job.outcome.why.reason
    assert "crash loop" in reason and "ImportError: no module named 'nonsense'" in reason
    assert len([e for e in job.kinds("worker_exited") if e["worker_id"] == 1]) == 3


@pytest.mark.longer
def test_scale_and_drain(start: Callable[..., Job]) -> None:
    job = start(min_workers=1)
    status = job.running({0: 0, 1: 0})
    assert ask(job.run_dir, "scale", {"workers": 3})["workers"] == 3
    job.running({0: 0, 1: 0, 2: 0}, status["step"] + 1)
    ask(job.run_dir, "drain", {"worker_id": 1})
    job.running({0: 0, 2: 0}, status["step"] + 2)
    until(lambda: any(e["worker_id"] == 1 for e in job.kinds("worker_exited")), "worker 1 leaves")
    assert job.kinds("worker_exited")[0]["reason"] == "exit code 0"
    with pytest.raises(EverstepError, match="unknown command"):
        ask(job.run_dir, "dance")
    assert job.finish() == 0


def test_what_dead_workers_leave_running_is_ended(start: Callable[..., Job]) -> None:
    job = start(workers=1, argv=["--with-child"])
    status = job.running({0: 0})
    child = int((job.run_dir / "child-0.0").read_text())
    assert runs(child)
    os.kill(status["workers"][0]["pid"], signal.SIGKILL)
    until(lambda: not runs(child), "the orphan's end")
    job.running({0: 1})
    assert job.finish() == 0
    assert not runs(int((job.run_dir / "child-0.1").read_text()))


def test_workers_that_all_leave_without_a_word(start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.runtime.job_end.LAST_WAIT_S", 0.2)
    job = start(entry="runtime_fake_worker:quick")
    assert job.wait() == 1
    assert job.outcome is not None and "has not said" in job.outcome.why.reason


def test_when_the_job_is_killed_everything_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    run_dir = tmp_path / "run"
    script = (
        "import sys; from pathlib import Path; from everstep.base.config import load_config;"
        "from everstep.runtime.job import Job; from everstep.runtime.start import Start;"
        "run_dir, config = Path(sys.argv[1]), load_config([('t', {'workers': 2})]);"
        f"sys.exit(Job(Start(config, '{ENTRY}', (), run_dir=run_dir, task='t')).run().exit_code)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(run_dir)])
    try:
        until(lambda: ask(run_dir, "status")["state"] == "running", "a running job")
        assert len(processes_of(run_dir)) >= 5
        process.kill()
        process.wait()
        until(lambda: not processes_of(run_dir), "everything's end")
    finally:
        process.kill()
        process.wait()


def test_signals_reach_a_job_in_the_main_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    run_dir = tmp_path / "run"
    script = (
        "import sys; from pathlib import Path; from everstep.base.config import load_config;"
        "from everstep.runtime.job import Job; from everstep.runtime.start import Start;"
        "run_dir, config = Path(sys.argv[1]), load_config([('t', {'workers': 1, 'checkpoint.enabled': False})]);"
        f"sys.exit(Job(Start(config, '{ENTRY}', (), run_dir=run_dir, task='t')).run().exit_code)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(run_dir)], start_new_session=True)
    try:
        until(lambda: ask(run_dir, "status")["state"] == "running", "a running job")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        assert process.wait(PATIENCE_S) == 130
        assert not processes_of(run_dir)
    finally:
        process.kill()
        process.wait()
