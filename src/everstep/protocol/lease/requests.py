"""Requests of a coordinator to the store that holds lease and journal, and the answers. Pure data. A request that
was not answered (`Unanswered`) may have taken effect, may do so later, or never.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

JournalEntry = dict[str, Any]


@dataclass(frozen=True)
class Holder:
    """The holder of the lease. owner: a name shared by the consecutive coordinators of one job process, and nobody
    else. where: its address, as in coordinator.json; empty while it does not listen. lease: its number. term: grows
    with each change of hands."""

    owner: str
    where: JournalEntry
    lease: int
    term: int


# ---- requests


class Look(NamedTuple):
    """Who holds the lease? Answered by `HolderSeen`."""


class Campaign(NamedTuple):
    """Take the lease for this long, unless it is held. `Look` shows the result, whatever the answer."""

    owner: str
    where: JournalEntry
    ttl_s: int


class Claim(NamedTuple):
    """Set the present address of this term's holder, which has held the lease since an earlier life. `Look` shows
    the result."""

    owner: str
    where: JournalEntry
    lease: int
    term: int


class Renew(NamedTuple):
    """Renew the lease. Answered by `Renewed`."""

    lease: int


class Depose(NamedTuple):
    """End the lease of this number: its holder is gone. `Look` shows the result, whatever the answer."""

    lease: int


class Load(NamedTuple):
    """Load all entries. Answered by `Loaded`."""


class Append(NamedTuple):
    """Write entries under this number, unless it is taken, or another term holds the lease. Answered by `Appended`,
    `Taken`, or `Fenced`. A repeated request reads back the result of the first."""

    term: int
    number: int
    entries: list[JournalEntry]


class CompactPart(NamedTuple):
    """Store these entries for the `Compact` with the same `through` and digest, as number 0, 1, ... of its parts;
    until then they are not part of the journal. Answered by `Appended` or `Fenced`."""

    term: int
    through: int
    digest: str
    number: int
    entries: list[JournalEntry]


class Compact(NamedTuple):
    """Replace all entries up to this number by these, after those of so many parts, unless others already replace as
    many or more. Answered by `Appended` or `Fenced`. digest: of the entries in the parts, "" without any."""

    term: int
    through: int
    entries: list[JournalEntry]
    parts: int = 0
    digest: str = ""


StoreRequest = Look | Campaign | Claim | Renew | Depose | Load | Append | CompactPart | Compact

# ---- answers


class Unanswered(NamedTuple):
    """The result of a request is unknown. reason: for people."""

    reason: str


class HolderSeen(NamedTuple):
    """holder: None if the lease is free."""

    holder: Holder | None


class Renewed(NamedTuple):
    """Time for which the lease is renewed, from the request on; 0: it has ended."""

    ttl_s: int


class Loaded(NamedTuple):
    """entries: oldest first. number: the next to write under."""

    entries: list[JournalEntry]
    number: int


class Appended(NamedTuple):
    """The entries are written, at most members of the store."""


class Taken(NamedTuple):
    """This number is taken by these entries."""

    entries: list[JournalEntry]


class Fenced(NamedTuple):
    """Another term holds the lease, or none does: nothing was written."""


class TooMuch(NamedTuple):
    """The request is too large: nothing was written. reason: for people."""

    reason: str


StoreAnswer = Unanswered | HolderSeen | Renewed | Loaded | Appended | Taken | Fenced | TooMuch
