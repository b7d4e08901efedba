"""Foundations of a coordinator's process: its journal, and, if others may take its place, the lease.

`protocol.lease` decides; here are clock, threads and etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from everstep.base.cause import Cause, Why
from everstep.base.config import Config
from everstep.base.errors import ProtocolError
from everstep.base.etcd_address import EtcdAddress
from everstep.observe.events import EventLog, say
from everstep.protocol.coordinator.types import CoordinatorEffect
from everstep.protocol.lease.candidate import SECOND_NS, Candidate
from everstep.protocol.lease.held import HeldEffects
from everstep.protocol.lease.requests import (
    Append,
    Campaign,
    JournalEntry,
    Load,
    Loaded,
    StoreAnswer,
    StoreRequest,
    Unanswered,
)
from everstep.protocol.lease.writer import Writer
from everstep.runtime.files.led_directory import MOVED, LedDirectory
from everstep.runtime.lead.etcd import Etcd
from everstep.runtime.lead.etcd_access import find_access
from everstep.runtime.lead.journal import Journal, JournalTaken, newest_term
from everstep.runtime.link.address import COORDINATOR_FILE, JOURNAL_FILE, NEWEST_FILE, announce
from everstep.runtime.link.listener_probe import listens

DEPOSED = 4
"""Exit code of a coordinator that has lost its lease: its next life stands by."""
_AGAIN_S = 0.05
_KNOCK_S = 0.1
_LOOK_S = 0.25
_ANNOUNCE_S = 1.0
_REFUSED_S = 1.0
_RESIGN_S = 1.0
_SAY_EVERY_S = 10.0
_MOST_WORD = 64
Written = Callable[[int], None]


def now_ns() -> int:
    """Nanoseconds on a clock that goes on while the machine sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class JournalStore(Protocol):
    """Store in which a coordinator's entries outlive it. entries: those that were there when it was opened. notes:
    trouble with them, for people.

    `append` writes entries after all others, and calls `written` with the number of further safe ones, from the loop's
    thread, now or later, in order. `fence`: no entry of an older term is written from now on.
    """

    entries: list[JournalEntry]
    notes: str

    def append(self, entries: list[JournalEntry]) -> None: ...

    def on_written(self, written: Written) -> None: ...

    def fence(self) -> int: ...


class FileStore:
    """A journal in the run directory. Entries that the disk refuses wait in memory, and hold up nobody; events are told
    of it. term: by which this coordinator's job process leads, as `Succession` has it."""

    def __init__(self, journal: Journal, events: EventLog, term: int) -> None:
        self.entries = journal.entries if any(e.get("kind") != "term" for e in journal.entries) else []
        torn = f"; a torn line of {journal.cut_bytes} bytes was cut off its end" if journal.cut_bytes else ""
        self.notes = torn
        self._journal, self._events, self._term = journal, events, term
        self._newest = newest_term(journal.entries)
        self._warned = False
        self._again: asyncio.TimerHandle | None = None
        self._written: Written = lambda count: None

    def on_written(self, written: Written) -> None:
        """Set the function that is told of safe entries."""
        self._written = written

    def fence(self) -> int:
        """Number of the term. Raises: JournalTaken if another job process leads by this journal."""
        if self._newest != self._term:
            where = f"term {self._newest} in {self._journal.path}"
            raise JournalTaken(f"the job was taken over ({where}): this head, of term {self._term}, ends")
        return self._term

    def append(self, entries: list[JournalEntry]) -> None:
        """Write entries and sync them before this returns, unless the disk refuses."""
        for entry in entries:
            self._put(functools.partial(self._journal.append, entry))
        self._written(len(entries))

    def _put(self, write: Callable[[], bool]) -> None:
        try:
            with self._events.timing(self._journal.path):
                written = write()
        except JournalTaken as error:
            stand_down(str(error), MOVED)
        if not (written or self._warned):
            text = (
                f"cannot write {self._journal.path}: the coordinator keeps {self._journal.pending} entries in"
                " memory and tries again; a restart of it would rely on what the workers report"
            )
            warn(self._events, Why(Cause.DISK, text))
        self._warned = not written
        if not written and self._again is None:
            self._again = asyncio.get_running_loop().call_later(_REFUSED_S, self._retry)

    def _retry(self) -> None:
        self._again = None
        if self._journal.pending:
            self._put(self._journal.retry)


