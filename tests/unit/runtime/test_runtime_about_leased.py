"""What a host asks a head whose lease is in etcd: that one begins each connection with its term."""

from __future__ import annotations

import socket

import pytest

from everstep.base.config_keys import TlsConfig
from everstep.protocol.messages import AnyMessage, CommandReply, TermBegun, encode
from everstep.runtime.link import head_facts, wire


@pytest.mark.parametrize("first", [[], [TermBegun(term=7)]])
def test_the_answer_is_found_behind_the_term(monkeypatch: pytest.MonkeyPatch, first: list[AnyMessage]) -> None:
    said = {"time_unix_ns": 5, "versions": {"torch": "2"}, "mtu": 1500}
    frames = [encode(one) for one in (*first, CommandReply(request=1, ok=True, error="", result=said))]
    ends = socket.socketpair()
    monkeypatch.setattr(head_facts, "_connected", lambda *about: ends[0])
    monkeypatch.setattr(wire, "handshake_client", lambda *about: None)
    monkeypatch.setattr(wire, "send_frame", lambda *about: None)
    monkeypatch.setattr(wire, "recv_frame", lambda *about: frames.pop(0))
    found = head_facts.ask_about(("10.0.0.1", 1), b"token", TlsConfig(), "10.0.0.2")
    assert (found.mtu, found.versions) == (1500, {"torch": "2"})
    ends[1].close()
