"""Hosts that have IPv6 addresses alone: a job, and faults of the packets to one of them."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts_harness import EVERSTEP, PORT, HostJobs
from net import Host, Net

from everstep.protocol.messages import StrikeNow
from everstep.runtime.host.packet_faults import harm, lacking
from job_harness import Jobs

PACKETS, BYTES, BY_S = 20, 1000, 0.1


@pytest.fixture
def of_six(hosts_possible: None, jobs: Jobs, tmp_path: Path) -> Iterator[HostJobs]:
    """Starts jobs on two such hosts."""
    net = Net(2, six=True)
    yield HostJobs(net, jobs, tmp_path)
    net.close()


@pytest.mark.longer
def test_hosts_without_ipv4_train_and_one_is_lost(of_six: HostJobs) -> None:
    """Over TLS, as between any hosts; the second host is killed, and comes again."""
    together = {"kind": "generation_started", "workers": [0, 1, 2, 3]}
    job = of_six.head(workers=4, until=[{**together, "count": 2}])
    of_six.agent(2)
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    job.wait_for("step_committed", lambda e: e["step"] >= 3)
    head, other = of_six.net.hosts
    reached = head.run(*EVERSTEP, "ports", "--check", f"[{head.address}]:{PORT}")
    assert (reached.returncode, reached.stdout.strip()) == (0, f"[{head.address}]:{PORT}  answers"), reached.stderr
    assert head.address in head.run(*EVERSTEP, "hosts", str(job.run_dir)).stdout
    other.kill()
    job.wait_for("worker_evicted")
    of_six.agent(2)
    of_six.check(job)
    assert {e["host"] for e in job.of_kind("worker_joined")} == {head.address, other.name}


def bound(host: Host) -> socket.socket:
    with host.inside():
        found = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    found.bind((host.address, 0))
    found.settimeout(1.0)
    return found


def arrived(sender: socket.socket, receiver: socket.socket) -> tuple[int, float]:
    """How many of the packets come, and after how long the last one does, in seconds."""
    count, begin_s = 0, time.monotonic()
    last_s = begin_s
    for _ in range(PACKETS):
        sender.sendto(b"x" * BYTES, receiver.getsockname()[:2])
    with contextlib.suppress(TimeoutError):
        while count < PACKETS:
            receiver.recv(2 * BYTES)
            count, last_s = count + 1, time.monotonic()
    return count, last_s - begin_s


def meet(one: socket.socket, other: socket.socket) -> None:
    """Each finds out where the other is: the kernel asks once a second, and drops packets until it is answered."""
    end_s = time.monotonic() + 60.0
    for sender, receiver in ((one, other), (other, one)):
        while arrived(sender, receiver)[0] < PACKETS:
            assert time.monotonic() < end_s, "they never met"


@pytest.mark.skipif(shutil.which("tc") is None, reason="links are harmed with tc (iproute2)")
@pytest.mark.parametrize(
    ("kind", "numbers", "there", "back", "least_s"),
    [
        ("cut", {}, 0, 0, 0.0),
        ("oneway", {}, 0, PACKETS, 0.0),
        ("slow", {"by_s": BY_S}, PACKETS, PACKETS, BY_S),
        ("narrow", {"mbit": 0.1}, PACKETS, PACKETS, 1.0),
    ],
)
def test_faults_of_packets_to_one_peer(
    hosts_possible: None, kind: str, numbers: dict[str, Any], there: int, back: int, least_s: float
) -> None:
    net = Net(3, six=True)
    try:
        near, far, _ = net.hosts
        a, b, c = map(bound, net.hosts)
        meet(a, b)
        meet(a, c)
        with near.inside():
            if why := lacking(["drop", "delay", "rate"]):
                pytest.skip(why)
            undone = harm(StrikeNow(number=1, kind=kind, peer=far.address, for_s=1000.0, **numbers), near.address)
        count, took_s = arrived(a, b)
        assert count == there and took_s >= least_s
        assert arrived(b, a)[0] == back and arrived(a, c)[0] == PACKETS
        with near.inside():
            undone.close()
        assert arrived(a, b)[0] == PACKETS
    finally:
        net.close()
