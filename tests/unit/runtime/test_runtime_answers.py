"""A coordinator that a prepared directory names, and what it answers: one line, and soon."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_coordinator import handshake_server

from everstep.base.errors import ConfigError
from everstep.cli.main import run_command
from everstep.protocol import messages as m
from everstep.protocol.roles import CONTROL_ROLES
from everstep.runtime import commands
from everstep.runtime.answers import check_answer
from everstep.runtime.link import wire
from everstep.runtime.link.handshake import Seals, keys_of

TOKEN = bytes(range(32))
PATIENCE_S = 0.2
Says = Callable[[socket.socket, Seals], None]


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[[Says], Path]:
    """A directory whose coordinator says this once it was asked."""

    def make(says: Says) -> Path:
        listener = socket.create_server(("127.0.0.1", 0))
        (tmp_path / "coordinator.json").write_text(
            json.dumps({"pid": 1, "host": "127.0.0.1", "port": listener.getsockname()[1]})
        )
        (tmp_path / "job.json").write_text(json.dumps({"task": "t", "argv": [], "config": {}}))
        wire.write_token(tmp_path / "token", TOKEN)

        def serve() -> None:
            with listener, listener.accept()[0] as sock:
                seals = handshake_server(sock, keys_of(TOKEN, CONTROL_ROLES))
                wire.recv_frame(sock, seals)
                try:
                    says(sock, seals)
                except OSError:
                    return  # whoever asked has gone

        threading.Thread(target=serve, daemon=True).start()
        return tmp_path

    return make


def endless(sock: socket.socket, seals: Seals) -> None:
    while True:
        wire.send_frame(sock, seals, m.encode(m.Pong(seq=1)))


def a_byte_at_a_time(sock: socket.socket, seals: Seals) -> None:
    sock.sendall((60 << 20).to_bytes(4, "big"))
    while True:
        sock.sendall(b"x")


@pytest.mark.parametrize("says", [endless, a_byte_at_a_time])
def test_who_talks_without_an_answer_is_silent(prepared: Callable[[Says], Path], says: Says) -> None:
    with pytest.raises(commands.NoAnswer):
        commands.ask(prepared(says), "status", timeout_s=PATIENCE_S)


def test_a_server_that_greets_a_byte_at_a_time_is_cut_off() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(PATIENCE_S)
        theirs.sendall(b"E")
        with pytest.raises(TimeoutError):
            wire.handshake_client(ours, TOKEN, "read", "a")
        assert ours.gettimeout() == PATIENCE_S


WORKER = {"worker_id": 0, "incarnation": 0, "pid": 1, "host": "h", "stages": [0], "lanes": [0], "role": "leader"}
WORKER |= {"step": 1, "samples_per_s": 1.0}
STATUS: dict[str, Any] = {"state": "running", "generation": 1, "step": 1, "workers": [WORKER]}


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("status", {}),
        ("status", {**STATUS, "step": 1e308}),
        ("status", {**STATUS, "generation": -1}),
        ("status", {**STATUS, "workers": [{}]}),
        ("status", {**STATUS, "workers": [{**WORKER, "lanes": 3}]}),
        ("status", {**STATUS, "workers": [{**WORKER, "samples_per_s": float("nan")}]}),
        ("hosts", {"hosts": [{}]}),
        ("logs", {"logs": {"worker-0.jsonl": [1]}}),
        ("logs", {"logs": {}, "data": "text"}),
        ("profile", {"workers": [{}]}),
        ("drain", {"left": None}),
    ],
)
def test_an_answer_that_no_coordinator_gives_is_refused(name: str, answer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="something else"):
        check_answer(name, answer)


def test_what_a_coordinator_answers_passes() -> None:
    for name, answer in (("status", STATUS), ("status", {**STATUS, "more": 1}), ("scale", {"workers": 3})):
        check_answer(name, answer)


@pytest.mark.parametrize("told", [True, False])
def test_a_coordinator_that_is_struck_before_it_answers_is_not_asked_again(
    prepared: Callable[[Says], Path], capsys: pytest.CaptureFixture[str], told: bool
) -> None:
    def dies(sock: socket.socket, seals: Seals) -> None:
        struck = {"time_unix_ns": time.time_ns(), "kind": "fault_injected", "worker_id": None}
        (run_dir / "events.jsonl").write_text((json.dumps(struck) + "\n") * told)
        sock.close()

    run_dir = prepared(dies)
    code = run_command(["chaos", "inject", str(run_dir), "kill:target=coordinator"])
    out, err = capsys.readouterr()
    assert (code == 0, "is sent" in out) == (told, told)
    assert told or ("ended before it answered" in err and "try again" not in err)


def test_status_of_a_strange_answer_is_one_line(
    prepared: Callable[[Says], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(sock: socket.socket, seals: Seals) -> None:
        wire.send_frame(sock, seals, m.encode(m.CommandReply(request=1, ok=True, error="", result={})))

    assert run_command(["status", str(prepared(nothing))]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "expected a coordinator's answer to 'status'" in told
