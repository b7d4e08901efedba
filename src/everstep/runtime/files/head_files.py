"""Files in the coordinator's process: it takes in files of hosts with directories of their own, tells them the job's,
grants claims of faults, and passes on questions about logs. The coordinator decides nothing of it."""

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
    HostsThere,
    HostTold,
    JobPage,
)
from everstep.runtime.files.claim_files import claim
from everstep.runtime.files.file_receiver import HeadReceiver
from everstep.runtime.files.host_directory import OWN_FOLDER, PAGES, write_hosts

_MOST_PAGE_BYTES = 64 << 10
MOST_ASKED = 1000
LOGS = "logs"
Answers = list[tuple[str, AnyMessage]]


class HeadFiles:
    """Answers messages about files. told: given the last step in the job's events, the step up to which others may
    forget their own records."""

    def __init__(self, run_dir: Path, told: Callable[[int], int] = lambda through: through) -> None:
        self._run_dir = run_dir
        self._told_to = told
        self._receiver = HeadReceiver(run_dir)
        self._places: dict[str, HostPlace] = {}
        self._pages: dict[str, str] = {}
        self._asked: dict[int, tuple[str, int, str]] = {}
        self._requests = 0

    def looked(self) -> tuple[int, int]:
        """Step and bytes of the job's events, as `HeadReceiver` has them."""
        return self._receiver.looked

    @property
    def apart(self) -> list[str]:
        """The connections of agents whose run directory is their own."""
        return [name for name, place in self._places.items() if place.apart]

    def take(self, connection: str, message: AnyMessage) -> Answers | None:
        """Answer a message about files; None: another part of the process has to answer it."""
        if isinstance(message, FilePieces):
            answer = self._receiver.take(message)
            return [(connection, msgspec.structs.replace(answer, told=self._told_to(answer.told)))]
        if isinstance(message, ClaimFault):
            return self._claim(connection, message)
        if isinstance(message, HostTold):
            return self._told(message)
        if isinstance(message, Command) and message.name == LOGS:
            return self._ask(connection, message)
        if isinstance(message, HostPlace):
            self._places[connection] = message
            pages = [JobPage(name=name, text=text) for name, text in sorted(self._pages.items())]
            return [*self._tell_hosts(), *((connection, page) for page in pages if message.apart)]
        return None

    def gone(self, connection: str) -> Answers:
        """A connection has ended: questions to it are refused now."""
        place = self._places.pop(connection, None)
        if place is None:
            return []
        lost = [] if self._connection(place.agent_id) else [k for k, v in self._asked.items() if v[2] == place.agent_id]
        return [*self._tell_hosts(), *(_refused(*self._asked.pop(key)) for key in lost)]

    def changed_pages(self) -> Answers:
        """Messages with the small files that workers of all hosts read, if changed since the last look, for hosts that
        do not see them."""
        found = []
        for name in PAGES:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                text = read_given(self._run_dir / name, _MOST_PAGE_BYTES).decode()
                if self._pages.get(name) != text:
                    self._pages[name] = text
                    found.append(JobPage(name=name, text=text))
        return [(connection, page) for page in found for connection in self.apart]

    def _connection(self, host: str) -> str:
        """Connection of the agent of a host, "" if there is none."""
        return next((name for name, place in reversed(self._places.items()) if place.agent_id == host), "")

    def _tell_hosts(self) -> Answers:
        """Tell all agents where each host keeps its files. If this host's agent has files of its own, write that into
        the job's directory, as nobody else does."""
        there = HostsThere(places={place.agent_id: place for _, place in sorted(self._places.items())})
        if (self._run_dir / OWN_FOLDER).is_dir():
            with contextlib.suppress(OSError):
                write_hosts(self._run_dir, there.places)
        return [(name, there) for name in sorted(self._places)]

    def _claim(self, connection: str, message: ClaimFault) -> Answers:
        try:
            first, text = claim(self._run_dir, message.name, message.text)
        except (OSError, ValueError):
            return []  # it asks again
        return [(connection, FaultClaimed(request=message.request, first=first, text=text))]

    def _ask(self, connection: str, message: Command) -> Answers:
        host, name, start = (message.args.get(key) for key in ("host", "name", "start"))
        agent = self._connection(str(host))
        if not agent:
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
