"""Faults that have to be undone: whatever ends whoever strikes, nothing stays stopped and no link stays cut."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.base.config import Config
from everstep.runtime.host.undoing import Harms, Undone, stop, throttle
from everstep.runtime.process import OUTLIVES_WORKERS, is_stopped, lasting_command, outlives_workers
from everstep.runtime.start import Start
from everstep.runtime.supervisor import CoordinatorProcess

LIMIT_S = 60.0
SLEEPER = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def until(holds: Callable[[], object]) -> None:
    """Waits for what has to come."""
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.002)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    found = subprocess.Popen(SLEEPER, stdin=subprocess.PIPE)
    yield found
    found.kill()
    found.communicate()


def strikers(mark: str) -> list[int]:
    """The shells that strike this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0] == OUTLIVES_WORKERS.encode() and mark in words[2].decode():
                found.append(int(entry.name))
    return found


def mark_of(victim: subprocess.Popen[bytes]) -> str:
    return f"kill -CONT {victim.pid};"


STRIKES = [lambda pid: stop(pid, 1000.0, itself=False), lambda pid: throttle(pid, 1000.0)]


@pytest.mark.parametrize("strike", STRIKES)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_striker_that_is_ended_lets_go(
    victim: subprocess.Popen[bytes], strike: Callable[[int], None], how: signal.Signals
) -> None:
    strike(victim.pid)
    until(lambda: is_stopped(victim.pid))
    for pid in strikers(mark_of(victim)):
        with contextlib.suppress(ProcessLookupError):  # a shell's fork bears its command line until it runs another
            os.kill(pid, how)
    until(lambda: not strikers(mark_of(victim)))
    assert not is_stopped(victim.pid)


def test_one_whose_time_is_over_has_let_go(victim: subprocess.Popen[bytes]) -> None:
    stop(victim.pid, 0.05, itself=False)
    _, status = os.waitpid(victim.pid, os.WCONTINUED)
    assert os.WIFCONTINUED(status), "said only of what had been stopped"
    until(lambda: not strikers(mark_of(victim)))
    assert not is_stopped(victim.pid)


