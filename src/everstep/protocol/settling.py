"""What members of a new generation conclude from their holdings: one rule, applied by each to the same holdings.
Pure.

Apart from the step machine because it is a function: (plan, holdings) -> where all go on, and who gets which state
from whom.

There is one target for all stages, so stages are never a step apart:

- *The top*: the newest position of a member, if every stage of the plan is held there by a member that is there or
  takes the one missing decision. A member that lacks a stage of its seats there copies it.
- *A step R* for which every stage is in some member's memory (as live state, as live state with the one missing
  decision, or as a kept snapshot), or can be read from disk by all its members; step 0 can always be built. The
  newest such R is the target if the top is not held in all stages, if R is beyond it (a job that starts from a
  checkpoint), or if members have gathered different things on the way to the top. All go to the beginning of R.

A gather is decided a second time if all go back to a step before it. What is gathered then may differ (other members,
other answers), while states never do. A member that was absent meanwhile still has the first answer.

A member may hold a part of a stage, because the plan gives it no more or because blocks were lost: its blocks count
at the position that it is at, and as snapshots. A stage is held if all members together have all of its blocks; a
member that has less than the plan's share of its seat gets the rest. A member takes the decision of a step with the
blocks for which it has the gradient, if none of them is missing, because an update of a block may depend on the
others. Blocks are requested from members that have the whole stage, if there are any.

The holdings determine all of this; nobody decides it. The next generation settles interrupted settles, with some
members that have returned and others that have not, by the same rule: members that have returned hold R live.

If a member knows that states after step S are tainted, no later state counts, live or not: all go back to the newest
R up to S. They state S until their next decision, which proves that all have returned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from everstep.base.extents import NONE, WHOLE, Extents, Sizes, union
from everstep.base.plan import Plan
from everstep.placement.shards import share
from everstep.protocol.step_types import Holding, Key, Pieces, Piecewise, Record

Sources = Mapping[int, tuple[int, ...]]
"""Worker ids by stage that have it in memory, in order of preference; empty: from disk, or built at step 0."""


@dataclass(frozen=True)
class Settlement:
    """How a generation begins.

    target: where all go on. back: whether that is a step to go (back) to, rather than the top. records: of the
    target's decision, for members that roll forward. rolls: members that take that one decision. wants: by worker
    id, the stages that it has to get and from whom (when going back: all stages of its seats). serves: by worker id,
    the workers that may ask it for state. rerun: lanes that all members compute through whose seats they pass.
    pieces: by worker id, how it gets stages of which it needs or has a part, or that no member has completely.
    sizes: of the stages' state at the target, as far as holders of parts state them.
    """

    target: Key
    back: bool
    records: Mapping[int, Record]
    rolls: frozenset[int]
    wants: Mapping[int, Sources]
    serves: Mapping[int, tuple[int, ...]]
    rerun: frozenset[int]
    pieces: Mapping[int, Piecewise] = field(default_factory=dict)
    sizes: Mapping[int, Sizes] = field(default_factory=dict)


def settle(plan: Plan, holdings: Mapping[int, Holding]) -> Settlement:
    """The settlement of a generation, from the holdings of all members."""
    limit = sound_limit(holdings)
    newest = _newest(plan, holdings, limit)
    if limit is not None:
        return _go_to(plan, holdings, newest, rolling=False)
    top = max(h.position for h in holdings.values())
    rolls = _rolls_to(top, holdings)
    far = {i: 0 if h.position == top else 1 if i in rolls.held else None for i, h in sorted(holdings.items())}
    held = {i: _held_at(top, holdings[i]) if far[i] is not None else {} for i in far}
    at_top = tuple(i for i, h in holdings.items() if h.position == top)
    stocks = {k: _stock(top.step, {i: held[i].get(k, NONE) for i in far}, holdings) for k in range(plan.stages)}
    whole = all(stock.there for stock in stocks.values())
    if not whole or newest > top.step or len(_gathered_by(top, holdings)) > 1:
        return _go_to(plan, holdings, newest)
    lacking = {i: [k for k in plan.stages_of(i) if stocks[k].missing(i, stocks[k].share(plan, i, k))] for i in held}
    wants = {
        i: {k: stocks[k].donors(i, stocks[k].share(plan, i, k), at_top) for k in of}
        for i, of in lacking.items()
        if of or far[i] is None
    }
    return _settlement(plan, holdings, wants, stocks, rolls, top, back=False)


def _settlement(
    plan: Plan,
    holdings: Mapping[int, Holding],
    wants: Mapping[int, Sources],
    stocks: Mapping[int, _Stock],
    rolls: _Rolls,
    target: Key,
    *,
    back: bool,
) -> Settlement:
    serves: dict[int, set[int]] = {}
    for i, sources in wants.items():
        for donor in chain.from_iterable(sources.values()):
            if donor != i:
                serves.setdefault(donor, set()).add(i)
    return Settlement(
        target=target,
        back=back,
        records=rolls.records,
        rolls=frozenset(rolls.held),
        wants=wants,
        serves={donor: tuple(sorted(to)) for donor, to in serves.items()},
        rerun=_rerun(plan, holdings, wants, target, back=back),
        pieces=_pieces(plan, wants, stocks),
        sizes={k: stock.of for k, stock in stocks.items() if stock.of},
    )


def less(held: Extents, share: Extents) -> Extents:
    """The part of a share that is not held; all of it, if the held blocks are of a state with other planes."""
    return share - held if held.fits(share) else share


@dataclass(frozen=True)
class _Stock:
    """Members' blocks of a stage at a step, by worker id, ascending."""

    held: Mapping[int, Extents]

    @cached_property
    def whole(self) -> tuple[int, ...]:
        return tuple(i for i, blocks in self.held.items() if blocks.whole)

    @cached_property
    def of(self) -> Sizes:
        """Sizes of the state, as far as holders of parts know them."""
        return next((blocks.of for blocks in self.held.values() if blocks.of), ())

    def share(self, plan: Plan, worker_id: int, stage: int) -> Extents:
        """The blocks of this stage that the plan gives the worker."""
        return share(plan.shard(worker_id, stage), self.of)

    @cached_property
    def there(self) -> bool:
        """Whether the members together have the whole stage."""
        return bool(self.whole) or union(self.held.values()).whole

    def missing(self, worker_id: int, share: Extents) -> Extents:
        """The part of its share that the worker lacks."""
        return less(self.held.get(worker_id, NONE), share)

    def donors(self, worker_id: int, share: Extents, first: Iterable[int] = ()) -> tuple[int, ...]:
        """Donors for the part that the worker lacks; itself, if it lacks nothing. first: the only ones asked if one
        of them has all, else asked before the others. If no member has all, more than necessary are named, so that
        one may be gone by then."""
        missing = self.missing(worker_id, share)
        if not missing and worker_id not in self.whole:
            return (worker_id,)
        if self.whole:
            return tuple(i for i in self.whole if i in first) or self.whole
        give = [i for i, blocks in self.held.items() if blocks & missing] if self.there else []
        return tuple(sorted(give, key=lambda i: (i not in first, i)))

    def pieces(self, worker_id: int, share: Extents) -> Pieces | None:
        """How the worker gets the missing part; None if it simply copies the whole stage from members that have it."""
        missing = self.missing(worker_id, share)
        if not missing or not self.there or (self.whole and missing.whole):
            return None
        given = {} if self.whole else {i: blocks & missing for i, blocks in self.held.items() if blocks & missing}
        return Pieces(missing, given)


