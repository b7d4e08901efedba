"""Packets that are delayed on purpose, between hosts: so long, to that peer, unharmed, and no longer than was said."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from net import Host, Net

from everstep.base.errors import ConfigError
from everstep.protocol.messages import StrikeNow
from everstep.runtime.host.packet_faults import clear, harm, lacking
from everstep.runtime.host.undoing import Harms, Undone
from everstep.runtime.process import command_words

needs_tc = pytest.mark.skipif(shutil.which("tc") is None, reason="links are harmed with tc (iproute2)")
pytestmark = needs_tc
LIMIT_S = 60.0
BY_S = 0.04


@pytest.fixture
def able(net: Net) -> Net:
    """Hosts that can delay packets."""
    with net.hosts[0].inside():
        why = lacking(["delay"])
    if why:
        pytest.skip(why)
    return net


_numbers = itertools.count(1)


def strike(host: Host, kind: str, peer: str, for_s: float = 1000.0) -> Undone:
    """What the host's agent does when it is told to."""
    message = StrikeNow(number=next(_numbers), kind=kind, peer=peer, for_s=for_s, by_s=BY_S, mbit=20.0)
    with host.inside():
        return harm(message, host.address)


@contextlib.contextmanager
def harmed(host: Host, kind: str, peer: str) -> Iterator[Undone]:
    undone = strike(host, kind, peer)
    try:
        yield undone
    finally:
        with host.inside():
            undone.close()


def slowed(host: Host, peer: str) -> contextlib.AbstractContextManager[Undone]:
    return harmed(host, "slow", peer)


def pair(host: Host, other: Host) -> tuple[socket.socket, socket.socket]:
    """A connection between them, and both of its ends."""
    with other.inside():
        server = socket.create_server((other.address, 0))
    with server:
        server.settimeout(LIMIT_S)
        with host.inside():
            near = socket.create_connection(server.getsockname(), timeout=LIMIT_S)
        far, _ = server.accept()
    for end in (near, far):
        end.settimeout(LIMIT_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def round_trip_s(near: socket.socket, far: socket.socket) -> float:
    """The shortest of a few."""
    times = []
    for _ in range(5):
        begin_s = time.monotonic()
        near.sendall(b"?")
        far.sendall(far.recv(1))
        near.recv(1)
        times.append(time.monotonic() - begin_s)
    return min(times)


def until(holds: Callable[[], object]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.01)


def left(host: Host) -> str:
    """What is not as it was."""
    filters = host.run("tc", "filter", "show", "dev", "eth0", "egress").stdout.split()
    interfaces = [line.split()[0] for line in host.run("ip", "-br", "link").stdout.splitlines()]
    strange = [name for name in interfaces if name.startswith("ev")]
    return " ".join([*filters, *strange, *map(str, host.pids())])


def is_quick(near: socket.socket, far: socket.socket) -> bool:
    """Whether nothing delays it: on a busy machine that is seen sooner or later."""
    until(lambda: round_trip_s(near, far) < BY_S)
    return True


def nothing_left(host: Host) -> bool:
    """What has been killed is gone a moment later."""
    until(lambda: not left(host))
    return True


def test_a_delay_is_seen_towards_that_peer_alone_and_is_over_when_it_is_undone(able: Net) -> None:
    one, two, three = able.hosts
    with contextlib.ExitStack() as ends:
        there, elsewhere = pair(one, two), pair(one, three)
        for end in (*there, *elsewhere):
            ends.enter_context(end)
        with slowed(one, two.address):
            assert round_trip_s(*there) >= BY_S and is_quick(*elsewhere)
            back = pair(two, one)
            with back[0], back[1]:
                assert round_trip_s(*back) >= BY_S, "answers, too"
            with slowed(two, one.address):
                assert round_trip_s(*there) >= 2 * BY_S, "each end does its part"
        assert is_quick(*there)
        with slowed(one, ""):
            assert min(round_trip_s(*there), round_trip_s(*elsewhere)) >= BY_S
    assert all(map(nothing_left, able.hosts))


def test_a_stream_passes_unharmed_and_so_it_does_when_the_delay_ends_meanwhile(able: Net) -> None:
    one, two, _ = able.hosts
    data = random.Random(7).randbytes(4 << 20)
    for ends in (False, True):
        near, far = pair(one, two)
        with near, far, slowed(one, two.address) as undone:
            sender = threading.Thread(target=lambda near=near: (near.sendall(data), near.shutdown(socket.SHUT_WR)))
            sender.start()
            found, count = hashlib.sha256(), 0
            while piece := far.recv(1 << 16):
                if ends and count < len(data) // 2 <= count + len(piece):
                    with one.inside():
                        undone.close()
                found.update(piece)
                count += len(piece)
            sender.join(LIMIT_S)
        assert found.digest() == hashlib.sha256(data).digest()


def test_other_harm_is_done_to_what_is_delayed_too(able: Net) -> None:
    """Packets leave in the order in which they came, so the one to the third host says what became of one before."""
    one, two, three = able.hosts
    for other in (two, three):  # whose link addresses are known from now on
        for end in pair(one, other):
            end.close()
    with contextlib.ExitStack() as all_of_it:
        sender, *others = (all_of_it.enter_context(udp(host)) for host in able.hosts)
        to_two, to_three = others
        all_of_it.enter_context(slowed(one, ""))
        with harmed(one, "narrow", two.address):
            sender.sendto(b"through the narrow", to_two.getsockname())
            assert to_two.recv(100) == b"through the narrow"
            shown = one.run("tc", "-s", "class", "show", "dev", "eth0").stdout
            assert "Sent 0 bytes" not in shown and "Sent" in shown
        with harmed(one, "cut", two.address):
            sender.sendto(b"lost", to_two.getsockname())
            sender.sendto(b"not lost", to_three.getsockname())
            assert to_three.recv(100) == b"not lost"
        sender.sendto(b"later", to_two.getsockname())
        assert to_two.recv(100) == b"later"


def udp(host: Host) -> socket.socket:
    with host.inside():
        found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    found.settimeout(LIMIT_S)
    found.bind((host.address, 0))
    return found


AGENT = """
import sys
from everstep.protocol.messages import StrikeNow
from everstep.runtime.host.undoing import Harms
from everstep.runtime.host.packet_faults import harm
harms, (own, peer, by_s) = Harms(), sys.argv[1:]
harms.take("slow", lambda: harm(StrikeNow(number=1, kind="slow", peer=peer, for_s=1000.0, by_s=float(by_s)), own))
print("struck", flush=True)
sys.stdin.read()
"""


def process_of(host: Host, *words: bytes) -> int:
    """The first of the host's processes that was started with all of these words."""
    return next(pid for pid in sorted(host.pids()) if set(words) <= set(command_words(pid)))


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.longer)])
@pytest.mark.parametrize(
    "who", [pytest.param(b"everstep.chaos.packet_delay", marks=pytest.mark.longer), b"everstep-continue -c"]
)
def test_packets_flow_again_when_what_delays_them_or_what_ends_that_is_killed(
    able: Net, who: bytes, how: signal.Signals
) -> None:
    one, two, _ = able.hosts
    harms = Harms()
    harms.take("slow", lambda: strike(one, "slow", two.address))
    near, far = pair(one, two)
    with near, far:
        os.kill(process_of(one, *who.split()), how)
        with one.inside():
            until(lambda: harms.look() == ["slow"])
        assert is_quick(near, far)
    assert nothing_left(one)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.longer)])
