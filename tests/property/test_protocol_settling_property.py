"""Settling with parts of stages, lost or never had, against a dumb oracle that knows sets of single blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.base.extents import WHOLE, Extents
from everstep.base.plan import Member, Plan, Seat, Shard
from everstep.protocol.settling import Settlement, settle
from everstep.protocol.step_types import Holding, Key, Record
from sampling import examples

OF = (("model", 2), ("exp_avg", 2))
ALL = frozenset(range(4))
STAGES, STEPS = (0, 1), (0, 1, 2)

Blocks = frozenset[int]


def plan_of(n: int, dealt: list[int]) -> Plan:
    """Worker i has a seat in stage dealt[i], and the first two in both if a stage would have nobody."""
    wanted = {(i, stage) for i, stage in enumerate(dealt)} | {(k % n, k) for k in STAGES}
    firsts = {k: min(i for i, stage in wanted if stage == k) for k in STAGES}
    seats = tuple(
        Seat(i, k, "active" if firsts[k] == i else "standby", (0, 1) if firsts[k] == i else ())
        for i, k in sorted(wanted, key=lambda one: (one[1], one[0]))
    )
    return Plan(3, "because", tuple(Member(i, 0, "host") for i in range(n)), seats, 2, stages=2)


def extents(blocks: Blocks) -> Extents:
    return Extents.numbered(OF, blocks)


def numbers(part: Extents) -> Blocks:
    return frozenset(k for lo, hi in part.spans(OF) for k in range(lo, hi))


SOME = st.frozensets(st.sampled_from(sorted(ALL)))
LIVE = st.sampled_from([ALL, ALL, ALL, frozenset()]) | SOME


POSITIONS = st.sampled_from([Key(2, 0), Key(2, 0), Key(2, 1), Key(1, 0), Key(0, 0)])


@st.composite
def members(draw):
    at = draw(POSITIONS)
    live: dict[int, Blocks] = {k: draw(LIVE) for k in STAGES}
    kept = {(k, s): draw(SOME | st.just(ALL)) for k in STAGES for s in STEPS[1:] if draw(st.integers(0, 3)) == 0}
    gradients = {k: draw(st.sampled_from([blocks, blocks, frozenset({0, 3})])) for k, blocks in live.items() if blocks}
    rolls = draw(st.booleans()) and at.step < 2 and bool(gradients)
    return Holding(
        position=at,
        records={9: Record(0, b"")} if at.step else {},
        gradient_step=at.step + 1 if rolls else 0,
        digest="same" if at.step == 0 else "",
        stages={k: extents(blocks) for k, blocks in live.items() if blocks},
        gradients={k: extents(blocks) for k, blocks in gradients.items()},
        snapshots={key: extents(blocks) for key, blocks in kept.items() if blocks},
        disk=(1,) if draw(st.integers(0, 5)) == 0 else (),
    )


@st.composite
def cases(draw):
    n = draw(st.integers(1, 4))
    plan = plan_of(n, [draw(st.sampled_from(STAGES)) for _ in range(n)])
    held = {seat: draw(st.just(ALL) | SOME) for seat in plan.seats}
    shards = (Shard(s.worker_id, s.stage, extents(blocks)) for s, blocks in held.items() if blocks != ALL)
    plan = replace(plan, shards=tuple(shards))
    return plan, {i: draw(members()) for i in range(n)}


def taken(holding: Holding, stage: int) -> Blocks:
    """Blocks that a member has after one more decision."""
    live = numbers(holding.live(stage))
    gradient = numbers(holding.gradients.get(stage, Extents()))
    return gradient if gradient <= live else frozenset()


def has(holding: Holding, stage: int, step: int, *, rolled: bool = False) -> Blocks:
    """Blocks that a member has of a stage at the beginning of a step; rolled: with one more decision."""
    found: Blocks = frozenset()
    if holding.position.step == step:
        found |= numbers(holding.live(stage))
    if rolled:
        found |= taken(holding, stage)
    return found | numbers(holding.kept(stage, step))


def together(plan: Plan, holdings: Mapping[int, Holding], step: int) -> bool:
    """Whether every stage is there at a step, in parts or whole, or on disk for all that need it."""
    known = any(h.position == Key(step, 0) and h.records for h in holdings.values())  # the records of its decision
    for stage in STAGES:
        rolled = {i: known and h.gradient_step == step and h.position.step + 1 == step for i, h in holdings.items()}
        found = frozenset().union(*(has(h, stage, step, rolled=rolled[i]) for i, h in holdings.items()))
        pool = [s.worker_id for s in plan.pool(stage)]
        if found != ALL and not all(step in holdings[i].disk for i in pool):
            return False
    return True


def own(settled: Settlement, holdings: Mapping[int, Holding], worker_id: int, stage: int) -> Blocks:
    rolled = worker_id in settled.rolls and settled.target.seq == 0
    if not settled.back:
        holding = holdings[worker_id]
        live = holding.position.step == settled.target.step
        return has(replace(holding, snapshots={}), stage, settled.target.step, rolled=rolled and not live)
    return has(holdings[worker_id], stage, settled.target.step, rolled=rolled)


@settings(max_examples=examples(400))
@given(cases())
def test_everybody_gets_what_it_lacks_of_whoever_has_it_and_nothing_else(case):
    plan, holdings = case
    settled = settle(plan, holdings)
    for i in holdings:
        for stage in plan.stages_of(i):
            mine = own(settled, holdings, i, stage)
            sources = settled.wants.get(i, {}).get(stage)
            pieces, share = settled.pieces.get(i, {}).get(stage), numbers(plan.shard(i, stage).state)
            if sources is None:
                assert mine >= share, "who gets nothing has all that it is to have"
            elif not sources:
                assert settled.back, "disk, or anew"
                assert settled.target.step == 0 or settled.target.step in holdings[i].disk
            elif sources[0] == i:
                assert mine >= share and pieces is None
            else:
                donors = [j for j in sources if j != i]
                given = {j: own(settled, holdings, j, stage) for j in donors}
                missing = ALL if pieces is None else numbers(pieces.missing)
                assert missing <= frozenset().union(*given.values()), "it can be had"
                if pieces is not None:
                    assert missing == share - mine, "what is one's own is not asked for"
                    for j in donors:
                        assert numbers(pieces.given.get(j, WHOLE)) <= given[j], "nobody is asked for what it lacks"
                        assert given[j] & missing
                assert all(i in settled.serves[j] for j in donors)


@settings(max_examples=examples(400))
@given(cases())
def test_nobody_goes_back_further_than_it_must(case):
    plan, holdings = case
    settled = settle(plan, holdings)
    newest = max(step for step in STEPS if step == 0 or together(plan, holdings, step))
    assert settled.target.step == newest
    assert settle(plan, holdings) == settled


@settings(max_examples=examples(200))
@given(cases())
def test_with_whole_stages_there_is_nothing_in_pieces(case):
    plan, holdings = case
    whole: dict[int, Holding] = {}
    for i, h in holdings.items():
        stages, snapshots = ({k: part for k, part in of.items() if part.whole} for of in (h.stages, h.snapshots))
        whole[i] = replace(h, stages=stages, snapshots=snapshots, gradients=stages)
    assert settle(replace(plan, shards=()), whole).pieces == {}