class EtcdStore:
    """A journal in etcd, which only the lease's holder can write. fenced: called with the reason why this one cannot
    any more; refused: called with the reason why no other could either."""

    notes = ""

    def __init__(
        self,
        etcd: Asker,
        term: int,
        loaded: Loaded,
        fenced: Callable[[str], None],
        refused: Callable[[str], None],
    ) -> None:
        self.entries = loaded.entries
        self._etcd, self._term, self._fenced, self._refused = etcd, term, fenced, refused
        self._writer = Writer(term, loaded.number, loaded.entries)
        self._written: Written = lambda count: None
        self._task: asyncio.Task[None] | None = None
        self._before_end: Callable[[], Awaitable[None]] | None = None

    def end_after(self, ready: Callable[[], Awaitable[None]]) -> None:
        """Write entries about the job's end only after `ready` is over."""
        self._before_end = ready

    def on_written(self, written: Written) -> None:
        """Set the function that is told of safe entries."""
        self._written = written

    def fence(self) -> int:
        """Number of the term: every request says it, and etcd compares it with that of the lease."""
        return self._term

    def append(self, entries: list[JournalEntry]) -> None:
        """Write entries later, while everything else goes on."""
        self._writer.put(entries)
        if entries and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        while (request := self._writer.request()) is not None:
            if self._before_end is not None and isinstance(request, Append) and _ends(request):
                await self._before_end()
                self._before_end = None
            try:
                answer = await self._etcd.ask(request)
            except ProtocolError as error:
                self._refused(str(error))
                return
            count = self._writer.answered(answer)
            if self._writer.fenced:
                self._fenced(self._writer.fenced)
                return
            if self._writer.refused:
                self._refused(self._writer.refused)
                return
            if count:
                self._written(count)
            if isinstance(answer, Unanswered):
                await asyncio.sleep(_AGAIN_S)


def _ends(request: Append) -> bool:
    return any(entry.get("kind") == "ended" for entry in request.entries)


class Asker:
    """Asks etcd from a loop without holding it up. complain: called now and then with the reason of silence."""

    def __init__(self, etcd: Etcd, complain: Callable[[str], None]) -> None:
        self._etcd, self._complain = etcd, complain
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="etcd")
        self._silent_since_s: float | None = None
        self._said_s = 0.0

    async def ask(self, request: StoreRequest) -> StoreAnswer:
        """Answer of etcd. Raises: ProtocolError if etcd's data is not the job's."""
        answer = await asyncio.get_running_loop().run_in_executor(self._pool, self._etcd.ask, request)
        now_s = time.monotonic()
        if not isinstance(answer, Unanswered):
            self._silent_since_s = None
            return answer
        self._silent_since_s = self._silent_since_s or now_s
        if now_s - self._silent_since_s >= 1.0 and now_s - self._said_s >= _SAY_EVERY_S:
            self._said_s = now_s
            trouble = await asyncio.get_running_loop().run_in_executor(self._pool, self._etcd.trouble)
            self._complain(f"{trouble}; training goes on, decisions wait")
        return answer

    async def resign(self, lease: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, self._etcd.resign, lease)


