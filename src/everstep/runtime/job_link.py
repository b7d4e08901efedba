"""The connection of the job's own process to the coordinator: commands, news, and whether it still answers."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep.protocol.messages import AnyMessage, Command, JobHello, Ping, Pong
from everstep.runtime.control import ControlClient

PING_S = 0.25
SILENT_PINGS = 20


class JobLink:
    """Speaks for the job. on_message: called in the connection's thread for what the coordinator says."""

    def __init__(self, coordinator_file: Path, token: bytes, on_message: Callable[[AnyMessage], None]) -> None:
        self._on_message = on_message
        self._numbers = itertools.count(1)
        self._next_s = 0.0
        self._unanswered = 0
        self._heard_s = time.monotonic()
        self._client = ControlClient(coordinator_file, token, "job", f"job-{os.getpid()}", JobHello, self._receive)

    def due_in(self, now_s: float) -> float:
        """Seconds until the next ping."""
        return max(0.0, self._next_s - now_s)

    def ping(self, now_s: float) -> None:
        """Ask whether the coordinator answers, if it is time to. `now_s` is monotonic."""
        if now_s >= self._next_s:
            self._next_s = now_s + PING_S
            self._unanswered += 1
            if self._client.connected:
                self._client.send(Ping(seq=next(self._numbers)))

    def expect_anew(self) -> None:
        """The coordinator has just been started: its silence until now counts for nothing."""
        self._unanswered, self._heard_s = 0, time.monotonic()

    def silence_s(self, now_s: float) -> float:
        """For how long the coordinator has answered nothing; 0 until several pings have had time for an answer.

        So a process that was itself stopped for a while does not blame the coordinator.
        """
        return now_s - self._heard_s if self._unanswered > SILENT_PINGS else 0.0

    def command(self, name: str, args: dict[str, Any]) -> None:
        """Ask for something, as the command line would; the reply goes to `on_message`."""
        self._client.send(Command(request=next(self._numbers), name=name, args=args))

    def close(self) -> None:
        """End the connection."""
        self._client.close(0.0)

    def _receive(self, message: AnyMessage) -> None:
        self.expect_anew()
        if not isinstance(message, Pong):
            self._on_message(message)
