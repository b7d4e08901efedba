"""The lease and the journal of a job in etcd.

Every entry bears a tag that only the job's token makes, in this life of the job and in this order (`etcd_seals`). A
stranger who can write into etcd can therefore stop a job, but cannot tell it anything or put old entries back. Source:
etcd.io/docs, "gRPC gateway" and "API reference" (txn, lease).
"""

from __future__ import annotations

import base64
import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from everstep.base.errors import ConfigError, NoHead, ProtocolError
from everstep.base.etcd_address import EtcdAddress
from everstep.protocol.lease.requests import (
    Append,
    Appended,
    Campaign,
    Claim,
    Compact,
    CompactPart,
    Depose,
    Fenced,
    Holder,
    HolderSeen,
    JournalEntry,
    Load,
    Loaded,
    Look,
    Renew,
    Renewed,
    StoreAnswer,
    StoreRequest,
    Taken,
    TooMuch,
    Unanswered,
)
from everstep.runtime.lead.etcd_access import NO_ACCESS, EtcdAccess
from everstep.runtime.lead.etcd_gateway import Gateway, NoReply, Pair, Reply, TooLarge, Unwelcome
from everstep.runtime.lead.etcd_seals import TAG_BYTES, Chain, EtcdSeals, NewestEntry

LEASE, JOB, SNAPSHOT, PARTS, JOURNAL = "/lease", "/job", "/snapshot", "/snapshot/", "/journal/"
TERM = "/term"
"""Key written with each lease; the next lease names the revision of it that it follows."""
_PAGE = 24  # an answer has to fit into the most bytes read of one
_DIGITS = 10
_HOLD_S = 60.0
_RENEWALS = 5


class Announced(NamedTuple):
    """A job's announcement. job: its name, as `Etcd` has it: the announcement's revision, and the job's life."""

    facts: dict[str, Any]
    job: str


class _Seen(NamedTuple):
    """The newest lease that this process has seen: term (the revision since which somebody holds it), claim (number of
    the holder's last statement), revision of that statement, and after (revision of the term that it follows)."""

    term: int = 0
    claim: int = 0
    revision: int = 0
    after: int = 0


