"""Peer connections: bulk bytes arrive as sent, strangers are refused, and nobody waits for the dead."""

from __future__ import annotations

import contextlib
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from fake_coordinator import both_ends

from everstep.base.errors import CollectiveAborted, ProtocolError
from everstep.runtime.link import wire
from everstep.runtime.link.peer import PeerConnection, PeerServer, peer_connect

TOKEN = b"t" * 32
PAYLOAD = bytes(range(256)) * 4096
MUCH = PAYLOAD * 5 + b"odd"


def _handler(connection: PeerConnection, request: dict[str, Any]) -> None:
    match request["want"]:
        case "bytes":
            view = memoryview(PAYLOAD)
            connection.send_json({"size": len(PAYLOAD)})
            connection.send_bytes([view[:1000], b"", view[1000:]])
        case "much":
            connection.send_bytes([MUCH])
        case "promises":
            wire.send_frame(connection._sock, connection._seals, (1 << 35).to_bytes(8, "big"))
            connection._sock.sendall(PAYLOAD[:1000])
        case "echo":
            connection.send_json(connection.recv_json())
        case "silence":
            connection.recv_json()
        case "raise":
            raise RuntimeError("handler broke")


@pytest.fixture(params=["127.0.0.1", "127.0.0.2"])
def server(request: pytest.FixtureRequest) -> Iterator[PeerServer]:
    """At the second address callers seem to come from another host: every byte is tagged."""
    server = PeerServer(request.param, TOKEN, _handler)
    yield server
    server.close()


def test_bytes_arrive_as_sent(server: PeerServer) -> None:
    with peer_connect(server.address, TOKEN, {"want": "bytes"}) as peer:
        out = bytearray(peer.recv_json()["size"])
        peer.recv_into(memoryview(out))
        assert bytes(out) == PAYLOAD
    with peer_connect(server.address, TOKEN, {"want": "bytes"}) as peer:
        peer.recv_json()
        assert bytes(peer.recv_bytes(1 << 30)) == PAYLOAD
    with peer_connect(server.address, TOKEN, {"want": "bytes"}) as peer:
        peer.recv_json()
        room = bytearray(len(PAYLOAD) + 5)
        filled = peer.recv_at_most(memoryview(room))
        assert filled == PAYLOAD and room == PAYLOAD + bytes(5)


def test_more_than_one_piece_arrives_as_sent(server: PeerServer) -> None:
    with peer_connect(server.address, TOKEN, {"want": "much"}) as peer:
        assert bytes(peer.recv_bytes(1 << 30)) == MUCH


def test_who_only_says_that_much_comes_costs_no_memory(server: PeerServer) -> None:
    with peer_connect(server.address, TOKEN, {"want": "promises"}) as peer:
        tracemalloc.start()
        try:
            with pytest.raises(CollectiveAborted):
                peer.recv_bytes(1 << 36)
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


def test_a_size_that_was_not_asked_for_is_refused(server: PeerServer) -> None:
    with peer_connect(server.address, TOKEN, {"want": "bytes"}) as peer:
        peer.recv_json()
        with pytest.raises(ProtocolError, match=f"expected 10 bytes from a peer, it sends {len(PAYLOAD)}"):
            peer.recv_into(bytearray(10))
    with peer_connect(server.address, TOKEN, {"want": "bytes"}) as peer:
        peer.recv_json()
        with pytest.raises(ProtocolError, match="at most 10 bytes"):
            peer.recv_bytes(10)
    with peer_connect(server.address, TOKEN, {"want": "bytes"}) as peer:
        peer.recv_json()
        with pytest.raises(ProtocolError, match="at most 10 bytes"):
            peer.recv_at_most(memoryview(bytearray(10)))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        return left, listener.accept()[0]


@pytest.mark.parametrize("at", [None, 40, 90, -1])
def test_between_hosts_not_one_byte_can_be_changed(at: int | None) -> None:
    """Somebody on the way changes one, of the bytes or of the tag behind them."""
    ours, way_in = tcp_pair()
    way_out, theirs = tcp_pair()
    there, here = both_ends()
    assert there.bulk_tags
    with PeerConnection(ours, there) as sender, PeerConnection(theirs, here) as receiver, way_in, way_out:
        sender.send_bytes([b"x" * 100])
        sender.close()
        data = bytearray(b"".join(iter(lambda: way_in.recv(4096), b"")))
        if at is None:
            way_out.sendall(data)
            assert receiver.recv_bytes(1000) == b"x" * 100
        else:
            data[at] ^= 1
            way_out.sendall(data)
            with pytest.raises(ProtocolError, match="got others"):
                receiver.recv_bytes(1000)


def test_many_at_once(server: PeerServer) -> None:
    peers = [peer_connect(server.address, TOKEN, {"want": "echo"}) for _ in range(20)]
    for number, peer in enumerate(peers):
        peer.send_json({"number": number})
    assert [peer.recv_json()["number"] for peer in peers] == list(range(20))
    for peer in peers:
        peer.close()


def test_a_wrong_token_is_refused(server: PeerServer) -> None:
    with pytest.raises(ProtocolError, match="token"):
        peer_connect(server.address, b"w" * 32, {"want": "echo"})
    with peer_connect(server.address, TOKEN, {"want": "echo"}) as peer:
        peer.send_json(1)
        assert peer.recv_json() == 1


def test_garbage_does_no_harm(server: PeerServer) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b""):
        with socket.create_connection((server.host, server.port)) as sock:
            sock.settimeout(20)
            with contextlib.suppress(OSError):  # it may have hung up already
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
    with peer_connect(server.address, TOKEN, {"want": "echo"}) as peer:
        peer.send_json("still here")
        assert peer.recv_json() == "still here"


def test_a_broken_handler_ends_only_its_connection(server: PeerServer) -> None:
    with peer_connect(server.address, TOKEN, {"want": "raise"}) as peer, pytest.raises(CollectiveAborted):
        peer.recv_json()
    with peer_connect(server.address, TOKEN, {"want": "bytes"}) as peer:
        assert peer.recv_json() == {"size": len(PAYLOAD)}


def test_abort_frees_whoever_waits(server: PeerServer) -> None:
    peer = peer_connect(server.address, TOKEN, {"want": "silence"})
    timer = threading.Timer(0.05, peer.abort)
    timer.start()
    with pytest.raises(CollectiveAborted):
        peer.recv_json()
    peer.close()


def test_standing_still_times_out(server: PeerServer) -> None:
    with peer_connect(server.address, TOKEN, {"want": "silence"}, timeout_s=0.05) as peer:
        with pytest.raises(CollectiveAborted, match="timed out"):
            peer.recv_json()


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(CollectiveAborted, match="no peer"):
        peer_connect(f"127.0.0.1:{port}", TOKEN, {})


def test_close_ends_the_conversations(server: PeerServer) -> None:
    peer = peer_connect(server.address, TOKEN, {"want": "silence"})
    server.close()
    with pytest.raises(CollectiveAborted):
        peer.recv_json()
    peer.close()
