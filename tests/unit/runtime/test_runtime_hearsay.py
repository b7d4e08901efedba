"""A host that neither the old head nor etcd answers hears of the next head from other hosts' agents."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_coordinator import PATIENCE_S, FakeCoordinator

from everstep.base.config import Config, load_config, to_dict
from everstep.base.errors import CollectiveAborted, ConfigError, ProtocolError
from everstep.protocol import messages as m
from everstep.runtime.files.agent_files import AgentFiles, PeerWire
from everstep.runtime.host.agent_link import AgentLink, Pulses, Secrets
from everstep.runtime.host.board import Board
from everstep.runtime.host.hearsay import Hearsay
from everstep.runtime.link import listening
from everstep.runtime.link.address import address_of, announce, read_address
from everstep.runtime.link.context import Joining
from everstep.runtime.link.control_client import ControlClient
from everstep.runtime.link.handshake import PEER, role_token
from everstep.runtime.link.peer import PeerServer, peer_connect
from everstep.runtime.link.word_of_head import MOST_BYTES, QUESTION, HeadReached, answer_with, place_told

TOKEN = b"0123456789abcdef"
KEY = role_token(TOKEN, PEER)
LOCAL = "127.0.0.1"


class OneHost:
    """An agent's link and files, on a host with a directory of its own; its head is played by the test."""

    def __init__(self, folder: Path, ports: str | None = None) -> None:
        self.first, self.path = FakeCoordinator(TOKEN), folder / "coordinator.json"
        announce(self.path, address_of(LOCAL, self.first.port, "auto", "its CA"))
        facts = m.JobFacts(
            task="t",
            argv=[],
            config=to_dict(Config()),
            run_dir="/none",
            coordinator_file="",
            job_pid=0,
            machine="",
            place="w",
        )
        serves = "everstep.checkpoint.host_files:HostFiles"
        joining = Joining(
            str(self.path), "module:entry", [], "here", run_dir=str(folder / "own"), own=LOCAL, files=serves
        )
        self.link = AgentLink(
            joining, Secrets(TOKEN, None), Pulses(Board.create(1)), list, lambda: 1, lambda message: None
        )
        self._closing: list[Callable[[], object]] = [self.link.close, self.first.close]
        self.first.hear(m.AgentHello)
        config = load_config([("test", {} if ports is None else {"network.ports": ports, "workers": 2})])
        self.files = AgentFiles(facts, joining, config, PeerWire(LOCAL, KEY, None), self.link.client)

    def of(self, *agents: str, shared: Path | None = None) -> Hearsay:
        """Its hearsay, from these agents."""
        places = {f"host {n}": self.place(f"host {n}", address) for n, address in enumerate(agents)}
        self.files.hear(m.HostsThere(places={"here": self.place("here", "127.0.0.1:1"), **places}))
        found = Hearsay(self.path, self.link, self.files, Secrets(TOKEN, None), shared)
        self._closing.insert(0, found.close)
        return found

    def place(self, name: str, address: str) -> m.HostPlace:
        return m.HostPlace(agent_id=name, apart=True, disk=f"host {name}", address=address, domains={})

    def agent(self, said: Any) -> str:
        """Another host's agent, which answers so; returns its address."""
        server = PeerServer(LOCAL, KEY, lambda connection, request: connection.send_json(said))
        self._closing.append(server.close)
        return server.address

    def close(self) -> None:
        for act in self._closing:
            act()
        self.files.close(done=True)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[OneHost]:
    one = OneHost(tmp_path)
    yield one
    one.close()


@pytest.fixture
def head() -> Iterator[FakeCoordinator]:
    """The next head."""
    one = FakeCoordinator(TOKEN)
    yield one
    one.close()


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_the_next_head_is_heard_of_from_an_agent_that_is_connected_to_it(host: OneHost, head: FakeCoordinator) -> None:
    host.of("127.0.0.1:1", host.agent([]), host.agent([LOCAL, head.port, 3]))
    host.first.close()
    host.first.hang_up()
    assert head.hear(m.AgentHello).agent_id == "here"
    found = read_address(host.path)
    assert (found.host, found.port, found.tls, found.ca) == (LOCAL, head.port, "auto", "its CA")


def test_the_next_head_is_found_in_the_shared_directory(host: OneHost, head: FakeCoordinator, tmp_path: Path) -> None:
    announce(tmp_path / "shared.json", address_of(LOCAL, head.port))
    host.of(shared=tmp_path / "shared.json")
    host.first.close()
    host.first.hang_up()
    assert head.hear(m.AgentHello).agent_id == "here"


def test_a_head_that_is_silent_is_left_for_the_next_one(host: OneHost, head: FakeCoordinator) -> None:
    """The kernel of a lost host says nothing, so the connection to it still stands."""
    host.of(host.agent([LOCAL, head.port, 0]))
    assert head.hear(m.AgentHello).agent_id == "here"