class Etcd:
    """Answers the requests of coordinators (`ask`), and knows which job it is for. Thread-safe.

    token: the job's. timeout_s: for one request to one member. job: `Announced.job` of the job that may have the lease,
    and is believed; "": any, the last that has begun. access: this host's credentials. note: file for the newest known
    entry of the journal; None for none.

    Raises: ConfigError if httpx is not installed.
    """

    def __init__(
        self,
        address: EtcdAddress,
        token: bytes,
        timeout_s: float,
        job: str = "",
        access: EtcdAccess = NO_ACCESS,
        note: Path | None = None,
    ) -> None:
        self.address = address
        self.job = job
        self._token, self._note = token, note
        self._of_job = EtcdSeals(token, address.prefix)
        self._after: int | None = None
        self._live(job.partition(".")[2])
        self._gateway = Gateway(address, timeout_s, access)
        self._post = self._gateway.post

    def close(self) -> None:
        self._chain.close()
        self._gateway.close()

    def _live(self, life: str) -> None:
        """Believe entries of this life from now on, and no others."""
        self._seals, self._seen = EtcdSeals(self._token, self.address.prefix, life), _Seen()
        self._chain = Chain(life, self._note)

    def ask(self, request: StoreRequest) -> StoreAnswer:
        """Answer a request. Failures of etcd raise nothing; data that is not the job's own raises `ProtocolError`."""
        try:
            return _MEANS[type(request)](self, request)
        except TooLarge as error:
            return TooMuch(str(error))
        except NoReply as error:
            return Unanswered(str(error))

    # ---- lease and journal

    def _look(self, request: Look) -> StoreAnswer:
        names = [self._span(JOB, ""), self._span(LEASE, ""), {**self._span(TERM, ""), "keys_only": True}]
        job, lease, term = _found(self._post("kv/txn", {"success": [{"request_range": name} for name in names]}))
        self._begun(job)
        holder = self._holder(lease)
        self._after = _int(term[0].mod_revision) if term else 0
        return HolderSeen(holder)

    def _begun(self, pairs: list[Pair]) -> dict[str, Any] | None:
        """The job's announcement; its entries are believed from now on.

        Raises: ProtocolError if it is another job than `job`, or of an older version.
        """
        if not pairs:
            return None
        facts = self._of_job.opened(JOB, _value(pairs[0]))
        life, where = facts.pop("life", None), f"under {self.address}"
        if not isinstance(life, str) or not life:
            raise ProtocolError(
                f"{where} is a job that an older version of Everstep began: end it with that version, choose another"
                f" prefix or remove its keys (etcdctl del --prefix {self.address.prefix}/)"
            )
        if life != self._seals.life:
            if self.job:
                raise ProtocolError(f"{where} another job has begun, or was restored, after this one")
            self._live(life)
        return facts

    def _holder(self, pairs: list[Pair]) -> Holder | None:
        if not pairs:
            return None
        said = self._opened(LEASE, pairs[0])
        try:
            owner, where, lease = str(said["owner"]), dict(said["where"]), int(said["lease"])
            seen = _Seen(
                *(_int(pairs[0].create_revision), int(said["claim"])),
                *(_int(pairs[0].mod_revision), int(said["after"])),
            )
        except (KeyError, TypeError, ValueError):
            raise ProtocolError(
                f"expected the holder of the lease under {self.address}, found something else"
            ) from None
        known = self._seen
        follows = seen.after == known.after if seen.term == known.term else seen.after >= known.term
        if lease != _int(pairs[0].lease) or seen < known or not follows:
            raise ProtocolError(
                f"what etcd has under {self.address.prefix}{LEASE} is older than before: somebody has restored it"
            )
        self._seen = seen
        return Holder(owner, where, lease, seen.term)

    def _lease(self, owner: str, where: dict[str, Any], lease: int, after: int = 0, claim: int = 0) -> dict[str, Any]:
        said = {"owner": owner, "where": where, "lease": lease, "after": after, "claim": claim}
        return self._put(LEASE, self._seals.closed(LEASE, said), lease)

    def _campaign(self, request: Campaign) -> StoreAnswer:
        if self._after is None:
            self._look(Look())
        after = self._after or 0
        lease = _int(self._post("lease/grant", {"TTL": str(request.ttl_s)}).ID)
        free = [
            self._compare(LEASE, "CREATE", "create_revision", 0),
            self._compare(TERM, "MOD", "mod_revision", after),
        ]
        if self.job:
            free.append(self._compare(JOB, "MOD", "mod_revision", int(self.job.partition(".")[0])))
        mine = [self._lease(request.owner, request.where, lease, after), self._put(TERM, b"")]
        if not self._post("kv/txn", {"compare": free, "success": mine}).succeeded:
            self.resign(lease)
        return Appended()

    def _claim(self, request: Claim) -> StoreAnswer:
        if self._seen.term == request.term:  # otherwise the lease has been lost since: a look says so
            seen = self._seen
            mine = self._lease(request.owner, request.where, request.lease, seen.after, seen.claim + 1)
            same = [self._term(request.term), self._compare(LEASE, "MOD", "mod_revision", seen.revision)]
            self._post("kv/txn", {"compare": same, "success": [mine]})
        return Appended()

    def _renew(self, request: Renew) -> StoreAnswer:
        reply = self._post("lease/keepalive", {"ID": str(request.lease)})
        return Renewed(_int(str(reply.result.get("TTL", "0"))))

    def _depose(self, request: Depose) -> StoreAnswer:
        self._post("lease/revoke", {"ID": str(request.lease)})
        return Appended()

    def resign(self, lease: int) -> None:
        with contextlib.suppress(NoReply):
            self._post("lease/revoke", {"ID": str(lease)})

    def _load(self, request: Load) -> StoreAnswer:
        first = self._post("kv/range", self._span(SNAPSHOT, ""))
        revision = first.header.revision
        entries, newest = list[JournalEntry](), NewestEntry()
        for pair in first.kvs:
            said, newest = self._snapshot(pair)
            if parts := _whole(said.get("parts", 0)):
                folder = _folder(newest.number, str(said.get("digest")))
                entries, found = self._row(folder, 0, revision)
                if found != parts:
                    raise ProtocolError(f"expected {parts} parts of the journal under {self.address}, found {found}")
            entries += _entries(said.get("entries"))
        rows = [newest]
        more, number = self._row(JOURNAL, newest.number + 1, revision, rows)
        self._chain.loaded(rows)
        return Loaded(entries + more, number)

    def _snapshot(self, pair: Pair) -> tuple[dict[str, Any], NewestEntry]:
        """Content of a snapshot, and the newest entry that it stands for."""
        said = self._opened(SNAPSHOT, pair)
        through, link = _whole(said.get("through")), str(said.get("link"))
        return said, NewestEntry(through, bytes.fromhex(link), SNAPSHOT, _int(pair.mod_revision))

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
            span = self._span(f"{folder}{number:0{_DIGITS}d}", f"{folder}:")
            page = self._post("kv/range", {**span, **limits})
            for pair in page.kvs:
                name, expected = _text(pair.key).removeprefix(self.address.prefix), f"{folder}{number:0{_DIGITS}d}"
                if name != expected:
                    raise ProtocolError(
                        f"expected {expected} of the journal under {self.address}, found {name[:80]}: the entries "
                        "between are gone, so only a new job can start (--fresh)"
                    )
                entries += _entries(self._opened(name, pair, rows[-1].tag if rows else b"").get("entries"))
                if rows:
                    rows.append(_newest(number, name, _value(pair), pair.mod_revision))
                number += 1
            more = page.more and bool(page.kvs)
        return entries, number

    def _append(self, request: Append) -> StoreAnswer:
        name, before = f"{JOURNAL}{request.number:0{_DIGITS}d}", self._chain.tag(request.number - 1)
        value = self._seals.closed(name, {"term": request.term, "entries": request.entries}, before)
        compare = [self._term(request.term), self._compare(name, "CREATE", "create_revision", 0)]
        known = self._chain.newest
        if known.key:  # otherwise somebody has cut the journal, or a frozen request of an earlier life has shortened it
            compare.append(self._compare(known.key, "MOD", "mod_revision", known.revision))
        there = [{"request_range": self._span(LEASE, "")}, {"request_range": self._span(name, "")}]
        asked = {"compare": compare, "success": [self._put(name, value)], "failure": there}
        reply = self._post("kv/txn", asked)
        if reply.succeeded:
            self._chain.add(_newest(request.number, name, value, reply.header.revision))
            return Appended()
        lease, written = _found(reply)
        if not lease or _int(lease[0].create_revision) != request.term:
            return Fenced()
        if not written:
            return self._look_back()
        entries = _entries(self._opened(name, written[0], before).get("entries"))
        self._chain.add(_newest(request.number, name, _value(written[0]), written[0].mod_revision))
        return Taken(entries)

    def _look_back(self) -> StoreAnswer:
        """Find out why the newest entry is not at its place. Raises: ProtocolError, unless a snapshot stands for it."""
        known = self._chain.newest
        for pair in self._get(SNAPSHOT):
            found = self._snapshot(pair)[1]
            if found[:2] == known[:2]:
                self._chain.shortened(found.number, SNAPSHOT, found.revision)
                return Unanswered("the journal was shortened meanwhile")
        raise ProtocolError(
            f"entry {known.number} of the journal under {self.address} differs from the entry of this coordinator: "
            "it was changed or removed"
        )

    def _part(self, request: CompactPart) -> StoreAnswer:
        name = f"{_folder(request.through, request.digest)}{request.number:0{_DIGITS}d}"
        said = self._put(name, self._seals.closed(name, {"entries": request.entries}))
        done = self._post("kv/txn", {"compare": [self._term(request.term)], "success": [said]}).succeeded
        return Appended() if done else Fenced()

    def _compact(self, request: Compact) -> StoreAnswer:
        """Shorten the journal, unless a later snapshot than the one before this has come meanwhile: the request may
        take effect long after it was sent."""
        revision = 0
        for pair in self._get(SNAPSHOT):
            revision, through = _int(pair.mod_revision), self._snapshot(pair)[1].number
            if through >= request.through:
                self._chain.shortened(through, SNAPSHOT, revision)
                return Appended()
        said = {"through": request.through, "entries": request.entries, "link": self._chain.tag(request.through).hex()}
        if request.parts:
            said |= {"parts": request.parts, "digest": request.digest}
        gone = [
            self._span(JOURNAL, f"{JOURNAL}{request.through + 1:0{_DIGITS}d}"),
            self._span(PARTS, f"{PARTS}{request.through:0{_DIGITS}d}"),  # parts of this snapshot and of later ones stay
        ]
        mine = self._put(SNAPSHOT, self._seals.closed(SNAPSHOT, said))
        done = [mine, *({"request_delete_range": span} for span in gone)]
        compare = [self._term(request.term), self._compare(SNAPSHOT, "MOD", "mod_revision", revision)]
        there = [{"request_range": self._span(LEASE, "")}]
        asked = {"compare": compare, "success": done, "failure": there}
        reply = self._post("kv/txn", asked)
        if reply.succeeded:
            self._chain.shortened(request.through, SNAPSHOT, _int(reply.header.revision))
            return Appended()
        lease = _found(reply)[0]
        if not lease or _int(lease[0].create_revision) != request.term:
            return Fenced()
        return Unanswered("the journal was shortened meanwhile")  # the next request shows which coordinator did

    # ---- the job

    def begin(self, facts: dict[str, Any], owner: str, ttl_s: int) -> Holder | None:
        """Announce this job, with a life of its own and an empty journal, and hold the lease for its first coordinator.
        If somebody holds the lease, nothing is announced, and the holder is returned.

        Raises: NoHead if etcd does not answer; ConfigError if it does not let this host in.
        """
        lease, life = _int(self._surely("lease/grant", {"TTL": str(ttl_s)}).ID), secrets.token_hex(16)
        free = [self._compare(LEASE, "CREATE", "create_revision", 0)]
        gone = [{"request_delete_range": self._span(JOURNAL, f"{JOURNAL}:")}]
        gone += [{"request_delete_range": self._span(*span)} for span in ((SNAPSHOT, ""), (PARTS, f"{PARTS}:"))]
        held = [{"request_range": self._span(name, "")} for name in (JOB, LEASE)]
        said = {"owner": owner, "where": {}, "lease": lease, "after": 0, "claim": 0}
        mine = [
            self._put(JOB, self._of_job.closed(JOB, {**facts, "life": life})),
            self._put(LEASE, EtcdSeals(self._token, self.address.prefix, life).closed(LEASE, said), lease),
            self._put(TERM, b""),
        ]
        reply = self._surely("kv/txn", {"compare": free, "success": [*mine, *gone], "failure": held})
        revision = reply.header.revision
        if not reply.succeeded:
            job, there = _found(reply)
            self._begun(job)
            holder = self._holder(there)
            if not job or holder is None or holder.owner != owner:  # otherwise it took effect without an answer
                return holder
            revision = job[0].mod_revision
        self.job = f"{_int(revision)}.{life}"
        self._live(life)
        threading.Thread(target=self._hold, args=(lease, ttl_s), name="lease", daemon=True).start()
        return None

    def _hold(self, lease: int, ttl_s: int) -> None:
        """Prolong the lease until the coordinator, which says where it is, does it."""
        end_s = time.monotonic() + _HOLD_S
        while time.monotonic() < end_s:
            with contextlib.suppress(ProtocolError):
                self.ask(Renew(lease))
                seen = self.ask(Look())
                if isinstance(seen, HolderSeen) and (seen.holder is None or seen.holder.where):
                    break
            time.sleep(ttl_s / _RENEWALS)
        self.close()

    def reach(self) -> None:
        """Check that etcd answers, with a request that needs no token of the job. Raises: as `announced`."""
        self._surely("kv/range", {**self._span(JOB, ""), "keys_only": True})

    def announced(self) -> Announced | None:
        """The announced job, None if there is none.

        Raises: NoHead if etcd does not answer; ConfigError if it does not let this host in.
        """
        pairs = self._surely("kv/range", self._span(JOB, "")).kvs
        facts = self._begun(pairs)
        return None if facts is None else Announced(facts, f"{_int(pairs[0].mod_revision)}.{self._seals.life}")

    def _surely(self, what: str, asked: dict[str, Any]) -> Reply:
        """Ask all members until one answers; the request may take effect more than once."""
        for _ in self.address.members:
            try:
                return self._post(what, asked)
            except Unwelcome as error:
                raise ConfigError(str(error)) from None
            except NoReply:
                continue
        raise NoHead(self.trouble())

    def trouble(self) -> str:
        return self._gateway.trouble()

    # ---- keys and values

    def _name(self, name: str) -> str:
        return base64.b64encode(f"{self.address.prefix}{name}".encode()).decode()

    def _span(self, name: str, end: str) -> dict[str, str]:
        return {"key": self._name(name), **({"range_end": self._name(end)} if end else {})}

    def _compare(self, name: str, target: str, field: str, value: int) -> dict[str, Any]:
        return {"key": self._name(name), "target": target, "result": "EQUAL", field: str(value)}

    def _term(self, term: int) -> dict[str, Any]:
        return self._compare(LEASE, "CREATE", "create_revision", term)

    def _put(self, name: str, value: bytes, lease: int = 0) -> dict[str, Any]:
        text = base64.b64encode(value).decode()
        return {"request_put": {"key": self._name(name), "value": text, "lease": str(lease)}}

    def _opened(self, name: str, pair: Pair, before: bytes = b"") -> dict[str, Any]:
        """Content of an entry. Raises: ProtocolError unless it was written there with the job's token, in this life."""
        return self._seals.opened(name, _value(pair), before)

    def _get(self, name: str) -> list[Pair]:
        return self._post("kv/range", self._span(name, "")).kvs


