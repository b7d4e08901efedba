"""The head's end of copies of its directory: it sends new files to each standby host.

Others may forget records only once the hosts that could take over have them, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from everstep.protocol.messages import AnyMessage, FilesHeld, StandbyHello
from everstep.runtime.files.file_sender import FileSender
from everstep.runtime.files.file_sets import TO_STANDBY
from everstep.runtime.files.standby_files import LATE_S
from everstep.runtime.link.address import EVENTS_FILE

_LOOK_S = 0.025
_END_WAIT_S = 5.0
Sender = Callable[[str, AnyMessage], None]
Looked = tuple[int, int]


class _Had(NamedTuple):
    """Files of a host as of the moment as_of_s: the steps up to `through`. at_s: when it was last heard of."""

    at_s: float
    through: int
    as_of_s: float


class InStep:
    """How far the hosts that could take over have the job's files. Pure: the time is passed in, in seconds."""

    def __init__(self) -> None:
        self._had: dict[str, _Had] = {}

    def had(self, host: str, now_s: float, through: int, as_of_s: float) -> None:
        """A host has all files as of some moment, with the steps up to `through`. It is counted on from then on."""
        before = self._had[host].through if host in self._had else 0
        self._had[host] = _Had(now_s, max(before, through), as_of_s)

    def said(self, host: str, now_s: float) -> None:
        """A host has said something: if it is counted on, it still is."""
        if host in self._had:
            self._had[host] = self._had[host]._replace(at_s=now_s)

    def least(self, now_s: float, through: int) -> int:
        """Step up to which all hosts that are counted on have all steps; hosts that have been silent for long do not
        count. through: that of the job's own directory."""
        self._had = {host: had for host, had in self._had.items() if now_s - had.at_s < LATE_S}
        return min([through, *(had.through for had in self._had.values())])

    def behind(self, since_s: float, now_s: float) -> bool:
        """Whether one of them may lack files as of this moment."""
        return any(had.as_of_s < since_s for had in self._had.values() if now_s - had.at_s < LATE_S)


@dataclass
class _Standby:
    """A standby host, over one connection. looked: as `StandbyHosts` has it, when the host was last heard of; through:
    step up to which it has the job's events."""

    host: str
    sender: FileSender
    looked: Looked
    through: int = 0


class StandbyHosts:
    """Senders to the standby hosts, in the coordinator's loop. source: the word of the directory. send: to a
    connection. looked: returns the step up to which all are in the events, and the bytes read of these."""

    def __init__(self, run_dir: Path, source: str, send: Sender, looked: Callable[[], Looked]) -> None:
        self._run_dir, self._source, self._send, self._looked = run_dir, source, send, looked
        self._there: dict[str, _Standby] = {}
        self._in_step = InStep()

    def take(self, connection: str, message: AnyMessage) -> bool:
        """Take a message of a connection; returns False if it is meant for others."""
        if isinstance(message, StandbyHello):
            self.gone([connection])
            loop = asyncio.get_running_loop()

            def send(said: AnyMessage) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._send, connection, said)

            found = functools.partial(TO_STANDBY.found, self._run_dir)
            sender = FileSender(TO_STANDBY, found, self._source, send, mirrors=True)
            self._there[connection] = _Standby(message.host, sender, self._looked())
        elif not isinstance(message, FilesHeld):
            return False
        elif connection in self._there:
            self._answered(self._there[connection], message)
        return True

    def _answered(self, standby: _Standby, answer: FilesHeld) -> None:
        as_of_s, now_s = standby.sender.answered(answer), time.monotonic()
        through, events_bytes = standby.looked
        if standby.sender.held(EVENTS_FILE) >= events_bytes:
            standby.through = through
        standby.looked = self._looked()
        if as_of_s is None:
            self._in_step.said(standby.host, now_s)
        else:
            self._in_step.had(standby.host, now_s, standby.through, as_of_s)

    def gone(self, connections: Iterable[str]) -> None:
        for name in connections:
            standby = self._there.pop(name, None)
            if standby is not None:
                standby.sender.stop()

    def told(self, through: int) -> int:
        """Step up to which others may forget their records. through: the last of those in the job's own events."""
        return self._in_step.least(time.monotonic(), through)

    async def caught_up(self) -> None:
        """Wait until the hosts that are counted on have all files as of now; not for long."""
        begin_s = time.monotonic()
        while self._in_step.behind(begin_s, time.monotonic()) and time.monotonic() < begin_s + _END_WAIT_S:
            await asyncio.sleep(_LOOK_S)
