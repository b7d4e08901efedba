"""The journal of a job in etcd, and the snapshots that shorten it.

Each entry follows the one before it by its tag (`etcd_seals`), so none can be left out, put back or moved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.base.errors import ProtocolError
from everstep.base.etcd_address import EtcdAddress
from everstep.protocol.lease.requests import (
    Append,
    Appended,
    Compact,
    CompactPart,
    Fenced,
    JournalEntry,
    Load,
    Loaded,
    StoreAnswer,
    Taken,
    Unanswered,
)
from everstep.runtime.lead.etcd_gateway import Pair
from everstep.runtime.lead.etcd_keys import JOURNAL, LEASE, PARTS, SNAPSHOT, JobKeys, number_of, pairs_in, value_of
from everstep.runtime.lead.etcd_seals import TAG_BYTES, Chain, EtcdSeals, NewestEntry

_PAGE = 24  # an answer has to fit into the most bytes read of one
_DIGITS = 10


class EtcdJournal:
    """The journal of one life of the job. note: file for its newest known entry, None for none."""

    def __init__(self, address: EtcdAddress, keys: JobKeys, seals: EtcdSeals, note: Path | None) -> None:
        self._address, self._keys, self._seals = address, keys, seals
        self._chain = Chain(seals.life, note)
        self.close = self._chain.close

    def load(self, request: Load) -> StoreAnswer:
        first = self._keys.post("kv/range", self._keys.span(SNAPSHOT))
        revision = first.header.revision
        entries, newest = list[JournalEntry](), NewestEntry()
        for pair in first.kvs:
            said, newest = self._snapshot(pair)
            if parts := _whole(said.get("parts", 0)):
                folder = _folder(newest.number, str(said.get("digest")))
                entries, found = self._row(folder, 0, revision)
                if found != parts:
                    raise ProtocolError(f"expected {parts} parts of the journal under {self._address}, found {found}")
            entries += _entries(said.get("entries"))
        rows = [newest]
        more, number = self._row(JOURNAL, newest.number + 1, revision, rows)
        self._chain.loaded(rows)
        return Loaded(entries + more, number)

    def _snapshot(self, pair: Pair) -> tuple[dict[str, Any], NewestEntry]:
        """Content of a snapshot, and the newest entry that it stands for."""
        said = self._opened(SNAPSHOT, pair)
        through, link = _whole(said.get("through")), str(said.get("link"))
        return said, NewestEntry(through, bytes.fromhex(link), SNAPSHOT, number_of(pair.mod_revision))

    def _row(
        self, folder: str, number: int, revision: str, rows: list[NewestEntry] | None = None
    ) -> tuple[list[JournalEntry], int]:
        """The entries from this number on, and the number after them. rows: known earlier entries, if each has to
        follow the one before it; the new ones are added.

        Raises: ProtocolError if an entry is missing, or does not follow.
        """
        entries, more = list[JournalEntry](), True
        limits = {"revision": revision, "limit": str(_PAGE), "sort_target": "KEY", "sort_order": "ASCEND"}
        while more:
            span = self._keys.span(f"{folder}{number:0{_DIGITS}d}", f"{folder}:")
            page = self._keys.post("kv/range", {**span, **limits})
            for pair in page.kvs:
                name, expected = self._keys.name_of(pair), f"{folder}{number:0{_DIGITS}d}"
                if name != expected:
                    raise ProtocolError(
                        f"expected {expected} of the journal under {self._address}, found {name[:80]}: the entries "
                        "between are gone, so only a new job can start (--fresh)"
                    )
                entries += _entries(self._opened(name, pair, rows[-1].tag if rows else b"").get("entries"))
                if rows:
                    rows.append(_newest(number, name, value_of(pair), pair.mod_revision))
                number += 1
            more = page.more and bool(page.kvs)
        return entries, number

    def append(self, request: Append) -> StoreAnswer:
        """Add an entry, if the lease is still the one of its term and nothing is at its place."""
        name, before = f"{JOURNAL}{request.number:0{_DIGITS}d}", self._chain.tag(request.number - 1)
        value = self._seals.closed(name, {"term": request.term, "entries": request.entries}, before)
        compare = [self._keys.in_term(request.term), self._keys.compare(name, "CREATE", "create_revision", 0)]
        known = self._chain.newest
        if known.key:  # otherwise somebody has cut the journal, or a frozen request of an earlier life has shortened it
            compare.append(self._keys.compare(known.key, "MOD", "mod_revision", known.revision))
        there = [{"request_range": self._keys.span(LEASE)}, {"request_range": self._keys.span(name)}]
        asked = {"compare": compare, "success": [self._keys.put(name, value)], "failure": there}
        reply = self._keys.post("kv/txn", asked)
        if reply.succeeded:
            self._chain.add(_newest(request.number, name, value, reply.header.revision))
            return Appended()
        lease, written = pairs_in(reply)
        if not lease or number_of(lease[0].create_revision) != request.term:
            return Fenced()
        if not written:
            return self._look_back()
        entries = _entries(self._opened(name, written[0], before).get("entries"))
        self._chain.add(_newest(request.number, name, value_of(written[0]), written[0].mod_revision))
        return Taken(entries)

    def _look_back(self) -> StoreAnswer:
        """Find out why the newest entry is not at its place. Raises: ProtocolError, unless a snapshot stands for it."""
        known = self._chain.newest
        for pair in self._keys.pairs(SNAPSHOT):
            found = self._snapshot(pair)[1]
            if found[:2] == known[:2]:
                self._chain.shortened(found.number, SNAPSHOT, found.revision)
                return Unanswered("the journal was shortened meanwhile")
        raise ProtocolError(
            f"entry {known.number} of the journal under {self._address} differs from the entry of this coordinator: "
            "it was changed or removed"
        )

    def part(self, request: CompactPart) -> StoreAnswer:
        name = f"{_folder(request.through, request.digest)}{request.number:0{_DIGITS}d}"
        said = self._keys.put(name, self._seals.closed(name, {"entries": request.entries}))
        done = self._keys.post("kv/txn", {"compare": [self._keys.in_term(request.term)], "success": [said]}).succeeded
        return Appended() if done else Fenced()

    def compact(self, request: Compact) -> StoreAnswer:
        """Shorten the journal, unless a later snapshot than the one before this has come meanwhile: the request may
        take effect long after it was sent."""
        revision = 0
        for pair in self._keys.pairs(SNAPSHOT):
            revision, through = number_of(pair.mod_revision), self._snapshot(pair)[1].number
            if through >= request.through:
                self._chain.shortened(through, SNAPSHOT, revision)
                return Appended()
        said = {"through": request.through, "entries": request.entries, "link": self._chain.tag(request.through).hex()}
        if request.parts:
            said |= {"parts": request.parts, "digest": request.digest}
        gone = [
            self._keys.span(JOURNAL, f"{JOURNAL}{request.through + 1:0{_DIGITS}d}"),
            self._keys.span(
                PARTS, f"{PARTS}{request.through:0{_DIGITS}d}"
            ),  # parts of this snapshot and of later ones stay
        ]
        mine = self._keys.put(SNAPSHOT, self._seals.closed(SNAPSHOT, said))
        done = [mine, *({"request_delete_range": span} for span in gone)]
        compare = [self._keys.in_term(request.term), self._keys.compare(SNAPSHOT, "MOD", "mod_revision", revision)]
        there = [{"request_range": self._keys.span(LEASE)}]
        asked = {"compare": compare, "success": done, "failure": there}
        reply = self._keys.post("kv/txn", asked)
        if reply.succeeded:
            self._chain.shortened(request.through, SNAPSHOT, number_of(reply.header.revision))
            return Appended()
        lease = pairs_in(reply)[0]
        if not lease or number_of(lease[0].create_revision) != request.term:
            return Fenced()
        return Unanswered("the journal was shortened meanwhile")  # the next request shows which coordinator did

    def _opened(self, name: str, pair: Pair, before: bytes = b"") -> dict[str, Any]:
        """Content of an entry. Raises: ProtocolError unless it was written there with the job's token, in this life."""
        return self._seals.opened(name, value_of(pair), before)


def _folder(through: int, digest: str) -> str:
    """Folder of the parts of a snapshot."""
    return f"{PARTS}{through:0{_DIGITS}d}-{digest}/"


def _newest(number: int, name: str, value: bytes, revision: str) -> NewestEntry:
    return NewestEntry(number, value[:TAG_BYTES], name, number_of(revision))


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 10**_DIGITS:
        raise ProtocolError(f"expected a number of the journal, got {str(value)[:40]!r}")
    return value


def _entries(value: Any) -> list[JournalEntry]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ProtocolError("expected entries of the journal in etcd, found something else")
    return value