def _folder(through: int, digest: str) -> str:
    """Folder of the parts of a snapshot."""
    return f"{PARTS}{through:0{_DIGITS}d}-{digest}/"


def _found(reply: Reply) -> list[list[Pair]]:
    """Pairs found, by requested range."""
    return [[] if one.response_range is None else one.response_range.kvs for one in reply.responses]


def _newest(number: int, name: str, value: bytes, revision: str) -> NewestEntry:
    return NewestEntry(number, value[:TAG_BYTES], name, _int(revision))


def _value(pair: Pair) -> bytes:
    try:
        return base64.b64decode(pair.value, validate=True)
    except ValueError:
        return b""


def _int(text: str) -> int:
    """Number in etcd's notation. Raises: NoReply for anything else."""
    if not text.isascii() or not text.isdecimal() or len(text) > 20:
        raise NoReply(f"expected a number of etcd, got {text[:40]!r}")
    return int(text)


def _text(key: str) -> str:
    return base64.b64decode(key).decode(errors="replace")


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 10**_DIGITS:
        raise ProtocolError(f"expected a number of the journal, got {str(value)[:40]!r}")
    return value


def _entries(value: Any) -> list[JournalEntry]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ProtocolError("expected entries of the journal in etcd, found something else")
    return value


_MEANS: dict[type, Callable[[Etcd, Any], StoreAnswer]] = {
    Look: Etcd._look,
    Campaign: Etcd._campaign,
    Claim: Etcd._claim,
    Renew: Etcd._renew,
    Depose: Etcd._depose,
    Load: Etcd._load,
    Append: Etcd._append,
    CompactPart: Etcd._part,
    Compact: Etcd._compact,
}