class Tenure:
    """Holds the lease, once it has been won, until it is lost. seen: called in the loop, again and again, with the
    address of the coordinator that holds it, also if that is this one. deposed: called with the reason when it must not
    decide any more. may_lead: whether this one may take the lease now."""

    def __init__(
        self,
        etcd: Asker,
        candidate: Candidate,
        seen: Callable[[dict[str, Any]], None],
        may_lead: Callable[[], bool] = lambda: True,
    ) -> None:
        self._etcd, self._candidate, self._seen, self._may_lead = etcd, candidate, seen, may_lead
        self._deposed: Callable[[str], None] = lambda reason: None
        self._task: asyncio.Task[None] | None = None

    async def win(self, deposed: Callable[[str], None]) -> int:
        """Wait for the lease, however long it takes. Returns the term; the lease is renewed from then on."""
        self._deposed = deposed
        probing = asyncio.get_running_loop().create_task(self._probe_port())
        while not self._candidate.holds(now_ns()):
            await self._turn()
        probing.cancel()
        self._task = asyncio.get_running_loop().create_task(self._keep())
        return self._candidate.term

    @property
    def sudden(self) -> bool:
        return self._candidate.sudden

    def sure(self) -> bool:
        """Whether this coordinator may still send messages."""
        return self._candidate.holds(now_ns())

    def depose(self, reason: str) -> None:
        """Report that this coordinator must not decide any more; its process then ends."""
        self._deposed(reason)

    async def load(self) -> Loaded:
        """The journal that the earlier coordinators have left."""
        while True:
            answer = await self._etcd.ask(Load())
            if isinstance(answer, Loaded):
                return answer
            await asyncio.sleep(_AGAIN_S)

    async def resign(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._candidate.term and self._candidate.holder is not None:
            await self._etcd.resign(self._candidate.holder.lease)

    async def _probe_port(self) -> None:
        """Try again and again whether the holder's process still lives, by connecting to its host."""
        while True:
            holder = self._candidate.holder
            if holder is not None and holder.where:
                with contextlib.suppress(ProtocolError):  # the look at the lease reports that
                    there = checked_where(holder.where)
                    self._candidate.port_probed(now_ns(), holder.where, await listens(there["host"], there["port"]))
            await asyncio.sleep(_KNOCK_S)

    async def _keep(self) -> None:
        while not self._candidate.deposed(now_ns()):
            await self._turn()
        self._deposed("it could not renew its lease in time")

    async def _turn(self) -> None:
        request = self._candidate.request(now_ns())
        if isinstance(request, Campaign) and not self._may_lead():
            await asyncio.sleep(_LOOK_S)
            self._candidate.answered(now_ns(), Unanswered("others go first"))
        elif request is not None:
            # A late answer must not delay being deposed.
            asked = asyncio.ensure_future(self._etcd.ask(request))
            if self._candidate.term:
                left_s = (self._candidate.until_ns - now_ns()) / SECOND_NS
                await asyncio.wait([asked], timeout=max(0.0, left_s))
                if not asked.done():
                    return
            answer = await asked
            self._candidate.answered(now_ns(), answer)
            if self._candidate.holder is not None and self._candidate.holder.where:
                self._seen(self._candidate.holder.where)
        end_ns = (
            self._candidate.due_ns
            if not self._candidate.term
            else min(self._candidate.due_ns, self._candidate.until_ns)
        )
        await asyncio.sleep(max(0.0, (end_ns - now_ns()) / SECOND_NS))


class InOrder:
    """Carries out a coordinator's effects by `act`, each when the entries before it are safe."""

    def __init__(self, store: JournalStore, act: Callable[[CoordinatorEffect], None]) -> None:
        self._store, self._act = store, act
        self._held = HeldEffects()
        store.on_written(self._written)

    def take(self, effects: Iterable[CoordinatorEffect]) -> None:
        """Take in the coordinator's effects, in order."""
        entries, ready = self._held.take(effects)
        self._do(ready)
        if entries:
            self._store.append(entries)

    def _written(self, count: int) -> None:
        self._do(self._held.written(count))

    def _do(self, effects: Iterable[CoordinatorEffect]) -> None:
        for effect in effects:
            self._act(effect)


def stand_down(reason: str, exit_code: int = DEPOSED) -> NoReturn:
    """End this process at once: further messages of it would not count."""
    say(f"everstep coordinator: it was deposed: {reason}")
    os._exit(exit_code)


def checked_where(where: dict[str, Any]) -> dict[str, Any]:
    """Address of the lease's holder in the lease. Raises: ProtocolError if that is no coordinator's address."""
    known = {"pid": int, "host": str, "port": int, "tls": str, "ca": str}
    said = {name: value for name, value in where.items() if name != "place"}
    if set(said) != set(known) or any(type(said[name]) is not kind for name, kind in known.items()):
        raise ProtocolError(f"expected a coordinator's address in etcd, got {str(where)[:80]!r}")
    return said


def place_of(where: dict[str, Any]) -> str:
    """Word of the directory that the lease's holder leads in; "" if it does not say."""
    return str(where.get("place", ""))[:_MOST_WORD]


# ---- put together


@dataclass(frozen=True)
class Post:
    """A coordinator's job process, and its place. parent: pid of that process. host, port: where it listens; "": as the
    config says. owner: its name among those that may hold the job's lease, "" if there is no lease; job: as `Etcd` has
    it. term: as `FileStore` has it. copying_host: as `Succession` has it. down_since_unix_ns,
    cause: of its predecessor's end."""

    run_dir: Path
    parent: int = 0
    host: str = ""
    port: int = 0
    owner: str = ""
    job: str = ""
    term: int = 0
    copying_host: str = ""
    down_since_unix_ns: int = 0
    cause: Cause = Cause.UNKNOWN


async def open_journal(
    place: Post,
    config: Config,
    token: bytes,
    where: dict[str, Any],
    events: EventLog,
    directory: LedDirectory,
) -> tuple[Tenure | None, JournalStore]:
    """The journal, and the lease if there is one; then this waits for the lease, if need be for days. directory:
    decides whether this host may have it."""
    if not place.owner or config.control.etcd is None:
        journal = Journal(place.run_dir / JOURNAL_FILE)
        return None, FileStore(journal, events, place.term)
    lease_s, loop = config.control.lease_s, asyncio.get_running_loop()
    address = EtcdAddress.parse("control.etcd", config.control.etcd)
    access = find_access(address, config.control, os.environ)
    asked = Etcd(address, token, min(2.0, lease_s / 4), place.job, access, place.run_dir / NEWEST_FILE)
    etcd = Asker(asked, lambda text: warn(events, Why(Cause.LEASE, text)))
    path = place.run_dir / COORDINATOR_FILE
    mine = {**where, "place": directory.word}

    def seen(holder: dict[str, Any]) -> None:
        if holder != mine:  # its own address is announced when it listens
            directory.saw(place_of(holder))
            with contextlib.suppress(OSError):  # for example a full disk; it is announced again
                announce(path, checked_where(holder), anew=True)

    tenure = Tenure(etcd, Candidate(place.owner, mine, lease_s), seen, directory.may_lead)

    def deposed(reason: str) -> None:
        warn(events, Why(Cause.LEASE, f"the coordinator on {where['host']} was deposed: {reason}"))
        stand_down(reason)

    def refused(reason: str) -> None:
        warn(events, Why(Cause.LEASE, reason))
        os._exit(1)

    def leave() -> None:
        loop.create_task(_resign(tenure))

    loop.add_signal_handler(signal.SIGTERM, leave)
    term = await tenure.win(deposed)
    return tenure, EtcdStore(etcd, term, await tenure.load(), deposed, refused)


async def _resign(tenure: Tenure, exit_code: int = 0) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(tenure.resign(), _RESIGN_S)
    os._exit(exit_code)


async def make_known(path: Path, where: dict[str, Any], events: EventLog) -> None:
    """Write this coordinator's address into the run directory; if the disk refuses, try again. Meanwhile clients look
    at the predecessor's address, which is the same unless another program took the port."""
    warned = False
    while True:
        try:
            return announce(path, where)
        except OSError as error:
            if not warned:
                warned = True
                text = f"cannot write {path} ({error.strerror or error}), which still names an earlier coordinator"
                warn(events, Why(Cause.DISK, f"{text}: this one serves, and tries again"))
        await asyncio.sleep(_ANNOUNCE_S)


async def decline(tenure: Tenure, events: EventLog, error: OSError) -> None:
    """Give the lease to others, because this host cannot write the files that make its directory the job's. Its next
    life stands by again."""
    why = f"{error.strerror or error}, {error.filename}"
    text = f"this host cannot lead the job ({why}): it leaves the lease to other hosts"
    warn(events, Why(Cause.DISK, text))
    await _resign(tenure, DEPOSED)


def warn(events: EventLog, why: Why) -> None:
    """Write a warning for observers. Never raises because of the disk."""
    say(why.reason)
    events.write("warning", **vars(why))