def test_whoever_stops_itself_goes_on_when_it_is_over_however_short_that_is() -> None:
    program = (
        "import os, sys; from everstep.runtime.host.undoing import stop\n"
        "for _ in range(20): stop(os.getpid(), 0.0, itself=True)\n"
        "print('went on')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=LIMIT_S)
    assert done.stdout == b"went on\n" and done.returncode == 0


def test_a_striker_ends_with_its_victim(victim: subprocess.Popen[bytes]) -> None:
    throttle(victim.pid, 1000.0)
    until(lambda: is_stopped(victim.pid))
    mark = mark_of(victim)
    victim.kill()
    victim.wait()
    until(lambda: not strikers(mark))


def test_a_coordinator_whose_striker_was_killed_is_continued_before_it_is_ended(tmp_path: Path) -> None:
    """It has time for what it does at its end."""
    (tmp_path / "logs").mkdir()
    said = tmp_path / "said"
    program = (
        "import signal, sys\n"
        f"def over(*_): open({str(said)!r}, 'w').write('in order'); sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, over); open({str(said)!r}, 'w').write('there')\n"
        "while True: signal.pause()"
    )
    process = CoordinatorProcess(Start(Config(), run_dir=tmp_path))
    process.spawn([sys.executable, "-c", program])
    try:
        until(lambda: said.exists() and said.read_text() == "there")
        process.strike("stop", 1000.0)
        until(lambda: is_stopped(process.pid))
        for pid in strikers(f"kill -CONT {process.pid};"):
            os.kill(pid, signal.SIGKILL)
    finally:
        process.end(LIMIT_S)
    assert said.read_text() == "in order"


@pytest.mark.parametrize(("kind", "code"), [("kill", -signal.SIGKILL), ("stop", None), ("throttle", None)])
def test_a_coordinator_is_struck_by_the_process_that_has_started_it(
    tmp_path: Path, kind: str, code: int | None
) -> None:
    (tmp_path / "logs").mkdir()
    process = CoordinatorProcess(Start(Config(), run_dir=tmp_path))
    process.strike(kind, 0.0)  # there is none yet
    process.spawn([*SLEEPER[:2], "import time; time.sleep(1000)"])
    try:
        process.strike(kind, 1.0 if kind == "throttle" else 0.0)
        if code is None:
            until(lambda: is_stopped(process.pid))
        else:
            assert process._process is not None and process._process.wait(LIMIT_S) == code
    finally:
        process.end(LIMIT_S)


# ---- links


class Link:
    """Something that is harmed: a file is there as long as it is."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "harmed"
        self.times = folder / "times"

    def harm(self, for_s: float) -> Undone:
        undone = Undone(for_s, [["rm", str(self.path)], ["touch", str(self.times)]], "true")
        self.path.touch()
        undone.begin()
        return undone

    @property
    def undone(self) -> bool:
        return not self.path.exists()


@pytest.fixture
def link(tmp_path: Path) -> Link:
    return Link(tmp_path)


def test_a_link_is_whole_again_when_its_time_is_over(link: Link) -> None:
    harms = Harms()
    harms.take("cut", lambda: link.harm(0.01))
    until(lambda: link.undone)
    until(lambda: harms.look() == ["cut"])


def test_or_when_the_agent_leaves(link: Link) -> None:
    harms = Harms()
    harms.take("cut", lambda: link.harm(1000.0))
    harms.look()
    assert not link.undone and len(harms._going) == 1
    harms.close()
    assert link.undone and not strikers(str(link.path))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_or_when_what_was_to_undo_it_is_ended(link: Link, how: signal.Signals) -> None:
    harms = Harms()
    harms.take("cut", lambda: link.harm(1000.0))
    until(lambda: len(strikers(str(link.path))) > 1)  # and what it has forked
    os.kill(min(strikers(str(link.path))), how)
    until(lambda: (harms.look(), link.undone)[1])
    harms.close()


def test_or_when_it_is_stopped_and_the_agent_leaves(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.runtime.host.undoing._LIMIT_S", 0.1)
    harms = Harms()
    harms.take("cut", lambda: link.harm(1000.0))
    for pid in strikers(str(link.path)):
        os.kill(pid, signal.SIGSTOP)
    harms.close()
    assert link.undone


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_or_when_what_it_needs_is_ended(link: Link, victim: subprocess.Popen[bytes], how: signal.Signals) -> None:
    harms = Harms()
    undone = link.harm(1000.0)
    undone.needs(victim)
    harms.take("slow", lambda: undone)
    assert harms.look() == [] and not link.undone
    victim.send_signal(how)
    until(lambda: harms.look() == ["slow"])
    assert link.undone


def test_what_it_needs_and_is_stopped_ends_with_it(
    link: Link, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.runtime.host.undoing._PATIENCE_S", 0.1)
    victim.send_signal(signal.SIGSTOP)
    undone = link.harm(1000.0)
    undone.needs(victim)
    undone.close()
    assert link.undone and victim.returncode == -signal.SIGKILL


def test_a_process_that_is_to_stay_when_workers_end_is_known_as_such(victim: subprocess.Popen[bytes]) -> None:
    _, *flags = lasting_command("x")
    assert not outlives_workers(victim.pid) and not outlives_workers(os.getpid())
    lasting = subprocess.Popen([sys.executable, flags[0], *SLEEPER[1:], *flags[3:]], stdin=subprocess.PIPE)
    try:
        until(lambda: outlives_workers(lasting.pid))
    finally:
        lasting.communicate()


AGENT = """
import os, sys
from pathlib import Path
from everstep.runtime.host.undoing import Harms, Undone
path = Path(sys.argv[1])
def harm():
    undone = Undone(1000.0, [["rm", str(path)]], "true")
    path.touch()
    if sys.argv[2] == "done":
        undone.begin()
    return undone
harms = Harms()
harms.take("cut", harm)
print("harmed", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("when", ["done", "in the middle"])
def test_or_when_the_agent_is_killed(link: Link, when: str) -> None:
    command = [sys.executable, "-c", AGENT, str(link.path), when]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agent.stdout is not None and agent.stdout.readline() == b"harmed\n"
    assert not link.undone
    agent.kill()
    agent.communicate()
    until(lambda: link.undone)
    until(lambda: not strikers(str(link.path)))


def test_or_when_the_agent_ends_while_the_shell_begins_to_wait(tmp_path: Path) -> None:
    """What it waits for is a shell itself for a moment, and has to end then, too."""
    paths = [tmp_path / str(number) for number in range(60)]
    shells = []
    for path in paths:
        undone = Undone(1000.0, [["rm", str(path)]], "true")
        path.touch()
        undone.begin()
        assert undone._shell.stdin is not None
        undone._shell.stdin.close()
        shells.append(undone._shell)
    until(lambda: all(shell.poll() is not None for shell in shells))
    assert not any(path.exists() for path in paths)


def test_a_harm_that_could_not_be_done_is_undone_as_far_as_it_was(link: Link) -> None:
    harms = Harms()

    def fails() -> Undone:
        undone = Undone(1000.0, [["rm", str(link.path)]], "true")
        link.path.touch()
        undone.close()
        raise OSError("half of it")

    with pytest.raises(OSError, match="half"):
        harms.take("cut", fails)
    assert link.undone
