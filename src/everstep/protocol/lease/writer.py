"""How a coordinator writes its journal into the store: in order, one request at a time, each entry once. Pure."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Sequence

from everstep.base.errors import check
from everstep.protocol.lease.requests import (
    Append,
    Appended,
    Compact,
    CompactPart,
    Fenced,
    JournalEntry,
    StoreAnswer,
    StoreRequest,
    Taken,
    TooMuch,
)

MOST_AT_ONCE = 64
MOST_BYTES = 1 << 20
"""Largest JSON in a request, which is sent deflated: a store limits requests (etcd 1.5 MiB: --max-request-bytes)."""
COMPACT_EVERY = 200
MOST_TERM = (1 << 62) - 1
_REPEATED = ("target", "ticket", "settled", "evict", "slot_lost", "cell", "grants")


class Writer:
    """The journal is `entries` and those that are put. The next request is `request`; `answered` takes its answer.

    term: that writes. number: the next to write under. compact_every: number of requests after which the journal is
    rewritten, shorter. most_bytes: of entries in one request, unless it is one entry. fenced: why it cannot write
    any more, "" if it can; refused: why no coordinator could.
    """

    def __init__(
        self,
        term: int,
        number: int,
        entries: Iterable[JournalEntry],
        compact_every: int = COMPACT_EVERY,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.fenced = self.refused = ""
        self._compact_every, self._most_bytes = compact_every, most_bytes
        self._term, self.number = term, number
        self._journal = list(entries)
        self._waiting: deque[JournalEntry] = deque()
        self._shortening: deque[CompactPart | Compact] = deque()
        self._asked: Append | CompactPart | Compact | None = None
        self._appends = 0

    @property
    def waiting(self) -> int:
        """Number of entries that are not known to be written."""
        return len(self._waiting) + (len(self._asked.entries) if isinstance(self._asked, Append) else 0)

    def put(self, entries: Iterable[JournalEntry]) -> None:
        self._waiting.extend(entries)

    def request(self) -> StoreRequest | None:
        """The next request, None if there is none. An unanswered one is repeated literally."""
        if self.fenced or self.refused:
            return None
        if self._asked is None and self._waiting:
            self._asked = Append(self._term, self.number, self._next())
        elif self._asked is None:
            if self._appends >= self._compact_every and not self._shortening:
                self._shorten()
            self._asked = self._shortening.popleft() if self._shortening else None
        return self._asked

    def answered(self, answer: StoreAnswer) -> int:
        """The request was answered, or will not be. Returns the number of further entries written."""
        asked = self._asked
        check(asked is not None, "an answer to nothing that was asked")
        if isinstance(answer, Fenced):
            self.fenced = "another coordinator holds the lease"
        elif isinstance(answer, Taken) and (not isinstance(asked, Append) or answer.entries != asked.entries):
            self.fenced = "the journal goes on with what this coordinator has not written"
        elif isinstance(answer, TooMuch) and asked is not None:
            self._asked = None
            self._ask_less(asked, answer.reason)
        elif isinstance(answer, Appended | Taken):
            self._asked = None
            if isinstance(asked, Append):
                self._journal += asked.entries
                self.number, self._appends = self.number + 1, self._appends + 1
                return len(asked.entries)
            if isinstance(asked, Compact):
                self._appends = 0
        return 0

    def _next(self) -> list[JournalEntry]:
        """Entries of the next request."""
        found = [self._waiting.popleft()]
        room = self._most_bytes - (_size(found[0]) if self._waiting else 0)
        while self._waiting and len(found) < MOST_AT_ONCE:
            room -= _size(self._waiting[0])
            if room < 0:
                break
            found.append(self._waiting.popleft())
        return found

    def _shorten(self) -> None:
        """A long rewrite goes in parts, which count with the last request. Their digest tells them from those of an
        earlier life of the same term, which may still arrive."""
        self._journal = compacted(self._journal)
        through, rest = self.number - 1, list(self._journal)
        parts = _parts(rest, self._most_bytes)
        if len(parts) <= 1:
            self._shortening.append(Compact(self._term, through, rest))
            return
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
        for number, entries in enumerate(parts):
            self._shortening.append(CompactPart(self._term, through, digest, number, entries))
        self._shortening.append(Compact(self._term, through, [], len(parts), digest))

    def _ask_less(self, asked: Append | CompactPart | Compact, reason: str) -> None:
        """The last request was too large."""
        self._most_bytes = min(self._most_bytes, sum(map(_size, asked.entries))) // 2
        if not isinstance(asked, Append):
            self._shortening.clear()
            self._appends = 0  # later, in smaller parts; until then the journal is as it was
        elif len(asked.entries) > 1:
            self._waiting.extendleft(reversed(asked.entries))
        else:
            kind, size = asked.entries[0].get("kind"), _size(asked.entries[0])
            self.refused = (
                f"etcd does not take an entry ({kind}) of {size} bytes before they are compressed: {reason}; start its"
                " members with a larger --max-request-bytes"
            )


def _size(entry: JournalEntry) -> int:
    return len(json.dumps(entry, separators=(",", ":")))


def _parts(entries: Iterable[JournalEntry], most_bytes: int) -> list[list[JournalEntry]]:
    """All entries in order, in pieces of at most so many bytes, or one entry."""
    parts: list[list[JournalEntry]] = []
    room = 0
    for entry in entries:
        room -= (size := _size(entry))
        if room < 0:
            parts.append([])
            room = most_bytes - size
        parts[-1].append(entry)
    return parts


def compacted(entries: Sequence[JournalEntry]) -> list[JournalEntry]:
    """Fewer entries that restore the same coordinator: of the plans only those in force and prepared, of entries
    that repeat each other only the last. A plan says itself which doubt was over before it. Entries of an unknown kind
    are kept; a plan that cannot be read keeps everything."""
    try:
        plans = _plans_that_count(entries)
    except (KeyError, TypeError):
        return list(entries)
    last = {_about(entry): number for number, entry in enumerate(entries)}
    terms = [entry["term"] for entry in entries if _is_term(entry)]
    found: list[JournalEntry] = []
    for number, entry in enumerate(entries):
        if entry.get("kind") in ("plan", "entered"):
            found += [plans[number]] if number in plans else []
        elif entry.get("kind") == "settled" and number < min(plans, default=0):
            continue
        elif _is_term(entry):
            found += [entry] if entry["term"] == max(terms) else []
        elif entry.get("kind") not in _REPEATED or last[_about(entry)] == number:
            found.append(entry)
    return found


def _is_term(entry: JournalEntry) -> bool:
    """Entries of a takeover of a file journal: the highest says under which term to go on, wherever it is."""
    return entry.get("kind") == "term" and type(entry.get("term")) is int and 0 <= entry["term"] <= MOST_TERM


def _about(entry: JournalEntry) -> tuple[object, ...]:
    """Entries about the same subject: the last of them counts."""
    return entry.get("kind"), entry.get("worker_id", entry.get("agent_id"))


def _plans_that_count(entries: Sequence[JournalEntry]) -> dict[int, JournalEntry]:
    """The numbers of the plan in force, and of the prepared one if there is one."""
    in_force: int | None = None
    prepared: int | None = None
    generation = 0
    for number, entry in enumerate(entries):
        if entry.get("kind") == "entered":
            if prepared is not None and entries[prepared]["plan"]["generation"] == entry["generation"]:
                in_force, prepared = prepared, None
        elif entry.get("kind") == "plan" and entry["plan"]["generation"] > generation:
            plan, generation = entry["plan"], entry["plan"]["generation"]
            if plan.get("prepared", False) and in_force is not None and not entry.get("adopted"):
                prepared = number
            else:
                in_force, prepared = number, None
    found = {} if prepared is None else {prepared: entries[prepared]}
    if in_force is not None:  # adopted: it counts at once, whatever it was made for
        found[in_force] = {**entries[in_force], "adopted": True}
    return found
