"""Strangers at every port on which a job listens, as long as it runs: nobody waits for them, and they cost little."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.runtime.link.unproven_connections import MAX_STRANGERS
from job_harness import Job, Jobs, healed
from process_resources import children, resources

CROWD = 200
LISTENS = "0A"
GARBAGE = (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 700)
PATIENCE_S = 30.0
"""Handshakes one after the other, with the silent ones among them, would take minutes."""


def processes(pid: int) -> list[int]:
    """This one and all that it has started."""
    return [pid, *(below for child in children(pid) for below in processes(child))]


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Where these processes listen on this host."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            inodes |= {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [int(row[1].partition(":")[2], 16) for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in inodes]
    return {("127.0.0.1", port) for port in ports}


class Crowd:
    """So many connections at each port of a job, kept up while it runs: silent ones, and some that talk nonsense."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._there: dict[tuple[str, int], list[socket.socket]] = {}
        self._over = threading.Event()
        self.everywhere = threading.Event()
        self.most_descriptors = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(60)
        for socks in self._there.values():
            for sock in socks:
                sock.close()

    @property
    def ports(self) -> int:
        """At how many ports they have been."""
        return len(self._there)

    def _run(self) -> None:
        while not self._over.wait(0.02):
            try:
                pids = processes(self._job.launcher_pid())
            except (OSError, ValueError):
                continue  # one of them has just ended
            for address in listening(pids):
                socks = self._there.setdefault(address, [])
                while len(socks) < CROWD:
                    with contextlib.suppress(OSError):
                        socks.append(socket.create_connection(address, 5.0))
                        socks[-1].send(GARBAGE[len(socks) % len(GARBAGE)])
                        continue
                    break
            for pid in pids:
                with contextlib.suppress(OSError, KeyError):  # it is dead, or nearly so
                    self.most_descriptors = max(self.most_descriptors, resources(pid)["descriptors"])
            self.everywhere.set()


@pytest.fixture
def crowds() -> Iterator[list[Crowd]]:
    made: list[Crowd] = []
    yield made
    for crowd in made:
        crowd.close()


@pytest.mark.longer
@pytest.mark.parametrize("transport", ["auto", pytest.param("sockets", marks=pytest.mark.longer)])
def test_recovery_does_not_wait_for_strangers(jobs: Jobs, crowds: list[Crowd], transport: str) -> None:
    numerics = {"steps": 30}
    job = jobs.start("Text", numerics=numerics, settings={"transport": transport}, pace=[healed(1)])
    job.wait_for("step_committed")
    crowd = Crowd(job)
    crowds.append(crowd)
    assert crowd.everywhere.wait(60)
    os.kill(job.pid_of(1), signal.SIGKILL)
    job.wait_for("worker_healed", worker_id=1)
    jobs.check(job, "Text", numerics)
    assert [(e["worker_id"], e["cause"]) for e in job.of_kind("worker_evicted")] == [(1, "killed")]
    recovered = job.of_kind("recovery_completed")
    assert recovered and all(event["duration_s"] < PATIENCE_S for event in recovered)
    assert crowd.ports >= 5, "the coordinator, three workers, and the life that came later"
    assert crowd.most_descriptors < 2 * MAX_STRANGERS + 100
    refused = [e for e in job.of_kind("warning") if e["cause"] == "refused"]
    assert 1 <= len(refused) < 20, "a few lines, not one for each"
