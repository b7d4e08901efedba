"""The control client: reconnects for ever, says hello first, loses nothing that matters, never blocks its caller."""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_coordinator import handshake_server

from everstep.base.errors import EverstepError
from everstep.protocol.messages import (
    AgentHello,
    AnyMessage,
    Heartbeat,
    JobEnded,
    Pong,
    SlotLost,
    TermBegun,
    decode,
    encode,
)
from everstep.protocol.roles import CONTROL_ROLES
from everstep.runtime.link.control_client import FIRST_BACKOFF_S, ControlClient, Unheard
from everstep.runtime.link.handshake import Seals, keys_of, role_token
from everstep.runtime.link.wire import recv_frame, send_frame

TOKEN = b"t" * 32
KEY = role_token(TOKEN, "agent")


def _hello() -> AnyMessage:
    return AgentHello(agent_id="a", host="h", workers=[], slots=1)


def _important(number: int) -> SlotLost:
    return SlotLost(agent_id="a", worker_id=number, reason="")


def _passing(seq: int) -> Heartbeat:
    return Heartbeat(agent_id="a", seq=seq, rtt_ms=0.0, workers=[])


class Line(NamedTuple):
    """The server's end of one connection."""

    sock: socket.socket
    seals: Seals

    def close(self) -> None:
        self.sock.close()

    def recv(self, size: int) -> bytes:
        return self.sock.recv(size)