def test_or_when_the_agent_is(able: Net, how: signal.Signals) -> None:
    one, two, _ = able.hosts
    command = [sys.executable, "-c", AGENT, one.address, two.address, str(BY_S)]
    with one.inside():
        agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agent.stdout is not None and agent.stdout.readline() == b"struck\n"
    near, far = pair(one, two)
    with near, far:
        assert round_trip_s(near, far) >= BY_S
        agent.send_signal(how)
        agent.communicate()
        assert nothing_left(one) and is_quick(near, far)


@pytest.mark.longer
def test_or_when_an_agent_starts_where_all_of_them_were_killed(able: Net) -> None:
    """The network of a container outlives its processes. What others delay there still goes its way."""
    one, two, three = able.hosts
    near, far = pair(one, two)
    with near, far, slowed(one, three.address) as other:
        undone = strike(one, "slow", two.address)
        os.killpg(undone._shell.pid, signal.SIGKILL)
        os.kill(process_of(one, b"everstep.chaos.packet_delay", b"evs1"), signal.SIGKILL)
        until(lambda: "device *" in left(one))
        with one.inside():
            clear(one.address)
            assert is_quick(near, far) and not other.over()
            assert undone.over()
    assert nothing_left(one)


@pytest.mark.longer
def test_or_when_its_time_is_over(able: Net) -> None:
    one, two, _ = able.hosts
    undone = strike(one, "slow", two.address, for_s=0.2)
    with one.inside():
        until(undone.over)
    assert nothing_left(one)


def test_one_that_cannot_be_done_is_one_line_and_leaves_nothing(able: Net) -> None:
    one, two, _ = able.hosts
    for words in ("tuntap add dev tun0 mode tun", "addr add 10.78.0.1/24 dev tun0", "link set tun0 up"):
        assert one.run("ip", *words.split()).returncode == 0
    message = StrikeNow(number=1, kind="slow", peer=two.address, for_s=1000.0, by_s=BY_S)
    with pytest.raises(ConfigError, match=r"^expected an Ethernet interface, to delay packets there, got tun0$"):
        with one.inside():
            harm(message, "10.78.0.1")
    assert nothing_left(one)
