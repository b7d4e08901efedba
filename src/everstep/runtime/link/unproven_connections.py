"""Strangers: clients that have connected and proved nothing yet. They wait beside one another, few and not for long.

All listeners in a job need the same: a silent, slow or nonsensical client must not delay anybody else, nor cost more
than a bounded number of descriptors, bytes and lines in a log.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from everstep.base.errors import ProtocolError
from everstep.runtime.link.handshake import Greeter, Keys, Seals
from everstep.runtime.link.tls import Tls, TlsSocket, said
from everstep.runtime.link.wire import HANDSHAKE_TIMEOUT_S, ends

MAX_STRANGERS = 256
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_FULL_WAIT_S = 0.02
_RECEIVE_BYTES = 1024

Who = TypeVar("Who", bound=Hashable)


class Strangers(Generic[Who]):
    """The waiting strangers, each with its arrival. Pure. most: at once; timeout_s: longest stay of each."""

    def __init__(self, most: int, timeout_s: float) -> None:
        self._most = most
        self._timeout_s = timeout_s
        self._since: dict[Who, tuple[float, str]] = {}
        self._by_host: dict[str, dict[Who, None]] = {}

    def __len__(self) -> int:
        return len(self._since)

    def arrive(self, who: Who, host: str, now_s: float) -> Who | None:
        """Add a stranger from this host. Returns the stranger to turn away if there are too many: the oldest one from
        the host with the most strangers. A crowd from elsewhere thus keeps nobody out."""
        self._since[who] = (now_s, host)
        self._by_host.setdefault(host, {})[who] = None
        return self.longest() if len(self._since) > self._most else None

    def longest(self) -> Who | None:
        """The stranger to turn away first."""
        crowd = max(self._by_host.values(), key=len, default={})
        return next(iter(crowd), None)

    def leave(self, who: Who) -> None:
        """Remove one: it is no stranger any more, or gone."""
        _, host = self._since.pop(who, (0.0, ""))
        crowd = self._by_host.get(host)
        if crowd is not None:
            crowd.pop(who, None)
            if not crowd:
                del self._by_host[host]

    def late(self, now_s: float) -> list[Who]:
        """Strangers that have been there for too long."""
        found = []
        for who, (since_s, _) in self._since.items():
            if now_s - since_s < self._timeout_s:
                break
            found.append(who)
        return found


class Complaints:
    """Reports refused connections: the first at once, then ever more seldom while they go on, with their count. Pure
    but for `say`. `count`: refusals so far."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._pause_s = 0.0
        self._said_s = -_LONGEST_PAUSE_S
        self.count = 0

    def refused(self, who: str, reason: str, now_s: float) -> None:
        self.count += 1
        quiet_s = now_s - self._said_s
        if quiet_s < self._pause_s:
            return
        again = quiet_s < 2 * _LONGEST_PAUSE_S
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s) if again and self._pause_s else _FIRST_PAUSE_S
        self._said_s = now_s
        self._say(f"refused a connection from {who}: {reason} ({self.count} refused so far)")


class _Guest(NamedTuple):
    """A stranger's connection. greeter: None as long as it has to speak TLS first."""

    sock: socket.socket
    greeter: Greeter | None
    who: str


