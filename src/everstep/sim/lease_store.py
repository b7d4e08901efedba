"""The store of a simulation: one lease and one journal, as in etcd, behind a network that loses and delays.

A request takes effect whole, once, or never, in the order of arrival; it may be answered or not. So a request that was
given up may take effect later.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from typing import Any

from everstep.base.errors import check
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
from everstep.sim.world import MS, SECOND, Process, World

STORE_HOST = "store"
TIMEOUT_NS = 250 * MS
_SMALL_BYTES = 300


class SimStore:
    """troubles: "down", "mute", "slow", "late" and "small" (it takes no request of several entries and many bytes), by
    how often each has begun and not ended. wrote: called with the
    term and the entries that come into the journal."""

    def __init__(self, world: World, wrote: Callable[[int, list[dict[str, Any]]], None]) -> None:
        self.world = world
        self._wrote = wrote
        self.troubles: dict[str, int] = {}
        self._revision = 0
        self.clear()

    def clear(self) -> None:
        """Delete all entries. As in etcd, revisions go on, so that late requests of an earlier life are fenced."""
        self._holder: Holder | None = None
        self._until_ns: dict[int, int] = {}
        self._ttl_s: dict[int, int] = {}
        self._written: dict[int, list[dict[str, Any]]] = {}
        self._compacted: tuple[int, list[dict[str, Any]]] = (0, [])
        self._parts: dict[tuple[int, str, int], list[dict[str, Any]]] = {}

    # ---- the network

    def trouble(self, kind: str, lasts_ns: int) -> None:
        self.troubles[kind] = self.troubles.get(kind, 0) + 1
        self.world.later(lasts_ns, self._over, kind)

    def _over(self, kind: str) -> None:
        self.troubles[kind] = max(0, self.troubles.get(kind, 0) - 1)

    def mend(self) -> None:
        self.troubles = {}

    def ask(self, who: Process, request: StoreRequest, answered: Callable[[StoreAnswer], None]) -> None:
        """Have `answered` called once, in the process that asks."""
        world, open_still = self.world, [True]

        def once(answer: StoreAnswer) -> None:
            if open_still:
                open_still.clear()
                answered(answer)

        def reply(answer: StoreAnswer) -> None:
            world.seen["store", type(request).__name__] += 1
            if not self._bad("mute", 0.9) and world.reachable(who.host, STORE_HOST):
                who.later(self._delay_ns(), once, answer)

        def arrive() -> None:
            if not self._bad("down", 1.0) and (late or world.reachable(who.host, STORE_HOST)):
                reply(self.do(request))

        late = self._bad("late", 0.5)
        world.later(TIMEOUT_NS + world.between(0, SECOND) if late else self._delay_ns(), arrive)
        who.later(TIMEOUT_NS, once, Unanswered("no answer in time"))

    def _bad(self, kind: str, chance: float) -> bool:
        return self.troubles.get(kind, 0) > 0 and self.world.rng.random() < chance

    def _delay_ns(self) -> int:
        if self._bad("slow", 0.7):
            return self.world.between(20 * MS, 400 * MS)
        return self.world.latency_ns() + self.world.between(0, 2 * MS)

    # ---- requests

    def do(self, request: StoreRequest) -> StoreAnswer:
        self._expire()
        if isinstance(request, Append | Compact | CompactPart) and len(request.entries) > 1:
            size = len(json.dumps(request.entries))
            if size > _SMALL_BYTES and self.troubles.get("small"):
                self.world.seen["store", "too much"] += 1
                return TooMuch(f"{size} bytes")
        return _MEANS[type(request)](self, request)

    @property
    def holder(self) -> Holder | None:
        self._expire()
        return self._holder

    def _expire(self) -> None:
        for lease, until_ns in list(self._until_ns.items()):
            if self.world.now_ns >= until_ns:
                self._end(lease)

    def _end(self, lease: int) -> None:
        self._until_ns.pop(lease, None)
        if self._holder is not None and self._holder.lease == lease:
            self.world.log("store", "the lease is free, of term", self._holder.term)
            self._holder = None

    def _campaign(self, request: Campaign) -> StoreAnswer:
        self._revision += 1
        lease = self._revision
        self._ttl_s[lease] = request.ttl_s
        self._extend(lease)
        if self._holder is None:
            self._holder = Holder(request.owner, request.where, lease, self._revision)
            self.world.log("store", "the lease is of", request.owner, "term", self._revision)
        return Appended()

    def _claim(self, request: Claim) -> StoreAnswer:
        if self._holder is not None and (self._holder.term, self._holder.lease) == (request.term, request.lease):
            self._revision += 1
            self._holder = Holder(request.owner, request.where, request.lease, request.term)
        return Appended()

    def _extend(self, lease: int) -> None:
        slack_ns = self.world.between(0, 300 * MS)  # leases end a little late
        self._until_ns[lease] = self.world.now_ns + self._ttl_s[lease] * SECOND + slack_ns

    def _renew(self, request: Renew) -> StoreAnswer:
        if request.lease not in self._until_ns:
            return Renewed(0)
        self._extend(request.lease)
        return Renewed(self._ttl_s[request.lease])

    def _depose(self, request: Depose) -> StoreAnswer:
        self._end(request.lease)
        return Appended()

    def _load(self, request: Load) -> StoreAnswer:
        through, entries = self._compacted
        numbers = sorted(number for number in self._written if number > through)
        check(
            numbers == list(range(through + 1, through + 1 + len(numbers))),
            f"of the journal is gone what is between {numbers}",
        )
        found = [entry for number in numbers for entry in self._written[number]]
        return Loaded([*entries, *found], max([through, *numbers]) + 1)

    def _append(self, request: Append) -> StoreAnswer:
        if self._holder is None or self._holder.term != request.term:
            return Fenced()
        if request.number in self._written:
            return Taken(self._written[request.number])
        self._revision += 1
        self._written[request.number] = list(request.entries)
        self._wrote(request.term, request.entries)
        return Appended()

    def _compact(self, request: Compact) -> StoreAnswer:
        if self._holder is None or self._holder.term != request.term:
            return Fenced()
        if request.through <= self._compacted[0]:
            return Appended()  # this one or a later one was done before
        self._revision += 1
        parts = [self._parts.get((request.through, request.digest, number)) for number in range(request.parts)]
        check(None not in parts, f"a part is lacking of {request.parts}")
        self._compacted = (request.through, [*chain(*filter(None, parts)), *request.entries])
        self._parts = {name: held for name, held in self._parts.items() if name[0] >= request.through}
        self._written = {number: held for number, held in self._written.items() if number > request.through}
        return Appended()


def _keep_part(store: SimStore, request: CompactPart) -> StoreAnswer:
    if store.holder is None or store.holder.term != request.term:
        return Fenced()
    store._parts[request.through, request.digest, request.number] = list(request.entries)
    return Appended()


_MEANS: dict[type, Callable[[SimStore, Any], StoreAnswer]] = {
    Look: lambda store, request: HolderSeen(store.holder),
    Campaign: SimStore._campaign,
    Claim: SimStore._claim,
    Renew: SimStore._renew,
    Depose: SimStore._depose,
    Load: SimStore._load,
    Append: SimStore._append,
    CompactPart: _keep_part,
    Compact: SimStore._compact,
}
