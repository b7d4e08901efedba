"""How a worker that an agent started is connected to its job, with a client that the test plays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.base.config import load_config
from everstep.observe.logs import WorkerLog
from everstep.protocol import messages as wire
from everstep.runtime.host.board import Board
from everstep.runtime.link.context import WorkerContext
from everstep.train import worker_link
from everstep.train.worker_link import LaunchedLink

PLAYED: list[Played] = []


class Played:
    """Stands for a `ControlClient`: hears what is sent, and calls back when the test says so."""

    def __init__(self, place: str, token: bytes, role: str, name: str, **given: Any) -> None:
        self.said, self.given = (place, token, role, name), given
        self.sent: list[Any] = []
        self.done: list[Any] = []
        PLAYED.append(self)

    def send(self, message: wire.AnyMessage) -> None:
        self.sent.append(message)
        if isinstance(message, wire.ClaimFault):  # what was asked before may be answered late
            for request in (message.request - 1, message.request):
                answer = wire.FaultClaimed(request=request, first=request == 2, text=f"the {request}th")
                self.given["on_message"](answer)

    def cut(self, for_s: float, breaks: bool) -> None:
        self.done.append((for_s, breaks))

    def flush(self, within_s: float) -> None:
        self.done.append("flushed")

    def wait_connected(self, within_s: float) -> None:
        self.done.append(self.given["hello"]())

    def close(self) -> None:
        self.done.append("closed")


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchedLink]:
    PLAYED.clear()
    monkeypatch.setattr(worker_link, "ControlClient", Played)
    monkeypatch.setattr(worker_link, "keep_to", lambda run_dir: None)
    monkeypatch.setattr(worker_link, "set_up_worker_log", lambda fd, worker_id, life: WorkerLog(worker_id, life))
    board = Board.create(4)
    where = (str(tmp_path), 3, 2, "h", "ab", "coordinator.json", board.fd, {}, "train.py")
    yield LaunchedLink(WorkerContext(*where, peer_token="cd", apart=True), load_config([]), lambda *at: None)
    board.close()


def connected(link: LaunchedLink, heard: list[Any]) -> Played:
    link.connect(lambda: (wire.Ping(seq=1), None), heard.append, lambda: heard.append("connected"))
    return PLAYED[-1]


def test_it_says_who_it_is_and_goes_on_after_each_connection_alone(link: LaunchedLink) -> None:
    heard: list[Any] = []
    client = connected(link, heard)
    assert client.said == ("coordinator.json", b"\xab", "worker", "3.2") and link.token == b"\xcd"
    assert client.given["hello"]() == (wire.Ping(seq=1), None)
    for there, times in ((True, 1), (False, 1), (True, 2)):
        client.given["on_connected"](there)
        assert heard == ["connected"] * times


def test_messages_are_delivered_and_answers_to_claims_go_to_who_asked(link: LaunchedLink) -> None:
    heard: list[Any] = []
    client = connected(link, heard)
    client.given["on_message"](wire.Pong(seq=7))
    assert heard == [wire.Pong(seq=7)]
    assert [link.claim("0", "kill"), link.claim("1", "stop")] == [(False, "the 1th"), (True, "the 2th")]
    assert heard == [wire.Pong(seq=7)], "they are for nobody else"
    claims = [(c.worker_id, c.incarnation, c.request, c.name, c.text) for c in client.sent]
    assert claims == [(3, 2, 1, "0", "kill"), (3, 2, 2, "1", "stop")]


def test_what_is_told_before_there_is_a_connection_is_told_to_nobody(link: LaunchedLink) -> None:
    link.tell(wire.Pong(seq=1))
    assert not connected(link, []).sent


def test_the_last_thing_is_said_over_its_connection_or_else_as_the_only_one(link: LaunchedLink) -> None:
    link.announce(lambda: wire.Pong(seq=1))
    (alone,) = PLAYED
    assert alone.done == [wire.Pong(seq=1), "closed"] and alone.said == ("coordinator.json", b"\xab", "worker", "3.2")
    client = connected(link, [])
    link.announce(lambda: wire.Pong(seq=2))
    assert (client.sent, client.done) == ([wire.Pong(seq=2)], ["flushed"]) and len(PLAYED) == 2
    link.close()
    assert client.done[-1] == "closed"


@pytest.mark.parametrize("breaks", [False, True])
def test_a_link_that_falls_silent_hides_the_row_and_one_that_breaks_does_not(link: LaunchedLink, breaks: bool) -> None:
    client = connected(link, [])
    link.cut_off(60.0, breaks, peers=True)  # it has none
    assert client.done == [(60.0, breaks)]
    now_ns = time.monotonic_ns()
    assert [link.row.hidden(at_ns) for at_ns in (now_ns, now_ns + 61 * 10**9)] == [not breaks, False]
