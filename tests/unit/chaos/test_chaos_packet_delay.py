"""Packets that are kept for a while: in order, not before their time, within bounds, until the interface is gone."""

from __future__ import annotations

import socket
import threading
import time
from math import inf

import pytest

from everstep.chaos import packet_delay
from everstep.chaos.packet_delay import PacketQueue, carry

OWN = b"\x02\0\0\0\0\x07"
TO, OTHER = b"\x02\0\0\0\0\x01", b"\x02\0\0\0\0\x02"


def frame(text: bytes, source: bytes = OTHER) -> bytes:
    return TO + source + b"\x08\0" + text


def test_packets_are_held_in_order_until_their_time_has_come() -> None:
    queue = PacketQueue(0.5)
    assert queue.due_in(0.0) is None and queue.due(inf) == []
    for packet, now_s in ((b"a", 1.0), (b"b", 1.0), (b"c", 1.25)):
        assert queue.put(packet, now_s)
    assert queue.due(1.25) == [] and queue.due_in(1.25) == 0.25
    assert queue.due(1.5) == [b"a", b"b"] and queue.due_in(1.5) == 0.25
    assert queue.due_in(9.0) == 0.0 and queue.due(9.0) == [b"c"] and queue.due_in(9.0) is None


def test_what_finds_no_room_is_lost_and_room_comes_back() -> None:
    queue = PacketQueue(1.0, most_bytes=2 * (100 + packet_delay._OVERHEAD_BYTES))
    assert [queue.put(bytes(100), 0.0) for _ in range(3)] == [True, True, False]
    assert not queue.put(b"", 0.0), "small ones cost, too"
    assert len(queue.due(1.0)) == 2 and queue.put(bytes(100), 1.0)


@pytest.mark.parametrize("by_s", [0.0, 0.03])
def test_each_packet_is_sent_once_and_late(by_s: float) -> None:
    theirs, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.setblocking(False)
    there.settimeout(60.0)
    thread = threading.Thread(target=carry, args=(end.fileno(), OWN, link, PacketQueue(by_s)))
    thread.start()
    sent_s = time.monotonic()
    packets = [frame(b"%d" % number) for number in range(200)]  # more than are taken at once
    for packet in (frame(b"of its own", OWN), *packets):
        theirs.send(packet)
    assert there.recv(100) == packets[0] and time.monotonic() - sent_s >= by_s
    assert [there.recv(100) for _ in packets[1:]] == packets[1:]
    theirs.close()
    thread.join(60.0)
    assert not thread.is_alive(), "the interface is gone"


def test_what_is_held_when_the_interface_is_removed_is_sent_at_once() -> None:
    theirs, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.setblocking(False)
    theirs.send(frame(b"x"))
    theirs.close()
    carry(end.fileno(), OWN, link, PacketQueue(1e6))
    assert there.recv(100) == frame(b"x")


def test_a_link_that_takes_nothing_loses_packets_and_holds_nobody_up() -> None:
    theirs, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.setblocking(False)
    there.close()
    for _ in range(3):
        theirs.send(frame(b"x"))
    theirs.close()
    queue = PacketQueue(0.0)
    carry(end.fileno(), OWN, link, queue)
    assert queue.due_in(0.0) is None, "nothing waits for it"
