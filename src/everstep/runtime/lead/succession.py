"""A job's process whose place another host's may take, or that takes another's: by a lease, or by hand."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everstep.base.errors import EverstepError
from everstep.runtime.files.host_directory import word_in
from everstep.runtime.link.address import COORDINATOR_FILE, read_address


@dataclass(frozen=True)
class Succession:
    """Part of this process in leading the job. guest: the job was started on another host, and a signal ends only this
    host's part. owner: as `Holder` has it, "" without a lease; job: as `Etcd` has it. by_hand: this process leads in
    place of a lost one, as a user says. term: the number in the journal by which it leads without a lease: each
    takeover by hand has a higher one, and so has a job that begins after one. word: the one by which other hosts know
    the run directory of a job that begins (`host_directory.leave_word`), "" if they were not told. copying_host: this
    host's name, if the run directory is a copy that the head fills (`standby_files.CopyLink`); "" for the job's own
    directory."""

    guest: bool = False
    owner: str = ""
    job: str = ""
    by_hand: bool = False
    term: int = 0
    word: str = ""
    copying_host: str = ""

    @property
    def begins(self) -> bool:
        """Whether the job begins with this process, so that all files in its directory are old."""
        return not (self.guest or self.by_hand)

    def words(self, address: str) -> list[str]:
        """Words for the command line of the coordinator. address: of this host, which need not be the config's."""
        words = ["--owner", self.owner, "--job", self.job] if self.owner else []
        words += ["--copying-host", self.copying_host] if self.copying_host else []
        words += ["--host", address] if self.owner or self.by_hand else []
        return [*words, *(["--term", str(self.term)] if self.term else [])]


def new_owner() -> str:
    """Name that no other job process has."""
    return f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"


class Lead:
    """Whether this process's coordinator decides, by the address in its directory.

    Without a lease it always decides. address: of this host. tell: called with coordinator_leads or coordinator_follows
    when this host leads, or another one does, and with led_elsewhere when `elsewhere` becomes true: another host leads,
    in a directory of its own. A coordinator that does not reach etcd does not get to know that.
    """

    def __init__(self, run_dir: Path, succession: Succession, address: str, tell: Callable[[str], None]) -> None:
        self._path = run_dir / COORDINATOR_FILE
        self._leased, self._address, self._tell = bool(succession.owner), address, tell
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._own: set[tuple[str, int]] = set()
        self._follows = succession.guest
        self._told = self.here = not self._leased
        self.elsewhere = False

    @property
    def by_another(self) -> bool:
        """Whether another host leads, as far as is known; neither leads while this host's coordinator starts again."""
        return self.elsewhere or self._follows

    def look(self, pid: int) -> None:
        """Look at the address again. pid: of the coordinator of this process."""
        if not self._leased:
            return
        try:
            found = os.stat(self._path)
            seen = (pid, found.st_ino, found.st_mtime_ns)
            if seen == self._seen:
                return
            there = read_address(self._path)
        except (OSError, EverstepError):
            return
        self._seen = seen
        self._own.add((self._address, pid))
        self.here = (there.host, there.pid) == (self._address, pid)
        self._follows = (there.host, there.pid) not in self._own
        leads = self.here or (self._told and not self._follows)
        if leads != self._told:
            self._told = leads
            self._tell("coordinator_leads" if leads else "coordinator_follows")

    def heard(self, place: str) -> None:
        """The coordinator with which this process is connected leads in the directory with this word."""
        before, here = self.elsewhere, word_in(self._path.parent)
        self.elsewhere = self._leased and "" not in (here, place) and here != place
        if self.elsewhere and not before:
            self._tell("led_elsewhere")