class Server:
    """A stand-in for the coordinator: accepts one connection at a time, on a port it can give up and take again."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # of what it accepts: fills soon
        self.port: int = self.listener.getsockname()[1]

    def accept(self) -> Line:
        self.listener.settimeout(30)
        sock, _ = self.listener.accept()
        seals = handshake_server(sock, keys_of(TOKEN, CONTROL_ROLES))
        sock.settimeout(30)
        return Line(sock, seals)

    def write_address(self, path: Path) -> None:
        path.write_text(
            json.dumps({"pid": 1, "host": "127.0.0.1", "port": self.port, "started_unix_ns": time.time_ns()})
        )


@pytest.fixture
def clients() -> object:
    made: list[ControlClient] = []
    yield made.append
    for client in made:
        client.close(flush_s=0)


def _read(line: Line) -> AnyMessage:
    return decode(recv_frame(line.sock, line.seals))


def test_hello_comes_first_and_messages_go_both_ways(clients: Callable[[ControlClient], None]) -> None:
    server = Server()
    arrived: queue.Queue[AnyMessage] = queue.Queue()
    client = ControlClient(("127.0.0.1", server.port), KEY, "agent", "a", _hello, arrived.put)
    clients(client)
    client.send(_important(1))
    sock = server.accept()
    assert isinstance(_read(sock), AgentHello)
    assert _read(sock) == _important(1)
    assert client.wait_connected(30)
    client.send(_important(2))
    assert _read(sock) == _important(2)
    send_frame(*sock, encode(Pong(seq=5)))
    assert arrived.get(timeout=30) == Pong(seq=5)


@pytest.mark.parametrize("ended", [False, True])
def test_after_the_end_of_the_job_nobody_misses_the_connection(
    clients: Callable[[ControlClient], None], caplog: pytest.LogCaptureFixture, ended: bool
) -> None:
    server = Server()
    arrived: queue.Queue[AnyMessage] = queue.Queue()
    lost = threading.Event()
    client = ControlClient(
        ("127.0.0.1", server.port), KEY, "agent", "a", _hello, arrived.put, lambda on: None if on else lost.set()
    )
    clients(client)
    with caplog.at_level(logging.INFO, "everstep.runtime.link.control_client"):
        sock = server.accept()
        if ended:
            send_frame(*sock, encode(JobEnded(state="completed", reason="done", exit_code=0)))
            arrived.get(timeout=30)
        sock.sock.close()
        assert lost.wait(30)
    assert ("control connection lost" in caplog.text) != ended


def test_what_matters_survives_an_absence_and_what_passes_does_not(
    tmp_path: Path, clients: Callable[[ControlClient], None]
) -> None:
    server = Server()
    file = tmp_path / "coordinator.json"
    server.write_address(file)
    states: queue.Queue[bool] = queue.Queue()
    client = ControlClient(file, KEY, "agent", "a", _hello, lambda m: None, states.put)
    clients(client)
    sock = server.accept()
    assert isinstance(_read(sock), AgentHello)
    assert states.get(timeout=30) is True
    server.listener.close()
    sock.close()
    assert states.get(timeout=30) is False
    assert not client.connected
    for number in range(50):
        client.send(_important(number))
        client.send(_passing(number))
    other = Server()  # on another port: the address file is read anew
    other.write_address(file)
    sock = other.accept()
    assert isinstance(_read(sock), AgentHello)
    assert [_read(sock) for _ in range(50)] == [_important(n) for n in range(50)]
    client.send(_important(99))
    assert _read(sock) == _important(99)
    assert client.connects == 2


def test_a_reader_that_stands_still_does_not_block_the_sender(clients: Callable[[ControlClient], None]) -> None:
    server = Server()
    client = ControlClient(("127.0.0.1", server.port), KEY, "agent", "a", _hello, lambda m: None)
    clients(client)
    sock = server.accept()
    assert client.wait_connected(30)
    big = SlotLost(agent_id="a", worker_id=0, reason=os.urandom(50_000).hex())
    for _ in range(160):  # 8 MB and more; of what is sent, the kernel buffers 4 MB
        client.send(big)
    client.send(_important(7))
    assert not client.flush(0.0)
    assert isinstance(_read(sock), AgentHello)
    assert [_read(sock) for _ in range(161)] == [big] * 160 + [_important(7)]
    assert client.flush(30)


def test_the_queue_is_bounded_by_dropping_what_passes(
    clients: Callable[[ControlClient], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.runtime.link.control_client.MAX_QUEUED", 10)
    server = Server()
    client = ControlClient(("127.0.0.1", server.port), KEY, "agent", "a", _hello, lambda m: None)
    clients(client)
    sock = server.accept()
    assert client.wait_connected(30)
    client.send(SlotLost(agent_id="a", worker_id=0, reason=os.urandom(8 << 20).hex()))
    for seq in range(30):
        client.send(_passing(seq))
    client.send(_important(1))
    assert isinstance(_read(sock), AgentHello)
    _read(sock)
    rest = [_read(sock) for _ in range(9)]
    assert rest[-1] == _important(1)
    assert rest[-2] == _passing(29)


def test_a_coordinator_of_an_older_term_is_asked_more_and_more_rarely(
    clients: Callable[[ControlClient], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, and may be so for days; the newest one is asked at once when it is back."""
    server, pauses = Server(), queue.Queue[float]()
    monkeypatch.setattr(ControlClient, "_pause", lambda client, seconds: pauses.put(seconds))
    clients(ControlClient(("127.0.0.1", server.port), KEY, "agent", "a", _hello, lambda message: None))
    for term, pause in ((2, 1), (1, 2), (1, 4), (0, 8), (2, 1), (1, 2)):
        sock = server.accept()
        _read(sock)
        send_frame(*sock, encode(TermBegun(term=term)))
        if term == 2:
            sock.close()
        assert pauses.get(timeout=30) == pytest.approx(pause * FIRST_BACKOFF_S)


def test_a_failing_callback_does_not_end_the_connection(clients: Callable[[ControlClient], None]) -> None:
    server = Server()
    arrived: queue.Queue[AnyMessage] = queue.Queue()

    def on_message(message: AnyMessage) -> None:
        if message == Pong(seq=0):
            raise RuntimeError("broken callback")
        arrived.put(message)

    client = ControlClient(("127.0.0.1", server.port), KEY, "agent", "a", _hello, on_message)
    clients(client)
    sock = server.accept()
    send_frame(*sock, encode(Pong(seq=0)))
    send_frame(*sock, encode(Pong(seq=1)))
    assert arrived.get(timeout=30) == Pong(seq=1)


