"""Processes of one host that wait for the first of them."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.base.errors import ConfigError
from everstep.runtime.link import waiting
from everstep.runtime.link.waiting import Waited, wait_for
from everstep.runtime.process import own_command

WAIT = """
import sys
from everstep.runtime.link.waiting import wait_for
print("here", flush=True)
sys.exit(wait_for(sys.argv[1]))
"""


def waiter(key: str) -> subprocess.Popen[str]:
    command = [*own_command("x")[:2], "-c", WAIT, key]
    found = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert found.stdout is not None and found.stdout.readline() == "here\n"
    return found


def until_it_has_come(pid: int) -> None:
    """One of its sockets is connected (state 03)."""
    end_s, connected = time.monotonic() + 60.0, False
    while not connected:
        assert time.monotonic() < end_s
        held = set()
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                held.add(os.readlink(fd))
        with open("/proc/net/unix") as file:
            rows = [line.split() for line in file]
        connected = any(row[5] == "03" and f"socket:[{row[6]}]" in held for row in rows[1:] if len(row) > 6)


@pytest.mark.parametrize("code", [0, 1, 3, 143])
def test_they_end_with_its_exit_code(code: int) -> None:
    key = secrets.token_hex(8)
    waited = Waited(key)
    others = [waiter(key) for _ in range(2)]
    for other in others:
        until_it_has_come(other.pid)
    os.kill(others[0].pid, signal.SIGUSR1)
    os.kill(others[1].pid, signal.SIGTERM)  # the first one got it too, and is about to act upon it
    waited.tell(code)
    assert [other.wait(60) for other in others] == [code, code]
    assert all(other.communicate()[1] == "" for other in others)


def test_it_dies_without_a_word() -> None:
    key = secrets.token_hex(8)
    hold = f"from everstep.runtime.link.waiting import Waited; w = Waited({key!r}); print('here', flush=True); input()"
    first = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == "here\n"
    other = waiter(key)
    until_it_has_come(other.pid)
    first.kill()
    first.wait()
    assert other.wait(60) == 1
    assert "has died" in other.communicate()[1]


def test_there_is_one_first_process() -> None:
    key = secrets.token_hex(8)
    waited = Waited(key)
    with pytest.raises(ConfigError, match="another process of this host is the first"):
        Waited(key)
    waited.tell(0)
    Waited(key).tell(0)


def test_nobody_comes() -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from everstep.runtime.link.waiting import wait_for; wait_for({secrets.token_hex(8)!r}, 0.0)",
        ],
        capture_output=True,
        text=True,
    )
    assert "the first process of this host has not started" in ended.stderr
    assert wait_for.__doc__ is not None


def test_another_user_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    key = secrets.token_hex(8)
    first = Waited(key)
    (name,) = waiting._listening(key)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(name)
        monkeypatch.setattr(waiting, "user_of", lambda _: os.getuid() + 1)
        first.tell(7)
        assert stranger.recv(1) == b""


@pytest.fixture
def strangers() -> Iterator[Callable[[bytes], None]]:
    """Makes another user listen at an abstract name: first a process of root, which is another one there."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    held: list[subprocess.Popen[str]] = []

    def listen(name: bytes) -> None:
        script = (
            "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
            f"s.bind({name!r}); s.listen(1); print('here', flush=True); input()"
        )
        command = [sys.executable, "-c", script]
        held.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        stdout = held[-1].stdout
        assert stdout is not None and stdout.readline() == "here\n"

    yield listen
    for process in held:
        process.kill()
        process.wait()


def test_no_name_that_another_user_has_taken_is_in_the_way(strangers: Callable[[bytes], None]) -> None:
    """Neither that of before, nor any that begins as it must; a full one does not hold the others up."""
    key = secrets.token_hex(8)
    plain = f"\0everstep-{os.getuid()}-{key}".encode()
    for name in (plain, plain + b"-", plain + b"-" + b"0" * 32, plain + b"- \n x"):
        strangers(name)
    full = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for sock in full:
        sock.setblocking(False)
        sock.connect(plain + b"-")
    waited = Waited(key)
    other = waiter(key)
    until_it_has_come(other.pid)
    waited.tell(3)
    assert other.wait(60) == 3
    for sock in full:
        sock.close()


def test_a_name_is_not_known_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    key, names = secrets.token_hex(8), set[bytes]()
    for _ in range(20):
        waited = Waited(key)
        names |= waiting._listening(key)
        waited.tell(0)
    assert len(names) == 20 and not waiting._listening(key)
