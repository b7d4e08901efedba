"""The lease and the journal of a job in etcd.

Everything that is written bears a tag that only the job's token makes, so who can write into etcd can stop a job but
not tell it anything. Source: etcd.io/docs, "gRPC gateway" and "API reference" (txn, lease).
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from everstep.base.errors import ConfigError, ProtocolError, QuorumLost
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
from everstep.runtime.etcd_access import NO_ACCESS, EtcdAccess
from everstep.runtime.etcd_gateway import Gateway, NoReply, Pair, Reply, TooLarge, Unwelcome
from everstep.runtime.handshake import role_token

LEASE, JOB, SNAPSHOT, PARTS, JOURNAL = "/lease", "/job", "/snapshot", "/snapshot/", "/journal/"
_ROLE = "etcd"
_MOST_BYTES = 64 << 20
_PAGE = 24  # an answer has to fit into what is read of one
_TAG_BYTES = 32
_DIGITS = 10
_HOLD_S = 60.0
_RENEWALS = 5


class Announced(NamedTuple):
    """What a job has said of itself. revision: of that, so that another job is known from it."""

    facts: dict[str, Any]
    revision: int


class Etcd:
    """Answers what coordinators ask (`ask`), and knows which job it is for. Thread-safe.

    token: the job's. timeout_s: for one request to one member. job: `Announced.revision` of the job that may have the
    lease; 0: of any. access: what this host has to be let in.

    Raises: ConfigError if httpx is not installed.
    """

    def __init__(
        self, address: EtcdAddress, token: bytes, timeout_s: float, job: int = 0, access: EtcdAccess = NO_ACCESS
    ) -> None:
        self.address = address
        self.job = job
        self._key = role_token(token, _ROLE)
        self._gateway = Gateway(address, timeout_s, access)
        self._post = self._gateway.post

    def close(self) -> None:
        """End its connections."""
        self._gateway.close()

    def ask(self, request: StoreRequest) -> StoreAnswer:
        """Never raises for what etcd does; what it holds that is not the job's own is `ProtocolError`."""
        try:
            return _MEANS[type(request)](self, request)
        except TooLarge as error:
            return TooMuch(str(error))
        except NoReply as error:
            return Unanswered(str(error))

    # ---- lease and journal

    def _look(self, request: Look) -> StoreAnswer:
        return HolderSeen(self._holder(self._get(LEASE)))

    def _holder(self, pairs: list[Pair]) -> Holder | None:
        if not pairs:
            return None
        said = self._opened(LEASE, pairs[0])
        try:
            owner, where = str(said["owner"]), dict(said["where"])
        except (KeyError, TypeError, ValueError):
            raise ProtocolError(f"expected who holds the lease under {self.address}, found something else") from None
        return Holder(owner, where, _int(pairs[0].lease), _int(pairs[0].create_revision))

    def _campaign(self, request: Campaign) -> StoreAnswer:
        lease = _int(self._post("lease/grant", {"TTL": str(request.ttl_s)}).ID)
        free = [self._compare(LEASE, "CREATE", "create_revision", 0)]
        if self.job:
            free.append(self._compare(JOB, "MOD", "mod_revision", self.job))
        mine = self._put(LEASE, {"owner": request.owner, "where": request.where}, lease)
        if not self._post("kv/txn", {"compare": free, "success": [mine]}).succeeded:
            self.resign(lease)
        return Appended()

    def _claim(self, request: Claim) -> StoreAnswer:
        said = self._put(LEASE, {"owner": request.owner, "where": request.where}, request.lease)
        self._post("kv/txn", {"compare": [self._term(request.term)], "success": [said]})
        return Appended()

    def _renew(self, request: Renew) -> StoreAnswer:
        reply = self._post("lease/keepalive", {"ID": str(request.lease)})
        return Renewed(_int(str(reply.result.get("TTL", "0"))))

    def _depose(self, request: Depose) -> StoreAnswer:
        self._post("lease/revoke", {"ID": str(request.lease)})
        return Appended()

    def resign(self, lease: int) -> None:
        """Give the lease back, if etcd answers."""
        with contextlib.suppress(NoReply):
            self._post("lease/revoke", {"ID": str(lease)})

    def _load(self, request: Load) -> StoreAnswer:
        first = self._post("kv/range", self._span(SNAPSHOT, ""))
        revision = first.header.revision
        through, entries = 0, list[JournalEntry]()
        for pair in first.kvs:
            said = self._opened(SNAPSHOT, pair)
            through, parts = _whole(said.get("through")), _whole(said.get("parts", 0))
            if parts:
                folder = _folder(through, str(said.get("digest")))
                entries, found = self._row(folder, 0, revision)
                if found != parts:
                    raise ProtocolError(f"expected {parts} parts of the journal under {self.address}, found {found}")
            entries += _entries(said.get("entries"))
        more, number = self._row(JOURNAL, through + 1, revision)
        return Loaded(entries + more, number)

    def _row(self, folder: str, number: int, revision: str) -> tuple[list[JournalEntry], int]:
        """The entries under this number and all that follow, and the number after them.

        Raises: ProtocolError if one is lacking.
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
                        f"expected {expected} of the journal under {self.address}, found {name[:80]}: what is between"
                        " is gone, and only a new job can go on (--fresh)"
                    )
                entries += _entries(self._opened(name, pair).get("entries"))
                number += 1
            more = page.more and bool(page.kvs)
        return entries, number

    def _append(self, request: Append) -> StoreAnswer:
        name = f"{JOURNAL}{request.number:0{_DIGITS}d}"
        compare = [self._term(request.term), self._compare(name, "CREATE", "create_revision", 0)]
        there = [{"request_range": self._span(LEASE, "")}, {"request_range": self._span(name, "")}]
        asked = {"compare": compare, "success": [self._put(name, {"entries": request.entries})], "failure": there}
        reply = self._post("kv/txn", asked)
        if reply.succeeded:
            return Appended()
        lease, written = _found(reply)
        if not written or not lease or _int(lease[0].create_revision) != request.term:
            return Fenced()
        return Taken(_entries(self._opened(name, written[0]).get("entries")))

    def _part(self, request: CompactPart) -> StoreAnswer:
        name = f"{_folder(request.through, request.digest)}{request.number:0{_DIGITS}d}"
        said = self._put(name, {"entries": request.entries})
        done = self._post("kv/txn", {"compare": [self._term(request.term)], "success": [said]}).succeeded
        return Appended() if done else Fenced()

    def _compact(self, request: Compact) -> StoreAnswer:
        """Unless there is a snapshot of later than the one that it was to follow: it may take effect long after it was
        asked."""
        before = self._get(SNAPSHOT)
        if before and self._through(before[0]) >= request.through:
            return Appended()
        revision = _int(before[0].mod_revision) if before else 0
        said = {"through": request.through, "entries": request.entries}
        if request.parts:
            said |= {"parts": request.parts, "digest": request.digest}
        gone = [
            self._span(JOURNAL, f"{JOURNAL}{request.through + 1:0{_DIGITS}d}"),
            self._span(PARTS, f"{PARTS}{request.through:0{_DIGITS}d}"),  # those of this one, and later ones, stay
        ]
        done = [self._put(SNAPSHOT, said), *({"request_delete_range": span} for span in gone)]
        compare = [self._term(request.term), self._compare(SNAPSHOT, "MOD", "mod_revision", revision)]
        there = [{"request_range": self._span(LEASE, "")}]
        asked = {"compare": compare, "success": done, "failure": there}
        reply = self._post("kv/txn", asked)
        if reply.succeeded:
            return Appended()
        lease = _found(reply)[0]
        if not lease or _int(lease[0].create_revision) != request.term:
            return Fenced()
        return Unanswered("the journal was shortened meanwhile")  # asked again it is seen by whom

    def _through(self, pair: Pair) -> int:
        return _whole(self._opened(SNAPSHOT, pair).get("through"))

    # ---- the job

    def begin(self, facts: dict[str, Any], owner: str, ttl_s: int) -> Holder | None:
        """Say which job this is, with an empty journal, and hold the lease for its first coordinator; unless somebody
        holds it, who is returned.

        Raises: QuorumLost if etcd does not answer; ConfigError if it does not let this host in.
        """
        lease = _int(self._surely("lease/grant", {"TTL": str(ttl_s)}).ID)
        free = [self._compare(LEASE, "CREATE", "create_revision", 0)]
        gone = [{"request_delete_range": self._span(JOURNAL, f"{JOURNAL}:")}]
        gone += [{"request_delete_range": self._span(*span)} for span in ((SNAPSHOT, ""), (PARTS, f"{PARTS}:"))]
        held = [{"request_range": self._span(LEASE, "")}]
        mine = self._put(LEASE, {"owner": owner, "where": {}}, lease)
        reply = self._surely(
            "kv/txn", {"compare": free, "success": [self._put(JOB, facts), mine, *gone], "failure": held}
        )
        found = reply.responses[0].response_range if reply.responses else None
        holder = self._holder([] if found is None else found.kvs)
        if reply.succeeded or holder is None or holder.owner == owner:  # then it took effect unanswered
            known = self.announced()
            self.job = 0 if known is None else known.revision
            threading.Thread(target=self._hold, args=(lease, ttl_s), name="lease", daemon=True).start()
            return None
        return holder

    def _hold(self, lease: int, ttl_s: int) -> None:
        """Prolong the lease until the coordinator does it that says where it is."""
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
        """Ask for something that needs no token of the job. Raises: as `announced`."""
        self._surely("kv/range", {**self._span(JOB, ""), "keys_only": True})

    def announced(self) -> Announced | None:
        """The job that is there, None if none is.

        Raises: QuorumLost if etcd does not answer; ConfigError if it does not let this host in.
        """
        pairs = self._surely("kv/range", self._span(JOB, "")).kvs
        return Announced(self._opened(JOB, pairs[0]), _int(pairs[0].mod_revision)) if pairs else None

    def _surely(self, what: str, asked: dict[str, Any]) -> Reply:
        """Of whichever member answers; what is asked may take effect more than once."""
        for _ in self.address.members:
            try:
                return self._post(what, asked)
            except Unwelcome as error:
                raise ConfigError(str(error)) from None
            except NoReply:
                continue
        raise QuorumLost(self.trouble())

    def trouble(self) -> str:
        """What is wrong with etcd, in one line for people."""
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

    def _put(self, name: str, said: dict[str, Any], lease: int = 0) -> dict[str, Any]:
        body = zlib.compress(json.dumps(said, separators=(",", ":")).encode(), 1)
        value = base64.b64encode(self._tag(name, body) + body).decode()
        return {"request_put": {"key": self._name(name), "value": value, "lease": str(lease)}}

    def _tag(self, name: str, body: bytes) -> bytes:
        return hmac.digest(self._key, f"{self.address.prefix}{name}\0".encode() + body, "sha256")

    def _opened(self, name: str, pair: Pair) -> dict[str, Any]:
        """Raises: ProtocolError if nobody with the job's token has written it."""
        try:
            data = base64.b64decode(pair.value, validate=True)
            tag, body = data[:_TAG_BYTES], data[_TAG_BYTES:]
            if hmac.compare_digest(tag, self._tag(name, body)):
                inflate = zlib.decompressobj()
                said = json.loads(inflate.decompress(body, _MOST_BYTES))
                if isinstance(said, dict):
                    return said
        except (ValueError, RecursionError, zlib.error):
            pass
        key = f"{self.address.prefix}{name}"
        raise ProtocolError(f"what etcd has under {key} is of no job with this token: choose another prefix or token")

    def _get(self, name: str) -> list[Pair]:
        return self._post("kv/range", self._span(name, "")).kvs


def _folder(through: int, digest: str) -> str:
    """Of the parts of a snapshot."""
    return f"{PARTS}{through:0{_DIGITS}d}-{digest}/"


def _found(reply: Reply) -> list[list[Pair]]:
    """What was there, by range that was asked for."""
    return [[] if one.response_range is None else one.response_range.kvs for one in reply.responses]


def _int(text: str) -> int:
    """As etcd writes numbers. Raises: NoReply for anything else."""
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
