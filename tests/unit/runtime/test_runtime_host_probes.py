"""Whether other hosts answer: a listener and a closed port do, an address of nobody does not."""

from __future__ import annotations

import queue
import socket

import pytest

from everstep.protocol.messages import ProbeHosts
from everstep.runtime.host import host_probes


def test_hosts_that_answer_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is an answer, too; what is no address answers nothing."""
    real = socket.create_connection

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[0] == "10.255.255.1":
            raise TimeoutError
        return real(address, timeout)

    monkeypatch.setattr(host_probes.socket, "create_connection", connect)
    told: queue.Queue[tuple[int, list[str]]] = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        names = {name: f"127.0.0.1:{sock.getsockname()[1]}" for name, sock in (("a", there), ("b", closed))}
        asked = ProbeHosts(number=7, addresses={**names, "c": "10.255.255.1:5", "d": "nowhere"})
        host_probes.probe_hosts(asked, lambda number, silent: told.put((number, silent)))
        assert told.get(timeout=60) == (7, ["c", "d"])
