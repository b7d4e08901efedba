"""The coordinator's end of a control connection, played by a test: hears what is said, and says what it is told to."""

from __future__ import annotations

import queue
import socket
import threading
from typing import Any, TypeVar

from everstep.protocol import messages as m
from everstep.runtime import wire

PATIENCE_S = 30.0
T = TypeVar("T")


class FakeCoordinator:
    """Listens on loopback. Heartbeats and pings are heard and not kept; `answers`: whether pings get their pong."""

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.answers = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._heard: queue.Queue[m.AnyMessage] = queue.Queue()
        self._sock: socket.socket | None = None
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
        assert self._sock is not None
        wire.send_frame(self._sock, m.encode(message))

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
                wire.handshake_server(sock, self.token)
                self._sock = sock
                self._converse(sock)
            except OSError:
                if self._listener.fileno() < 0:
                    return

    def _converse(self, sock: socket.socket) -> None:
        reader = wire.FrameReader()
        while data := sock.recv(1 << 16):
            for message in map(m.decode, reader.feed(data)):
                if isinstance(message, m.Ping | m.Heartbeat):
                    if self.answers:
                        self.say(m.Pong(seq=message.seq))
                else:
                    self._heard.put(message)
        sock.close()
