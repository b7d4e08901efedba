"""What a coordinator asks of the store in which lease and journal are, and what that answers. Pure data.

A request that was not answered (`Unanswered`) may have taken effect, may do so later, or never.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

JournalEntry = dict[str, Any]


@dataclass(frozen=True)
class Holder:
    """Who holds the lease. owner: a name that all coordinators of one job process share, one after the other, and
    nobody else. where: how it is reached, as coordinator.json says it; empty as long as nobody listens. lease: its
    number. term: when it came to be held, as a number that only grows."""

    owner: str
    where: JournalEntry
    lease: int
    term: int


# ---- requests


class Look(NamedTuple):
    """Who holds the lease? Answered by `HolderSeen`."""


class Campaign(NamedTuple):
    """Hold the lease for so long, unless somebody does. Whatever is answered, `Look` tells what has come of it."""

    owner: str
    where: JournalEntry
    ttl_s: int


class Claim(NamedTuple):
    """Say where the holder of this term is now: it holds the lease since an earlier life. `Look` tells what has come of
    it."""

    owner: str
    where: JournalEntry
    lease: int
    term: int


class Renew(NamedTuple):
    """Prolong the lease. Answered by `Renewed`."""

    lease: int


class Depose(NamedTuple):
    """The lease of this number is over: whoever held it is gone. Whatever is answered, `Look` tells what has come of
    it."""

    lease: int


class Load(NamedTuple):
    """All entries. Answered by `Loaded`."""


class Append(NamedTuple):
    """Write entries under this number, unless something is written there, or another term holds the lease.

    Answered by `Appended`, by `Taken`, or by `Fenced`. To ask it again reads back what has come of it the first time.
    """

    term: int
    number: int
    entries: list[JournalEntry]


class CompactPart(NamedTuple):
    """Keep these entries for the `Compact` of the same through and digest, as number 0, 1, ... of its parts; until then
    they are none of the journal's. Answered by `Appended` or `Fenced`."""

    term: int
    through: int
    digest: str
    number: int
    entries: list[JournalEntry]


class Compact(NamedTuple):
    """These entries, after those of so many parts, stand for all up to this number, which go; unless others do for as
    many or more. Answered by `Appended` or `Fenced`. digest: of the entries in the parts, "" without any."""

    term: int
    through: int
    entries: list[JournalEntry]
    parts: int = 0
    digest: str = ""


StoreRequest = Look | Campaign | Claim | Renew | Depose | Load | Append | CompactPart | Compact

# ---- answers


class Unanswered(NamedTuple):
    """Nothing is known of what has come of it. reason: for people."""

    reason: str


class HolderSeen(NamedTuple):
    """holder: None if the lease is free."""

    holder: Holder | None


class Renewed(NamedTuple):
    """It lasts so long from when it was asked for; 0: it has ended."""

    ttl_s: int


class Loaded(NamedTuple):
    """entries: oldest first. number: the next to write under."""

    entries: list[JournalEntry]
    number: int


class Appended(NamedTuple):
    """It is written, where most members have it."""


class Taken(NamedTuple):
    """Under this number these entries are written."""

    entries: list[JournalEntry]


class Fenced(NamedTuple):
    """Another term holds the lease, or none: nothing was written."""


class TooMuch(NamedTuple):
    """So much is not taken at once: nothing was written. reason: for people."""

    reason: str


StoreAnswer = Unanswered | HolderSeen | Renewed | Loaded | Appended | Taken | Fenced | TooMuch
