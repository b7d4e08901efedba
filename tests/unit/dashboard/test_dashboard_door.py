"""Silent, slow and senseless connections at the HTTP ports: everybody else is answered, and they cost little."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.dashboard.door import MAX_HEADER_BYTES, MAX_STRANGERS

CROWD = 1000
PATIENCE_S = 60.0
TOKEN = "x" * 24
KINDS = (b"", b"GET / HTTP/1.1\r\nHost: ", b"\xff" * 700, b"POST /api/token HTTP/1.1\r\nContent-Length: 9\r\n")


class Served:
    """`everstep dashboard` or `everstep metrics` of a run, as a process."""

    def __init__(self, what: str, run_dir: Path) -> None:
        self.log = run_dir.parent / f"{what}.log"
        options = ["--port", "0"] if what == "dashboard" else []
        command = [sys.executable, "-m", "everstep", what, str(run_dir), "--token", TOKEN, *options]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().split("/")[2].rpartition(":")[2])

    def status(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("GET", "/", headers={"Authorization": f"Bearer {TOKEN}"})
        found = connection.getresponse()
        found.read()
        connection.close()
        return found.status

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@pytest.fixture(params=["dashboard", "metrics"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "events.jsonl").write_text("")
    found = Served(request.param, run_dir)
    yield found
    found.process.kill()
    found.process.wait()


def test_a_thousand_who_ask_for_nothing_are_in_nobodys_way(served: Served) -> None:
    assert served.status() == 200
    before = served.descriptors()
    with contextlib.ExitStack() as stack:
        for number in range(CROWD):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), PATIENCE_S))
            with contextlib.suppress(OSError):
                sock.send(KINDS[number % len(KINDS)])
            if number % 200 == 0:
                assert served.status() == 200
        begin = time.monotonic()
        assert served.status() == 200
        assert time.monotonic() - begin < PATIENCE_S / 2
        assert served.descriptors() - before <= MAX_STRANGERS + 8
    assert len(served.log.read_text().splitlines()) <= 8, served.log.read_text()
    assert "too many connections at once ask for nothing" in served.log.read_text()


def test_endless_headers_are_cut_off(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), PATIENCE_S) as sock:
        with pytest.raises(ConnectionError):
            sock.sendall(b"GET / HTTP/1.1\r\n")
            while True:
                sock.sendall(b"x: " + b"y" * MAX_HEADER_BYTES)
    assert served.status() == 200