def _stock(step: int, held: Mapping[int, Extents], holdings: Mapping[int, Holding]) -> _Stock:
    """Members' blocks of a stage at a step. Initial states were built by each process: the one of the lowest id
    counts, among those that have all of it if any has."""
    some = {i: blocks for i, blocks in sorted(held.items()) if blocks}
    first = min(some, key=lambda i: (not some[i].whole, i), default=None)
    if step == 0 and first is not None:
        some = {i: blocks for i, blocks in some.items() if holdings[i].digest == holdings[first].digest}
    like = next((blocks for blocks in some.values() if not blocks.whole), NONE)
    return _Stock({i: blocks for i, blocks in some.items() if blocks.fits(like)})


def _pieces(plan: Plan, wants: Mapping[int, Sources], stocks: Mapping[int, _Stock]) -> dict[int, Piecewise]:
    found = {i: {k: stocks[k].pieces(i, stocks[k].share(plan, i, k)) for k in sources} for i, sources in wants.items()}
    named = {i: {k: one for k, one in pieces.items() if one is not None} for i, pieces in found.items()}
    return {i: pieces for i, pieces in named.items() if pieces}


@dataclass(frozen=True)
class _Rolls:
    """Members that take the one decision that is missing to the top, with these records; held: the blocks they then
    have, by stage."""

    top: Key
    records: Mapping[int, Record]
    held: Mapping[int, Mapping[int, Extents]]

    def has(self, worker_id: int, step: int, stage: int) -> Extents:
        """The blocks of the stage that the member then has at the beginning of this step."""
        return self.held.get(worker_id, {}).get(stage, NONE) if self.top == Key(step, 0) else NONE


