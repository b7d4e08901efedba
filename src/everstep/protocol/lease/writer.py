"""How a coordinator writes its journal into the store: in order, one request at a time, each entry once. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from everstep.base.errors import check
from everstep.protocol.lease.requests import (
    Append,
    Appended,
    Compact,
    Fenced,
    JournalEntry,
    StoreAnswer,
    StoreRequest,
    Taken,
)

MOST_AT_ONCE = 64
COMPACT_EVERY = 200
MOST_TERM = (1 << 62) - 1
_REPEATED = ("target", "ticket", "evict", "slot_lost", "grants")


class Writer:
    """Its journal is `entries`, and what is put. What is to be asked is `request`; its answer is told by `answered`.

    term: under which it writes. number: the next to write under. compact_every: after so many requests the journal is
    written anew, shorter. fenced: why it cannot write any more, "" if it can.
    """

    def __init__(
        self, term: int, number: int, entries: Iterable[JournalEntry], compact_every: int = COMPACT_EVERY
    ) -> None:
        self.fenced = ""
        self._compact_every = compact_every
        self._term, self._number = term, number
        self._journal = list(entries)
        self._waiting: deque[JournalEntry] = deque()
        self._asked: Append | Compact | None = None
        self._appends = 0

    @property
    def waiting(self) -> int:
        """How many entries are not known to be written."""
        return len(self._waiting) + (len(self._asked.entries) if isinstance(self._asked, Append) else 0)

    def put(self, entries: Iterable[JournalEntry]) -> None:
        """To be written after all that was put before."""
        self._waiting.extend(entries)

    def request(self) -> StoreRequest | None:
        """What is to be asked now, None if nothing is. What was not answered is asked again, to the letter."""
        if self.fenced:
            return None
        if self._asked is None and self._waiting:
            count = min(MOST_AT_ONCE, len(self._waiting))
            self._asked = Append(self._term, self._number, [self._waiting.popleft() for _ in range(count)])
        elif self._asked is None and self._appends >= self._compact_every:
            self._journal = compacted(self._journal)
            self._asked = Compact(self._term, self._number - 1, list(self._journal))
        return self._asked

    def answered(self, answer: StoreAnswer) -> int:
        """What was asked was answered, or will not be. Returns how many further entries are written."""
        asked = self._asked
        check(asked is not None, "an answer to nothing that was asked")
        if isinstance(answer, Fenced):
            self.fenced = "another coordinator holds the lease"
        elif isinstance(answer, Taken) and (not isinstance(asked, Append) or answer.entries != asked.entries):
            self.fenced = "the journal goes on with what this coordinator has not written"
        elif isinstance(answer, Appended | Taken):
            self._asked = None
            if isinstance(asked, Append):
                self._journal += asked.entries
                self._number, self._appends = self._number + 1, self._appends + 1
                return len(asked.entries)
            self._appends = 0
        return 0


def compacted(entries: Sequence[JournalEntry]) -> list[JournalEntry]:
    """Fewer entries that leave a coordinator as these do: of the plans only those in force and prepared, of what
    later entries say again only the last. What is not understood is kept, all of it if it is a plan."""
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
        elif _is_term(entry):
            found += [entry] if entry["term"] == max(terms) else []
        elif entry.get("kind") not in _REPEATED or last[_about(entry)] == number:
            found.append(entry)
    return found


def _is_term(entry: JournalEntry) -> bool:
    """Of a takeover of a journal that is a file: the highest says under which term to go on, wherever it stands."""
    return entry.get("kind") == "term" and type(entry.get("term")) is int and 0 <= entry["term"] <= MOST_TERM


def _about(entry: JournalEntry) -> tuple[object, ...]:
    """Entries about the same are superseded by the last of them."""
    return entry.get("kind"), entry.get("worker_id", entry.get("agent_id"))


def _plans_that_count(entries: Sequence[JournalEntry]) -> dict[int, JournalEntry]:
    """The plan in force, and the prepared one if there is one, by their numbers."""
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