def test_an_attempt_at_a_lost_host_ends_when_another_address_is_known(
    tmp_path: Path, head: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel does not refuse: here, because a listener's backlog is full."""
    monkeypatch.setattr("everstep.runtime.link.control_client.HANDSHAKE_TIMEOUT_S", 10 * PATIENCE_S)
    path = tmp_path / "coordinator.json"
    with socket.socket() as deaf, socket.socket() as before, contextlib.ExitStack() as held:
        deaf.bind((LOCAL, 0))
        deaf.listen(0)
        before.connect(deaf.getsockname())
        announce(path, address_of(LOCAL, deaf.getsockname()[1]))
        hello = m.AgentHello(agent_id="a", host="h", workers=[], slots=1)
        client = ControlClient(path, role_token(TOKEN, "agent"), "agent", "a", lambda: hello, lambda message: None)
        held.callback(client.close, 0.0)
        until(lambda: client.tried == f"{LOCAL}:{deaf.getsockname()[1]}")
        announce(path, address_of(LOCAL, head.port))
        assert head.hear(m.AgentHello).agent_id == "a"


def test_a_head_that_answers_heartbeats_is_not_missed(host: OneHost) -> None:
    before_s = host.link.client.heard_s
    host.link.beat(time.monotonic())
    until(lambda: host.link.client.heard_s > before_s)
    assert not host.link.misses_head()


@pytest.mark.parametrize("told", ["a stranger", "an older term", "nonsense"])
def test_an_address_that_proves_nothing_is_not_written(host: OneHost, head: FakeCoordinator, told: str) -> None:
    other = FakeCoordinator(b"another token...")
    host.first.say(m.TermBegun(term=4))
    until(lambda: host.link.client.term == 4)
    wrong = {
        "a stranger": [LOCAL, other.port, 9],
        "an older term": [LOCAL, head.port, 3],
        "nonsense": {"host": LOCAL, "port": head.port, "run": "rm"},
    }
    before = host.path.read_bytes()
    found = host.of(host.agent(wrong[told]))
    try:
        assert found._look() is None
    except ProtocolError as error:
        assert told == "a stranger", error
    assert host.path.read_bytes() == before
    other.close()


def test_an_agent_names_the_head_that_it_is_connected_to(host: OneHost) -> None:
    host.first.say(m.TermBegun(term=7))
    until(lambda: host.link.client.term == 7)
    host.of()
    address = ""
    while not address:
        address = host.first.hear(m.HostPlace).address
    with peer_connect(address, KEY, QUESTION) as agent:
        assert agent.recv_json(MOST_BYTES) == [LOCAL, host.first.port, 7]
    host.first.close()
    host.first.hang_up()
    until(lambda: not host.link.client.connected)
    with peer_connect(address, KEY, QUESTION) as agent:
        assert agent.recv_json(MOST_BYTES) == []
    with pytest.raises(ProtocolError), peer_connect(address, role_token(TOKEN, "read"), QUESTION) as agent:
        agent.recv_json()


def test_it_answers_at_a_port_that_a_firewall_lets_through(tmp_path: Path) -> None:
    try:
        with contextlib.closing(OneHost(tmp_path, "29700-29799")) as one:
            one.of()
            address = ""
            while not address:
                address = one.first.hear(m.HostPlace).address
            assert 29700 <= int(address.rpartition(":")[2]) <= 29799
    finally:
        listening.keep_within(None)


def test_a_range_without_a_port_for_the_agent_is_refused(tmp_path: Path) -> None:
    words = r"at least 5 ports for 2 workers on a host \(2 for each, 1 for its agent\), got 4 \(29700-29703\)"
    try:
        with pytest.raises(ConfigError, match=words):
            OneHost(tmp_path, "29700-29703")
    finally:
        listening.keep_within(None)


def test_answers_that_count() -> None:
    said = answer_with(HeadReached("10.0.0.2", 29400, 5))
    assert [place_told(said, least) for least in (0, 5, 6)] == [("10.0.0.2", 29400)] * 2 + [None]
    assert place_told(["fd00::2", 29400, 5], 5) == ("fd00::2", 29400)
    assert place_told(answer_with(None), 0) is None


@pytest.mark.parametrize(
    "said",
    [
        *(None, 7, "x", {}, ["10.0.0.2", 1], ["10.0.0.2", 1, 2, 3], ["10.0.0.2", "1", 2], ["10.0.0.2", 0, 2]),
        *(["10.0.0.2", 65536, 2], ["10.0.0.2", 1, -1], ["10.0.0.2", 1, 1 << 63], ["example.org", 1, 2], ["", 1, 2]),
        *(["10.0.0.2", True, 2], ["10.0.0.2", 1, 2.5], [["10.0.0.2"], 1, 2], ["fe80::1%lo", 1, 2], ["9" * 99, 1, 2]),
    ],
)
def test_anything_else_is_no_answer(said: Any) -> None:
    with pytest.raises(ProtocolError, match="a head's address and term"):
        place_told(said, 0)


def test_a_long_answer_is_not_read(host: OneHost) -> None:
    with pytest.raises((ProtocolError, CollectiveAborted)):
        host.files.ask_for_head(host.agent(["10.0.0.2" + " " * 600, 1, 2]))