_NOBODY = _Rolls(Key(0, 0), {}, {})


def from_shares(
    plan: Plan, stages: Iterable[int], me: int, sizes: Mapping[int, Sizes] = {}
) -> tuple[Sources, dict[int, Pieces]]:
    """Donors of all these stages for a worker, once every member has its share of them; in pieces for stages of
    which no member, or this worker itself, has more than a part. sizes: of the state of divided stages; if unknown,
    all members of the pool are asked."""
    pools = {k: [seat.worker_id for seat in plan.pool(k)] for k in stages}
    shares = {k: {i: share(plan.shard(i, k), sizes.get(k, ())) for i in pool} for k, pool in pools.items()}
    stocks = {k: _Stock(held) for k, held in shares.items()}
    pieces = {k: stock.pieces(me, WHOLE) for k, stock in stocks.items()}
    sources = {k: stock.donors(me, WHOLE) for k, stock in stocks.items()}
    for k in plan.divided_stages & (stocks.keys() - {k for k, of in sizes.items() if of}):
        sources[k], pieces[k] = tuple(pools[k]), Pieces(WHOLE, dict.fromkeys(pools[k], WHOLE))
    return sources, {k: one for k, one in pieces.items() if one is not None}


def sound_limit(holdings: Mapping[int, Holding]) -> int | None:
    """The newest step whose state counts, as far as these members know; None if none doubts a state."""
    return min((h.sound for h in holdings.values() if h.sound >= 0), default=None)


def _rolls_to(top: Key, holdings: Mapping[int, Holding]) -> _Rolls:
    """Members that are one decision behind this position. Rolling forward needs the records of that decision; a
    snapshot may lack them."""
    records = next((h.records for _, h in sorted(holdings.items()) if h.position == top and h.records), {})
    before = {before for _, before in _gathered_by(top, holdings)}
    behind = {i: h for i, h in sorted(holdings.items()) if records and _one_behind(top, h, before)}
    return _Rolls(top, records, {i: _held_at(top, h) for i, h in behind.items()})


def _gathered_by(position: Key, holdings: Mapping[int, Holding]) -> set[tuple[str, str]]:
    """What members at this position have gathered: up to it, and up to the gather before it."""
    return {h.gathered for h in holdings.values() if h.position == position and h.records}


def _one_behind(top: Key, holding: Holding, gathered: Collection[str]) -> bool:
    """Whether it takes one decision to get to the top, where members had gathered this before that decision."""
    at = holding.position
    by_gather = at.step == top.step and at.seq + 1 == top.seq and holding.gathered[0] in gathered
    by_update = top.seq == 0 and at.step + 1 == top.step and holding.gradient_step == top.step
    return by_gather or by_update