def test_what_came_before_a_send_failed_is_heard(clients: Callable[[ControlClient], None]) -> None:
    """A coordinator that sends somebody away closes the connection at once, whatever that one still says."""
    server = Server()
    arrived: queue.Queue[AnyMessage] = queue.Queue()
    goes_on = threading.Event()

    def on_message(message: AnyMessage) -> None:
        arrived.put(message)
        goes_on.wait(30)

    client = ControlClient(("127.0.0.1", server.port), KEY, "agent", "a", _hello, on_message)
    clients(client)
    line = server.accept()
    line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    send_frame(*line, encode(Pong(seq=0)))
    assert arrived.get(timeout=30) == Pong(seq=0)
    send_frame(*line, encode(Pong(seq=1)))
    line.close()  # with the hello unread: the connection is reset
    client.send(_important(1))
    client.send(_important(2))
    goes_on.set()
    assert arrived.get(timeout=30) == Pong(seq=1)


def test_a_wrong_token_never_connects(clients: Callable[[ControlClient], None]) -> None:
    server = Server()
    client = ControlClient(("127.0.0.1", server.port), b"w" * 32, "agent", "a", _hello, lambda m: None)
    clients(client)
    for _ in range(2):  # it keeps trying, and is refused each time
        with pytest.raises(EverstepError, match="token"):
            server.accept()
    assert not client.connected


def test_close_lets_the_last_words_out_and_ends_the_thread() -> None:
    server = Server()
    client = ControlClient(("127.0.0.1", server.port), KEY, "agent", "a", _hello, lambda m: None)
    sock = server.accept()
    assert client.wait_connected(30)
    client.send(_important(3))
    client.close()
    assert isinstance(_read(sock), AgentHello)
    assert _read(sock) == _important(3)
    assert sock.recv(1) == b""
    assert not any(t.name.startswith("control-agent") and t is client._thread for t in threading.enumerate())
    client.send(_important(4))  # no error after close


def test_a_mute_connection_goes_on_where_it_was(clients: Callable[[ControlClient], None]) -> None:
    server = Server()
    arrived: queue.Queue[tuple[AnyMessage, float]] = queue.Queue()
    client = ControlClient(
        ("127.0.0.1", server.port), KEY, "agent", "a", _hello, lambda x: arrived.put((x, time.monotonic()))
    )
    clients(client)
    sock = server.accept()
    assert isinstance(_read(sock), AgentHello)
    assert client.wait_connected(30)
    begin = time.monotonic()
    client.cut(0.3, breaks=False)
    client.send(_important(1))
    send_frame(*sock, encode(Pong(seq=7)))
    assert _read(sock) == _important(1)
    assert time.monotonic() - begin >= 0.3
    message, came = arrived.get(timeout=30)
    assert message == Pong(seq=7) and came - begin >= 0.3
    assert client.connects == 1


def test_a_broken_connection_is_made_again_only_after_the_cut(clients: Callable[[ControlClient], None]) -> None:
    server = Server()
    client = ControlClient(("127.0.0.1", server.port), KEY, "agent", "a", _hello, lambda m: None)
    clients(client)
    sock = server.accept()
    assert isinstance(_read(sock), AgentHello)
    begin = time.monotonic()
    client.cut(0.3, breaks=True)
    client.send(_important(1))
    assert sock.recv(1) == b""
    again = server.accept()
    assert time.monotonic() - begin >= 0.3
    assert isinstance(_read(again), AgentHello)
    assert _read(again) == _important(1)
    assert client.wait_connected(30)
    assert client.connects == 2


def test_closing_when_the_thread_has_just_ended_its_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread hears of the end before it is woken: nobody may then write into a pipe that nobody reads."""
    wake = ControlClient._wake

    def late_wake(self: ControlClient) -> None:
        self._thread.join(30)
        wake(self)

    server = Server()
    client = ControlClient(("127.0.0.1", server.port), KEY, "agent", "a", _hello, lambda m: None)
    sock = server.accept()
    assert isinstance(_read(sock), AgentHello)
    assert client.wait_connected(30)
    monkeypatch.setattr(ControlClient, "_wake", late_wake)
    client.close(flush_s=0)
    assert not client._thread.is_alive()


def test_whoever_waits_for_a_coordinator_says_so_every_ten_seconds() -> None:
    unheard = Unheard()
    said = [words for tenth in range(310) if (words := unheard.look(tenth < 5, tenth / 10))]
    assert [words.split(":")[0] for words in said] == [f"no coordinator has answered for {s} s" for s in (10, 20, 30)]
    assert not unheard.look(True, 32)
    assert not unheard.look(False, 41)
