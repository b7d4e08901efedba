"""The coordinator's end of a control connection, played by a test: hears what is said, and says what it is told to."""

from __future__ import annotations

import queue
import socket
import threading
from typing import Any, TypeVar

from everstep.base.errors import ProtocolError
from everstep.protocol import messages as m
from everstep.protocol.roles import CONTROL_ROLES
from everstep.runtime.link import wire
from everstep.runtime.link.handshake import Caller, Ends, Greeter, Keys, Seals, keys_of, role_token

PATIENCE_S = 30.0
T = TypeVar("T")


def handshake_server(sock: socket.socket, keys: Keys) -> Seals:
    """The server's side of one handshake, over a blocking socket."""
    sock.settimeout(PATIENCE_S)
    greeter = Greeter(keys, wire.ends(sock).here)
    sock.sendall(greeter.greeting)
    while greeter.seals is None:
        data = sock.recv(1024)
        if not data:
            raise ProtocolError("it hung up")
        sock.sendall(greeter.feed(data))
    sock.settimeout(None)
    return greeter.seals


def both_ends(role: str = "agent", name: str = "a", *, token: bytes = b"t" * 32) -> tuple[Seals, Seals]:
    """A client's end and the server's end of one connection."""
    greeter = Greeter(keys_of(token, CONTROL_ROLES), "10.0.0.1:5")
    caller = Caller(role_token(token, role), role, name, Ends("10.0.0.2:7", "10.0.0.1:5"))
    client = caller.accept(greeter.feed(caller.answer(greeter.greeting)))
    assert greeter.seals is not None
    return client, greeter.seals


class FakeCoordinator:
    """Listens on loopback. Heartbeats and pings are heard and not kept; `answers`: whether pings get their pong."""

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.answers = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._heard: queue.Queue[m.AnyMessage] = queue.Queue()
        self._sock: socket.socket | None = None
        self._seals: Seals | None = None
        self._saying = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def hear(self, kind: type[T]) -> T:
        """The next message of this kind; those before it are passed over."""
        while True:
            message = self._heard.get(timeout=PATIENCE_S)
            if isinstance(message, kind):
                return message

    def notice(self, kind: str) -> dict[str, Any]:
        """The next notice of this kind."""
        while True:
            notice = self.hear(m.AgentNotice)
            if notice.kind == kind:
                return notice.fields

    def say(self, message: m.AnyMessage) -> None:
        assert self._sock is not None and self._seals is not None
        with self._saying:  # the test, and who answers heartbeats
            wire.send_frame(self._sock, self._seals, m.encode(message))

    def hang_up(self) -> None:
        """The connection ends; the other side may connect again."""
        assert self._sock is not None
        self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
                seals = handshake_server(sock, keys_of(self.token, CONTROL_ROLES))
                self._sock, self._seals = sock, seals
                self._converse(sock, seals)
            except (OSError, ProtocolError):
                if self._listener.fileno() < 0:
                    return

    def _converse(self, sock: socket.socket, seals: Seals) -> None:
        reader = wire.FrameReader(seals)
        while data := sock.recv(1 << 16):
            for message in map(m.decode, reader.feed(data)):
                if isinstance(message, m.Ping | m.Heartbeat):
                    if self.answers:
                        self.say(m.Pong(seq=message.seq))
                else:
                    self._heard.put(message)
                    if isinstance(message, m.Goodbye):
                        self.say(message)
        sock.close()
