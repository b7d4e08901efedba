"""One coordinator's way to the lease: it looks who holds it, takes it when it is free, renews it, and knows when it
is over.

It does not wait for the lease of a dead holder to run out: the kernel of the holder's host says that its port is
closed. The holder's own job has time to start its next life there; then the lease is ended, which the store does at
once and for all. A holder that lives in spite of that can no longer write the journal, and learns it when it tries
to renew its lease.

Pure: asks one thing at a time, and is told the time, in nanoseconds, on a clock that goes on while the machine
sleeps.
"""

from __future__ import annotations

from everstep.base.errors import check
from everstep.protocol.lease.requests import (
    Campaign,
    Claim,
    Depose,
    Holder,
    HolderSeen,
    JournalEntry,
    Look,
    Renew,
    Renewed,
    StoreAnswer,
    StoreRequest,
)

SECOND_NS = 1_000_000_000
SURE_PART = 0.7
"""Share of a renewal's time for which the holder relies on it: clocks differ, and messages take time."""
GONE_PART = 0.5
"""Share of a lease's time for which the holder's port may be closed."""
_LOOKS = 10
_RENEWALS = 5
_AGAIN_NS = 50_000_000


class Candidate:
    """The next request is `request`, once `due_ns` has come; `answered` takes its answer before the next request.
    owner, where: as in `Holder`. ttl_s: duration of a lease that is not renewed. holder: of the lease, when it was
    last seen; None if it was free, or never seen. term: of the lease that this coordinator holds, 0 if it has never
    held it. sudden: the holder before was gone before its lease had run out. until_ns: until then it certainly holds
    the lease, if no answer comes meanwhile."""

    def __init__(self, owner: str, where: JournalEntry, ttl_s: int) -> None:
        self.holder: Holder | None = None
        self.term = 0
        self.due_ns = 0
        self.sudden = False
        self._owner, self._where, self._ttl_s = owner, where, ttl_s
        self._lease = 0
        self._free = False
        self._elsewhere: Holder | None = None  # an earlier life of this one, which was reached at another place
        self.until_ns = 0
        self._there: JournalEntry | None = None  # where the holder was seen to listen
        self._gone_ns: int | None = None  # since when nobody does
        self._seen = False  # the holder, since anything was asked that may have changed it
        self._asked_ns: int | None = None
        self._asked: StoreRequest | None = None

    def holds(self, now_ns: int) -> bool:
        """Whether it certainly holds the lease now. Once it has lost it, it never holds it again."""
        return now_ns < self.until_ns

    def deposed(self, now_ns: int) -> bool:
        """Whether it held the lease and can no longer rely on it."""
        return self.term > 0 and not self.holds(now_ns)

    def request(self, now_ns: int) -> StoreRequest | None:
        """The next request, None if one is open, or none is due."""
        if self._asked is not None or now_ns < self.due_ns or self.deposed(now_ns):
            return None
        if self._elsewhere is not None:
            mine = self._elsewhere
            self._asked = Claim(self._owner, self._where, mine.lease, mine.term)
        elif self._lease:
            self._asked = Renew(self._lease)
        elif self._free:
            self._asked = Campaign(self._owner, self._where, self._ttl_s)
        elif self._gone(now_ns) and self.holder is not None:
            self._asked = Depose(self.holder.lease)
        else:
            self._asked = Look()
        self._asked_ns = now_ns
        return self._asked

    def answered(self, now_ns: int, answer: StoreAnswer) -> None:
        asked, asked_ns = self._asked, self._asked_ns
        check(asked is not None and asked_ns is not None, "an answer to nothing that was asked")
        self._asked = self._asked_ns = None
        if isinstance(asked, Campaign | Claim | Depose):
            self._seen = False
            self._free, self._elsewhere = False, None
        elif isinstance(answer, HolderSeen):
            self._saw(now_ns, answer.holder)
        elif isinstance(answer, Renewed) and asked_ns is not None:
            self._renewed(asked_ns, answer.ttl_s)
        else:
            self.due_ns = now_ns + _AGAIN_NS

    def port_probed(self, now_ns: int, where: JournalEntry, listens: bool | None) -> None:
        """Whether the holder's port is open, by the kernel of its host; None: it does not say."""
        if self.holder is None or where != self.holder.where or self._lease:
            return
        if listens is False and self._there == where:
            self._gone_ns = now_ns if self._gone_ns is None else self._gone_ns
        else:
            self._gone_ns = None
        if listens:
            self._there = where

    def _gone(self, now_ns: int) -> bool:
        after_ns = int(GONE_PART * self._ttl_s * SECOND_NS)
        return self._seen and self._gone_ns is not None and now_ns - self._gone_ns >= after_ns

    def _saw(self, now_ns: int, holder: Holder | None) -> None:
        before = self.holder
        self.holder, self._free, self._seen = holder, holder is None, True
        if holder is None:
            self.sudden = self.sudden or self._gone_ns is not None
        elif holder.owner != self._owner:
            self.sudden = False
        if holder is None or before is None or holder.where != before.where:
            self._gone_ns = None
        if holder is not None and holder.owner == self._owner and holder.where != self._where:
            self._elsewhere = holder
        elif holder is not None and holder.owner == self._owner:
            self._lease = holder.lease  # taken now, or by an earlier life: it counts once it has been prolonged
        elif holder is not None:
            self.due_ns = now_ns + self._ttl_s * SECOND_NS // _LOOKS

    def _renewed(self, asked_ns: int, ttl_s: int) -> None:
        if ttl_s <= 0 or self.holder is None:
            self._lease, self.until_ns, self.due_ns = 0, 0, asked_ns
            return
        self.term = self.holder.term
        self.until_ns = asked_ns + int(SURE_PART * ttl_s * SECOND_NS)
        self.due_ns = asked_ns + ttl_s * SECOND_NS // _RENEWALS
