"""Files, as the coordinator's process has to do with them: what hosts with directories of their own bring, what they
are told of the job's, who claims a fault, and what people ask of their logs. The coordinator decides nothing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.base.given import read_given
from everstep.protocol.messages import (
    AnyMessage,
    ClaimFault,
    Command,
    CommandReply,
    FaultClaimed,
    FilePieces,
    HostAsk,
    HostPlace,
    HostTold,
    JobPage,
)
from everstep.runtime.claims import claim
from everstep.runtime.file_receiver import HeadReceiver
from everstep.runtime.host_directory import OWN_FOLDER, PAGES, write_hosts

_MOST_PAGE_BYTES = 64 << 10
MOST_ASKED = 1000
LOGS = "logs"
Answers = list[tuple[str, AnyMessage]]


class HeadFiles:
    """Says what to answer to whom. told: up to which step others may forget what they know, of those that are told in
    the job's events."""

    def __init__(self, run_dir: Path, told: Callable[[int], int] = lambda through: through) -> None:
        self._run_dir = run_dir
        self._told_to = told
        self._receiver = HeadReceiver(run_dir)
        self._agents: dict[str, str] = {}
        self._places: dict[str, HostPlace] = {}
        self._asked: dict[int, tuple[str, int, str]] = {}
        self._requests = 0

    def looked(self) -> tuple[int, int]:
        """As `HeadReceiver` has it."""
        return self._receiver.looked

    def take(self, connection: str, message: AnyMessage) -> Answers | None:
        """None: it is somebody else's to answer."""
        if isinstance(message, FilePieces):
            answer = self._receiver.take(message)
            return [(connection, msgspec.structs.replace(answer, told=self._told_to(answer.told)))]
        if isinstance(message, ClaimFault):
            return self._claim(connection, message)
        if isinstance(message, HostTold):
            return self._told(message)
        if isinstance(message, Command) and message.name == LOGS:
            return self._ask(connection, message)
        if isinstance(message, HostPlace):  # none who was refused says it
            self._agents[message.agent_id] = connection
            self._places[connection] = message
            self._say_hosts()
        return None

    def gone(self, connection: str) -> Answers:
        """A connection has ended: what it was asked is not answered any more."""
        if self._places.pop(connection, None) is not None:
            self._say_hosts()
        gone = [host for host, agent in self._agents.items() if agent == connection]
        for host in gone:
            del self._agents[host]
        lost = [key for key, (_, _, host) in self._asked.items() if host in gone]
        return [_refused(*self._asked.pop(key)) for key in lost]

    def _say_hosts(self) -> None:
        """Where the agent of this host has files of its own, nobody else says in the job's who has others."""
        if (self._run_dir / OWN_FOLDER).is_dir():
            with contextlib.suppress(OSError):
                write_hosts(self._run_dir, {place.agent_id: place for _, place in sorted(self._places.items())})

    def _claim(self, connection: str, message: ClaimFault) -> Answers:
        try:
            first, text = claim(self._run_dir, message.name, message.text)
        except (OSError, ValueError):
            return []  # it asks again
        return [(connection, FaultClaimed(request=message.request, first=first, text=text))]

    def _ask(self, connection: str, message: Command) -> Answers:
        host, name, start = (message.args.get(key) for key in ("host", "name", "start"))
        agent = self._agents.get(str(host))
        if agent is None:
            return [_refused(connection, message.request, str(host))]
        self._requests += 1
        if len(self._asked) >= MOST_ASKED:
            self._asked.pop(min(self._asked))
        self._asked[self._requests] = (connection, message.request, str(host))
        begin = start if type(start) is int and start >= 0 else 0
        return [(agent, HostAsk(request=self._requests, name=name[:100] if isinstance(name, str) else "", start=begin))]

    def _told(self, message: HostTold) -> Answers:
        connection, request, host = self._asked.pop(message.request, ("", 0, ""))
        if host != message.agent_id:
            return []
        result = {"logs": message.logs, "data": message.data}
        return [(connection, CommandReply(request=request, ok=True, error="", result=result))]


def _refused(connection: str, request: int, host: str) -> tuple[str, AnyMessage]:
    text = f"no host {host[:100]!r} is connected: everstep hosts says which there are"
    return connection, CommandReply(request=request, ok=False, error=text, result={})


class Pages:
    """The small files of a job that workers of all hosts look at."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._known: dict[str, str] = {}

    def all(self) -> list[JobPage]:
        """As they are now."""
        self.changed()
        return [JobPage(name=name, text=text) for name, text in sorted(self._known.items())]

    def changed(self) -> list[JobPage]:
        """Those that are not as at the last look."""
        found = []
        for name in PAGES:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                text = read_given(self._run_dir / name, _MOST_PAGE_BYTES).decode()
                if self._known.get(name) != text:
                    self._known[name] = text
                    found.append(JobPage(name=name, text=text))
        return found
