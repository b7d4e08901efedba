"""The files of a job on an agent's host, and their exchange with the job's own directory."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everstep.base.below import hard_link, write_atomically
from everstep.base.config import Config
from everstep.base.doors import check_ports, host_of, parse_ports
from everstep.base.errors import ConfigError
from everstep.base.given import open_given, read_json
from everstep.protocol.messages import (
    AnyMessage,
    FilePiece,
    FilePieces,
    FilesHeld,
    HostAsk,
    HostPlace,
    HostsThere,
    HostTold,
    JobFacts,
    JobPage,
)
from everstep.runtime.files.file_receiver import HeadReceiver
from everstep.runtime.files.file_sender import FileSender, digest_of, whole_lines
from everstep.runtime.files.file_sets import LATEST, LEDGER, TO_HEAD, comes_last
from everstep.runtime.files.host_directory import (
    ARRIVED_FILE,
    OWN_FOLDER,
    PAGES,
    Place,
    checkpoints_in,
    disk_of,
    find_place,
    is_led_above,
    is_of,
    own_disk,
    word_in,
    word_in_source,
    write_hosts,
    write_job,
)
from everstep.runtime.files.private import close_run_dir
from everstep.runtime.files.run_lock import run_lock
from everstep.runtime.link.address import EVENTS_FILE, JOB_FILE, LOGS_FOLDER
from everstep.runtime.link.context import Joining
from everstep.runtime.link.control_client import ControlClient
from everstep.runtime.link.listening import keep_within
from everstep.runtime.link.peer import DEFAULT_TIMEOUT_S, PeerConnection, PeerServer, peer_connect
from everstep.runtime.link.tls import Tls
from everstep.runtime.link.word_of_head import MOST_BYTES, QUESTION, answer_with, place_told

_TURN_S = 0.25
_NOTE_S = 1.0
_CUT_OFF_S = 5.0
_ASK_S = 1.0
_FINAL = "final/"


@dataclass(frozen=True)
class PeerWire:
    """An agent's connections to the peers of its workers. own: its address; token: of the role `peer`."""

    own: str
    token: bytes
    tls: Tls | None

    def call(self, address: str, request: dict[str, Any], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> PeerConnection:
        """Connect to a peer and make a request. Raises: as `peer_connect`."""
        return peer_connect(address, self.token, request, timeout_s=timeout_s, tls=self.tls)


class AgentFiles:
    """Files of an agent that has heard of its job. config: the job's. client: speaks with the coordinator.

    Raises: ConfigError if there is no directory to work in, or `network.ports` has no port for other hosts' agents.
    """

    def __init__(
        self, facts: JobFacts, joining: Joining, config: Config, wire: PeerWire, client: ControlClient
    ) -> None:
        keep_within(parse_ports(config.network.ports))
        self._place = find_place(facts, joining.run_dir, joining.host, joining.around)
        self._host, self._domains = joining.host, joining.domains
        self._config = config.checkpoint
        self._checkpoints, self._disk = disk_of(facts, self._place, self._config, joining.host)
        self._led = facts.place if is_led_above(facts, self._place) else ""
        self._files, self._wire = joining.files, wire
        self._server: PeerServer | None = None
        self._client = client
        self._sender: DirectorySender | None = None
        self._held = contextlib.ExitStack()
        self._agents: dict[str, str] = {}
        if self._place.apart:
            if not joining.around:  # a host that leads, or may have to, has looked before
                most = joining.room or config.workers + config.spares
                check_ports(config.network.ports, most, ["its agent"], spans=config.cell.hosts > 1)
            self._use_own(facts, joining)
        self.say()

    def _use_own(self, facts: JobFacts, joining: Joining) -> None:
        run_dir, where = self._place.run_dir, joining.where()
        if isinstance(where, Path) and where.parent == run_dir:  # in the job's own directory the job itself writes it
            raise ConfigError(f"expected the job's directory at {facts.run_dir}, it is not there")
        self._held.enter_context(run_lock(run_dir))
        try:
            write_job(self._place, facts, None if isinstance(where, Path) else where)
            close_run_dir(run_dir)
        except OSError as error:
            why = f"cannot write {run_dir}: {error.strerror or error}"
            if not (isinstance(where, Path) and is_of(facts.job, run_dir)):
                raise ConfigError(why) from None
            print(f"everstep agent: warning: {why}; an earlier {JOB_FILE} is used", file=sys.stderr, flush=True)
        if not joining.parent:
            told = f"everstep agent: the job's directory is not here: files go to {run_dir}"
            print(told, file=sys.stderr, flush=True)
        self._told_here = ToldHere(self._place)
        self._sender = DirectorySender(self._place, self._send_on, self._is_led_around)

    @property
    def run_dir(self) -> Path:
        return self._place.run_dir

    @property
    def apart(self) -> bool:
        """Whether the directory is this host's own."""
        return self._place.apart

    def fits(self, facts: JobFacts) -> bool:
        """Whether the directory can still be used: not if it was the job's, and the job is led in another one now."""
        return self._place.apart or not facts.place or word_in(self.run_dir) == facts.place

    @property
    def logs(self) -> Path:
        """Folder of the logs of this host's workers."""
        return self._place.top / LOGS_FOLDER

    def meet(self, facts: JobFacts) -> None:
        """Tell a head with these facts, maybe another than before, where this host's files are."""
        try:
            self._disk = disk_of(facts, self._place, self._config, self._host)[1]
        except ConfigError as error:  # it was there under the head before
            self._disk = own_disk(self._host)
            print(f"everstep agent: warning: {error}", file=sys.stderr, flush=True)
        self._led = facts.place if is_led_above(facts, self._place) else ""
        if self._led:
            self._told_here = ToldHere(self._place)  # another head may have set aside what was there
        self.say()

    def _is_led_around(self) -> bool:
        """Whether the job is led, as far as this host knows, in the directory around its own."""
        return bool(self._led) and word_in(self._place.top) == self._led

    def say(self) -> None:
        """Tell the coordinator, over a new connection, where this host's files are."""
        address = self._server.address if self._server is not None else ""
        about: dict[str, Any] = {"disk": self._disk, "address": address, "domains": self._domains}
        said = HostPlace(agent_id=self._host, apart=self._place.apart, around=bool(self._led), **about)
        self._client.send(said)
        if self._sender is not None:
            self._sender.ask_again()

    def answered(self, answer: FilesHeld) -> None:
        """Take in the head's answer about arrived files. Any thread."""
        if self._sender is not None:
            self._sender.answered(answer)

    def hear(self, message: HostsThere | JobPage | HostAsk) -> None:
        """Take in files for this host's processes, or a question about them. Never raises because of the disk."""
        if isinstance(message, HostAsk):
            found, data = logs_in(self.logs), log_bytes(self.logs, message.name, message.start)
            self._client.send(HostTold(agent_id=self._host, request=message.request, logs=found, data=data))
            return
        with contextlib.suppress(OSError):
            if isinstance(message, HostsThere):
                there = message.places.values()
                if len({place.disk for place in there}) > 1 or any(p.apart and not p.around for p in there):
                    with contextlib.suppress(OSError):  # no port is free
                        self._serve()
                self._agents = {name: place.address for name, place in message.places.items() if place.address}
                write_hosts(self.run_dir, message.places)
            elif self._place.apart and message.name in PAGES:
                write_atomically(self.run_dir / message.name, message.text)

    def agents_elsewhere(self, lost: str) -> list[str]:
        """Addresses of other hosts' agents, as the head told them last. lost: a host's address to leave out, if there
        are others."""
        there = [address for name, address in self._agents.items() if name != self._host]
        return [address for address in there if host_of(address) != lost] or there

    def ask_for_head(self, address: str) -> tuple[str, int] | None:
        """The head's address by another host's agent; None if that agent knows none of a term that counts.

        Raises: CollectiveAborted if nobody answers there; ProtocolError if it is no agent of this job.
        """
        with self._wire.call(address, QUESTION, timeout_s=_ASK_S) as agent:
            return place_told(agent.recv_json(MOST_BYTES), self._client.term)

    def _serve(self) -> None:
        """Answer agents of other hosts that do not see this directory: about its checkpoints, and about the head."""
        if self._server is None and self._files:
            module, _, name = self._files.partition(":")
            files = getattr(importlib.import_module(module), name)(self._checkpoints, self._wire.call)

            def handler(agent: PeerConnection, request: dict[str, Any]) -> None:
                if request == QUESTION:
                    agent.send_json(answer_with(self._client.head))
                else:
                    files(agent, request)

            self._server = PeerServer(self._wire.own, self._wire.token, handler, self._wire.tls)
            self.say()

    def finish(self, timeout_s: float) -> bool:
        """Wait, once nothing is written here any more, until all has arrived; returns whether it has."""
        if self._sender is None:
            return True
        begin_s = heard_s = time.monotonic()
        while not self._sender.finish(begin_s, _TURN_S):
            now_s = time.monotonic()
            heard_s = now_s if self._client.connected and not self._sender.in_vain else heard_s
            if now_s > begin_s + timeout_s or now_s - heard_s > _CUT_OFF_S:
                self._sender.close()
                if self._is_led_around():
                    with contextlib.suppress(OSError):
                        self._told_here.bring_all()
                if self._place.passing:
                    self._place = replace(self._place, passing=False)
                    words = "some files have not arrived at the job's directory"
                    print(f"everstep agent: warning: {words}: {self.run_dir} is kept", file=sys.stderr, flush=True)
                return False
        return True

    def close(self, *, done: bool) -> None:
        """End all transfers. done: the job is over, so nobody comes back for files that are here; those that have not
        arrived stay."""
        if self._server is not None:
            self._server.close()
        if self._sender is not None:
            self._sender.close()
        self._held.close()
        if done and self._place.passing:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def _send_on(self, message: AnyMessage) -> None:
        if self._client.connected:
            self._client.send(message)
        elif self._is_led_around():
            with contextlib.suppress(OSError):
                self._told_here.bring()


class DirectorySender(FileSender):
    """Sends the files of a host's own directory to the head, and notes for the processes there which have arrived, and
    why others cannot (`refused`). led: whether the job is led in the directory around it. There the weights get a
    second name, and take no more room."""

    def __init__(
        self, place: Place, send: Callable[[AnyMessage], None], led: Callable[[], bool] = lambda: False
    ) -> None:
        run_dir = self._run_dir = place.run_dir
        self._top, self._led = place.top, led
        self._told, self._digests = 0, dict[str, str]()
        self._named, self.refused = dict[str, str](), dict[str, str]()
        self._noted: dict[str, Any] = {"through": 0, "files": {}, "refused": {}}
        self._note_s = 0.0
        (run_dir / ARRIVED_FILE).unlink(missing_ok=True)  # from an earlier run
        super().__init__(TO_HEAD, self._found, word_in_source(run_dir), send, each_turn=self._note)

    def answered(self, answer: FilesHeld) -> float | None:
        self._told = answer.told
        refused = {**self.refused, **answer.refused}
        self.refused = {name: words for name, words in refused.items() if name not in answer.held}
        return super().answered(answer)

    def _ask_again(self, names: Iterable[str]) -> None:
        self.refused = {}  # by a head that is gone, or does not answer
        super()._ask_again(names)

    @property
    def in_vain(self) -> bool:
        """Whether nothing is sent any more but what cannot arrive."""
        refused = self.refused
        return bool(refused) and all(piece.path in refused for piece in self._message.pieces)

    def close(self) -> None:
        super().close()
        self._note_s = 0.0
        self._note({})

    def _found(self) -> list[tuple[str, Path]]:
        found, self._named = TO_HEAD.found(self._run_dir), {}
        if self._led():
            final = [name for name, _ in found if name.startswith(_FINAL)]
            there = final if all(map(self._name_there, final)) else []
            return [(name, path) for name, path in found if name not in there]
        with contextlib.suppress(ConfigError):
            latest = checkpoints_in(self._top) / "latest.json"
            found[1:1] = [(LATEST, latest)] if latest.exists() else []  # after the events
        return found

    def _name_there(self, name: str) -> bool:
        """Give a file its name in the directory around this one, too; False if this disk cannot do that."""
        try:
            hard_link(self._run_dir / name, self._top / name)
            if comes_last(name):
                self._named[name] = digest_of(self._run_dir / name, 1)
        except OSError:
            return False
        return True

    def _note(self, digests: dict[str, str]) -> None:
        """Note arrived files; if the host's own disk refuses, a later turn tries again."""
        self._digests |= digests
        arrived = {"through": self._told, "files": self._digests | self._named, "refused": self.refused}
        urgent = (
            any(arrived[kind] != self._noted[kind] for kind in ("files", "refused")) or time.monotonic() > self._note_s
        )
        if arrived != self._noted and urgent:
            self._note_s = time.monotonic() + _NOTE_S
            with contextlib.suppress(OSError):
                write_atomically(self._run_dir / ARRIVED_FILE, json.dumps(arrived) + "\n")
                self._noted = arrived


class ToldHere:
    """While no head answers, brings what this host's workers have told, events and ledger rows, into the directory in
    which it has led. A head gets all again: it knows by their origin which are there."""

    def __init__(self, place: Place) -> None:
        self._own, self._source = place.run_dir, word_in_source(place.run_dir)
        self._receiver = HeadReceiver(place.top)

    def bring(self) -> list[int | None]:
        """Bring the next part of each file. Returns how much is there. Raises: OSError."""
        return [
            self._bring(name) for name, _ in TO_HEAD.found(self._own) if name == EVENTS_FILE or LEDGER.fullmatch(name)
        ]

    def bring_all(self) -> None:
        """Bring all that is here and finds room. Raises: OSError."""
        before: Any = None
        while (now := (self.bring(), self._receiver.looked)) != before:
            before = now

    def _bring(self, name: str) -> int | None:
        held = self._take(name, 0, b"")
        data = b"" if held is None else whole_lines(self._own / name, name.count("/"), held)
        return self._take(name, held, data) if held is not None and data else held

    def _take(self, name: str, at: int, data: bytes) -> int | None:
        piece = FilePiece(path=name, version="", at=at, data=data, size=at + len(data))
        pieces = FilePieces(number=0, source=self._source, pieces=[piece])
        return self._receiver.take(pieces).held.get(name)


def bring_left(top: Path) -> None:
    """As a job goes on in this directory: bring what an agent of before, in a folder of its own there, could not send.
    One that runs brings it itself."""
    place = Place(top / OWN_FOLDER, apart=True, around=str(top))
    with contextlib.suppress(OSError, ValueError, ConfigError):
        if is_of(read_json(top / JOB_FILE), place.run_dir) and word_in_source(place.run_dir):
            with run_lock(place.run_dir):
                ToldHere(place).bring_all()


# ---- logs, for readers on other hosts

_LOG = re.compile(r"worker-\d{1,7}(\.\d{1,3})?\.jsonl")
LOG_BYTES = 512 << 10


def logs_in(folder: Path) -> dict[str, tuple[int, int]]:
    """The workers' logs of a host, each with its inode number, which a rotation does not change, and its size."""
    found: dict[str, tuple[int, int]] = {}
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if _LOG.fullmatch(path.name):
                stat = path.stat()
                found[path.name] = (stat.st_ino, stat.st_size)
    return found


def log_bytes(folder: Path, name: str, start: int) -> bytes:
    """Bytes of one log from `start` on; b"" if there is no such log."""
    if not _LOG.fullmatch(name):
        return b""
    with contextlib.suppress(OSError, OverflowError), open_given(folder / name, 1) as file:
        return os.pread(file.fileno(), LOG_BYTES, max(0, start))
    return b""