def _held_at(top: Key, holding: Holding) -> dict[int, Extents]:
    """The blocks that a member has at the top, or will have once it has rolled forward, by stage."""
    live = dict(holding.stages)
    if holding.position.step == top.step:
        return live
    return {k: blocks for k, blocks in holding.gradients.items() if not less(live.get(k, NONE), blocks)}


def unaware(holdings: Mapping[int, Holding], number: int) -> set[int]:
    """Members that do not know yet that all repeat this step, because a lane of it gave different results. The
    others have dropped their results."""
    aware = {i for i, holding in holdings.items() if holding.doubt.step == number}
    return holdings.keys() - aware if aware else set()


def _rerun(
    plan: Plan, holdings: Mapping[int, Holding], wants: Mapping[int, Sources], target: Key, back: bool
) -> frozenset[int]:
    if unaware(holdings, target.step + 1):
        return frozenset(range(plan.lanes))
    lanes: set[int] = set()
    for i, holding in holdings.items():
        stays = holding.position == target if back else holding.position.step == target.step
        fresh = not stays or any(holding.live(k) for k in wants.get(i, {}))
        mine = {lane for stage in plan.stages_of(i) for lane in plan.lanes_of(i, stage)}
        lanes |= mine if fresh else mine & set(holding.lacking)
    return frozenset(lanes)


# ---- going to a step that all stages have


def _in_memory(step: int, holdings: Mapping[int, Holding], stage: int, rolls: _Rolls) -> _Stock:
    """Members' blocks of the stage's state of the step: live (once they have rolled forward) or as a snapshot."""
    return _stock(step, {i: _has(step, stage, h) | rolls.has(i, step, stage) for i, h in holdings.items()}, holdings)


def _has(step: int, stage: int, holding: Holding) -> Extents:
    """The member's blocks of it, live or kept."""
    live = holding.live(stage) if holding.position.step == step else NONE
    kept = holding.kept(stage, step)
    return live | kept if live.fits(kept) else live


def _available(plan: Plan, holdings: Mapping[int, Holding], step: int, rolls: _Rolls) -> bool:
    return step == 0 or all(
        _in_memory(step, holdings, stage, rolls).there
        or all(step in holdings[s.worker_id].disk for s in plan.pool(stage) if s.worker_id in holdings)
        for stage in range(plan.stages)
    )


def _newest(plan: Plan, holdings: Mapping[int, Holding], limit: int | None) -> int:
    """The newest step that every stage has, up to the limit if there is one: then no member rolls forward."""
    steps = {0}
    for holding in holdings.values():
        kept = (step for _, step in holding.snapshots)
        steps |= {holding.position.step, *kept, *holding.disk}
    steps = steps if limit is None else {step for step in steps if step <= limit}
    return next(
        step
        for step in sorted(steps, reverse=True)
        if _available(plan, holdings, step, _rolls_to(Key(step, 0), holdings) if limit is None else _NOBODY)
    )


def _go_to(plan: Plan, holdings: Mapping[int, Holding], step: int, *, rolling: bool = True) -> Settlement:
    target = Key(step, 0)
    rolls = _rolls_to(target, holdings) if rolling else _NOBODY
    rolls = rolls if rolls.held else _NOBODY
    stocks = {stage: _in_memory(step, holdings, stage, rolls) for stage in range(plan.stages)}
    wants: dict[int, Sources] = {}
    for i, holding in sorted(holdings.items()):
        seats = plan.stages_of(i)
        live = holding.position == target
        here = {k: rolls.has(i, step, k) or (holding.live(k) if live else NONE) for k in seats}
        shares = {k: stocks[k].share(plan, i, k) for k in seats}
        stands = all(not less(here[k], shares[k]) and (step > 0 or i in stocks[k].held) for k in seats)
        if not stands:
            wants[i] = {k: _first(i, stocks[k].donors(i, shares[k])) for k in seats}
    return _settlement(plan, holdings, wants, stocks, rolls, target, back=True)


def _first(worker_id: int, sources: tuple[int, ...]) -> tuple[int, ...]:
    """The sources, with the worker itself in front."""
    if worker_id not in sources:
        return sources
    return (worker_id, *(i for i in sources if i != worker_id))
