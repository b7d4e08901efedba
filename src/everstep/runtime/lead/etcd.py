"""The lease of a job in etcd, and requests about its journal there (`etcd_journal`).

Every entry bears a tag that only the job's token makes, in this life of the job and in this order (`etcd_seals`). A
stranger who can write into etcd can therefore stop a job, but cannot tell it anything or put old entries back. Source:
etcd.io/docs, "gRPC gateway" and "API reference" (txn, lease).
"""

from __future__ import annotations

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
    Holder,
    HolderSeen,
    Load,
    Look,
    Renew,
    Renewed,
    StoreAnswer,
    StoreRequest,
    TooMuch,
    Unanswered,
)
from everstep.runtime.lead.etcd_access import NO_ACCESS, EtcdAccess
from everstep.runtime.lead.etcd_gateway import Gateway, NoReply, Pair, Reply, TooLarge, Unwelcome
from everstep.runtime.lead.etcd_journal import EtcdJournal
from everstep.runtime.lead.etcd_keys import (
    JOB,
    JOURNAL,
    LEASE,
    PARTS,
    SNAPSHOT,
    TERM,
    JobKeys,
    number_of,
    pairs_in,
    value_of,
)
from everstep.runtime.lead.etcd_seals import EtcdSeals

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
        self._gateway = Gateway(address, timeout_s, access)
        self._keys = JobKeys(address.prefix, self._gateway.post)
        self._live(job.partition(".")[2])

    def close(self) -> None:
        self._journal.close()
        self._gateway.close()

    def _live(self, life: str) -> None:
        """Believe entries of this life from now on, and no others."""
        self._seals, self._seen = EtcdSeals(self._token, self.address.prefix, life), _Seen()
        self._journal = EtcdJournal(self.address, self._keys, self._seals, self._note)

    def ask(self, request: StoreRequest) -> StoreAnswer:
        """Answer a request. Failures of etcd raise nothing; data that is not the job's own raises `ProtocolError`."""
        try:
            of_lease = _OF_LEASE.get(type(request))
            return of_lease(self, request) if of_lease else _OF_JOURNAL[type(request)](self._journal, request)
        except TooLarge as error:
            return TooMuch(str(error))
        except NoReply as error:
            return Unanswered(str(error))

    # ---- the lease

    def _look(self, request: Look) -> StoreAnswer:
        names = [self._keys.span(JOB), self._keys.span(LEASE), {**self._keys.span(TERM), "keys_only": True}]
        job, lease, term = pairs_in(self._keys.post("kv/txn", {"success": [{"request_range": name} for name in names]}))
        self._begun(job)
        holder = self._holder(lease)
        self._after = number_of(term[0].mod_revision) if term else 0
        return HolderSeen(holder)

    def _begun(self, pairs: list[Pair]) -> dict[str, Any] | None:
        """The job's announcement; its entries are believed from now on.

        Raises: ProtocolError if it is another job than `job`, or of an older version.
        """
        if not pairs:
            return None
        facts = self._of_job.opened(JOB, value_of(pairs[0]))
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
        said = self._seals.opened(LEASE, value_of(pairs[0]))
        try:
            owner, where, lease = str(said["owner"]), dict(said["where"]), int(said["lease"])
            seen = _Seen(
                *(number_of(pairs[0].create_revision), int(said["claim"])),
                *(number_of(pairs[0].mod_revision), int(said["after"])),
            )
        except (KeyError, TypeError, ValueError):
            raise ProtocolError(
                f"expected the holder of the lease under {self.address}, found something else"
            ) from None
        known = self._seen
        follows = seen.after == known.after if seen.term == known.term else seen.after >= known.term
        if lease != number_of(pairs[0].lease) or seen < known or not follows:
            raise ProtocolError(
                f"what etcd has under {self.address.prefix}{LEASE} is older than before: somebody has restored it"
            )
        self._seen = seen
        return Holder(owner, where, lease, seen.term)

    def _lease(self, owner: str, where: dict[str, Any], lease: int, after: int = 0, claim: int = 0) -> dict[str, Any]:
        said = {"owner": owner, "where": where, "lease": lease, "after": after, "claim": claim}
        return self._keys.put(LEASE, self._seals.closed(LEASE, said), lease)

    def _campaign(self, request: Campaign) -> StoreAnswer:
        if self._after is None:
            self._look(Look())
        after = self._after or 0
        lease = number_of(self._keys.post("lease/grant", {"TTL": str(request.ttl_s)}).ID)
        free = [
            self._keys.compare(LEASE, "CREATE", "create_revision", 0),
            self._keys.compare(TERM, "MOD", "mod_revision", after),
        ]
        if self.job:
            free.append(self._keys.compare(JOB, "MOD", "mod_revision", int(self.job.partition(".")[0])))
        mine = [self._lease(request.owner, request.where, lease, after), self._keys.put(TERM, b"")]
        if not self._keys.post("kv/txn", {"compare": free, "success": mine}).succeeded:
            self.resign(lease)
        return Appended()

    def _claim(self, request: Claim) -> StoreAnswer:
        if self._seen.term == request.term:  # otherwise the lease has been lost since: a look says so
            seen = self._seen
            mine = self._lease(request.owner, request.where, request.lease, seen.after, seen.claim + 1)
            same = [self._keys.in_term(request.term), self._keys.compare(LEASE, "MOD", "mod_revision", seen.revision)]
            self._keys.post("kv/txn", {"compare": same, "success": [mine]})
        return Appended()

    def _renew(self, request: Renew) -> StoreAnswer:
        reply = self._keys.post("lease/keepalive", {"ID": str(request.lease)})
        return Renewed(number_of(str(reply.result.get("TTL", "0"))))

    def _depose(self, request: Depose) -> StoreAnswer:
        self._keys.post("lease/revoke", {"ID": str(request.lease)})
        return Appended()

    def resign(self, lease: int) -> None:
        with contextlib.suppress(NoReply):
            self._keys.post("lease/revoke", {"ID": str(lease)})

    # ---- the job

    def begin(self, facts: dict[str, Any], owner: str, ttl_s: int) -> Holder | None:
        """Announce this job, with a life of its own and an empty journal, and hold the lease for its first coordinator.
        If somebody holds the lease, nothing is announced, and the holder is returned.

        Raises: NoHead if etcd does not answer; ConfigError if it does not let this host in.
        """
        lease, life = number_of(self._surely("lease/grant", {"TTL": str(ttl_s)}).ID), secrets.token_hex(16)
        free = [self._keys.compare(LEASE, "CREATE", "create_revision", 0)]
        gone = [{"request_delete_range": self._keys.span(JOURNAL, f"{JOURNAL}:")}]
        gone += [{"request_delete_range": self._keys.span(*span)} for span in ((SNAPSHOT, ""), (PARTS, f"{PARTS}:"))]
        held = [{"request_range": self._keys.span(name)} for name in (JOB, LEASE)]
        said = {"owner": owner, "where": {}, "lease": lease, "after": 0, "claim": 0}
        mine = [
            self._keys.put(JOB, self._of_job.closed(JOB, {**facts, "life": life})),
            self._keys.put(LEASE, EtcdSeals(self._token, self.address.prefix, life).closed(LEASE, said), lease),
            self._keys.put(TERM, b""),
        ]
        reply = self._surely("kv/txn", {"compare": free, "success": [*mine, *gone], "failure": held})
        revision = reply.header.revision
        if not reply.succeeded:
            job, there = pairs_in(reply)
            self._begun(job)
            holder = self._holder(there)
            if not job or holder is None or holder.owner != owner:  # otherwise it took effect without an answer
                return holder
            revision = job[0].mod_revision
        self.job = f"{number_of(revision)}.{life}"
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
        self._surely("kv/range", {**self._keys.span(JOB), "keys_only": True})

    def announced(self) -> Announced | None:
        """The announced job, None if there is none.

        Raises: NoHead if etcd does not answer; ConfigError if it does not let this host in.
        """
        pairs = self._surely("kv/range", self._keys.span(JOB)).kvs
        facts = self._begun(pairs)
        return None if facts is None else Announced(facts, f"{number_of(pairs[0].mod_revision)}.{self._seals.life}")

    def _surely(self, what: str, asked: dict[str, Any]) -> Reply:
        """Ask all members until one answers; the request may take effect more than once."""
        for _ in self.address.members:
            try:
                return self._keys.post(what, asked)
            except Unwelcome as error:
                raise ConfigError(str(error)) from None
            except NoReply:
                continue
        raise NoHead(self.trouble())

    def trouble(self) -> str:
        return self._gateway.trouble()


_OF_LEASE: dict[type, Callable[[Etcd, Any], StoreAnswer]] = {
    Look: Etcd._look,
    Campaign: Etcd._campaign,
    Claim: Etcd._claim,
    Renew: Etcd._renew,
    Depose: Etcd._depose,
}
_OF_JOURNAL: dict[type, Callable[[EtcdJournal, Any], StoreAnswer]] = {
    Load: EtcdJournal.load,
    Append: EtcdJournal.append,
    CompactPart: EtcdJournal.part,
    Compact: EtcdJournal.compact,
}
