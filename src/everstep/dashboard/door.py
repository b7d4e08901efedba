"""The servers' door: connections that ask for nothing are limited in number and time, and do not fill the log.

Apart because uvicorn counts and times only connections that have asked for something: as many silent ones as it allows
would keep all others out for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from everstep.runtime.link.unproven_connections import Complaints, Strangers

MAX_STRANGERS = 128
MAX_CONNECTIONS = 512
PATIENCE_S = 10.0
MAX_HEADER_BYTES = 16 << 10
_STALLED_MS = 20_000
_LATE_S = 0.5


class Doorkeeper(logging.Filter):
    """Makes the protocol of each connection, and knows the connections that have not asked for anything yet, or not
    again.

    As a filter of uvicorn's log it lets repeated warnings pass ever more seldom.
    """

    def __init__(self) -> None:
        super().__init__()
        self._strangers: Strangers[Visitor] = Strangers(MAX_STRANGERS, PATIENCE_S)
        self._complaints = Complaints(lambda text: print(text, file=sys.stderr, flush=True))
        self._late: asyncio.TimerHandle | None = None
        self._there = 0

    def __call__(self, **given: Any) -> Visitor:
        return Visitor(self, **given)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the line."""
        if record.levelno != logging.WARNING:
            return True
        self._complaints.refused("somebody", record.getMessage(), time.monotonic())
        return False

    def arrive(self, visitor: Visitor) -> None:
        self._there += 1
        self.wait(visitor)
        if self._there > MAX_CONNECTIONS:
            self._turn_away(visitor, "too many connections at once")

    def wait(self, visitor: Visitor) -> None:
        """Note that the connection waits, and has asked for nothing."""
        out = self._strangers.arrive(visitor, visitor.host, time.monotonic())
        if out is not None:
            self._turn_away(out, "too many connections at once ask for nothing")
        if self._late is None:
            self._late = asyncio.get_running_loop().call_later(_LATE_S, self._send_off)

    def serve(self, visitor: Visitor) -> None:
        """Note that the connection has sent a whole request."""
        self._strangers.leave(visitor)

    def leave(self, visitor: Visitor) -> None:
        """Note that the connection is gone."""
        self._there -= 1
        self._strangers.leave(visitor)

    def _send_off(self) -> None:
        for visitor in self._strangers.late(time.monotonic()):
            self._turn_away(visitor, f"no request within {PATIENCE_S:g} s")
        there = len(self._strangers) > 0
        self._late = asyncio.get_running_loop().call_later(_LATE_S, self._send_off) if there else None

    def _turn_away(self, visitor: Visitor, why: str) -> None:
        self._strangers.leave(visitor)
        self._complaints.refused(visitor.host, why, time.monotonic())
        visitor.transport.abort()


class Visitor(H11Protocol):
    """One connection. The kernel cuts off a client that does not read its answer."""

    def __init__(self, door: Doorkeeper, **given: Any) -> None:
        super().__init__(**given)
        self._door = door
        self.host = "?"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock, peer = transport.get_extra_info("socket"), transport.get_extra_info("peername")
        self.host = str(peer[0]) if peer else "?"
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_MS)
        self._door.arrive(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.leave(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._door.serve(self)

    def on_response_complete(self) -> None:
        """Note that the connection waits again."""
        if not self.transport.is_closing():
            self._door.wait(self)
        super().on_response_complete()