class UnprovenConnections:
    """A listening socket, and the strangers at it. One thread calls `turn`.

    keys: tokens that they have to prove. complaints: takes refusals. tls: for connections that need it.
    """

    def __init__(self, listener: socket.socket, keys: Keys, complaints: Complaints, tls: Tls | None = None) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._keys = keys
        self._complaints = complaints
        self._tls = tls
        self._guests: dict[int, _Guest] = {}
        self._strangers: Strangers[int] = Strangers(MAX_STRANGERS, HANDSHAKE_TIMEOUT_S)
        self._poller = select.epoll()
        self._poller.register(listener, select.EPOLLIN)

    def fileno(self) -> int:
        """For poll: readable means that `turn` has something to do."""
        return self._poller.fileno()

    def turn(self, wait_s: float) -> list[tuple[socket.socket, Seals]]:
        """Wait for at most so long, and serve the strangers. Returns the clients that have proved the token; their
        sockets do not block. Raises: OSError if the listener is closed."""
        known = []
        for fd, _ in self._poller.poll(wait_s):
            if fd in self._guests:
                with contextlib.suppress(KeyError):
                    known += self._hear(fd)
            elif fd == self._listener.fileno():
                self._let_in()
        if self._listener.fileno() < 0:
            raise OSError("the listener is closed")
        for fd in self._strangers.late(time.monotonic()):
            self._send_off(fd, "the handshake took too long")
        return known

    def close(self) -> None:
        """Close all strangers' connections, without a word. The caller closes the listener."""
        for guest in self._guests.values():
            guest.sock.close()
        self._guests.clear()
        self._poller.close()

    def _let_in(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left, or the client is gone: make room, and do not spin
            longest = self._strangers.longest()
            if longest is not None:
                self._send_off(longest, "no descriptor was left")
            time.sleep(_FULL_WAIT_S)
            return
        sock.setblocking(False)
        who = f"{peer[0]}:{peer[1]}"
        try:
            between = ends(sock)
        except OSError:  # it has left again
            sock.close()
            return
        covered = self._tls is not None and self._tls.covers(between)
        self._guests[sock.fileno()] = guest = _Guest(sock, None, who)
        out = self._strangers.arrive(sock.fileno(), str(peer[0]), time.monotonic())
        self._poller.register(sock, select.EPOLLIN)
        if out is not None:
            self._send_off(out, "too many connections at once have not proved the token")
        if not covered and out != sock.fileno():
            self._greet(guest, Greeter(self._keys, between.here))

    def _greet(self, guest: _Guest, greeter: Greeter) -> None:
        self._guests[guest.sock.fileno()] = guest._replace(greeter=greeter)
        with contextlib.suppress(OSError):  # heard of when it is read
            guest.sock.send(greeter.greeting)

    def _secure(self, fd: int, tls: Tls) -> None:
        """Continue the TLS handshake; a stranger costs no TLS state before its first bytes."""
        guest = self._guests[fd]
        try:
            if not isinstance(guest.sock, TlsSocket):
                guest = guest._replace(sock=tls.answer(guest.sock))
                self._guests[fd] = guest
            guest.sock.do_handshake()  # type: ignore[attr-defined]
        except BlockingIOError:
            return
        except ssl.SSLError as error:
            self._send_off(fd, said(error))
        except OSError as error:
            self._send_off(fd, str(error))
        else:
            self._greet(guest, Greeter(self._keys, ends(guest.sock).here, tls.fingerprint))

    def _hear(self, fd: int) -> list[tuple[socket.socket, Seals]]:
        sock, greeter, _ = self._guests[fd]
        if greeter is None:
            if self._tls is not None:
                self._secure(fd, self._tls)
            return []
        try:
            data = sock.recv(_RECEIVE_BYTES)
            if not data:
                raise ProtocolError("it hung up before it proved the token")
            reply = greeter.feed(data)
            if reply:
                sock.send(reply)
        except BlockingIOError:
            return []
        except (OSError, ProtocolError) as error:
            self._send_off(fd, str(error))
            return []
        if greeter.seals is None:
            return []
        self._forget(fd)
        return [(sock, greeter.seals)]

    def _send_off(self, fd: int, reason: str) -> None:
        sock, _, who = self._forget(fd)
        sock.close()
        self._complaints.refused(who, reason, time.monotonic())

    def _forget(self, fd: int) -> _Guest:
        self._strangers.leave(fd)
        with contextlib.suppress(OSError):  # it is closed already
            self._poller.unregister(fd)
        return self._guests.pop(fd)
