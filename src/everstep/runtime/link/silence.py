"""Time after which a connection counts as broken because the other host is silent: no end, no reset, no packet.

Only the kernel can tell a peer that computes from one that is cut off: it answers for a process that is busy, or
stopped.
"""

from __future__ import annotations

import math
import socket

CONTROL_SILENT_S = 20.0
LINK_SILENT_S = 3.0
"""Limit between members. No step goes on meanwhile; a lost packet has been sent again several times by then."""

_PROBES = 3


def notice_silence(sock: socket.socket, silent_s: float) -> None:
    """From now on this TCP connection ends with ETIMEDOUT when the other host has answered nothing for so long, with or
    without data under way, or when the peer has taken none of the data under way for so long. Small messages are sent
    at once. Call before connecting, so that a failing connect ends as early."""
    every_s = max(1, int(silent_s / (2 * _PROBES)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silent_s) - _PROBES * every_s))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * 1000))
    # The kernel waits 1, 2, 4, ... seconds for the first answer.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, max(1, int(math.log2(silent_s + 1)) - 1))
